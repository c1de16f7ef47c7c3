"""The torch backend: replays the tape with torch operations, on any torch device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import torch

from steppe.backends.base import StepOutput
from steppe.backends.tape import CacheGroup, Embed, Graph, PagedAttention
from steppe.backends.torch.attention import plan_group
from steppe.backends.torch.cache import PagedCache
from steppe.backends.torch.checks import check_samples, check_step
from steppe.backends.torch.compiler import Compiler
from steppe.backends.torch.ops import padded_rows
from steppe.backends.torch.sampling import Sampled, sample_rows
from steppe.backends.torch.walk import Frame, Plan, Planner, run
from steppe.backends.torch.weights import WeightStore
from steppe.errors import BackendError, ExecutionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from steppe.backends.base import Program, SampleBatch, StepInput

__all__ = ["DType", "TorchBackend"]

_Number = TypeVar("_Number", np.float32, np.int32)

DType = Literal["auto", "float32", "bfloat16"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_KV_DTYPES = {**_DTYPES, "float16": torch.float16, "int8": torch.int8}

# What torch raises for a full memory or operands that do not fit: the step's fault, nobody else's.
_FAULTS = (RuntimeError, IndexError, ValueError, TypeError, MemoryError)


class TorchBackend:
    """Implements ``steppe.backends.base.Backend``.

    ``device`` is any torch device; ``dtype`` "auto" is float32 on the CPU and bfloat16 elsewhere;
    weights and activations have that type, norms, softmax and sampling at least float32, the cache
    what ``trace`` is told.
    ``max_logit_rows`` bounds the rows of logits that exist at once. ``threads`` sets torch's thread
    count for the whole process; None leaves it alone, and nothing else global is ever changed.

    The guarantee. On the CPU in float32, whatever a step computes for a token (hidden states,
    logits, sampled token, log probabilities) is the same to the bit whatever else the step holds,
    however the sequence was cut into steps, wherever its pages lie, and at one or two threads: see
    ``ops`` and ``attention`` for how. It supposes that the host has not traded float32 precision
    for speed (``torch.set_float32_matmul_precision``). In bfloat16 and on other devices the library
    chooses algorithms by shape: results agree within the type's rounding, and no more is promised.

    One thread calls it; it starts none. Raises BackendError for a device or type that is not there.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        dtype: DType = "auto",
        page_size: int = 64,
        max_logit_rows: int = 64,
        threads: int | None = None,
    ) -> None:
        self._device = _device(device)
        if dtype == "auto":
            dtype = "float32" if self._device.type == "cpu" else "bfloat16"
        if dtype not in _DTYPES:
            raise BackendError(f"the torch backend computes in {', '.join(_DTYPES)}, not {dtype}")
        if page_size < 1 or max_logit_rows < 1 or (threads is not None and threads < 1):
            raise BackendError("page_size, max_logit_rows and threads are at least 1")
        self._dtype = _DTYPES[dtype]
        self._page_size = page_size
        self._max_logit_rows = max_logit_rows
        if threads is not None:
            torch.set_num_threads(threads)
        self._model: _Model | None = None
        self._kept: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """``torch``."""
        return "torch"

    @property
    def page_size(self) -> int:
        """Tokens per cache page."""
        return self._page_size

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups of the traced program, in block table order."""
        return self._traced().cache.groups

    def trace(self, program: Program, *, kv_dtype: str = "auto") -> None:
        """Record the program and load its weights, one at a time.

        ``kv_dtype`` auto is the type of the activations. Raises BackendError for a program that
        cannot be walked or an unknown type, ModelError for a parameter that is missing or does not
        fit.
        """
        if self._model is not None:
            raise BackendError("this backend has traced a program already")
        if kv_dtype != "auto" and kv_dtype not in _KV_DTYPES:
            known = ", ".join(_KV_DTYPES)
            raise BackendError(f"the torch backend keeps no {kv_dtype} keys and values: {known}")
        graph = Graph(program.layers)
        program.build(graph)
        tape = graph.tape()
        kept = _KV_DTYPES.get(kv_dtype, self._dtype)
        cache = PagedCache(tape.groups, self._page_size, self._device, kept)
        weights = WeightStore(program.weights, self._device, self._dtype)
        with torch.inference_mode():
            kernels = Compiler(tape, program.vocab_size, weights, cache).compile()
            embed = next((op for op in tape.ops if isinstance(op, Embed)), None)
            table = None
            if embed is not None:
                shape = (program.vocab_size, tape.widths[embed.out])
                table = weights.get(embed.weight, shape)
        heads = dict.fromkeys(range(len(tape.groups)), 1)
        for op in tape.ops:
            if isinstance(op, PagedAttention):
                group, _ = cache.place(op.layer)
                heads[group] = max(heads[group], op.num_heads)
        self._model = _Model(
            vocab=program.vocab_size,
            max_positions=program.max_positions,
            cache=cache,
            planner=Planner(tape, kernels),
            outputs=dict(tape.outputs),
            num_values=len(tape.widths),
            heads=tuple(heads[group] for group in range(len(tape.groups))),
            table=table,
        )

    def page_bytes(self, group: int) -> int:
        """Memory of one page of a cache group, all its layers, keys and values."""
        return self._traced().cache.page_bytes(group)

    def allocate_cache(self, num_pages: Sequence[int]) -> None:
        """Make zeroed cache memory, ``num_pages[g]`` pages for each group. Raises BackendError."""
        self._traced().cache.allocate(num_pages)

    @property
    def cache_format(self) -> str:
        """Where numbers are computed, and as what they are kept."""
        kept = self._traced().cache.dtype
        return f"torch {self._device.type} {self._dtype}, kept as {kept}"

    def read_pages(self, group: int, pages: Sequence[int]) -> npt.NDArray[np.uint8]:
        """The bytes of some pages, uint8[n, page_bytes]. Raises BackendError for a bad page."""
        return self._traced().cache.read(group, pages)

    def write_pages(self, group: int, pages: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Overwrite pages with what ``read_pages`` gave. Raises BackendError for a bad fit."""
        self._traced().cache.write(group, pages, data)

    def launch(self, step: StepInput, sample: SampleBatch) -> TorchTicket:
        """Start a step; on the CPU it has run when this returns.

        Raises ExecutionError for a malformed step, before anything is written; a fault of the step
        itself is raised by the ticket.
        """
        model = self._traced()
        if not model.cache.num_pages and model.cache.groups:
            raise BackendError("no cache has been allocated")
        check_step(
            step,
            sample,
            vocab=model.vocab,
            max_positions=model.max_positions,
            page_size=self._page_size,
            num_pages=model.cache.num_pages,
        )
        self._kept = None
        try:
            plan = model.planner.plan(step.outputs, bool(step.logit_rows.size))
        except BackendError as error:
            raise ExecutionError(str(error)) from error
        try:
            with torch.inference_mode():
                return TorchTicket(self._execute(model, plan, step, sample))
        except _FAULTS as error:
            return TorchTicket(_failed(error))

    @property
    def kept_rows(self) -> int:
        """As many rows as are computed at once."""
        return self._max_logit_rows

    def resample(self, rows: npt.NDArray[np.int32], sample: SampleBatch) -> StepOutput:
        """Sample kept rows of the last step again. Raises ExecutionError."""
        vocab = self._traced().vocab
        check_samples(sample, rows.size, vocab)
        kept = self._kept
        if kept is None or (rows.size and not 0 <= rows.min() <= rows.max() < kept.shape[0]):
            raise ExecutionError("malformed batch: the logits of those rows are not kept")
        try:
            with torch.inference_mode():
                which = torch.from_numpy(rows.astype(np.int64)).to(kept.device)
                found = sample_rows(kept[which], sample, 0)
                return _to_numpy(_StepTensors([found], {}, None))
        except _FAULTS as error:
            raise _failed(error) from error

    def capture(self) -> bool:
        """On the CPU True: a step has no faster form than the closures that ``trace`` made. False
        elsewhere: graphs of this device are not captured.
        """
        self._traced()
        return self._device.type == "cpu"

    def embedding_table(self) -> npt.NDArray[np.float32]:
        """The token embeddings, float32[vocab, width], unscaled; a copy."""
        table = self._traced().table
        if table is None:
            raise BackendError("the program embeds no tokens")
        return np.array(table.float().cpu().numpy())

    def _execute(
        self, model: _Model, plan: Plan, step: StepInput, sample: SampleBatch
    ) -> _StepTensors:
        tokens, rows = step.token_ids.size, step.logit_rows.size
        frame = Frame(
            tokens=self._padded(step.token_ids),
            positions=self._padded(step.positions),
            rows=tokens,
            highest=int(step.positions.max()),
            groups=tuple(
                plan_group(
                    step, number, group.spec, self._page_size, model.heads[number], self._device
                )
                for number, group in enumerate(model.cache.groups)
            ),
            values=[None] * model.num_values,
            logit_rows=torch.empty(0, dtype=torch.int64),
        )
        run(plan.body, frame)
        hidden = {name: self._hidden(frame, step, model.outputs[name]) for name in step.outputs}
        logits: list[torch.Tensor] = []
        sampled: list[Sampled] = []
        for first in range(0, rows, self._max_logit_rows):
            chunk = step.logit_rows[first : first + self._max_logit_rows]
            frame.logit_rows = self._padded(chunk)
            run(plan.head, frame)
            number = model.outputs["logits"]
            raw = frame.value(number)[: chunk.size].float()
            frame.values[number] = None
            sampled.append(sample_rows(raw, sample, first))
            if rows <= self._max_logit_rows:
                self._kept = raw
            if step.return_logits:
                logits.append(raw)
        if step.return_logits and not logits:
            logits.append(torch.empty(0, model.vocab))
        return _StepTensors(sampled, hidden, torch.cat(logits) if logits else None)

    def _hidden(self, frame: Frame, step: StepInput, value: int) -> torch.Tensor:
        rows = frame.value(value)[: frame.rows]
        if step.hidden_rows is not None:
            rows = rows[torch.from_numpy(np.array(step.hidden_rows, np.int64)).to(rows.device)]
        return rows.float()

    def _padded(self, indices: npt.NDArray[np.int32]) -> torch.Tensor:
        """int64 on the device, zeros up to whole tiles of rows."""
        out = np.zeros(padded_rows(indices.size), dtype=np.int64)
        out[: indices.size] = indices
        return torch.from_numpy(out).to(self._device)

    def _traced(self) -> _Model:
        if self._model is None:
            raise BackendError("no program has been traced")
        return self._model


@dataclass(frozen=True, slots=True, eq=False)
class _Model:
    """A traced program. ``heads`` is the most query heads a layer of each cache group has."""

    vocab: int
    max_positions: int
    cache: PagedCache
    planner: Planner
    outputs: dict[str, int]
    num_values: int
    heads: tuple[int, ...]
    table: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _StepTensors:
    """What a step computed, on the device: samples chunk by chunk, hidden rows by output."""

    sampled: list[Sampled]
    hidden: dict[str, torch.Tensor]
    logits: torch.Tensor | None


class TorchTicket:
    """A launched step: its results on the device, or what went wrong."""

    def __init__(self, outcome: _StepTensors | ExecutionError) -> None:
        self._outcome = outcome

    def wait(self) -> StepOutput:
        """The step's output as numpy arrays. Raises ExecutionError if it failed."""
        if isinstance(self._outcome, ExecutionError):
            raise self._outcome
        try:
            return _to_numpy(self._outcome)
        except RuntimeError as error:  # a device reports a launched step's fault when asked for it
            raise _failed(error) from error


def _to_numpy(done: _StepTensors) -> StepOutput:
    chunks = done.sampled
    hidden = {name: _float32(rows) for name, rows in done.hidden.items()}
    logits = None if done.logits is None else _float32(done.logits)
    if not chunks:
        return StepOutput(np.empty(0, np.int32), hidden=hidden, logits=logits)
    return StepOutput(
        sampled=torch.cat([chunk.tokens for chunk in chunks]).cpu().numpy().astype(np.int32),
        logprob=_joined([chunk.logprob for chunk in chunks], np.float32),
        top_ids=_joined([chunk.top_ids for chunk in chunks], np.int32),
        top_logprobs=_joined([chunk.top_logprobs for chunk in chunks], np.float32),
        hidden=hidden,
        logits=logits,
    )


def _joined(
    parts: Sequence[torch.Tensor | None], dtype: type[_Number]
) -> npt.NDArray[_Number] | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present).cpu().numpy().astype(dtype) if present else None


def _float32(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    return np.array(tensor.cpu().numpy(), dtype=np.float32)


def _failed(error: BaseException) -> ExecutionError:
    failure = ExecutionError(f"the step failed: {error}")
    failure.__cause__ = error
    return failure


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BackendError(f"torch has no usable device {name}: {error}") from error
    return device
