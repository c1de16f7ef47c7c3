"""A tokenizer from the metadata of a GGUF file.

Two of the format's vocabularies are built: ``gpt2`` (byte-level BPE with merges and a named
pre-tokenizer) and ``llama`` (SentencePiece BPE: pieces with scores, byte fallback, spaces written
as U+2581). Others are refused by name. Keys and token types are those of the GGUF specification.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, decoders, normalizers, processors
from tokenizers import Tokenizer as Core
from tokenizers.models import BPE

from steppe.errors import TokenizerError
from steppe.text.pieces import SPACE_MARK
from steppe.text.pre_tokenizers import named_pre_tokenizer
from steppe.text.tokenizer import Tokenizer
from steppe.text.tokenizer_cache import cached_core

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["TokenType", "from_gguf_metadata", "gguf_stop_ids"]

_KEY = "tokenizer.ggml."
_NAMED_IDS = ("bos", "eos", "unknown", "padding", "eot", "eom")
_TURN_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
"""Control tokens that end a turn or a text in every model that has them. Many files leave them
out of their ``eot`` key, and their chats would never stop."""


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``, as the GGUF specification numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def from_gguf_metadata(
    metadata: Mapping[str, Any], *, cache_dir: Path | None = None, identity: str | None = None
) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes.

    ``metadata`` maps keys to values; string arrays are sequences of str, number arrays sequences or
    numpy arrays. With ``cache_dir`` and ``identity`` (which must name these very bytes) the
    conversion is kept and, next time, neither tokens nor merges are read. ``TokenizerError`` for
    vocabularies and pre-tokenizers we do not know, and for inconsistent arrays.
    """
    if identity is None:
        core = _build(metadata)
    else:
        core = cached_core(cache_dir, identity, lambda: _build(metadata))
    return Tokenizer(
        core,
        bos_id=_named_id(metadata, "bos"),
        eos_id=_named_id(metadata, "eos"),
        stop_ids=gguf_stop_ids(metadata, core),
    )


def gguf_stop_ids(metadata: Mapping[str, Any], core: Core) -> frozenset[int]:
    """The ids that end a text or a turn: eos, eot, eom, and control tokens known by name."""
    ids = {_named_id(metadata, name) for name in ("eos", "eot", "eom")}
    special = {
        token.content: token_id
        for token_id, token in core.get_added_tokens_decoder().items()
        if token.special
    }
    ids.update(special.get(text) for text in _TURN_ENDS)
    return frozenset(token_id for token_id in ids if token_id is not None)


def _build(metadata: Mapping[str, Any]) -> Core:
    model = metadata.get(_KEY + "model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    builder = builders.get(model) if isinstance(model, str) else None
    if builder is None:
        raise TokenizerError(
            f"{_KEY}model: {model!r} is not a vocabulary we read; known: {', '.join(builders)}"
        )
    tokens = _tokens(metadata)
    types = _types(metadata, len(tokens))
    return builder(metadata, tokens, types)


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]) -> Core:
    rule = named_pre_tokenizer(metadata.get(_KEY + "pre"))
    merges = metadata.get(_KEY + "merges")
    if merges is None:
        raise TokenizerError(f"{_KEY}merges: missing, and a gpt2 vocabulary cannot do without")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        model = BPE(
            vocab,
            [_pair(merge) for merge in merges],
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=rule.whole_words,
        )
    except Exception as error:  # boundary: the library's type for a merge of unknown tokens
        raise TokenizerError(f"{_KEY}merges: {error}") from error
    core = Core(model)
    if (normalizer := rule.normalizer()) is not None:
        core.normalizer = normalizer
    core.pre_tokenizer = rule.pre_tokenizer()
    core.decoder = decoders.ByteLevel()
    _add_tokens(core, metadata, tokens, types)
    _frame(core, metadata, tokens, adds_bos=rule.adds_bos)
    return core


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]) -> Core:
    gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
    prefix = bool(metadata.get(_KEY + "add_space_prefix", not gemma))
    if gemma:
        # Gemma's files write its runs of spaces as spaces; its vocabulary has them as U+2581, which
        # is what the normalised text contains and what the merges must produce.
        types = [
            TokenType.NORMAL if _is_blank_run(token) else kind
            for token, kind in zip(tokens, types, strict=True)
        ]
        tokens = [SPACE_MARK * len(token) if _is_blank_run(token) else token for token in tokens]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise TokenizerError(f"{_KEY}tokens: tokens that differ only in how a space is written")
    given = metadata.get(_KEY + "merges")
    if given is not None:
        merges = [_pair(merge) for merge in given]
    elif gemma:
        # Gemma's scores do not follow the order its merges were learned in; the ids do.
        merges = _merges_by_rank(vocab, range(len(tokens)))
    else:
        scores = metadata.get(_KEY + "scores")
        if scores is None or len(scores) != len(tokens):
            raise TokenizerError(f"{_KEY}scores: missing, or not one per token")
        merges = _merges_by_rank(vocab, [-float(score) for score in scores])
    unknown = _named_id(metadata, "unknown")
    core = Core(
        BPE(
            vocab,
            merges,
            unk_token=tokens[unknown] if unknown is not None and unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in types,
        )
    )
    spaces = normalizers.Replace(" ", SPACE_MARK)
    # SentencePiece puts its space before whatever it is given, even before another space, and is
    # given each stretch between control tokens by itself. The models that still come with such a
    # vocabulary (Llama 2, Mistral 7B, TinyLlama, Phi 3) were trained on exactly that.
    core.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    core.decoder = decoders.Sequence(steps)
    _add_tokens(core, metadata, tokens, types)
    _frame(core, metadata, tokens, adds_bos=True)
    return core


def _is_blank_run(token: str) -> bool:
    return len(token) > 1 and not token.strip(" ")


def _merges_by_rank(vocab: Mapping[str, int], ranks: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that make each token, best rank (lowest) first.

    SentencePiece keeps no merges: it joins whichever neighbours form the best scored piece. Every
    way of cutting a piece into two pieces is therefore a merge of that piece's rank; among equal
    ranks the longer left half goes first, as the reference conversion has it.
    """
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocab.items():
        rank = ranks[token_id]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((rank, -len(left), -len(right), left, right))
    ranked.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(
    core: Core, metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]
) -> None:
    """Registers control tokens (special) and user-defined ones (matched whole, but ordinary)."""
    named = {_named_id(metadata, name) for name in _NAMED_IDS}
    added = []
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        special = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token_id in named
        if special or kind == TokenType.USER_DEFINED:
            added.append(AddedToken(token, normalized=False, special=special))
    core.add_tokens(added)


def _frame(core: Core, metadata: Mapping[str, Any], tokens: list[str], *, adds_bos: bool) -> None:
    """The post-processor that puts BOS and EOS around a text, as the file says."""
    single = ["$A"]
    frames: list[tuple[str, int]] = []
    for name, default, at in (("bos", adds_bos, 0), ("eos", False, len(single) + 1)):
        token_id = _named_id(metadata, name)
        if not metadata.get(f"{_KEY}add_{name}_token", default) or token_id is None:
            continue
        if token_id >= len(tokens):
            raise TokenizerError(
                f"{_KEY}{name}_token_id: {token_id} is outside the {len(tokens)} tokens"
            )
        single.insert(at, tokens[token_id])
        frames.append((tokens[token_id], token_id))
    if frames:
        core.post_processor = processors.TemplateProcessing(
            single=single, pair=[*single, "$B:1"], special_tokens=list(dict.fromkeys(frames))
        )


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get(_KEY + "tokens")
    if tokens is None or len(tokens) == 0:
        raise TokenizerError(f"{_KEY}tokens: missing or empty")
    # Some converters write empty strings for ids their vocabulary skips; each needs a spelling.
    named = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
    if len(set(named)) != len(named):
        seen: set[str] = set()
        for token_id, token in enumerate(named):
            if token in seen:
                raise TokenizerError(f"{_KEY}tokens: token {token_id} repeats {token!r}")
            seen.add(token)
    try:
        "".join(named).encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(f"{_KEY}tokens: a token is not valid UTF-8 ({error})") from error
    return named


def _types(metadata: Mapping[str, Any], count: int) -> Sequence[int]:
    types = metadata.get(_KEY + "token_type")
    if types is None:
        return [TokenType.NORMAL] * count
    if len(types) != count:
        raise TokenizerError(f"{_KEY}token_type: {len(types)} types for {count} tokens")
    return [int(kind) for kind in types]


def _pair(merge: str) -> tuple[str, str]:
    # Searching from 1 lets a merge's left half be a space itself.
    left, _, right = merge[1:].partition(" ")
    if not right:
        raise TokenizerError(f"{_KEY}merges: {merge!r} is not two tokens")
    return merge[0] + left, right


def _named_id(metadata: Mapping[str, Any], name: str) -> int | None:
    value = metadata.get(f"{_KEY}{name}_token_id")
    return None if value is None else int(value)
