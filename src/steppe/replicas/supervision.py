"""Care for a replica's runner: start it, watch it, start it again, and know when to stop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from steppe.engine.config import EngineHealth
from steppe.engine.metrics import EngineMetrics
from steppe.errors import LoadTimeoutError, ReplicaLostError, SteppeError
from steppe.replicas.account import added
from steppe.replicas.vocabulary import ReplicaState
from steppe.stepping.cache_metrics import together

if TYPE_CHECKING:
    from collections.abc import Callable

    from steppe.replicas.messages import LocalEngineConfig
    from steppe.replicas.runner import ModelRunner
    from steppe.replicas.vocabulary import RunnerStatus
    from steppe.stepping.cache_metrics import ContextCacheMetrics

__all__ = ["RestartBudget", "Supervision"]

logger = logging.getLogger("steppe.replicas")

MAX_PAUSE = 30.0
"""Longest pause before a restart, in seconds."""


class RestartBudget:
    """At most ``restarts`` in any ``window`` seconds, after pauses that double within it."""

    def __init__(self, restarts: int, window: float, pause: float) -> None:
        self._restarts = restarts
        self._window = window
        self._pause = pause
        self._taken: deque[float] = deque()

    def take(self, now: float) -> float | None:
        """Seconds to wait before the next restart; None when there may be none any more."""
        taken = self._taken
        while taken and now - taken[0] >= self._window:
            taken.popleft()
        if len(taken) >= self._restarts:
            return None
        pause = min(MAX_PAUSE, self._pause * 2.0 ** len(taken))
        # It counts from when it happens.
        taken.append(now + pause)
        return pause


class Supervision:
    """Owns the life of one runner, and the state that follows from it. One event loop.

    ``on_lost`` is called when the runner is lost, before it is closed and started again.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: LocalEngineConfig,
        name: str,
        on_lost: Callable[[Exception], object],
    ) -> None:
        self.state = ReplicaState.LOADING
        self.generation = 0
        """How often the runner has started."""
        self.cause: Exception | None = None
        """What it was lost to, or could not start for, last."""
        self.status: RunnerStatus | None = None
        """Its last answer to a probe; None while it does not run."""
        self.answered = 0.0
        """When that was."""
        self._runner = runner
        self._config = config
        self._name = name
        self._on_lost = on_lost
        self._past = EngineMetrics()
        self._past_cache: ContextCacheMetrics | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin, once; return when the runner is ready. Raises what made it fail, if it did."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._supervise())
        while self.state is ReplicaState.LOADING:
            await self._changed.wait()
        if self.state is ReplicaState.FAILED and self.cause is not None:
            raise self.cause.with_traceback(None)

    def close_admission(self) -> None:
        """From now on it drains: a runner that is lost is not started again."""
        self._become(ReplicaState.DRAINING)

    async def stop(self) -> None:
        """Close the runner, whatever it is doing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._runner.close()
        self._become(ReplicaState.STOPPED)

    def engine_metrics(self) -> EngineMetrics:
        """The counters of every engine that the runner has had, as of the last probe."""
        if self.status is None:
            return self._past
        return added((self._past, self.status.metrics))

    def cache_metrics(self) -> ContextCacheMetrics | None:
        """What the caches of all those engines did, and what the present one holds, as of the last
        probe; None while that is not known of any.
        """
        now = None if self.status is None else self.status.cache
        return together((self._past_cache, now))

    @property
    def silence(self) -> float | None:
        """Seconds since its last answer, if it has missed three probes; else None."""
        silence = asyncio.get_running_loop().time() - self.answered
        return silence if silence > 3 * self._config.probe_interval else None

    def health(self) -> EngineHealth:
        """Whether tokens are flowing, as of the last probe."""
        status = self.status
        known = None if status is None else status.health
        queued, resident = (known.queued, known.resident) if known is not None else (0, 0)
        cause = None if self.cause is None else str(self.cause)
        match self.state:
            case ReplicaState.READY if known is not None:
                if (silence := self.silence) is not None:
                    cause = f"it has not answered for {silence:.1f} s"
                    return EngineHealth(False, "stalled", queued, resident, silence, cause)
                return known
            case ReplicaState.READY | ReplicaState.LOADING:
                return EngineHealth(False, "loading", 0, 0, None, cause)
            case ReplicaState.DRAINING:
                return EngineHealth(False, "stopping", queued, resident)
            case ReplicaState.FAILED:
                return EngineHealth(False, "failed", 0, 0, None, cause)
            case _:
                return EngineHealth(False, "stopped", 0, 0)

    # ---- the supervisor --------------------------------------------------------------------------

    async def _supervise(self) -> None:
        config = self._config
        budget = RestartBudget(config.max_restarts, config.restart_window, config.restart_pause)
        while self.state is not ReplicaState.DRAINING:
            try:
                cause = await self._serve()
            except Exception as error:  # whatever a runner raises: nobody else is there to see it
                cause = error
            self._lose(cause)
            await self._runner.close()
            pause = budget.take(asyncio.get_running_loop().time()) if _may_pass(cause) else None
            if pause is None:
                logger.error("replica %s has failed: %s", self._name, cause)
                self._become(ReplicaState.FAILED)
                return
            logger.warning("replica %s was lost (%s): again in %g s", self._name, cause, pause)
            self._become(ReplicaState.LOADING)
            await asyncio.sleep(pause)

    async def _serve(self) -> Exception:
        """Start the runner; return, or raise, what it is lost to."""
        await self._load()
        self._note(await self._probe())
        self.generation += 1
        self._become(ReplicaState.READY)
        loop = asyncio.get_running_loop()
        waiting = (loop.create_task(self._runner.lost()), loop.create_task(self._watch()))
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in waiting:
                task.cancel()

    async def _load(self) -> None:
        limit = self._config.max_loading
        try:
            async with asyncio.timeout(limit) as patience:
                await self._runner.start()
        except TimeoutError:
            if not patience.expired():
                raise
            # Cancelled, it has left nothing running.
            raise LoadTimeoutError(f"it has not loaded within {limit:g} s") from None

    async def _watch(self) -> Exception:
        """Probe the runner until it does not answer, or says that it has failed."""
        while True:
            await asyncio.sleep(self._config.probe_interval)
            status = await self._probe()
            self._note(status)
            if status.health.state in ("failed", "stopped"):
                return ReplicaLostError(f"its engine has {status.health.state}")

    async def _probe(self) -> RunnerStatus:
        limit = self._config.max_silence
        try:
            async with asyncio.timeout(limit):
                return await self._runner.status()
        except TimeoutError:
            raise ReplicaLostError(f"it has not answered for {limit:g} s") from None

    def _note(self, status: RunnerStatus) -> None:
        self.status = status
        self.answered = asyncio.get_running_loop().time()

    def _lose(self, cause: Exception) -> None:
        self.cause = cause
        self._past = self.engine_metrics()
        cache = self.cache_metrics()
        self._past_cache = None if cache is None else cache.after_the_end()
        self.status = None
        self._on_lost(cause)

    def _become(self, state: ReplicaState) -> None:
        if self.state is ReplicaState.DRAINING and state is not ReplicaState.STOPPED:
            return
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()


def _may_pass(cause: Exception) -> bool:
    """Whether starting again can help."""
    return not isinstance(cause, SteppeError) or cause.retryable
