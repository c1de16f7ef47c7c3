"""System prompts: pinned, never evicted, saved and loaded by another runtime, or refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from steppe.errors import CacheFileError, ContextLengthError, UnsupportedRequestError
from steppe.request import LLMGenerationRequest
from tests.runtime.asking import ask
from tests.runtime.fakes import fake_runtime, greedy_reference

if TYPE_CHECKING:
    from pathlib import Path

    from steppe.runtime.rank_runtime import LLMRankRuntime

SYSTEM = "be brief, be kind, be right"  # 27 tokens: three pages of eight and three more


def computed_for(runtime: LLMRankRuntime, prompt: str) -> int:
    """How many tokens of a prompt had to be computed; the answer is checked."""
    before = runtime.prefill_metrics.computed_tokens
    response = runtime.handle_request(ask(prompt, 4))
    assert response is not None
    assert response.token_ids == tuple(greedy_reference(list(prompt.encode()), 4))
    assert runtime.leaks() == []
    return runtime.prefill_metrics.computed_tokens - before


def test_a_pinned_prompt_is_found_however_much_comes_between() -> None:
    runtime, _ = fake_runtime(pages=12)
    assert runtime.gen_and_save_system_prompt_kv_cache(SYSTEM)
    assert runtime.leaks() == []
    for letter in "abcdefgh":
        computed_for(runtime, letter * 30)
    assert runtime.pool.evicted > 0
    assert computed_for(runtime, SYSTEM + " now") == 7
    metrics = runtime.context_cache_metrics
    assert metrics is not None
    # Three pages where everything is seen, and the one that a window of eight reaches into.
    assert metrics.pinned_pages == metrics.leased_pages == 4
    # Once is enough.
    launches = runtime.prefill_metrics.computed_tokens
    assert runtime.gen_and_save_system_prompt_kv_cache(SYSTEM)
    assert runtime.prefill_metrics.computed_tokens == launches


def test_what_cannot_be_kept_says_so() -> None:
    runtime, backend = fake_runtime(pages=12)
    assert runtime.gen_and_save_system_prompt_kv_cache("")
    assert not runtime.gen_and_save_system_prompt_kv_cache("short")
    with pytest.raises(UnsupportedRequestError, match="adapters"):
        runtime.gen_and_save_system_prompt_kv_cache(SYSTEM, "mine")
    with pytest.raises(
        UnsupportedRequestError, match=r"7 pages beside 0 pinned ones are 7.*hold 6"
    ):
        runtime.gen_and_save_system_prompt_kv_cache("x" * 56)
    assert backend.launches == 0
    generation = runtime.begin_generation(ask("open"), prefill=False)
    assert generation is not None
    assert not runtime.gen_and_save_system_prompt_kv_cache(SYSTEM)
    generation.close()
    assert runtime.system_prompts.pages == 0


def test_pinned_pages_are_no_longer_for_requests() -> None:
    runtime, _ = fake_runtime(pages=12)
    context = runtime.preparation.context_length
    assert context == 96
    assert runtime.gen_and_save_system_prompt_kv_cache(SYSTEM)
    assert runtime.preparation.context_length == 96 - 24
    with pytest.raises(ContextLengthError, match="72"):
        runtime.handle_request(LLMGenerationRequest("x" * 80))
    # The longest that is still accepted gets through.
    assert computed_for(runtime, "x" * 68) == 68


def test_another_process_loads_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "prompts.kv"
    runtime, _ = fake_runtime(pages=12)
    assert runtime.gen_and_save_system_prompt_kv_cache(SYSTEM)
    runtime.system_prompts.save(path)
    other, backend = fake_runtime(pages=15)
    computed_for(other, "z" * 20)
    launches = backend.launches
    assert other.system_prompts.load(path) == 1
    assert backend.launches == launches
    assert computed_for(other, SYSTEM + " now") == 7
    assert other.system_prompts.load(path) == 0
    assert other.leaks() == []
    assert [one.name for one in tmp_path.iterdir()] == ["prompts.kv"]


def test_prompts_that_are_known_already_are_only_pinned(tmp_path: Path) -> None:
    path = tmp_path / "prompts.kv"
    runtime, _ = fake_runtime()
    assert runtime.gen_and_save_system_prompt_kv_cache(SYSTEM)
    runtime.system_prompts.save(path)
    other, _ = fake_runtime()
    computed_for(other, SYSTEM)
    cached = other.pool.cached_pages
    assert other.system_prompts.load(path) == 1
    assert other.pool.cached_pages == cached
    assert other.leaks() == []


@pytest.mark.parametrize("pages", [6, 7])
def test_a_file_without_room_for_it_changes_nothing(tmp_path: Path, pages: int) -> None:
    path = tmp_path / "prompts.kv"
    runtime, _ = fake_runtime(pages=12)
    assert runtime.gen_and_save_system_prompt_kv_cache("y" * 36)
    runtime.system_prompts.save(path)
    other, _ = fake_runtime(pages=pages)
    with pytest.raises(UnsupportedRequestError, match="4 pages beside 0 pinned"):
        other.system_prompts.load(path)
    assert other.pool.used_pages == other.pool.cached_pages == 0


def saved(path: Path) -> tuple[dict[str, object], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[8:16], "little")
    return json.loads(raw[16 : 16 + length]), raw[16 + length :]


def rewritten(path: Path, header: object, payload: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(b"STEPPEKV" + len(text).to_bytes(8, "little") + text + payload)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda header, payload: (header, payload[:-1]), "damaged"),
        (lambda header, payload: (header, payload[:-1] + bytes([payload[-1] ^ 1])), "damaged"),
        (lambda header, payload: (header | {"schema": 2}, payload), "schema 2"),
        (
            lambda header, payload: (
                header | {"layout": header["layout"] | {"model": "other"}},
                payload,
            ),
            "another model: other",
        ),
        (
            lambda header, payload: (
                header | {"layout": header["layout"] | {"format": "torch"}},
                payload,
            ),
            "another format: torch",
        ),
        (lambda header, payload: (header | {"prefixes": 3}, payload), "broken header"),
        (
            lambda header, payload: (
                header | {"prefixes": [{"tokens": [1] * 24, "pages": [[9, 64], [1, 64]]}]},
                payload,
            ),
            "broken header",
        ),
        (
            lambda header, payload: (
                header | {"prefixes": [{"tokens": [1] * 16, "pages": [[3, 64], [1, 64]]}]},
                payload,
            ),
            "lacks pages",
        ),
        (
            lambda header, payload: (
                header | {"prefixes": [{"tokens": [1] * 23, "pages": [[3, 64], [1, 64]]}]},
                payload,
            ),
            "whole pages",
        ),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "prompts.kv"
    runtime, _ = fake_runtime()
    assert runtime.gen_and_save_system_prompt_kv_cache(SYSTEM)
    runtime.system_prompts.save(path)
    rewritten(path, *damage(*saved(path)))
    other, _ = fake_runtime()
    with pytest.raises(CacheFileError, match=message):
        other.system_prompts.load(path)
    assert other.pool.used_pages == other.pool.cached_pages == 0


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    runtime, _ = fake_runtime()
    path = tmp_path / "other"
    path.write_bytes(b"GGUF" * 9)
    with pytest.raises(CacheFileError, match="no computed prefixes"):
        runtime.system_prompts.load(path)
    with pytest.raises(FileNotFoundError):
        runtime.system_prompts.load(tmp_path / "missing")
