"""From sampled ids to deliverable text: the detokenizer, then the stop matcher, in that order.

Whatever later looks at text (reasoning, tool calls) stands behind this pipeline and is fed by
``push`` and ``finish`` alike, so text that was held back to the end passes through it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from steppe.text.detokenizer import IncrementalDetokenizer
from steppe.text.stop import StopMatcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from steppe.text.tokenizer import Tokenizer

__all__ = ["TextDelta", "TextPipeline"]


class TextDelta(NamedTuple):
    """Text that may be delivered now, and the stop string that ended the sequence, if one did."""

    text: str
    stop: str | None


class TextPipeline:
    """The text side of one sequence. For one thread at a time.

    The texts of all pushes and of ``finish``, concatenated, are the sequence's final text: its ids
    decoded, up to the first stop string (or through it with ``include_stop``).
    """

    __slots__ = ("_detokenizer", "_matcher", "_unstopped")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        prompt_ids_tail: Sequence[int] = (),
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, prompt_ids_tail=prompt_ids_tail
        )
        self._matcher = StopMatcher(stops, include_stop=include_stop)
        self._unstopped = not stops

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """The text that ``token_ids`` release. Once a stop matched: no text, and that stop."""
        text = self._detokenizer.push(token_ids)
        return TextDelta(text, None) if self._unstopped else TextDelta(*self._matcher.push(text))

    def finish(self) -> TextDelta:
        """The rest of the text at the end of the sequence; this may still match a stop."""
        text, stop = self._matcher.push(self._detokenizer.flush())
        if stop is not None:
            return TextDelta(text, stop)
        rest, stop = self._matcher.flush()
        return TextDelta(text + rest, stop)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, once one has."""
        return self._matcher.matched

    def copy(self) -> TextPipeline:
        """An independent pipeline at the same point: a preempted sequence resumes from it."""
        twin = object.__new__(TextPipeline)
        twin._detokenizer = self._detokenizer.copy()
        twin._matcher = self._matcher.copy()
        twin._unstopped = self._unstopped
        return twin
