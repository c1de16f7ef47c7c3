"""Limits, reservations and refusals, computed before anything is seated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steppe.errors import (
    ChatTemplateError,
    ContextLengthError,
    InvalidRequestError,
)
from steppe.request import LLMGenerationRequest, SamplingParams
from steppe.runtime.preparation import OPEN_ENDED_RESERVE, RequestPreparation
from steppe.streaming import StreamChannel
from tests.runtime.asking import ask
from tests.runtime.fakes import EOS, IM_END, IM_START, VOCAB, fake_artifacts

MESSAGES = [{"role": "user", "content": "hi"}]


def preparation(context: int = 64, page_size: int = 8, pages: int = 100) -> RequestPreparation:
    return RequestPreparation(fake_artifacts(), context, page_size, pages)


# ---- tokens --------------------------------------------------------------------------------------


def test_text_ids_and_messages_become_ids() -> None:
    prepare = preparation()
    assert prepare.tokenize(ask("hé")) == tuple("hé".encode())
    assert prepare.tokenize(ask([5, 258])) == (5, 258)
    chat = prepare.tokenize(LLMGenerationRequest(messages=MESSAGES))
    assert chat == (
        IM_START,
        *b"user\nhi",
        IM_END,
        *b"\n",
        IM_START,
        *b"assistant\n",
    )


def test_control_words_in_user_text_stay_text() -> None:
    ids = preparation().tokenize(
        LLMGenerationRequest(messages=[{"role": "user", "content": "<|im_end|>"}])
    )
    assert ids.count(IM_END) == 1


def test_a_base_model_takes_no_messages() -> None:
    prepare = RequestPreparation(replace(fake_artifacts(), chat_template=None), 64, 8, 100)
    with pytest.raises(ChatTemplateError, match="fake has no chat template"):
        prepare.tokenize(LLMGenerationRequest(messages=MESSAGES))


@pytest.mark.parametrize("token", [VOCAB, VOCAB + 1, 2**31 - 1])
def test_unknown_ids_are_refused(token: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"no token {token}, .* has {VOCAB}"):
        preparation().tokenize(ask([1, token]))
    assert preparation().tokenize(ask([VOCAB - 1])) == (VOCAB - 1,)


def test_an_embedding_needs_room_for_its_prompt_and_nothing_else() -> None:
    prepare = preparation()
    seed = prepare.seed(LLMGenerationRequest([1] * 64, task="embed"), 0, 1)
    assert (seed.embed, seed.max_tokens) == (True, 0)
    assert prepare.reservation(seed) == 64
    with pytest.raises(ContextLengthError) as caught:
        prepare.seed(LLMGenerationRequest([1] * 65, task="embed"), 0, 1)
    assert (caught.value.needed, caught.value.available) == (65, 64)
    assert not prepare.seed(ask(), 0, 1).embed


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "asked", "limit"),
    [
        (1, None, 63),
        (63, None, 1),
        (63, 1, 1),
        (32, 32, 32),
        (32, 5, 5),
        (64, 0, 0),
        (1, 0, 0),
    ],
)
def test_what_fits_gets_its_limit(prompt: int, asked: int | None, limit: int) -> None:
    params = SamplingParams(max_tokens=asked, prompt_logprobs=0)
    request = LLMGenerationRequest([1] * prompt, params=params)
    assert preparation().max_tokens(request, prompt) == limit


@pytest.mark.parametrize(
    ("prompt", "asked", "needed", "field"),
    [
        (64, None, 65, "prompt"),
        (65, None, 66, "prompt"),
        (64, 1, 65, "prompt"),
        (65, 0, 65, "prompt"),
        (63, 2, 65, "max_tokens"),
        (1, 64, 65, "max_tokens"),
        (1, 10**9, 10**9 + 1, "max_tokens"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(
    prompt: int, asked: int | None, needed: int, field: str
) -> None:
    params = SamplingParams(max_tokens=asked, prompt_logprobs=0)
    request = LLMGenerationRequest([1] * prompt, params=params)
    with pytest.raises(ContextLengthError) as caught:
        preparation().max_tokens(request, prompt)
    assert (caught.value.needed, caught.value.available) == (needed, 64)
    assert caught.value.field == field
    assert "64" in str(caught.value)
    assert str(prompt) in str(caught.value)


def test_messages_that_are_too_long_are_named() -> None:
    request = LLMGenerationRequest(messages=[{"role": "user", "content": "x" * 80}])
    with pytest.raises(ContextLengthError) as caught:
        preparation().seed(request, 0, 1)
    assert caught.value.field == "messages"


def test_a_pool_smaller_than_the_context_is_in_the_arithmetic() -> None:
    with pytest.raises(ContextLengthError, match="need 3 pages of 8, the pool has 2") as caught:
        preparation(pages=2).max_tokens(ask([1] * 10, 7), 10)
    assert (caught.value.needed, caught.value.available) == (17, 16)
    assert preparation(pages=2).max_tokens(ask([1] * 10, 6), 10) == 6


# ---- validation ----------------------------------------------------------------------------------


def test_a_valid_request_comes_back_with_ids_and_is_otherwise_the_same() -> None:
    channel = StreamChannel()
    request = LLMGenerationRequest(
        messages=MESSAGES, stream_channel=channel, caller="me", priority=3, timeout=5.0
    )
    checked = preparation().validate(request)
    assert checked.prompt == preparation().tokenize(request)
    assert checked.messages is None
    assert checked.stream_channel is channel
    assert (checked.caller, checked.priority, checked.timeout) == ("me", 3, 5.0)


def test_every_member_of_a_batch_is_checked() -> None:
    batch = LLMGenerationRequest.batch([ask("ab"), ask("c")])
    assert [one.prompt for one in preparation().validate(batch).requests] == [(97, 98), (99,)]
    for bad in (ask(""), ask("x", 64), ask(logit_bias={VOCAB: 1.0})):
        with pytest.raises(InvalidRequestError):
            preparation().validate(LLMGenerationRequest.batch([ask("ab"), bad]))


# ---- seeds ---------------------------------------------------------------------------------------


def test_a_seed_holds_all_that_was_resolved() -> None:
    channel = StreamChannel()
    request = ask("ab", None, seed=77, stop_token_ids=[65], sequence_index=2, channel=channel)
    seed = preparation().seed(request, 5, 9)
    assert (seed.request_id, seed.original_index, seed.sequence_index) == (9, 5, 2)
    assert (seed.prompt_token_ids, seed.seed, seed.max_tokens) == ((97, 98), 77, 62)
    assert seed.stream_channel is channel
    assert seed.params is request.params
    assert seed.generated == ()


def test_the_stop_set_is_the_models_and_the_requests() -> None:
    prepare = preparation()
    both = prepare.seed(ask(ignore_eos=False, stop_token_ids=[65]), 0, 1)
    assert both.stop_token_ids == {EOS, IM_END, 65}
    assert prepare.seed(ask(stop_token_ids=[65]), 0, 1).stop_token_ids == {65}
    assert prepare.seed(ask(), 0, 1).stop_token_ids == frozenset()


def test_an_unseeded_request_gets_a_fresh_seed_and_zero_is_a_seed() -> None:
    prepare = preparation()
    seeds = {prepare.seed(ask(), 0, 1).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= one < 2**64 for one in seeds)
    assert prepare.seed(ask(seed=0), 0, 1).seed == 0


# ---- reservations --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "generated", "overcommit", "tokens"),
    [
        (20, 0, False, 2 + 20),
        (20, 7, False, 2 + 20),
        (None, 0, False, 2 + OPEN_ENDED_RESERVE),
        (None, 100, False, 2 + 100 + OPEN_ENDED_RESERVE),
        (None, 900, False, 1000),  # never past the context
        (20, 0, True, 2 + 1),
        (None, 7, True, 2 + 7 + 1),
        (1, 0, True, 2 + 1),
    ],
)
def test_a_seat_reserves_what_the_request_may_need(
    asked: int | None, generated: int, overcommit: bool, tokens: int
) -> None:
    prepare = preparation(context=1000, pages=1000)
    seed = replace(prepare.seed(ask("ab", asked), 0, 1), generated=(97,) * generated)
    assert prepare.reservation(seed, overcommit=overcommit) == tokens


def test_scoring_reserves_the_prompt_alone() -> None:
    prepare = preparation()
    seed = prepare.seed(ask("abc", 0, prompt_logprobs=0), 0, 1)
    assert prepare.reservation(seed) == 3
    assert prepare.reservation(seed, overcommit=True) == 3
