"""Guides: what is accepted, what may follow, where an answer ends, what a preemption changes."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.errors import ExecutionError, InvalidRequestError, SubmitError
from steppe.formats.checkpoint import open_checkpoint
from steppe.request import FinishReason, Guided, LLMGenerationRequest, SamplingParams
from steppe.runtime.guided import compiler as compiler_module
from steppe.runtime.guided.compiler import GrammarCompiler, PreparedGuided
from steppe.runtime.guided.state import GuidedState, compute_together
from steppe.runtime.guided.vocabulary import bit_mask
from steppe.text.tokenizer import Tokenizer
from tests.runtime.fakes import EOS, IM_END, VOCAB, assert_clean, byte_tokenizer, fake_runtime
from tests.runtime.guides import BRIEF, guide

if TYPE_CHECKING:
    from pathlib import Path

    from steppe.request import SequenceOutput
    from steppe.runtime.rank_runtime import LLMRankRuntime

STOPS = frozenset({EOS, IM_END})
WIDE = VOCAB + 70
"""A model's vocabulary, padded past the tokenizer's."""


@pytest.fixture
def grammars() -> GrammarCompiler:
    return shared_grammars()


def begin(
    grammars: GrammarCompiler, guided: Guided, stops: frozenset[int] = STOPS, said: bytes = b""
) -> GuidedState:
    return GuidedState(grammars.prepare(guided).compiled, stops, tuple(said))


def allowed(mask: np.ndarray | None) -> set[int]:
    assert mask is not None
    assert mask.dtype == np.uint32
    assert mask.shape == (-(-WIDE // 32),)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def follow(state: GuidedState) -> set[int]:
    (mask,) = state.masks()
    return allowed(mask)


@cache
def shared_runtime() -> LLMRankRuntime:
    """Its grammars stay compiled from test to test."""
    return fake_runtime()[0]


def run(request: LLMGenerationRequest) -> SequenceOutput:
    response = shared_runtime().handle_request(request)
    assert response is not None
    assert_clean(shared_runtime())
    return response.outputs[0]


# ---- what a caller may say ------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json_object": False},
        {"json_object": True, "regex": "a"},
        {"regex": "a", "choice": ["a"]},
        {"json_object": 1},
        {"json_schema": ""},
        {"json_schema": "[1]"},
        {"json_schema": [1]},
        {"json_schema": False},
        {"json_schema": {"a": float("nan")}},
        {"json_schema": {"a": object()}},
        {"json_schema": "[" * 100_000},
        {"regex": 5},
        {"regex": "\ud800"},
        {"regex": "a" * (128 * 1024 + 1)},
        {"grammar": b"start: a"},
        {"regex": "a", "after": ""},
        {"regex": "a", "after": "\n"},
        {"regex": "a", "after": 3},
        {"after": "</think>"},
        {"choice": []},
        {"choice": "yes"},
        {"choice": ["a", ""]},
        {"choice": ["a", 1]},
        {"choice": [str(i) for i in range(5000)]},
    ],
    ids=lambda fields: repr(fields)[:40],
)
def test_a_malformed_guide_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Guided(**fields)
    assert caught.value.field == "guided"


def test_a_guide_is_a_value() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    one = Guided(json_schema=schema)
    assert one == Guided(json_schema=json.dumps(schema))
    assert hash(one) == hash(Guided(json_schema=json.dumps(schema)))
    schema["type"] = "array"
    assert json.loads(str(one.json_schema))["type"] == "object"
    assert list(json.loads(str(one.json_schema))["properties"]) == ["b", "a"]
    assert Guided(json_schema=True) == Guided(json_schema={})
    assert Guided(choice=["x", "y", "x"]).choice == ("x", "y")
    with pytest.raises(InvalidRequestError, match="guided"):
        SamplingParams(guided={"regex": "a"})  # type: ignore[arg-type]


# ---- what may follow ------------------------------------------------------------------------


def test_stop_ids_are_allowed_exactly_where_the_grammar_may_end(
    grammars: GrammarCompiler,
) -> None:
    stops = frozenset({EOS, IM_END, VOCAB + 5})
    state = begin(grammars, Guided(regex="a[0-9]+"), stops)
    digits = set(b"0123456789")
    assert follow(state) == set(b"a")
    state.accept(ord("a"))
    assert follow(state) == digits
    state.accept(ord("7"))
    assert follow(state) == digits | stops
    assert not state.complete
    for _ in range(2):  # asking again changes nothing
        assert follow(state) == digits | stops


def test_where_nothing_may_follow_the_stop_ids_are_forced(grammars: GrammarCompiler) -> None:
    state = begin(grammars, Guided(regex="ab"), said=b"ab")
    assert follow(state) == STOPS
    assert state.complete
    state.accept(EOS)
    assert state.error is None
    unstoppable = begin(grammars, Guided(regex="ab"), frozenset(), b"ab")
    assert follow(unstoppable) == set()
    assert unstoppable.complete
    assert unstoppable.error is None


def test_text_that_is_a_stop_is_kept_for_the_end(grammars: GrammarCompiler) -> None:
    state = begin(grammars, Guided(regex="[xy]+"), STOPS | {ord("x")})
    assert follow(state) == set(b"y")
    state.accept(ord("y"))
    assert follow(state) == set(b"xy") | STOPS


def test_control_tokens_and_padding_are_never_text(grammars: GrammarCompiler) -> None:
    state = begin(grammars, Guided(regex="(?s:.*)"), frozenset())
    assert follow(state) <= set(range(256))
    # An end that a grammar names itself is still not text.
    named = begin(grammars, Guided(grammar='start: "a" <|im_start|> "b" <|end|>'), frozenset())
    named.accept(ord("a"))
    assert len(follow(named)) == 1
    (start,) = follow(named)
    assert start not in STOPS
    named.accept(start)
    named.accept(ord("b"))
    assert follow(named) == set()
    assert not named.complete


def test_a_token_outside_the_grammar_is_a_fault_and_stays_one(grammars: GrammarCompiler) -> None:
    state = begin(grammars, Guided(regex="ab"), said=b"ax")
    assert state.error
    first = state.error
    assert follow(state) == set()
    assert not state.complete
    state.accept(ord("b"))
    assert state.error == first


@settings(max_examples=50)
@given(data=st.data())
def test_drafts_get_the_masks_that_acceptance_would_give(data: st.DataObject) -> None:
    grammars = shared_grammars()
    stops = data.draw(st.sampled_from([frozenset[int](), STOPS]))
    guided = Guided(json_schema={"type": "array", "items": {"enum": ["a", "b", 1]}, "maxItems": 2})
    said = data.draw(st.sampled_from([b"", b"[", b'["a"', b"[1,1]"]))
    drafts = data.draw(
        st.lists(st.sampled_from([*b'[]",ab1 ', EOS]), max_size=5)
        | st.sampled_from(
            [list(b'["a",1]'), list(b'"b"]'), [*b"]", EOS], list(b",1]"), list(b" ]")]
        )
    )
    state = begin(grammars, guided, stops, said)
    masks = state.masks(drafts)
    assert len(masks) == len(drafts) + 1
    walker = begin(grammars, guided, stops, said)
    expected = follow(walker)
    assert allowed(masks[0]) == expected
    complete = walker.complete
    for (mask, after), token in zip(pairwise(masks), drafts, strict=True):
        if mask is None or token not in allowed(mask) or token in stops:
            assert after is None
            continue
        walker.accept(token)
        assert allowed(after) == follow(walker)
    # And the state is where it was.
    assert state.error is None
    assert state.complete == complete
    assert follow(state) == expected
    assert state.complete == complete


@cache
def shared_grammars() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), WIDE, STOPS)


SENTENCES = {
    "properties": {
        "a long name of a property": {"enum": ["some words — 3", "some wörds 🤔", 12345]},
        "tail": {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 3},
    },
    "type": "object",
    "required": ["a long name of a property", "tail"],
    "additionalProperties": False,
}


def test_masks_computed_together_are_those_computed_alone(
    smollm2_gguf: Path, rng: np.random.Generator
) -> None:
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(smollm2_gguf))
    stops = tokenizer.stop_ids
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size + 40, stops)
    guides = [
        Guided(json_schema=SENTENCES),
        Guided(json_schema=SENTENCES),
        Guided(regex="[a-f]{2,8}"),
        Guided(choice=["yes", "no"]),
        *[Guided(json_schema=SENTENCES)] * 4,
    ]
    crowd, single = (
        [GuidedState(compiler.prepare(one).compiled, stops) for one in guides] for _ in range(2)
    )
    # Few are not worth the threads; here they are, on any machine.
    compute_together(crowd[:1])
    assert crowd[0].computed is None
    crowd[0].vocabulary.fewest_together = 2
    # A fault of one is not its neighbours', and its mask stays empty.
    for states in (crowd, single):
        states[2].accept(int(tokenizer.encode("z")[0]))
    said_last: list[int | None] = [None] * len(guides)
    for _ in range(12):
        compute_together(crowd)
        assert all((one.computed is None) == (one.error is not None) for one in crowd)
        for index, (one, other) in enumerate(zip(crowd, single, strict=True)):
            (mask,), (expected,) = one.masks(), other.masks()
            assert mask is not None
            assert expected is not None
            assert np.array_equal(mask, expected)
            assert (one.complete, one.error) == (other.complete, other.error)
            may_follow = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            going = [token_id for token_id in may_follow.tolist() if token_id not in stops]
            said_last[index] = int(rng.choice(going)) if going else None
            for state in (one, other):
                if said_last[index] is not None:
                    state.accept(said_last[index])
    assert crowd[2].error is not None
    assert said_last[3] is None


def test_a_replayed_state_is_the_live_one_also_where_tokens_are_words(
    smollm2_gguf: Path, rng: np.random.Generator
) -> None:
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(smollm2_gguf))
    stops = tokenizer.stop_ids
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, stops)
    compiled = compiler.prepare(Guided(json_schema=SENTENCES)).compiled
    for _ in range(3):
        live = GuidedState(compiled, stops)
        said: list[int] = []
        while True:
            (mask,) = live.masks()
            assert mask is not None
            (replayed,) = GuidedState(compiled, stops, said).masks()
            drafted = GuidedState(compiled, stops).masks(said)[-1]
            assert replayed is not None
            assert drafted is not None
            assert np.array_equal(replayed, mask)
            assert np.array_equal(drafted, mask)
            may_follow = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token_id = int(rng.choice(may_follow))
            if token_id in stops:
                break
            said.append(token_id)
            live.accept(token_id)
        jsonschema.validate(json.loads(tokenizer.decode(said)), SENTENCES)


def test_bit_masks() -> None:
    assert bit_mask([], 33).tolist() == [0, 0]
    assert bit_mask([0, 31, 32, 33, 900], 34).tolist() == [2**31 + 1, 3]


# ---- compiling ------------------------------------------------------------------------------


def test_a_grammar_is_compiled_once_for_all_who_ask_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = GrammarCompiler(byte_tokenizer(), WIDE, STOPS)
    compiled: list[Guided] = []
    real = GrammarCompiler._compile

    def counting(self: GrammarCompiler, guided: Guided) -> Any:
        compiled.append(guided)
        return real(self, guided)

    monkeypatch.setattr(GrammarCompiler, "_compile", counting)
    start = threading.Barrier(4)
    found: list[PreparedGuided] = []

    def ask() -> None:
        start.wait()
        found.append(grammars.prepare(Guided(choice=["yes", "no"])))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    assert len({id(one.compiled) for one in found}) == 1
    again = grammars.prepare(found[0])
    assert again is found[0]
    elsewhere = GrammarCompiler(byte_tokenizer(), WIDE, STOPS).prepare(found[0])
    assert elsewhere.compiled is not found[0].compiled


def test_refusals_are_kept_and_old_results_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarCompiler(byte_tokenizer(), WIDE, STOPS)
    monkeypatch.setattr(compiler_module, "CACHED_GRAMMARS", 2)
    compiled: list[str] = []
    real = GrammarCompiler._compile

    def counting(self: GrammarCompiler, guided: Guided) -> Any:
        compiled.append(guided.source[1])
        return real(self, guided)

    monkeypatch.setattr(GrammarCompiler, "_compile", counting)
    bad = Guided(json_schema={"type": "nothing"})
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="nothing"):
            grammars.prepare(bad)
    assert len(compiled) == 1
    for choice in "ab":
        grammars.prepare(Guided(choice=[choice]))
    grammars.prepare(Guided(choice=["a"]))
    assert len(compiled) == 3
    with pytest.raises(InvalidRequestError):
        grammars.prepare(bad)
    assert len(compiled) == 4
    grammars.prepare(Guided(choice=["a"]))  # was asked for later than "b", which made room
    assert len(compiled) == 4
    grammars.prepare(Guided(choice=["b"]))
    assert len(compiled) == 5


def test_a_grammar_of_ends_alone_has_no_text(grammars: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="no text"):
        grammars.prepare(Guided(grammar="start: <|im_end|>"))
    grammars.prepare(Guided(grammar="start: <|im_end|>?"))


def test_the_prompt_is_scored_beside_a_guide_as_without_one() -> None:
    scored = run(guide(Guided(choice=["yes", "no"]), prompt_logprobs=2))
    free = run(
        LLMGenerationRequest("hello", params=SamplingParams(max_tokens=1, prompt_logprobs=2))
    )
    assert scored.text in ("yes", "no")
    assert scored.prompt_logprobs == free.prompt_logprobs


def test_who_waits_too_long_for_the_others_is_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = GrammarCompiler(byte_tokenizer(), WIDE, STOPS)
    known = Guided(choice=["known"])
    grammars.prepare(known)
    monkeypatch.setattr(compiler_module, "WAIT_SECONDS", 0.01)
    with grammars._compile_lock:
        grammars.prepare(known)
        with pytest.raises(SubmitError) as caught:
            grammars.prepare(Guided(choice=["new"]))
    assert caught.value.reason == "queue_full"


def test_only_a_compiled_guide_takes_a_seat() -> None:
    runtime, _ = fake_runtime()
    seed = runtime.preparation.seed(guide(Guided(choice=["a"])), 0, 1)
    assert isinstance(seed.params.guided, PreparedGuided)
    raw = replace(seed, params=replace(seed.params, guided=Guided(choice=["a"])))
    generation = runtime.begin_generation(guide(Guided(choice=["b"])))
    assert generation is not None
    with generation, pytest.raises(ExecutionError, match="compiled"):
        generation.session.seat(replace(raw, original_index=5))


def test_validation_compiles_and_seating_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, _ = fake_runtime()
    request = runtime.preparation.validate(guide(Guided(regex="a|b")))

    def never(self: GrammarCompiler, guided: Guided) -> Any:
        raise AssertionError("compiled twice")

    monkeypatch.setattr(GrammarCompiler, "_compile", never)
    response = runtime.handle_request(request)
    assert response is not None
    assert response.text in ("a", "b")


# ---- whole answers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guided", "texts"),
    [
        (Guided(choice=["yes", "no", 'a"\n\\u0041\x01é']), {"yes", "no", 'a"\n\\u0041\x01é'}),
        (Guided(regex="[ab]\n?c"), {"ac", "bc", "a\nc", "b\nc"}),
        (Guided(regex="a/b\\/"), {"a/b/"}),
        (Guided(regex=""), {""}),
        (Guided(grammar='start: "x" b\nb: "1" | "2"'), {"x1", "x2"}),
        (Guided(grammar='root ::= "x" b\nb ::= "1" | "2"'), {"x1", "x2"}),
        (Guided(json_schema={"const": {"a": [1, "\x01ü"]}}), {'{"a":[1,"\\u0001ü"]}'}),
        (Guided(json_object=True), {"{}"}),
    ],
    ids=lambda value: value.source[0] if isinstance(value, Guided) else "",
)
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 120])
def test_every_kind_of_guide_is_followed_to_its_end(
    guided: Guided, texts: set[str], ignore_eos: bool, min_tokens: int
) -> None:
    for seed in range(3):
        output = run(
            guide(
                guided,
                seed=seed,
                logit_bias=BRIEF,
                ignore_eos=ignore_eos,
                min_tokens=min_tokens,
                logprobs=1,
            )
        )
        assert output.text in texts
        assert output.finish_reason is FinishReason.STOP
        assert output.stop_reason is None
        assert (output.token_ids[-1:] != () and output.token_ids[-1] in STOPS) != ignore_eos
        assert len(output.logprobs or ()) == len(output.token_ids)


def test_min_tokens_holds_where_the_grammar_can_go_on() -> None:
    output = run(guide(Guided(regex="[a-z]+"), min_tokens=20, logit_bias=BRIEF))
    assert output.finish_reason is FinishReason.STOP
    assert len(output.token_ids) == 21


def test_an_optional_end_is_taken_when_the_model_wants_it() -> None:
    output = run(guide(Guided(regex="[a-z]+"), logit_bias=BRIEF))
    assert len(output.token_ids) == 2
    output = run(guide(Guided(regex="[a-z]+"), logit_bias={EOS: -100, IM_END: -100}))
    assert output.finish_reason is FinishReason.LENGTH


def test_a_stop_string_ends_it_anywhere() -> None:
    output = run(guide(Guided(regex="abcdef"), stop="cd"))
    assert (output.text, output.finish_reason) == ("ab", FinishReason.STOP)
    assert output.stop_reason == "cd"


def test_a_dead_end_fails_the_request_alone_and_keeps_its_text() -> None:
    runtime = shared_runtime()
    free = LLMGenerationRequest(
        "free", params=SamplingParams(seed=3, max_tokens=30, ignore_eos=True)
    )
    alone = runtime.handle_request(free)
    dead = guide(Guided(regex="abc"), stop_token_ids=[ord("c")], logprobs=2)
    response = runtime.handle_request(LLMGenerationRequest.batch([dead, free]))
    assert response is not None
    assert alone is not None
    assert response.outputs[0].finish_reason is FinishReason.ERROR
    assert response.outputs[0].text == "ab"
    assert response.outputs[1].token_ids == alone.token_ids
    assert_clean(runtime)


@pytest.mark.parametrize("min_tokens", [0, 6])
def test_a_preempted_sequence_goes_on_where_it_stood(min_tokens: int) -> None:
    schema = {"type": "array", "items": {"enum": ["ab", 12, None]}, "minItems": 6, "maxItems": 9}
    batch = [
        guide(Guided(json_schema=schema), seed=seed, min_tokens=min_tokens, prompt=f"p{seed}")
        for seed in range(4)
    ]
    batch = [
        replace(one, params=replace(one.params, max_tokens=60, logit_bias=BRIEF)) for one in batch
    ]
    alone = [run(one) for one in batch]
    runtime, _ = fake_runtime(pages=8, page_size=8)
    runtime.overcommit = True
    response = runtime.handle_request(LLMGenerationRequest.batch(batch))
    assert response is not None
    assert runtime.prefill_metrics.computed_tokens > sum(len("p0") for _ in batch)
    for expected, output in zip(alone, response.outputs, strict=True):
        assert output.token_ids == expected.token_ids
        assert output.finish_reason is expected.finish_reason
        json.loads(output.text)


@pytest.mark.parametrize("mark", ["</t>", "<|im_start|>"])
@pytest.mark.parametrize(
    "guided",
    [
        Guided(json_schema={"const": [1, 2]}),
        Guided(regex=r"\[1,2\]"),
        Guided(grammar='start: "[" b "]"\nb: "1,2"'),
        Guided(choice=["[1,2]"]),
    ],
    ids=lambda guided: guided.source[0],
)
def test_a_form_may_begin_behind_a_mark(mark: str, guided: Guided) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(f"I think {{[</t {mark}\n[1,2]", parse_special=True)
    behind = replace(guided, after=mark)
    state = GuidedState(shared_grammars().prepare(behind).compiled, STOPS)
    for token_id in ids:
        may_follow = follow(state)
        assert token_id in may_follow
        assert STOPS.isdisjoint(may_follow)
        state.accept(token_id)
    assert follow(state) == STOPS
    assert state.complete
    # In front of the mark nearly everything goes, and behind it only the form.
    state = GuidedState(shared_grammars().prepare(behind).compiled, STOPS)
    assert len(follow(state)) > 150
    for token_id in tokenizer.encode(mark, parse_special=True):
        state.accept(token_id)
    assert follow(state) == set(b"[\n")
    assert (
        shared_grammars().prepare(guided).compiled is not shared_grammars().prepare(behind).compiled
    )


def test_several_sequences_of_one_request_each_follow_it() -> None:
    runtime = shared_runtime()
    response = runtime.handle_request(guide(Guided(regex="[a-z]{8}"), n=4, temperature=2.0))
    assert response is not None
    texts = [output.text for output in response.outputs]
    assert all(len(text) == 8 and text.isalpha() for text in texts)
    assert len(set(texts)) > 1
