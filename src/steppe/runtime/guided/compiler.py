"""From what a request asks for to a grammar that is ready to run.

Compiling happens on the caller's thread, before a request is queued: a grammar that is no good is
an InvalidRequestError there, and costs nobody else anything. The compiled form travels with the
request (``PreparedGuided``), so that the actor never compiles.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from steppe.errors import InvalidRequestError, SubmitError
from steppe.request import Guided
from steppe.runtime.guided.limits import plainly_harmless
from steppe.runtime.guided.trial import tried
from steppe.runtime.guided.vocabulary import GrammarVocabulary

if TYPE_CHECKING:
    from collections.abc import Collection

    from llguidance import LLMatcher

    from steppe.text.tokenizer import Tokenizer

__all__ = ["CompiledGrammar", "GrammarCompiler", "PreparedGuided"]

COMPILE_SECONDS = 1
"""Processor time that a guide may take which is not plainly harmless."""
WAIT_SECONDS = 5.0
"""How long a guide waits for those before it: they are compiled one at a time, whoever asks."""
CACHED_GRAMMARS = 64

_Key = tuple[str, str, str]

JSON_FORM = {
    # Spaces and indented lines as models write them, and an end to both.
    "whitespace_pattern": r"\x20|\n[\x20\x09]{0,32}",
    "item_separator": ",",
    "key_separator": ":",
    # A keyword that cannot be enforced is refused: what is accepted is also valid.
    "lenient": False,
    "coerce_one_of": False,
}


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar over one vocabulary. Never changed; ``matcher`` may be copied on any thread."""

    vocabulary: GrammarVocabulary
    _pristine: LLMatcher

    def matcher(self) -> LLMatcher:
        """A new matcher at the start of the grammar."""
        return self._pristine.deep_copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedGuided(Guided):
    """A guide and its compiled grammar. Made of a checked guide: nothing is checked again."""

    compiled: CompiledGrammar = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        pass


class GrammarCompiler:
    """Compiles the guides of one model's requests. Any thread.

    The last ``CACHED_GRAMMARS`` results are kept, refusals among them. Nothing is loaded or built
    before the first guide comes.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._vocabulary: GrammarVocabulary | None = None
        self._cache: OrderedDict[_Key, CompiledGrammar | str] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._compile_lock = threading.Lock()

    def prepare(self, guided: Guided) -> PreparedGuided:
        """A guide with its grammar.

        Raises InvalidRequestError (``guided``) when it does not compile, SubmitError when too many
        others are being compiled or the system has no process to spare.
        """
        if isinstance(guided, PreparedGuided) and guided.compiled.vocabulary is self._vocabulary:
            return guided
        key = (guided.after or "", *guided.source)
        found = self._cached(key)
        if found is None:
            if not self._compile_lock.acquire(timeout=WAIT_SECONDS):
                raise SubmitError("queue_full", "too many grammars are waiting to be compiled")
            try:
                found = self._cached(key)
                if found is None:
                    found = self._compile(guided)
                    self._keep(key, found)
            finally:
                self._compile_lock.release()
        if isinstance(found, str):
            kind = guided.source[0]
            raise InvalidRequestError("guided", f"{kind} cannot be followed: {found}")
        given = {one.name: getattr(guided, one.name) for one in fields(Guided)}
        return PreparedGuided(**given, compiled=found)

    def _cached(self, key: _Key) -> CompiledGrammar | str | None:
        with self._cache_lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
            return found

    def _keep(self, key: _Key, result: CompiledGrammar | str) -> None:
        with self._cache_lock:
            self._cache[key] = result
            while len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)

    def _compile(self, guided: Guided) -> CompiledGrammar | str:
        import llguidance

        try:
            source = _grammar_source(guided)
        except ValueError as error:
            return str(error)
        if not plainly_harmless(guided):
            library = Path(llguidance.__file__).parent.parent
            try:
                wrong = tried(source, str(library), COMPILE_SECONDS)
            except OSError as error:
                raise SubmitError(
                    "queue_full", f"no process to try a grammar in: {error}"
                ) from error
            if wrong:
                return _shortened(wrong)
        if guided.after is not None:
            source = self._behind(guided.after, source)
        if self._vocabulary is None:
            self._vocabulary = GrammarVocabulary(self._tokenizer, self._vocab_size, self._end_ids)
        vocabulary = self._vocabulary
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(vocabulary.ll, source, log_level=0, limits=limits)
        first = matcher.compute_bitmask()
        if matcher.is_error():
            return _shortened(matcher.get_error())
        size = min(len(first), vocabulary.usable.nbytes)
        if not (
            matcher.is_accepting()
            or np.any(np.frombuffer(first[:size], "<u4") & vocabulary.usable[: size // 4])
        ):
            return "no text satisfies it"
        return CompiledGrammar(vocabulary, matcher)

    def _behind(self, mark: str, source: str) -> str:
        """The grammar ``source`` behind any text that ends with ``mark``, and a line or two."""
        given = json.loads(source) if source.startswith("{") else {"grammars": [{}]}
        body = given["grammars"][0] or {"lark_grammar": source}
        token_id = self._tokenizer.token_to_id(mark)
        if token_id is not None and self._tokenizer.is_special(token_id):
            free, tag = "free: /(?s:.*)/", f"<[{token_id}]>"
        else:
            free, tag = f"free[suffix={json.dumps(mark)}]: /(?s:.*)/", ""
        head = f"start: free {tag} GAP? @body\n{free}\nGAP: /\\n{{1,2}}/\n"
        return json.dumps({"grammars": [{"lark_grammar": head}, {**body, "name": "body"}]})


def _grammar_source(guided: Guided) -> str:
    """The guide as the library takes it. Raises ValueError for what has no such form."""
    from llguidance import LLMatcher, grammar_from

    kind, text = guided.source
    if kind == "json_object":
        kind, text = "json_schema", '{"type": "object"}'
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, overrides=JSON_FORM)  # type: ignore[arg-type]
    if kind == "regex":
        if (len(text) - len(text.rstrip("\\"))) % 2:
            raise ValueError("it ends with a backslash that escapes nothing")
        # In the library's grammar files, where it goes, a regex ends with its line.
        text = re.sub(r"(\\.)|\n", lambda found: found[1] or r"\x0A", text, flags=re.DOTALL)
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        # One terminal: as rules, every choice would be an item of its own in each step.
        choices = " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(text))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}\n")
    try:
        return grammar_from("grammar", text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _shortened(error: str) -> str:
    """What an error says, without the grammar that it quotes."""
    lines = error.strip().splitlines()
    said = [lines[0], *(line for line in lines[1:] if line.startswith("error: "))]
    line = " ".join(said)
    return line if len(line) <= 300 else line[:300] + "..."
