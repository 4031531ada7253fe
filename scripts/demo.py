"""Starts a server, asks it three questions over HTTP and shows the answers: `make demo`."""

import sys
import time
from pathlib import Path
from typing import Any

import httpx
from local_server import LocalServer, ServerError
from rich.console import Console
from rich.table import Table

PROFILE = Path(__file__).parent / "demo" / "profile.txt"
SPAM = "You have won 1,000,000 euros! Send us your bank details before midnight to claim your prize."
NEWS = "The telescope has found water vapour in the atmosphere of a planet that circles a distant star."
TOPICS = {
    "science": "nature, space, research",
    "sports": "matches and players",
    "cooking": "food and recipes",
}
POSTS = [
    "Three weeks by bicycle through Slovenia, with a map of every day.",
    "A workshop visit: how old touring wheels are rebuilt, with drawings.",
    "Sourdough with sixty percent rye, explained hour by hour.",
    "Transfer deadline day: all football rumours, live.",
    "Five coins that will make you rich before Friday.",
]
HINT = """
Why so unsure? The demo model has 135 million parameters, too few to follow lettered options, and
a low label mass says so. Larger models of the Llama family answer the same requests better."""

console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)


def main() -> int:
    """Runs the demo and returns its exit status."""
    start_s = time.monotonic()
    console.print(
        "Starting `jprefill serve`: it loads the model and compiles (slow the first time only).",
        soft_wrap=True,
    )
    try:
        with (
            LocalServer() as server,
            httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client,
        ):
            ready_s = time.monotonic() - start_s
            show_spam(client)
            show_topic(client)
            console.print(HINT, style="dim", soft_wrap=True)
            show_posts(client)
    except (ServerError, httpx.HTTPError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    total_s = time.monotonic() - start_s
    console.print(f"\nAll of it took {total_s:.1f} s, {ready_s:.1f} s of them until the server was ready.")
    return 0


def show_spam(client: httpx.Client) -> None:
    """A yes/no question about one message."""
    question = {"type": "predicate", "instructions": "The message is spam."}
    answer, costs = decide(client, SPAM, question)
    table = new_table("1. Is it spam?", SPAM, "POST /v1/decisions, predicate", "answer", "probability")
    probability = answer["probability"]
    table.add_row("true", f"{probability:.3f}")
    table.add_row("false", f"{1 - probability:.3f}")
    show(table, f"label mass {answer['label_mass']:.3f} · {costs}")


def show_topic(client: httpx.Client) -> None:
    """One of three."""
    choices = [{"value": value, "description": text} for value, text in TOPICS.items()]
    question = {"type": "choice", "instructions": "What is the text about?", "choices": choices}
    answer, costs = decide(client, NEWS, question)
    table = new_table("2. Which topic?", NEWS, "POST /v1/decisions, choice", "answer", "probability")
    for option in answer["probabilities"]:
        table.add_row(option["value"], f"{option['probability']:.3f}")
    show(table, f"label mass {answer['label_mass']:.3f} · {costs}")


def show_posts(client: httpx.Client) -> None:
    """Five posts for one reader: the profile is computed once and shared by all five."""
    body = {
        "query": PROFILE.read_text(encoding="utf-8") + "\n",
        "items": [f"Post: {post}\nRead to the end:" for post in POSTS],
        "labels": [" Yes", " No"],
        "apply_softmax": True,
    }
    reply = ask(client, "/v1/score", body)
    answer = reply.json()
    rows = zip(POSTS, answer["scores"], answer["label_mass"], strict=True)
    subtitle = "Her profile and what she read before: scripts/demo/profile.txt"
    table = new_table(
        "3. Which post for Marta?", subtitle, "POST /v1/score", "post", "Yes", "No", "label mass"
    )
    for post, (yes, no), label_mass in sorted(rows, key=lambda row: -row[1][0]):
        table.add_row(post, f"{yes:.3f}", f"{no:.3f}", f"{label_mass:.3f}")
    show(table, describe_costs(reply))


def decide(client: httpx.Client, text: str, question: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The answer to one question about `text`, and what it cost."""
    reply = ask(
        client, "/v1/decisions", {"model": served_model(client), "input": text, "questions": [question]}
    )
    return reply.json()["answers"][0], describe_costs(reply)


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    """Posts and insists on 200; the error carries the server's own words."""
    reply = client.post(path, json=body)
    if reply.is_error:
        raise httpx.HTTPStatusError(
            f"POST {path}: {reply.status_code} {reply.text}", request=reply.request, response=reply
        )
    return reply


def served_model(client: httpx.Client) -> str:
    """The name under which the server offers its model."""
    return client.get("/v1/models").raise_for_status().json()["data"][0]["id"]


def describe_costs(reply: httpx.Response) -> str:
    """Tokens and milliseconds, from the response headers that every answer carries."""
    names = ("x-prompt-tokens", "x-cached-tokens", "x-queue-time", "x-inference-time")
    num_tokens, num_cached, queue_ms, device_ms = (float(reply.headers[name]) for name in names)
    return (
        f"prompt tokens {num_tokens:,.0f}, of them cached {num_cached:,.0f} · "
        f"queue {queue_ms:.1f} ms, device {device_ms:.1f} ms"
    )


def new_table(title: str, text: str, route: str, *columns: str) -> Table:
    """An empty table; the first column is text, the others are numbers."""
    console.print(f"\n[bold]{title}[/]  [dim]{route}[/]\n[italic]{text}[/]", soft_wrap=True)
    table = Table(show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right", ratio=None)
    return table


def show(table: Table, costs: str) -> None:
    """The table and one line below it."""
    console.print(table)
    console.print(costs, style="cyan", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
