"""Ollama's API, driven by the ollama package against a model that says what a test wants."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import ollama
import pytest

from steppe import __version__
from steppe.server.protocol.ollama import OllamaChatRequest, Options
from tests.server.speaking import Speaker, speaker, speaking_tokenizer
from tests.server.support import settle, staged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from steppe.client import ModelCard
    from tests.server.conftest import Live

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
        },
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
SPEAK = [{"role": "user", "content": "speak"}]
GREEDY = {"temperature": 0}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def qwen() -> Iterator[Speaker]:
    with speaker("qwen3") as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[Speaker]:
    with speaker("plain") as running:
        yield running


@pytest.fixture
def client(qwen: Speaker) -> Iterator[ollama.Client]:
    with ollama.Client(host=qwen.url) as client:
        yield client


def told(answer: Any) -> dict[str, Any]:
    """An answer without what differs from call to call."""
    whole: dict[str, Any] = answer.model_dump(
        exclude={"created_at": True, **dict.fromkeys(DURATIONS, True)}
    )
    for call in (whole.get("message") or {}).get("tool_calls") or ():
        call.pop("id", None)
    return whole


def chat(client: ollama.Client, **fields: Any) -> Any:
    """An answer, and the same one as a stream, added up, which is equal."""
    ask: dict[str, Any] = {"model": "speaker", "messages": SPEAK, "options": GREEDY, **fields}
    ask["options"] = {**GREEDY, **ask["options"]}
    whole = client.chat(**ask)
    lines = list(client.chat(**ask, stream=True))
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    last = lines[-1]
    last.message.content = "".join(line.message.content or "" for line in lines)
    last.message.thinking = "".join(line.message.thinking or "" for line in lines) or None
    last.message.tool_calls = [c for line in lines for c in line.message.tool_calls or ()] or None
    last.logprobs = [one for line in lines for one in line.logprobs or ()] or None
    assert told(last) == told(whole)
    for answer in (whole, last):
        assert answer.created_at.endswith("Z")
        times = [getattr(answer, name) for name in DURATIONS]
        assert times[0] >= times[2] + times[3] > 0
        assert times[1] == 0
    return whole


def test_an_answer_in_words(qwen: Speaker, client: ollama.Client) -> None:
    qwen.backend.say("It is été.")
    answer = chat(client)
    assert (answer.message.role, answer.message.content) == ("assistant", "It is été.")
    assert (answer.model, answer.done, answer.done_reason) == ("speaker", True, "stop")
    text = "<|im_start|>user\nspeak<|im_end|>\n<|im_start|>assistant\n"
    assert answer.prompt_eval_count == len(speaking_tokenizer().encode(text, parse_special=True))
    assert answer.eval_count == len("It is été.".encode()) + 1
    assert chat(client, model="speaker:latest").model == "speaker:latest"


def test_options_are_followed(qwen: Speaker, client: ollama.Client) -> None:
    qwen.backend.say("It is what it is.")
    answer = chat(client, options={"num_predict": 5})
    assert (answer.message.content, answer.done_reason, answer.eval_count) == ("It is", "length", 5)
    assert chat(client, options={"stop": ["what"]}).message.content == "It is "
    prompt = answer.prompt_eval_count
    answer = chat(client, options={"num_ctx": prompt + 3, "num_predict": 9})
    assert (answer.message.content, answer.done_reason) == ("It ", "length")
    answer = chat(client, options={"num_ctx": 2000, "num_predict": -1, "num_thread": 3})
    assert answer.message.content == "It is what it is."
    with pytest.raises(ollama.ResponseError, match=r"num_ctx is 7") as caught:
        chat(client, options={"num_ctx": 7})
    assert caught.value.status_code == 400


def test_thoughts_words_and_calls_are_told_apart(qwen: Speaker, client: ollama.Client) -> None:
    qwen.backend.say(f"<think>Hm.</think>I look.{CALL}{CALL}")
    answer = chat(client, tools=[WEATHER], think=True)
    assert (answer.message.thinking, answer.message.content) == ("Hm.", "I look.")
    calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls]
    assert calls == [("weather", {"city": "Oslo"})] * 2
    assert answer.done_reason == "stop"
    qwen.backend.say("Words.", opened="<think>\n\n</think>\n\n")
    answer = chat(client, think=False)
    assert (answer.message.thinking, answer.message.content) == (None, "Words.")


def test_a_call_that_is_cut_off_has_what_there_is(qwen: Speaker, client: ollama.Client) -> None:
    qwen.backend.say(CALL)
    answer = chat(client, tools=[WEATHER], options={"num_predict": CALL.index("lo") + 3})
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Oslo"})
    assert answer.done_reason == "length"


def test_thinking_is_refused_where_it_is_not_marked(plain: Speaker) -> None:
    with ollama.Client(host=plain.url) as client:
        plain.backend.say("Words.")
        assert chat(client, think=False).message.content == "Words."
        with pytest.raises(ollama.ResponseError, match=r"^think: speaker does not mark"):
            chat(client, think="high")


@pytest.mark.parametrize("form", ["json", WEATHER["function"]["parameters"]])
def test_a_format_is_kept(plain: Speaker, form: Any) -> None:
    plain.backend.say('{"city": "Oslo"} and so on')
    with ollama.Client(host=plain.url) as client:
        answer = chat(client, format=form, options={"num_predict": 60})
    assert json.loads(answer.message.content) == {"city": "Oslo"}
    assert answer.done_reason == "stop"


def test_logprobs_are_of_the_tokens_said(qwen: Speaker, client: ollama.Client) -> None:
    qwen.backend.say("<think>Hm.</think>Oh.")
    answer = chat(client, logprobs=True, top_logprobs=2)
    assert "".join(one.token for one in answer.logprobs).startswith("<think>Hm.</think>Oh.")
    assert len(answer.logprobs) == answer.eval_count
    assert all(len(one.top_logprobs) == 2 for one in answer.logprobs)
    assert all(one.logprob <= 0 for one in answer.logprobs)
    assert chat(client).logprobs is None


def generate(client: ollama.Client, **fields: Any) -> Any:
    """As ``chat``, of one prompt."""
    ask: dict[str, Any] = {"model": "speaker", "prompt": "speak", "options": GREEDY, **fields}
    whole = client.generate(**ask)
    lines = list(client.generate(**ask, stream=True))
    last = lines[-1]
    last.response = "".join(line.response or "" for line in lines)
    last.thinking = "".join(line.thinking or "" for line in lines) or None
    assert told(last) == told(whole)
    return whole


def test_one_prompt_is_a_conversation_of_one(qwen: Speaker, client: ollama.Client) -> None:
    qwen.backend.say("<think>Hm.</think>Oh.")
    answer = generate(client, think=True)
    assert (answer.thinking, answer.response, answer.done_reason) == ("Hm.", "Oh.", "stop")
    longer = generate(client, system="Be brief.")
    system = len(
        speaking_tokenizer().encode("<|im_start|>system\nBe brief.<|im_end|>\n", parse_special=True)
    )
    assert longer.prompt_eval_count == answer.prompt_eval_count + system


def test_a_raw_prompt_is_the_whole_of_it(qwen: Speaker, client: ollama.Client) -> None:
    qwen.backend.say("<think>Hm.</think>Oh.")
    prompt = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    answer = generate(client, prompt=prompt, raw=True)
    # What a raw prompt brings is read by whoever wrote it.
    assert (answer.thinking, answer.response) == (None, "<think>Hm.</think>Oh.")
    ids = speaking_tokenizer().encode(prompt, parse_special=True)
    assert answer.prompt_eval_count == len(ids)
    options = {"num_ctx": len(ids) + 2}
    assert generate(client, prompt=prompt, raw=True, options=options).response == "<t"


def test_without_a_prompt_the_model_is_there(client: ollama.Client) -> None:
    answer = client.chat(model="speaker", keep_alive="5m")
    assert (answer.done_reason, answer.message.content) == ("load", "")
    answer = client.generate(model="speaker", keep_alive=-1)
    assert (answer.done_reason, answer.response) == ("load", "")
    for unload in (0, "0", "0s"):
        with pytest.raises(ollama.ResponseError, match=r"^keep_alive: the model stays"):
            client.generate(model="speaker", keep_alive=unload)


def test_what_is_known_of_the_model(live: Live) -> None:
    with ollama.Client(host=live.url) as client:
        (entry,) = client.list().models
        assert entry.model == "tiny"
        assert entry.modified_at is not None
        assert len(entry.digest or "") == 64
        shown = client.show("tiny:latest")
        assert shown.capabilities == ["completion", "embedding"]
        assert shown.modelinfo == {
            "general.name": "tiny",
            "context_length": live.llm.context_length,
            "vocab_size": live.llm.tokenizer.vocab_size,
        }
        assert shown.parameters == "temperature 0.0"
        (running,) = client.ps().models
        assert running.context_length == live.llm.context_length
    assert httpx.get(f"{live.url}/api/version").json() == {"version": __version__}
    assert httpx.head(live.url).status_code == 200  # what the command line asks first


def test_abilities_are_the_models_own(client: ollama.Client) -> None:
    assert client.show("speaker").capabilities == ["completion", "embedding", "tools", "thinking"]


def test_embeddings_are_the_engines_own(live: Live) -> None:
    expected = [list(one) for one in live.llm.embed(["one", "two"])]
    with ollama.Client(host=live.url) as client:
        answer = client.embed(model="tiny", input=["one", "two"])
        for vector, one in zip(answer.embeddings, expected, strict=True):
            assert vector == pytest.approx(one)
        assert answer.prompt_eval_count == sum(
            len(live.llm.tokenizer.encode(text)) for text in ("one", "two")
        )
        assert client.embeddings(model="tiny", prompt="two").embedding == pytest.approx(expected[1])
        with pytest.raises(ollama.ResponseError, match=r"^dimensions: must be"):
            client.embed(model="tiny", input="one", dimensions=len(expected[0]) + 1)
    for path, field in (("embed", "input"), ("embeddings", "prompt")):
        refused = httpx.post(f"{live.url}/api/{path}", json={"model": "tiny"})
        assert refused.json() == {"error": f"{field}: is required"}


def test_a_store_of_models_is_not_here(client: ollama.Client) -> None:
    for refused in (
        lambda: client.pull("other"),
        lambda: client.push("other"),
        lambda: client.copy("speaker", "other"),
        lambda: client.create("other", from_="speaker"),
        lambda: client.delete("speaker"),
    ):
        with pytest.raises(ollama.ResponseError, match="this server has the one model") as caught:
            refused()
        assert caught.value.status_code == 400


@pytest.mark.parametrize(
    ("path", "fields", "where"),
    [
        ("chat", {"model": ""}, "model"),
        ("chat", {"messages": [{"role": "robot"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "images": ["aGk="]}]}, "messages[0].images"),
        ("chat", {"messages": [{"role": "user", "name": 3}]}, "messages[0].name"),
        ("chat", {"format": "yaml"}, "format"),
        ("chat", {"format": {"type": "no such type"}}, "format"),
        ("chat", {"think": "deeply"}, "think"),
        ("chat", {"no_such_field": 1}, "no_such_field"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"options": {"no_such_option": 1}}, "options.no_such_option"),
        ("chat", {"options": {"temperature": -1}}, "options.temperature"),
        ("chat", {"options": {"num_predict": 0}}, "options.num_predict"),
        ("chat", {"options": {"num_predict": -3}}, "options.num_predict"),
        ("chat", {"options": {"num_predict": 10_000}}, "options.num_predict"),
        ("chat", {"options": {"num_ctx": 2001}}, "options.num_ctx"),
        ("chat", {"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ("chat", {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last"),
        ("chat", {"options": {"mirostat": 1}}, "options.mirostat"),
        ("chat", {"options": {"n": 2}}, "options.n"),
        ("chat", {"options": {"stop": [""]}}, "options.stop"),
        ("generate", {"suffix": "b"}, "suffix"),
        ("generate", {"template": "b"}, "template"),
        ("generate", {"context": [1]}, "context"),
        ("generate", {"images": ["aGk="]}, "images"),
        ("generate", {"raw": True, "system": "a"}, "system"),
        ("generate", {"raw": True, "options": {"top_p": 2}}, "options.top_p"),
        ("generate", {"raw": True, "format": {"type": "no such type"}}, "format"),
        ("generate", {"prompt": "x" * 3000}, "prompt"),
        ("show", {"messages": [], "model": "speaker"}, "messages"),
        ("show", {"model": None}, "model"),
    ],
)
def test_what_is_wrong_is_named(qwen: Speaker, path: str, fields: Any, where: str) -> None:
    common = {"chat": {"messages": SPEAK}, "generate": {"prompt": "a"}, "show": {}}[path]
    body = {"model": "speaker", **common, **fields}
    for stream in (True, False):
        more = {} if path == "show" else {"stream": stream}
        answer = httpx.post(f"{qwen.url}/api/{path}", json={**body, **more})
        assert answer.status_code == 400
        assert list(answer.json()) == ["error"]
        assert answer.json()["error"].startswith(where)


def test_other_models_are_not_found(client: ollama.Client) -> None:
    for ask in (client.chat, client.generate, client.show, lambda name: client.embed(name, "a")):
        with pytest.raises(ollama.ResponseError) as caught:
            ask("huge")
        assert caught.value.status_code == 404


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"num_predict": 7}, {"max_tokens": 7}),
        ({"num_predict": -2}, {"max_tokens": None}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": 5, "min_p": 0.1, "top_k": 3}, {"seed": 5, "min_p": 0.1, "top_k": 3}),
        ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"repeat_penalty": 1.2, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
        ({"repeat_last_n": 64, "mirostat": 0, "tfs_z": 1.0}, {"repetition_penalty": None}),
        ({"max_tokens": 3, "guided_regex": "a"}, {"max_tokens": 3, "guided_regex": "a"}),
    ],
)
def test_options_have_two_sets_of_names(options: Any, fields: Any, card: ModelCard) -> None:
    given = Options.model_validate(options).fields(card)
    assert {name: given[name] for name in fields} == fields


@pytest.fixture
def card(live: Live) -> ModelCard:
    from steppe.client import LocalClient

    return LocalClient.of(live.llm).card


def test_a_conversation_is_what_a_template_expects(card: ModelCard) -> None:
    function = {"name": "f", "arguments": {"a": 1}}
    body = OllamaChatRequest.model_validate(
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {
                    "role": "assistant",
                    "content": "",
                    "thinking": "hm",
                    "tool_calls": [{"function": {**function, "index": 0}}],
                },
                {"role": "tool", "content": "ok", "tool_name": "f"},
            ],
        }
    ).chat(card)
    call = {"id": "call_0", "type": "function", "function": function}
    assert [turn.model_dump(exclude_none=True) for turn in body.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "ok", "name": "f"},
    ]


@pytest.mark.anyio
async def test_a_stream_that_is_cancelled_ends_with_an_error() -> None:
    async with staged() as stage:
        body = {"model": "scripted", "messages": SPEAK}
        call = stage.call("/api/chat", body)
        await settle()
        assert call.status == 200
        assert call.headers["content-type"] == "application/x-ndjson"
        await stage.step()
        stage.client.cancel_all()
        await stage.run(call)
        lines = [json.loads(line) for line in call.body.decode().splitlines()]
        assert list(lines[-1]) == ["error"]
        assert not any(line.get("done") for line in lines)
        whole = stage.call("/api/generate", {"model": "scripted", "prompt": "a", "stream": False})
        await settle()
        stage.client.cancel_all()
        await stage.run(whole)
        assert (whole.status, list(whole.json)) == (499, ["error"])


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_client_that_leaves_ends_its_answer(path: str, stream: bool) -> None:
    async with staged() as stage:
        asked = {"messages": SPEAK} if path == "/api/chat" else {"prompt": "a"}
        call = stage.call(path, {"model": "scripted", "stream": stream, **asked})
        await stage.step()
        assert stage.engine.pending == 1
        call.disconnect()
        await stage.step(2)
        assert call.done
        assert stage.engine.pending == 0
