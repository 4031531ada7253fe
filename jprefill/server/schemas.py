"""Wire schemas: what clients send. Types and unknown fields are checked here, meaning in `jprefill.tasks`."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from jprefill.server.salts import SALT_PATTERN, SALT_RULE

# The rule is only documented here: `check_salts` says it in words, where a regex in a message would not help.
_Salt = Annotated[str, Meta(description=SALT_RULE, extra_json_schema={"pattern": SALT_PATTERN})]
_Priority = Annotated[int, Meta(description="The lower number goes first; 0 is usual.", ge=-(2**31), le=2**31 - 1)]


def is_sent(raw: Raw | UnsetType) -> bool:
    """Whether a field that is not looked into was there and is not null."""
    return not isinstance(raw, UnsetType) and bytes(raw) != b"null"


class PromptCacheOptions(Struct, forbid_unknown_fields=True):
    """OpenAI's cache hints. `explicit` without a breakpoint in the input leaves the prefix store alone.

    Any `ttl` is met: what is stored leaves when room is needed, not by the clock.
    """

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class DecisionsBody(Struct, forbid_unknown_fields=True):
    """`POST /v1/decisions`.

    `input` is a text or user messages with `input_text` parts. A question has a `type` (`predicate`,
    `choice`, `score`), `instructions`, an optional `name`, and `choices` or `levels`. Stored prefixes are shared only
    by requests with the same `cache_salt` and `prompt_cache_key`; with a key, the input's is kept.
    """

    model: str
    input: str | list[dict[str, Any]]
    questions: list[dict[str, Any]]
    prompt_cache_key: _Salt | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    safety_identifier: Annotated[str, Meta(max_length=128)] | None = None
    cache_salt: _Salt | None = None
    priority: _Priority = 0
    joint: bool | None = None
    prompt_format_version: int | None = None
    return_prompt_token_ids: bool | None = None


class ScoreBody(Struct):
    """`POST /v1/score`, in SGLang's shape; `labels` (texts) may stand in for `label_token_ids`.

    Stored prefixes are shared only by requests with the same `cache_salt` and `prompt_cache_key`; with a key, the
    query's is kept. The fields after it belong to other products and are refused by name when they are sent.
    """

    model: str | None = None
    query: str | list[int] | None = None
    items: str | list[str | list[int]] | None = None
    label_token_ids: list[int | list[int]] | None = None
    labels: list[str] | None = None
    apply_softmax: bool | None = None
    temperature: float | None = None
    item_first: bool | None = None
    return_token_logprobs: bool | None = None
    cache_salt: _Salt | None = None
    prompt_cache_key: _Salt | None = None
    priority: _Priority = 0
    score_extraction_token: Raw | UnsetType = UNSET
    queries: Raw | UnsetType = UNSET
    documents: Raw | UnsetType = UNSET
    text_1: Raw | UnsetType = UNSET
    text_2: Raw | UnsetType = UNSET
    data_1: Raw | UnsetType = UNSET
    data_2: Raw | UnsetType = UNSET

    def sent(self, *names: str) -> str | None:
        """The first of these fields that was sent and is not null."""
        return next((name for name in names if is_sent(getattr(self, name))), None)


class TokenizeBody(Struct):
    """`POST /tokenize`, in vLLM's shape."""

    prompt: str | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Raw | UnsetType = UNSET


class DetokenizeBody(Struct):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


BODIES = (DecisionsBody, ScoreBody, TokenizeBody, DetokenizeBody)
