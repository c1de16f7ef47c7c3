"""What a step costs, learned from a recorded run: a sum of few parts, each with its own price.

A step is described by what is computed in it. The prices are the non-negative least-squares
solution over all recorded steps, in relative error, so that a long step counts no more than a short
one. How far each recorded step was off is kept as well: a simulation draws from it, or it would
show none of the jitter that makes up a 99th percentile.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from steppe.engine.recording import read_recording
from steppe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["PARTS", "CostModel", "Observed", "StepWork", "fit", "non_negative", "observe"]

PARTS = ("step", "token", "sampled token", "1,000 keys of decodes", "1,000 keys of prompts")
"""What the prices are for, in the order of ``StepWork.features``."""
LEAST_STEPS = 20
STALLS = 0.01
"""The share of gaps between steps, the longest, that is left out as none of the engine's doing."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes.

    ``tokens`` are all its rows, ``sampled`` those whose logits are wanted. ``decode_keys`` and
    ``prompt_keys`` count the keys that attention reads: of decoding rows, and of every row of a
    prompt chunk.
    """

    tokens: int
    sampled: int
    decode_keys: int
    prompt_keys: int

    @classmethod
    def of(
        cls, decodes: Sequence[tuple[int, int]], chunks: Sequence[tuple[int, int, bool]]
    ) -> StepWork:
        """From (tokens, context before) of each decode, and (tokens, context before, whether the
        prompt ends with it) of each chunk.
        """
        return cls(
            sum(n for n, _ in decodes) + sum(n for n, _, _ in chunks),
            sum(n for n, _ in decodes) + sum(last for _, _, last in chunks),
            sum(n * before + n * (n + 1) // 2 for n, before in decodes),
            sum(n * before + n * (n + 1) // 2 for n, before, _ in chunks),
        )

    def features(self) -> tuple[float, ...]:
        """One number for each of ``PARTS``."""
        return (1.0, self.tokens, self.sampled, self.decode_keys / 1000, self.prompt_keys / 1000)


@dataclass(frozen=True, slots=True)
class Observed:
    """A recorded run, as a model is fitted to it. Times in seconds.

    ``gaps`` are (sequences seated, time from one step to the next), where somebody was seated all
    the while, admissions left out; those are ``admissions``. ``most_seated`` and ``most_tokens``
    are the largest batch and step that were seen.
    """

    header: dict[str, Any]
    steps: tuple[tuple[StepWork, float], ...]
    gaps: tuple[tuple[int, float], ...]
    admissions: tuple[float, ...]
    most_seated: int
    most_tokens: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices in seconds: ``prices`` of the parts of a step, ``gap`` between two steps and for each
    sequence seated then, ``admission`` of a sequence. ``spread`` holds, in rising order, the ratios
    of measured to priced time.
    """

    prices: tuple[float, ...]
    gap: tuple[float, float]
    admission: float
    spread: tuple[float, ...] = (1.0,)

    def step_seconds(self, work: StepWork) -> float:
        """The price of a step."""
        return sum(
            price * amount for price, amount in zip(self.prices, work.features(), strict=True)
        )

    def gap_seconds(self, seated: int) -> float:
        """From the end of a step to the start of the next."""
        return self.gap[0] + self.gap[1] * seated

    def off_by(self, share: float) -> float:
        """By what fraction at most the price of that share of the recorded steps was wrong."""
        errors = sorted(abs(ratio - 1) for ratio in self.spread)
        return errors[min(len(errors) - 1, int(share * len(errors)))]


def observe(path: Path) -> Observed:
    """Read a recording. Raises ConfigError for one that is too short, or does not say what ran."""
    run = _Run()
    header: dict[str, Any] = {}
    for number, event in read_recording(path):
        if number == 1:
            header = event
        elif event.get("event") == "admit":
            run.admit(event)
        elif event.get("event") == "step":
            if event["before"] is None:
                raise ConfigError("recording", f"{path} has steps in an order that plans nothing")
            run.step(event)
    if len(run.steps) < LEAST_STEPS:
        raise ConfigError(
            "recording", f"{path} has {len(run.steps)} steps; a model needs at least {LEAST_STEPS}"
        )
    most_tokens = max(work.tokens for work, _ in run.steps)
    return Observed(
        header, tuple(run.steps), tuple(run.gaps), tuple(run.admissions), run.most_seated,
        most_tokens,
    )  # fmt: skip


class _Run:
    """Follows a recording: who is seated, and how much of each is computed."""

    def __init__(self) -> None:
        self.steps: list[tuple[StepWork, float]] = []
        self.gaps: list[tuple[int, float]] = []
        self.admissions: list[float] = []
        self.most_seated = 0
        self._computed: dict[tuple[int, int], int] = {}
        self._ended: float | None = None
        """When the last step ended, while somebody stayed."""
        self._admitting = 0.0
        """What admissions took since then."""

    def admit(self, event: dict[str, Any]) -> None:
        slot, epoch = event["seat"]
        self._computed[slot, epoch] = 0
        self.admissions.append(event["ended"] - event["began"])
        self._admitting += self.admissions[-1]

    def step(self, event: dict[str, Any]) -> None:
        computed = self._computed
        if self._ended is not None:
            gap = event["began"] - self._ended - self._admitting
            self.gaps.append((len(computed), max(0.0, gap)))
        self.most_seated = max(self.most_seated, len(computed))
        work = self._work(event)
        result = event["result"]
        if result is not None and result["ok"]:
            self.steps.append((work, event["ended"] - event["began"]))
            for slot, epoch, *_ in chain(result["finished"], result["preempted"]):
                computed.pop((slot, epoch), None)
        else:
            computed.clear()
        self._ended, self._admitting = (event["ended"] if computed else None), 0.0

    def _work(self, event: dict[str, Any]) -> StepWork:
        """What a step computed; counts it as computed."""
        computed, batch = self._computed, event["batch"]
        left = {(slot, epoch): rest for slot, epoch, rest, *_ in event["before"]["residents"]}
        decodes, chunks = [], []
        for slot, epoch, tokens in batch["decodes"]:
            before = computed.get((slot, epoch), 0)
            decodes.append((tokens, before))
            computed[slot, epoch] = before + tokens
        for slot, epoch, tokens in batch["prefills"]:
            before = computed.get((slot, epoch), 0)
            chunks.append((tokens, before, tokens == left[slot, epoch]))
            computed[slot, epoch] = before + tokens
        return StepWork.of(decodes, chunks)


def fit(observed: Observed) -> CostModel:
    """The prices that explain a recorded run best."""
    amounts = np.array([work.features() for work, _ in observed.steps])
    seconds = np.array([max(taken, 1e-9) for _, taken in observed.steps])
    prices = non_negative(amounts / seconds[:, None], np.ones(len(seconds)))
    priced = amounts @ prices
    ratios = np.sort(seconds / np.where(priced > 0, priced, seconds))
    gap = (0.0, 0.0)
    if observed.gaps:
        kept = sorted(observed.gaps, key=lambda one: one[1])
        kept = kept[: max(1, round(len(kept) * (1 - STALLS)))]
        seated = np.array([[1.0, count] for count, _ in kept])
        fixed, each = non_negative(seated, np.array([taken for _, taken in kept]))
        gap = (float(fixed), float(each))
    admission = float(np.median(observed.admissions)) if observed.admissions else 0.0
    return CostModel(tuple(map(float, prices)), gap, admission, tuple(map(float, ratios)))


def non_negative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """The least-squares solution none of whose components is negative, over a few columns.

    The optimum is an unconstrained one over some subset of the columns, so all are tried.
    """
    columns = matrix.shape[1]
    best, least = np.zeros(columns), float(target @ target)
    for subset in chain.from_iterable(
        combinations(range(columns), size) for size in range(1, columns + 1)
    ):
        chosen = list(subset)
        solution, *_ = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)
        if (solution < 0).any():
            continue
        error = matrix[:, chosen] @ solution - target
        if (squared := float(error @ error)) < least:
            least, best = squared, np.zeros(columns)
            best[chosen] = solution
    return best
