"""The facade: one in, one out; many in, many out; sync and async; streams."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from steppe import (
    LLM,
    BackendError,
    ConfigError,
    InvalidRequestError,
    RequestCancelledError,
    SamplingParams,
    SubmitError,
)
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llm") / "tiny", temperature=0.7, top_k=20)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, max_batch_size=4) as llm:
        yield llm


def settled(llm: LLM) -> int:
    """Cancelled requests so far, once those that other tests left behind have been counted."""
    llm.generate("settle", GREEDY)
    return llm.engine.metrics().cancelled


def test_one_prompt_gives_one_response_as_text_or_as_ids(llm: LLM) -> None:
    by_text = llm.generate("Hello", GREEDY)
    by_ids = llm.generate(llm.tokenizer.encode("Hello"), GREEDY)
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.text == llm.tokenizer.decode(by_text.token_ids)
    assert by_text.usage.prompt_tokens == 5


def test_a_list_gives_a_list_in_order_whatever_it_holds(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(11)]
    alone = [llm.generate(prompt, GREEDY).token_ids for prompt in prompts]
    assert [one.token_ids for one in llm.generate(prompts, GREEDY)] == alone
    ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
    assert [one.token_ids for one in llm.generate(ids, GREEDY)] == alone


def test_more_prompts_than_the_engine_holds_wait_their_turn(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    answers = llm.generate(["a"] * 600, params)
    assert len(answers) == 600
    assert len({answer.token_ids for answer in answers}) == 1


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    first = [{"role": "user", "content": "Hi"}]
    second = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    answers = llm.chat([first, second], GREEDY)
    assert [one.token_ids for one in answers] == [
        llm.chat(first, GREEDY).token_ids,
        llm.chat(second, GREEDY).token_ids,
    ]


def test_no_params_means_the_models_own_defaults(llm: LLM) -> None:
    assert llm.sampling_params() == SamplingParams(temperature=0.7, top_k=20)
    assert llm.sampling_params(top_k=3, seed=None) == SamplingParams(temperature=0.7, top_k=3)


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], ["a", []], ["a", 3], [3, "a"], [-1], [10**6], [True]]
)
def test_a_prompt_without_tokens_or_with_wrong_ones_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt: "):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize("messages", [[], [[]], ["hi"], [{"role": "user"}, "x"]])
def test_messages_that_are_none_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^messages"):
        llm.chat(messages, GREEDY)


def test_a_bad_prompt_in_a_list_cancels_the_others(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with pytest.raises(InvalidRequestError):
        llm.generate(["fine", "fine too", ""], long)
    assert llm.generate("after", GREEDY).finish_reason == "length"
    settled(llm)
    metrics = llm.engine.metrics()
    assert metrics.submitted == metrics.completed + metrics.cancelled


def test_chunks_add_up_to_the_answer(llm: LLM) -> None:
    whole = llm.generate("Hello", GREEDY)
    chunks = list(llm.stream("Hello", GREEDY))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [i for chunk in chunks for i in chunk.token_ids] == list(whole.token_ids)
    assert [chunk.finished for chunk in chunks].count(True) == 1
    assert chunks[-1].usage == whole.usage


def test_leaving_a_stream_early_cancels_its_request(llm: LLM) -> None:
    cancelled = settled(llm)
    stream = llm.stream("Hello", SamplingParams(temperature=0, max_tokens=240, ignore_eos=True))
    next(stream)
    stream.close()
    llm.generate("a later one", GREEDY)
    assert llm.engine.metrics().cancelled == cancelled + 1
    assert llm.engine.resident == 0


def test_the_async_methods_say_the_same(llm: LLM) -> None:
    async def everything() -> None:
        whole = llm.generate("Hello", GREEDY)
        assert (await llm.agenerate("Hello", GREEDY)).token_ids == whole.token_ids
        many = await llm.agenerate(["Hello", "Hello"], GREEDY)
        assert [one.token_ids for one in many] == [whole.token_ids] * 2
        text = ""
        async for chunk in llm.astream("Hello", GREEDY):
            text += chunk.text
        assert text == whole.text
        turn = [{"role": "user", "content": "Hi"}]
        chat = await llm.achat(turn, GREEDY)
        parts = [chunk.text async for chunk in llm.astream_chat(turn, GREEDY)]
        assert "".join(parts) == chat.text == llm.chat(turn, GREEDY).text

    asyncio.run(everything())


def test_cancelling_the_task_cancels_the_request(llm: LLM) -> None:
    async def cancel() -> None:
        long = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)
        task = asyncio.create_task(llm.agenerate("Hello", long))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = settled(llm)
    asyncio.run(cancel())
    llm.generate("a later one", GREEDY)
    assert llm.engine.metrics().cancelled == before + 1


def test_leaving_the_context_stops_the_engine(tiny: Path) -> None:
    with LLM(tiny) as llm:
        llm.generate("Hello", GREEDY)
    assert not llm.engine.running
    with pytest.raises(SubmitError):
        llm.generate("Hello", GREEDY)
    llm.close()


def test_an_exception_in_the_context_cancels_what_runs(tiny: Path) -> None:
    handles = []

    def fail() -> None:
        with LLM(tiny) as llm:
            from steppe import LLMGenerationRequest

            params = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)
            handles.append(llm.engine.submit(LLMGenerationRequest("Hello", params=params)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(RequestCancelledError):
        handles[0].get(timeout=10)


def test_what_is_not_supported_is_refused_by_name(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="kv_dtype"):
        LLM(tiny, kv_dtype="int4")
    with pytest.raises(BackendError, match="float32"):
        LLM(tiny, backend="native", kv_dtype="float32")
    with pytest.raises(ConfigError, match="max_batch_size"):
        LLM(tiny, max_batch_size=0)
    with pytest.raises(ConfigError, match="max_pending_tokens"):
        LLM(tiny, max_pending_tokens=0)


@pytest.mark.parametrize(("given", "contexts"), [({}, 32), ({"max_batch_size": 2}, 16)])
def test_prompts_of_a_context_a_seat_may_wait(
    tiny: Path, given: dict[str, int], contexts: int
) -> None:
    with LLM(tiny, **given) as llm:
        assert llm.engine.max_pending_tokens == contexts * llm.context_length
    with LLM(tiny, max_pending_tokens=70, **given) as llm:
        assert llm.engine.max_pending_tokens == 70
