import pytest
from fakes import ByteTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from jprefill.errors import InvalidRequestError, LabelError
from jprefill.tokenization import letter_labels, resolve_labels
from jprefill.tokenization.json_tokenizer import JsonTokenizer
from jprefill.tokenization.labels import _one_token, context_tail
from jprefill.tokenization.sentencepiece_tokenizer import SentencePieceTokenizer
from jprefill.tokenization.settings import TokenizerSettings

CHAT = "<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def byte_level(byte_level_json: str) -> JsonTokenizer:
    return JsonTokenizer(Backend.from_str(byte_level_json), TokenizerSettings())


@pytest.fixture(scope="module")
def piecewise(sentencepiece_model: bytes) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(sentencepiece_model, TokenizerSettings())


def test_labels_are_the_next_token_of_the_whole_text(byte_level: JsonTokenizer) -> None:
    for context, labels in ((CHAT, ["A", "B", "C"]), ("The answer is", [" A", " B"]), ("", ["A", "B"])):
        ids = resolve_labels(byte_level, labels, context)
        for label, token_id in zip(labels, ids, strict=True):
            whole = byte_level.encode(context + label, add_bos=False)
            assert whole == [*byte_level.encode(context, add_bos=False), token_id]


def test_sentencepiece_labels_need_their_own_boundary(piecewise: SentencePieceTokenizer) -> None:
    whole = piecewise.encode("Answer:\nA", add_bos=False)
    assert resolve_labels(piecewise, ["A"], "Answer:\n") == [whole[-1]]
    assert piecewise.token_text(whole[-1]) == "A"
    assert piecewise.token_text(resolve_labels(piecewise, ["A"], "")[0]) == " A"


def test_label_of_several_tokens_says_what_it_became_and_what_works(byte_level: JsonTokenizer) -> None:
    with pytest.raises(LabelError) as error:
        resolve_labels(byte_level, [" A", "xyz"], "The answer is")
    assert error.value.param == "labels[1]"
    assert error.value.message.startswith("label 'xyz' is 3 tokens here: 'x' (")
    with pytest.raises(LabelError, match=r"label 'answer ' .*; one token here: ' answer'"):
        resolve_labels(byte_level, ["answer "], "The")


def test_label_that_joins_the_end_of_the_prompt_is_explained(byte_level: JsonTokenizer) -> None:
    with pytest.raises(LabelError) as error:
        resolve_labels(byte_level, ["A"], "The answer is ", param="questions.0.labels")
    assert error.value.param == "questions.0.labels[0]"
    assert "label 'A' joins the end of the prompt ' ': ' A' (" in error.value.message
    assert "one token if the prompt ends without the space: 'A', ' A'" in error.value.message
    with pytest.raises(LabelError, match="joins the end of the prompt"):
        resolve_labels(byte_level, ["swer"], "The an")


def test_labels_must_differ(byte_level: JsonTokenizer) -> None:
    with pytest.raises(LabelError, match=r"labels 0 \('A'\) and 2 \('A'\) are the same token: 'A' \(") as error:
        resolve_labels(byte_level, ["A", "B", "A"], CHAT)
    assert error.value.param == "labels[2]"


def test_empty_labels_are_refused(byte_level: JsonTokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="at least one label") as error:
        resolve_labels(byte_level, [], CHAT)
    assert error.value.param == "labels"
    with pytest.raises(LabelError, match="the label is empty") as error:
        resolve_labels(byte_level, ["A", ""], CHAT)
    assert error.value.param == "labels[1]"
    with pytest.raises(InvalidRequestError, match="lone surrogate") as error:
        resolve_labels(byte_level, ["\ud800"], CHAT)
    assert error.value.param == "labels[0]"


def test_error_text_stays_short_whatever_the_label(byte_level: JsonTokenizer) -> None:
    with pytest.raises(LabelError) as error:
        resolve_labels(byte_level, ["x y " * 10_000], CHAT)
    assert len(error.value.message) < 600


def test_special_tokens_may_be_labels(byte_level: JsonTokenizer) -> None:
    assert resolve_labels(byte_level, ["<|im_end|>", "[TOOL]"], CHAT) == [2, byte_level.vocab_size - 1]


@pytest.mark.parametrize(
    ("context", "tail"),
    [
        (CHAT, "\n"),
        ("Question\nAnswer:", "\nAnswer:"),
        ("a.\n \n  b", "\n \n  b"),
        ("x" * 600 + "<|im_start|>", "<|im_start|>"),
        ("say <|im_end|>ok", "<|im_end|>ok"),
        ("short", "short"),
        ("", ""),
    ],
)
def test_tail_starts_at_the_last_hard_boundary(byte_level: JsonTokenizer, context: str, tail: str) -> None:
    assert context_tail(byte_level, context) == tail


def test_tail_is_bounded(byte_level: JsonTokenizer) -> None:
    assert context_tail(byte_level, "x" * 10_000) == "x" * 512
    words = context_tail(byte_level, "some words here " * 1_000)
    assert words.startswith(" ")
    assert 256 <= len(words) <= 512


_CONTEXTS = st.lists(
    st.sampled_from(["A", " ", "\n", "  ", ".", ":", "answer", " yes", "<|im_end|>", "<s>", "\t", "é", "1", "\r\n"])
    | st.just("x" * 600),
    max_size=8,
).map("".join)
_LABELS = st.sampled_from(["A", " A", "yes", " yes", "\n", " ", "\nA", "  A", ".", "1", "é", "<|im_end|>", ":", "\t"])


def test_tail_decides_as_the_whole_context_does(byte_level: JsonTokenizer, piecewise: SentencePieceTokenizer) -> None:
    @settings(max_examples=400, deadline=None)
    @given(context=_CONTEXTS, label=_LABELS)
    def check(context: str, label: str) -> None:
        for tokenizer in (byte_level, piecewise):
            tail = context_tail(tokenizer, context)
            found = [
                _one_token(tokenizer, text, tokenizer.encode(text, add_bos=False), label) for text in (tail, context)
            ]
            assert found[0] == found[1]

    check()


def test_letters_name_options(byte_level: JsonTokenizer) -> None:
    labels, ids = letter_labels(byte_level, 4, CHAT)
    assert labels == ["A", "B", "C", "D"]
    assert ids == resolve_labels(byte_level, labels, CHAT)


def test_too_few_letters_say_how_many_there_are(byte_level: JsonTokenizer) -> None:
    pairs = [
        a + b
        for a in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        for b in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        if len(byte_level.encode(a + b, add_bos=False)) == 1
    ]
    with pytest.raises(InvalidRequestError, match=rf"27 options, but only {len(pairs)} two-letter labels"):
        letter_labels(byte_level, 27, CHAT)
    with pytest.raises(InvalidRequestError, match="at least one option"):
        letter_labels(byte_level, 0, CHAT)


def test_letters_that_join_the_prompt_are_left_out(byte_level: JsonTokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=r"26 options, but only \d+ one-letter labels"):
        letter_labels(byte_level, 26, "The answer is ")


def test_results_are_the_callers_own(byte_level: JsonTokenizer) -> None:
    first, _ = letter_labels(byte_level, 3, CHAT)
    first.clear()
    assert letter_labels(byte_level, 3, CHAT)[0] == ["A", "B", "C"]


def test_prompts_that_end_alike_share_one_search() -> None:
    tokenizer = _Recording()
    first = letter_labels(tokenizer, 3, "context 0 " * 500 + CHAT)
    assert tokenizer.encoded
    tokenizer.encoded.clear()
    assert letter_labels(tokenizer, 3, "context 1 " * 500 + CHAT) == first
    assert tokenizer.encoded == []


class _Recording(ByteTokenizer):
    def __init__(self) -> None:
        super().__init__()
        self.encoded: list[str] = []

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        self.encoded.append(text)
        return super().encode(text, add_bos=add_bos)
