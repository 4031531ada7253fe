from collections.abc import Callable
from pathlib import Path

import pytest

from jprefill.errors import CheckpointError, InvalidRequestError, UnsupportedFeatureError
from jprefill.tokenization import ChatTemplate, load_tokenizer, sandbox

HELLO = [{"role": "user", "content": "Hello"}]
CHATML = (
    "{% for message in messages %}\n"
    "    {%- if message.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('role: ' ~ message.role) }}{% endif %}\n"
    "{{ bos_token }}{{ message['role'] }}\n"
    "{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "{{ bos_token }}assistant\n"
    "{% endif %}"
)
TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def render(source: str, **kwargs: object) -> str:
    return ChatTemplate(source, TOKENS).render(HELLO, **kwargs)


def test_renders_as_transformers_does() -> None:
    assert render(CHATML) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHello<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'a': '<é&>'}|tojson }}", '{"a": "<é&>"}'),
        ("{{ [1]|tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ strftime_now('%Y')|length }}", "4"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for m in messages %}{{ loop.last }}{{ loop.length }}{{ loop.index }}{% endfor %}", "True11"),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", "role=user;content=Hello;"),
        ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
        ("{% for x in [[1, [2]], [3]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}", "123"),
        ("{% generation %}body{% endgeneration %}", "body"),
        ("{{ 'a' ~ 1 ~ none }}|{{ 'a' * 3 }}", "a1None|aaa"),
        ("{{ '%s-%d'|format('x', 7) }}|{{ '{:>3}'.format('x') }}", "x-7|  x"),
        ("{{ ' x '.strip().upper() }}{{ 'a,b'.split(',')[-1] }}{{ messages[::-1][0].content }}", "XbHello"),
        ("{% set n = namespace(i=0) %}{% for m in [1] %}{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}", "1"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') + f('b') }}", "<a><b>"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join(',') }}", "Hello"),
        ("{{ enable_thinking }}{{ tools is defined }}{{ unk_token }}", "FalseFalse"),
    ],
)  # fmt: skip
def test_templates_find_what_they_are_used_to(source: str, expected: str) -> None:
    assert render(source) == expected


def test_further_variables_reach_the_template() -> None:
    assert render("{{ tools|length }}{{ date }}", tools=[1, 2], date="today") == "2today"
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"


@pytest.mark.parametrize("name", ["bos_token", "raise_exception", "namespace", "unk_token"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is set by the server") as error:
        render("x", **{name: "mine"})
    assert error.value.param == f"chat_template_kwargs.{name}"


def test_thinking_cannot_be_turned_on() -> None:
    with pytest.raises(UnsupportedFeatureError, match="without thinking") as error:
        render("x", enable_thinking=True)
    assert error.value.param == "chat_template_kwargs.enable_thinking"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ raise_exception('x' * 5000) }}", "x" * 200),
        ("{{ messages[0].missing.more }}", "has no attribute 'missing'"),
        ("{{ none + 'secret template words' }}", "TypeError"),
        ("{{ messages[0].content % 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_failures_are_the_callers_and_bounded(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        render(source)
    assert error.value.param == "messages"
    assert reason in error.value.message
    assert "secret" not in error.value.message
    assert len(error.value.message) < 300


def test_broken_template_is_found_when_loading() -> None:
    with pytest.raises(CheckpointError, match="chat template is broken at line 2"):
        ChatTemplate("fine\n{% if %}")
    with pytest.raises(CheckpointError, match="No filter named 'nothing'"):
        ChatTemplate("{{ 1|nothing }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ (''|attr('__class__')).x }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ namespace.__init__.__globals__ }}{{ joiner.__init__.__globals__.x }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ lipsum() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ 'x'.translate({120: 'y'}) }}",
    ],
)
def test_nothing_escapes_the_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        render(source)
    assert HELLO == [{"role": "user", "content": "Hello"}]


_DOUBLING = "{{% set n = namespace(x='ab') %}}{{% for i in range(100) %}}{}{{% endfor %}}{{{{ n.x }}}}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{{ messages[0].content * 5000 }}{% endfor %}",
        "{% for i in 'x' * 60000000 %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ [1] * 10**10 }}",
        "{{ 9**9**9**9 }}",
        "{% set n = namespace(x=9**99) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a'|center(10**10) }}",
        "{{ 'a'|indent(10**10) }}",
        "{{ [1]|batch(10**10, 'x')|list }}",
        "{{ ['a']|map('center', 10**10)|list }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10**9) }}",
        "{{ '{:>{w}}'.format_map({'w': 10**9}) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000)|replace('a', 'b' * 1000000) }}",
        "{{ (['a' * 1000000] * 1000)|join }}",
        "{{ ('x' * 1000000).join(['a'] * 1000) }}",
        _DOUBLING.format("{% set n.x = n.x ~ n.x %}"),
        _DOUBLING.format("{% set n.x = n.x + n.x %}"),
        _DOUBLING.format("{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"),
        _DOUBLING.format("{% set n.x = '%s%s' % (n.x, n.x) %}"),
        _DOUBLING.format("{% set n.x = '{0}{0}'.format(n.x) %}"),
        _DOUBLING.format("{% set n.x = [n.x, n.x] %}"),
        _DOUBLING.format("{% set n.x = n.x|replace('b', 'bb') %}{% set n.x = n.x ~ n.x %}"),
    ],
)
def test_bombs_are_refused_before_they_blow_up(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 50_000)  # run-time type checks make each step 20 times slower
    with pytest.raises(InvalidRequestError, match="the chat template does not take these messages"):
        render(source)


def test_one_rendering_does_not_use_up_the_next_ones_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 5_000)
    template = ChatTemplate("{% for i in range(4900) %}{% endfor %}ok")
    assert [template.render(HELLO) for _ in range(5)] == ["ok"] * 5


def test_long_conversations_fit() -> None:
    messages = [{"role": "user", "content": "word " * 20}] * 1_000
    assert len(ChatTemplate(CHATML, TOKENS).render(messages)) > 1_000 * 100


@pytest.mark.parametrize(("writes_bos", "num_bos"), [(True, 1), (False, 0)])
def test_chat_prompt_has_the_templates_bos_and_no_other(
    write_json: Callable[..., Path], writes_bos: bool, num_bos: int
) -> None:
    source = ("{{ bos_token }}" if writes_bos else "") + "{{ messages[0].content }}"
    tokenizer = load_tokenizer(write_json({"bos_token": "<|endoftext|>", "chat_template": source}))
    template = ChatTemplate.from_tokenizer(tokenizer)
    assert template is not None
    text = template.render(HELLO)
    assert tokenizer.encode(text, add_bos=False).count(0) == num_bos
    assert tokenizer.encode(text, add_bos=True).count(0) == 1


def test_tokenizer_without_template_gives_none(write_json: Callable[..., Path]) -> None:
    assert ChatTemplate.from_tokenizer(load_tokenizer(write_json())) is None
