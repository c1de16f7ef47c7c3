"""Every error of the tree has one meaning in HTTP, and every answer has the envelope."""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Any

import pytest

from steppe import errors
from steppe.server.errors import (
    ENVELOPES,
    Problem,
    ProblemError,
    dump,
    envelope,
    naming,
    problem_of,
    validation_problem,
)
from steppe.testing import Script
from tests.server.support import chat, settle, staged

if TYPE_CHECKING:
    from collections.abc import Iterator

MADE: dict[str, errors.SteppeError] = {
    "InvalidRequestError": errors.InvalidRequestError("top_p", "is wrong"),
    "UnsupportedRequestError": errors.UnsupportedRequestError("n", "is too much"),
    "ContextLengthError": errors.ContextLengthError("prompt", "is long", needed=9, available=8),
    "ConfigError": errors.ConfigError("port", "is taken"),
    "SubmitError": errors.SubmitError("queue_full", "is full"),
    "EngineFailedError": errors.EngineFailedError("is dead"),
    "DeadlineExceededError": errors.DeadlineExceededError("total", "too late"),
    "BackpressureError": errors.BackpressureError("backlog_full", "is full"),
    "UpstreamError": errors.UpstreamError("is broken", status=500),
    "UpstreamTimeoutError": errors.UpstreamTimeoutError("first_byte", "too late"),
    "RateLimitedError": errors.RateLimitedError("slow down", retry_after=7.0),
    "CircuitOpenError": errors.CircuitOpenError("not now", retry_after=9.0),
    "CredentialsError": errors.CredentialsError("who are you", status=401),
}
STATUS = {
    "InvalidRequestError": (400, "invalid_value"),
    "UnsupportedRequestError": (400, "unsupported_value"),
    "ContextLengthError": (400, "context_length_exceeded"),
    "ChatTemplateError": (400, "chat_template_error"),
    "SubmitError": (429, "queue_full"),
    "EngineFailedError": (503, "engine_failed"),
    "RequestCancelledError": (499, "request_cancelled"),
    "RequestFailedError": (500, "generation_failed"),
    "DeadlineExceededError": (504, "request_timeout"),
    "BackpressureError": (429, "backlog_full"),
    "ReplicaError": (502, "upstream_error"),
    "ReplicaLostError": (503, "replica_lost"),
    "LoadTimeoutError": (503, "replica_lost"),
    "NetworkError": (502, "upstream_error"),
    "UpstreamError": (502, "upstream_error"),
    "UpstreamTimeoutError": (504, "upstream_timeout"),
    "RateLimitedError": (429, "upstream_rate_limited"),
    "CircuitOpenError": (503, "upstream_unavailable"),
    "CredentialsError": (502, "upstream_error"),
    "ContentFilteredError": (400, "content_filter"),
}


def tree(root: type[errors.SteppeError]) -> Iterator[type[errors.SteppeError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == "steppe.errors":
            yield from tree(child)


@pytest.mark.parametrize("kind", [kind.__name__ for kind in tree(errors.SteppeError)])
def test_every_error_has_a_status(kind: str) -> None:
    error = MADE.get(kind) or getattr(errors, kind)("is wrong")
    problem = problem_of(error, retry_after=1.0)
    assert (problem.status, problem.code) == STATUS.get(kind, (500, "internal_error"))
    assert problem.message == str(error)
    if isinstance(error, errors.InvalidRequestError):
        assert problem.param == error.field


def test_what_passes_says_when_to_come_back() -> None:
    full = problem_of(errors.SubmitError("backlog_full", "full"), retry_after=0.25)
    assert (full.status, full.code) == (429, "backlog_full")
    assert full.headers() == {"retry-after": "1", "retry-after-ms": "250"}
    stop = problem_of(errors.SubmitError("shutting_down", "bye"), retry_after=2.5)
    assert (stop.status, stop.headers()["retry-after"]) == (503, "3")
    cancelled = errors.RequestCancelledError("request 1 was cancelled")
    assert problem_of(cancelled, stopping=True, retry_after=1.0).code == "shutting_down"
    nobody = problem_of(errors.SubmitError("unavailable", "nobody is ready"), retry_after=0.5)
    assert (nobody.status, nobody.retry_after) == (503, 0.5)
    for name, after in (("RateLimitedError", 7.0), ("CircuitOpenError", 9.0)):
        assert problem_of(MADE[name], retry_after=1.0).retry_after == after
    queued = problem_of(errors.DeadlineExceededError("queue", "late"), retry_after=1.0)
    assert (queued.status, queued.code) == (503, "queue_timeout")


def test_an_unknown_error_tells_nothing_of_the_inside() -> None:
    problem = problem_of(KeyError("secret"))
    assert problem.status == 500
    assert "secret" not in problem.message


def test_naming_calls_a_field_what_the_api_calls_it() -> None:
    with pytest.raises(ProblemError) as caught, naming(prompt="messages"):
        raise errors.ContextLengthError("prompt", "has 9 tokens", needed=9, available=8)
    assert caught.value.problem == Problem(
        400, "messages: has 9 tokens", param="messages", code="context_length_exceeded"
    )
    with pytest.raises(errors.InvalidRequestError), naming(prompt="messages"):
        raise errors.InvalidRequestError("top_p", "is wrong")


def test_of_several_complaints_the_closest_is_told() -> None:
    problem = validation_problem(
        [
            {"type": "string_type", "loc": ("body", "stop", "str"), "msg": "Input should be text"},
            {
                "type": "string_type",
                "loc": ("body", "stop", "list[str]", 2),
                "msg": "Input should be a valid string",
            },
        ]
    )
    assert (problem.param, problem.code) == ("stop[2]", "invalid_type")
    assert problem.message == "stop[2]: input should be a valid string"


def test_json_is_strict_whatever_it_holds() -> None:
    assert json.loads(dump({"text": "a\ud800b"})) == {"text": "a\ud800b"}
    assert dump({"text": "é"}) == '{"text":"é"}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump({"number": float("nan")})


def test_another_api_can_have_another_envelope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVELOPES, "/other/", lambda problem: {"error": problem.message})
    problem = Problem(400, "no")
    assert envelope(problem, "/other/thing") == {"error": "no"}
    assert envelope(problem, "/v1/thing")["error"]["message"] == "no"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b"[]", "invalid_body"),
        (b"null", "invalid_body"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"messages": [], "messages": 1}', "invalid_type"),
        (b'{"a": ' * 100000, "invalid_json"),
        (b'{"n": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_value"),
        (b'{"messages": [{"role": "user", "content": "a"}], "top_p": NaN}', "invalid_value"),
        (b'{"messages": [{"role": "user", "content": "a"}], "top_p": 1e999}', "invalid_value"),
        (b'{"messages": [{"role": "user", "content": "a"}], "\\ud800": 1}', "invalid_body"),
    ],
)
async def test_any_body_gets_an_envelope(body: bytes, code: str) -> None:
    async with staged() as stage:
        call = await stage.ask("/v1/chat/completions", body)
        assert call.status == 400
        assert call.error["type"] == "invalid_request_error"
        assert call.error["code"] == code


@pytest.mark.anyio
async def test_a_body_that_is_not_json_must_not_be_read_as_such() -> None:
    # What any web page can make a browser send without asking first.
    async with staged() as stage:
        for content_type in ("text/plain", "application/x-www-form-urlencoded"):
            call = await stage.ask(
                "/v1/chat/completions",
                json.dumps(chat()).encode(),
                headers={"content-type": content_type},
            )
            assert (call.status, call.error["code"]) == (400, "invalid_body")
        assert stage.runtime.steps == 0


@pytest.mark.anyio
async def test_a_path_or_a_method_that_is_not_there() -> None:
    async with staged() as stage:
        call = await stage.ask("/v1/nothing", {})
        assert (call.status, call.error["code"]) == (404, "not_found")
        call = await stage.ask("/v1/completions", method="GET")
        assert (call.status, call.error["code"]) == (405, "bad_method")


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [True, False])
async def test_a_step_that_fails_is_told_to_its_clients(stream: bool) -> None:
    script = Script(fail_steps={4: errors.ExecutionError("the device is on fire")})
    async with staged(script=script) as stage:
        call = stage.call("/v1/chat/completions", chat(stream=stream, max_tokens=20))
        await stage.run(call)
        if stream:
            assert call.status == 200
            error, done = call.events[-2:]
            assert done == "[DONE]"
        else:
            assert call.status == 500
            error = call.json
        assert error["error"]["code"] == "generation_failed"
        assert "on fire" in error["error"]["message"]
        again = await stage.ask("/v1/chat/completions", chat(max_tokens=2))
        assert again.status == 200


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [True, False])
async def test_one_of_several_prompts_that_fails_ends_them_all(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with staged(script=Script(fail_requests={2: 3})) as stage:
        body = {"prompt": ["a", "b", "c"], "max_tokens": 500, "stream": stream}
        call = await stage.ask("/v1/completions", body)
        error = call.events[-2] if stream else call.json
        assert error["error"]["code"] == "generation_failed"
        await stage.step(2)
        assert stage.engine.resident == 0
        metrics = stage.engine.metrics()
        assert (metrics.failed, metrics.cancelled) == (1, 2)
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.anyio
async def test_a_bug_is_a_500_with_an_envelope(caplog: pytest.LogCaptureFixture) -> None:
    async with staged() as stage:

        async def broken(*_: Any, **__: Any) -> Any:
            raise ZeroDivisionError("a secret")

        stage.client.encode_chat = broken  # type: ignore[method-assign]
        call = stage.call("/v1/chat/completions", chat())
        await settle()
        with pytest.raises(ZeroDivisionError):  # for the server's own log
            call.task.result()
        assert (call.status, call.error["code"]) == (500, "internal_error")
        assert b"secret" not in call.body
        assert "a secret" in caplog.text
