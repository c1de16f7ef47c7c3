"""One sequence: its text, its end, what it hands out, and how it goes on after a preemption."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from steppe.request import FinishReason, SamplingParams, TokenLogprob
from steppe.runtime.kv.pool import PagePool
from steppe.runtime.sequence import SequenceState, TextState, unseated_result
from steppe.stepping.types import ResidentRef, SequenceIdentity, SlotSeed
from steppe.text.pipeline import TextPipeline
from tests.runtime.fakes import EOS, IM_END, byte_tokenizer, no_prefix

if TYPE_CHECKING:
    from steppe.text.tokenizer import Tokenizer

TOKENIZER: Tokenizer = byte_tokenizer()
PROMPT = (104, 105)


def seed_of(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 8, **params: Any) -> SlotSeed:
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS, IM_END))}
    return SlotSeed(7, 3, prompt, sampling, 1, max_tokens, frozenset(stops))


def seated(seed: SlotSeed) -> SequenceState:
    text = seed.text_state
    if not isinstance(text, TextState):
        params = seed.params
        pipeline = TextPipeline(
            TOKENIZER,
            params.stop,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop,
            prompt_ids_tail=seed.prompt_token_ids,
        )
        text = TextState(pipeline, [])
    lease = PagePool([4], 8).lease(8)
    assert lease is not None
    identity = SequenceIdentity(seed.request_id, ResidentRef(0, 1))
    return SequenceState(seed, identity, lease, text, no_prefix())


def feed(sequence: SequenceState, tokens: bytes | list[int]) -> None:
    for token in tokens:
        assert not sequence.finished
        sequence.append(token, TokenLogprob(token, -1.0, ((token, -1.0),)))


def test_a_new_sequence_has_everything_to_compute() -> None:
    sequence = seated(seed_of())
    assert (sequence.tokens, sequence.computed, sequence.prefill_end) == ([104, 105], 0, 2)
    assert (sequence.prefilling, sequence.num_generated, sequence.finished) == (True, 0, False)
    assert sequence.take_delta() is None
    sequence.computed = 2
    assert not sequence.prefilling


def test_length_ends_it_at_the_limit() -> None:
    sequence = seated(seed_of(max_tokens=3))
    feed(sequence, b"abc")
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.stop_reason is None
    assert sequence.result().text == "abc"


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("skip_special_tokens", [False, True])
def test_the_models_own_stop_is_an_id_but_text_only_on_request(
    include_stop: bool, skip_special_tokens: bool
) -> None:
    sequence = seated(seed_of(include_stop=include_stop, skip_special_tokens=skip_special_tokens))
    feed(sequence, [97, IM_END])
    result = sequence.result()
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, None)
    assert result.token_ids == (97, IM_END)
    shown = include_stop and not skip_special_tokens
    assert result.text == ("a<|im_end|>" if shown else "a")


@pytest.mark.parametrize(("include_stop", "text"), [(False, "a"), (True, "ab")])
def test_a_named_stop_id_is_the_reason(include_stop: bool, text: str) -> None:
    sequence = seated(seed_of(stop_token_ids=(98,), include_stop=include_stop))
    feed(sequence, b"ab")
    result = sequence.result()
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, 98)
    assert (result.token_ids, result.text) == ((97, 98), text)


def test_a_models_stop_that_the_caller_names_too_is_the_reason() -> None:
    sequence = seated(seed_of(stop_token_ids=(EOS,)))
    feed(sequence, [EOS])
    assert sequence.stop_reason == EOS


def test_the_models_stops_do_not_end_what_ignores_them() -> None:
    sequence = seated(seed_of(ignore_eos=True, max_tokens=3))
    feed(sequence, [EOS, IM_END, 97])
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.result().text == "a"


@pytest.mark.parametrize(("include_stop", "text"), [(False, "x"), (True, "xabc")])
def test_a_stop_string_across_tokens_cuts_the_text_and_not_the_ids(
    include_stop: bool, text: str
) -> None:
    sequence = seated(seed_of(stop=("abc",), include_stop=include_stop))
    feed(sequence, b"xabc")
    result = sequence.result()
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, "abc")
    assert (result.token_ids, result.text) == (tuple(b"xabc"), text)


def test_a_stop_string_beats_the_limit_reached_by_the_same_token() -> None:
    sequence = seated(seed_of(stop=("b",), max_tokens=2))
    feed(sequence, b"ab")
    assert (sequence.finish_reason, sequence.stop_reason) == (FinishReason.STOP, "b")


def test_held_back_text_comes_out_at_the_end() -> None:
    sequence = seated(seed_of(stop=("abc",), max_tokens=3))
    feed(sequence, b"xa")
    delta = sequence.take_delta()
    assert delta is not None
    assert (delta.token_ids, delta.text) == (tuple(b"xa"), "x")
    feed(sequence, b"b")
    delta = sequence.take_delta()
    assert delta is not None
    assert (delta.token_ids, delta.text) == (tuple(b"b"), "ab")
    assert sequence.result().text == "xab"


def test_the_end_may_complete_a_stop_that_an_earlier_longer_one_shadowed() -> None:
    sequence = seated(seed_of(stop=("abcd", "c"), max_tokens=3))
    feed(sequence, b"abc")
    result = sequence.result()
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, "c")
    assert result.text == "ab"


def test_an_end_from_outside_releases_text_and_stays_the_reason() -> None:
    sequence = seated(seed_of(stop=("abcd", "c")))
    feed(sequence, b"abc")
    sequence.end(FinishReason.CANCELLED)
    sequence.end(FinishReason.ERROR, "too late")
    result = sequence.result()
    assert (result.finish_reason, result.stop_reason, result.error) == (
        FinishReason.CANCELLED,
        None,
        None,
    )
    assert result.text == "ab"


def test_a_character_cut_by_the_limit_is_one_replacement() -> None:
    sequence = seated(seed_of(max_tokens=3))
    feed(sequence, "é".encode())
    feed(sequence, "é".encode()[:1])
    assert sequence.result().text == "é\ufffd"


def test_deltas_add_up_to_the_result() -> None:
    sequence = seated(seed_of(stop=("zz",), logprobs=0))
    tokens: tuple[int, ...] = ()
    text = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    for token in b"abzxzz":
        feed(sequence, [token])
        delta = sequence.take_delta()
        assert delta is not None
        tokens += delta.token_ids
        text += delta.text
        logprobs += delta.logprobs or ()
        assert sequence.take_delta() is None
    result = sequence.result()
    assert (tokens, text, logprobs) == (result.token_ids, result.text, result.logprobs)
    assert text == "abzx"


def test_logprobs_are_absent_unless_asked_for() -> None:
    sequence = seated(seed_of(max_tokens=1))
    feed(sequence, b"a")
    delta = sequence.take_delta()
    assert delta is not None
    assert (delta.logprobs, delta.prompt_logprobs) == (None, None)
    assert (sequence.result().logprobs, sequence.result().prompt_logprobs) == (None, None)


def test_prompt_scores_begin_with_none() -> None:
    sequence = seated(seed_of(prompt=(1, 2, 3), prompt_logprobs=0))
    scores = [TokenLogprob(token, -1.0) for token in (2, 3)]
    for score in scores:
        sequence.score(score)
    delta = sequence.take_delta()
    assert delta is not None
    assert delta.prompt_logprobs == (None, *scores)
    sequence.end(FinishReason.LENGTH)
    assert sequence.result().prompt_logprobs == (None, *scores)


def test_a_preempted_sequence_goes_on_where_it_stood() -> None:
    sequence = seated(seed_of(stop=("bcd",), logprobs=1))
    feed(sequence, b"ab")
    sequence.take_delta()
    resumed = seated(sequence.preempted_seed())
    assert (resumed.tokens, resumed.computed, resumed.prefill_end) == ([104, 105, 97, 98], 0, 4)
    assert (resumed.num_generated, resumed.take_delta()) == (2, None)
    feed(resumed, b"cd")
    result = resumed.result()
    assert (result.token_ids, result.text, result.stop_reason) == (tuple(b"abcd"), "a", "bcd")
    assert result.logprobs is not None
    assert [one.token_id for one in result.logprobs] == list(b"abcd")
    assert (result.prompt_tokens, result.request_id, result.original_index) == (2, 7, 3)


@pytest.mark.parametrize("prompt", [(1,), (1, 2, 3)])
@pytest.mark.parametrize("delivered", [False, True])
def test_prompt_scores_are_delivered_once_whenever_it_is_preempted(
    prompt: tuple[int, ...], delivered: bool
) -> None:
    sequence = seated(seed_of(prompt=prompt, prompt_logprobs=0))
    said: list[TokenLogprob | None] = []
    if delivered:
        delta = sequence.take_delta()
        assert delta is not None
        said += delta.prompt_logprobs or ()
    resumed = seated(sequence.preempted_seed())
    for token in prompt[1:]:
        resumed.score(TokenLogprob(token, -1.0))
    resumed.end(FinishReason.LENGTH)
    delta = resumed.take_delta()
    said += (delta.prompt_logprobs or ()) if delta else ()
    assert tuple(said) == resumed.result().prompt_logprobs
    assert said == [None, *(TokenLogprob(token, -1.0) for token in prompt[1:])]


def test_the_snapshot_of_a_sequence_without_a_seat() -> None:
    fresh = unseated_result(seed_of(), FinishReason.CANCELLED)
    assert (fresh.token_ids, fresh.text, fresh.logprobs) == ((), "", None)
    assert fresh.finish_reason is FinishReason.CANCELLED
    assert fresh.prompt_tokens == 2

    sequence = seated(seed_of(logprobs=0, prompt_logprobs=0))
    sequence.score(TokenLogprob(105, -2.0))
    feed(sequence, b"ab")
    sequence.take_delta()
    left = unseated_result(sequence.preempted_seed(), FinishReason.CANCELLED)
    assert (left.token_ids, left.text) == (tuple(b"ab"), "ab")
    assert left.logprobs is not None
    assert [one.token_id for one in left.logprobs] == list(b"ab")
    assert left.prompt_logprobs == (None, TokenLogprob(105, -2.0))
