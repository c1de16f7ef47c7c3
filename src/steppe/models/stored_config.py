"""A model's configuration as JSON, for engine directories.

Every field of `ModelConfig` is there, and nothing else: the format version of engine directories is
raised with any change here.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast, get_args

import numpy as np

from steppe.backends.tape import Activation, RopeSpec
from steppe.errors import CheckpointError, EngineDirectoryError
from steppe.models.config import MOST_LAYERS, ExpertsConfig, ModelConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["config_from_json", "config_to_json"]

_COUNTS: Final = frozenset(
    {"vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"}
    | {"intermediate_size", "max_positions"}
)
_NUMBERS: Final = frozenset({"rms_norm_eps", "query_scale", "embed_scale", "norm_offset"})
_OPTIONAL_NUMBERS: Final = frozenset({"attention_softcap", "logit_softcap"})
_FLAGS: Final = frozenset(
    {"tie_word_embeddings", "qkv_bias", "output_bias", "mlp_bias", "qk_norm", "post_norms"}
    | {"interleaved_rope"}
)
_TEXTS: Final = frozenset({"architecture", "name"})


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """The configuration as values that JSON keeps to the bit."""
    plain = _COUNTS | _NUMBERS | _OPTIONAL_NUMBERS | _FLAGS | _TEXTS | {"activation"}
    stored: dict[str, Any] = {name: getattr(config, name) for name in sorted(plain)}
    stored["windows"] = list(config.windows)
    kinds: dict[tuple[bytes, float], int] = {}
    ropes: list[dict[str, Any]] = []
    numbers = []
    for rope in config.ropes:
        key = (rope.inv_freq.tobytes(), rope.scale)
        if key not in kinds:
            kinds[key] = len(ropes)
            # A float32 is a float64 too, and JSON keeps those.
            ropes.append({"inv_freq": rope.inv_freq.tolist(), "scale": rope.scale})
        numbers.append(kinds[key])
    stored["ropes"] = {"kinds": ropes, "layers": numbers}
    experts = config.experts
    stored["experts"] = None
    if experts is not None:
        stored["experts"] = {
            "count": experts.count,
            "per_token": experts.per_token,
            "width": experts.width,
            "normalize": experts.normalize,
            "layers": sorted(experts.layers),
        }
    return stored


def config_from_json(stored: Mapping[str, Any]) -> ModelConfig:
    """What `config_to_json` wrote.

    Raises `EngineDirectoryError` naming a field that is missing, unknown or impossible.
    """
    names = {field.name for field in fields(ModelConfig)}
    if set(stored) != names:
        odd = min(names.symmetric_difference(stored))
        _refuse(odd[:80], "is missing or unknown")
    values = {name: _plain(name, stored[name]) for name in names - {"windows", "ropes", "experts"}}
    windows = stored["windows"]
    if not isinstance(windows, list) or not all(w is None or _is_count(w) for w in windows):
        _refuse("windows", "is no list of widths")
    try:
        return ModelConfig(
            **values,
            windows=tuple(windows),
            ropes=_ropes(stored["ropes"]),
            experts=_experts(stored["experts"]),
        )
    except CheckpointError as error:
        if isinstance(error, EngineDirectoryError):
            raise
        raise EngineDirectoryError(f"model: {error}; rebuild it with steppe build") from error


def _refuse(name: str, what: str) -> NoReturn:
    raise EngineDirectoryError(f"model.{name} {what}; rebuild it with steppe build")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _plain(name: str, value: object) -> Any:
    if name in _COUNTS and _is_count(value):
        return value
    if name in _NUMBERS and type(value) in (int, float):
        return float(cast("float", value))
    if name in _OPTIONAL_NUMBERS and (value is None or type(value) in (int, float)):
        return None if value is None else float(cast("float", value))
    if name in _FLAGS and type(value) is bool:
        return value
    if name in _TEXTS and isinstance(value, str):
        return value
    if name == "activation" and value in get_args(Activation):
        return value
    _refuse(name, "is impossible")


def _ropes(stored: object) -> tuple[RopeSpec, ...]:
    match stored:
        case {"kinds": list(kinds), "layers": list(layers)} if len(layers) <= MOST_LAYERS:
            specs = [_rope(kind) for kind in kinds]
            if all(type(at) is int and 0 <= at < len(specs) for at in layers):
                return tuple(specs[at] for at in layers)
    _refuse("ropes", "is badly described")


def _rope(stored: object) -> RopeSpec:
    match stored:
        case {"inv_freq": list(inv_freq), "scale": float(scale)}:
            if all(type(each) is float for each in inv_freq):
                return RopeSpec(np.array(inv_freq, np.float32), scale)
    _refuse("ropes", "is badly described")


def _experts(stored: object) -> ExpertsConfig | None:
    match stored:
        case None:
            return None
        case {
            "count": int(count),
            "per_token": int(per_token),
            "width": int(width),
            "normalize": bool(normalize),
            "layers": list(layers),
        } if all(type(layer) is int for layer in layers):
            return ExpertsConfig(count, per_token, width, normalize, frozenset(layers))
    _refuse("experts", "is badly described")
