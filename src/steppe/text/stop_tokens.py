"""Which token ids end a generation of this model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from steppe.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from steppe.text.tokenizer import Tokenizer

__all__ = ["resolve_stop_tokens"]


def resolve_stop_tokens(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    tokenizer: Tokenizer,
    kind: Literal["gguf", "hf"],
) -> frozenset[int]:
    """The model's stop ids: the one set that sampler, ``min_tokens`` and detokeniser share.

    The union of ``eos_token_id`` in config.json (also inside ``text_config``) and in
    generation_config.json, each an id or a list, and of what the tokenizer knows: its EOS and, from
    a GGUF, eot and eom. A request adds its own ``stop_token_ids`` to it. An id beyond the model's
    vocabulary is left out: it can never be sampled. Raises ``CheckpointError`` for a value that is
    no id at all.
    """
    ids = set(tokenizer.stop_ids)
    size = tokenizer.vocab_size
    ids.update(_eos_ids(generation_config, "generation_config.json"))
    if kind == "hf":
        text = config.get("text_config")
        for section in (config, text if isinstance(text, dict) else {}):
            ids.update(_eos_ids(section, "config.json"))
            rows = section.get("vocab_size")
            if isinstance(rows, int):
                size = max(size, rows)
    return frozenset(token_id for token_id in ids if token_id < size)


def _eos_ids(section: Mapping[str, Any], where: str) -> Iterator[int]:
    value = section.get("eos_token_id")
    if value is None:
        return
    for token_id in value if isinstance(value, list) else [value]:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise CheckpointError(f"{where}: eos_token_id holds {token_id!r}, which is no token id")
        yield token_id
