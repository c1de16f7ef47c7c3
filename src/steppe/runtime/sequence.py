"""One resident sequence: what is known, what is computed, what was said, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from steppe.request import FinishReason, TokenLogprob
from steppe.runtime.guided.state import guided_state
from steppe.runtime.pooling import add_rows, unit_length
from steppe.runtime.sampling.state import SamplerState
from steppe.stepping.types import BatchResult, SequenceIdentity, SlotSeed, TokenDelta

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from steppe.runtime.kv.pool import PageLease
    from steppe.runtime.kv.prefix import PrefixUse
    from steppe.text.pipeline import TextPipeline

__all__ = ["SequenceState", "TextState", "unseated_result"]


@dataclass(slots=True)
class TextState:
    """A sequence's text so far and the pipeline that continues it; survives a preemption."""

    pipeline: TextPipeline
    parts: list[str]


def unseated_result(seed: SlotSeed, reason: FinishReason) -> BatchResult:
    """The snapshot of a sequence that ends while it has no seat, preempted or never seated."""
    text = seed.text_state
    return BatchResult(
        request_id=seed.request_id,
        original_index=seed.original_index,
        token_ids=seed.generated,
        text="".join(text.parts) if isinstance(text, TextState) else "",
        finish_reason=reason,
        logprobs=None if seed.params.logprobs is None else seed.logprobs,
        prompt_logprobs=None if seed.params.prompt_logprobs is None else seed.prompt_logprobs,
        prompt_tokens=len(seed.prompt_token_ids),
        cached_tokens=seed.cached_tokens or 0,
    )


class SequenceState:
    """A seated sequence. Actor thread only; the session alone changes it.

    ``tokens`` are all known ids, prompt first; the first ``computed`` of them are in the cache. It
    prefills until ``prefill_end`` tokens are computed, then decodes. After a preemption the tokens
    it had generated are part of what is prefilled again. ``boundary`` is how many computed tokens
    fill its next page.
    """

    __slots__ = (
        "_delta_ids",
        "_delta_logprobs",
        "_delta_prompt_logprobs",
        "_delta_text",
        "_last",
        "_observes",
        "_pooled",
        "_push",
        "_stops",
        "boundary",
        "cached_tokens",
        "computed",
        "draft_accepted",
        "draft_proposed",
        "error",
        "finish_reason",
        "guided",
        "identity",
        "lease",
        "logprobs",
        "num_prompt",
        "prefill_end",
        "prefix",
        "prompt_logprobs",
        "ref",
        "sampler",
        "seed",
        "stop_reason",
        "text",
        "tokens",
    )

    def __init__(
        self,
        seed: SlotSeed,
        identity: SequenceIdentity,
        lease: PageLease,
        text: TextState,
        prefix: PrefixUse,
    ) -> None:
        params = seed.params
        self.seed = seed
        self.identity = identity
        self.ref = identity.ref
        self.lease = lease
        self.text = text
        self.prefix = prefix
        self.tokens = [*seed.prompt_token_ids, *seed.generated]
        self.num_prompt = len(seed.prompt_token_ids)
        self.computed = 0
        self.boundary = 0
        self.cached_tokens = seed.cached_tokens or 0
        self.prefill_end = len(self.tokens)
        self.sampler = SamplerState(
            params,
            seed=seed.seed,
            sequence_index=seed.sequence_index,
            prompt=seed.prompt_token_ids,
            generated=seed.generated,
            stop_token_ids=seed.stop_token_ids,
        )
        # What ``append`` asks for every token is held here: each object on a way is a cache miss.
        self._observes = not self.sampler.plain
        self._push = text.pipeline.push
        self._stops = seed.stop_token_ids
        self._last = self.num_prompt + seed.max_tokens
        self.guided = guided_state(seed)
        self.logprobs = None if params.logprobs is None else list(seed.logprobs)
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = list(seed.prompt_logprobs) or [None]
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.draft_proposed = 0
        self.draft_accepted = 0
        self._pooled: npt.NDArray[np.float64] | None = None
        self._delta_ids: list[int] = []
        self._delta_text: list[str] = []
        self._delta_logprobs: list[TokenLogprob] = []
        # The first prompt token has no prediction; its None is delivered with the first scores.
        self._delta_prompt_logprobs: list[TokenLogprob | None] = (
            [None] if self.prompt_logprobs is not None and not seed.prompt_logprobs else []
        )

    # ---- state ------------------------------------------------------------------------------

    @property
    def prefilling(self) -> bool:
        """Whether known tokens are still to be computed before the next one can be sampled."""
        return self.computed < self.prefill_end

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, before and after any preemption."""
        return len(self.tokens) - self.num_prompt

    @property
    def finished(self) -> bool:
        """Whether it has a finish reason."""
        return self.finish_reason is not None

    @property
    def samples_after_prefill(self) -> bool:
        """False for a request that only scores its prompt."""
        return self.seed.max_tokens > 0

    # ---- progress ---------------------------------------------------------------------------

    def take_computed(self, count: int) -> None:
        """The next ``count`` known tokens are in the cache already."""
        self.computed += count
        # What a resumed sequence finds again is mostly its own, and its caller was told already.
        if self.seed.cached_tokens is None:
            self.cached_tokens = min(self.cached_tokens + count, self.num_prompt)

    def append(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Take one sampled token through text, stop rules and limit. Not after it has finished."""
        tokens = self.tokens
        tokens.append(token_id)
        if self._observes:
            self.sampler.add(token_id)
        if self.guided is not None:
            self.guided.accept(token_id)
        self._delta_ids.append(token_id)
        if self.logprobs is not None and logprob is not None:
            self.logprobs.append(logprob)
            self._delta_logprobs.append(logprob)
        if token_id in self._stops:
            seed = self.seed
            if seed.params.include_stop:
                self._say(token_id)
            if self.finish_reason is None:
                named = token_id in seed.params.stop_token_ids
                self._finish(FinishReason.STOP, token_id if named else None)
            return
        self._say(token_id)
        if len(tokens) >= self._last and self.finish_reason is None:
            self._finish(FinishReason.LENGTH)

    def score(self, logprob: TokenLogprob) -> None:
        """Add the score of the next prompt token."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.append(logprob)
            self._delta_prompt_logprobs.append(logprob)

    def pool(self, rows: npt.NDArray[np.float32]) -> None:
        """Add the hidden states of prompt tokens to the embedding."""
        self._pooled = add_rows(self._pooled, rows)

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """End it for a reason that is not in its tokens. The first reason stays."""
        if not self.finished:
            self.error = error
            self._finish(reason)

    def starve(self) -> None:
        """End it where no token may follow: at the end of its grammar, or as its failure."""
        guided = self.guided
        if guided is None:
            self.end(FinishReason.ERROR, "no token may follow: everything is masked out")
        elif guided.complete:
            self.end(FinishReason.STOP)
        else:
            reason = guided.error or "it allows nothing but what is banned or ends the answer"
            self.end(FinishReason.ERROR, f"no token may follow in the grammar: {reason}")

    def _say(self, token_id: int) -> None:
        text, stop = self._push((token_id,))
        if text:
            self._add_text(text)
        if stop is not None:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = stop

    def _finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        # What the pipeline held back comes out now, and may itself complete a stop string.
        delta = self.text.pipeline.finish()
        self._add_text(delta.text)
        if delta.stop is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            reason, stop_reason = FinishReason.STOP, delta.stop
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def _add_text(self, text: str) -> None:
        if text:
            self.text.parts.append(text)
            self._delta_text.append(text)

    # ---- what leaves ------------------------------------------------------------------------

    def take_delta(self) -> TokenDelta | None:
        """What was gained since the last call; None when nothing was."""
        ids, text, prompt_logprobs = self._delta_ids, self._delta_text, self._delta_prompt_logprobs
        if not (ids or text or prompt_logprobs):
            return None
        scored: tuple[TokenLogprob | None, ...] | None = None
        if prompt_logprobs:
            scored = tuple(prompt_logprobs)
            prompt_logprobs.clear()
        logprobs: tuple[TokenLogprob, ...] | None = None
        if self.logprobs is not None:
            logprobs = tuple(self._delta_logprobs)
            self._delta_logprobs.clear()
        delta = TokenDelta(tuple(ids), "".join(text), logprobs, scored)
        ids.clear()
        text.clear()
        return delta

    def result(self) -> BatchResult:
        """The snapshot of a finished sequence."""
        reason = self.finish_reason
        assert reason is not None, "only a finished sequence has a result"
        return BatchResult(
            request_id=self.identity.request_id,
            original_index=self.seed.original_index,
            token_ids=tuple(self.tokens[self.num_prompt :]),
            text="".join(self.text.parts),
            finish_reason=reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
            prompt_tokens=self.num_prompt,
            cached_tokens=self.cached_tokens,
            draft_proposed=self.draft_proposed,
            draft_accepted=self.draft_accepted,
            error=self.error,
            embedding=None if self._pooled is None else unit_length(self._pooled),
        )

    def preempted_seed(self) -> SlotSeed:
        """A seed that resumes this sequence where it stands; the sequence itself is over."""
        return replace(
            self.seed,
            generated=tuple(self.tokens[self.num_prompt :]),
            logprobs=tuple(self.logprobs or ()),
            # What was never delivered is a lone None: the resumed sequence starts its scores anew.
            prompt_logprobs=()
            if self._delta_prompt_logprobs
            else tuple(self.prompt_logprobs or ()),
            text_state=self.text,
            page_chain=self.prefix.chain,
            cached_tokens=self.cached_tokens,
        )
