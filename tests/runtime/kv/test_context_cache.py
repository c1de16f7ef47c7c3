"""What is found again, what is not, and that nobody can see it in the tokens.

The fake backend reads its cache back, so a page shared wrongly shows in what it says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.engine.config import EngineConfig
from steppe.engine.request_engine import RequestEngine
from steppe.errors import ConfigError, ExecutionError
from steppe.request import FinishReason, LLMGenerationRequest
from steppe.runtime.inference_runtime import LLMInferenceRuntime
from steppe.runtime.kv.context_cache import ContextCache, ContextCacheConfig
from steppe.runtime.kv.keys import PageKeys
from steppe.runtime.kv.pool import GONE, PagePool
from steppe.runtime.stepped.request import SteppedRequest
from steppe.stepping.types import (
    AdmissionStatus,
    DecodeEntry,
    ImmutableStepBatch,
    PrefillEntry,
    ResidentRef,
)
from tests.runtime.asking import ask
from tests.runtime.fakes import FakeBackend, assert_clean, fake_runtime, greedy_reference
from tests.runtime.test_sequence import seed_of

if TYPE_CHECKING:
    from steppe.runtime.rank_runtime import LLMRankRuntime
    from steppe.stepping.types import StepResult

PREFIX = bytes(range(97, 123))  # 26 tokens: three pages of eight and two more


def said(runtime: LLMRankRuntime, request: LLMGenerationRequest, **given: Any) -> tuple[int, int]:
    """Answer one request, check its tokens; (tokens computed, tokens reused)."""
    before = runtime.prefill_metrics.computed_tokens
    response = runtime.handle_request(request, **given)
    assert response is not None
    prompt = request.prompt
    assert prompt is not None
    ids = prompt.encode() if isinstance(prompt, str) else prompt
    count = len(response.token_ids)
    assert response.token_ids == tuple(greedy_reference(list(ids), count))
    assert_clean(runtime)
    return runtime.prefill_metrics.computed_tokens - before, response.usage.cached_tokens


def test_a_prompt_asked_again_is_computed_from_its_last_page_on() -> None:
    runtime, _ = fake_runtime()
    assert said(runtime, ask(PREFIX.decode())) == (26, 0)
    assert said(runtime, ask(PREFIX.decode())) == (2, 24)
    # A prompt of whole pages: its last token is computed all the same, with its page.
    assert said(runtime, ask(PREFIX[:24].decode())) == (8, 16)
    metrics = runtime.context_cache_metrics
    assert metrics is not None
    assert (metrics.admitted_sequences, metrics.hit_sequences) == (3, 2)
    assert (metrics.reused_tokens, metrics.queried_tokens) == (40, 26 + 26 + 24)
    assert metrics.hit_rate == 40 / 76
    assert runtime.prefill_metrics.reused_tokens == 40
    # Three pages of the prompt and one with the end of the answer, in two groups.
    assert (metrics.published_pages, metrics.cached_pages, metrics.leased_pages) == (6, 6, 0)


def test_the_next_turn_finds_the_answer_of_the_one_before() -> None:
    runtime, _ = fake_runtime()
    prompt = list(PREFIX)
    for _ in range(3):
        response = runtime.handle_request(ask(prompt, 20))
        assert response is not None
        prompt += [*response.token_ids, 10, 32]
    # 26 + 3 * 22 tokens by now; all but the last answer's tail and what was added are known.
    assert said(runtime, ask(prompt)) == (len(prompt) - 88, 88)


def test_sequences_of_one_request_share_its_prompt() -> None:
    runtime, _ = fake_runtime(max_step_tokens=16)
    request = ask(PREFIX.decode(), 4, n=3)
    response = runtime.handle_request(request)
    assert response is not None
    assert {output.token_ids for output in response.outputs} == {
        tuple(greedy_reference(list(PREFIX), 4))
    }
    assert runtime.prefill_metrics.computed_tokens == 26 + 2 * 2


@pytest.mark.parametrize(
    "second",
    [
        {"cache_salt": "other"},
        {"cache_lookup": "bypass"},
        {"params": {"prompt_logprobs": 0}},
        {"hidden_layers": [0]},
    ],
    ids=str,
)
def test_who_may_not_share_computes_everything(second: dict[str, Any]) -> None:
    runtime, _ = fake_runtime()
    layers = second.pop("hidden_layers", ())
    request = ask(PREFIX.decode(), **second.pop("params", {}))
    said(runtime, ask(PREFIX.decode()))
    assert said(runtime, replace(request, **second), hidden_layers=layers) == (26, 0)
    assert said(runtime, ask(PREFIX.decode())) == (2, 24)
    metrics = runtime.context_cache_metrics
    assert metrics is not None
    assert metrics.lookup_bypass_sequences == (0 if "cache_salt" in second else 1)


def test_an_embedding_computes_every_token() -> None:
    runtime, _ = fake_runtime(pooling="mean")
    said(runtime, ask(PREFIX.decode()))
    before = runtime.prefill_metrics.computed_tokens
    assert runtime.handle_request(LLMGenerationRequest(PREFIX.decode(), task="embed")) is not None
    assert runtime.prefill_metrics.computed_tokens - before == 26


def test_a_salt_is_shared_by_those_who_have_it() -> None:
    runtime, _ = fake_runtime()
    mine = replace(ask(PREFIX.decode()), cache_salt="mine")
    assert said(runtime, mine) == (26, 0)
    assert said(runtime, mine) == (2, 24)


@pytest.mark.parametrize(("commit", "known"), [("all", 40), ("prompt", 24), ("none", 0)])
def test_a_request_says_what_is_kept_of_it(commit: Any, known: int) -> None:
    runtime, _ = fake_runtime()
    response = runtime.handle_request(replace(ask(PREFIX.decode(), 20), cache_commit=commit))
    assert response is not None
    longer = [*PREFIX, *response.token_ids]
    assert said(runtime, ask(longer)) == (46 - known, known)


def test_a_disabled_cache_keeps_nothing() -> None:
    runtime, _ = fake_runtime(cache=False)
    for _ in range(2):
        assert said(runtime, ask(PREFIX.decode())) == (26, 0)
    assert runtime.pool.cached_pages == 0
    with pytest.raises(ConfigError, match="context_cache"):
        ContextCacheConfig(enabled=1)  # type: ignore[arg-type]


# ---- steps ---------------------------------------------------------------------------------------


class Room:
    """An open execution, stepped by hand: decodes of all, and the chunks that are given."""

    def __init__(self, founder: LLMGenerationRequest, **sizes: Any) -> None:
        self.runtime: LLMRankRuntime
        self.backend: FakeBackend
        self.runtime, self.backend = fake_runtime(**sizes)
        execution = SteppedRequest.begin(self.runtime, founder, 1)
        assert execution is not None
        self.execution = execution
        self.refs = [execution.residents()[0]]

    def admit(self, request: LLMGenerationRequest) -> ResidentRef:
        index = len(self.refs)
        result = self.execution.admit(request, index, index + 1)
        assert result.status is AdmissionStatus.ADMITTED
        assert result.ref is not None
        self.refs.append(result.ref)
        return result.ref

    def step(self, chunk: int = 8, **batch: Any) -> StepResult:
        """Decodes, and a chunk of every prompt that does not follow another."""
        gone = {ref for ref, _ in batch.get("retire", ())} | set(batch.get("preempt", ()))
        needs = [one for one in self.execution.snapshot().residents if one.ref not in gone]
        decodes = [DecodeEntry(one.ref) for one in needs if not one.prefill_remaining]
        chunks = [
            PrefillEntry(one.ref, min(chunk, one.prefill_remaining))
            for one in needs
            if one.prefill_remaining and not one.follows
        ]
        return self.execution.step(ImmutableStepBatch(tuple(decodes), tuple(chunks), **batch))

    def left(self) -> list[int]:
        """Prompt tokens that each resident has still to compute."""
        return [one.prefill_remaining for one in self.execution.snapshot().residents]


def test_a_page_is_published_with_the_step_that_filled_it() -> None:
    room = Room(ask(PREFIX.decode(), 9))
    assert [room.step(5).published_prefix for _ in range(6)] == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]
    # The prompt's 26 tokens are computed; the 32nd is with the sixth decode.
    assert [room.step().published_prefix for _ in range(6)] == [False] * 5 + [True]
    room.execution.abort()
    assert_clean(room.runtime)


def test_who_shares_a_prefix_follows_the_first_and_computes_its_own_end() -> None:
    prompts = [[*PREFIX, 200 + number, 32] for number in range(5)]
    room = Room(ask(prompts[0], 3))
    for prompt in prompts[1:]:
        room.admit(ask(prompt, 3))
    stranger = room.admit(ask("stranger", 3))
    results = []
    assert [one.follows for one in room.execution.snapshot().residents] == [0, 1, 1, 1, 1, 0]
    while room.execution.residents():
        results += room.step().finished
    # One whole prompt, four ends of four tokens, and somebody who has nothing to do with it.
    assert room.runtime.prefill_metrics.computed_tokens == 28 + 4 * 4 + 8
    by_ref = dict(results)
    for ref, prompt in zip(room.refs, [*prompts, list(b"stranger")], strict=True):
        assert by_ref[ref].token_ids == tuple(greedy_reference(prompt, 3))
    assert [by_ref[ref].cached_tokens for ref in room.refs] == [0, 24, 24, 24, 24, 0]
    assert by_ref[stranger].prompt_tokens == 8
    metrics = room.runtime.context_cache_metrics
    assert metrics is not None
    assert (metrics.followed_tokens, metrics.hit_sequences) == (96, 0)
    room.execution.finish()
    assert_clean(room.runtime)


def test_followers_go_on_by_themselves_when_the_first_leaves() -> None:
    room = Room(ask(PREFIX.decode(), 3))
    room.admit(ask(PREFIX.decode(), 3))
    third = room.admit(ask(PREFIX.decode(), 3))
    room.step()
    assert room.left() == [18, 18, 18]
    room.step(retire=((room.refs[0], FinishReason.CANCELLED),), preempt=(third,))
    assert room.left() == [18]
    assert not room.execution.snapshot().residents[0].follows
    while room.execution.residents():
        result = room.step()
    assert result.finished[0][1].token_ids == tuple(greedy_reference(list(PREFIX), 3))
    room.execution.abort()
    assert_clean(room.runtime)


def test_nobody_follows_one_who_will_not_publish() -> None:
    room = Room(replace(ask(PREFIX.decode(), 3), cache_commit="none"))
    room.admit(replace(ask(PREFIX.decode(), 3), cache_salt="other"))
    room.admit(replace(ask(PREFIX.decode(), 3), cache_lookup="bypass"))
    room.admit(ask(PREFIX.decode(), 3, prompt_logprobs=0))
    assert not any(one.follows for one in room.execution.snapshot().residents)
    room.execution.abort()


def test_a_cancelled_sequence_publishes_nothing_more() -> None:
    room = Room(ask(PREFIX.decode(), 3))
    room.step(10)
    other = room.admit(ask("other", 9))
    result = room.step(retire=((room.refs[0], FinishReason.CANCELLED),))
    assert not result.published_prefix
    assert room.runtime.pool.cached_pages == 2
    room.step(retire=((other, FinishReason.CANCELLED),))
    room.execution.finish()
    assert_clean(room.runtime)


def test_a_sequence_that_dies_publishes_nothing_of_that_step() -> None:
    nothing = dict.fromkeys(range(8), -100.0)
    room = Room(ask("1234567", 9, logit_bias=nothing))
    resident = room.execution._session_open().session.residents[0]
    room.step()
    resident.error = None
    resident.finish_reason = FinishReason.ERROR
    # The eighth token was its last.
    result = room.step()
    assert [done.finish_reason for _, done in result.finished] == [FinishReason.ERROR]
    assert not result.published_prefix
    assert room.runtime.pool.cached_pages == 0


def test_a_step_that_fails_publishes_nothing() -> None:
    room = Room(ask(PREFIX.decode(), 3), fail_at=2)
    room.step()
    with pytest.raises(ExecutionError, match="fails here"):
        room.step()
    room.execution.abort()
    assert_clean(room.runtime)
    assert room.runtime.pool.cached_pages == 2
    assert said(room.runtime, ask(PREFIX.decode())) == (18, 8)


def test_a_preempted_sequence_finds_its_own_pages_again() -> None:
    room = Room(ask(PREFIX.decode(), 30))
    ref = room.refs[0]
    for _ in range(12):
        room.step()
    ((_, seed),) = room.step(preempt=(ref,)).preempted
    known = len(seed.prompt_token_ids) + len(seed.generated)
    before = room.runtime.prefill_metrics.computed_tokens
    answer = room.execution.admit(ask(PREFIX.decode(), 30), 0, 1, resume=seed)
    assert answer.ref is not None
    while not (result := room.step()).finished:
        pass
    computed = room.runtime.prefill_metrics.computed_tokens - before
    assert computed == known - (known - 1) // 8 * 8
    done = result.finished[0][1]
    assert done.token_ids == tuple(greedy_reference(list(PREFIX), 30))
    # What it found were its own: its caller was not spared anything.
    assert done.cached_tokens == 0


def test_found_pages_are_the_first_to_go_for_nobody_who_holds_them() -> None:
    """A pool with room for one: whoever holds a prefix keeps it, and the idle ends go first."""
    runtime, _ = fake_runtime(pages=6)
    said(runtime, ask(PREFIX.decode(), 6))
    said(runtime, ask("x" * 26, 6))
    assert runtime.pool.evicted == 2
    assert said(runtime, ask(PREFIX.decode(), 6)) == (26 - 16, 16)


# ---- windows -------------------------------------------------------------------------------------


def cache_over(pages: int, windows: list[int | None], size: int) -> tuple[ContextCache, PagePool]:
    pool = PagePool([pages] * len(windows), size)
    return ContextCache(pool, PageKeys(size), windows, ContextCacheConfig()), pool


@given(st.data())
def test_a_prefix_is_as_long_as_every_group_can_read_it(data: st.DataObject) -> None:
    """Against the definition: the longest n at which no query after n pages lacks a page."""
    size = data.draw(st.integers(1, 4))
    windows = data.draw(st.lists(st.one_of(st.none(), st.integers(1, 12)), min_size=1, max_size=3))
    count = data.draw(st.integers(1, 7))
    cache, pool = cache_over(count + 1, windows, size)
    tokens = list(range(count * size + 1))
    use = cache.look_up(replace(seed_of(), prompt_token_ids=tuple(tokens)))
    assert use.reusable == count
    lease = pool.lease(count * size)
    assert lease is not None
    present = [data.draw(st.sets(st.integers(0, count - 1))) for _ in windows]
    keys = use.chain.extend(tokens, count)
    for group, pages, there in zip(pool.groups, lease.pages, present, strict=True):
        for index in there:
            group.publish(pages[index], keys[index])

    def readable(length: int) -> bool:
        for window, there in zip(windows, present, strict=True):
            seen = range(length * size)
            if window is not None:
                seen = range(max(0, length * size - window + 1), length * size)
            if not {position // size for position in seen} <= there:
                return False
        return True

    expected = max(length for length in range(count + 1) if readable(length))
    found = cache.look_up(replace(seed_of(), prompt_token_ids=tuple(tokens)))
    assert found.num_pages == expected
    if found.pages is None:
        return
    for window, pages, held in zip(windows, found.pages, lease.pages, strict=True):
        first = 0 if window is None else max(0, expected * size - window + 1) // size
        assert list(pages) == [GONE] * first + list(held[first:expected])
    again = pool.lease(len(tokens), found.pages)
    if again is not None:
        pool.verify()
        again.release()
    lease.release()
    pool.verify()


def test_a_window_gives_back_what_lies_behind_it_and_its_prefix_is_found_all_the_same() -> None:
    # Two groups, the second with a window of eight tokens: one page, or parts of two.
    room = Room(ask(PREFIX.decode(), 30))
    for _ in range(24):
        room.step()
    full, windowed = room.runtime.pool.groups
    resident = room.execution._session_open().session.residents[0]
    assert resident.computed == 26 + 20
    assert resident.lease.pages[1][:4] == [GONE] * 4
    assert sum(full.holders) - sum(windowed.holders) == 4
    room.execution.abort()
    assert said(room.runtime, ask(PREFIX.decode())) == (2, 24)


def test_a_prefix_whose_window_was_evicted_is_computed_anew() -> None:
    runtime, _ = fake_runtime()
    said(runtime, ask(PREFIX.decode()))
    windowed = runtime.pool.groups[1]
    for page in list(windowed.idle):
        windowed.evict(page)
    assert said(runtime, ask(PREFIX.decode())) == (26, 0)


# ---- under an engine -----------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [8, 20, 64, 1000])
def test_sixteen_at_once_compute_their_shared_prefix_once(budget: int) -> None:
    """W5 in small: whatever the chunks, one prefix and sixteen ends are computed."""
    rank, _ = fake_runtime(max_batch_size=16, pages=400)
    runtime = LLMInferenceRuntime(rank)
    config = EngineConfig(max_batch_size=16, max_step_tokens=budget)
    engine = RequestEngine.from_factory(runtime.begin_stepped, config, manual=True)
    prompts = [[98] * 64 + [100 + number, 97] for number in range(16)]
    handles = [engine.submit(ask(prompt, 4)) for prompt in prompts]
    while engine.tick():
        rank.pool.verify()
    for handle, prompt in zip(handles, prompts, strict=True):
        assert handle.get(timeout=0).token_ids == tuple(greedy_reference(prompt, 4))
    assert rank.prefill_metrics.computed_tokens == 64 + 16 * 2
    assert sum(handle.get(timeout=0).usage.cached_tokens for handle in handles) == 15 * 64
    assert engine.leaks() == []
    engine.shutdown()


def test_nobody_behind_a_follower_waits_for_its_leader() -> None:
    """A stranger that came after two of one prefix is served from the first step on."""
    rank, _ = fake_runtime(max_batch_size=4)
    runtime = LLMInferenceRuntime(rank)
    config = EngineConfig(max_batch_size=4, max_step_tokens=24)
    engine = RequestEngine.from_factory(runtime.begin_stepped, config, manual=True)
    first, second = (engine.submit(ask([98] * 20, 3)) for _ in range(2))
    stranger = engine.submit(ask("abc", 3))
    engine.tick()
    assert len(stranger.stream.try_pop().token_ids) == 1  # type: ignore[union-attr]
    assert second.stream.try_pop() is None
    first.cancel()
    while engine.tick():
        pass
    assert second.get(timeout=0).token_ids == tuple(greedy_reference([98] * 20, 3))
    assert engine.leaks() == []
    engine.shutdown()
