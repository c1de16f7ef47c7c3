"""From a tape to phases: which operations run together, and in which buffers.

A *phase* is what all threads finish before the next begins, so few phases are few barriers:

* row-wise operations that follow each other (embedding, norms, rope with its cache write, adds,
  packing for the next projection) are one phase that walks the rows once;
* projections of one input are one phase, and one whose result is only added to something adds it
  itself;
* gate, up, activation and the packing of their result are one phase, as are attention and the
  packing of its result.

Buffers are reused as soon as the last reader of a value is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steppe.backends import tape as ops
from steppe.backends.native.buffers import Buffers
from steppe.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.backends.native import _native
    from steppe.backends.native.weights import WeightStore

__all__ = ["Compiler"]

TOKENS, ROWS = 0, 1
EMBED, NORM, ADD, GATED, SOFTCAP, TAKE, PACK, ANGLES, ROPE, CAPTURE = range(10)
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_GROUP = 32

_Micro = tuple[int, int, int, int, int, int, int, float]


class Compiler:
    """Writes the phases of ``tape`` into ``program``, loading parameters from ``weights``.

    After ``compile``: ``outputs`` are numbers of the returnable outputs by name, ``table`` is the
    embedding matrix. Raises ModelError for parameters that do not fit, BackendError for a program
    whose logits do not come from ``take_rows``.
    """

    def __init__(
        self, tape: ops.Tape, vocab: int, weights: WeightStore, program: _native.Program
    ) -> None:
        self._tape = tape
        self._vocab = vocab
        self._weights = weights
        self._program = program
        self._ops = tape.ops
        self._domains: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}
        for at, op in enumerate(self._ops):
            for value in _inputs(op):
                self._readers.setdefault(value, []).append(at)
            if not isinstance(op, ops.Output):
                self._domains[op.out] = self._domain_of(op)
        self._buffers = Buffers(program)
        self._matrices: dict[int, int] = {}
        self._experts: dict[int, list[tuple[int, int, int]]] = {}
        self._micros: list[_Micro] = []
        self._micros_domain = TOKENS
        self._done: set[int] = set()
        self._ropes: dict[tuple[bytes, float], int] = {}
        self.outputs: dict[str, int] = {}
        self.table: int | None = None

    def compile(self) -> None:
        """Do it, once."""
        group_of = {
            layer: number
            for number, group in enumerate(self._tape.groups)
            for layer in group.layers
        }
        self._program.set_groups(len(self._tape.groups))
        for layer, spec in enumerate(self._tape.layers):
            self._program.add_layer(
                group_of[layer], spec.num_kv_heads, spec.head_dim, spec.window or 0
            )
        self._load()
        for rope in self._ropes.values():
            self._micro(TOKENS, ANGLES, a=rope)
        at = 0
        while at < len(self._ops):
            end = at + 1
            if at not in self._done:
                end = self._emit(at)
            for value in _used(self._ops[at:end]):
                if self._last_reader(value) < end:
                    self._buffers.release(value)
            at = end
        self._flush()
        logits = self._tape.outputs["logits"]
        if self._domains[logits] != ROWS:
            raise BackendError("the program's logits do not come from take_rows")
        self._program.set_logits(self._buffers.slot_of(logits))

    def _load(self) -> None:
        """Parameters in tape order, since a step reads them in that order."""
        for op in self._ops:
            if isinstance(op, ops.Embed):
                # Loaded with the head if that is the same matrix, which stands at the tape's end.
                continue
            if isinstance(op, ops.Linear):
                self._matrices[op.out] = self._weights.matrix(
                    f"{op.site}.weight", op.width, self._tape.widths[op.x]
                )
            elif isinstance(op, ops.MixtureOfExperts):
                self._experts[op.out] = self._load_experts(op)
            elif isinstance(op, ops.RopeWriteKV):
                key = (op.rope.inv_freq.tobytes(), op.rope.scale)
                if key not in self._ropes:
                    self._ropes[key] = self._program.add_rope(op.rope.inv_freq, op.rope.scale)
        for op in self._ops:
            if isinstance(op, ops.Embed):
                width = self._tape.widths[op.out]
                self.table = self._weights.matrix(op.weight, self._vocab, width)
                self._matrices[op.out] = self.table

    def _load_experts(self, op: ops.MixtureOfExperts) -> list[tuple[int, int, int]]:
        """Gate, up and down of each expert; the router is the matrix of the operation."""
        width, inner, matrix = self._tape.widths[op.x], op.expert_width, self._weights.matrix
        self._matrices[op.out] = matrix(f"{op.site}.gate.weight", op.num_experts, width)
        sites = (f"{op.site}.experts.{number}" for number in range(op.num_experts))
        return [
            (
                matrix(f"{site}.gate_proj.weight", inner, width),
                matrix(f"{site}.up_proj.weight", inner, width),
                matrix(f"{site}.down_proj.weight", width, inner),
            )
            for site in sites
        ]

    def _emit(self, at: int) -> int:
        """Emit the operation at ``at``, and those after it that run with it: the first not done."""
        op = self._ops[at]
        widths = self._tape.widths
        match op:
            case ops.Linear():
                return self._linears(at)
            case ops.PagedAttention():
                self._attention(op)
            case ops.Output():
                domain = self._domains[op.x]
                if domain == TOKENS:
                    number = self._program.add_output(widths[op.x])
                    self.outputs[op.name] = number
                    self._micro(TOKENS, CAPTURE, a=self._read(op.x), out=number)
            case ops.Embed():
                out = self._write(op.out)
                self._micro(TOKENS, EMBED, a=self._matrices[op.out], out=out, f=op.scale)
                self._pack(op.out)
            case ops.RmsNorm():
                weight = self._weights.vector(op.weight, widths[op.x] // op.heads)
                x, out = self._read(op.x), self._write(op.out)
                domain = self._domains[op.out]
                self._micro(domain, NORM, a=x, b=weight, c=op.heads, out=out, f=op.eps)
                self._pack(op.out)
            case ops.RopeWriteKV():
                q, k, v = self._read(op.q), self._read(op.k), self._read(op.v)
                if self._last_reader(op.q) == at:
                    self._buffers.rename(op.q, op.out)  # rotated in place
                out = self._write(op.out)
                rope = self._ropes[op.rope.inv_freq.tobytes(), op.rope.scale]
                self._micro(TOKENS, ROPE, a=q, b=k, c=v, d=op.layer, e=rope, out=out)
            case ops.Add():
                a, b, out = self._read(op.a), self._read(op.b), self._write(op.out)
                self._micro(self._domains[op.out], ADD, a=a, b=b, out=out)
                self._pack(op.out)
            case ops.GatedActivation():
                gate, up, out = self._read(op.gate), self._read(op.up), self._write(op.out)
                act = _ACTIVATIONS[op.activation]
                self._micro(self._domains[op.out], GATED, a=gate, b=up, c=act, out=out)
                self._pack(op.out)
            case ops.Softcap():
                x, out = self._read(op.x), self._write(op.out)
                self._micro(self._domains[op.out], SOFTCAP, a=x, out=out, f=op.cap)
                self._pack(op.out)
            case ops.TakeRows():
                x, out = self._read(op.x), self._write(op.out)
                self._micro(ROWS, TAKE, a=x, out=out)
                self._pack(op.out)
            case ops.MixtureOfExperts():
                self._flush()
                x, out = self._read(op.x), self._write(op.out)
                self._program.experts_phase(
                    self._domains[op.out],
                    self._matrices[op.out],
                    self._experts[op.out],
                    op.top_k,
                    op.normalize,
                    _ACTIVATIONS[op.activation],
                    x,
                    out,
                )
                self._pack(op.out)
        return at + 1

    def _linears(self, at: int) -> int:
        """A run of projections of one input."""
        run = self._run_of_linears(at)
        end = at + len(run)
        gated = self._gated(at, run, end)
        if gated is not None:
            return gated
        self._flush()
        by_form: dict[int, list[tuple[int, int, int, int]]] = {}
        written: list[int] = []
        for op in run:
            weight = self._matrices[op.out]
            bias = self._weights.vector(f"{op.site}.bias", op.width) if op.bias else -1
            target, add = op.out, -1
            fused = self._fusable_add(op.out, at)
            if fused is not None:
                where, other, target = fused
                self._done.add(where)
                add = self._read(other)
                if not any(at < reader < where for reader in self._readers[other]) and (
                    self._last_reader(other) == where
                ):
                    self._buffers.rename(other, target)  # summed in place
            out = self._write(target)
            form = self._program.weight_form(weight)
            by_form.setdefault(form, []).append((weight, bias, out, add))
            written.append(target)
        domain = self._domains[run[0].out]
        for form, segments in by_form.items():
            panel = self._buffers.panel_of(run[0].x, form)
            self._program.gemm_phase(domain, panel, segments)
        for value in written:
            self._pack(value)
        return end

    def _run_of_linears(self, at: int) -> list[ops.Linear]:
        first = self._ops[at]
        run: list[ops.Linear] = []
        for op in self._ops[at:]:
            if not (isinstance(op, ops.Linear) and isinstance(first, ops.Linear)):
                break
            if op.x != first.x:
                break
            run.append(op)
        return run

    def _gated(self, at: int, run: list[ops.Linear], end: int) -> int | None:
        """Gate, up and their activation as one phase, if that is what ``run`` is."""
        if len(run) != 2 or end >= len(self._ops):
            return None
        op = self._ops[end]
        if not isinstance(op, ops.GatedActivation) or {op.gate, op.up} != {run[0].out, run[1].out}:
            return None
        if self._readers[op.gate] != [end] or self._readers[op.up] != [end]:
            return None
        gate, up = (run[0], run[1]) if op.gate == run[0].out else (run[1], run[0])
        forms = {self._program.weight_form(self._matrices[each.out]) for each in run}
        if len(forms) != 1 or gate.width != up.width:
            return None
        self._flush()
        segments = [
            (
                self._matrices[each.out],
                self._weights.vector(f"{each.site}.bias", each.width) if each.bias else -1,
                -1,
                -1,
            )
            for each in (gate, up)
        ]
        domain = self._domains[op.out]
        wanted = self._forms(op.out)
        fused = wanted[0] if wanted else None
        out = -1
        if len(wanted) > 1 or self._needs_floats(op.out) or fused is None:
            out = self._write(op.out)
        panel = -1
        if fused is not None:
            panel = self._buffers.panel(op.out, fused, gate.width, domain)
        source = self._buffers.panel_of(gate.x, forms.pop())
        act = _ACTIVATIONS[op.activation]
        self._program.gated_phase(domain, source, segments, act, out, panel)
        self._pack(op.out, skip=fused)
        return end + 1

    def _attention(self, op: ops.PagedAttention) -> None:
        self._flush()
        spec = self._tape.layers[op.layer]
        out = self._write(op.out)
        wanted = self._forms(op.out)
        # A head that is whole groups is packed where it is computed.
        fused = wanted[0] if wanted and spec.head_dim % _GROUP == 0 else None
        panel = -1
        if fused is not None:
            panel = self._buffers.panel(op.out, fused, self._tape.widths[op.out], TOKENS)
        self._program.attention_phase(
            self._read(op.q),
            op.layer,
            op.num_heads,
            op.scale,
            op.softcap or 0.0,
            out,
            panel,
        )
        self._pack(op.out, skip=fused)

    def _fusable_add(self, value: int, at: int) -> tuple[int, int, int] | None:
        """Where ``value`` is only read by an Add of something known before ``at``: that Add's
        place, the other operand and the sum.
        """
        readers = self._readers.get(value, [])
        if len(readers) != 1:
            return None
        op = self._ops[readers[0]]
        if not isinstance(op, ops.Add):
            return None
        other = op.b if op.a == value else op.a
        if other == value or not self._buffers.has_slot(other):
            return None
        return readers[0], other, op.out

    def _pack(self, value: int, skip: int | None = None) -> None:
        """Pack a value that has just been written into each form its projections want."""
        domain = self._domains[value]
        width = self._tape.widths[value]
        for form in self._forms(value):
            if form != skip:
                panel = self._buffers.panel(value, form, width, domain)
                self._micro(domain, PACK, a=self._read(value), out=panel)

    def _forms(self, value: int) -> list[int]:
        """Forms in which projections read a value."""
        readers = (self._ops[at] for at in self._readers.get(value, ()))
        return sorted(
            {
                self._program.weight_form(self._matrices[op.out])
                for op in readers
                if isinstance(op, ops.Linear)
            }
        )

    def _needs_floats(self, value: int) -> bool:
        return any(not isinstance(self._ops[at], ops.Linear) for at in self._readers.get(value, ()))

    def _micro(
        self,
        domain: int,
        kind: int,
        *,
        a: int = -1,
        b: int = -1,
        c: int = -1,
        d: int = -1,
        e: int = -1,
        out: int = -1,
        f: float = 0.0,
    ) -> None:
        if domain != self._micros_domain:
            self._flush()
            self._micros_domain = domain
        self._micros.append((kind, a, b, c, d, e, out, f))

    def _flush(self) -> None:
        if self._micros:
            self._program.rows_phase(self._micros_domain, self._micros)
            self._micros = []

    def _read(self, value: int) -> int:
        return self._buffers.slot_of(value)

    def _write(self, value: int) -> int:
        return self._buffers.slot(value, self._tape.widths[value], self._domains[value])

    def _last_reader(self, value: int) -> int:
        if value == self._tape.outputs["logits"]:
            return len(self._ops)
        return max(self._readers.get(value, [-1]))

    def _domain_of(self, op: ops.Op) -> int:
        if isinstance(op, ops.TakeRows):
            return ROWS
        return max((self._domains[value] for value in _inputs(op)), default=TOKENS)


def _inputs(op: ops.Op) -> tuple[int, ...]:
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


def _used(group: Sequence[ops.Op]) -> set[int]:
    used = {value for op in group for value in _inputs(op)}
    return used | {op.out for op in group if not isinstance(op, ops.Output)}
