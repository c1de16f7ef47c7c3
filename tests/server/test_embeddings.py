"""Embeddings, driven by the openai package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.server.routes.embeddings import _waves
from tests.server.support import settle, staged

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from tests.server.conftest import Live


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_texts_and_ids_alone_and_in_lists(client: openai.OpenAI, live: Live) -> None:
    texts = ["one", "another text", "été"]
    ids = [live.llm.tokenizer.encode(text) for text in texts]
    expected = live.llm.embed(texts)
    for inputs in (texts, ids):
        answer = client.embeddings.create(model="tiny", input=inputs, encoding_format="float")
        assert [one.index for one in answer.data] == [0, 1, 2]
        assert [tuple(one.embedding) for one in answer.data] == [
            pytest.approx(vector) for vector in expected
        ]
        count = sum(map(len, ids))
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    for single in (texts[1], ids[1]):
        (one,) = client.embeddings.create(model="tiny", input=single).data
        assert tuple(one.embedding) == pytest.approx(expected[1])
        assert sum(x * x for x in one.embedding) == pytest.approx(1)


def test_base64_is_what_the_package_asks_for_by_itself(
    client: openai.OpenAI, live: Live, rng: np.random.Generator
) -> None:
    text = "".join(map(chr, rng.integers(97, 123, 20)))
    raw: Any = client.post(
        "/embeddings", body={"input": text, "encoding_format": "base64"}, cast_to=object
    )
    assert isinstance(raw["data"][0]["embedding"], str)
    (one,) = client.embeddings.create(model="tiny", input=text).data
    assert tuple(one.embedding) == pytest.approx(live.llm.embed(text))
    size = len(one.embedding)
    answer = client.embeddings.create(model="tiny", input=text, dimensions=size)
    assert len(answer.data[0].embedding) == size


def test_a_list_longer_than_may_ever_be_pending(client: openai.OpenAI, live: Live) -> None:
    texts = [f"text {i}" for i in range(2 * live.llm.engine.max_pending + 3)]
    answer = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    expected = live.llm.embed(texts[-1])
    assert [one.index for one in answer.data] == list(range(len(texts)))
    assert tuple(answer.data[-1].embedding) == pytest.approx(expected)
    assert answer.usage.prompt_tokens == sum(len(live.llm.tokenizer.encode(t)) for t in texts)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": []}, "input", "invalid_value"),
        ({"input": [[]]}, "input", "invalid_value"),
        ({"input": [1.5]}, "input[0]", "invalid_type"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"input": [[10**6]]}, "input", "invalid_value"),
        ({"input": ["a", "a" * 5000]}, "input", "context_length_exceeded"),
        ({"input": "a", "dimensions": 1}, "dimensions", "unsupported_value"),
        ({"input": "a", "dimensions": 0}, "dimensions", "invalid_value"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"input": "a", "temperature": 1}, "temperature", "unknown_parameter"),
        ({}, "input", "missing_required_parameter"),
    ],
)
def test_what_is_wrong_is_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/embeddings", body=fields, cast_to=object)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.anyio
async def test_a_client_that_leaves_ends_them() -> None:
    async with staged(max_batch_size=1) as stage:
        call = stage.call("/v1/embeddings", {"input": ["a", "b"]})
        await settle()
        assert stage.engine.pending == 2
        call.disconnect()
        await stage.step(2)
        assert call.done
        assert stage.engine.pending == 0


@given(
    lengths=st.lists(st.integers(1, 30), max_size=30),
    count=st.integers(1, 8),
    tokens=st.none() | st.integers(1, 60),
)
def test_waves_keep_to_what_may_wait(lengths: list[int], count: int, tokens: int | None) -> None:
    ids = [[number] * length for number, length in enumerate(lengths)]
    waves = list(_waves(ids, count, tokens))
    assert [one for wave in waves for one in wave] == ids
    for wave in waves:
        assert 1 <= len(wave) <= count
        assert tokens is None or len(wave) == 1 or sum(map(len, wave)) <= tokens // 2
    sizes = [sum(map(len, wave)) for wave in waves]
    for wave, size, after in zip(waves, sizes, waves[1:], strict=False):
        full = tokens is not None and size + len(after[0]) > tokens // 2
        assert len(wave) == count or full, "no wave is shorter than it must be"
