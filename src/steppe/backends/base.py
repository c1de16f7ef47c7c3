"""The backend protocol: a step as it looks on the border, numpy arrays only (DESIGN section 5)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from steppe.backends.tape import CacheGroup, CacheSpec, Graph

__all__ = [
    "KV_DTYPES",
    "SAMPLE_ROW",
    "Backend",
    "DrawPurpose",
    "History",
    "Program",
    "SampleBatch",
    "StepInput",
    "StepOutput",
    "Ticket",
    "WeightTensor",
]

Int32 = npt.NDArray[np.int32]

KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
"""What keys and values can be kept as; not every backend keeps every one.

``int8`` is scale * q with q from -127 to 127 and one float32 scale for each token of a head: the
largest magnitude / 127, of its key and of its value.
"""


class DrawPurpose(IntEnum):
    """What a random number is for; part of its key, so that no two uses ever share one."""

    TARGET = 0
    PROPOSAL = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4
    MASKED = 5


SAMPLE_ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("top_k", np.int32),
        ("num_logprobs", np.int32),
        ("seed", np.uint64),
        ("position", np.int64),
        ("sequence_index", np.int32),
        ("purpose", np.int32),
        ("target", np.int32),
        ("reserved", np.int32),
    ]
)
"""One row of a step's logits, and what to do with it.

``temperature`` below 1e-5 is greedy, ``top_k`` 0 is off. ``num_logprobs`` -1: none, k: the sampled
token and the k likeliest. ``position`` is the absolute position of the token this row predicts.
``target`` -1 samples; another value samples nothing: the row reports that token (prompt scoring),
and only logprobs are computed. ``reserved`` is 0 and keeps rows 64 bytes apart.
"""
assert SAMPLE_ROW.itemsize == 64


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """Distinct tokens a sequence has seen. ``counts`` of the output only, ``in_prompt`` or not; all
    of length n.
    """

    token_ids: Int32
    counts: Int32
    in_prompt: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class SampleBatch:
    """How the R rows of logits become tokens. The optional lists are None, or have one entry (or
    None) per row.

    ``bias``: (token ids int32, values float32) to add. ``history``: for penalties. ``banned``:
    token ids int32 that cannot be sampled (stop ids under ``min_tokens``). ``masks``:
    uint32[ceil(vocab / 32)], bit 1 allows (grammars). The rules and their order are stated in
    ``sampling_rules``.
    """

    rows: npt.NDArray[np.void]
    bias: Sequence[tuple[Int32, npt.NDArray[np.float32]] | None] | None = None
    history: Sequence[History | None] | None = None
    banned: Sequence[Int32 | None] | None = None
    masks: Sequence[npt.NDArray[np.uint32] | None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """One ragged batch: T tokens of S sequences, R rows of logits.

    ``token_ids`` [T], ``positions`` [1, T], ``query_start`` [S + 1], ``context_len`` [S].
    ``query_start`` cumulates query lengths; ``context_len`` counts cached tokens including this
    step's. ``block_tables[g]`` are page numbers of cache group g, padded with -1;
    ``slot_mappings[g]`` is page * page_size + offset of each token. ``logit_rows`` index the T
    tokens, rising. ``hidden_rows`` of each output in ``outputs`` are returned; None means all T.
    """

    token_ids: Int32
    positions: Int32
    query_start: Int32
    context_len: Int32
    block_tables: tuple[Int32, ...]
    slot_mappings: tuple[npt.NDArray[np.int64], ...]
    logit_rows: Int32
    outputs: tuple[str, ...] = ()
    hidden_rows: Int32 | None = None
    return_logits: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """``sampled`` int32[R] (a scored row's target is repeated). Arrays over rows are None unless
    some row asked.

    ``logprob`` float32[R] of the sampled token. ``top_ids`` int32[R, K] and ``top_logprobs``
    float32[R, K], falling, ties by rising id, K the most any row asked for, -1 / -inf past a row's
    own count. ``hidden`` float32 rows per output name. ``logits`` float32[R, vocab], only when
    asked.
    """

    sampled: Int32
    logprob: npt.NDArray[np.float32] | None = None
    top_ids: Int32 | None = None
    top_logprobs: npt.NDArray[np.float32] | None = None
    hidden: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    logits: npt.NDArray[np.float32] | None = None

    def with_tokens(self, sampled: Int32, logprob: npt.NDArray[np.float32] | None) -> StepOutput:
        """The same step with other tokens."""
        return StepOutput(
            sampled, logprob, self.top_ids, self.top_logprobs, self.hidden, self.logits
        )


class WeightTensor(Protocol):
    """One parameter under its canonical name, as stored.

    ``data`` are the raw bytes in ``dtype`` (a ggml or safetensors type name) of the stored
    ``shape``, outermost first. What the program wants is ``stored[row_order] + add`` (``row_order``
    None: as stored).
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def data(self) -> npt.NDArray[np.uint8]: ...
    @property
    def row_order(self) -> npt.NDArray[np.int64] | None: ...
    @property
    def add(self) -> float: ...
    def dequantize(self) -> npt.NDArray[np.float32]:
        """The parameter in float32, rows reordered and ``add`` added."""
        ...

    def release(self) -> None:
        """The backend has its own copy of ``data`` now: what holds it may leave memory."""
        ...


class Program(Protocol):
    """A model, ready to be traced: its layers' cache specs, its parameters, its operations."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def layers(self) -> tuple[CacheSpec, ...]: ...
    @property
    def weights(self) -> Mapping[str, WeightTensor]: ...
    def build(self, graph: Graph) -> None:
        """Record the operations."""
        ...


class Ticket(Protocol):
    """A launched step."""

    def wait(self) -> StepOutput:
        """Block until the step is done. Raises ExecutionError if it failed."""
        ...


class Backend(Protocol):
    """What executes a traced program. One thread (the actor) calls it.

    Order: ``trace`` once, ``allocate_cache`` once, then ``launch`` and ``wait`` in turn.
    """

    @property
    def name(self) -> str: ...
    @property
    def page_size(self) -> int:
        """Tokens per cache page."""
        ...

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups of the traced program, in block table order."""
        ...

    def trace(self, program: Program, *, kv_dtype: str = "auto") -> None:
        """Record the program and take its weights; ``kv_dtype`` is one of KV_DTYPES.

        Raises BackendError (also for a ``kv_dtype`` that this backend does not keep), ModelError.
        """
        ...

    def page_bytes(self, group: int) -> int:
        """Memory of one page of a cache group, all its layers, keys and values."""
        ...

    def allocate_cache(self, num_pages: Sequence[int]) -> None:
        """Make zeroed cache memory, ``num_pages[g]`` pages for each group."""
        ...

    @property
    def cache_format(self) -> str:
        """What a page's bytes mean beyond the cache groups' specs, in words that two backends share
        only if they could read each other's pages and go on to the same tokens.
        """
        ...

    def read_pages(self, group: int, pages: Sequence[int]) -> npt.NDArray[np.uint8]:
        """The bytes of some pages of a group, uint8[n, page_bytes]; a copy. Raises BackendError."""
        ...

    def write_pages(self, group: int, pages: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Overwrite pages with what ``read_pages`` gave. Raises BackendError."""
        ...

    def launch(self, step: StepInput, sample: SampleBatch) -> Ticket:
        """Start a step. Its arrays must not change until ``wait`` returns; they may afterwards, and
        the same step may come again with other values in them.
        """
        ...

    @property
    def kept_rows(self) -> int:
        """A step of at most so many rows of logits keeps them for ``resample``."""
        ...

    def resample(self, rows: Int32, sample: SampleBatch) -> StepOutput:
        """Sample some rows of the last step again, by other rules: ``sample`` has one row for each
        of ``rows``, which index that step's ``logit_rows``. What comes is, to the bit, what the
        step would have given under these rules.

        Between a step's ``wait`` and the next ``launch``; changes nothing, so a row may be sampled
        any number of times. Raises ExecutionError for a malformed batch or rows not kept.
        """
        ...

    def capture(self) -> bool:
        """Prepare the fastest form of a decode step. False when that failed; ``launch`` works all
        the same.
        """
        ...

    def embedding_table(self) -> npt.NDArray[np.float32]:
        """The token embeddings, float32[vocab, width], unscaled."""
        ...
