"""The native backend: a traced program in C++, one call per step."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np

from steppe.backends.base import SAMPLE_ROW, StepOutput
from steppe.backends.native import _native
from steppe.backends.native.compiler import Compiler
from steppe.backends.native.weights import WeightStore
from steppe.backends.tape import CacheGroup, Graph
from steppe.errors import BackendError, ExecutionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from steppe.backends.base import Program, SampleBatch, StepInput

__all__ = ["NativeBackend", "NativeTicket", "NativeTiming", "sample_extras"]

_PAGE_SIZE = 64
_KEPT_ROWS = 64
_KV_DTYPES = ("bfloat16", "float16", "int8")


class NativeBackend:
    """Implements ``steppe.backends.base.Backend`` on CPUs.

    ``threads`` None takes what affinity and the cgroup allow. ``isa`` None takes the environment
    variable ``STEPPE_ISA``, or the best kernels that this machine runs (``variants()`` of the
    extension lists them). Weights stay quantised, activations are quantised to int8 in groups of
    32, keys and values are bfloat16 unless ``trace`` is told otherwise.

    The guarantee. What a step computes for a token is the same to the bit whatever else the step
    holds, however its sequence was cut into steps, wherever its pages lie and at any thread count.
    Another ``isa`` may give other bits.

    One thread calls it; the pool's threads sleep between steps. Raises BackendError for kernels
    that this machine does not run.
    """

    def __init__(self, *, threads: int | None = None, isa: str | None = None) -> None:
        self._isa = isa if isa is not None else os.environ.get("STEPPE_ISA", "")
        known = _native.variants()
        if self._isa and self._isa not in known:
            built = self._isa in _native.built_variants()
            why = "this machine cannot run" if built else "there are no"
            raise BackendError(f"{why} {self._isa} kernels: choose {', '.join(known)}")
        if threads is not None and threads < 1:
            raise BackendError("threads is at least 1")
        self._threads = threads or _native.default_threads()
        self._model: _Model | None = None
        self._arguments: _Arguments | None = None

    @property
    def name(self) -> str:
        """``native``."""
        return "native"

    @property
    def isa(self) -> str:
        """Whose kernels run."""
        return self._isa or _native.variants()[0]

    @property
    def threads(self) -> int:
        """Threads that compute a step, the caller's among them."""
        return self._threads

    @property
    def page_size(self) -> int:
        """Tokens per cache page."""
        return _PAGE_SIZE

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups of the traced program, in block table order."""
        return self._traced().groups

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed weights."""
        return self._traced().program.weight_bytes

    def trace(self, program: Program, *, kv_dtype: str = "auto") -> None:
        """Record the program and pack its weights, one at a time.

        ``kv_dtype`` auto is bfloat16. Raises BackendError for a program that does not run here, or
        another type than bfloat16, float16 or int8, ModelError for a parameter that is missing or
        does not fit.
        """
        if self._model is not None:
            raise BackendError("this backend has traced a program already")
        if kv_dtype == "auto":
            kv_dtype = "bfloat16"
        if kv_dtype not in _KV_DTYPES:
            known = ", ".join(_KV_DTYPES)
            raise BackendError(f"the native backend keeps no {kv_dtype} keys and values: {known}")
        graph = Graph(program.layers)
        program.build(graph)
        tape = graph.tape()
        native = _native.Program(
            self._isa, self._threads, program.vocab_size, program.max_positions
        )
        native.set_kv_dtype(kv_dtype)
        compiler = Compiler(tape, program.vocab_size, WeightStore(program.weights, native), native)
        try:
            compiler.compile()
        except ValueError as error:
            if isinstance(error, BackendError) or type(error) is not ValueError:
                raise
            raise BackendError(f"the program does not run here: {error}") from error
        self._model = _Model(
            native,
            kv_dtype,
            tape.groups,
            compiler.outputs,
            frozenset(tape.outputs),
            compiler.table,
            program.vocab_size,
        )

    def page_bytes(self, group: int) -> int:
        """Memory of one page of a cache group, all its layers, keys and values."""
        model = self._traced()
        return sum(model.program.layer_page_bytes(layer) for layer in model.groups[group].layers)

    def allocate_cache(self, num_pages: Sequence[int]) -> None:
        """Make zeroed cache memory, ``num_pages[g]`` pages for each group. Raises BackendError."""
        try:
            self._traced().program.allocate_cache(list(num_pages))
        except (ValueError, TypeError, MemoryError) as error:
            raise BackendError(f"no cache of {list(num_pages)} pages: {error}") from error

    @property
    def cache_format(self) -> str:
        """The kernels whose numbers and order of memory a page has, and what it keeps them as."""
        return f"native {self.isa} {self._traced().kv_dtype}"

    def read_pages(self, group: int, pages: Sequence[int]) -> npt.NDArray[np.uint8]:
        """The bytes of some pages, uint8[n, page_bytes]. Raises BackendError for a bad page."""
        model = self._traced()
        numbers = np.array(pages, np.int32)
        try:
            parts = [
                model.program.read_pages(layer, numbers) for layer in model.groups[group].layers
            ]
        except ValueError as error:
            raise BackendError(f"no such pages: {error}") from error
        return np.concatenate(parts, axis=1)

    def write_pages(self, group: int, pages: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Overwrite pages with what ``read_pages`` gave. Raises BackendError for a bad fit."""
        model = self._traced()
        if data.shape != (len(pages), self.page_bytes(group)):
            raise BackendError(f"{data.shape} bytes are not {len(pages)} pages of group {group}")
        numbers, first = np.array(pages, np.int32), 0
        try:
            for layer in model.groups[group].layers:
                last = first + model.program.layer_page_bytes(layer)
                part = np.ascontiguousarray(data[:, first:last])
                model.program.write_pages(layer, numbers, part)
                first = last
        except ValueError as error:
            raise BackendError(f"no such pages: {error}") from error

    def launch(self, step: StepInput, sample: SampleBatch) -> NativeTicket:
        """Run a step; it has run when this returns.

        Raises ExecutionError for a malformed step, before anything is written.
        """
        model = self._traced()
        rows = step.logit_rows.size
        arguments = self._arguments
        if arguments is None or arguments.step is not step or arguments.rows is not sample.rows:
            arguments = _Arguments(step, sample)
            self._arguments = arguments if arguments.shared else None
        vocab = model.vocab
        numbers = [model.output(name) for name in step.outputs]
        hidden_rows = step.hidden_rows
        count = step.token_ids.size if hidden_rows is None else hidden_rows.size
        hidden = [np.empty((count, width), np.float32) for _, width in numbers]
        sampled = np.empty(rows, np.int32)
        logprob = top_ids = top_logprobs = logits = None
        most = min(max(arguments.num_logprobs, default=-1), vocab)
        if most >= 0:
            logprob = np.full(rows, -np.inf, np.float32)
            top_ids = np.full((rows, most), -1, np.int32)
            top_logprobs = np.full((rows, most), -np.inf, np.float32)
        if step.return_logits:
            logits = np.empty((rows, vocab), np.float32)
        try:
            model.program.run(
                *arguments.arrays,
                sample_extras(sample, rows),
                [number for number, _ in numbers],
                None if hidden_rows is None else _int32(hidden_rows),
                sampled,
                logprob,
                top_ids,
                top_logprobs,
                logits,
                hidden,
            )
        except (ValueError, TypeError) as error:
            raise ExecutionError(f"malformed step: {error}") from error
        except MemoryError as error:
            failure = ExecutionError("the step failed: out of memory")
            failure.__cause__ = error
            return NativeTicket(failure)
        return NativeTicket(
            StepOutput(
                sampled=sampled,
                logprob=logprob,
                top_ids=top_ids,
                top_logprobs=top_logprobs,
                hidden=dict(zip(step.outputs, hidden, strict=True)) if hidden else {},
                logits=logits,
            )
        )

    @property
    def kept_rows(self) -> int:
        """As many rows as are computed at once."""
        return _KEPT_ROWS

    def resample(self, rows: npt.NDArray[np.int32], sample: SampleBatch) -> StepOutput:
        """Sample kept rows of the last step again, on the calling thread. Raises ExecutionError."""
        program = self._traced().program
        if sample.rows.dtype != SAMPLE_ROW or sample.rows.shape != rows.shape:
            raise ExecutionError("malformed batch: not one sample row for each row")
        raw = np.ascontiguousarray(sample.rows).view(np.uint8).reshape(rows.size, -1)
        extras = sample_extras(sample, rows.size)
        try:
            return StepOutput(*_native.resample(program, _int32(rows), raw, extras))
        except (ValueError, TypeError) as error:
            raise ExecutionError(f"malformed batch: {error}") from error

    def capture(self) -> bool:
        """True: the tape is compiled when it is traced, and a step has no faster form."""
        self._traced()
        return True

    @contextmanager
    def timing(self) -> Iterator[NativeTiming]:
        """Time the steps run inside: ``with backend.timing() as timing: ...``, complete at its end.

        Costs about 0.1 us a tile meanwhile, nothing otherwise.
        """
        program = self._traced().program
        timing = NativeTiming()
        program.set_timing(True)
        try:
            yield timing
        finally:
            timing.steps, timing.wall, busy = program.timing()
            timing.busy.update(busy)
            program.set_timing(False)

    def read_weights(self) -> int:
        """Read, on the step's threads, the weights that a decode of one sequence multiplies by, and
        do nothing with them; experts are left out. Returns their bytes as packed: the time it takes
        is what no decode of one sequence can be faster than. Not while a step runs.
        """
        return self._traced().program.read_weights()

    def embedding_table(self) -> npt.NDArray[np.float32]:
        """The token embeddings, float32[vocab, width], unscaled; a copy."""
        model = self._traced()
        if model.table is None:
            raise BackendError("the program embeds no tokens")
        return model.program.embedding_table(model.table)

    def _traced(self) -> _Model:
        if self._model is None:
            raise BackendError("no program has been traced")
        return self._model


@dataclass(slots=True)
class NativeTiming:
    """Where the time of ``steps`` steps went: ``wall`` seconds in all, and ``busy`` seconds by kind
    of work, summed over the threads.
    """

    steps: int = 0
    wall: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)


class NativeTicket:
    """A launched step: its results, or what went wrong."""

    def __init__(self, outcome: StepOutput | ExecutionError) -> None:
        self._outcome = outcome

    def wait(self) -> StepOutput:
        """The step's output. Raises ExecutionError if it failed."""
        if isinstance(self._outcome, ExecutionError):
            raise self._outcome
        return self._outcome


class _Arguments:
    """A step's arrays as the extension takes them.

    ``shared``: all of them are the step's own memory, so they serve whenever it comes again,
    whatever its values are then. Raises ExecutionError for sample rows that are none.
    """

    __slots__ = ("arrays", "num_logprobs", "rows", "shared", "step")

    def __init__(self, step: StepInput, sample: SampleBatch) -> None:
        self.step = step
        self.rows = sample.rows
        rows = np.ascontiguousarray(sample.rows)
        if rows.dtype != SAMPLE_ROW or rows.shape != (step.logit_rows.size,):
            raise ExecutionError("malformed step: not one sample row for each logit row")
        self.num_logprobs = rows["num_logprobs"].data
        given = (step.token_ids, step.positions, step.query_start, step.context_len)
        tokens, positions, starts, contexts = map(_int32, given)
        tables = [_int32(table) for table in step.block_tables]
        slots = [np.ascontiguousarray(each, np.int64) for each in step.slot_mappings]
        logit_rows = _int32(step.logit_rows)
        self.shared = all(
            map(
                is_,
                (*given, *step.block_tables, *step.slot_mappings, step.logit_rows, sample.rows),
                (tokens, positions, starts, contexts, *tables, *slots, logit_rows, rows),
            )
        )
        self.arrays = (
            tokens,
            positions.reshape(-1),  # [1, T] or [T]
            starts,
            contexts,
            tables,
            slots,
            logit_rows,
            rows.view(np.uint8).reshape(rows.size, SAMPLE_ROW.itemsize),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Model:
    """A traced program."""

    program: _native.Program
    kv_dtype: str
    groups: tuple[CacheGroup, ...]
    outputs: dict[str, int]
    named: frozenset[str]
    table: int | None
    vocab: int

    def output(self, name: str) -> tuple[int, int]:
        """Number and width of an output that can be returned."""
        if name in self.outputs:
            number = self.outputs[name]
            return number, self.program.output_width(number)
        if name in self.named:
            raise ExecutionError(f"output {name} exists for logit rows only")
        raise ExecutionError(
            f"the program has no output {name}: it names {', '.join(sorted(self.named))}"
        )


def _int32(values: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(values, np.int32)


def sample_extras(sample: SampleBatch, rows: int) -> list[_native.Row] | None:
    """What single rows add to their rules, as the extension takes it; None if none does."""
    lists = (sample.bias, sample.history, sample.banned, sample.masks)
    if lists[0] is lists[1] is lists[2] is lists[3] is None:
        return None
    for each in lists:
        if each is not None and len(each) != rows:
            raise ExecutionError("malformed step: not one entry for each logit row")
    out: list[_native.Row] = []
    for row in range(rows):
        bias = sample.bias[row] if sample.bias is not None else None
        history = sample.history[row] if sample.history is not None else None
        banned = sample.banned[row] if sample.banned is not None else None
        mask = sample.masks[row] if sample.masks is not None else None
        out.append(
            (
                None if bias is None else _int32(bias[0]),
                None if bias is None else np.ascontiguousarray(bias[1], np.float32),
                None if history is None else _int32(history.token_ids),
                None if history is None else _int32(history.counts),
                None if history is None else np.ascontiguousarray(history.in_prompt, np.bool_),
                None if banned is None else _int32(banned),
                None if mask is None else np.ascontiguousarray(mask, np.uint32),
            )
        )
    return out
