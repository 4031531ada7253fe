"""Starts a server, asks it real questions over HTTP and shows the answers: `make demo`."""

import sys
import time
from pathlib import Path
from typing import Any

import httpx
from local_server import LocalServer, ServerError
from rich.console import Console
from rich.table import Table

PROFILE = Path(__file__).parent / "demo" / "profile.txt"
MESSAGES = [
    "WINNER!!! Click this link now to claim your free prize of 1,000,000 euros!",
    "Hi Anna, shall we move our lunch to Thursday at noon? Best, Tom",
]
SPAM_EXAMPLES = """Message: Lunch at noon tomorrow?
Is this message spam? Answer: No

Message: Win a free cruise now, click this link!!!
Is this message spam? Answer: Yes

Message: Please find the invoice for March attached.
Is this message spam? Answer: No

Message: Hot singles in your area, reply with your card number.
Is this message spam? Answer: Yes

"""
NEWS = "The telescope has found water vapour in the atmosphere of a planet that circles a distant star."
TOPICS = {
    "science": "nature, space, research",
    "sports": "matches and players",
    "cooking": "food and recipes",
}
TOPIC_EXAMPLES = """Text: Simmer the onions until golden, then add stock.
Topic: cooking

Text: The striker scored twice in the second half.
Topic: sports

Text: Researchers measured how light bends near a black hole.
Topic: science

"""
POSTS = [
    "Three weeks by bicycle through Slovenia, with a map of every day.",
    "A workshop visit: how old touring wheels are rebuilt, with drawings.",
    "Sourdough with sixty percent rye, explained hour by hour.",
    "Transfer deadline day: all football rumours, live.",
    "Five coins that will make you rich before Friday.",
]
HINT = """Less sure than before? A model of 135 million parameters is too small to follow lettered options, and
the label mass says so: it is how much of the model's probability fell on the labels at all."""

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
            show_posts(client)
            show_decision(client)
    except (ServerError, httpx.HTTPError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    total_s = time.monotonic() - start_s
    console.print(f"\nAll of it took {total_s:.1f} s, {ready_s:.1f} s of them until the server was ready.")
    return 0


def show_spam(client: httpx.Client) -> None:
    """Yes or no, for two messages behind the same examples."""
    items = [f"Message: {message}\nIs this message spam? Answer:" for message in MESSAGES]
    reply = score(client, SPAM_EXAMPLES, items, ["Yes", "No"])
    show_scores("1. Is it spam?", "Four examples, then the message", "message", MESSAGES, ["Yes", "No"], reply)


def show_topic(client: httpx.Client) -> None:
    """One of three."""
    reply = score(client, TOPIC_EXAMPLES, [f"Text: {NEWS}\nTopic:"], list(TOPICS))
    show_scores("2. Which topic?", "Three examples, then the text", "text", [NEWS], list(TOPICS), reply)


def show_decision(client: httpx.Client) -> None:
    """The topic once more, as a question in OpenAI's shape: no examples, lettered options."""
    choices = [{"value": value, "description": text} for value, text in TOPICS.items()]
    question = {"type": "choice", "instructions": "What is the text about?", "choices": choices}
    body = {"model": served_model(client), "input": NEWS, "questions": [question]}
    reply = ask(client, "/v1/decisions", body)
    answer = reply.json()["answers"][0]
    table = new_table("4. The topic, without examples", NEWS, "POST /v1/decisions", "option", "probability")
    for option in answer["probabilities"]:
        table.add_row(option["value"], f"{option['probability']:.3f}")
    show(table, f"label mass {answer['label_mass']:.3f} · {describe_costs(reply)}")
    console.print(HINT, style="dim", soft_wrap=True)


def show_posts(client: httpx.Client) -> None:
    """Five posts for one reader: the profile is computed once and shared by all five."""
    items = [f"Post: {post}\nRead to the end:" for post in POSTS]
    reply = score(client, PROFILE.read_text(encoding="utf-8") + "\n", items, ["Yes", "No"])
    subtitle = "Her profile and what she read before: scripts/demo/profile.txt"
    show_scores("3. Which post for Marta?", subtitle, "post", POSTS, ["Yes", "No"], reply)


def score(client: httpx.Client, query: str, items: list[str], labels: list[str]) -> httpx.Response:
    """Label probabilities after `query` and each item; the labels follow a colon, so they carry a space."""
    labels = [f" {label}" for label in labels]
    body = {"query": query, "items": items, "labels": labels, "apply_softmax": True}
    return ask(client, "/v1/score", body)


def show_scores(
    title: str, subtitle: str, what: str, texts: list[str], labels: list[str], reply: httpx.Response
) -> None:
    """One row an item, the most probable first label on top."""
    answer = reply.json()
    table = new_table(title, subtitle, "POST /v1/score", what, *labels, "label mass")
    rows = zip(texts, answer["scores"], answer["label_mass"], strict=True)
    for text, probabilities, label_mass in sorted(rows, key=lambda row: -row[1][0]):
        table.add_row(text, *(f"{p:.3f}" for p in (*probabilities, label_mass)))
    show(table, describe_costs(reply))


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
