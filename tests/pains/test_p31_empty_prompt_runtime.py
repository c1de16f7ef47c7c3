"""P31: an empty prompt killed the server. Runtime part: BOS or a refusal, never no tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from steppe.errors import InvalidRequestError
from steppe.request import LLMGenerationRequest
from steppe.runtime.rank_runtime import LLMRankRuntime
from steppe.runtime.stepped.request import SteppedRequest
from tests.runtime.asking import ask
from tests.runtime.fakes import FakeBackend, assert_clean, fake_artifacts
from tests.text.conftest import byte_level_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable


def runtime_with(adds_bos: bool) -> tuple[LLMRankRuntime, FakeBackend]:
    tokenizer = byte_level_tokenizer(adds_bos=adds_bos)
    artifacts = replace(fake_artifacts(vocab_size=tokenizer.vocab_size), tokenizer=tokenizer)
    backend = FakeBackend()
    return LLMRankRuntime(artifacts=artifacts, backend=backend), backend


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("text", ["", " ", "\n\t"])
def test_nothing_is_bos_or_refused_and_a_blank_is_a_prompt(adds_bos: bool, text: str) -> None:
    runtime, backend = runtime_with(adds_bos)
    if text or adds_bos:
        assert runtime.handle_request(ask(text, 2)) is not None
        assert min(min(step) for step in backend.steps) >= 1
    else:
        with pytest.raises(InvalidRequestError, match="prompt: is empty"):
            runtime.handle_request(ask(text, 2))
        assert backend.launches == 0
    assert_clean(runtime)


def test_no_ids_are_refused_when_the_request_is_made() -> None:
    for nothing in ([], ()):
        with pytest.raises(InvalidRequestError, match="prompt: is empty"):
            LLMGenerationRequest(nothing)


@pytest.mark.parametrize(
    "use",
    [
        lambda runtime, request: runtime.preparation.validate(request),
        lambda runtime, request: SteppedRequest.begin(runtime, request, 1),
        lambda runtime, request: runtime.handle_request(
            LLMGenerationRequest.batch([ask("fine"), request])
        ),
    ],
    ids=["validate", "begin", "batch"],
)
def test_every_way_in_refuses_it(
    use: Callable[[LLMRankRuntime, LLMGenerationRequest], object],
) -> None:
    runtime, backend = runtime_with(adds_bos=False)
    with pytest.raises(InvalidRequestError, match="is empty"):
        use(runtime, ask(""))
    assert backend.launches == 0
    assert_clean(runtime)
