"""What every architecture says about itself: one validated description for both file formats."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from steppe.backends.tape import Activation, CacheSpec, RopeSpec
from steppe.errors import CheckpointError
from steppe.models.fields import LARGEST

__all__ = ["MOST_LAYERS", "WIDEST_HEAD", "ExpertsConfig", "ModelConfig"]

# Past every published model by far, and small enough that describing it is no burden: these are
# checked before anything of such a size is made.
MOST_LAYERS: Final = 4096
WIDEST_HEAD: Final = 65_536
_MOST_EXPERTS: Final = 2**18


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Routed feed-forward blocks: ``count`` experts of inner width ``width`` in ``layers``, the
    best ``per_token`` of them for each token, their weights renormalised if ``normalize``.
    """

    count: int
    per_token: int
    width: int
    normalize: bool
    layers: frozenset[int]

    def __post_init__(self) -> None:
        for name in ("count", "per_token", "width"):
            _check_count(f"experts.{name}", getattr(self, name), LARGEST)
        if self.count * len(self.layers) > _MOST_EXPERTS:
            raise CheckpointError(
                f"experts.count: {self.count} in each of {len(self.layers)} layers are too many"
            )
        if self.per_token > self.count:
            raise CheckpointError(
                f"experts.per_token: {self.per_token} of {self.count} experts cannot be chosen"
            )


@dataclass(frozen=True, slots=True, eq=False)
class ModelConfig:
    """A decoder's numbers. Immutable: any thread.

    ``windows[i]`` is layer i's sliding window (None: full attention), ``ropes[i]`` its rotary
    embedding. ``query_scale`` multiplies q k, ``embed_scale`` the token embeddings. ``qkv_bias``,
    ``output_bias`` and ``mlp_bias`` say which projections add one. ``qk_norm``: each query and key
    head is normalised before the rotation. ``post_norms``: the outputs of attention and of the
    feed-forward block are normalised before they are added.

    Two fields say how a checkpoint stores its parameters: ``norm_offset`` is to be added to every
    norm weight, ``interleaved_rope`` means that rotated dimensions of query and key rows are
    stored in pairs and not in halves.

    Raises `CheckpointError` naming the field, if a number is absurd or contradicts another.
    """

    architecture: str
    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_positions: int
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    ropes: tuple[RopeSpec, ...] = field(repr=False)
    query_scale: float
    embed_scale: float = 1.0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    activation: Activation = "silu"
    experts: ExpertsConfig | None = None
    norm_offset: float = 0.0
    interleaved_rope: bool = False

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "intermediate_size",
            "max_positions",
        ):
            _check_count(name, getattr(self, name), LARGEST)
        _check_count("num_layers", self.num_layers, MOST_LAYERS)
        _check_count("head_dim", self.head_dim, WIDEST_HEAD)
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_kv_heads: {self.num_heads} query heads cannot share "
                f"{self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim: {self.head_dim} is odd and cannot be rotated")
        _check_range("rms_norm_eps", self.rms_norm_eps, 1.0)
        for name in ("query_scale", "embed_scale"):
            _check_range(name, getattr(self, name), math.inf)
        for name in ("attention_softcap", "logit_softcap"):
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name), math.inf)
        self._check_layers()

    def _check_layers(self) -> None:
        if len(self.windows) != self.num_layers:
            raise CheckpointError(
                f"windows: {len(self.windows)} layers are described, num_layers is "
                f"{self.num_layers}"
            )
        if len(self.ropes) != self.num_layers:
            raise CheckpointError(
                f"ropes: {len(self.ropes)} layers are described, num_layers is {self.num_layers}"
            )
        for window in self.windows:
            if window is not None:
                _check_count("windows", window, LARGEST)
        if any(2 * rope.inv_freq.size > self.head_dim for rope in self.ropes):
            raise CheckpointError(
                f"ropes: more dimensions are rotated than a head has ({self.head_dim})"
            )
        if self.experts is not None and not self.experts.layers <= set(range(self.num_layers)):
            raise CheckpointError("experts.layers: there are not so many layers")

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """What each layer keeps per token."""
        return tuple(CacheSpec(self.num_kv_heads, self.head_dim, window) for window in self.windows)

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim


def _check_count(field: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise CheckpointError(f"{field}: {value} is not between 1 and {most}")


def _check_range(field: str, value: float, end: float) -> None:
    if not 0 < value < end:
        raise CheckpointError(f"{field}: {value} is not above 0 and below {end}")
