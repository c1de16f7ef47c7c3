"""Anthropic's API, driven by the anthropic package against a model that says what a test wants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anthropic
import pytest

from steppe.server.errors import Problem, envelope
from steppe.server.protocol.messages import CountTokensRequest, MessagesRequest
from tests.server.speaking import Speaker, speaker, speaking_tokenizer
from tests.server.support import settle, staged

if TYPE_CHECKING:
    from collections.abc import Iterator

WEATHER: Any = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
NO_THOUGHT = "<think>\n\n</think>\n\n"
ASK: dict[str, Any] = {
    "model": "speaker",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "speak"}],
}


@pytest.fixture(scope="module")
def qwen() -> Iterator[Speaker]:
    with speaker("qwen3") as running:
        yield running


@pytest.fixture
def client(qwen: Speaker) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=qwen.url, api_key="none", max_retries=0) as client:
        yield client


def said(message: Any) -> dict[str, Any]:
    """A message without its ids."""
    plain: dict[str, Any] = message.model_dump(exclude={"id": True, "parsed_output": True})
    for block in plain["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return plain


def ask(client: anthropic.Anthropic, **fields: Any) -> Any:
    """A message, and the same one streamed and put together by the package, which is equal."""
    fields = {**ASK, "extra_body": {"temperature": 0}, **fields}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    one, other = said(whole), said(streamed)
    # What the cache spares may differ from call to call.
    uses = [each.pop("usage") for each in (one, other)]
    assert one == other
    for use in uses:
        assert use["input_tokens"] + use["cache_read_input_tokens"] > 0
    assert uses[0]["output_tokens"] == uses[1]["output_tokens"] > 0
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")
    assert kinds.count("content_block_start") == len(whole.content)
    return whole


def test_an_answer_in_words(qwen: Speaker, client: anthropic.Anthropic) -> None:
    qwen.backend.say("It is été.", opened=NO_THOUGHT)
    message = ask(client, system="Be brief.")
    assert [(block.type, block.text) for block in message.content] == [("text", "It is été.")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.role, message.model) == ("assistant", "speaker")
    message = ask(client, max_tokens=5)
    assert (message.stop_reason, message.content[0].text) == ("max_tokens", "It is")
    message = ask(client, stop_sequences=["zzz", "is"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "is")
    assert message.content[0].text == "It "


def test_thoughts_words_and_calls_are_blocks(qwen: Speaker, client: anthropic.Anthropic) -> None:
    qwen.backend.say(f"<think>Hm.</think>I look.{CALL}{CALL}")
    message = ask(client, tools=[WEATHER], thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, one, two = message.content
    assert (thought.thinking, text.text) == ("Hm.", "I look.")
    assert one.name == two.name == "weather"
    assert one.input == two.input == {"city": "Oslo"}
    assert one.id != two.id
    assert message.stop_reason == "tool_use"


def test_arguments_are_told_while_they_arrive(qwen: Speaker, client: anthropic.Anthropic) -> None:
    qwen.backend.say(CALL, opened=NO_THOUGHT)
    fields: dict[str, Any] = {**ASK, "tools": [WEATHER], "extra_body": {"temperature": 0}}
    go_on = qwen.backend.hold(CALL.index("slo"))
    pieces = []
    with client.messages.stream(**fields) as stream:
        for event in stream:
            if event.type == "input_json":
                pieces.append(event.partial_json)
                if event.partial_json:
                    go_on.set()  # the end of the call is not said before its beginning is read
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join(pieces) == '{"city": "Oslo"}'


def test_a_call_that_is_cut_off_has_what_there_is(
    qwen: Speaker, client: anthropic.Anthropic
) -> None:
    qwen.backend.say(CALL, opened=NO_THOUGHT)
    for end, there in (("city", {}), ("Os", {}), ('Oslo"', {"city": "Oslo"})):
        message = ask(client, tools=[WEATHER], max_tokens=CALL.index(end) + len(end))
        (block,) = message.content
        assert (block.name, block.input) == ("weather", there)
        assert message.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "none"}]
)
def test_a_tool_choice_is_kept(qwen: Speaker, client: anthropic.Anthropic, choice: Any) -> None:
    qwen.backend.say("I would rather talk.", opened=NO_THOUGHT)
    message = ask(client, tools=[WEATHER], tool_choice=choice)
    if choice["type"] == "none":
        assert [block.type for block in message.content] == ["text"]
        return
    (block,) = message.content
    assert (block.type, block.name, list(block.input)) == ("tool_use", "weather", ["city"])


def test_only_one_call_where_one_is_wanted(qwen: Speaker, client: anthropic.Anthropic) -> None:
    qwen.backend.say(CALL + CALL, opened=NO_THOUGHT)
    message = ask(
        client,
        tools=[WEATHER],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert [block.type for block in message.content] == ["tool_use"]


def test_a_conversation_in_blocks_is_what_a_template_expects() -> None:
    body = CountTokensRequest.model_validate(
        {
            "model": "m",
            "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": "ok"},
                        {"type": "text", "text": "So?"},
                    ],
                },
            ],
        }
    ).chat()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert [turn.model_dump(exclude_none=True) for turn in body.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
        {"role": "user", "content": [{"type": "text", "text": "So?"}]},
    ]
    assert body.chat_template_kwargs == {"enable_thinking": False}


def test_sampling_fields_have_their_own_names_too() -> None:
    params = (
        MessagesRequest.model_validate({**ASK, "top_k": 5, "seed": 3, "guided_regex": "a"})
        .chat()
        .params({})
    )
    assert (params.max_tokens, params.top_k, params.seed) == (200, 5, 3)
    assert params.guided is not None


def test_tokens_are_counted_as_they_are_used(qwen: Speaker, client: anthropic.Anthropic) -> None:
    qwen.backend.say("a", opened=NO_THOUGHT)
    turns = [{"role": "user", "content": "été"}]
    count = client.messages.count_tokens(
        model="speaker",
        messages=turns,
        tools=[WEATHER],  # type: ignore[arg-type]
    )
    use = ask(client, messages=turns, tools=[WEATHER]).usage
    assert count.input_tokens == use.input_tokens + use.cache_read_input_tokens
    text = f"<|im_start|>user\nété<|im_end|>\n<|im_start|>assistant\n{NO_THOUGHT}"
    assert count.input_tokens == len(speaking_tokenizer().encode(text, parse_special=True))


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"n": 2}, "n"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "type": "bash_20250124"}]}, "tools[0]"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"guided_regex": "("}, "guided_regex"),
    ],
)
def test_what_is_wrong_is_named(client: anthropic.Anthropic, fields: Any, where: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.post("/v1/messages", body={**ASK, **fields}, cast_to=object)
    error: Any = caught.value.body
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith(where)


def test_errors_have_the_shape_that_the_package_knows(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**ASK, "model": "huge"})
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    for status, kind in ((401, "authentication_error"), (429, "rate_limit_error")):
        shape = envelope(Problem(status, "no"), "/v1/messages/count_tokens")
        assert shape["error"] == {"type": kind, "message": "no"}
    assert envelope(Problem(500, "no"), "/v1/messages")["error"]["type"] == "api_error"


@pytest.mark.anyio
async def test_a_stream_that_is_cancelled_ends_with_an_error() -> None:
    async with staged() as stage:
        call = stage.call("/v1/messages", {**ASK, "model": "scripted", "stream": True})
        await settle()
        assert call.status == 200
        await stage.step()
        stage.client.cancel_all()
        await stage.run(call)
        last = call.body.decode().strip().split("\n\n")[-1]
        assert last.startswith("event: error\ndata: ")
        assert '"type":"invalid_request_error"' in last
        assert "message_stop" not in call.body.decode()


@pytest.mark.anyio
async def test_a_client_that_leaves_ends_its_message() -> None:
    async with staged() as stage:
        call = stage.call("/v1/messages", {**ASK, "model": "scripted"})
        await stage.step()
        assert stage.engine.pending == 1
        call.disconnect()
        await stage.step(2)
        assert call.done
        assert stage.engine.pending == 0
