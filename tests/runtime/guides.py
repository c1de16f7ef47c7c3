"""Guides for tests: requests under them, and random schemas that mean the same to everybody."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from steppe.request import Guided, LLMGenerationRequest, SamplingParams
from tests.runtime.fakes import EOS, IM_END

BRIEF = {
    **dict.fromkeys((EOS, IM_END), 60.0),
    **dict.fromkeys(b"]}", 40.0),
    ord('"'): 20.0,
    **dict.fromkeys(b" \n\t-", -20.0),
}
"""A bias that makes a random model come to an end, and leave out spaces."""


def guide(
    guided: Guided, prompt: str = "hello", max_tokens: int = 150, **params: Any
) -> LLMGenerationRequest:
    """A sampled request under a guide."""
    params = {"temperature": 1.0, "seed": 1, "max_tokens": max_tokens, "guided": guided} | params
    return LLMGenerationRequest(prompt, params=SamplingParams(**params))


def _number() -> st.SearchStrategy[dict[str, Any]]:
    def bounded(kind: str, low: int, width: int) -> dict[str, Any]:
        return {"type": kind, "minimum": low, "maximum": low + width}

    return st.builds(
        bounded,
        st.sampled_from(["integer", "number"]),
        st.integers(-1000, 1000),
        st.integers(0, 1000),
    )


def _string() -> st.SearchStrategy[dict[str, Any]]:
    def bounded(low: int, width: int) -> dict[str, Any]:
        return {"type": "string", "minLength": low, "maxLength": low + width}

    return st.builds(bounded, st.integers(0, 2), st.integers(0, 3))


def _leaf() -> st.SearchStrategy[dict[str, Any]]:
    scalar = st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=4)
    return st.one_of(
        _number(),
        _string(),
        st.builds(lambda values: {"enum": values}, st.lists(scalar, min_size=1, max_size=3)),
        st.builds(lambda value: {"const": value}, scalar),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "integer"}]),
        st.sampled_from(
            [{"type": "string", "pattern": "^[a-c]{1,3}$"}, {"type": ["null", "integer"]}]
        ),
    )


def _inner(inside: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def array(items: dict[str, Any], low: int, width: int) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + width}

    return st.one_of(
        st.builds(array, inside, st.integers(0, 1), st.integers(0, 2)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inside, min_size=1, max_size=2)),
        _object(inside),
    )


@st.composite
def _object(draw: st.DrawFn, inside: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    properties = draw(st.dictionaries(st.text(max_size=3), inside, max_size=3))
    needed = [name for name in properties if draw(st.booleans())]
    return {
        "type": "object",
        "properties": properties,
        "required": needed,
        "additionalProperties": draw(st.just(False) | inside) if not properties else False,
    }


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """JSON schemas of bounded answers."""
    return st.recursive(_leaf(), _inner, max_leaves=5)
