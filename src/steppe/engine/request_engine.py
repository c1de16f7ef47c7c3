"""The engine as callers see it: any thread submits, cancels, looks and shuts down."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, NoReturn

from steppe.engine.activity import EngineActivity, live_sequences
from steppe.engine.actor import Actor, abandon
from steppe.engine.channel import EngineChannel
from steppe.engine.config import EngineConfig, EngineHealth, ShutdownMode
from steppe.engine.deadlines import Deadlines
from steppe.engine.handle import RequestHandle
from steppe.engine.record import RequestRecord, prompt_tokens
from steppe.engine.recording import Recorder
from steppe.errors import (
    ConfigError,
    EngineFailedError,
    ExecutionError,
    InvalidRequestError,
    SteppeError,
    SubmitError,
    UnsupportedRequestError,
)
from steppe.streaming import StreamChannel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from steppe.engine.metrics import EngineMetrics
    from steppe.engine.protocol import SteppedRuntime
    from steppe.errors import SubmitRefusal
    from steppe.request import LLMGenerationRequest, LLMGenerationResponse
    from steppe.stepping.cache_metrics import ContextCacheMetrics
    from steppe.stepping.execution import SteppedExecution
    from steppe.stepping.types import RequestId

__all__ = ["RequestEngine"]

LOST_PATIENCE = 1.0
"""Seconds that ``shutdown`` of a failed engine waits for a step that may never return."""


class RequestEngine:
    """Owns a runtime and the one thread that touches it (seed 000).

    ``submit`` and ``cancel`` return without waiting for that thread. A full queue or backlog is an
    immediate SubmitError, the signal to try later. As a context manager it drains at the end of the
    block, and cancels if the block raised. An engine that is dropped, or still there when the
    interpreter exits, shuts down with CANCEL by itself; a handle does not keep it alive.

    Raises ConfigError for a configuration that the runtime cannot serve.
    """

    def __init__(self, runtime: SteppedRuntime, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        if runtime.world_size > 1 and not getattr(runtime, "parallel_stepping", False):
            raise ConfigError(
                "world_size", f"this runtime cannot step its {runtime.world_size} ranks together"
            )
        if config.max_batch_size > 1 and not runtime.supports_seated_admission:
            raise ConfigError("max_batch_size", "nobody can join a batch of this runtime: use 1")
        if config.max_batch_size > runtime.max_batch_size:
            raise ConfigError(
                "max_batch_size",
                f"{config.max_batch_size} is more than the runtime's {runtime.max_batch_size}",
            )
        set_overcommit = getattr(runtime, "set_overcommit", None)
        if set_overcommit is not None:
            set_overcommit(config.overcommit)
        elif config.overcommit:
            raise ConfigError("overcommit", "this runtime cannot choose what it reserves")
        self._open(
            runtime.begin_stepped,
            config,
            validate=getattr(runtime, "validate", None),
            close=getattr(runtime, "close", None),
        )

    @classmethod
    def from_factory(
        cls,
        begin_stepped: Callable[[LLMGenerationRequest, RequestId], SteppedExecution | None],
        config: EngineConfig | None = None,
        *,
        manual: bool = False,
    ) -> RequestEngine:
        """An engine without a runtime: ``begin_stepped`` opens its batches.

        With ``manual`` no thread is started and the caller drives ``tick()``.
        """
        engine = cls.__new__(cls)
        engine._open(begin_stepped, config or EngineConfig(), manual=manual)
        return engine

    def _open(
        self,
        begin_stepped: Callable[[LLMGenerationRequest, RequestId], SteppedExecution | None],
        config: EngineConfig,
        *,
        validate: Callable[[LLMGenerationRequest], LLMGenerationRequest | None] | None = None,
        close: Callable[[], None] | None = None,
        manual: bool = False,
    ) -> None:
        self._config = config
        self._validate = validate
        # The runtime is the actor's alone; this looks at one that offers to be looked at.
        owner = getattr(begin_stepped, "__self__", None)
        leaks = getattr(owner, "leaks", None)
        self._runtime_leaks = None if leaks is None else weakref.WeakMethod(leaks)
        cache = getattr(owner, "read_context_cache", None)
        self._runtime_cache = None if cache is None else weakref.WeakMethod(cache)
        self._shared = shared = EngineChannel(
            config.command_queue_capacity,
            config.max_pending_requests,
            config.max_pending_tokens,
        )
        self._deadlines = Deadlines(shared, config, threaded=not manual)
        self._actor = Actor(shared, config, self._deadlines, begin_stepped, close)
        self._stopping = threading.Lock()
        self._thread: threading.Thread | None = None
        if not manual:
            # A daemon, because the interpreter waits for others before it runs any finalizer.
            self._thread = threading.Thread(
                target=self._actor.run, name="steppe-engine", daemon=True
            )
        self._finalizer = weakref.finalize(
            self, abandon, shared, self._actor, self._deadlines, self._thread
        )
        if self._thread is not None:
            self._thread.start()

    # ---- requests --------------------------------------------------------------------------------

    def submit(self, request: LLMGenerationRequest) -> RequestHandle:
        """Any thread: hand a request over. Does not wait for it to start.

        Raises InvalidRequestError or a subclass for what can never be served: nothing is counted
        then. Raises SubmitError when it is refused for now, EngineFailedError when for good.
        """
        request.check_single()
        places = request.params.n
        shared = self._shared
        if places > shared.max_pending:
            raise UnsupportedRequestError(
                "n", f"{places} sequences, and no more than {shared.max_pending} may be pending"
            )
        # Before the runtime spends time on a prompt that will be refused anyway.
        if not shared.accepting:
            raise self._refused(shared.refusal())
        if reason := shared.no_room(places):
            raise self._refused("backlog_full", reason)
        validate = self._validate
        if validate is not None:
            request = validate(request) or request
        tokens = prompt_tokens(request)
        if reason := shared.reserve(places, tokens):
            raise self._refused("backlog_full", reason)
        channel = request.stream_channel
        try:
            if channel is None:
                channel = StreamChannel()
                request = request.with_channel(channel)
            record = RequestRecord(
                shared.new_ids(places), request, channel, shared, self._config.clock()
            )
            try:
                channel.attach(record.cancel)
            except ValueError as error:
                raise InvalidRequestError("stream_channel", str(error)) from None
        except BaseException:
            shared.release(places, tokens)
            raise
        shared.register(record)
        refusal = shared.post_submit(record)
        if refusal is not None and record.claim(record.cancelled_outcome()) is not None:
            shared.forget(record.id)
            shared.release(places, record.take_prompt_tokens())
            channel.detach()
            raise self._refused(refusal)
        # A refused post whose record was claimed already: the engine failed at this very moment and
        # counted the request among its victims, so the caller gets a handle that says so.
        shared.counters.add("submitted")
        self._deadlines.add(record)
        shared.bell.ring()
        return RequestHandle(record)

    def cancel(self, request_id: RequestId) -> None:
        """Any thread: cancel by id. The flag is planted before this returns, whatever the load;
        unknown and retired ids are ignored.
        """
        self._shared.cancel_record(request_id)

    def handle_request(self, request: LLMGenerationRequest) -> LLMGenerationResponse | None:
        """Submit and wait; None if it was refused, cancelled, or failed. For blocking callers."""
        try:
            return self.submit(request).get()
        except SteppeError:
            return None

    # ---- state -----------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Sequences that the actor has taken in and not seated. Not those it has not seen yet."""
        return self._shared.queued

    @property
    def resident(self) -> int:
        """Sequences that hold a seat."""
        return self._shared.resident

    @property
    def pending(self) -> int:
        """Sequences accepted and not yet terminal, wherever they are."""
        return self._shared.pending

    @property
    def max_pending(self) -> int:
        """The most there may be of those."""
        return self._shared.max_pending

    @property
    def max_pending_tokens(self) -> int | None:
        """The most prompt tokens that may wait beside others; None for any number."""
        return self._config.max_pending_tokens

    def no_room(self, sequences: int) -> str | None:
        """Why that many more would be refused now, in words; None if short ones would not."""
        return self._shared.no_room(sequences)

    @property
    def running(self) -> bool:
        """False once ``shutdown`` was called, or the engine has failed."""
        return self._shared.accepting

    def metrics(self) -> EngineMetrics:
        """A copy of the counters."""
        return self._shared.counters.snapshot()

    def context_cache_metrics(self) -> ContextCacheMetrics | None:
        """What the runtime's context cache has done; None without one, or once the runtime is gone.

        Any thread; never blocks.
        """
        read = self._runtime_cache and self._runtime_cache()
        return read() if read else None

    def activity(self, after: int = 0) -> EngineActivity:
        """What the engine is doing: who has not ended, and the steps after that number.

        Any thread; never blocks. Steps are kept, the last thousand or so, only while somebody goes
        on asking: the first look finds none.
        """
        return EngineActivity(
            self._config.clock(),
            self._actor.steps.since(after),
            live_sequences(self._shared.live()),
        )

    def health(self) -> EngineHealth:
        """Whether tokens are flowing. Never blocks."""
        shared, config = self._shared, self._config
        since = shared.busy_since
        busy_for = None if since is None else max(0.0, config.clock() - since)
        limit = config.hang_limit
        if shared.failure is not None:
            return EngineHealth(
                False, "failed", shared.queued, shared.resident, busy_for, str(shared.failure)
            )
        if not shared.accepting:
            thread = self._thread
            over = self._actor.done if thread is None else not thread.is_alive()
            return EngineHealth(
                False, "stopped" if over else "stopping", shared.queued, shared.resident, busy_for
            )
        if limit is not None and busy_for is not None and busy_for > limit:
            cause = f"a step has run for {busy_for:.3f} s, the limit is {limit} s"
            return EngineHealth(False, "stalled", shared.queued, shared.resident, busy_for, cause)
        return EngineHealth(True, "running", shared.queued, shared.resident, busy_for)

    @property
    def manual(self) -> bool:
        """Whether the caller drives this engine with ``tick``."""
        return self._thread is None

    def leaks(self) -> list[str]:
        """What an engine at rest should not hold, in words; empty when clean. For tests: while
        anything runs, it has something to say.
        """
        shared, metrics = self._shared, self.metrics()
        found = []
        for name, count in (
            ("live records", len(shared.live())),
            ("backlog places", shared.pending),
            ("prompt tokens in the backlog", shared.pending_tokens),
            ("waiting sequences", shared.queued),
            ("seats", shared.resident),
        ):
            if count:
                found.append(f"{count} {name}")
        if shared.has_pending:
            found.append("commands in the queue")
        if not self._actor.idle:
            found.append("an open batch")
        ended = metrics.completed + metrics.cancelled + metrics.failed
        if metrics.submitted != ended:
            found.append(f"{metrics.submitted} submitted, {ended} ended")
        # The runtime is looked at only when the actor is through with it.
        ask = None if found else self._runtime_leaks and self._runtime_leaks()
        return ask() if ask else found

    def record(self, path: Path, *, prompts: bool = False, **facts: object) -> Recorder:
        """Write every step from now on to ``path``, until the recorder is closed or the engine
        ends. Prompts are left out unless asked for; ``facts`` are written at the head. Replaces an
        earlier recorder.
        """
        config = self._config
        recorder = Recorder(
            path,
            prompts=prompts,
            max_batch_size=config.max_batch_size,
            max_step_tokens=config.max_step_tokens,
            max_pending=config.max_pending_requests,
            max_pending_tokens=config.max_pending_tokens,
            scheduling=config.scheduling,
            overcommit=config.overcommit,
            **facts,
        )
        before = self._actor.record(recorder)
        if before is not None:
            before.close()
        return recorder

    def tick(self) -> bool:
        """Manual engines: one boundary, on this thread. False only when nothing was left to do.

        Raises ExecutionError on an engine that has a thread for it, or from inside a tick.
        """
        if self._thread is not None:
            raise ExecutionError("this engine has its own thread")
        self._check_outside()
        return self._actor.tick()

    # ---- the end ---------------------------------------------------------------------------------

    def shutdown(
        self, mode: ShutdownMode = ShutdownMode.DRAIN, *, timeout: float | None = None
    ) -> None:
        """Any thread but the actor's: stop, and wait until everything has an outcome. Idempotent.

        DRAIN serves what was accepted, CANCEL ends it at the next step boundary; a step in flight
        is waited for, except in an engine that failed. The first caller's mode stands; whoever
        comes later waits for the same end. A drain that is given ``timeout`` seconds cancels what
        is left after them. Raises ExecutionError when called from the actor.
        """
        self._check_outside()
        shared = self._shared
        shared.close_admission()
        with self._stopping:
            first = shared.stop is None
            if first:
                shared.stop = mode
        shared.bell.ring()
        if self._thread is None:
            with self._stopping:
                while self._actor.tick():
                    pass
        else:
            if first and timeout is not None:
                self._thread.join(timeout)
                if self._thread.is_alive():
                    shared.stop = ShutdownMode.CANCEL
                    shared.bell.ring()
            self._join(self._thread)
        self._deadlines.stop()
        if (watcher := self._deadlines.thread) is not None:
            watcher.join()
        self._finalizer.detach()
        # It belongs to the runtime, which is to go now even if this engine stays.
        self._validate = None

    def _join(self, thread: threading.Thread) -> None:
        while thread.is_alive():
            thread.join(LOST_PATIENCE)
            if self._shared.failure is not None and self._shared.busy_since is not None:
                return  # its step may never return; everyone has an outcome already

    def __enter__(self) -> RequestEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown(ShutdownMode.DRAIN if kind is None else ShutdownMode.CANCEL)

    def __copy__(self) -> NoReturn:
        raise TypeError("a RequestEngine cannot be copied")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RequestEngine cannot be pickled")

    # ---- inside ----------------------------------------------------------------------------------

    def _check_outside(self) -> None:
        if self._actor.thread_id == threading.get_ident():
            raise ExecutionError("the engine's own thread cannot wait for itself")

    def _refused(self, reason: SubmitRefusal, why: str = "") -> SubmitError:
        shared = self._shared
        shared.counters.add("refused")
        if reason == "failed":
            error = EngineFailedError(f"the engine has failed: {shared.failure}")
            error.__cause__ = shared.failure
            return error
        messages = {
            "queue_full": "the command queue is full",
            "shutting_down": "the engine is shutting down",
        }
        return SubmitError(reason, why or messages[reason])
