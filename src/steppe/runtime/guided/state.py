"""One sequence on its way through its grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from steppe.errors import ExecutionError
from steppe.runtime.guided.compiler import PreparedGuided
from steppe.runtime.guided.vocabulary import WORD_BYTES, bit_mask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.runtime.guided.compiler import CompiledGrammar
    from steppe.stepping.types import SlotSeed

__all__ = ["GuidedState", "compute_together", "guided_state"]

Mask = npt.NDArray[np.uint32]


def guided_state(seed: SlotSeed) -> GuidedState | None:
    """The state of a sequence that is about to be seated, past all it has generated; None for one
    without a guide.

    Raises ExecutionError for a guide that nobody has compiled.
    """
    guided = seed.params.guided
    if guided is None:
        return None
    if not isinstance(guided, PreparedGuided):
        raise ExecutionError("a guided sequence comes with its compiled grammar")
    return GuidedState(guided.compiled, seed.stop_token_ids, seed.generated)


def compute_together(states: Sequence[GuidedState]) -> None:
    """Compute the next mask of each state, side by side, for its ``masks`` to find, where they are
    so many that this is faster. Each is as it would be alone; a state that has failed is left out.
    Actor thread only.
    """
    for state in states:
        state.step_back()
        state.computed = None
    sound = [state for state in states if state.error is None]
    if not sound or len(sound) < sound[0].vocabulary.fewest_together:
        return
    vocabulary = sound[0].vocabulary
    address, rows = vocabulary.rows(len(sound))
    vocabulary.executor.unsafe_compute_mask_ptr(
        [(state.matcher, row) for row, state in enumerate(sound)],
        address,
        vocabulary.mask_words * WORD_BYTES,
        len(sound),
    )
    for state, row in zip(sound, rows, strict=False):
        state.computed = row


class GuidedState:
    """Where a sequence stands in its grammar, and what may follow. Actor thread only.

    Stop ids are not the grammar's to allow: in whatever way it names them, they may be sampled
    exactly where the grammar may end. A state depends on the grammar and the tokens alone, so a
    preempted sequence replays its tokens and stands where it stood.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        stop_token_ids: frozenset[int],
        generated: Sequence[int] = (),
    ) -> None:
        self.vocabulary = vocabulary = grammar.vocabulary
        self.matcher = grammar.matcher()
        self.computed: npt.NDArray[np.uint32] | None = None
        """The next mask, if it was computed together with those of others just now."""
        self._stop_ids = stop_token_ids
        self._stops = bit_mask(stop_token_ids, vocabulary.vocab_size)
        self._usable = vocabulary.usable & ~self._stops
        self._usable_bits = self._usable.data
        # Rows past the tokenizer's last token have no bits, and a tokenizer may be the longer one.
        bits = np.zeros(max(vocabulary.mask_words, len(self._usable)), np.uint32)
        self._bits = bits[: len(self._usable)]
        self._written = bits.ctypes.data, vocabulary.mask_words * WORD_BYTES
        self.complete = False
        """Whether the text satisfies the grammar and nothing can be added to it. As of the last
        ``masks``; False after ``allows``, which does not find out.
        """
        self.error: str | None = None
        """What went wrong in the grammar; nothing may follow then."""
        # A token that ``allows`` has found good and the matcher has taken while it was at hand in
        # the processor's caches, though it is not part of the answer before ``accept``.
        self._ahead: int | None = None
        # The token that begins the one text that may follow here, once looked for; -1: there are
        # several.
        self._forced: int | None = None
        for token_id in generated:
            self.accept(token_id)

    def accept(self, token_id: int) -> None:
        """Take one token of the answer."""
        self.computed = None
        if self._ahead != token_id:
            self.step_back()
            if self.error is None and token_id not in self._stop_ids:
                self.matcher.consume_token(token_id)
        self._ahead = self._forced = None
        if self.error is None:
            self._sound()

    def allows(self, token_id: int) -> bool:
        """Whether the next mask has a token, found without the mask, and for far less."""
        self.complete = False
        self.step_back()
        if self.error is not None:
            return False
        if token_id in self._stop_ids:
            ends = self.matcher.is_accepting()
            return self._sound() and ends
        if token_id < 0 or not _allows(self._usable_bits, token_id):
            return False
        # Where one text only may follow, a mask has nothing but the token that begins it.
        forced = self._begins()
        if forced not in (-1, token_id) or self.matcher.try_consume_tokens([token_id]) != 1:
            self._sound()
            return False
        # What goes wrong behind it is the next token's matter.
        self._ahead = token_id
        return True

    def step_back(self) -> None:
        """Stand behind the tokens that were accepted, whatever ``allows`` has looked at since."""
        if self._ahead is not None:
            self._ahead = None
            self.matcher.rollback(1)
            self._sound()

    def only(self) -> int | None:
        """The one token that the next mask has, where the grammar leaves one text only and may not
        end before it: found without the mask. None elsewhere.
        """
        self.step_back()
        if self.error is not None:
            return None
        forced = self._begins()
        if not self._sound() or forced < 0 or self.matcher.is_accepting():
            return None
        return forced if _allows(self._usable_bits, forced) else None

    def masks(self, drafts: Sequence[int] = ()) -> list[Mask | None]:
        """What may be sampled next, uint32[ceil(vocab / 32)]; then the same after each draft token.

        Nothing may follow a fault or the end of a grammar without a stop id: all bits are 0 then. A
        draft that the grammar forbids, and all after it, have None: they cannot be accepted.
        """
        self.step_back()
        mask = self._mask()
        ends = self.complete
        rows: list[Mask | None] = [mask]
        taken = 0
        for token_id in drafts:
            if not _allows(mask.data, token_id) or token_id in self._stop_ids:
                break
            self.matcher.consume_token(token_id)
            taken += 1
            mask = self._mask()
            rows.append(mask)
        if taken and self.error is None:
            self.matcher.rollback(taken)
            self._sound()
        self.complete = ends
        return rows + [None] * (len(drafts) - taken)

    def _begins(self) -> int:
        """The token that begins the one text that may follow; -1 where there are several."""
        if self._forced is None:
            forced = self.matcher.compute_ff_tokens()
            self._forced = forced[0] if forced else -1
        return self._forced

    def _mask(self) -> Mask:
        self.complete = False
        if self.error is not None:
            return np.zeros_like(self._stops)
        bits, self.computed = self.computed, None
        if bits is None:
            self.matcher.unsafe_compute_mask_ptr(*self._written)
            bits = self._bits
        elif len(bits) < len(self._bits):
            self._bits[: len(bits)] = bits
            bits = self._bits
        if not self._sound():
            return np.zeros_like(self._stops)
        mask = bits & self._usable
        if self.matcher.is_accepting():
            self.complete = not mask.any()
            mask |= self._stops
        return mask

    def _sound(self) -> bool:
        if not self.matcher.is_error():
            return True
        self.error = self.matcher.get_error().partition("\n")[0][:300] or "unknown"
        return False


def _allows(mask: memoryview, token_id: int) -> bool:
    return bool(mask[token_id >> 5] >> (token_id & 31) & 1)
