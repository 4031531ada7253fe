"""The texts of the comparison: short decision prompts of our own, and prose that every CPython carries."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

YES_NO = ("Yes", "No")
LETTERS = ("A", "B", "C", "D")
TOPICS = ("technology", "business", "science", "health", "travel", "food", "education", "weather")

TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "spam": ("Is the following message spam? Answer Yes or No.\n\n{text}", YES_NO),
    "topic": (
        "Which topic fits the text best: " + ", ".join(TOPICS) + "? Answer with one word.\n\n{text}",
        TOPICS,
    ),
    "sentiment": (
        "Is the customer's opinion positive, negative or neutral? Answer with one word.\n\nReview: {text}",
        ("positive", "negative", "neutral"),
    ),
    "credit": (
        "You check loan applications. Should this one be granted? Answer Yes or No.\n\n{text}",
        YES_NO,
    ),
    "risk": ("How high is the risk in this case: low, medium or high?\n\n{text}", ("low", "medium", "high")),
    "rerank": ("Does the document answer the query? Answer Yes or No.\n\n{text}", YES_NO),
    "mmlu": ("Answer the question with the letter of the right option.\n\n{text}\n\nAnswer:", LETTERS),
}
PROSE_QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{text}\n\nDoes the text above describe how exceptions are handled? Answer Yes or No.", YES_NO),
    (
        "Read this text.\n\n{text}\n\nWhat is it mainly about?\nA. Statements\nB. Data types\n"
        "C. Names and scopes\nD. Debugging\nAnswer with one letter.",
        LETTERS,
    ),
    ("Is the text below useful to somebody who learns to program? Answer Yes or No.\n\n{text}", YES_NO),
    ("How hard is this text to read: low, medium or high difficulty?\n\n{text}", ("low", "medium", "high")),
)


@dataclass(frozen=True)
class Text:
    """One prompt before tokenising.

    Attributes:
      user: the user's turn, or the whole prompt where `is_chat` is False.
      labels: allowed answers, each one token.
      continuation: text whose log-probability is read after the prompt; empty: none.
    """

    name: str
    user: str
    labels: tuple[str, ...]
    continuation: str = ""
    is_chat: bool = True


def short_texts(path: Path) -> list[Text]:
    """Hand-written prompts, one JSON object a line: `task`, `text`, `continuation` where one is scored."""
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        wording, labels = TASKS[row["task"]]
        texts.append(
            Text(
                name=f"{row['task']}-{number:02d}",
                user=wording.format(text=row["text"]),
                labels=labels,
                continuation=row.get("continuation", ""),
            )
        )
    return texts


def prose() -> str:
    """Python's own reference manual as it ships inside CPython, about 450,000 characters of English."""
    parts = (re.sub(r"\n{3,}", "\n\n", text).strip() for _, text in sorted(topics.items()))
    return "\n\n".join(parts)


def prose_texts(words: list[str], word_counts: list[int]) -> Iterator[Text]:
    """Wraps one window of prose after another in a question; every fourth is plain text to be continued.

    Args:
      words: the prose, cut so that joining gives it back.
      word_counts: length of each window.
    """
    start = 0
    for number, count in enumerate(word_counts):
        if start + count + 30 > len(words):
            start = number  # wrap around, to other windows than the first time
        window = "".join(words[start : start + count]).strip()
        name = f"prose-{number:03d}"
        if number % 4 == 3:
            continuation = "".join(words[start + count : start + count + 24]).rstrip()
            yield Text(name, window, (" the", " a", " of", " and"), continuation, is_chat=False)
        else:
            question, labels = PROSE_QUESTIONS[(number // 4 + number) % len(PROSE_QUESTIONS)]
            yield Text(name, question.format(text=window), labels)
        start += count
