"""The jinja2 environment that chat templates run in.

A template comes with a model file, so it is somebody else's program. It runs in jinja2's
immutable sandbox, with the extras that templates are written against (the de facto standard is
the template rendering of ``transformers``): ``raise_exception``, ``strftime_now``, ``break`` and
``continue``, a ``tojson`` that leaves HTML characters and non-ASCII alone, and ``{% generation
%}`` blocks, which mark the assistant's words for training and mean nothing here.

Repetitions, powers and the output are bounded, so that a slip of a template cannot take the
process down; one that sets out to waste memory still can, as can any other part of a model one
chose to load.

Imported only once a template is compiled: jinja2 costs start-up time that a plain completion need
not pay.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from steppe.errors import ChatTemplateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import datetime

    from jinja2.parser import Parser
    from jinja2.runtime import Context

__all__ = ["CompiledTemplate"]

_MAX_BITS = 4096
"""Largest power a template may compute; dates and token arithmetic need a few dozen bits."""


class _TemplateRefusedError(jinja2.TemplateError):
    """The template itself called ``raise_exception``."""


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}`` renders its body."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The immutable sandbox, which also refuses products that would exhaust memory."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, *, max_output_chars: int) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self._limit = max_output_chars

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if (
                    isinstance(sequence, str | list | tuple)
                    and isinstance(times, int)
                    and len(sequence) * times > self._limit
                ):
                    raise jinja2.exceptions.SecurityError(
                        f"a repetition of more than {self._limit} elements"
                    )
        elif (
            isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() * right > _MAX_BITS
        ):
            raise jinja2.exceptions.SecurityError(f"a power of more than {_MAX_BITS} bits")
        return super().call_binop(context, operator, left, right)


class CompiledTemplate:
    """One template, ready to render. Safe from any thread.

    ``max_output_chars`` bounds what a rendering may produce. Raises ``ChatTemplateError`` if the
    source does not compile.
    """

    def __init__(
        self, source: str, *, clock: Callable[[], datetime], max_output_chars: int
    ) -> None:
        environment = _Sandbox(max_output_chars=max_output_chars)
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        self._limit = max_output_chars
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template does not compile: {error.message} (line {error.lineno})"
            ) from error
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error
        self.reads_parts = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
        """Whether the template walks through the parts of a message's content."""
        self.reads_text = not self.reads_parts or any(
            test.name == "string" for test in tree.find_all(nodes.Test)
        )
        """Whether the template takes content that is one string."""

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. ``ChatTemplateError`` with the template's own message if it raises one, and for
        whatever else goes wrong inside it."""
        try:
            return "".join(self._bounded(self._template.generate(variables)))
        except ChatTemplateError:
            raise
        except _TemplateRefusedError as error:
            raise ChatTemplateError(
                f"the chat template refused the conversation: {error}"
            ) from error
        except Exception as error:  # boundary: a template is a program, and may fail in any way
            kind = type(error).__name__
            raise ChatTemplateError(f"the chat template failed: {kind}: {error}") from error

    def _bounded(self, chunks: Iterator[str]) -> Iterator[str]:
        size = 0
        for chunk in chunks:
            size += len(chunk)
            if size > self._limit:
                raise ChatTemplateError(
                    f"the chat template rendered more than {self._limit} characters"
                )
            yield chunk


def _is_content(node: nodes.Node) -> bool:
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    match node:
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Getattr(attr="content") | nodes.Name(name="content"):
            return True
        case _:
            return False


def _raise_exception(message: str) -> None:
    raise _TemplateRefusedError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
