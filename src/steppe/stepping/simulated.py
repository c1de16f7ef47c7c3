"""A runtime without a model: scripted tokens, delays, refusals, failures and hangs.

Everything that an engine can meet is scripted here, deterministically and without weights; see
``script`` for what can be said and ``scripted`` for how a batch plays it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steppe.errors import ContextLengthError, ExecutionError, UnsupportedRequestError
from steppe.stepping.script import Script, prompt_ids
from steppe.stepping.scripted import ScriptedExecution
from steppe.stepping.types import AdmissionStatus

if TYPE_CHECKING:
    from steppe.request import LLMGenerationRequest
    from steppe.stepping.types import RequestId

__all__ = ["ScriptedRuntime"]

UNLIMITED_PAGES = 1 << 40


class ScriptedRuntime:
    """The runtime of a script: opens batches over one page pool, and counts what was done.

    ``RequestEngine(ScriptedRuntime(script), config)``, or ``from_factory(runtime.begin_stepped)``.
    ``log`` has one line per operation, for tests that ask about order; ``prompt_tokens`` counts
    computed prompt tokens per request id, ``decodes`` decode rows per request id; without
    ``keep_log``, of live requests only.
    """

    world_size = 1
    supports_seated_admission = True

    def __init__(self, script: Script | None = None, *, keep_log: bool = True) -> None:
        self.script = script or Script()
        self.max_batch_size = self.script.capacity
        self.total_pages = UNLIMITED_PAGES if self.script.pages is None else self.script.pages
        self.free_pages = self.total_pages
        self.overcommit = self.script.overcommit
        self.steps = 0
        self.begun = 0
        self.ended = 0
        self.threads: set[int] = set()
        self.log: list[tuple[object, ...]] = []
        self.keep_log = keep_log
        self.prompt_tokens: dict[int, int] = {}
        self.decodes: dict[int, int] = {}
        self.attempts: dict[int, int] = {}
        self.turns: dict[int, int] = {}
        self.execution: ScriptedExecution | None = None
        self.closed = False

    def set_overcommit(self, enabled: bool) -> None:
        """Reserve prompts only, from now on."""
        self.overcommit = enabled or self.script.overcommit

    def close(self) -> None:
        """The engine let go of this runtime."""
        self.closed = True

    def validate(self, request: LLMGenerationRequest) -> None:
        """Any thread: refuse what can never fit, with the arithmetic."""
        prompt = len(prompt_ids(request))
        limit = request.params.max_tokens
        needed = prompt + (0 if limit is None else limit)
        if needed > self.script.context:
            raise ContextLengthError(
                "prompt",
                f"{prompt} prompt tokens and {limit} more do not fit into a context of"
                f" {self.script.context}",
                needed=needed,
                available=self.script.context,
            )
        pages = -(-max(needed, prompt + 1) // self.script.page_size)
        if pages > self.total_pages:
            raise UnsupportedRequestError(
                "prompt",
                f"{needed} tokens need {pages} pages of {self.script.page_size} tokens, the pool"
                f" has {self.total_pages}",
            )

    def begin_stepped(
        self, request: LLMGenerationRequest, request_id: RequestId
    ) -> ScriptedExecution | None:
        """Open a batch with its founder seated. None, or an exception, as the script says."""
        if self.execution is not None:
            raise ExecutionError("a batch is open already")
        if not self.script.found(request_id):
            return None
        execution = ScriptedExecution(self)
        answer = execution.admit(request, 0, request_id, founding=True)
        if answer.status is not AdmissionStatus.ADMITTED:
            raise ExecutionError(answer.reason)
        self.begun += 1
        self.execution = execution
        return execution

    def leaks(self) -> list[str]:
        """What an idle runtime should not still hold; empty when clean."""
        found = []
        if self.execution is not None:
            found.append("a batch is still open")
        if self.begun != self.ended:
            found.append(f"{self.begun} batches were begun, {self.ended} ended")
        if self.free_pages != self.total_pages:
            found.append(f"{self.total_pages - self.free_pages} pages are still taken")
        return found

    def forget(self, request_id: int) -> None:
        """A sequence has ended: without a log, nothing of it is kept."""
        if not self.keep_log:
            for counts in (self.prompt_tokens, self.decodes, self.attempts, self.turns):
                counts.pop(request_id, None)

    def note(self, *line: object) -> None:
        """Remember an operation, if a log is kept."""
        if self.keep_log:
            self.log.append(line)
