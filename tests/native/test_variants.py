"""Which kernels run: the best ones, or those that STEPPE_ISA names."""

from __future__ import annotations

import platform

import pytest

from steppe.backends.native import backend
from steppe.errors import BackendError
from tests.native.built import VARIANTS, NativeBackend, _native


def test_every_machine_has_the_portable_kernels_last() -> None:
    built = _native.built_variants()
    assert built[-1] == VARIANTS[-1] == "portable"
    assert [name for name in built if name in VARIANTS] == VARIANTS
    assert {"x86_64": "avx2", "aarch64": "neon_dotprod"}[platform.machine()] in built


@pytest.mark.parametrize("isa", VARIANTS)
def test_the_environment_chooses_the_kernels(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPPE_ISA", isa)
    assert NativeBackend().isa == isa
    assert NativeBackend(isa=VARIANTS[0]).isa == VARIANTS[0]
    assert _native.Program(isa, 1, 10, 10).isa == isa


def test_the_best_kernels_run_where_nobody_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPPE_ISA", raising=False)
    assert NativeBackend().isa == VARIANTS[0]
    assert _native.Program("", 1, 10, 10).isa == VARIANTS[0]
    monkeypatch.setenv("STEPPE_ISA", "")
    assert NativeBackend().isa == VARIANTS[0]


@pytest.mark.parametrize("name", ["mmx", "AVX2", "portable "])
def test_an_unknown_name_is_refused_with_those_there_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPPE_ISA", name)
    with pytest.raises(BackendError) as caught:
        NativeBackend()
    assert str(caught.value) == f"there are no {name} kernels: choose {', '.join(VARIANTS)}"
    with pytest.raises(ValueError, match="kernels"):
        _native.Program(name, 1, 10, 10)


class OldMachine:
    """The extension as a machine sees it that runs the portable kernels alone."""

    built_variants = staticmethod(_native.built_variants)

    @staticmethod
    def variants() -> list[str]:
        return ["portable"]


def test_a_name_that_this_machine_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_native", OldMachine)
    best = _native.built_variants()[0]
    with pytest.raises(BackendError) as caught:
        NativeBackend(isa=best)
    assert str(caught.value) == f"this machine cannot run {best} kernels: choose portable"
