"""How one request is sampled, what ends it, and what form its answer must have.

Values, checked where they are made (DESIGN section 3.2). ``steppe.request`` exports what callers
need of this.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

from steppe.errors import InvalidRequestError

__all__ = ["Guided", "SamplingParams", "checked_integer", "checked_number"]

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy."""
MAX_LOGPROBS = 50
"""Most alternatives per position, seed 002."""
MAX_LOGIT_BIAS = 1024
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_SEQUENCES = 128
MAX_GUIDE_BYTES = 128 * 1024
"""Longest guide, in bytes of UTF-8 (seed 002)."""
MAX_CHOICES = 4096
MAX_AFTER = 64


def checked_number(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> float:
    """Return ``value`` as a finite float inside [low, high], or (low, high] with ``open_low``."""
    # The usual types first: asking for the protocol takes longer than all the rest.
    if isinstance(value, bool) or not isinstance(value, (float, int, SupportsFloat)):
        raise InvalidRequestError(name, f"must be a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        raise InvalidRequestError(name, "must be a finite number") from None
    if not math.isfinite(number):
        raise InvalidRequestError(name, f"must be finite, not {number}")
    if number < low or number > high or (open_low and number == low):
        left = "(" if open_low else "["
        raise InvalidRequestError(name, f"must be in {left}{low:g}, {high:g}], not {number:g}")
    return number


def checked_integer(name: str, value: object, low: int, high: int | None = None) -> int:
    if isinstance(value, bool):
        raise InvalidRequestError(name, f"must be an integer, not {value!r}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequestError(name, f"must be an integer, not {value!r}") from None
    if number < low or (high is not None and number > high):
        bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidRequestError(name, f"must be {bound}, not {number}")
    return number


def checked_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError(name, f"must be true or false, not {value!r}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Guided:
    """The form that an answer must have (seed 002). Exactly one of the first five fields is given.

    ``json_object``: any JSON object. ``json_schema``: a JSON value that this JSON Schema (draft
    2020-12) accepts; a mapping or JSON text, kept as text, its properties in the order written.
    ``regex``: the whole text matches. ``grammar``: a Lark grammar with a rule ``start``, or a GBNF
    one (EBNF) with a rule ``root``. ``choice``: the text is one of these. Whether a grammar can be
    compiled is found out by the runtime that is asked to follow it.

    ``after``: the form begins behind the first such text in the answer, and what comes before is
    free. For a model that reasons first, the mark that ends its reasoning.

    Raises InvalidRequestError (``guided``).
    """

    json_object: bool = False
    json_schema: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    after: str | None = None

    def __post_init__(self) -> None:
        after: object = self.after
        if after is not None and not (
            isinstance(after, str) and after.isprintable() and 1 <= len(after) <= MAX_AFTER
        ):
            raise InvalidRequestError(
                "guided", f"after must be a printable string of 1 to {MAX_AFTER} characters"
            )
        checked_flag("guided", self.json_object)
        named = ("json_schema", "regex", "grammar", "choice")
        given = [name for name in named if getattr(self, name) is not None]
        if len(given) + self.json_object != 1:
            known = ", ".join(("json_object", *named))
            raise InvalidRequestError("guided", f"give exactly one of {known}")
        put = object.__setattr__
        if self.json_schema is not None:
            put(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            put(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            value: object = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidRequestError("guided", f"{name} must be a string")
        kind, text = self.source
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidRequestError("guided", f"{kind} is not valid Unicode") from None
        if size > MAX_GUIDE_BYTES:
            raise InvalidRequestError(
                "guided", f"{kind} has {size} bytes, at most {MAX_GUIDE_BYTES} are allowed"
            )

    @property
    def source(self) -> tuple[str, str]:
        """Which of the five fields is given, and its content as text."""
        if self.json_object:
            return "json_object", ""
        if self.choice is not None:
            return "choice", json.dumps(self.choice, ensure_ascii=False)
        for name in ("json_schema", "regex", "grammar"):
            value: object = getattr(self, name)
            if isinstance(value, str):
                return name, value
        raise AssertionError("a guide has one field")


def _schema_text(schema: object) -> str:
    try:
        if isinstance(schema, str):
            schema = json.loads(schema)
        elif isinstance(schema, Mapping):
            schema = dict(schema)
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise InvalidRequestError("guided", f"json_schema is not JSON: {reason}") from None
    if schema is True:
        return "{}"
    if schema is False:
        raise InvalidRequestError("guided", "json_schema false accepts nothing")
    if not isinstance(schema, dict):
        raise InvalidRequestError("guided", "json_schema must be a JSON object")
    return text


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str | bytes) or not isinstance(choices, Sequence):
        raise InvalidRequestError("guided", "choice must be a list of strings")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequestError("guided", f"choice must have 1 to {MAX_CHOICES} entries")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise InvalidRequestError("guided", "each choice must be a string, and not empty")
    return tuple(dict.fromkeys(choices))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it stops. Every field is per request, whatever else is in
    the batch.

    ``top_k`` 0 or -1 is off; ``temperature`` 0 (or below 1e-5) is greedy; ``max_tokens`` None means
    up to the context, and 0 scores the prompt only (needs ``prompt_logprobs``). ``logprobs`` k asks
    for the k most likely tokens per generated position, plus the sampled one; they are log-softmax
    of the model's own logits, before bias, penalties and temperature. ``seed`` None gets a fresh
    seed when the request is admitted. ``repetition_penalty`` counts prompt and output, the other
    two penalties the output only. ``min_tokens`` bans every stop id (not stop strings) until that
    many tokens exist. ``guided`` is the form that the answer must have: a stop id may then be
    sampled exactly where the answer may end, and nothing else can be where it must, whatever
    ``min_tokens`` says; a stop string still ends it anywhere.

    Raises InvalidRequestError naming the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    skip_special_tokens: bool = True
    include_stop: bool = False
    guided: Guided | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "temperature", checked_number("temperature", self.temperature, 0.0, 100.0))
        put(self, "top_p", checked_number("top_p", self.top_p, 0.0, 1.0, open_low=True))
        put(self, "top_k", max(0, checked_integer("top_k", self.top_k, -1, 2**31 - 1)))
        put(self, "min_p", checked_number("min_p", self.min_p, 0.0, 1.0))
        put(
            self,
            "repetition_penalty",
            checked_number(
                "repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True
            ),
        )
        put(
            self,
            "presence_penalty",
            checked_number("presence_penalty", self.presence_penalty, -2, 2),
        )
        put(
            self,
            "frequency_penalty",
            checked_number("frequency_penalty", self.frequency_penalty, -2, 2),
        )
        put(self, "logit_bias", self._checked_bias())
        if self.seed is not None:
            put(self, "seed", checked_integer("seed", self.seed, 0, 2**64 - 1))
        if self.max_tokens is not None:
            put(self, "max_tokens", checked_integer("max_tokens", self.max_tokens, 0))
        put(self, "min_tokens", checked_integer("min_tokens", self.min_tokens, 0))
        put(self, "stop", self._checked_stops())
        put(self, "stop_token_ids", self._checked_stop_ids())
        for name in ("ignore_eos", "skip_special_tokens", "include_stop"):
            checked_flag(name, getattr(self, name))
        guided: object = self.guided
        if guided is not None and not isinstance(guided, Guided):
            raise InvalidRequestError("guided", "must be a Guided")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                put(self, name, checked_integer(name, value, 0, MAX_LOGPROBS))
        put(self, "n", checked_integer("n", self.n, 1, MAX_SEQUENCES))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                "min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}"
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InvalidRequestError("max_tokens", "0 only scores a prompt: set prompt_logprobs")

    def _checked_bias(self) -> Mapping[int, float] | None:
        bias: object = self.logit_bias
        if bias is None or bias == {}:
            return None
        if not isinstance(bias, Mapping):
            raise InvalidRequestError("logit_bias", "must map token ids to numbers")
        if len(bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError("logit_bias", f"has more than {MAX_LOGIT_BIAS} entries")
        return {
            checked_integer(f"logit_bias[{key!r}]", key, 0): checked_number(
                f"logit_bias[{key!r}]", value, -100.0, 100.0
            )
            for key, value in bias.items()
        }

    def _checked_stops(self) -> tuple[str, ...]:
        stops: object = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, Sequence):
            raise InvalidRequestError("stop", "must be a string or a list of strings")
        if len(stops) > MAX_STOPS:
            raise InvalidRequestError("stop", f"has more than {MAX_STOPS} entries")
        for stop in stops:
            if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_LENGTH:
                raise InvalidRequestError(
                    "stop", f"each must be a string of 1 to {MAX_STOP_LENGTH} characters"
                )
        return tuple(dict.fromkeys(stops))

    def _checked_stop_ids(self) -> tuple[int, ...]:
        ids: object = self.stop_token_ids
        if isinstance(ids, str) or not isinstance(ids, Sequence):
            raise InvalidRequestError("stop_token_ids", "must be a list of token ids")
        if len(ids) > MAX_LOGIT_BIAS:
            raise InvalidRequestError("stop_token_ids", f"has more than {MAX_LOGIT_BIAS} entries")
        return tuple(dict.fromkeys(checked_integer("stop_token_ids", value, 0) for value in ids))

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken and no random number is drawn."""
        return self.temperature < GREEDY_TEMPERATURE

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequestError for a token id outside ``[0, vocab_size)``."""
        for token_id in self.logit_bias or ():
            if token_id >= vocab_size:
                raise InvalidRequestError(
                    f"logit_bias[{token_id}]", f"no such token, the vocabulary has {vocab_size}"
                )
        for token_id in self.stop_token_ids:
            if token_id >= vocab_size:
                raise InvalidRequestError(
                    "stop_token_ids", f"no token {token_id}, the vocabulary has {vocab_size}"
                )
