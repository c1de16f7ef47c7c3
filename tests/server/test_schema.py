"""The OpenAPI document, run for bad input by schemathesis: whatever is sent, no 500."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from steppe.client import LocalClient
from steppe.server.app import create_app
from steppe.server.settings import ServerSettings
from tests.server.support import fake_llm

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The document of a server with a short context, so that nothing takes long."""
    folder = tmp_path_factory.mktemp("models")
    with fake_llm(folder, max_batch_size=4, max_model_len=48) as llm:
        names = ServerSettings(allowed_hosts=("testserver", "localhost"))
        app = create_app(LocalClient.of(llm), names)
        yield schemathesis.openapi.from_asgi("/openapi.json", app)
        assert llm.engine.pending == 0


def probe(document: Any, examples: int) -> Counter[int]:
    """Send that many inputs of each kind to every operation; how often each status came."""
    statuses: Counter[int] = Counter()
    operations = [result.ok() for result in document.get_all_operations()]
    assert len(operations) >= 24
    for operation in operations:
        for mode in GenerationMode:
            with suppress(Unsatisfiable):  # some operations take nothing that could be wrong
                probe_one(operation, mode, examples, statuses)
    return statuses


def probe_one(operation: Any, mode: GenerationMode, examples: int, statuses: Counter[int]) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            # A made-up model is where every request would end.
            case.body.pop("model", None)
        response = case.call()
        statuses[response.status_code] += 1
        case.validate_response(response, checks=(not_a_server_error,))

    run()


def test_a_few_inputs(document: Any) -> None:
    assert probe(document, 5)[400]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_inputs(document: Any) -> None:
    statuses = probe(document, 100)
    assert statuses[200] > 50
    assert statuses[400] > 200
