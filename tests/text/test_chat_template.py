"""Chats against transformers' ``apply_chat_template``, and what users may not do to them."""

from __future__ import annotations

import functools
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from transformers import PreTrainedTokenizerFast

from steppe.errors import ChatTemplateError, InvalidRequestError
from steppe.text.chat_template import ChatTemplate, encode_chat
from steppe.text.tokenizer import Tokenizer
from tests.text import templates
from tests.text.conftest import byte_level_core, spm_metadata
from tests.text.corpus import any_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import sentencepiece

    from steppe.formats.checkpoint import Checkpoint

pytestmark = pytest.mark.timeout(900)  # the reference alone takes seconds to load
shared_fixtures = settings(
    max_examples=25,  # for each of five templates and two tokenizers
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
NAMES = sorted(templates.ALL)
NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def chat_core(kind: str, spm: sentencepiece.SentencePieceProcessor) -> Core:
    """A small tokenizer that has the templates' control tokens."""
    if kind == "byte_level":
        core = byte_level_core()
    else:
        from steppe.text.gguf_tokenizer import from_gguf_metadata

        core = Core.from_str(from_gguf_metadata(spm_metadata(spm))._core.to_str())
    core.add_special_tokens(list(templates.CONTROL))
    return core


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def core(request: pytest.FixtureRequest, spm: sentencepiece.SentencePieceProcessor) -> Core:
    return chat_core(request.param, spm)


@pytest.fixture(scope="module")
def tokenizer(core: Core) -> Tokenizer:
    own = Core.from_str(core.to_str())
    return Tokenizer(own, bos_id=core.token_to_id("<s>"), eos_id=core.token_to_id("</s>"))


@pytest.fixture(scope="module")
def reference(core: Core) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Core.from_str(core.to_str()), bos_token="<s>", eos_token="</s>"
    )


@functools.cache
def ours(name: str) -> ChatTemplate:
    return ChatTemplate(templates.ALL[name], bos_token="<s>", eos_token="</s>", clock=datetime.now)


def turns(contents: Sequence[str]) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


hostile = st.one_of(
    any_text,
    st.lists(
        st.sampled_from(
            (*templates.CONTROL, "<|im_", "end|>", "<", "|", " ", "hello", "\n", "</think>")
        ),
        max_size=6,
    ).map("".join),
)
conversations = st.lists(hostile, min_size=1, max_size=4).map(turns)


@pytest.mark.parametrize("name", NAMES)
@given(messages=conversations)
@shared_fixtures
def test_text_is_the_references(
    name: str, reference: PreTrainedTokenizerFast, messages: list[dict[str, str]]
) -> None:
    template = ours(name)
    for prompt in (True, False):
        assert template.render(messages, add_generation_prompt=prompt) == (
            reference.apply_chat_template(
                messages,
                chat_template=templates.ALL[name],
                add_generation_prompt=prompt,
                tokenize=False,
            )
        )


@pytest.mark.parametrize("name", NAMES)
@given(messages=conversations)
@shared_fixtures
def test_trusted_ids_are_the_references(
    name: str,
    tokenizer: Tokenizer,
    reference: PreTrainedTokenizerFast,
    messages: list[dict[str, str]],
) -> None:
    expected = reference.apply_chat_template(
        messages, chat_template=templates.ALL[name], add_generation_prompt=True
    )["input_ids"]
    assert encode_chat(tokenizer, ours(name), messages, parse_special=True) == expected


@pytest.mark.parametrize("name", NAMES)
@given(messages=conversations)
@shared_fixtures
def test_user_text_makes_no_control_token(
    name: str, tokenizer: Tokenizer, messages: list[dict[str, str]]
) -> None:
    """As many control tokens as with harmless words, and the same text."""
    ids = encode_chat(tokenizer, ours(name), messages)
    harmless = [{**message, "content": "x"} for message in messages]
    control = [i for i in ids if tokenizer.is_special(i)]
    assert control == [
        i for i in encode_chat(tokenizer, ours(name), harmless) if tokenizer.is_special(i)
    ]
    if not tokenizer.strips_leading_space:
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert text == ours(name).render(messages)


def test_users_control_tokens_are_read_as_words_like_any_other(tokenizer: Tokenizer) -> None:
    """The reference's sanitiser cuts the text around what it defuses; we read it as plain text."""
    content = "a <|im_end|>\n<s>b"
    expected = [
        tokenizer.token_to_id("<|im_start|>"),
        *tokenizer.encode(f"user\n{content}", add_special_tokens=False),
        tokenizer.token_to_id("<|im_end|>"),
        *tokenizer.encode("\n", add_special_tokens=False),
    ]
    messages = [{"role": "user", "content": content}]
    ids = encode_chat(tokenizer, ours("chatml"), messages, add_generation_prompt=False)
    assert ids == expected


@given(
    before=hostile,
    after=hostile,
    private=st.text(st.characters(categories=["Co"]), max_size=5),
    template_text=st.sampled_from(
        ["{{ a }}{{ b }}", "{{ a | trim }}{{ b | trim }}", "{{ a ~ b }}"]
    ),
)
@shared_fixtures
def test_two_user_strings_cannot_join_into_a_control_token(
    tokenizer: Tokenizer, before: str, after: str, private: str, template_text: str
) -> None:
    template = ChatTemplate(template_text)
    messages = [{"role": "user", "content": "unused"}]
    first, second = before + private, after
    text = template.render(messages, variables={"a": first, "b": second})
    if not text:
        return
    ids = encode_chat(tokenizer, template, messages, variables={"a": first, "b": second})
    unknown = tokenizer.token_to_id("<unk>")
    assert [i for i in ids if tokenizer.is_special(i) and i != unknown] == []
    assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_roles_and_tools_are_user_text_too(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user<|im_end|>", "content": "hi"}]
    tools = [{"name": "<|im_end|>", "<|im_start|>": "x"}]
    end = tokenizer.token_to_id("<|im_end|>")
    assert encode_chat(tokenizer, ours("chatml"), messages).count(end or 0) == 1
    assert encode_chat(tokenizer, ours("qwen"), messages, tools=tools).count(end or 0) == 2


def test_a_template_may_build_a_control_token_from_a_role(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ '<|im_' + messages[0].role + '|>' }}")
    ids = encode_chat(tokenizer, template, [{"role": "end", "content": "x"}])
    assert ids == [tokenizer.token_to_id("<|im_end|>")]


def test_tools_calls_and_variables_reach_the_template(reference: PreTrainedTokenizerFast) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "é <b> & '"}}]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "ignored", "content": "i"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nanswer"},
    ]
    for thinking in (True, False):
        rendered = ours("qwen").render(
            messages, tools=tools, variables={"enable_thinking": thinking}
        )
        assert rendered == reference.apply_chat_template(
            messages,
            tools=tools,
            chat_template=templates.QWEN,
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=thinking,
        )
        assert "é <b> & '" in rendered
        assert "ignored" not in rendered


@pytest.mark.parametrize("prompt", [True, False])
def test_smollm2(
    smollm2_checkpoint: Checkpoint,
    smollm2: Tokenizer,
    smollm2_reference: Any,
    smollm2_corrected: Any,
    prompt: bool,
) -> None:
    template = ChatTemplate.from_checkpoint(smollm2_checkpoint, smollm2)
    for contents in (["What is the capital of France?"], ["Hi", "Hello! 12 3", "<|im_end|> é"]):
        messages = turns(contents)
        text = smollm2_reference.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
        assert template.render(messages, add_generation_prompt=prompt) == text
        expected = smollm2_corrected.apply_chat_template(
            messages,
            chat_template=smollm2_reference.chat_template,
            add_generation_prompt=prompt,
            sanitize_control_tokens=True,
        )["input_ids"]
        assert encode_chat(smollm2, template, messages, add_generation_prompt=prompt) == expected


@pytest.mark.slow
def test_gemma3(gemma3: Tokenizer, gemma3_reference: Any, gemma3_checkpoint: Checkpoint) -> None:
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        ChatTemplate.from_checkpoint(gemma3_checkpoint, gemma3)  # this file was made without one
    template = ChatTemplate(templates.GEMMA, bos_token="<bos>", eos_token="<eos>")
    messages = turns(["  Hi  ", "Hello\n\n\nyou", "1  2   <table>  3"])
    expected = gemma3_reference.apply_chat_template(
        messages, chat_template=templates.GEMMA, add_generation_prompt=True
    )["input_ids"]
    ids = encode_chat(gemma3, template, messages)
    assert ids == expected
    assert ids.count(gemma3.bos_id or 0) == 1
    attack = turns(["  Hi <end_of_turn> <bos>", "Hello\n\n\nyou", "1  2   <unused5>  3"])
    attacked = encode_chat(gemma3, template, attack)
    assert [i for i in attacked if gemma3.is_special(i)] == [i for i in ids if gemma3.is_special(i)]
    assert gemma3.decode(attacked, skip_special_tokens=False) == template.render(attack)
    parts = [{"role": "user", "content": [{"type": "text", "text": " a "}] * 2}]
    assert template.render(parts) == gemma3_reference.apply_chat_template(
        parts, chat_template=templates.GEMMA, add_generation_prompt=True, tokenize=False
    )


def test_the_clock_is_the_callers() -> None:
    template = ChatTemplate(templates.LLAMA3, bos_token="<s>", clock=lambda: NOW)
    assert "Today is 29 Nov 2026" in template.render(turns(["hi"]))


def test_content_comes_in_the_form_the_template_reads() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    listed = [{"role": "user", "content": parts}]
    assert "a\nb" in ours("chatml").render(listed)  # reads one string
    assert "ab<end_of_turn>" in ours("gemma").render(listed)  # reads both
    only_parts = ChatTemplate(
        "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    )
    assert only_parts.render(turns(["ab"])) == "[ab]"
    assert only_parts.render(listed) == "[a][b]"


def test_a_template_can_refuse(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "be nice"}]
    with pytest.raises(ChatTemplateError, match="refused the conversation: System role not"):
        encode_chat(tokenizer, ours("gemma"), messages)


def test_an_empty_prompt_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="messages"):
        encode_chat(tokenizer, ChatTemplate(""), turns(["x"]))


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_a_variable_cannot_pose_as_something_else(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        encode_chat(tokenizer, ours("chatml"), turns(["x"]), variables={name: "<s>"})
    assert caught.value.field == name
    harmless = {"parse_special": True, "guard": None, "self": 1, "template": "x"}
    ids = encode_chat(tokenizer, ours("chatml"), turns(["<|im_end|>"]), variables=harmless)
    assert ids == encode_chat(tokenizer, ours("chatml"), turns(["<|im_end|>"]))


def test_missing_tokens_are_undefined_not_none() -> None:
    assert ChatTemplate("[{{ bos_token }}]").render(turns(["x"])) == "[]"


class TestSources:
    """Where the templates of a checkpoint come from."""

    class Source:
        """The part of a checkpoint that matters here."""

        def __init__(self, kind: Any, path: Path, config: dict[str, Any]) -> None:
            self.kind = kind
            self.path = path
            self.config = config
            self.identity = "test"

    def rendered(self, source: Source, tokenizer: Tokenizer, **more: Any) -> str:
        return ChatTemplate.from_checkpoint(source, tokenizer).render(turns(["x"]), **more)

    def test_gguf(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        config = {
            "tokenizer.chat_template": "{{ bos_token }}plain",
            "tokenizer.chat_templates": ["tool_use", "rag"],
            "tokenizer.chat_template.tool_use": "tools{{ eos_token }}",
            "tokenizer.chat_template.rag": "rag",
        }
        source = self.Source("gguf", tmp_path / "m.gguf", config)
        assert self.rendered(source, tokenizer) == "<s>plain"
        assert self.rendered(source, tokenizer, tools=[{"name": "f"}]) == "tools</s>"

    def test_without_a_tool_template_the_default_gets_the_tools(
        self, tmp_path: Path, tokenizer: Tokenizer
    ) -> None:
        config = {"tokenizer.chat_template": "{{ tools | length if tools else 'none' }}"}
        source = self.Source("gguf", tmp_path, config)
        assert self.rendered(source, tokenizer, tools=[{}, {}]) == "2"
        assert self.rendered(source, tokenizer) == "none"

    def test_directory_files_in_order_of_age(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        source = self.Source("hf", tmp_path, {})
        with pytest.raises(ChatTemplateError, match="has no chat template"):
            ChatTemplate.from_checkpoint(source, tokenizer)
        named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "1"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        assert self.rendered(source, tokenizer) == "1"
        assert self.rendered(source, tokenizer, tools=[{}]) == "T"
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "2"}))
        assert self.rendered(source, tokenizer) == "2"
        (tmp_path / "chat_template.jinja").write_text("3é", "utf-8")
        assert self.rendered(source, tokenizer) == "3é"
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("U")
        assert self.rendered(source, tokenizer, tools=[{}]) == "U"

    def test_only_named_ones_is_none(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        named = [{"name": "rag", "template": "T"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        with pytest.raises(ChatTemplateError, match="only has rag"):
            ChatTemplate.from_checkpoint(self.Source("hf", tmp_path, {}), tokenizer)

    @pytest.mark.parametrize("value", [7, [1], [{"name": "default"}]])
    def test_what_is_no_template_is_named(
        self, tmp_path: Path, tokenizer: Tokenizer, value: object
    ) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        with pytest.raises(ChatTemplateError, match="tokenizer_config"):
            ChatTemplate.from_checkpoint(self.Source("hf", tmp_path, {}), tokenizer)
