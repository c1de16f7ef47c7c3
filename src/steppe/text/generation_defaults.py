"""The sampling defaults that a model brings with it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["generation_defaults"]


class _Rule(NamedTuple):
    field: str
    low: float
    high: float
    whole: bool = False
    open_low: bool = False


_RULES = {
    "temperature": _Rule("temperature", 0.0, 100.0),
    "top_p": _Rule("top_p", 0.0, 1.0, open_low=True),
    "top_k": _Rule("top_k", -1, 2**31 - 1, whole=True),
    "min_p": _Rule("min_p", 0.0, 1.0),
    "repetition_penalty": _Rule("repetition_penalty", 0.0, 100.0, open_low=True),
    "presence_penalty": _Rule("presence_penalty", -2.0, 2.0),
    "frequency_penalty": _Rule("frequency_penalty", -2.0, 2.0),
    "max_new_tokens": _Rule("max_tokens", 1, 2**31 - 1, whole=True),
}


def generation_defaults(generation_config: Mapping[str, Any]) -> dict[str, int | float]:
    """What a generation_config.json says about sampling, under ``SamplingParams``' field names.

    ``do_sample`` false means greedy: temperature 0. ``max_new_tokens`` becomes ``max_tokens``;
    ``max_length`` counts the prompt and is not a sampling matter. A value outside its field's range
    is left out, since a default must never make a request invalid.
    """
    defaults: dict[str, int | float] = {}
    for key, rule in _RULES.items():
        value = generation_config.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value) or not rule.low <= value <= rule.high:
            continue
        if (rule.open_low and value == rule.low) or (rule.whole and value != int(value)):
            continue
        defaults[rule.field] = int(value) if rule.whole else float(value)
    if generation_config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults
