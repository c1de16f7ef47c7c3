"""Rotary frequencies: position scaling rules, as float32 radians per position.

The rules are those of the models' reference code: linear interpolation, the wavelength bands of
Llama 3.1, and YaRN (Peng et al., 2023). The operations and their order follow it too, so the
frequencies agree to the last bit or the one before; only powers are taken in float64, because
libraries differ in theirs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from steppe.backends.tape import RopeSpec
from steppe.errors import CheckpointError, UnsupportedModelError
from steppe.models.fields import Fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from steppe.formats.tensor import StoredTensor

__all__ = [
    "default_rope",
    "extended_positions",
    "gguf_rope",
    "hf_parameters",
    "linear_rope",
    "llama3_rope",
    "rope_from_parameters",
    "yarn_rope",
]

# What overflows is found in the result, where it can be named.
_unwarned = np.errstate(over="ignore", divide="ignore", invalid="ignore")

DEFAULT_THETA: Final = 10_000.0

_PARAMETERS: Final = frozenset(
    (
        "rope_theta",
        "rope_type",
        "type",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "low_freq_factor",
        "high_freq_factor",
        "partial_rotary_factor",
        "finetuned",  # a remark, in old files
    )
)


@_unwarned
def default_rope(dim: int, theta: float) -> RopeSpec:
    """``theta ** (-2 i / dim)`` for the ``dim / 2`` pairs of a head."""
    return _finite(np.float32(1) / _wavelengths(dim, theta))


@_unwarned
def linear_rope(dim: int, theta: float, *, factor: float) -> RopeSpec:
    """Positions divided by ``factor``."""
    return _finite(np.float32(1) / _wavelengths(dim, theta) / np.float32(factor))


@_unwarned
def llama3_rope(
    dim: int, theta: float, *, factor: float, low: float, high: float, original: int
) -> RopeSpec:
    """Llama 3.1: long waves are divided by ``factor``, short ones kept, those between blended.

    ``low`` and ``high`` are the bounds of the band in periods per ``original`` positions.
    """
    if high <= low:
        raise CheckpointError(f"high_freq_factor: {high} is not above low_freq_factor {low}")
    frequencies = default_rope(dim, theta).inv_freq
    periods = np.float32(2 * math.pi) / frequencies
    slow = periods > np.float32(original / low)
    scaled = np.where(slow, frequencies / np.float32(factor), frequencies)
    blend = (np.float32(original) / periods - np.float32(low)) / np.float32(high - low)
    blended = (1 - blend) * scaled / np.float32(factor) + blend * scaled
    between = ~slow & (periods >= np.float32(original / high))
    return _finite(np.where(between, blended, scaled).astype(np.float32))


@_unwarned
def yarn_rope(
    dim: int,
    theta: float,
    *,
    factor: float,
    original: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
) -> RopeSpec:
    """YaRN: dimensions that turn more than ``beta_fast`` times in ``original`` positions keep their
    frequency, those that turn less than ``beta_slow`` times are interpolated, a ramp between.

    Cosines and sines are scaled by ``attention_factor``, derived from ``factor`` when not given.
    """
    if theta == 1.0:
        raise CheckpointError("rope_theta: 1.0 has no wavelengths to interpolate between")
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
    low = _yarn_dimension(beta_fast, dim, theta, original)
    high = _yarn_dimension(beta_slow, dim, theta, original)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    steps = np.arange(dim // 2, dtype=np.float32)
    keep = 1 - np.clip((steps - np.float32(low)) / np.float32(high - low), 0, 1)
    waves = _wavelengths(dim, theta)
    interpolated = np.float32(1) / (np.float32(factor) * waves)
    kept = np.float32(1) / waves
    mixed = interpolated * (1 - keep) + kept * keep
    return _finite(mixed.astype(np.float32), float(attention_factor))


def hf_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope parameters of a ``config.json`` with one rotary embedding, in today's form.

    They are in ``rope_parameters``, or in ``rope_theta`` and ``rope_scaling`` in older files.
    """
    fields = Fields(config)
    parameters = dict(fields.part("rope_scaling") or fields.part("rope_parameters"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if parameters.get(key) is None and config.get(key) is not None:
            parameters[key] = config[key]
    return parameters


def rope_from_parameters(
    parameters: Mapping[str, Any],
    config: Mapping[str, Any],
    dim: int,
    *,
    default_theta: float = DEFAULT_THETA,
) -> RopeSpec:
    """The rotary embedding that rope parameters in the Hugging Face form describe.

    ``config`` is the file around them: it has the positions that scaling starts from. Raises
    `UnsupportedModelError` naming a type or parameter we do not run, `CheckpointError` naming a
    parameter that cannot be.
    """
    unknown = sorted(set(parameters) - _PARAMETERS)
    if unknown:
        raise UnsupportedModelError(f"rope parameter {unknown[0]} is not supported")
    fields = Fields(parameters)
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            "partial_rotary_factor: rotating a part of a head only is not supported"
        )
    theta = fields.number("rope_theta", default_theta)
    kind = fields.text("rope_type", fields.text("type", "default"))
    match kind:
        case "default":
            return default_rope(dim, theta)
        case "linear":
            return linear_rope(dim, theta, factor=fields.number("factor"))
        case "llama3":
            return llama3_rope(
                dim,
                theta,
                factor=fields.number("factor"),
                low=fields.number("low_freq_factor"),
                high=fields.number("high_freq_factor"),
                original=_original(parameters, config),
            )
        case "yarn":
            return yarn_rope(
                dim,
                theta,
                factor=_yarn_factor(parameters, config),
                original=_original(parameters, config),
                beta_fast=fields.number("beta_fast", 32.0),
                beta_slow=fields.number("beta_slow", 1.0),
                attention_factor=fields.optional_number("attention_factor"),
                mscale=fields.optional_number("mscale"),
                mscale_all_dim=fields.optional_number("mscale_all_dim"),
                truncate=fields.flag("truncate", True),
            )
    raise UnsupportedModelError(
        f"rope type {kind[:40]!r} is not supported; default, linear, llama3 and yarn are"
    )


def extended_positions(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """How many positions a model has: YaRN multiplies those it started from."""
    positions = Fields(config).integer("max_position_embeddings")
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind != "yarn":
        return positions
    extended = _yarn_factor(parameters, config) * _original(parameters, config)
    return max(positions, int(extended))


def gguf_rope(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    architecture: str,
    dim: int,
    *,
    default_theta: float = DEFAULT_THETA,
) -> RopeSpec:
    """The rotary embedding of a GGUF file: ``{architecture}.rope.*``, and the divisors in
    ``rope_freqs.weight`` (how Llama 3.1's rule is stored).

    Raises as `rope_from_parameters` does.
    """
    fields = Fields(metadata, f"{architecture}.rope.")
    rotated = fields.integer("dimension_count", dim)
    if rotated != dim:
        raise UnsupportedModelError(
            f"{fields.name('dimension_count')}: rotating {rotated} of {dim} dimensions is not "
            "supported"
        )
    theta = fields.number("freq_base", default_theta)
    kind = fields.text("scaling.type", "none")
    # Before types had names there was only one.
    factor = fields.number("scaling.factor", fields.number("scale_linear", 1.0))
    if fields.get("scaling.type") is None and factor != 1.0:
        kind = "linear"
    match kind:
        case "none":
            rope = default_rope(dim, theta)
        case "linear":
            rope = linear_rope(dim, theta, factor=factor)
        case "yarn":
            rope = _gguf_yarn(fields, metadata, architecture, dim, theta, factor)
        case _:
            raise UnsupportedModelError(
                f"{fields.name('scaling.type')} {kind[:40]!r} is not supported; none, linear and "
                "yarn are"
            )
    divisors = tensors.get("rope_freqs.weight")
    if divisors is None:
        return rope
    if divisors.shape != (dim // 2,):
        raise CheckpointError(
            f"rope_freqs.weight: shape {divisors.shape} is not ({dim // 2},), half a head"
        )
    values = divisors.dequantize()
    if not np.all((values > 0) & np.isfinite(values)):
        raise CheckpointError("rope_freqs.weight: not all divisors are finite and positive")
    with np.errstate(over="ignore"):
        return _finite(rope.inv_freq / values, rope.scale)


def _gguf_yarn(
    fields: Fields,
    metadata: Mapping[str, Any],
    architecture: str,
    dim: int,
    theta: float,
    factor: float,
) -> RopeSpec:
    if fields.get("scaling.yarn_log_multiplier") is not None:
        raise UnsupportedModelError(
            f"{fields.name('scaling.yarn_log_multiplier')} is not supported"
        )
    if fields.number("scaling.yarn_ext_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{fields.name('scaling.yarn_ext_factor')} is not supported")
    trained = Fields(metadata, f"{architecture}.").integer("context_length")
    # The stored factor multiplies the derived one, it does not replace it.
    extra = fields.number("scaling.yarn_attn_factor", fields.number("scaling.attn_factor", 1.0))
    return yarn_rope(
        dim,
        theta,
        factor=factor,
        original=fields.integer("scaling.original_context_length", trained),
        beta_fast=fields.number("scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("scaling.yarn_beta_slow", 1.0),
        attention_factor=_yarn_mscale(factor, 1.0) * extra,
    )


def _wavelengths(dim: int, theta: float) -> NDArray[np.float32]:
    """``theta ** (2 i / dim)``: the exponents rounded to float32, as the reference has them."""
    if dim % 2:
        raise CheckpointError(f"head_dim: {dim} is odd and cannot be rotated")
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers: NDArray[np.float64] = theta ** exponents.astype(np.float64)
    return powers.astype(np.float32)


def _finite(frequencies: NDArray[np.float32], scale: float = 1.0) -> RopeSpec:
    if not np.all(np.isfinite(frequencies)):
        raise CheckpointError(
            "rope: theta, factor and their kin are too large or too small for float32 frequencies"
        )
    return RopeSpec(frequencies, scale)


def _original(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    key = "original_max_position_embeddings"
    around = Fields(config)
    return (
        around.optional_integer(key)
        or Fields(parameters).optional_integer(key)
        or around.integer("max_position_embeddings")
    )


def _yarn_factor(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    factor = Fields(parameters).optional_number("factor")
    if factor is not None:
        return factor
    return Fields(config).integer("max_position_embeddings") / _original(parameters, config)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_dimension(turns: float, dim: int, theta: float, original: int) -> float:
    """Which dimension turns so many times in ``original`` positions."""
    return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
