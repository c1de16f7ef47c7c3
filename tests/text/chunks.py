"""Cutting texts into pieces, for laws about streams."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    """Some pieces of ``text``, in order; some may be empty."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    edges = [0, *places, len(text)]
    return [text[a:b] for a, b in pairwise(edges)]
