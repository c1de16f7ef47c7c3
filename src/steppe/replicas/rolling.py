"""Replacing the engines of a coordinator one by one, when somebody asks for it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from steppe.replicas.coordinator import DpCoordinator
    from steppe.replicas.engine_core import EngineCoreActor

__all__ = ["RollingReplacement", "next_name"]

logger = logging.getLogger("steppe.replicas")


def next_name(name: str) -> str:
    """What the successor of a replica of that name is called: "0", "0.2", "0.3" and so on."""
    base, _, number = name.partition(".")
    return f"{base}.{int(number or 1) + 1}"


class RollingReplacement:
    """Rounds in which every replica gets a successor, one after the other. One event loop.

    ``successor(replica, name)`` makes one that has not been started, or None for a replica that is
    not ours to replace. A successor is ready before its predecessor gets nothing more, and that
    finishes what it has, however long it takes; so a round needs the memory of one replica more,
    and loses no request. A successor that does not start ends the round: those that stand, stay.
    """

    def __init__(
        self,
        coordinator: DpCoordinator,
        successor: Callable[[EngineCoreActor, str], EngineCoreActor | None],
    ) -> None:
        self._coordinator = coordinator
        self._successor = successor
        self._wanted = False
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Ask for a round. Asked for while one goes on, another comes after it, and only one."""
        self._wanted = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def finished(self) -> None:
        """Wait until no round goes on."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def stop(self) -> None:
        """End a round where it is. What was taken out of rotation finishes what it has."""
        self._wanted = False
        if self._task is not None:
            self._task.cancel()
            await self.finished()

    async def _run(self) -> None:
        while self._wanted:
            self._wanted = False
            try:
                await self._round()
            except Exception as error:
                # Whatever a start raises: nobody waits for this, and those that serve go on.
                logger.exception("a replacement was given up", exc_info=error)

    async def _round(self) -> None:
        replaced = 0
        for old in self._coordinator.actors:
            new = self._successor(old, next_name(old.name))
            if new is None:
                continue
            logger.warning("replica %s: its successor %s is being started", old.name, new.name)
            await self._coordinator.replace(old.name, new)
            replaced += 1
        logger.warning("%d replicas were replaced", replaced)
