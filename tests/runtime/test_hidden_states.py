"""Hidden states of prompts. The fake backend's are (token, position), so every row is known."""

from __future__ import annotations

import numpy as np
import pytest

from steppe.errors import UnsupportedRequestError
from steppe.request import LLMGenerationRequest
from steppe.runtime.hidden_states import FINAL_LAYER, HiddenStates
from tests.runtime.asking import ask
from tests.runtime.fakes import assert_clean, fake_runtime

PROMPTS = (b"longest one", b"mid", b"x")


def expected() -> np.ndarray:
    states = np.zeros((3, len(PROMPTS[0]), 2), np.float32)
    for row, prompt in zip(states, PROMPTS, strict=True):
        row[: len(prompt), 0] = list(prompt)
        row[: len(prompt), 1] = range(len(prompt))
    return states


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
def test_states_of_every_prompt_are_padded_with_zeros(chunk: int) -> None:
    runtime, _ = fake_runtime(max_step_tokens=chunk)
    batch = LLMGenerationRequest.batch([ask(list(prompt), 3) for prompt in PROMPTS])
    assert runtime.handle_request(batch, hidden_layers=[0, FINAL_LAYER]) is not None
    for layer in (0, FINAL_LAYER):
        states = runtime.base_model_hidden_states(layer)
        assert states is not None
        assert states.dtype == np.float32
        np.testing.assert_array_equal(states, expected())
    assert runtime.base_model_hidden_states(1) is None
    assert runtime.base_model_prefill_length == len(PROMPTS[0])
    assert runtime.base_model_input_token_ids == [list(prompt) for prompt in PROMPTS]


def test_they_live_until_the_next_request_begins() -> None:
    runtime, _ = fake_runtime()
    runtime.handle_request(ask("abc"), hidden_layers=[1])
    held = runtime.base_model_hidden_states(1)
    assert held is not None
    assert runtime.handle_request(ask("wrong", 3)) is not None
    assert runtime.base_model_hidden_states(1) is None
    assert runtime.base_model_prefill_length == 0
    assert runtime.base_model_input_token_ids == [list(b"wrong")]
    # What a caller took with it is not written again.
    np.testing.assert_array_equal(held[0, :, 0], list(b"abc"))


def test_a_refused_request_does_not_clear_them() -> None:
    runtime, _ = fake_runtime()
    runtime.handle_request(ask("abc"), hidden_layers=[0])
    with pytest.raises(ValueError, match="empty"):
        runtime.handle_request(ask(""))
    assert runtime.base_model_hidden_states(0) is not None


def test_nothing_is_there_before_the_first_request() -> None:
    runtime, _ = fake_runtime()
    assert runtime.base_model_hidden_states(0) is None
    assert (runtime.base_model_prefill_length, runtime.base_model_input_token_ids) == (0, [])


def test_founders_that_must_wait_are_refused_rather_than_left_out() -> None:
    runtime, backend = fake_runtime(pages=2)
    batch = LLMGenerationRequest.batch([ask("a" * 8, 8), ask("b" * 8, 8)])
    with pytest.raises(UnsupportedRequestError, match="hidden_layers"):
        runtime.handle_request(batch, hidden_layers=[0])
    assert backend.launches == 0
    assert_clean(runtime)
    assert runtime.handle_request(batch) is not None


def test_layers_are_names_of_backend_outputs() -> None:
    names = HiddenStates().check([0, 2, FINAL_LAYER], 2)
    assert names == {0: "hidden[0]", 2: "hidden[2]", -1: "final_hidden"}
