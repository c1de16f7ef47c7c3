"""How a model marks its reasoning, from what its chat template says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ReasoningFormat", "reasoning_format"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around a model's reasoning. ``optional``: a request may switch it off."""

    name: str
    start: str
    end: str
    optional: bool


QWEN3 = ReasoningFormat("qwen3", "<think>", "</think>", optional=True)
DEEPSEEK_R1 = ReasoningFormat("deepseek-r1", "<think>", "</think>", optional=False)


def reasoning_format(templates: Mapping[str, str]) -> ReasoningFormat | None:
    """The format of a model with these chat templates (``ChatTemplate.sources``); None if it marks
    nothing.

    A template that knows the end mark writes it, or takes earlier reasoning out of a conversation
    by it. One that also reads ``enable_thinking`` lets the caller choose, as those of Qwen 3 do.
    """
    source = templates.get("default", "")
    if QWEN3.end not in source:
        return None
    return QWEN3 if "enable_thinking" in source else DEEPSEEK_R1
