"""A remote engine that answers, fails, stalls and lies, in virtual time."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from steppe.errors import (
    CircuitOpenError,
    ConfigError,
    ContentFilteredError,
    CredentialsError,
    DeadlineExceededError,
    InvalidRequestError,
    NetworkError,
    RateLimitedError,
    ReplicaLostError,
    SteppeError,
    SubmitError,
    UnsupportedRequestError,
    UpstreamError,
    UpstreamTimeoutError,
)
from steppe.params import Guided
from steppe.replicas.output import whole_response
from steppe.replicas.remote.config import RemoteConfig
from steppe.replicas.remote.runner import RemoteRunner
from steppe.replicas.runners.scripted import scripted_card
from steppe.replicas.vocabulary import ExecuteBatch, TransportKind
from steppe.request import FinishReason, LLMGenerationRequest, SamplingParams, TokenLogprob, Usage
from steppe.testing import VirtualLoop, virtually
from tests.replicas.helpers import batch, collect, settle
from tests.replicas.remote.upstream import (
    DONE,
    GOOD,
    MODELS,
    Part,
    Reply,
    Upstream,
    data,
    refusal,
    started,
    token,
    usage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def play(upstream: Upstream, **settings: Any) -> Callable[[Callable[..., Any]], None]:
    """Run a coroutine that takes (loop, runner); then nothing may be left open."""

    def run(body: Callable[[VirtualLoop, RemoteRunner], Coroutine[Any, Any, None]]) -> None:
        async def main(loop: VirtualLoop) -> None:
            runner = await started(upstream, **settings)
            await body(loop, runner)
            assert not (await runner.activity()).live
            await runner.close()
            assert upstream.open == 0

        virtually(main)

    return run


async def fails(runner: RemoteRunner, kind: type[SteppeError], **fields: Any) -> SteppeError:
    with pytest.raises(kind) as caught:
        await collect(runner, batch(**fields))
    return caught.value


# ---- a good answer -------------------------------------------------------------------------------


def test_an_answer_is_its_chunks_and_its_end() -> None:
    upstream = Upstream(Reply())

    @play(upstream, api_key="secret")
    async def main(_: VirtualLoop, runner: RemoteRunner) -> None:
        assert runner.transport_kind is TransportKind.REMOTE_NETWORK
        assert runner.card.context_length == 2048
        chunks = await collect(runner, batch())
        assert [chunk.text for chunk in chunks] == ["1 ", "2 "]
        response = whole_response(chunks)
        assert response.token_ids == (1, 2)
        assert response.finish_reason is FinishReason.LENGTH
        assert response.usage == Usage(3, 2)
        assert upstream.paths == ["/v1/completions"]
        assert upstream.headers is not None
        assert upstream.headers["authorization"] == "Bearer secret"
        status = await runner.status()
        assert (status.health.ok, status.health.queued, status.health.resident) == (True, 2, 3)
        assert (status.metrics.submitted, status.metrics.completed) == (1, 1)
        assert status.metrics.tokens == 2


def test_every_field_is_passed_on() -> None:
    upstream = Upstream(make=lambda _: Reply())

    @play(upstream)
    async def main(_: VirtualLoop, runner: RemoteRunner) -> None:
        await collect(runner, batch())
        assert upstream.bodies[-1] == {
            "model": "far",
            "prompt": [1, 2, 3],
            "stream": True,
            "stream_options": {"include_usage": True},
            "n": 1,
            "max_tokens": 4,
            "temperature": 1.0,
            "top_p": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "return_token_ids": True,
        }
        params = SamplingParams(
            seed=2**64 - 1,
            stop=["x"],
            stop_token_ids=[7],
            ignore_eos=True,
            min_tokens=1,
            top_k=5,
            logit_bias={3: 1.5},
            skip_special_tokens=False,
            include_stop=True,
            guided=Guided(json_schema={"type": "object"}),
        )
        await collect(
            runner, ExecuteBatch(1, LLMGenerationRequest("hi", params=params, priority=3))
        )
        sent = upstream.bodies[-1]
        assert sent["prompt"] == "hi"
        assert "max_tokens" not in sent
        assert sent["seed"] == -1
        assert sent["stop"] == ["x"]
        assert sent["stop_token_ids"] == [7]
        assert sent["logit_bias"] == {"3": 1.5}
        assert sent["structured_outputs"] == {"json": {"type": "object"}}
        assert (sent["ignore_eos"], sent["min_tokens"], sent["top_k"]) == (True, 1, 5)
        assert (sent["skip_special_tokens"], sent["include_stop"], sent["priority"]) == (
            False, True, 3,
        )  # fmt: skip
        guided = Guided(choice=["a"], after="</think>")
        await collect(runner, batch(guided=guided))
        assert upstream.bodies[-1]["guided"] == {"choice": ["a"], "after": "</think>"}


def test_a_conversation_goes_to_the_chat_route() -> None:
    parts = (
        data({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
        data({"choices": [{"index": 0, "delta": {"content": "hi"}}]}),
        data({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
        usage(),
        DONE,
    )
    upstream = Upstream(Reply(parts))

    @play(upstream)
    async def main(_: VirtualLoop, runner: RemoteRunner) -> None:
        request = LLMGenerationRequest(messages=[{"role": "user", "content": "hello"}])
        response = whole_response(await collect(runner, ExecuteBatch(1, request)))
        assert (response.text, response.finish_reason) == ("hi", FinishReason.STOP)
        assert upstream.paths == ["/v1/chat/completions"]
        assert upstream.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]


def test_sequences_of_one_request_end_one_by_one() -> None:
    parts = (
        token(1, 0),
        token(5, 1, "stop"),
        token(2, 0, "length"),
        token(9, 0),
        usage(3, 3, cached=2),
        DONE,
    )
    upstream = Upstream(Reply(parts))

    @play(upstream)
    async def main(_: VirtualLoop, runner: RemoteRunner) -> None:
        chunks = await collect(runner, batch(n=2))
        assert [chunk.usage is not None for chunk in chunks] == [False, False, True]
        response = whole_response(chunks)
        assert [output.token_ids for output in response.outputs] == [(1, 2), (5,)]
        assert response.usage == Usage(3, 3, 2)


def test_logprobs_name_their_tokens() -> None:
    given = {
        "tokens": ["token_id:4"],
        "token_logprobs": [-1.5],
        "top_logprobs": [{"token_id:6": -0.5}],
    }
    parts = (
        data({"choices": [{"index": 0, "text": "a", "logprobs": given, "finish_reason": "stop"}]}),
        usage(),
        DONE,
    )
    plain = {"tokens": ["a"], "token_logprobs": [-1.5]}
    unnamed = (data({"choices": [{"index": 0, "text": "a", "logprobs": plain}]}),)
    upstream = Upstream(Reply(parts), Reply(unnamed))

    @play(upstream, attempts=1)
    async def main(_: VirtualLoop, runner: RemoteRunner) -> None:
        (chunk,) = await collect(runner, batch(logprobs=1))
        assert chunk.logprobs == (TokenLogprob(4, -1.5, ((6, -0.5), (4, -1.5))),)
        assert chunk.token_ids == (4,)
        assert "ids of tokens" in str(await fails(runner, NetworkError, logprobs=1))


def test_an_embedding() -> None:
    answer = {"data": [{"embedding": [0.5, -1]}], "usage": {"prompt_tokens": 3}}
    bad = json.dumps({"data": []}).encode()
    upstream = Upstream(Reply((json.dumps(answer).encode(),)), Reply((bad,)))

    @play(upstream)
    async def main(_: VirtualLoop, runner: RemoteRunner) -> None:
        request = LLMGenerationRequest([1, 2, 3], task="embed")
        (chunk,) = await collect(runner, ExecuteBatch(1, request))
        assert chunk.embedding == (0.5, -1.0)
        assert chunk.usage == Usage(3, 0)
        assert upstream.bodies[0]["input"] == [[1, 2, 3]]
        with pytest.raises(NetworkError, match="no embedding"):
            await collect(runner, ExecuteBatch(2, request))


# ---- what cannot be asked ------------------------------------------------------------------------


def test_a_plain_server_is_asked_for_nothing_it_does_not_know() -> None:
    upstream = Upstream(Reply())

    @play(upstream, extensions=False)
    async def main(_: VirtualLoop, runner: RemoteRunner) -> None:
        await collect(runner, batch())
        assert "top_k" not in upstream.bodies[0]
        assert "return_token_ids" not in upstream.bodies[0]
        for field, value in {"top_k": 3, "guided": Guided(json_object=True), "logprobs": 1}.items():
            error = await fails(runner, UnsupportedRequestError, **{field: value})
            assert isinstance(error, InvalidRequestError)
            assert error.field == field
        assert (await runner.status()).metrics.refused == 3


def test_prompt_logprobs_are_refused() -> None:
    @play(Upstream())
    async def main(_: VirtualLoop, runner: RemoteRunner) -> None:
        await fails(runner, UnsupportedRequestError, prompt_logprobs=1)


# ---- retries -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        Reply(error=httpx2.ConnectError("refused")),
        refusal(503, message="later"),
        refusal(429, message="slow down"),
        Reply(()),
        Reply((b": ping\n\n", Part(httpx2.ReadError("reset")))),
        Reply((data("{"),)),
        Reply((data({"error": {"message": "engine died", "type": "server_error"}}),)),
        Reply((b"{}",), headers={"content-type": "application/json"}),
    ],
)
def test_an_error_before_any_chunk_is_a_retry_that_nobody_sees(bad: Reply) -> None:
    upstream = Upstream(bad, bad, Reply())

    @play(upstream)
    async def main(loop: VirtualLoop, runner: RemoteRunner) -> None:
        response = whole_response(await collect(runner, batch()))
        assert response.token_ids == (1, 2)
        assert upstream.at == pytest.approx([0, 0.125, 0.375])
        status = await runner.status()
        assert (status.metrics.submitted, status.metrics.completed) == (1, 1)


@pytest.mark.parametrize(
    ("tail", "kind"),
    [
        ((), NetworkError),
        ((Part(httpx2.ReadError("reset")),), NetworkError),
        ((data({"error": {"message": "died", "code": 500}}),), UpstreamError),
        ((data({"choices": [{"index": 0, "finish_reason": "content_filter"}]}),),
         ContentFilteredError),
        ((Part(token(3), delay=1000.0),), UpstreamTimeoutError),
    ],
)  # fmt: skip
def test_an_error_after_some_chunks_is_one_error_and_no_text_twice(
    tail: tuple[bytes | Part, ...], kind: type[SteppeError]
) -> None:
    upstream = Upstream(Reply((token(1), token(2), *tail)), Reply())

    @play(upstream)
    async def main(_: VirtualLoop, runner: RemoteRunner) -> None:
        handle = await runner.execute(batch())
        assert [(await anext(handle)).text for _ in range(2)] == ["1 ", "2 "]
        with pytest.raises(kind):
            await anext(handle)
        with pytest.raises(StopAsyncIteration):
            await anext(handle)
        assert len(upstream.at) == 1
        assert (await runner.status()).metrics.failed == 1


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (refusal(400, message="no", param="top_p"), InvalidRequestError),
        (refusal(422, message="no"), InvalidRequestError),
        (refusal(400, message="no", code="content_filter"), ContentFilteredError),
        (refusal(401, message="no"), CredentialsError),
        (refusal(403, message="no"), CredentialsError),
    ],
)
def test_what_another_try_would_not_change_is_tried_once(
    reply: Reply, kind: type[SteppeError]
) -> None:
    upstream = Upstream(reply)

    @play(upstream, failures=1)
    async def main(_: VirtualLoop, runner: RemoteRunner) -> None:
        error = await fails(runner, kind)
        assert "no" in str(error)
        assert (await runner.status()).health.ok

    assert len(upstream.at) == 1


def test_tries_are_bounded_and_the_last_error_stands() -> None:
    upstream = Upstream(refusal(500, message="a"), refusal(502, message="b"), refusal(503))

    @play(upstream)
    async def main(_: VirtualLoop, runner: RemoteRunner) -> None:
        error = await fails(runner, UpstreamError)
        assert isinstance(error, UpstreamError)
        assert error.status == 503


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({"retry-after": "3"}, 3.0), ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5)],
)
def test_a_server_says_when_to_come_back(headers: dict[str, str], seconds: float) -> None:
    upstream = Upstream(refusal(429, headers, message="full"), Reply())

    @play(upstream)
    async def main(_: VirtualLoop, runner: RemoteRunner) -> None:
        await collect(runner, batch())
        assert upstream.at == pytest.approx([0, seconds])


def test_longer_than_the_longest_pause_is_not_waited_for() -> None:
    upstream = Upstream(refusal(429, {"retry-after": "60"}, message="full"))

    @play(upstream)
    async def main(loop: VirtualLoop, runner: RemoteRunner) -> None:
        error = await fails(runner, RateLimitedError)
        assert isinstance(error, RateLimitedError)
        assert error.retry_after == 60
        assert loop.time() == 0


# ---- time ----------------------------------------------------------------------------------------


def test_the_four_timeouts_are_four() -> None:
    upstream = Upstream(
        Reply(error=httpx2.ConnectTimeout("slow")),
        Reply(delay=30),
        Reply((token(1), Part(token(2), delay=8))),
        Reply((token(1), *[Part(token(2), delay=4)] * 9)),
    )

    @play(upstream, attempts=1, first_byte_timeout=20, chunk_timeout=6, total_timeout=25)
    async def main(loop: VirtualLoop, runner: RemoteRunner) -> None:
        seen = []
        for _ in range(4):
            began = loop.time()
            error = await fails(runner, UpstreamTimeoutError)
            assert isinstance(error, UpstreamTimeoutError)
            seen.append((error.which, loop.time() - began))
        assert [which for which, _ in seen] == ["connect", "first_byte", "between_chunks", "total"]
        assert [took for _, took in seen] == pytest.approx([0, 20, 6, 25])


def test_a_keep_alive_is_no_silence() -> None:
    pings = [Part(b": still here\n\n", delay=5)] * 10
    upstream = Upstream(Reply((*pings, *GOOD)))

    @play(upstream, chunk_timeout=6)
    async def main(loop: VirtualLoop, runner: RemoteRunner) -> None:
        await collect(runner, batch())
        assert loop.time() == pytest.approx(50)


def test_deadlines_of_the_request_win_over_tries() -> None:
    upstream = Upstream(
        refusal(503), Reply(delay=5), Reply((Part(token(1), delay=5),)),
        Reply((token(1), Part(token(2), delay=9))),
    )  # fmt: skip

    @play(upstream)
    async def main(loop: VirtualLoop, runner: RemoteRunner) -> None:
        error = await fails(runner, DeadlineExceededError, queue_timeout=2)
        assert isinstance(error, DeadlineExceededError)
        assert (error.which, loop.time()) == ("queue", pytest.approx(2))
        request = LLMGenerationRequest([1], first_token_timeout=3)
        with pytest.raises(DeadlineExceededError) as caught:
            await collect(runner, ExecuteBatch(2, request))
        assert caught.value.which == "first_token"
        assert (await fails(runner, DeadlineExceededError, timeout=4)).args
        assert loop.time() == pytest.approx(9)


# ---- the circuit and the limits ------------------------------------------------------------------


def test_a_server_that_keeps_failing_is_left_alone_and_then_tried() -> None:
    state = {"up": False}
    upstream = Upstream(make=lambda _: Reply() if state["up"] else refusal(500, message="ill"))

    @play(upstream, attempts=1, failures=2, open_seconds=5)
    async def main(loop: VirtualLoop, runner: RemoteRunner) -> None:
        for _ in range(2):
            await fails(runner, UpstreamError)
        error = await fails(runner, CircuitOpenError)
        assert isinstance(error, CircuitOpenError)
        assert error.retry_after == 5
        assert len(upstream.at) == 2
        health = (await runner.status()).health
        assert (health.ok, health.cause) == (False, "it failed too often and is left alone")
        await asyncio.sleep(5)
        state["up"] = True
        await collect(runner, batch())
        assert (await runner.status()).health.ok


def test_failing_in_the_midst_of_answers_opens_the_circuit() -> None:
    upstream = Upstream(make=lambda _: Reply((token(1),)))

    @play(upstream, failures=2)
    async def main(_: VirtualLoop, runner: RemoteRunner) -> None:
        for _ in range(2):
            await fails(runner, NetworkError)
        assert not (await runner.status()).health.ok


def test_requests_wait_for_the_limit_in_order() -> None:
    upstream = Upstream(make=lambda _: Reply())

    @play(upstream, requests_per_minute=2)
    async def main(loop: VirtualLoop, runner: RemoteRunner) -> None:
        for number in range(4):
            await collect(runner, batch(number + 1))
        assert upstream.at == pytest.approx([0, 0, 30, 60])
        await fails(runner, RateLimitedError, timeout=3)


def test_tokens_that_were_not_used_are_given_back() -> None:
    upstream = Upstream(make=lambda _: Reply())

    @play(upstream, tokens_per_minute=100)
    async def main(loop: VirtualLoop, runner: RemoteRunner) -> None:
        for number in range(4):
            await collect(runner, batch(number + 1, max_tokens=80))
        assert loop.time() == 0


# ---- leaving -------------------------------------------------------------------------------------


def test_leaving_hangs_up() -> None:
    upstream = Upstream(make=lambda _: Reply((token(1), Part(token(2), delay=50))))

    @play(upstream)
    async def main(loop: VirtualLoop, runner: RemoteRunner) -> None:
        unread = await runner.execute(batch(1))
        await unread.aclose()
        assert upstream.open == 0
        begun = await runner.execute(batch(2))
        await anext(begun)
        await begun.aclose()
        await begun.aclose()
        assert upstream.open == 0
        reader = asyncio.create_task(collect(runner, batch(3)))
        await settle()
        assert len((await runner.activity()).live) == 1
        reader.cancel()
        await asyncio.wait([reader])
        (left,) = runner._connection()._live.values()
        await left.aclose()
        assert (await runner.status()).metrics.cancelled == 3
        assert loop.time() == 0


def test_leaving_while_it_is_being_sent_leaves_nothing() -> None:
    upstream = Upstream(Reply(delay=10))

    @play(upstream)
    async def main(_: VirtualLoop, runner: RemoteRunner) -> None:
        task = asyncio.create_task(runner.execute(batch()))
        await settle()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


def test_closing_ends_everything_and_it_can_begin_anew() -> None:
    upstream = Upstream(make=lambda _: Reply((token(1), Part(token(2), delay=30))))

    async def main(loop: VirtualLoop) -> None:
        runner = await started(upstream)
        handles = [await runner.execute(batch(number)) for number in (1, 2)]
        reader = asyncio.create_task(collect(runner, batch(3)))
        await settle()
        lost = asyncio.create_task(runner.lost())
        await settle()
        await runner.close()
        await runner.close()
        assert isinstance(await lost, ReplicaLostError)
        with pytest.raises(ReplicaLostError):
            await runner.execute(batch(9))
        with pytest.raises(ReplicaLostError):
            await runner.status()
        for handle in handles:
            with pytest.raises(ReplicaLostError):
                await anext(handle)
        with pytest.raises(ReplicaLostError):
            await reader
        assert upstream.open == 0
        upstream.make = lambda _: Reply()
        await runner.start()
        await collect(runner, batch(4))
        await runner.close()

    virtually(main)


# ---- starting ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "settings", "message"),
    [
        (MODELS, {"model": "mine"}, "no model mine"),
        ({"data": []}, {}, "no model"),
        ({"data": "x"}, {}, "is not one"),
        ("x", {}, "is not one"),
    ],
)
def test_a_server_without_the_model_does_not_start(
    models: Any, settings: dict[str, Any], message: str
) -> None:
    upstream = Upstream()
    upstream.models = models

    async def main(_: VirtualLoop) -> None:
        runner = RemoteRunner(
            RemoteConfig("http://far", **settings), scripted_card(), transport=upstream
        )
        with pytest.raises(SteppeError, match=message):
            await runner.start()
        with pytest.raises(SubmitError):
            await runner.execute(batch())
        with pytest.raises(SubmitError):
            _ = runner.card

    virtually(main)


def test_a_server_without_a_health_route_is_asked_for_its_models() -> None:
    upstream = Upstream()
    upstream.health = refusal(404, message="no such route")

    @play(upstream)
    async def main(_: VirtualLoop, runner: RemoteRunner) -> None:
        assert (await runner.status()).health.ok
        upstream.health = refusal(503, message="loading")
        with pytest.raises(UpstreamError):
            await runner.status()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("url", "far:8000"),
        ("url", "http://me:secret@far"),
        ("attempts", 0),
        ("probes", 0),
        ("chunk_timeout", 0),
        ("retry_pause", -1.0),
        ("most_open_seconds", 1.0),
        ("requests_per_minute", float("nan")),
    ],
)
def test_settings_that_make_no_sense_are_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        RemoteConfig(**{"url": "http://far", field: value})
    assert caught.value.field == field


def test_a_key_is_never_shown() -> None:
    assert "secret" not in repr(RemoteConfig("http://far/v1/", api_key="secret"))
    assert RemoteConfig("http://far/v1/").base == "http://far/v1"
