"""Sharing the work of tokenising never changes a token: compared with tokenising every text as a whole."""

import io
import random

import pytest
import sentencepiece
from fakes import ByteTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jprefill.tasks.encoding import MIN_SHARED_CHARS, encode, encode_all, num_settled_tokens
from jprefill.tokenization.json_tokenizer import JsonTokenizer
from jprefill.tokenization.settings import TokenizerSettings

TEXT = "the parcel of a customer came late again nobody called naïve 日本 12345 don't (see) x=y;"
WORDS = [*TEXT.split(), "\n"]


def some_text(num_chars: int, seed: int = 0, separator: str = " ") -> str:
    draw = random.Random(seed)
    return separator.join(draw.choices(WORDS, k=num_chars // 4))[:num_chars]


def train(model, pre_tokenizer, decoder, alphabet) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train_from_iterator([some_text(20_000)], trainer)
    return tokenizer


def byte_level() -> Tokenizer:
    kind = pre_tokenizers.ByteLevel
    return train(models.BPE(), kind(add_prefix_space=False), decoders.ByteLevel(), kind.alphabet())


def spaces_as_letters() -> Tokenizer:
    """As Llama 2 converts SentencePiece: a space before every text, merges over the text as a whole."""
    tokenizer = train(models.BPE(unk_token=None), pre_tokenizers.Metaspace(), decoders.Metaspace(), [])
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


class SpyTokenizer(JsonTokenizer):
    """Counts the characters that it is given."""

    num_chars = 0

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        self.num_chars += len(text)
        return super().encode(text, add_bos=add_bos)


@pytest.fixture(scope="module", params=[byte_level, spaces_as_letters], ids=lambda make: make.__name__)
def tokenizer(request) -> SpyTokenizer:
    return SpyTokenizer(request.param(), TokenizerSettings(tokens={"bos_token": "<s>"}, adds_bos=True))


def check(tokenizer, texts, add_bos=True) -> None:
    whole = [encode(tokenizer, text, add_bos=add_bos).tolist() for text in texts]
    assert [ids.tolist() for ids in encode_all(tokenizer, texts, add_bos=add_bos)] == whole


@pytest.mark.parametrize("add_bos", [True, False])
def test_long_shared_starts_are_read_twice_and_not_once_per_text(tokenizer, add_bos):
    shared = some_text(16_000)
    texts = [f"{shared} item {i}" for i in range(20)]
    check(tokenizer, texts, add_bos)
    tokenizer.num_chars = 0
    encode_all(tokenizer, texts, add_bos=add_bos)
    assert tokenizer.num_chars < 5 * len(shared)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(MIN_SHARED_CHARS - 50, MIN_SHARED_CHARS + 3000),
    st.sampled_from([" ", "", "\n", "  ", ", "]),
    st.lists(st.text(alphabet="ab 日\n'1,.é<s>", max_size=12), min_size=2, max_size=4),
)
def test_tokens_are_those_of_the_whole_text(tokenizer, num_chars, separator, ends):
    shared = some_text(num_chars, seed=num_chars, separator=separator)
    check(tokenizer, [shared + end for end in ends])


@pytest.mark.parametrize("shared", ["x" * 9000, " " * 9000, "日" * 9000, "a b " * 200 + "x" * 9000, "ab\n" * 3000])
def test_texts_without_words_are_tokenised_as_they_are(tokenizer, shared):
    check(tokenizer, [shared + "a", shared + " b", shared])


def test_a_tokenizer_that_refuses_the_cut_still_gets_the_whole_text():
    cut_sensitive = ByteTokenizer(merges=["r c", "e l", " a", "a "])
    check(cut_sensitive, [some_text(9000) + end for end in ("x", "y", "")])


def test_sentencepiece_models_of_their_own_kind_agree(tmp_path):
    from jprefill.tokenization.sentencepiece_tokenizer import SentencePieceTokenizer

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([some_text(20_000).replace("\n", " ")[i : i + 400] for i in range(0, 20_000, 400)]),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer = SentencePieceTokenizer.from_directory(tmp_path)
    shared = some_text(9000)
    check(tokenizer, [shared + end for end in (" late", "late", "\n", "", " 日本 again")])


# ---- settled tokens: what every text that begins alike has too

ENDS = ["", " late", "late", "7", " 7", "\n", "\n\nQuestion: ", ".", "'s", "日", " x" * 40]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 300),
    st.sampled_from([" ", "", "\n", "  ", ", ", '","']),
    st.sampled_from(ENDS),
    st.text(alphabet="ab 日\n'1,.é<s>", max_size=12),
    st.booleans(),
)
def test_settled_tokens_start_every_text_that_begins_alike(tokenizer, num_chars, separator, end, other, add_bos):
    shared = some_text(num_chars, seed=num_chars, separator=separator)
    ids = encode(tokenizer, shared + end, add_bos=add_bos)
    count = num_settled_tokens(tokenizer, shared + end, ids, len(shared), add_bos=add_bos)
    assert 0 <= count <= len(ids)
    assert encode(tokenizer, shared + other, add_bos=add_bos)[:count].tolist() == ids[:count].tolist()


def test_all_but_the_last_word_is_settled(tokenizer):
    shared = some_text(900) + " the parcel"
    for end in (" late", " late" * 400):  # the cut is confirmed from behind, and from before
        ids = encode(tokenizer, shared + end, add_bos=True)
        head = encode(tokenizer, shared.removesuffix(" parcel"), add_bos=True)
        assert num_settled_tokens(tokenizer, shared + end, ids, len(shared), add_bos=True) == len(head)


def test_counting_settled_tokens_reads_the_shorter_side_only(tokenizer):
    for shared, end in ((some_text(16_000), " late"), ("the parcel came", some_text(16_000))):
        ids = encode(tokenizer, shared + end, add_bos=True)
        tokenizer.num_chars = 0
        assert num_settled_tokens(tokenizer, shared + end, ids, len(shared), add_bos=True) > 0
        assert tokenizer.num_chars < 4000


@pytest.mark.parametrize("shared", ["", "x" * 2000, " ", "\n", "日本" * 500])
def test_a_start_without_a_boundary_settles_nothing(tokenizer, shared):
    ids = encode(tokenizer, shared + "y", add_bos=True)
    assert num_settled_tokens(tokenizer, shared + "y", ids, len(shared), add_bos=True) == 0


def test_a_token_across_the_cut_moves_it_to_the_word_before():
    crossing = ByteTokenizer(merges=["e l"])
    text = "a parcel came late again"
    ids = encode(crossing, text, add_bos=False)
    assert num_settled_tokens(crossing, text, ids, len("a parcel came lat"), add_bos=False) == len("a parcel")
