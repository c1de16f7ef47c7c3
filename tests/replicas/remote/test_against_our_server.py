"""The remote runner against Steppe's own server: what comes over the wire is what was made."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx2
import pytest

from steppe import SamplingParams
from steppe.client import LocalClient
from steppe.errors import InvalidRequestError
from steppe.replicas.output import whole_response
from steppe.replicas.remote.config import RemoteConfig
from steppe.replicas.remote.runner import RemoteRunner
from steppe.replicas.vocabulary import ExecuteBatch
from steppe.request import LLMGenerationRequest
from steppe.server.app import create_app
from tests.replicas.helpers import collect
from tests.server.support import fake_llm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from steppe import LLM


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with fake_llm(tmp_path_factory.mktemp("models"), max_batch_size=4) as loaded:
        yield loaded


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=6, temperature=0, logprobs=2),
        SamplingParams(max_tokens=5, temperature=0.9, seed=2**64 - 3, n=3, logprobs=0),
        SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, top_k=4, min_tokens=2),
    ],
)
def test_the_same_response(llm: LLM, params: SamplingParams) -> None:
    request = LLMGenerationRequest([5, 6, 7], params=params)
    wanted = llm.engine.handle_request(request)
    assert wanted is not None

    async def main() -> None:
        client = LocalClient.of(llm)
        transport = httpx2.ASGITransport(create_app(client))
        runner = RemoteRunner(
            RemoteConfig("http://127.0.0.1:8000"), client.card, transport=transport
        )
        await runner.start()
        response = whole_response(await collect(runner, ExecuteBatch(1, request)))
        assert response.usage == wanted.usage
        assert len(response.outputs) == params.n
        for got, made in zip(response.outputs, wanted.outputs, strict=True):
            assert (got.text, got.token_ids) == (made.text, made.token_ids)
            assert got.finish_reason is made.finish_reason
            if made.logprobs is not None:
                assert got.logprobs is not None
                assert [one.token_id for one in got.logprobs] == [*made.token_ids]
                assert [one.logprob for one in got.logprobs] == [
                    one.logprob for one in made.logprobs
                ]
        with pytest.raises(InvalidRequestError) as caught:
            await runner.execute(ExecuteBatch(2, LLMGenerationRequest([5] * 100_000)))
        assert caught.value.field == "prompt"
        await runner.close()

    asyncio.run(main())
