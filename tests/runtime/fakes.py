"""A backend without a model: the next token is a hash of everything the cache holds before it.

It keeps token ids where a real backend keeps keys and values, at the same slots, and reads them
back through the block tables. So a wrong page, a wrong position or a lost token changes what it
says, while chunking, company and preemption must not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from steppe.backends import sampling_rules
from steppe.backends.tape import CacheGroup, CacheSpec
from steppe.errors import ExecutionError
from steppe.runtime.artifacts import ModelArtifacts
from steppe.runtime.config import RuntimeConfig
from steppe.runtime.kv.context_cache import ContextCacheConfig
from steppe.runtime.kv.keys import PageKeys, PrefixIdentity
from steppe.runtime.kv.prefix import PrefixUse
from steppe.runtime.rank_runtime import LLMRankRuntime
from steppe.text.chat_template import ChatTemplate
from steppe.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from steppe.backends.base import Program, SampleBatch, StepInput, StepOutput, WeightTensor
    from steppe.backends.tape import Graph
    from steppe.runtime.pooling import Pooling

EOS = 256
IM_START = 257
IM_END = 258
VOCAB = 259
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class FakeProgram:
    """The shape of a model with nothing in it."""

    name: str = "fake"
    vocab_size: int = VOCAB
    max_positions: int = 200
    groups: int = 2

    @property
    def layers(self) -> tuple[CacheSpec, ...]:
        return tuple(CacheSpec(1, 4, window=None if i == 0 else 8 * i) for i in range(self.groups))

    @property
    def weights(self) -> Mapping[str, WeightTensor]:
        return {}

    def build(self, graph: Graph) -> None:
        raise AssertionError("the fake backend traces nothing")


@dataclass
class FakeTicket:
    """A step that ran when it was launched."""

    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output


class FakeBackend:
    """See the module. ``fail_at`` raises in that launch (from 1); ``steps`` keeps every step's
    shape, ``resampled`` how many rows each ``resample`` was asked for.
    """

    name = "fake"

    def __init__(self, page_size: int = 8, fail_at: int = 0) -> None:
        self.page_size = page_size
        self.fail_at = fail_at
        self.launches = 0
        self.steps: list[list[int]] = []
        self.groups: tuple[CacheGroup, ...] = ()
        self._memory: list[np.ndarray] = []
        self._vocab = 0
        self.kept_rows = 64
        self.resampled: list[int] = []
        self._kept: np.ndarray | None = None

    def trace(self, program: Program, *, kv_dtype: str = "auto") -> None:
        self.groups = tuple(CacheGroup(spec, (i,)) for i, spec in enumerate(program.layers))
        self._vocab = program.vocab_size

    def page_bytes(self, group: int) -> int:
        return self.page_size * 8

    def allocate_cache(self, num_pages: Sequence[int]) -> None:
        # Unwritten slots hold an impossible token, so that reading one shows.
        self._memory = [np.full(pages * self.page_size, -7, np.int64) for pages in num_pages]

    @property
    def cache_format(self) -> str:
        return "fake"

    def read_pages(self, group: int, pages: Sequence[int]) -> np.ndarray:
        memory = self._memory[group].reshape(-1, self.page_size)
        return memory[list(pages)].view(np.uint8)

    def write_pages(self, group: int, pages: Sequence[int], data: np.ndarray) -> None:
        assert data.shape == (len(pages), self.page_bytes(group))
        memory = self._memory[group].reshape(-1, self.page_size)
        memory[list(pages)] = np.ascontiguousarray(data).view(np.int64)

    def launch(self, step: StepInput, sample: SampleBatch) -> FakeTicket:
        self.launches += 1
        if self.launches == self.fail_at:
            raise ExecutionError("the fake backend fails here")
        self.steps.append(np.diff(step.query_start).tolist())
        for memory, slots in zip(self._memory, step.slot_mappings, strict=True):
            assert len(set(slots.tolist())) == len(slots), "two tokens share a slot"
            memory[slots] = step.token_ids
        logits = np.stack(
            [self._logits(step, row) for row in step.logit_rows.tolist()]
            or [np.zeros(self._vocab, np.float32)]
        )[: len(step.logit_rows)]
        self._kept = logits if len(logits) <= self.kept_rows else None
        output = sampling_rules.sample_rows(logits, sample)
        states = np.stack([step.token_ids, step.positions[0]], axis=1).astype(np.float32)
        if step.hidden_rows is not None:
            states = states[step.hidden_rows]
        hidden = dict.fromkeys(step.outputs, states)
        return FakeTicket(replace(output, hidden=hidden))

    def resample(self, rows: np.ndarray, sample: SampleBatch) -> StepOutput:
        assert self._kept is not None, "that step keeps no logits"
        self.resampled.append(len(rows))
        return sampling_rules.sample_rows(self._kept[rows], sample)

    def _logits(self, step: StepInput, row: int) -> np.ndarray:
        sequence = int(np.searchsorted(step.query_start, row, side="right")) - 1
        position = int(step.positions[0, row])
        assert step.context_len[sequence] > position
        contexts = []
        for group, memory, table in zip(self.groups, self._memory, step.block_tables, strict=True):
            window = group.spec.window
            oldest = 0 if window is None else max(0, position - window + 1)
            where = np.arange(oldest, position + 1)
            pages = table[sequence][where // self.page_size]
            assert (pages >= 0).all(), "a needed page is not in the table"
            contexts.append(memory[pages * self.page_size + where % self.page_size])
        for context in contexts[1:]:
            assert (context == contexts[0][-len(context) :]).all(), "cache groups disagree"
        return reference_logits(contexts[0].tolist(), self._vocab)

    def capture(self) -> bool:
        return True

    def embedding_table(self) -> np.ndarray:
        return np.arange(self._vocab * 2, dtype=np.float32).reshape(self._vocab, 2)


def reference_logits(context: Sequence[int], vocab: int = VOCAB) -> np.ndarray:
    """What the fake model says after ``context``."""
    assert min(context) >= 0, "an unwritten slot was read"
    rng = np.random.default_rng([len(context), *context])
    logits = rng.normal(size=vocab).astype(np.float32) * 3
    # Mostly letters, so that text is text, and an end now and then.
    logits[97:123] += 5
    logits[EOS] += 1.5
    return logits


def greedy_reference(prompt: Sequence[int], count: int, stops: Sequence[int] = ()) -> list[int]:
    """The fake model's own greedy continuation."""
    context = list(prompt)
    for _ in range(count):
        context.append(int(np.argmax(reference_logits(context))))
        if context[-1] in stops:
            break
    return context[len(prompt) :]


def byte_core() -> tokenizers.Tokenizer:
    """Every byte is a token; three control tokens follow."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = sorted(alphabet, key=_byte_of)
    core = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(by_byte)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>", "<|im_start|>", "<|im_end|>"])
    return core


@cache
def byte_tokenizer() -> Tokenizer:
    """Our tokenizer over ``byte_core``."""
    return Tokenizer(byte_core(), eos_id=EOS, stop_ids=[IM_END])


def _byte_of(char: str) -> int:
    # The byte-level alphabet: printable bytes stand for themselves, the rest for 256 upwards.
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if ord(char) in kept:
        return ord(char)
    return [byte for byte in range(256) if byte not in kept][ord(char) - 256]


def fake_artifacts(pooling: Pooling = "last", **program: int) -> ModelArtifacts:
    """A whole model around the fake program."""
    return ModelArtifacts(
        name="fake",
        program=FakeProgram(**program),
        tokenizer=byte_tokenizer(),
        chat_template=ChatTemplate(TEMPLATE),
        stop_token_ids=frozenset({EOS, IM_END}),
        generation_defaults={},
        pooling=pooling,
    )


def fake_runtime(
    *,
    pages: int = 200,
    page_size: int = 8,
    max_batch_size: int = 8,
    max_step_tokens: int = 512,
    fail_at: int = 0,
    groups: int = 2,
    pooling: Pooling = "last",
    cache: bool = True,
    context: int = 200,
    spill: int = 0,
    spill_folder: Path | None = None,
) -> tuple[LLMRankRuntime, FakeBackend]:
    """A runtime over the fake backend with exactly that many pages in each cache group."""
    backend = FakeBackend(page_size, fail_at)
    runtime = LLMRankRuntime(
        artifacts=fake_artifacts(pooling, groups=groups, max_positions=context),
        backend=backend,
        config=RuntimeConfig(
            max_batch_size=max_batch_size,
            max_step_tokens=max_step_tokens,
            kv_memory=pages * page_size * 8 * groups,
            context_cache=ContextCacheConfig(cache, spill, spill_folder),
        ),
    )
    return runtime, backend


def no_prefix() -> PrefixUse:
    """What a sequence that has nothing to do with the cache has of it."""
    return PrefixUse(PageKeys(8).chain(PrefixIdentity()), 0, 0)


def assert_clean(runtime: LLMRankRuntime) -> None:
    """No page is held, no seat is taken, no generation is open."""
    assert runtime.pool.used_pages == 0
    runtime.pool.verify()
    assert runtime._slots.free == runtime.max_batch_size
    assert not runtime.generating
