"""What the fake model must answer, computed the long way round: one sequence, no cache, no steps.

Nothing of the runtime is used but its vocabulary. Text is decoded from all bytes at every token and
searched from its start.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from steppe.backends import sampling_rules
from steppe.backends.base import SAMPLE_ROW, History, SampleBatch
from steppe.request import FinishReason, TokenLogprob
from tests.runtime.fakes import EOS, IM_END, IM_START, reference_logits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.request import SamplingParams, SequenceOutput

SPECIAL = {EOS: b"<|end|>", IM_START: b"<|im_start|>", IM_END: b"<|im_end|>"}
MODEL_STOPS = frozenset({EOS, IM_END})


@dataclass
class Answer:
    """What a sequence amounts to."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None

    def check(self, output: SequenceOutput) -> None:
        """Fail unless ``output`` (or anything with its fields) says exactly this."""
        assert output.token_ids == self.token_ids
        assert output.text == self.text
        assert (output.finish_reason, output.stop_reason) == (self.finish_reason, self.stop_reason)
        assert output.logprobs == self.logprobs
        assert output.prompt_logprobs == self.prompt_logprobs


def answer(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    sequence_index: int = 0,
    context_length: int = 200,
) -> Answer:
    """The fake model's answer to ``prompt``. ``params.seed`` must be set unless greedy."""
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else MODEL_STOPS)
    limit = params.max_tokens
    if limit is None:
        limit = context_length - len(prompt)
    reason = FinishReason.LENGTH
    stop_reason: str | int | None = None
    said = b""
    while len(ids) < limit:
        logits = reference_logits([*prompt, *ids])
        token = _sample(logits, prompt, ids, params, sequence_index, stops)
        if params.logprobs is not None:
            logprobs.append(_logprob(logits, token, params.logprobs))
        ids.append(token)
        if token not in stops or params.include_stop:
            said += _piece(token, params)
        found = _stopped(_whole(said), params.stop)
        if found is not None:
            reason, stop_reason = FinishReason.STOP, found
            break
        if token in stops:
            reason = FinishReason.STOP
            stop_reason = token if token in params.stop_token_ids else None
            break
    text = said.decode("utf-8", "replace")
    start, found = _first(text, params.stop)
    if found is not None:
        reason, stop_reason = FinishReason.STOP, found
        text = text[: start + (len(found) if params.include_stop else 0)]
    scores: list[TokenLogprob | None] | None = None
    if params.prompt_logprobs is not None:
        scores = [None]
        for at in range(1, len(prompt)):
            row = reference_logits(prompt[:at])
            scores.append(_logprob(row, prompt[at], params.prompt_logprobs))
    return Answer(
        tuple(ids),
        text,
        reason,
        stop_reason,
        None if params.logprobs is None else tuple(logprobs),
        None if scores is None else tuple(scores),
    )


def _sample(
    logits: np.ndarray,
    prompt: Sequence[int],
    ids: Sequence[int],
    params: SamplingParams,
    sequence_index: int,
    stops: set[int],
) -> int:
    row = np.zeros(1, SAMPLE_ROW)
    for name in [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ]:
        row[name] = getattr(params, name)
    row["num_logprobs"], row["target"] = -1, -1
    row["seed"], row["sequence_index"] = params.seed or 0, sequence_index
    row["position"] = len(prompt) + len(ids)
    counts = Counter(ids)
    seen = sorted({*prompt, *ids})
    history = History(
        np.array(seen, np.int32),
        np.array([counts[token] for token in seen], np.int32),
        np.array([token in prompt for token in seen]),
    )
    bias = params.logit_bias or {}
    banned = sorted(stops) if len(ids) < params.min_tokens else []
    batch = SampleBatch(
        row,
        [(np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32))],
        [history],
        [np.array(banned, np.int32)],
    )
    return int(sampling_rules.sample_rows(logits[None], batch).sampled[0])


def _logprob(logits: np.ndarray, token: int, count: int) -> TokenLogprob:
    row = sampling_rules.logprobs(logits).astype(np.float32)
    order = sorted(range(len(row)), key=lambda i: (-logits[i], i))[:count]
    top = [(i, float(row[i])) for i in order]
    if token not in order:
        top.append((token, float(row[token])))
    return TokenLogprob(token, float(row[token]), tuple(top))


def _piece(token: int, params: SamplingParams) -> bytes:
    if token < 256:
        return bytes([token])
    return b"" if params.skip_special_tokens else SPECIAL[token]


def _whole(said: bytes) -> str:
    """The text of ``said`` without a character that its end cuts off."""
    for cut in range(4):
        head = said[: len(said) - cut]
        try:
            said[len(head) :].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return head.decode("utf-8", "replace")
    return said.decode("utf-8", "replace")


def _first(text: str, stops: Sequence[str]) -> tuple[int, str | None]:
    """Where the earliest stop starts, and which it is; of several there, the shortest."""
    hits = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    start, _, stop = min(hits, default=(len(text), 0, None))
    return start, stop


def _stopped(text: str, stops: Sequence[str]) -> str | None:
    """The stop that is certain: no unfinished one starts before it."""
    start, found = _first(text, stops)
    beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
    unfinished = (at for at in range(len(text)) if text[at:] in beginnings)
    return found if start <= next(unfinished, len(text)) else None
