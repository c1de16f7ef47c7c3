"""The named pre-tokenizers of GGUF files: how a text is cut before byte-level BPE merges run.

A GGUF names the rule (``tokenizer.ggml.pre``) and leaves it to the reader to know it. Listed are
the rules that we know exactly, each as its models' own ``tokenizer.json`` states it, including
what the name implies beside the cut: Unicode normalisation, whether whole words of the vocabulary
win over merges, and whether BOS is added when the file does not say. An unknown name is refused:
a guess would give a model ids that it was never trained on, without anything looking wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from steppe.errors import TokenizerError

__all__ = ["PRE_TOKENIZERS", "PreTokenizer", "named_pre_tokenizer"]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_MARKS}|{_BLANKS}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_MARKS}|{_BLANKS}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_PATHS}|{_BLANKS}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_PATHS}|{_BLANKS}"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One named rule.

    ``split`` is the regular expression whose matches stand alone; None means GPT-2's own rule.
    ``single_digits`` cuts every digit off first. ``nfc`` composes the text before anything else.
    ``whole_words`` takes a stretch that is in the vocabulary as one token, whatever the merges say.
    ``adds_bos`` is what holds when the file has no ``add_bos_token``.
    """

    split: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The rule as a ``tokenizers`` step, ending in the byte-level alphabet."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.split is not None:
            steps.append(pre_tokenizers.Split(Regex(self.split), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.split is None))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        """The Unicode normalisation that precedes the cut, if any."""
        return normalizers.NFC() if self.nfc else None


_GPT2_RULE = PreTokenizer()
_DIGITS_RULE = PreTokenizer(single_digits=True)
_LLAMA3_RULE = PreTokenizer(split=_LLAMA3, whole_words=True, adds_bos=True)
_QWEN2_RULE = PreTokenizer(split=_QWEN2, nfc=True)
_GPT4O_RULE = PreTokenizer(split=_GPT4O)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2_RULE,
    "phi-2": _GPT2_RULE,
    "mpt": _GPT2_RULE,
    "olmo": _GPT2_RULE,
    "smollm": _DIGITS_RULE,
    "starcoder": _DIGITS_RULE,
    "refact": _DIGITS_RULE,
    "codeshell": _DIGITS_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "dbrx": PreTokenizer(split=_LLAMA3),
    "smaug-bpe": PreTokenizer(split=_LLAMA3),
    "qwen2": _QWEN2_RULE,
    "qwen35": PreTokenizer(split=_QWEN35, nfc=True),
    "tekken": PreTokenizer(split=_TEKKEN, whole_words=True, adds_bos=True),
    "gpt-4o": _GPT4O_RULE,
    "llama4": _GPT4O_RULE,
}


def named_pre_tokenizer(name: str | None) -> PreTokenizer:
    """The rule of that name; ``TokenizerError`` listing the known ones if there is none."""
    rule = PRE_TOKENIZERS.get(name) if name is not None else None
    if rule is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        what = "names no pre-tokenizer" if name is None else f"names pre-tokenizer {name!r}"
        raise TokenizerError(
            f"tokenizer.ggml.pre: the file {what}; how its text is cut would be a guess. "
            f"Known: {known}"
        )
    return rule
