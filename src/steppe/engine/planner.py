"""What the next step runs: a pure function of what is known before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from steppe.request import FinishReason
from steppe.stepping.types import DecodeEntry, ImmutableStepBatch, PrefillEntry

if TYPE_CHECKING:
    from steppe.stepping.types import ResidentNeed, ResidentRef

__all__ = ["Plan", "PlannerSnapshot", "StepBudget", "plan"]

TARGET_SECONDS = 0.050
FIRST_BUDGET = 256
LEAST_BUDGET = 16
MOST_BUDGET = 8192


@dataclass(frozen=True, slots=True)
class PlannerSnapshot:
    """Everything a plan depends on. ``residents`` come oldest first. A ``measured`` budget is what
    this machine should be able to run in time, not what somebody set.
    """

    budget: int
    page_size: int
    free_pages: int
    residents: tuple[ResidentNeed, ...]
    retire: tuple[tuple[ResidentRef, FinishReason], ...] = ()
    measured: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch, and who had to sit it out because no page was free."""

    batch: ImmutableStepBatch
    waiting: tuple[ResidentRef, ...] = ()
    tokens: int = 0
    """How many tokens the batch runs."""


def plan(snapshot: PlannerSnapshot, memo: dict[int, DecodeEntry] | None = None) -> Plan:
    """Choose the next batch.

    Every decode runs; prompt chunks share what the decodes leave of the budget, oldest first, and
    get one token at least. Of a measured budget they get as much as the decodes: where those alone
    take longer than a step should, a prompt fed token by token would wait for ever. Who follows
    another's prompt sits out, unless the step would be empty.

    Pages go to the oldest first as well, and nobody takes a page ahead of an older resident that
    lacks one. When an older resident lacks one, the newest are preempted, as many as it takes; the
    newest itself just waits. So the oldest always advances, and when it is alone and the pool is
    dry it has reached the wall: it ends with LENGTH. While anybody retires, nobody is preempted:
    their pages are free in the next step.

    ``memo`` saves making equal entries anew in every step; it does not influence the plan.
    """
    memo = {} if memo is None else memo
    residents = snapshot.residents
    leaving = {ref for ref, _ in snapshot.retire} if snapshot.retire else ()
    if leaving:
        residents = tuple(need for need in residents if need.ref not in leaving)
    free, size = snapshot.free_pages, snapshot.page_size
    decodes: list[DecodeEntry] = []
    prompts: list[ResidentNeed] = []
    waiting: list[ResidentRef] = []
    retire, preempt = snapshot.retire, []
    index, end = 0, len(residents)
    spent = 0
    while index < end:
        need = residents[index]
        if need.prefill_remaining:
            prompts.append(need)
            index += 1
            continue
        tokens = need.decode_tokens
        if need.room < tokens:
            pages = -((need.room - tokens) // size)
            while free < pages and index + 1 < end and not leaving:
                end -= 1
                victim = residents[end]
                preempt.append(victim.ref)
                free += victim.pages
                if not victim.pages:
                    break  # what it gives back is known only after the step
            if free < pages:
                waiting.append(need.ref)
                free = 0
                index += 1
                continue
            free -= pages
        ref = need.ref
        entry = memo.get(ref.slot)
        if entry is None or entry.ref is not ref or entry.query_length != tokens:
            memo[ref.slot] = entry = DecodeEntry(ref, tokens)
        decodes.append(entry)
        spent += tokens
        index += 1

    if waiting and len(residents) == 1 and not leaving:
        retire = ((residents[0].ref, FinishReason.LENGTH),)
        waiting = []
    prefills: list[PrefillEntry] = []
    left = max(1, snapshot.budget - spent, spent if snapshot.measured else 0)
    leaders = [need for need in prompts if not need.follows]
    if leaders or decodes:
        prompts = leaders
    for need in prompts:
        if left <= 0:
            break
        chunk = min(need.prefill_remaining, left)
        if need.room < chunk:
            # Prompts have their pages from admission on; an execution that hands them out later
            # gives as many tokens as there are pages for.
            chunk = min(chunk, need.room + free * size)
            if chunk <= 0:
                waiting.append(need.ref)
                continue
            free -= -((need.room - chunk) // size)
        prefills.append(PrefillEntry(need.ref, chunk))
        left -= chunk
        spent += chunk
    batch = ImmutableStepBatch(tuple(decodes), tuple(prefills), retire, tuple(preempt))
    return Plan(batch, tuple(waiting), spent)


class StepBudget:
    """How many tokens a step may have: what was configured, or what takes about 50 ms.

    Measured steps steer it. Their times are taken as a fixed part and one per token, fitted over
    recent steps: where the fixed part alone is long, chunks may double it, since smaller ones would
    only make a prompt cost more of them. Only a step that used the budget moves it, at most by half
    or twofold.
    """

    __slots__ = ("_budget", "_fixed", "_sums")

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed is not None
        self._budget = FIRST_BUDGET if fixed is None else fixed
        # Of recent steps, fading: weight, tokens, seconds, tokens squared, tokens times seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    @property
    def measured(self) -> bool:
        """Whether nobody has set it."""
        return not self._fixed

    @property
    def tokens(self) -> int:
        """The budget of the next step."""
        return self._budget

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in how long a step of that many tokens took."""
        if self._fixed or tokens <= 0:
            return
        weight, sum_tokens, sum_seconds, squares, products = self._sums
        self._sums = (
            0.9 * weight + 1.0,
            0.9 * sum_tokens + tokens,
            0.9 * sum_seconds + seconds,
            0.9 * squares + tokens * tokens,
            0.9 * products + tokens * seconds,
        )
        if tokens < self._budget // 2:
            return
        fixed, per_token = self._cost()
        allowed = max(TARGET_SECONDS, 2 * fixed)
        most = 2 * self._budget
        wanted = most if per_token <= 0 else min(most, int((allowed - fixed) / per_token))
        self._budget = min(MOST_BUDGET, max(LEAST_BUDGET, self._budget // 2, wanted))

    def _cost(self) -> tuple[float, float]:
        """Seconds of a step, and of each token in it, fitted by least squares."""
        weight, tokens, seconds, squares, products = self._sums
        mean = tokens / weight
        spread = squares / weight - mean * mean
        # Steps of nearly one size do not tell the two apart.
        if spread > (0.25 * mean) ** 2:
            per_token = (products / weight - mean * seconds / weight) / spread
            fixed = seconds / weight - per_token * mean
            if per_token > 0 and fixed >= 0:
                return fixed, per_token
        return 0.0, seconds / tokens
