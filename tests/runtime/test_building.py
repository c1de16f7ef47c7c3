"""Engine directories: the same tokens as from the source, and never anything else."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steppe import LLM, SamplingParams
from steppe.backends.torch import TorchBackend
from steppe.errors import BackendError, EngineDirectoryError, ModelError, SteppeError
from steppe.formats.checkpoint import open_checkpoint
from steppe.formats.engine_directory import WEIGHTS, read_engine_directory
from steppe.models.registry import load_model
from steppe.runtime.artifacts import load_artifacts
from steppe.runtime.building import build_engine
from steppe.runtime.config import RuntimeConfig
from steppe.runtime.rank_runtime import LLMRankRuntime
from tests.formats.test_engine_directory import rewrite
from tests.models.driver import Driver
from tests.models.gguf_files import write_gguf
from tests.native.built import NativeBackend
from tests.oracle.zoo import VARIANTS, make, save
from tests.runtime.asking import ask
from tests.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from steppe.backends.base import Program

PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("building") / "tiny", temperature=0.7, top_k=9)


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_engine(source, tmp_path_factory.mktemp("built") / "engine").path


def same_bits(ours: Program, theirs: Program, rng: np.random.Generator) -> None:
    """Logits of a few steps are equal to the bit."""
    prompts = {i: rng.integers(0, ours.vocab_size, length) for i, length in enumerate((1, 9, 30))}
    drivers = [
        Driver(NativeBackend(threads=2), program, np.random.default_rng(1), sequences=3, tokens=64)
        for program in (ours, theirs)
    ]
    first, second = (driver.step(prompts, all_logits=True).logits for driver in drivers)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("architecture", sorted(VARIANTS))
def test_every_architecture_computes_the_same_bits(
    architecture: str, tmp_path: Path, seed: int, rng: np.random.Generator
) -> None:
    source = save(make(VARIANTS[architecture], seed), tmp_path / "source")
    write_tiny_model(tmp_path / "words")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "words" / name, source / name)
    built = build_engine(source, tmp_path / "engine")
    theirs = load_model(open_checkpoint(source))
    ours = load_model(open_checkpoint(built.path))
    assert ours.name == theirs.name
    assert {name: w.shape for name, w in ours.weights.items()} == {
        name: w.shape for name, w in theirs.weights.items()
    }
    same_bits(ours, theirs, rng)


def test_answers_are_those_of_the_source(source: Path, built: Path) -> None:
    with LLM(source) as theirs, LLM(built) as ours:
        assert ours.generation_defaults == theirs.generation_defaults
        assert (ours.name, ours.context_length) == (theirs.name, theirs.context_length)
        messages = [{"role": "user", "content": "Hello"}]
        first, second = ours.chat(messages, PARAMS), theirs.chat(messages, PARAMS)
    assert first == second
    with LLM(built, max_model_len=40) as shorter:
        assert shorter.context_length == 40


def test_the_directory_needs_its_source_no_more(source: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(source, gone)
    with LLM(gone) as llm:
        expected = llm.generate("Hello", PARAMS)
    stages: list[tuple[int, int]] = []
    report = build_engine(gone, tmp_path / "e", on_progress=lambda *each: stages.append(each))
    shutil.rmtree(gone)
    (tmp_path / "e").rename(tmp_path / "moved")
    assert stages == [(i + 1, len(stages)) for i in range(len(stages))]
    assert report.weight_bytes == (tmp_path / "moved" / WEIGHTS).stat().st_size
    runtime = LLMRankRuntime(
        tmp_path / "moved", backend=NativeBackend(), config=RuntimeConfig(max_batch_size=1)
    )
    answer = runtime.handle_request(ask("Hello", 12))
    assert answer is not None
    assert answer.usage.completion_tokens == 12
    with LLM(tmp_path / "moved") as llm:
        assert llm.generate("Hello", PARAMS) == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["smollm2_gguf", "gemma3_gguf"])
def test_a_real_gguf_model_answers_the_same(
    request: pytest.FixtureRequest, name: str, tmp_path: Path
) -> None:
    source = request.getfixturevalue(name)
    engine = build_engine(source, tmp_path / "engine").path
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    answers = []
    for reference in (source, engine):
        with LLM(reference, cache_dir=tmp_path / "cache", max_model_len=512) as llm:
            answers.append(llm.generate(["What is a stoat?", "Once upon a time"], params))
    assert answers[0] == answers[1]


def test_a_gguf_source_keeps_its_metadata(
    tmp_path: Path, seed: int, rng: np.random.Generator
) -> None:
    """Its rotated rows, its tied head and its tokenizer, through `metadata.gguf`."""
    path = write_gguf(make(VARIANTS["llama-biased-tied"], seed), tmp_path / "x.gguf")
    checkpoint = open_checkpoint(path)
    expected = load_model(checkpoint)
    with pytest.raises(ModelError, match="tokenizer"):  # of which this file has none
        build_engine(path, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()
    assert expected.vocab_size == 83


def test_other_backends_say_why_not(built: Path, source: Path) -> None:
    with pytest.raises(BackendError, match="packed for the native backend"):
        TorchBackend().trace(load_artifacts(built).program)
    with pytest.raises(EngineDirectoryError, match="an engine directory already"):
        build_engine(built, source.parent / "never")


def test_another_layout_says_to_rebuild(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built, tmp_path / "e")
    rewrite(tmp_path / "e", lambda manifest: manifest.update(layout="columns8-0"))
    with pytest.raises(EngineDirectoryError, match=r"columns8-0.*rebuild it with steppe build"):
        LLM(tmp_path / "e")


LIES: dict[str, Callable[[dict], object]] = {
    "a weight is missing": lambda m: m["weights"].pop(),
    "a weight is unknown": lambda m: m["weights"][0]["names"].append("model.extra"),
    "another shape": lambda m: m["weights"][0].update(shape=[1, 1]),
    "another format": lambda m: m["weights"][0].update(format="Q4_0"),
    "no format": lambda m: m["weights"][0].update(format="vector"),
    "a wrong checksum": lambda m: m["weights"][0].update(checksum="0" * 16),
    "fewer bytes": lambda m: m["weights"][0].update(bytes=64),
    "another model": lambda m: m["model"].update(num_layers=1),
    "a wider model": lambda m: m["model"].update(hidden_size=2**31 - 1),
    "no model": lambda m: m["model"].clear(),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_does_not_fit_says_to_rebuild(
    built: Path, tmp_path: Path, lie: str
) -> None:
    shutil.copytree(built, tmp_path / "e")
    rewrite(tmp_path / "e", LIES[lie])
    with pytest.raises(EngineDirectoryError, match="rebuild it with steppe build"):
        load(tmp_path / "e")


def load(path: Path) -> None:
    NativeBackend(threads=1).trace(load_artifacts(path).program)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_damage_goes_unseen(built: Path, data: st.DataObject) -> None:
    """One byte changed, or the end cut off, anywhere but in the padding between weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "e"
        shutil.copytree(built, path)
        victim = data.draw(st.sampled_from(sorted(each.name for each in path.iterdir())))
        raw = bytearray((path / victim).read_bytes())
        at = data.draw(st.integers(0, len(raw) - 1))
        if data.draw(st.booleans()):
            raw[at] ^= data.draw(st.integers(1, 255))
            if victim == WEIGHTS and in_padding(built, at):
                return
        else:
            del raw[at:]
        (path / victim).write_bytes(raw)
        with pytest.raises(EngineDirectoryError, match="rebuild"):
            load(path)


def in_padding(path: Path, at: int) -> bool:
    engine = read_engine_directory(path)
    start = engine.weights.view.ctypes.data
    used = [(entry.data.ctypes.data - start, entry.data.size) for entry in engine.entries]
    return not any(begin <= at < begin + size for begin, size in used)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_hostile_manifest_is_refused_or_harmless(built: Path, data: st.DataObject) -> None:
    """Values of a manifest whose digest is right are changed: an error of ours, or it runs."""

    def change(manifest: dict) -> None:
        holder = data.draw(
            st.sampled_from([manifest, manifest["model"], *manifest["weights"]]), label="holder"
        )
        key = data.draw(st.sampled_from(sorted(holder)))
        holder[key] = data.draw(
            st.none()
            | st.booleans()
            | st.integers(-(2**65), 2**65)
            | st.floats(allow_nan=False)
            | st.sampled_from(["", "Q4_1", "F32", "vector", "0123456789abcdef"])
            | st.lists(st.integers(-4, 70), max_size=3)
        )

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "e"
        shutil.copytree(built, path)
        rewrite(path, change)
        try:
            program = load_artifacts(path).program
            if program.max_positions > 4096:
                return
            driver = Driver(
                NativeBackend(threads=1), program, np.random.default_rng(0), sequences=1, tokens=8
            )
            driver.step({0: [1, 2, 3]})
        except SteppeError:
            pass
