"""A tokenizer from a Hugging Face model directory.

Only ``tokenizer.json`` is read as the vocabulary, and its post-processor alone says whether BOS
or EOS go around a text (an ``add_bos_token`` elsewhere does not count, as in the reference
implementation since its version 5). ``tokenizer_config.json``, ``special_tokens_map.json`` and
``added_tokens.json`` add which tokens are BOS and EOS, and tokens added later. A directory with
only a SentencePiece ``tokenizer.model`` (or a ``vocab.json``) is refused by name.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Core

from steppe.errors import TokenizerError
from steppe.text.tokenizer import Tokenizer
from steppe.text.tokenizer_cache import parse_core

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["from_directory", "read_json_object"]

_OTHER_VOCABULARIES = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json", "vocab.txt")
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


def from_directory(path: Path) -> Tokenizer:
    """The tokenizer of a model directory. ``TokenizerError`` if there is none that we read."""
    file = path / "tokenizer.json"
    try:
        data = file.read_bytes()
    except FileNotFoundError as error:
        others = [name for name in _OTHER_VOCABULARIES if (path / name).exists()]
        instead = f"; {', '.join(others)} is not read" if others else ""
        raise TokenizerError(
            f"{path} has no tokenizer.json{instead}. Save the tokenizer in the fast format first"
        ) from error
    except OSError as error:
        raise TokenizerError(f"{file}: {error.strerror}") from error
    core = parse_core(data, str(file))
    config = read_json_object(path / "tokenizer_config.json")
    special = read_json_object(path / "special_tokens_map.json")
    names = {
        name: _token_text(config[name] if config.get(name) is not None else special.get(name))
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
    }
    _add_tokens(core, config, read_json_object(path / "added_tokens.json"), names)
    bos_id = _id_of(core, names["bos_token"])
    eos_id = _id_of(core, names["eos_token"])
    return Tokenizer(core, bos_id=bos_id, eos_id=eos_id)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, ``{}`` without the file; ``TokenizerError`` for anything else."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TokenizerError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} does not hold a JSON object")
    return value


def _add_tokens(
    core: Core,
    config: Mapping[str, Any],
    added_tokens: Mapping[str, Any],
    names: Mapping[str, str | None],
) -> None:
    """Tokens the configuration knows and ``tokenizer.json`` does not, in the order of their ids."""
    known = {token.content for token in core.get_added_tokens_decoder().values()}
    wanted: dict[str, tuple[int, AddedToken]] = {}
    for token_id, entry in config.get("added_tokens_decoder", {}).items():
        flags = {flag: bool(entry.get(flag, False)) for flag in _FLAGS}
        wanted[entry["content"]] = (int(token_id), AddedToken(entry["content"], **flags))
    for content, token_id in added_tokens.items():
        wanted.setdefault(content, (int(token_id), AddedToken(content, normalized=False)))
    missing = sorted(
        ((i, token) for content, (i, token) in wanted.items() if content not in known),
        key=lambda item: item[0],
    )
    for token_id, token in missing:
        core.add_tokens([token])
        got = core.token_to_id(token.content)
        if got != token_id:
            raise TokenizerError(
                f"tokenizer_config.json gives {token.content!r} the id {token_id}, "
                f"but tokenizer.json leaves it {got}"
            )
    for name in names.values():
        # A named token is a control token, even if tokenizer.json lists it as an ordinary piece.
        if name is not None and name not in known and name not in wanted:
            core.add_special_tokens([AddedToken(name, normalized=False, special=True)])


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _id_of(core: Core, text: str | None) -> int | None:
    return None if text is None else core.token_to_id(text)
