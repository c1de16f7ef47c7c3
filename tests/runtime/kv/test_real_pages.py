"""Pages of real backends: read back, written elsewhere, and the tokens that follow are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from steppe.backends.select import create_backend
from steppe.errors import BackendError, CacheFileError
from steppe.runtime.artifacts import load_artifacts
from steppe.runtime.config import RuntimeConfig
from steppe.runtime.rank_runtime import LLMRankRuntime
from tests.runtime.asking import ask
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("pages") / "tiny")


def runtime_of(model: Path, name: str, page_size: int | None = None) -> LLMRankRuntime:
    backend = create_backend(name, threads=1, page_size=page_size)
    return LLMRankRuntime(
        artifacts=load_artifacts(model),
        backend=backend,
        config=RuntimeConfig(max_batch_size=4, kv_memory=2**22),
    )


@pytest.mark.parametrize("name", ["torch", "native"])
def test_a_saved_prompt_goes_on_to_the_same_tokens(
    model: Path, name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = tmp_path / "prompt.kv"
    prompt = rng.integers(0, 256, 150).tolist()
    request = ask(prompt, 12, logprobs=3)
    alone = runtime_of(model, name).handle_request(request)
    first = runtime_of(model, name)
    assert first.gen_and_save_system_prompt_kv_cache(prompt[:140])
    first.system_prompts.save(path)
    other = runtime_of(model, name)
    # Something else lies where the first runtime had it.
    other.handle_request(ask(rng.integers(0, 256, 70).tolist(), 3))
    assert other.system_prompts.load(path) == 1
    response = other.handle_request(request)
    assert response is not None
    assert alone is not None
    assert response.outputs == alone.outputs
    assert response.usage.cached_tokens == 128
    assert other.leaks() == first.leaks() == []


@pytest.mark.parametrize("name", ["torch", "native"])
def test_pages_are_read_as_they_were_written_and_checked(
    model: Path, name: str, rng: np.random.Generator
) -> None:
    runtime = runtime_of(model, name)
    backend = runtime._backend
    size = backend.page_bytes(0)
    data = rng.integers(0, 256, (3, size)).astype(np.uint8)
    backend.write_pages(0, [4, 0, 2], data)
    np.testing.assert_array_equal(backend.read_pages(0, [0, 2, 4]), data[[1, 2, 0]])
    assert not backend.read_pages(0, [1, 3]).any(), "another page was written"
    assert backend.read_pages(0, []).shape == (0, size)
    for pages in ([-1], [10**6]):
        with pytest.raises(BackendError, match="pages"):
            backend.read_pages(0, pages)
        with pytest.raises(BackendError, match="pages"):
            backend.write_pages(0, pages, data[:1])
    with pytest.raises(BackendError, match="are not 2 pages"):
        backend.write_pages(0, [1, 3], data)


def test_another_backend_layout_or_model_is_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompt.kv"
    first = runtime_of(model, "torch")
    assert first.gen_and_save_system_prompt_kv_cache([5] * 70)
    first.system_prompts.save(path)
    with pytest.raises(CacheFileError, match="another format"):
        runtime_of(model, "native").system_prompts.load(path)
    with pytest.raises(CacheFileError, match="another page_size"):
        runtime_of(model, "torch", page_size=32).system_prompts.load(path)
    other = write_tiny_model(tmp_path / "other", seed=9)
    with pytest.raises(CacheFileError, match="another model"):
        runtime_of(other, "torch").system_prompts.load(path)
