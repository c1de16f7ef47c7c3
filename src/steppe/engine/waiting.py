"""Who is next: the sequences that wait for a seat, in order of arrival or in a fair order."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from steppe.engine.record import SequenceRecord

__all__ = ["Account", "FairWaiting", "FcfsWaiting", "Waiting"]

AGEING_SECONDS = 10.0
"""How long a request waits for one step up in priority."""
MAX_LEVEL = 16
"""Priorities beyond this count as this, so that ageing ends every wait."""


class Waiting(Protocol):
    """The waiting sequences. The actor's alone.

    Admission is done in rounds: ``head`` names the next candidate, which is then taken or passed
    over, until there is none; ``end_round`` closes it. A sequence that was preempted comes before
    all that were never seated.
    """

    def __len__(self) -> int: ...

    def append(self, sequence: SequenceRecord) -> None:
        """A new arrival."""

    def put_back(self, sequence: SequenceRecord) -> None:
        """A resident that was preempted."""

    def head(self, now: float, *, resumed_only: bool = False) -> SequenceRecord | None:
        """The next candidate of this round."""

    def take(self, sequence: SequenceRecord) -> int:
        """It is seated, or has ended. Returns how many it overtook that could not be seated."""

    def pass_over(self, sequence: SequenceRecord) -> bool:
        """It cannot be seated now. Whether another may be tried in this round."""

    def end_round(self) -> None:
        """Forget who was passed over."""

    def remove_stopped(self) -> list[SequenceRecord]:
        """Take out, and return, every sequence whose record was stopped."""

    def clear(self) -> list[SequenceRecord]:
        """Take out, and return, everybody."""

    def served(self, sequence: SequenceRecord, tokens: int) -> None:
        """A resident was given that many tokens."""

    def left(self, sequence: SequenceRecord) -> None:
        """A sequence is gone for good."""


def _part(line: Iterable[SequenceRecord]) -> tuple[list[SequenceRecord], list[SequenceRecord]]:
    """The stopped, and the others."""
    gone: list[SequenceRecord] = []
    kept: list[SequenceRecord] = []
    for one in line:
        # Each flag is read once: callers set it at any moment, and who is in neither list is lost.
        (gone if one.record.stopped else kept).append(one)
    return gone, kept


class FcfsWaiting:
    """Strict order of arrival: whoever cannot be seated holds up all behind."""

    def __init__(self) -> None:
        self._line: deque[SequenceRecord] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def append(self, sequence: SequenceRecord) -> None:
        self._line.append(sequence)

    def put_back(self, sequence: SequenceRecord) -> None:
        # The newest are preempted first, so the front stays in order of arrival.
        self._line.appendleft(sequence)

    def head(self, now: float, *, resumed_only: bool = False) -> SequenceRecord | None:
        if not self._line or (resumed_only and self._line[0].resume is None):
            return None
        return self._line[0]

    def take(self, sequence: SequenceRecord) -> int:
        self._line.popleft()
        return 0

    def pass_over(self, sequence: SequenceRecord) -> bool:
        return False

    def end_round(self) -> None: ...

    def remove_stopped(self) -> list[SequenceRecord]:
        gone, kept = _part(self._line)
        if gone:
            self._line = deque(kept)
        return gone

    def clear(self) -> list[SequenceRecord]:
        gone, self._line = list(self._line), deque()
        return gone

    def served(self, sequence: SequenceRecord, tokens: int) -> None: ...

    def left(self, sequence: SequenceRecord) -> None: ...


class Account:
    """What one caller was given, in tokens, and how many of its sequences are here."""

    __slots__ = ("name", "present", "served")

    def __init__(self, name: str, served: int) -> None:
        self.name = name
        self.served = served
        self.present = 0


class FairWaiting:
    """Priority with ageing, then the caller that was served least, then order of arrival.

    A request's priority rises by one for every AGEING_SECONDS it waits, up to the highest that
    waits, where callers take turns by tokens served; so nothing starves, and a caller's own backlog
    delays nobody else. A caller that comes (back) starts level with the least served one present:
    idle time earns nothing. Whoever could not be seated may be overtaken ``max_skips`` times and
    is then the only candidate until it is seated.
    """

    def __init__(self, max_skips: int) -> None:
        self._max_skips = max_skips
        self._line: list[SequenceRecord] = []
        self._passed: list[SequenceRecord] = []
        self._accounts: dict[str, Account] = {}

    def __len__(self) -> int:
        return len(self._line)

    def append(self, sequence: SequenceRecord) -> None:
        name = sequence.request.caller
        account = self._accounts.get(name)
        if account is None:
            level = min((other.served for other in self._accounts.values()), default=0)
            account = self._accounts[name] = Account(name, level)
        account.present += 1
        sequence.account = account
        self._line.append(sequence)

    def put_back(self, sequence: SequenceRecord) -> None:
        self._line.append(sequence)

    def head(self, now: float, *, resumed_only: bool = False) -> SequenceRecord | None:
        if any(one.skips >= self._max_skips for one in self._passed):
            return None
        line: Iterable[SequenceRecord] = self._line
        if resumed_only:
            line = [one for one in line if one.resume is not None]
        if self._passed:
            line = [one for one in line if one not in self._passed]
        top = max((_level(one) for one in self._line), default=0)
        return min(line, key=lambda one: self._key(one, now, top), default=None)

    def _key(self, one: SequenceRecord, now: float, top: int) -> tuple[bool, bool, int, int, int]:
        aged = _level(one) + int((now - one.record.submitted_at) / AGEING_SECONDS)
        account = one.account
        return (
            one.resume is None,
            # Passed often enough: nobody else gets the next place.
            one.skips < self._max_skips or not one.skips,
            -min(aged, top),
            account.served if account else 0,
            one.id,
        )

    def take(self, sequence: SequenceRecord) -> int:
        self._line.remove(sequence)
        # So that callers alternate within one round, before any token is served.
        self.served(sequence, 1)
        for one in self._passed:
            one.skips += 1
        return len(self._passed)

    def pass_over(self, sequence: SequenceRecord) -> bool:
        self._passed.append(sequence)
        return sequence.skips < self._max_skips

    def end_round(self) -> None:
        self._passed.clear()

    def remove_stopped(self) -> list[SequenceRecord]:
        gone, kept = _part(self._line)
        if gone:
            self._line = kept
        return gone

    def clear(self) -> list[SequenceRecord]:
        gone, self._line = self._line, []
        return gone

    def served(self, sequence: SequenceRecord, tokens: int) -> None:
        if sequence.account is not None:
            sequence.account.served += tokens

    def left(self, sequence: SequenceRecord) -> None:
        account = sequence.account
        if account is None:
            return
        sequence.account = None
        account.present -= 1
        if not account.present:
            self._accounts.pop(account.name, None)


def _level(sequence: SequenceRecord) -> int:
    return max(-MAX_LEVEL, min(MAX_LEVEL, sequence.request.priority))
