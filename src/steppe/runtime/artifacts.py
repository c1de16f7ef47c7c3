"""A loaded model: program, tokenizer, template, and what ends its answers (seed 002)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steppe.errors import ChatTemplateError
from steppe.formats.checkpoint import open_checkpoint
from steppe.formats.packaged import cache_root
from steppe.models.quantize import quantized
from steppe.models.registry import load_model
from steppe.runtime.pooling import Pooling, read_pooling
from steppe.text.chat_template import ChatTemplate
from steppe.text.generation_defaults import generation_defaults
from steppe.text.stop_tokens import resolve_stop_tokens
from steppe.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from steppe.backends.base import Program
    from steppe.formats.checkpoint import Checkpoint

__all__ = ["LoadProgress", "ModelArtifacts", "artifacts_of", "load_artifacts"]

LoadProgress = Callable[[str], None]
"""Called with the name of each stage of loading as it begins."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelArtifacts:
    """Everything about a model that does not depend on a backend or a deployment.

    ``stop_token_ids`` is the model's own set (config, generation_config, tokenizer, GGUF).
    ``generation_defaults`` are the sampling fields its generation_config sets. ``pooling`` is how
    embeddings are made.
    """

    name: str
    program: Program
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    stop_token_ids: frozenset[int]
    generation_defaults: Mapping[str, int | float]
    pooling: Pooling = "last"


def load_artifacts(
    reference: str | Path,
    *,
    max_model_len: int | None = None,
    quantize: str | None = None,
    cache_dir: Path | None = None,
    on_progress: LoadProgress | None = None,
) -> ModelArtifacts:
    """Open a model reference (a path, a hub id, a packaged name) and read all but its weights.

    ``quantize`` ("q8" or "q4") is what a float checkpoint's matrices become when they are loaded:
    see `steppe.models.quantize.quantized`.

    Raises ModelError and its kin, ConfigError for another ``quantize``.
    """
    if on_progress is not None:
        on_progress("opening")
    checkpoint = open_checkpoint(reference, cache_dir=cache_dir)
    return artifacts_of(
        checkpoint,
        max_model_len=max_model_len,
        quantize=quantize,
        cache_dir=cache_dir,
        on_progress=on_progress,
    )


def artifacts_of(
    checkpoint: Checkpoint,
    *,
    max_model_len: int | None = None,
    quantize: str | None = None,
    cache_dir: Path | None = None,
    on_progress: LoadProgress | None = None,
) -> ModelArtifacts:
    """Read all but the weights of an open checkpoint. Raises as ``load_artifacts``."""
    tell = on_progress or (lambda stage: None)
    tell("tokenizer")
    tokenizer = Tokenizer.from_checkpoint(checkpoint, cache_dir=cache_root(cache_dir))
    try:
        template: ChatTemplate | None = ChatTemplate.from_checkpoint(checkpoint, tokenizer)
    except ChatTemplateError:
        # A base model has none; who sends it messages is told so then.
        template = None
    stops = resolve_stop_tokens(
        checkpoint.config, checkpoint.generation_config, tokenizer, checkpoint.kind
    )
    tell("graph")
    program = load_model(checkpoint, max_model_len=max_model_len)
    if quantize is not None:
        program = quantized(program, quantize)
    return ModelArtifacts(
        name=checkpoint.name,
        program=program,
        tokenizer=tokenizer,
        chat_template=template,
        stop_token_ids=stops,
        generation_defaults=generation_defaults(checkpoint.generation_config),
        pooling=read_pooling(checkpoint),
    )
