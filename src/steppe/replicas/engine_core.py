"""One replica (seed 003): admission, the account of every request, and care for its runner."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING

from steppe.client.protocol import ReplicaReport
from steppe.client.rate import ServiceRate
from steppe.client.text import TextService, WithText, with_ids
from steppe.engine.activity import EngineActivity
from steppe.errors import (
    BackpressureError,
    EngineFailedError,
    InvalidRequestError,
    NetworkError,
    ReplicaError,
    ReplicaLostError,
    RequestCancelledError,
    SteppeError,
    SubmitError,
    UnsupportedRequestError,
)
from steppe.replicas.account import Account
from steppe.replicas.handle import ReplicaHandle
from steppe.replicas.messages import AddRequest, GetLoad, LocalEngineConfig
from steppe.replicas.output import OutputChannel
from steppe.replicas.supervision import Supervision
from steppe.replicas.vocabulary import ExecuteBatch, ReplicaState

if TYPE_CHECKING:
    from steppe.client import ModelCard
    from steppe.engine.config import EngineHealth
    from steppe.engine.metrics import EngineMetrics
    from steppe.replicas.runner import ModelRunner
    from steppe.request import LLMGenerationRequest
    from steppe.stepping.cache_metrics import ContextCacheMetrics

__all__ = ["EngineCoreActor"]

logger = logging.getLogger("steppe.replicas")

LAST_WORDS = 5.0
"""Seconds that cancelled requests get to close their streams before the runner is closed."""
LOOK = 1.0
"""Seconds that a look at what a runner is doing may take."""


class _Live:
    """One admitted request that holds its places."""

    __slots__ = ("batch", "begun", "lost", "output", "settled", "task")

    def __init__(self, batch: ExecuteBatch, output: OutputChannel) -> None:
        self.batch = batch
        self.output = output
        self.begun = False
        """The runner has accepted it, and the account has it."""
        self.settled = False
        self.lost: Exception | None = None
        self.task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class EngineCoreActor(WithText[TextService]):
    """An ``EngineClient`` over one ``ModelRunner`` (seed 003). One event loop.

    ``tell`` is the actor's way in, ``submit`` and the rest are calls made of it. A request holds
    its places from admission until the runner's stream is closed, and gives them back once.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: LocalEngineConfig | None = None,
        *,
        text: TextService,
        name: str = "0",
    ) -> None:
        super().__init__(text)
        self.name = name
        self.config = config or LocalEngineConfig()
        self._runner = runner
        self._care = Supervision(runner, self.config, name, self._lose)
        self._mailbox: deque[AddRequest | GetLoad] = deque()
        self._live: dict[int, _Live] = {}
        self._taken = 0
        self._account = Account()
        self._refused: Counter[str] = Counter()
        self._next_id = 1
        self._idle = asyncio.Event()
        self._idle.set()
        self._end: asyncio.Task[None] | None = None
        self._rate = ServiceRate(self._now)

    # ---- the mailbox -----------------------------------------------------------------------------

    def tell(self, message: AddRequest | GetLoad) -> None:
        """Put a message into the mailbox. Raises BackpressureError (``queue_full``)."""
        mailbox = self._mailbox
        if len(mailbox) >= self.config.queue_capacity:
            self._refused["queue_full"] += 1
            raise BackpressureError("queue_full", f"{len(mailbox)} messages wait already")
        mailbox.append(message)
        if len(mailbox) == 1:
            asyncio.get_running_loop().call_soon(self._handle_all)

    def _handle_all(self) -> None:
        mailbox = self._mailbox
        while mailbox:
            message = mailbox.popleft()
            if isinstance(message, GetLoad):
                self._tell_load(message.reply)
            else:
                self._add(message)

    def _tell_load(self, reply: asyncio.Future[float]) -> None:
        if reply.done():
            return
        if self._care.state is not ReplicaState.READY:
            reply.set_exception(self._refusal())
        elif (silence := self._care.silence) is not None:
            message = f"replica {self.name} has not answered for {silence:.1f} s"
            reply.set_exception(SubmitError("unavailable", message))
        else:
            reply.set_result(self.load)

    def _add(self, message: AddRequest) -> None:
        """Admit or refuse: the one place where places are taken."""
        batch, admission = message.batch, message.admission
        if admission.done():
            return  # whoever asked has left
        try:
            self.check_room(batch.places)
        except SteppeError as refusal:
            self._count_refusal(refusal)
            admission.set_exception(refusal)
            return
        live = _Live(batch, message.output)
        self._live[batch.request_id] = live
        self._taken += batch.places
        self._idle.clear()
        message.output.on_cancel = live.cancel
        live.task = asyncio.get_running_loop().create_task(self._pump(live))
        # A task that is cancelled before it begins runs none of its own code.
        live.task.add_done_callback(lambda _: self._settle(live, _cancelled()))
        admission.set_result(None)

    def _refusal(self) -> SubmitError:
        """Why nothing is accepted in the state that it is in."""
        match self._care.state:
            case ReplicaState.FAILED:
                return EngineFailedError(f"replica {self.name} has failed: {self._care.cause}")
            case ReplicaState.LOADING:
                return SubmitError("unavailable", f"replica {self.name} is loading")
            case _:
                return SubmitError("shutting_down", f"replica {self.name} is shutting down")

    def _count_refusal(self, refusal: SteppeError) -> None:
        """Of what can never be served nothing is counted, as in an engine."""
        if isinstance(refusal, SubmitError):
            self._refused[refusal.reason] += 1

    # ---- one request -----------------------------------------------------------------------------

    async def _pump(self, live: _Live) -> None:
        """Run one request: from the runner's stream to its output, to exactly one end."""
        output = live.output
        error: Exception | None = None
        try:
            if output.done:
                raise _cancelled()
            stream = await self._runner.execute(live.batch)
            live.begun = True
            self._account.begin()
            output.accept()
            try:
                error = NetworkError("the stream ended before its end")
                async for chunk in stream:
                    self._account.chunk(chunk)
                    output.push(chunk)
                    if chunk.usage is not None:
                        error = None
                        break
            finally:
                await stream.aclose()
        except asyncio.CancelledError:
            error = live.lost or _cancelled()
        except SteppeError as raised:
            error = raised
        except Exception as raised:
            logger.error("replica %s: its runner raised", self.name, exc_info=raised)
            error = ReplicaError(f"the runner raised {type(raised).__name__}: {raised}")
            error.__cause__ = raised
        self._settle(live, error)

    def _settle(self, live: _Live, error: Exception | None) -> None:
        """The one end of an admitted request: places, account, output. Once."""
        if live.settled:
            return
        live.settled = True
        del self._live[live.batch.request_id]
        self._taken -= live.batch.places
        if not self._live:
            self._idle.set()
        output = live.output
        if output.done and output.error is not None:
            error = output.error  # the reader gave up before this came
        if live.begun:
            self._account.end(error)
        elif isinstance(error, SubmitError | InvalidRequestError):
            self._count_refusal(error)
        else:
            self._account.begin()
            self._account.end(error)
        # The places are free before anybody hears of the end.
        output.close(error)

    # ---- EngineClient: requests ------------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        """The model, with this replica's bound."""
        return replace(self._runner.card, max_pending=self.config.max_concurrent)

    @property
    def runner(self) -> ModelRunner:
        """What it runs on."""
        return self._runner

    def successor(self, runner: ModelRunner, name: str) -> EngineCoreActor:
        """A replica like this one over another runner, not started yet."""
        return EngineCoreActor(runner, self.config, text=self._text, name=name)

    @property
    def accepting(self) -> bool:
        """False once it drains, or has failed."""
        return self._care.state in (ReplicaState.LOADING, ReplicaState.READY)

    def check_room(self, sequences: int) -> None:
        """Raise SubmitError if that many more would be refused now."""
        limit = self.config.max_concurrent
        if sequences > limit:
            raise UnsupportedRequestError(
                "n", f"{sequences} sequences, and no more than {limit} may be pending"
            )
        if self._care.state is not ReplicaState.READY:
            raise self._refusal()
        if self._taken + sequences > limit:
            message = f"replica {self.name} has {self._taken} of {limit} places taken"
            raise BackpressureError("backlog_full", message)

    async def submit(self, request: LLMGenerationRequest) -> ReplicaHandle:
        """Hand a request over; returns when its runner has accepted it.

        Raises InvalidRequestError and its kin, SubmitError, ReplicaError.
        """
        request.check_single()
        try:
            self.check_room(request.params.n)
        except SubmitError as refusal:
            self._count_refusal(refusal)
            raise
        if not self._runner.reads_text:
            request = await with_ids(request, self._text)
        batch = ExecuteBatch(self._next_id, request)
        self._next_id += batch.places
        output = OutputChannel()
        admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tell(AddRequest(batch, output, admission))
        try:
            await admission
            await output.accepted()
        except asyncio.CancelledError:
            output.cancel()
            raise
        return ReplicaHandle(batch.request_id, output)

    def cancel(self, request_id: int) -> None:
        """Cancel by id; unknown and retired ids are ignored."""
        live = self._live.get(request_id)
        if live is not None:
            live.output.cancel()

    def cancel_all(self) -> None:
        """Cancel everything that is live."""
        for live in list(self._live.values()):
            live.output.cancel()

    def retry_after(self) -> float:
        """Seconds after which a refused request is likely to find room."""
        self._rate.observe(self._account.ended)
        return self._rate.seconds_for(self._taken / 2)

    # ---- EngineClient: state ---------------------------------------------------------------------

    @property
    def state(self) -> ReplicaState:
        """What it is doing."""
        return self._care.state

    @property
    def generation(self) -> int:
        """How often its runner has started."""
        return self._care.generation

    @property
    def cause(self) -> Exception | None:
        """What its runner was lost to, or could not start for, last."""
        return self._care.cause

    @property
    def seats(self) -> int:
        """Sequences that its engine runs at once; 0 before it was ready."""
        return self._runner.card.max_batch_size if self._care.generation else 0

    @property
    def in_flight(self) -> int:
        """Places that are taken: sequences accepted and not yet terminal."""
        return self._taken

    @property
    def load(self) -> float:
        """Places taken over ``max_concurrent``: 0 to 1."""
        return self._taken / self.config.max_concurrent

    @property
    def account(self) -> Account:
        """What it has counted. To be read only."""
        return self._account

    @property
    def refused(self) -> Counter[str]:
        """Refusals, by reason. To be read only."""
        return self._refused

    async def health(self) -> EngineHealth:
        """Whether tokens are flowing, as of the last probe."""
        return self._care.health()

    async def metrics(self) -> EngineMetrics:
        """The counters of its engines, all that it has had, as of the last probe, with its own
        account of requests.
        """
        self._account.refused = self._refused.total()
        return self._account.over(self._care.engine_metrics())

    def report(self, *, in_rotation: bool) -> ReplicaReport:
        """What operators are told of it."""
        account = self._account
        return ReplicaReport(
            name=self.name,
            transport=self._runner.transport_kind.value,
            state=self._care.state.value,
            in_rotation=in_rotation,
            generation=self._care.generation,
            load=self.load,
            in_flight=self._taken,
            max_concurrent=self.config.max_concurrent,
            submitted=account.submitted,
            completed=account.completed,
            cancelled=account.cancelled,
            failed=account.failed,
            tokens=account.tokens,
            preemptions=self._care.engine_metrics().preemptions,
            cache=self._care.cache_metrics(),
            refused=dict(self._refused),
            cause=None if self.cause is None else str(self.cause),
        )

    def replicas(self) -> tuple[ReplicaReport, ...]:
        """Itself."""
        return (self.report(in_rotation=self._care.state is ReplicaState.READY),)

    async def context_cache_metrics(self) -> ContextCacheMetrics | None:
        """What the caches of its engines did, and what the present one holds, as of the last probe;
        None where its engine does not tell.
        """
        return self._care.cache_metrics()

    async def activity(self, after: int = 0) -> EngineActivity:
        """What its engine is doing; nothing while that does not answer."""
        if self._care.state in (ReplicaState.READY, ReplicaState.DRAINING):
            try:
                async with asyncio.timeout(LOOK):
                    return await self._runner.activity(after)
            except (TimeoutError, SteppeError):
                logger.debug("replica %s does not say what it is doing", self.name)
        return EngineActivity(self._now(), (), ())

    # ---- the beginning and the end ---------------------------------------------------------------

    async def start(self) -> None:
        """Start the runner, and see to it from now on; returns when requests are taken.

        Raises what made it fail, if it did.
        """
        await self._care.start()

    def _lose(self, cause: Exception) -> None:
        """The runner is lost: everything live ends, whether or not its stream says so."""
        for live in list(self._live.values()):
            live.lost = ReplicaLostError(f"replica {self.name} was lost: {cause}")
            live.cancel()

    async def drain(self, patience: float | None) -> None:
        """Accept nothing more, finish what runs, cancel what is left after ``patience`` seconds;
        then close the runner. Idempotent: the first caller's patience counts.
        """
        if self._end is None:
            self._care.close_admission()
            self._end = asyncio.get_running_loop().create_task(self._drain(patience))
        await asyncio.shield(self._end)

    async def _drain(self, patience: float | None) -> None:
        try:
            async with asyncio.timeout(patience):
                await self._idle.wait()
        except TimeoutError:
            await self._hurry()
        await self._care.stop()

    async def _hurry(self) -> None:
        self.cancel_all()
        try:
            async with asyncio.timeout(LAST_WORDS):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("replica %s: %d requests do not end", self.name, len(self._live))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _cancelled() -> RequestCancelledError:
    return RequestCancelledError("the request was cancelled")
