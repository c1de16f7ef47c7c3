"""A reference becomes files: paths, packaged names, hub ids; and every way it can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from steppe.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from steppe.formats import packaged
from steppe.formats.resolve import resolve
from tests.formats import hubs
from tests.formats.build import raw_gguf
from tests.formats.hubs import DiskHub, http_error


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskHub:
    hub = DiskHub(tmp_path / "remote", tmp_path / "local")
    hub.install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return hub


# --- paths


def test_a_gguf_path(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_gguf())
    for reference in (path, str(path)):
        found = resolve(reference)
        assert (found.kind, found.path, found.name) == ("gguf", path, "")


def test_a_relative_path_and_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "m.gguf").write_bytes(raw_gguf())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("org/m.gguf").path == Path("org/m.gguf")
    assert resolve("./org/m.gguf").path == Path("org/m.gguf")
    assert resolve("~/org/m.gguf").path == tmp_path / "org" / "m.gguf"


def test_a_directory_with_a_config_is_a_hugging_face_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(tmp_path).kind == "hf"
    (tmp_path / "m.gguf").write_bytes(raw_gguf())
    assert resolve(tmp_path).kind == "gguf"  # GGUF repositories hold a configuration too
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve(tmp_path).kind == "hf"


def test_a_directory_with_one_split_model(tmp_path: Path) -> None:
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    found = resolve(tmp_path)
    assert (found.kind, found.path) == ("gguf", tmp_path / "m-00001-of-00002.gguf")


def test_a_directory_with_two_models_lists_them(tmp_path: Path) -> None:
    for name in ("a.Q4_0.gguf", "a.Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"name one: a\.Q4_0, a\.Q8_0"):
        resolve(tmp_path)


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"neither config\.json nor a GGUF"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["missing.gguf", "./missing", "../missing/x", "a/b.gguf", "~/no"])
def test_a_missing_path(name: str, hub: DiskHub) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file or directory"):
        resolve(name)
    with pytest.raises(ModelNotFoundError, match="no such file or directory"):
        resolve(Path(name))


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"a model is a \.gguf file or a directory"):
        resolve(str(path))


def test_a_directory_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*Permission denied"):
        resolve(tmp_path)


def test_a_home_that_nobody_has() -> None:
    with pytest.raises(ModelNotFoundError, match="~no-such-user/m"):
        resolve("~no-such-user/m")


# --- names


@pytest.mark.parametrize(
    "reference", ["nothing", "a/b/c", "org/", "/", "a b/c", "org/repo:", "x:y", "a\0b"]
)
def test_what_is_no_reference_says_what_there_is(reference: str, hub: DiskHub) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(reference)
    if reference != "/":
        assert "gemma3-270m, smollm2-135m" in str(caught.value)
    assert hub.requested == []


@pytest.mark.parametrize("reference", ["", "  "])
def test_an_empty_reference(reference: str) -> None:
    with pytest.raises(ModelNotFoundError, match="empty"):
        resolve(reference)


def test_an_installed_packaged_name(smollm2_gguf: Path, tmp_path: Path) -> None:
    found = resolve("smollm2-135m", cache_dir=tmp_path)
    assert found.kind == "gguf"
    assert found.name == "smollm2-135m"
    assert found.path.samefile(smollm2_gguf)


def test_an_absent_packaged_name_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged, "_installed_file", lambda part: None)
    with pytest.raises(ModelNotFoundError, match="steppe pull smollm2-135m"):
        resolve("smollm2-135m", cache_dir=tmp_path)


# --- hub: Hugging Face repositories


def add_hf(hub: DiskHub, config: dict[str, Any] | None = None) -> None:
    hub.add("org/repo", "config.json", content=json.dumps(config or {}).encode())
    hub.add("org/repo", "tokenizer.json", "chat_template.jinja", "README.md", content=b"{}")
    hub.add("org/repo", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    hub.add("org/repo", "model.safetensors.index.json", content=b"{}")
    hub.add("org/repo", "consolidated.safetensors", "pytorch_model.bin", "onnx/model.onnx")
    hub.add("org/repo", "original/config.json", "original/model.safetensors")


def test_a_hugging_face_repository(hub: DiskHub) -> None:
    add_hf(hub)
    found = resolve("org/repo")
    assert (found.kind, found.path, found.name) == ("hf", hub.local / "org/repo", "org/repo")
    assert set(hub.requested) == {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }


def test_packed_weights_are_refused_before_they_are_fetched(hub: DiskHub) -> None:
    add_hf(hub, {"quantization_config": {"quant_method": "awq"}})
    with pytest.raises(UnsupportedModelError, match="AWQ"):
        resolve("org/repo")
    assert not any(name.endswith(".safetensors") for name in hub.requested)


def test_a_repository_of_pickles(hub: DiskHub) -> None:
    hub.add("org/repo", "config.json", "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="pickles"):
        resolve("org/repo")
    assert hub.requested == []


def test_a_repository_without_weights(hub: DiskHub) -> None:
    hub.add("org/repo", "README.md")
    with pytest.raises(ModelNotFoundError, match="neither safetensors nor GGUF"):
        resolve("org/repo")


def test_a_directory_of_that_name_comes_first(hub: DiskHub, tmp_path: Path) -> None:
    add_hf(hub)
    (tmp_path / "org" / "repo").mkdir(parents=True)
    (tmp_path / "org" / "repo" / "config.json").write_text("{}")
    assert resolve("org/repo").path == Path("org/repo")
    assert hub.requested == []


# --- hub: GGUF repositories

GGUF_FILES = (
    "Model-Q4_K_M.gguf",
    "Model-Q4_K_S.gguf",
    "Model.Q8_0.gguf",
    "Model-UD-Q2_K_XL.gguf",
    "model_q6_k.gguf",
    "Model[v2]-Q5_0.gguf",
    "BF16/Model-BF16-00001-of-00002.gguf",
    "BF16/Model-BF16-00002-of-00002.gguf",
    "mmproj-Model-f16.gguf",
    "README.md",
)


@pytest.mark.parametrize(
    ("tag", "files"),
    [
        ("Q4_K_M", ["Model-Q4_K_M.gguf"]),
        ("q4_k_m", ["Model-Q4_K_M.gguf"]),
        ("Q8_0", ["Model.Q8_0.gguf"]),
        ("UD-Q2_K_XL", ["Model-UD-Q2_K_XL.gguf"]),
        ("Q6_K", ["model_q6_k.gguf"]),
        ("Q5_0", ["Model[v2]-Q5_0.gguf"]),
        ("Model-Q4_K_S", ["Model-Q4_K_S.gguf"]),
        ("Model-Q4_K_S.gguf", ["Model-Q4_K_S.gguf"]),
        (
            "BF16",
            ["BF16/Model-BF16-00001-of-00002.gguf", "BF16/Model-BF16-00002-of-00002.gguf"],
        ),
    ],
)
def test_a_tag_picks_one_model_with_all_its_parts(hub: DiskHub, tag: str, files: list[str]) -> None:
    hub.add("org/repo", *GGUF_FILES)
    found = resolve(f"org/repo:{tag}")
    assert (found.kind, found.name) == ("gguf", f"org/repo:{tag}")
    assert found.path == hub.local / "org/repo" / files[0]
    assert hub.requested == files


@pytest.mark.parametrize("tag", ["Q4_K", "K_M", "f16", "M", "0"])
def test_a_tag_that_nothing_bears_lists_what_there_is(hub: DiskHub, tag: str) -> None:
    hub.add("org/repo", *GGUF_FILES)
    with pytest.raises(ModelNotFoundError, match=f"no GGUF model matches {tag!r}") as caught:
        resolve(f"org/repo:{tag}")
    for name in ("Model-Q4_K_M", "Model.Q8_0", "BF16/Model-BF16"):
        assert name in str(caught.value)
    assert "mmproj" not in str(caught.value)
    assert hub.requested == []


def test_an_ambiguous_tag_lists_what_there_is(hub: DiskHub) -> None:
    hub.add("org/repo", "A-Q8_0.gguf", "B-Q8_0.gguf")
    with pytest.raises(ModelNotFoundError, match=r"several models match 'Q8_0'.*A-Q8_0, B-Q8_0"):
        resolve("org/repo:Q8_0")


def test_a_tag_in_a_repository_without_gguf(hub: DiskHub) -> None:
    add_hf(hub)
    with pytest.raises(ModelNotFoundError, match="there is no GGUF files"):
        resolve("org/repo:Q8_0")


def test_no_tag_needs_a_single_model(hub: DiskHub) -> None:
    hub.add("org/one", "Only.Q8_0.gguf", "config.json", "adapter/model.safetensors")
    assert resolve("org/one").path.name == "Only.Q8_0.gguf"
    hub.add("org/repo", *GGUF_FILES)
    with pytest.raises(ModelNotFoundError, match=r"name one as org/repo:TAG: .*Model\.Q8_0"):
        resolve("org/repo")


# --- hub: failures


def test_no_network_falls_back_on_the_cache(hub: DiskHub) -> None:
    add_hf(hub)
    first = resolve("org/repo")
    hub.failure = OSError("no route to host")
    assert resolve("org/repo") == first


@pytest.mark.parametrize("tag", ["", ":Q8_0"])
def test_no_network_and_nothing_cached(hub: DiskHub, tag: str) -> None:
    hub.failure = ConnectionError("no route to host")
    with pytest.raises(ModelNotFoundError, match=r"cannot be reached .*no route") as caught:
        resolve(f"org/repo{tag}")
    assert caught.value.__cause__ is hub.failure


def test_the_client_librarys_own_errors_are_caught(hub: DiskHub) -> None:
    hub.failure = hubs.http.ConnectError("refused")
    with pytest.raises(ModelNotFoundError, match="cannot be reached") as caught:
        resolve("org/repo")
    assert caught.value.__cause__ is hub.failure


@pytest.mark.parametrize(
    ("kind", "status", "sentence"),
    [
        (errors.RepositoryNotFoundError, 404, "no such repository"),
        (errors.GatedRepoError, 403, "gated"),
        (errors.HfHubHTTPError, 500, "cannot be reached"),
    ],
)
def test_the_hubs_refusals_say_what_to_do(
    hub: DiskHub, kind: type[errors.HfHubHTTPError], status: int, sentence: str
) -> None:
    hub.failure = http_error(kind, status)
    with pytest.raises(ModelNotFoundError, match=f"org/repo: .*{sentence}") as caught:
        resolve("org/repo")
    assert caught.value.__cause__ is hub.failure


def test_offline_asks_only_the_cache(hub: DiskHub) -> None:
    add_hf(hub)
    with pytest.raises(ModelNotFoundError, match="not in the local hub cache"):
        resolve("org/repo", offline=True)
    resolve("org/repo")
    hub.failure = AssertionError("the hub was asked")
    assert resolve("org/repo", offline=True).path == hub.local / "org/repo"


# --- the real client over a cache on disk


@pytest.fixture
def client_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub client's cache as a download leaves it, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    repository = tmp_path / "hub" / "models--org--repo"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return snapshot


@pytest.mark.parametrize("offline", [True, False])
def test_the_real_client_finds_a_cached_gguf(client_cache: Path, offline: bool) -> None:
    (client_cache / "Model-Q8_0.gguf").write_bytes(raw_gguf())
    found = resolve("org/repo:Q8_0", offline=offline)
    assert found.path == client_cache / "Model-Q8_0.gguf"


@pytest.mark.parametrize("offline", [True, False])
def test_the_real_client_finds_a_cached_directory(client_cache: Path, offline: bool) -> None:
    (client_cache / "config.json").write_text("{}")
    (client_cache / "model.safetensors").write_bytes(b"")
    found = resolve("org/repo", offline=offline)
    assert (found.kind, found.path) == ("hf", client_cache)


@pytest.mark.parametrize("offline", [True, False])
def test_the_real_client_does_not_find_what_is_not_cached(
    client_cache: Path, offline: bool
) -> None:
    with pytest.raises(ModelNotFoundError, match="org/absent"):
        resolve("org/absent", offline=offline)


def test_a_name_no_repository_can_have(client_cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no repository can have this name"):
        resolve("org/bad--name")
