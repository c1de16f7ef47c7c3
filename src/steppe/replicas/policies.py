"""Where a request goes: the rules that choose among the replicas that are in rotation."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol, TypeVar

from steppe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from random import Random

    from steppe.request import LLMGenerationRequest

__all__ = [
    "POLICIES",
    "LeastLoaded",
    "Policy",
    "PowerOfTwo",
    "PrefixAffinity",
    "RoundRobin",
    "Scored",
    "policy_named",
]


class Scored(Protocol):
    """A replica as a policy sees it. ``score`` is its last polled load (0 to 1) plus what was
    routed to it since, plus 1 for every poll that it has missed.
    """

    name: str
    score: float


S = TypeVar("S", bound=Scored)


class Policy(Protocol):
    """Chooses among replicas, never none of them. Deterministic under a seeded ``rng``."""

    def choose(self, among: Sequence[S], request: LLMGenerationRequest, rng: Random) -> S:
        """One of ``among``."""


class LeastLoaded:
    """The lowest score; ties are broken at random, so that equals get equal shares."""

    def choose(self, among: Sequence[S], request: LLMGenerationRequest, rng: Random) -> S:
        best = among[0].score
        found: list[S] = []
        for one in among:
            score = one.score
            if score < best:
                best = score
                found = [one]
            elif score == best:
                found.append(one)
        return found[0] if len(found) == 1 else rng.choice(found)


class PowerOfTwo:
    """The lower of two drawn at random: nearly as even, at a cost that no number of replicas
    raises.
    """

    def choose(self, among: Sequence[S], request: LLMGenerationRequest, rng: Random) -> S:
        count = len(among)
        if count == 1:
            return among[0]
        first = int(rng.random() * count)
        second = int(rng.random() * (count - 1))
        if second >= first:
            second += 1
        one, other = among[first], among[second]
        return one if one.score <= other.score else other


class RoundRobin:
    """Each in its turn, whatever its load."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, among: Sequence[S], request: LLMGenerationRequest, rng: Random) -> S:
        self._turn += 1
        return among[(self._turn - 1) % len(among)]


class PrefixAffinity:
    """Where the longest known prefix of the prompt went last, so that its cache is met again.

    Never to one whose score is more than ``max_imbalance`` above the lowest: then, and for a prompt
    that nobody has seen, the least loaded. Remembers ``entries`` prefixes, the latest used; prompts
    are cut into pieces of ``block`` tokens, or four times as many characters.
    """

    MAX_BLOCKS = 64
    """Pieces of a prompt that are looked at: what comes after them decides nothing."""

    def __init__(
        self, *, max_imbalance: float = 0.25, block: int = 64, entries: int = 65_536
    ) -> None:
        if not max_imbalance >= 0:
            raise ConfigError("max_imbalance", f"must be 0 or more, not {max_imbalance!r}")
        self._max_imbalance = max_imbalance
        self._block = block
        self._entries = entries
        self._seen: OrderedDict[int, str] = OrderedDict()
        self._otherwise = LeastLoaded()

    def choose(self, among: Sequence[S], request: LLMGenerationRequest, rng: Random) -> S:
        prefixes = list(self._prefixes(request))
        chosen = self._known(among, prefixes)
        if chosen is None:
            chosen = self._otherwise.choose(among, request, rng)
        for prefix in prefixes:
            self._seen[prefix] = chosen.name
            self._seen.move_to_end(prefix)
        while len(self._seen) > self._entries:
            self._seen.popitem(last=False)
        return chosen

    def _known(self, among: Sequence[S], prefixes: Sequence[int]) -> S | None:
        names = {one.name: one for one in among}
        for prefix in reversed(prefixes):
            found = names.get(self._seen.get(prefix, ""))
            if found is not None:
                lowest = min(one.score for one in among)
                return found if found.score <= lowest + self._max_imbalance else None
        return None

    def _prefixes(self, request: LLMGenerationRequest) -> Iterator[int]:
        """A hash of each prefix that ends with a whole piece, the shortest first."""
        if request.messages is not None:
            pieces = [repr(sorted(one.items(), key=str)) for one in request.messages]
        else:
            prompt, size = request.prompt, self._block
            if isinstance(prompt, str):
                size *= 4
            assert prompt is not None
            pieces = [prompt[at : at + size] for at in range(0, len(prompt) - size + 1, size)]  # type: ignore[misc]
        chain = 0
        for piece in pieces[: self.MAX_BLOCKS]:
            chain = hash((chain, piece))
            yield chain


POLICIES: dict[str, Callable[[], Policy]] = {
    "least-loaded": LeastLoaded,
    "power-of-two": PowerOfTwo,
    "round-robin": RoundRobin,
    "prefix-affinity": PrefixAffinity,
}
"""Every policy by its name on a command line."""


def policy_named(name: str) -> Policy:
    """A fresh policy. Raises ConfigError (``policy``)."""
    if name not in POLICIES:
        raise ConfigError("policy", f"{name!r} is none of {', '.join(POLICIES)}")
    return POLICIES[name]()
