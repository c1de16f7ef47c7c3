"""A tape as a list of closures, and which of them a step has to run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from steppe.backends import tape as ops
from steppe.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from steppe.backends.torch.attention import GroupStep

__all__ = ["Computation", "Frame", "Instruction", "Plan", "Planner", "inputs_of", "run"]

Computation = (
    ops.Embed
    | ops.RmsNorm
    | ops.Linear
    | ops.RopeWriteKV
    | ops.PagedAttention
    | ops.GatedActivation
    | ops.Add
    | ops.TakeRows
    | ops.Softcap
    | ops.MixtureOfExperts
)
"""Every operation that computes a value; ``Output`` only names one."""


@dataclass(slots=True, eq=False)
class Frame:
    """One step on its way through the tape.

    ``tokens`` and ``positions`` int64[padded T], ``rows`` the real T, ``highest`` the highest
    position; ``values`` by value id, None before they are computed and after their last use;
    ``logit_rows`` the padded rows of the chunk of logits at work; ``rope`` keeps cos and sin for
    the layers that share them.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    rows: int
    highest: int
    groups: tuple[GroupStep, ...]
    values: list[torch.Tensor | None]
    logit_rows: torch.Tensor
    rope: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def value(self, number: int) -> torch.Tensor:
        """A value that an earlier operation computed."""
        tensor = self.values[number]
        if tensor is None:
            raise BackendError(f"value {number} of the tape is used before it is computed")
        return tensor


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """Compute value ``out``; afterwards nobody needs the values ``done``."""

    out: int
    kernel: Callable[[Frame], torch.Tensor]
    done: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a step runs: ``body`` once over its tokens, ``head`` for each chunk of logit rows."""

    body: tuple[Instruction, ...]
    head: tuple[Instruction, ...]


class Planner:
    """Chooses, for the outputs that a step asks for, the operations they need.

    Keys and values are always written: later steps read them. Plans are made once for each
    combination and kept. One thread.
    """

    def __init__(self, tape: ops.Tape, kernels: dict[int, Callable[[Frame], torch.Tensor]]) -> None:
        self._kernels = kernels
        self._ops = tuple(op for op in tape.ops if not isinstance(op, ops.Output))
        self._outputs = tape.outputs
        self._head = _head_values(self._ops)
        self._plans: dict[tuple[frozenset[str], bool], Plan] = {}
        self._logits = tape.outputs["logits"]
        if self._logits not in self._head:
            raise BackendError("the program's logits do not come from take_rows")

    def plan(self, outputs: Iterable[str], with_logits: bool) -> Plan:
        """Instructions for the named outputs, and for the logits. Raises BackendError for an output
        that the program does not have or that exists only for logit rows.
        """
        key = (frozenset(outputs), with_logits)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make(*key)
        return plan

    def _make(self, outputs: frozenset[str], with_logits: bool) -> Plan:
        wanted: set[int] = set()
        for name in outputs:
            if name not in self._outputs:
                raise BackendError(
                    f"the program has no output {name}: it names {', '.join(self._outputs)}"
                )
            if self._outputs[name] in self._head:
                raise BackendError(f"output {name} exists for logit rows only")
            wanted.add(self._outputs[name])
        if with_logits:
            wanted.add(self._logits)
        kept = frozenset(wanted)
        chosen: list[Computation] = []
        for op in reversed(self._ops):
            if op.out in wanted or isinstance(op, ops.RopeWriteKV):
                chosen.append(op)
                wanted.update(inputs_of(op))
        chosen.reverse()
        body = [op for op in chosen if op.out not in self._head]
        head = [op for op in chosen if op.out in self._head]
        across = {value for op in head for value in inputs_of(op) if value not in self._head}
        return Plan(self._schedule(body, kept | across), self._schedule(head, kept | across))

    def _schedule(
        self, chosen: list[Computation], kept: frozenset[int] | set[int]
    ) -> tuple[Instruction, ...]:
        last = {value: at for at, op in enumerate(chosen) for value in (op.out, *inputs_of(op))}
        done: dict[int, list[int]] = {}
        for value, at in last.items():
            if value not in kept:
                done.setdefault(at, []).append(value)
        return tuple(
            Instruction(op.out, self._kernels[op.out], tuple(done.get(at, ())))
            for at, op in enumerate(chosen)
        )


def inputs_of(op: Computation) -> tuple[int, ...]:
    """Ids of the values an operation reads."""
    match op:
        case ops.Embed():
            return ()
        case ops.RopeWriteKV(q=q, k=k, v=v):
            return (q, k, v)
        case ops.PagedAttention(q=q):
            return (q,)
        case ops.GatedActivation(gate=gate, up=up):
            return (gate, up)
        case ops.Add(a=a, b=b):
            return (a, b)
        case _:
            return (op.x,)


def run(instructions: tuple[Instruction, ...], frame: Frame) -> None:
    """Execute in order, dropping each value after its last use."""
    for instruction in instructions:
        frame.values[instruction.out] = instruction.kernel(frame)
        for value in instruction.done:
            frame.values[value] = None


def _head_values(chain: tuple[Computation, ...]) -> frozenset[int]:
    """Values that exist for logit rows only: those of take_rows, and all that follows from them."""
    head: set[int] = set()
    for op in chain:
        if isinstance(op, ops.TakeRows) or not head.isdisjoint(inputs_of(op)):
            head.add(op.out)
    return frozenset(head)
