"""The rank runtime's front: construction, refusals, the latch, failures, counters, probes."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from steppe.errors import (
    BackendError,
    ContextLengthError,
    ExecutionError,
    InvalidRequestError,
    SteppeError,
    UnsupportedRequestError,
)
from steppe.request import FinishReason, LLMGenerationRequest, SamplingParams
from steppe.runtime.config import RuntimeConfig
from steppe.runtime.metrics import MultimodalMetrics, SpecDecodeGenerationMetrics
from steppe.runtime.parallel.mapping import ParallelMapping
from steppe.runtime.rank_runtime import LLMRankRuntime
from steppe.streaming import StreamChannel
from tests.runtime.asking import ask, heard
from tests.runtime.fakes import (
    VOCAB,
    FakeBackend,
    assert_clean,
    fake_artifacts,
    fake_runtime,
    greedy_reference,
)

# ---- construction --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kind", "named"),
    [
        ({"artifacts": None}, InvalidRequestError, "engine_dir"),
        ({"engine_dir": "somewhere"}, InvalidRequestError, "engine_dir"),
        ({"multimodal_engine_dir": "eyes"}, UnsupportedRequestError, "multimodal_engine_dir"),
        ({"lora_weights_map": {"a": "b"}}, UnsupportedRequestError, "lora_weights_map"),
        ({"mapping": ParallelMapping(2, 0)}, BackendError, "world of 2"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    fields: dict[str, Any], kind: type[Exception], named: str
) -> None:
    backend = FakeBackend()
    with pytest.raises(kind, match=named):
        LLMRankRuntime(**({"backend": backend, "artifacts": fake_artifacts()} | fields))
    assert backend.groups == (), "it was traced"


def test_the_pool_covers_the_seats_and_no_more() -> None:
    runtime = LLMRankRuntime(
        artifacts=fake_artifacts(),
        backend=FakeBackend(page_size=8),
        config=RuntimeConfig(max_batch_size=3, max_model_len=50),
    )
    assert (runtime.pool.num_groups, runtime.pool.capacity) == (2, 3 * 7)
    assert (runtime.preparation.context_length, runtime.max_batch_size) == (50, 3)


@pytest.mark.parametrize(
    ("limit", "pages", "context"),
    [(None, 1000, 200), (50, 1000, 50), (500, 1000, 200), (None, 10, 80)],
)
def test_the_context_is_the_least_of_model_setting_and_pool(
    limit: int | None, pages: int, context: int
) -> None:
    runtime = LLMRankRuntime(
        artifacts=fake_artifacts(),
        backend=FakeBackend(page_size=8),
        config=RuntimeConfig(max_model_len=limit, kv_memory=pages * 8 * 8 * 2),
    )
    assert runtime.preparation.context_length == context


def test_loading_is_told_stage_by_stage() -> None:
    stages: list[str] = []
    LLMRankRuntime(artifacts=fake_artifacts(), backend=FakeBackend(), on_progress=stages.append)
    assert stages == ["weights"]


def test_dropping_the_runtime_drops_the_backend() -> None:
    runtime, backend = fake_runtime()
    runtime.handle_request(ask())
    gone = weakref.ref(backend)
    del runtime, backend
    gc.collect()
    assert gone() is None


# ---- one request at a time -----------------------------------------------------------------------


def test_an_overlapping_request_is_refused_and_changes_nothing() -> None:
    runtime, backend = fake_runtime()
    generation = runtime.begin_generation(ask("open", 4), hidden_layers=[0])
    assert generation is not None
    channel = StreamChannel()
    intruder = ask("intruder", 4, channel=channel)
    before = (
        backend.launches,
        runtime.pool.used_pages,
        generation.session.resident_count,
        runtime.base_model_prefill_length,
    )
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(runtime.handle_request(intruder)))
    thread.start()
    thread.join(10)
    assert results == [None]
    assert runtime.begin_generation(intruder) is None
    assert runtime.generating
    assert not channel.attached
    assert channel.try_pop() is None
    assert before == (
        backend.launches,
        runtime.pool.used_pages,
        generation.session.resident_count,
        runtime.base_model_prefill_length,
    )
    assert runtime.base_model_hidden_states(0) is not None

    with generation:
        session = generation.session
        session.prime_from_prefill()
        while not session.finished:
            session.advance()
        response = runtime.finish_generation(generation)
    assert response is not None
    assert response.token_ids == tuple(greedy_reference(b"open", 4))
    assert_clean(runtime)
    after = runtime.handle_request(intruder)
    assert after is not None
    assert after.token_ids == tuple(greedy_reference(b"intruder", 4))


def test_a_hook_cannot_start_another_request() -> None:
    runtime, _ = fake_runtime()
    inner: list[object] = []
    response = runtime.handle_request(
        ask("outer", 3), boundary_hook=lambda _: inner.append(runtime.handle_request(ask("x")))
    )
    assert response is not None
    assert set(inner) == {None}
    assert response.token_ids == tuple(greedy_reference(b"outer", 3))


def test_handle_request_is_begin_loop_finish() -> None:
    request = ask("the same", 5, logprobs=2, temperature=1.0, seed=5)
    runtime, _ = fake_runtime()
    whole = runtime.handle_request(request)
    generation = runtime.begin_generation(request)
    assert generation is not None
    session = generation.session
    session.prime_from_prefill()
    while not session.finished:
        session.advance()
    assert runtime.finish_generation(generation) == whole
    assert_clean(runtime)


def test_finishing_early_is_an_error() -> None:
    runtime, _ = fake_runtime()
    generation = runtime.begin_generation(ask())
    assert generation is not None
    with generation, pytest.raises(ExecutionError, match="still running"):
        runtime.finish_generation(generation)
    assert_clean(runtime)


def test_there_is_no_response_without_the_founder() -> None:
    runtime, _ = fake_runtime()
    generation = runtime.begin_generation(ask(), founder_request_id=1, prefill=False)
    assert generation is not None
    (founder,) = generation.session.residents
    generation.session.preempt(founder)
    assert runtime.finish_generation(generation) is None
    assert_clean(runtime)


# ---- refusals ------------------------------------------------------------------------------------


def used_channel() -> StreamChannel:
    channel = StreamChannel()
    channel.attach()
    return channel


SHARED = StreamChannel()

BAD_REQUESTS: list[tuple[str, LLMGenerationRequest, str]] = [
    ("a batch that is too big", LLMGenerationRequest.batch([ask()] * 9), "requests"),
    ("more sequences than seats", ask(n=9), "requests"),
    ("an id outside the vocabulary", ask([1, VOCAB]), "prompt"),
    ("an empty prompt", ask(""), "prompt"),
    ("a bias outside the vocabulary", ask(logit_bias={VOCAB: 1.0}), f"logit_bias[{VOCAB}]"),
    ("a stop outside the vocabulary", ask(stop_token_ids=[VOCAB]), "stop_token_ids"),
    ("a channel used before", ask(channel=used_channel()), "stream_channel"),
    (
        "one channel for two requests",
        LLMGenerationRequest.batch([ask(channel=SHARED), ask(channel=SHARED)]),
        "stream_channel",
    ),
    (
        "a channel for a whole batch",
        LLMGenerationRequest.batch([ask()]).with_channel(StreamChannel()),
        "stream_channel",
    ),
]


@pytest.mark.parametrize(
    ("request_", "field"), [case[1:] for case in BAD_REQUESTS], ids=[c[0] for c in BAD_REQUESTS]
)
def test_bad_requests_name_their_field_and_leave_the_runtime_free(
    request_: LLMGenerationRequest, field: str
) -> None:
    runtime, backend = fake_runtime()
    with pytest.raises(InvalidRequestError) as caught:
        runtime.handle_request(request_)
    assert caught.value.field == field
    assert backend.launches == 0
    assert_clean(runtime)
    assert not SHARED.attached
    assert runtime.handle_request(ask()) is not None


def test_an_embedding_and_hidden_states_are_not_asked_for_together() -> None:
    runtime, _ = fake_runtime()
    with pytest.raises(UnsupportedRequestError, match="hidden_layers"):
        runtime.handle_request(LLMGenerationRequest("x", task="embed"), hidden_layers=[0])
    assert_clean(runtime)


@pytest.mark.parametrize("layer", [-2, 3])
def test_a_layer_the_model_does_not_have_is_refused(layer: int) -> None:
    runtime, _ = fake_runtime()
    with pytest.raises(InvalidRequestError, match=f"no layer {layer}, the model has 2"):
        runtime.handle_request(ask(), hidden_layers=[layer])
    assert_clean(runtime)


def test_a_context_error_carries_both_numbers() -> None:
    runtime, _ = fake_runtime()
    with pytest.raises(ContextLengthError) as caught:
        runtime.handle_request(ask([1] * 150, 51))
    assert (caught.value.needed, caught.value.available) == (201, 200)
    assert_clean(runtime)


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("launch", range(1, 7))
def test_a_failing_step_ends_the_channels_and_returns_the_pages(launch: int) -> None:
    # Chunks, decodes and two sequences: the failing launch is any of these.
    runtime, _ = fake_runtime(fail_at=launch, max_step_tokens=4)
    channels = [StreamChannel(), StreamChannel()]
    batch = LLMGenerationRequest.batch(
        [ask("short", 9, channel=channels[0]), ask("longer one", 9, channel=channels[1])]
    )
    with pytest.raises(ExecutionError, match="the fake backend fails here"):
        runtime.handle_request(batch)
    assert_clean(runtime)
    for channel, prompt in zip(channels, (b"short", b"longer one"), strict=True):
        assert channel.finish_reason is FinishReason.ERROR
        (said,) = heard(channel).values()
        assert said.finish_reason is FinishReason.ERROR
        assert list(said.token_ids) == greedy_reference(prompt, 9)[: len(said.token_ids)]
    again = runtime.handle_request(ask("again", 3))
    assert again is not None
    assert again.token_ids == tuple(greedy_reference(b"again", 3))


def test_errors_are_of_the_house() -> None:
    runtime, _ = fake_runtime(fail_at=1)
    for request in (ask(""), ask()):
        with pytest.raises(SteppeError):
            runtime.handle_request(request)


# ---- counters and probes -------------------------------------------------------------------------


def test_counters_count_tokens_prompts_and_steps() -> None:
    runtime, _ = fake_runtime()
    runtime.handle_request(LLMGenerationRequest.batch([ask("abc", 4), ask("de", 2)]))
    prefill, generation = runtime.prefill_metrics, runtime.generation_metrics
    assert (prefill.computed_tokens, prefill.total_runs) == (5, 2)
    assert (prefill.reused_tokens, prefill.pruned_tokens) == (0, 0)
    assert (generation.generated_tokens, generation.total_steps) == (6, 4)
    runtime.handle_request(ask("score", 0, prompt_logprobs=0))
    assert (prefill.computed_tokens, prefill.total_runs) == (10, 3)
    assert (generation.generated_tokens, generation.total_steps) == (6, 4)


def test_a_prompt_in_chunks_is_one_run() -> None:
    runtime, _ = fake_runtime(max_step_tokens=2)
    runtime.handle_request(ask("in chunks", 3))
    assert runtime.prefill_metrics.computed_tokens == len("in chunks")
    assert runtime.prefill_metrics.total_runs == 1
    assert runtime.generation_metrics.generated_tokens == 3


def test_what_does_not_exist_says_so() -> None:
    runtime, _ = fake_runtime(cache=False)
    assert runtime.context_cache_metrics is None
    assert runtime.multimodal_metrics == MultimodalMetrics()
    assert runtime.spec_decode_generation_metrics == SpecDecodeGenerationMetrics()
    assert runtime.speculative_decoding_strategy_name == ""
    assert not runtime.has_draft_model
    with pytest.raises(UnsupportedRequestError, match="no context cache"):
        runtime.gen_and_save_system_prompt_kv_cache("be brief")
    with pytest.raises(UnsupportedRequestError, match="no vision runner"):
        runtime.set_visual_pruner_config({})


def test_a_noise_seed_without_an_action_runner_has_no_effect() -> None:
    runtime, _ = fake_runtime()
    before = runtime.handle_request(ask(temperature=1.0, seed=1))
    runtime.set_action_noise_seed(7)
    assert runtime.handle_request(ask(temperature=1.0, seed=1)) == before


def test_probes_answer_for_the_deployment() -> None:
    runtime, backend = fake_runtime(max_batch_size=5)
    assert runtime.max_batch_size == 5
    assert runtime.supports_seated_admission
    np.testing.assert_array_equal(runtime.embedding_table, backend.embedding_table())


@pytest.mark.parametrize("works", [True, False])
def test_inference_goes_on_whether_or_not_a_capture_worked(
    monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    runtime, backend = fake_runtime()
    monkeypatch.setattr(backend, "capture", lambda: works)
    assert runtime.capture_decoding_graph() is works
    response = runtime.handle_request(ask("go on", 3))
    assert response is not None
    assert response.token_ids == tuple(greedy_reference(b"go on", 3))


def test_an_unseeded_request_draws_anew_every_time() -> None:
    runtime, _ = fake_runtime()
    params = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)
    answers = {
        response.token_ids
        for _ in range(3)
        if (response := runtime.handle_request(LLMGenerationRequest("luck", params=params)))
    }
    assert len(answers) == 3
