"""A jinja2 environment in which a hostile chat template can neither escape nor blow up.

jinja2's sandbox closes the way to Python's internals. It bounds `range`, and nothing else: loops nest,
strings double, `center(10**9)` allocates. Here loop steps and calls draw on a budget, and whatever can build
a large value is looked at before it does.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeGuard

from jinja2 import Environment, TemplateRuntimeError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
"""Loop steps, calls (ten each) and printed list elements: about a second; 1,000 messages take some 50,000."""

_CALL_STEPS = 10

_MAX_INT_BITS = 1024
_MAX_WIDTH = 10_000
_WIDE_FORMAT = re.compile(r"\d{5,}|%[^a-zA-Z%]*\*|:[^{}]*\{")  # a large, a computed or a nested width
_WIDE_METHODS = ("ljust", "rjust", "center", "zfill")
_REFUSED_METHODS = ("translate", "expandtabs")
_WIDE_FILTERS = ("center", "indent", "batch", "slice", "wordwrap", "round")
_PRINTING_FILTERS = ("tojson", "string", "join", "pprint", "format")


class TemplateLimitError(TemplateRuntimeError):
    """A template tried to do, or to build, more than one rendering may."""


class _Budget:
    """What one rendering may still use. Lives in one thread."""

    def __init__(self, max_chars: int):
        self._num_steps = 0
        self._max_chars = max_chars

    def step(self, num_steps: int = 1) -> None:
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            raise TemplateLimitError(f"more than {MAX_STEPS} loop steps and calls")

    def check_size(self, num_chars: int) -> None:
        if num_chars > self._max_chars:
            raise TemplateLimitError(f"a text of more than {self._max_chars} characters")

    def check_printed(self, value: object) -> None:
        """`[x, x]` forty times over is small until it is printed."""
        if isinstance(value, list | tuple | dict):
            for element in value.items() if isinstance(value, dict) else value:
                self.step()
                self.check_printed(element)


_budget: ContextVar[_Budget] = ContextVar("budget")


@contextmanager
def limits(max_chars: int) -> Iterator[None]:
    """Gives the rendering inside a fresh budget; no text in it may be longer than `max_chars`."""
    token = _budget.set(_Budget(max_chars))
    try:
        yield
    finally:
        _budget.reset(token)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """The environment. Templates made by it are rendered inside `limits`, from any thread."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        extensions = [_GenerationTag, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_printed)
        self.filters["_counted"] = _counted
        self.filters["_joined"] = _joined
        del self.globals["lipsum"]  # lorem ipsum without end

    def bind(self) -> None:
        """Puts a check before every filter; called once, after the last filter was set."""
        self.filters = {name: _bounded_filter(name, function) for name, function in self.filters.items()}

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins the output of a macro or a `set` block; compiled templates look it up here."""
        parts = list(parts)
        _budget.get().check_size(sum(map(len, parts)))
        return "".join(parts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Rewriter().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Runs `+ * ** %` after looking at the size of the result."""
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function, macro or method; the odd names are jinja2's, so that no keyword can clash."""
        _budget.get().step(_CALL_STEPS)
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps `str.format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, method.__name__, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class _Rewriter(NodeTransformer):
    """Sends every loop through `_counted` and every `~` through `_joined`."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "_joined", [], [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model wrote, for training. Here: its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own convention

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context  # keeps jinja2 from calling it on constants at compile time, when there is no budget
def _printed(context: Context, value: Any) -> Any:
    _budget.get().check_printed(value)
    return value


def _counted(iterable: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for value in iterable:
        budget.step()
        yield value


def _joined(parts: list[Any]) -> str:
    _budget.get().check_printed(parts)
    return BoundedSandbox.concat(map(str, parts))


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # copies jinja2's marks for filters that want the context
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        plain = [arg for arg in args if not isinstance(arg, Context | EvalContext | Environment)]
        _check_filter(name, plain[0] if plain else None, [*plain[1:], *kwargs.values()])
        return function(*args, **kwargs)

    return bounded


def _check_filter(name: str, value: Any, args: list[Any]) -> None:
    budget = _budget.get()
    if name in _PRINTING_FILTERS:
        budget.check_printed(value)
        budget.check_printed(args)
    if name in _WIDE_FILTERS:
        _check_widths(args)
    if name == "indent" and isinstance(value, str):
        width = max(
            (arg if isinstance(arg, int) else len(arg) for arg in args if isinstance(arg, int | str)),
            default=4,
        )
        budget.check_size(len(value) + (value.count("\n") + 1) * width)
    elif name == "replace" and isinstance(value, str):
        _check_replace(value, args)
    elif name == "join" and _has_length(value):
        _check_join(args[0] if args else "", value)
    elif name == "format" and isinstance(value, str):
        _check_format(value, args)


def _check_method(text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    values = [*args, *kwargs.values()]
    if name in _REFUSED_METHODS:
        raise SecurityError(f"{name} is not for templates")
    if name in _WIDE_METHODS:
        _check_widths(values)
    elif name in ("format", "format_map"):
        _check_format(text, values)
    elif name == "replace":
        _check_replace(text, values)
    elif name == "join" and values and _has_length(values[0]):
        _check_join(text, values[0])


def _check_operands(operator: str, left: Any, right: Any) -> None:
    budget = _budget.get()
    budget.step()
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_INT_BITS:
            raise TemplateLimitError("a number that is too large")
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right if isinstance(right, tuple) else [right])
    elif operator == "+" and _has_length(left) and _has_length(right):
        budget.check_size(len(left) + len(right))
    elif operator == "*":
        times, value = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(times, int) and _has_length(value):
            budget.check_size(len(value) * max(times, 0))


def _check_widths(args: Iterable[Any]) -> None:
    if any(isinstance(arg, int) and abs(arg) > _MAX_WIDTH for arg in args):
        raise TemplateLimitError(f"a width above {_MAX_WIDTH}")


def _check_format(text: str, args: Iterable[Any]) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitError("a format with a large or computed width")
    args = list(args)
    _budget.get().check_printed(args)
    longest = max((len(arg) for arg in args if isinstance(arg, str)), default=0)
    _budget.get().check_size(len(text) + (text.count("{") + text.count("%")) * longest)


def _check_replace(text: str, args: list[Any]) -> None:
    if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        _budget.get().check_size(len(text) + text.count(args[0]) * len(args[1]))


def _check_join(separator: Any, values: Any) -> None:
    between = len(separator) if isinstance(separator, str) else 0
    _budget.get().check_size(sum(between + (len(value) if isinstance(value, str) else 1) for value in values))


def _has_length(value: Any) -> TypeGuard[str | list[Any] | tuple[Any, ...]]:
    return isinstance(value, str | list | tuple)
