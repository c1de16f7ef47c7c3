"""Which architectures run, and how a checkpoint becomes one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from steppe.backends.tape import Graph
from steppe.errors import CheckpointError, ModelError, UnsupportedModelError
from steppe.models import gemma2, gemma3, llama, mistral, qwen2, qwen3, qwen3_moe
from steppe.models.packed import packed_weights
from steppe.models.stored_config import config_from_json
from steppe.models.weights import (
    map_gguf_weights,
    map_hf_weights,
    parameter_shapes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from steppe.backends.base import WeightTensor
    from steppe.backends.tape import CacheSpec
    from steppe.formats.checkpoint import Checkpoint
    from steppe.models.config import ModelConfig
    from steppe.models.reading import Tensors

__all__ = ["ARCHITECTURES", "Architecture", "Model", "find_architecture", "load_model"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a family of models is recognised, read and built.

    ``hf`` are the class names in ``architectures`` of a ``config.json``, ``hf_types`` its
    ``model_type``s, ``gguf`` the values of ``general.architecture``.
    """

    name: str
    build: Callable[[Graph, ModelConfig], None]
    from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    hf: tuple[str, ...]
    hf_types: tuple[str, ...]
    from_gguf: Callable[[Mapping[str, Any], Tensors], ModelConfig] | None = None
    gguf: str | None = None


ARCHITECTURES: Final[tuple[Architecture, ...]] = (
    Architecture(
        llama.NAME,
        llama.build,
        llama.from_hf,
        ("LlamaForCausalLM",),
        ("llama",),
        llama.from_gguf,
        "llama",
    ),
    Architecture(
        mistral.NAME, mistral.build, mistral.from_hf, ("MistralForCausalLM",), ("mistral",)
    ),
    Architecture(
        qwen2.NAME,
        qwen2.build,
        qwen2.from_hf,
        ("Qwen2ForCausalLM",),
        ("qwen2",),
        qwen2.from_gguf,
        "qwen2",
    ),
    Architecture(
        qwen3.NAME,
        qwen3.build,
        qwen3.from_hf,
        ("Qwen3ForCausalLM",),
        ("qwen3",),
        qwen3.from_gguf,
        "qwen3",
    ),
    Architecture(
        qwen3_moe.NAME,
        qwen3_moe.build,
        qwen3_moe.from_hf,
        ("Qwen3MoeForCausalLM",),
        ("qwen3_moe",),
        qwen3_moe.from_gguf,
        qwen3_moe.GGUF_NAME,
    ),
    Architecture(
        gemma2.NAME,
        gemma2.build,
        gemma2.from_hf,
        ("Gemma2ForCausalLM",),
        ("gemma2",),
        gemma2.from_gguf,
        "gemma2",
    ),
    Architecture(
        gemma3.NAME,
        gemma3.build,
        gemma3.from_hf,
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        ("gemma3_text", "gemma3"),
        gemma3.from_gguf,
        "gemma3",
    ),
)


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A `steppe.backends.base.Program`: an architecture with its numbers and its parameters.

    ``weights`` are views of the checkpoint's files and keep them mapped. Tied parameters are one
    object under two names. Immutable: any thread.
    """

    config: ModelConfig
    weights: Mapping[str, WeightTensor]
    _build: Callable[[Graph, ModelConfig], None]

    @property
    def name(self) -> str:
        """What the checkpoint calls itself."""
        return self.config.name

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; a tokenizer may have fewer tokens."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        """The longest sequence, in tokens."""
        return self.config.max_positions

    @property
    def layers(self) -> tuple[CacheSpec, ...]:
        """What each layer keeps per token."""
        return self.config.cache_specs

    def build(self, graph: Graph) -> None:
        """Record the operations."""
        self._build(graph, self.config)


def find_architecture(checkpoint: Checkpoint) -> Architecture:
    """The architecture of a checkpoint. Raises `UnsupportedModelError` naming one we do not run,
    with those we do; `CheckpointError` if the file does not say, or says two things.
    """
    if checkpoint.kind == "gguf":
        return _by_gguf_name(checkpoint.config.get("general.architecture"))
    return _by_hf_names(checkpoint.config)


def load_model(checkpoint: Checkpoint, *, max_model_len: int | None = None) -> Model:
    """Read the configuration, find every parameter and check that they fit each other.

    No weights are read. ``max_model_len`` lowers the model's longest sequence. Raises
    `UnsupportedModelError` and `CheckpointError` naming what is wrong, `ModelError` for a
    ``max_model_len`` the model does not have.
    """
    architecture = find_architecture(checkpoint)
    gguf = checkpoint.kind == "gguf"
    if checkpoint.engine is not None:
        config = config_from_json(checkpoint.engine.model)
    elif gguf and architecture.from_gguf is not None:
        config = architecture.from_gguf(checkpoint.config, checkpoint.tensors)
    else:
        config = architecture.from_hf(checkpoint.config)
    config = replace(config, name=checkpoint.name)
    if max_model_len is not None:
        if not 1 <= max_model_len <= config.max_positions:
            raise ModelError(
                f"max_model_len: {max_model_len} is not between 1 and the model's "
                f"{config.max_positions} positions"
            )
        config = replace(config, max_positions=max_model_len)
    graph = Graph(config.cache_specs)
    architecture.build(graph, config)
    shapes = parameter_shapes(graph.tape(), config.vocab_size)
    weights: Mapping[str, WeightTensor]
    if checkpoint.engine is not None:
        weights = packed_weights(checkpoint.engine, shapes)
    elif gguf:
        weights = map_gguf_weights(checkpoint.tensors, shapes, config)
    else:
        nested = checkpoint.config.get("text_config") is not None
        weights = map_hf_weights(checkpoint.tensors, shapes, config, multimodal=nested)
    return Model(config, weights, architecture.build)


def _by_gguf_name(name: object) -> Architecture:
    if not isinstance(name, str):
        raise CheckpointError("general.architecture is missing or no string")
    for architecture in ARCHITECTURES:
        if architecture.gguf == name:
            return architecture
    known = ", ".join(a.gguf for a in ARCHITECTURES if a.gguf is not None)
    raise UnsupportedModelError(
        f"architecture {name[:80]!r} does not run; of GGUF files these do: {known}"
    )


def _by_hf_names(config: Mapping[str, Any]) -> Architecture:
    """``architectures`` names the class, and so the head; ``model_type`` only the family."""
    classes, kind = config.get("architectures"), config.get("model_type")
    by_type = [a for a in ARCHITECTURES if kind in a.hf_types]
    if not classes:
        if by_type:
            return by_type[0]
        if kind is None:
            raise CheckpointError("config.json has neither architectures nor model_type")
        raise _unknown(kind)
    if not isinstance(classes, list) or not isinstance(classes[0], str):
        raise CheckpointError("architectures is no list of names")
    for architecture in ARCHITECTURES:
        if classes[0] in architecture.hf:
            if kind is not None and architecture not in by_type:
                raise CheckpointError(
                    f"architectures is {classes[0]}, but model_type is {str(kind)[:80]!r}"
                )
            return architecture
    raise _unknown(classes[0])


def _unknown(name: object) -> UnsupportedModelError:
    known = ", ".join(name for a in ARCHITECTURES for name in a.hf)
    return UnsupportedModelError(f"architecture {str(name)[:80]!r} does not run; these do: {known}")
