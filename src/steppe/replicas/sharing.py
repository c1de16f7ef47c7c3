"""How one machine is shared out among the processes of its replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steppe.errors import ConfigError
from steppe.replicas.runners.process import ChildSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Share", "child_specs", "shares"]

MOST_KV_MEMORY = 2 * 2**30
"""Bytes that the caches of one replica take at most when nobody says how many."""
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""The variable that says which GPUs a process sees, in what order."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one replica gets: processors of its own, threads on them, memory for its cache (bytes),
    how many sequences it may accept, and the GPUs that it sees; None leaves it those that this
    process sees.
    """

    cores: tuple[int, ...] | None
    threads: int
    kv_memory: int
    max_concurrent: int
    gpus: tuple[str, ...] | None = None


def shares(
    replicas: int,
    *,
    cores: Sequence[int],
    threads: int | None,
    kv_memory: int | None,
    free_memory: int,
    max_pending: int,
    gpus: Sequence[str] = (),
) -> list[Share]:
    """Equal shares of what is given for all together.

    Every replica has neighbouring cores to itself; where there are fewer cores than replicas, all
    use all, with a thread each. Without ``kv_memory`` a quarter of the free memory is shared.
    ``gpus`` are dealt out in order, as many to each.

    Raises ConfigError for what cannot be divided by so many.
    """
    if replicas < 1:
        raise ConfigError("replicas", f"must be at least 1, not {replicas}")
    if threads is not None and threads < replicas:
        raise ConfigError("threads", f"{threads} threads are too few for {replicas} replicas")
    if max_pending < replicas:
        raise ConfigError("max_pending", f"{max_pending} is too few for {replicas} replicas")
    if len(gpus) % replicas:
        raise ConfigError("gpus", f"{len(gpus)} GPUs cannot be dealt out to {replicas} replicas")
    if len(set(gpus)) < len(gpus):
        raise ConfigError("gpus", f"one of {', '.join(gpus)} is named twice")
    memory = kv_memory // replicas if kv_memory is not None else free_memory // (4 * replicas)
    if kv_memory is None:
        memory = min(memory, MOST_KV_MEMORY)
    each, devices = len(cores) // replicas, len(gpus) // replicas
    found = []
    for number in range(replicas):
        own = tuple(cores[number * each : (number + 1) * each]) or None
        wanted = len(cores) if threads is None else threads
        count = max(1, min(wanted // replicas, each or 1))
        seen = tuple(gpus[number * devices : (number + 1) * devices]) or None
        found.append(Share(own, count, memory, -(-max_pending // replicas), seen))
    return found


def child_specs(several: Sequence[Share], options: Mapping[str, Any]) -> list[ChildSpec]:
    """What each process is to load: ``options`` of ``LLM``, on its share of the machine.

    An engine accepts twice what its replica does: who was cancelled holds a place there until the
    next step boundary.
    """
    return [
        ChildSpec(
            options={
                **options,
                "threads": share.threads,
                "kv_memory": share.kv_memory,
                "max_pending": 2 * share.max_concurrent,
            },
            cores=share.cores,
            environment={} if share.gpus is None else {VISIBLE_GPUS: ",".join(share.gpus)},
        )
        for share in several
    ]
