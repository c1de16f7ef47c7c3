"""Looking for tags in a text that arrives in pieces."""

from __future__ import annotations

__all__ = ["partial_tag"]


def partial_tag(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` begin ``tag`` without completing it."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
