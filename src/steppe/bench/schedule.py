"""When which request is sent: decided before the first one goes out, from a seed or a file.

An open loop: arrivals do not wait for answers, as users do not wait for each other.
"""

from __future__ import annotations

import csv
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steppe.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Arrival", "Lengths", "poisson", "prompt_text", "read_trace"]

# Each is one token, with the space before it, in the vocabularies of common models.
COMMON = """
time year people way day man thing woman life child world school state family student
group country problem hand part place case week company system program question work
government number night point home water room mother area money story fact month lot right
study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea kid body
information back parent face others level office door health person art war history party
result change morning reason research girl guy moment air teacher force education
"""
WORDS = COMMON.split()


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: due ``at`` seconds after the start, lengths in tokens."""

    index: int
    at: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths from ``low`` to ``high``, each as likely as any other."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ConfigError("lengths", f"{self.low}:{self.high} is no range of at least 1")

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """``128``, or ``64:256``. Raises ConfigError."""
        low, _, high = text.partition(":")
        try:
            return cls(int(low), int(high or low))
        except ValueError:
            raise ConfigError("lengths", f"{text!r} is neither 128 nor 64:256") from None

    def draw(self, source: random.Random) -> int:
        """One of them."""
        return source.randint(self.low, self.high)


def poisson(
    rate: float, count: int, prompt: Lengths, output: Lengths, seed: int
) -> tuple[Arrival, ...]:
    """``count`` arrivals, ``rate`` a second on average, independent of each other.

    The same seed gives the same lengths and, in units of the mean gap, the same gaps at any rate,
    so that rates can be compared. An infinite rate sends everything at once. Raises ConfigError.
    """
    if not rate > 0:
        raise ConfigError("rate", f"must be more than 0 a second, not {rate!r}")
    if count < 1:
        raise ConfigError("requests", f"must be at least 1, not {count!r}")
    # Two streams, so that the gaps stay when the lengths are given differently.
    gaps, lengths = random.Random(f"gaps {seed}"), random.Random(f"lengths {seed}")
    arrivals, units = [], 0.0
    for index in range(count):
        arrivals.append(Arrival(index, units / rate, prompt.draw(lengths), output.draw(lengths)))
        units += -math.log1p(-gaps.random())
    return tuple(arrivals)


def read_trace(path: Path) -> tuple[Arrival, ...]:
    """Arrivals from a CSV file with the columns ``at``, ``prompt_tokens`` and ``output_tokens``.

    Times are seconds; the earliest is the start. Other columns are left alone. Raises ConfigError.
    """
    arrivals = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        for name in ("at", "prompt_tokens", "output_tokens"):
            if name not in (rows.fieldnames or ()):
                raise ConfigError("trace", f"{path} has no column {name!r}")
        for row in rows:
            where = f"line {rows.line_num} of {path}"
            try:
                at = float(row["at"])
                prompt, output = int(row["prompt_tokens"]), int(row["output_tokens"])
            except (TypeError, ValueError):
                raise ConfigError("trace", f"{where} holds no numbers") from None
            if not math.isfinite(at) or prompt < 1 or output < 1:
                raise ConfigError("trace", f"{where} is out of range")
            arrivals.append((at, prompt, output))
    if not arrivals:
        raise ConfigError("trace", f"{path} has no arrivals")
    arrivals.sort(key=lambda one: one[0])
    start = arrivals[0][0]
    return tuple(
        Arrival(index, at - start, prompt, output)
        for index, (at, prompt, output) in enumerate(arrivals)
    )


def prompt_text(arrival: Arrival, shared_prefix: int, seed: int, run: int = 0) -> str:
    """A prompt of about as many tokens as the arrival wants: common words, one token each.

    The first ``shared_prefix`` of them follow from the seed alone. The rest differ from request to
    request and from ``run`` to run, so that nothing else is found in a prefix cache.
    """
    shared = min(shared_prefix, arrival.prompt_tokens)
    common = random.Random(f"prefix {seed}")
    own = random.Random(f"prompt {seed} {run} {arrival.index}")
    words = [common.choice(WORDS) for _ in range(shared)]
    words += [own.choice(WORDS) for _ in range(arrival.prompt_tokens - shared)]
    return " ".join(words)
