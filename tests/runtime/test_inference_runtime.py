"""The runtime's public face."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from steppe.errors import InvalidRequestError
from steppe.request import LLMGenerationRequest
from steppe.runtime.inference_runtime import LLMInferenceRuntime
from steppe.runtime.stepped.request import SteppedRequest
from tests.runtime.asking import ask
from tests.runtime.fakes import EOS, IM_END, assert_clean, fake_runtime


def test_it_passes_on_what_its_rank_does() -> None:
    rank, backend = fake_runtime(max_batch_size=3)
    runtime = LLMInferenceRuntime(rank)
    hooked: list[int] = []
    request = ask("same", 3)
    response = runtime.handle_request(
        request, boundary_hook=lambda one: hooked.append(one.resident_count), hidden_layers=[0]
    )
    assert response == fake_runtime()[0].handle_request(request)
    assert hooked == [1, 1, 0]
    assert rank.base_model_hidden_states(0) is not None
    assert runtime.prefill_metrics is rank.prefill_metrics
    assert runtime.generation_metrics is rank.generation_metrics
    assert runtime.spec_decode_generation_metrics is rank.spec_decode_generation_metrics
    assert runtime.context_cache_metrics == rank.context_cache_metrics
    assert runtime.multimodal_metrics == rank.multimodal_metrics
    assert backend.launches == 3


def test_probes_and_the_model() -> None:
    rank, _ = fake_runtime(max_batch_size=3)
    runtime = LLMInferenceRuntime(rank)
    assert runtime.supports_boundary_scheduling
    assert runtime.supports_stepped_execution
    assert runtime.supports_seated_admission
    assert runtime.capture_decoding_graph()
    assert (runtime.max_batch_size, runtime.world_size, runtime.context_length) == (3, 1, 200)
    assert runtime.owns_global_rank
    assert runtime.model_name == "fake"
    assert runtime.tokenizer is rank.artifacts.tokenizer
    assert runtime.chat_template is rank.artifacts.chat_template
    assert runtime.stop_token_ids == {EOS, IM_END}
    assert runtime.generation_defaults == {}


def test_overcommit_changes_what_a_seat_reserves() -> None:
    rank, _ = fake_runtime()
    runtime = LLMInferenceRuntime(rank)
    seed = rank.preparation.seed(ask("ab", 20), 0, 1)
    assert not runtime.overcommit
    assert rank.reservation(seed) == 22
    runtime.set_overcommit(True)
    assert runtime.overcommit
    assert rank.reservation(seed) == 3


def test_prompts_are_counted_once_however_many_sequences() -> None:
    runtime = LLMInferenceRuntime(fake_runtime()[0])
    assert runtime.count_prompt_tokens(ask("four", n=3)) == 4
    batch = LLMGenerationRequest.batch([ask("four", n=2), ask("ab")])
    assert runtime.count_prompt_tokens(batch) == 6
    assert runtime.count_prompt_tokens(runtime.validate(batch)) == 6


def test_begin_stepped_opens_one_execution_at_a_time() -> None:
    rank, _ = fake_runtime()
    runtime = LLMInferenceRuntime(rank)
    execution = runtime.begin_stepped(ask(), 1)
    assert isinstance(execution, SteppedRequest)
    assert runtime.begin_stepped(ask(), 2) is None
    execution.abort()
    assert_clean(rank)
    with pytest.raises(InvalidRequestError, match="request_id"):
        runtime.begin_stepped(ask(), 0)


def test_requests_are_validated_on_many_threads_while_one_runs() -> None:
    runtime = LLMInferenceRuntime(fake_runtime()[0])
    requests = [ask(f"number {index}") for index in range(50)]
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(runtime.handle_request, ask("running", 20))
        checked = list(pool.map(runtime.validate, requests))
        assert running.result(30) is not None
    assert [one.prompt for one in checked] == [
        tuple(f"number {index}".encode()) for index in range(50)
    ]
