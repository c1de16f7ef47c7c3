"""Which requests may share a batch.

Every field of a request is classified here; a test fails on one that is not. Executions sample
every row with its own parameters, so they compare nothing; one that cannot names the fields that
must equal its founder's in ``batch_fields``.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from steppe.engine.metrics import StallReason

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from steppe.request import LLMGenerationRequest

__all__ = ["FIELD_CLASSES", "BatchCompatibility", "FieldClass"]


class FieldClass(Enum):
    """What a request field means to a batch."""

    PER_SEQUENCE = "per sequence"
    """Every row has its own. Compared only for an execution that says it cannot."""
    ENGINE = "engine"
    """For the engine; no execution sees a difference."""
    GUIDED = "guided"
    """Set on either side, it keeps a request from joining."""
    FOUNDER_ONLY = "founder only"
    """Likewise. Meant to stay empty."""


_PARAMS = (
    "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty logit_bias"
    " seed max_tokens min_tokens stop stop_token_ids ignore_eos logprobs prompt_logprobs"
    " skip_special_tokens include_stop guided"
)

FIELD_CLASSES: Mapping[str, FieldClass] = {
    **{f"params.{name}": FieldClass.PER_SEQUENCE for name in _PARAMS.split()},
    "prompt": FieldClass.PER_SEQUENCE,
    "messages": FieldClass.PER_SEQUENCE,
    "task": FieldClass.PER_SEQUENCE,
    "sequence_index": FieldClass.PER_SEQUENCE,
    "cache_lookup": FieldClass.PER_SEQUENCE,
    "cache_commit": FieldClass.PER_SEQUENCE,
    "cache_salt": FieldClass.PER_SEQUENCE,
    "params.n": FieldClass.ENGINE,
    "stream_channel": FieldClass.ENGINE,
    "caller": FieldClass.ENGINE,
    "priority": FieldClass.ENGINE,
    "queue_timeout": FieldClass.ENGINE,
    "first_token_timeout": FieldClass.ENGINE,
    "timeout": FieldClass.ENGINE,
    "requests": FieldClass.ENGINE,
}
"""The class of every field, ``params.`` before those of the sampling parameters."""


class BatchCompatibility:
    """Decides whether a request may join a founder's batch.

    ``batch_fields`` are compared, in the order of ``classes``; of ``params.seed`` only whether
    there is one. Floats are compared exactly.
    """

    def __init__(
        self,
        batch_fields: Collection[str] = (),
        classes: Mapping[str, FieldClass] = FIELD_CLASSES,
    ) -> None:
        self._compared = tuple(name for name in classes if name in batch_fields)
        self._guided = tuple(n for n, kind in classes.items() if kind is FieldClass.GUIDED)
        self._founder = tuple(n for n, kind in classes.items() if kind is FieldClass.FOUNDER_ONLY)
        self.trivial = not (self._compared or self._guided or self._founder)
        """Nothing can ever keep a request from joining."""

    def first_difference(self, one: LLMGenerationRequest, other: LLMGenerationRequest) -> str:
        """The first compared field in which two requests differ; empty if they are compatible."""
        for name in self._compared:
            mine, theirs = _value(one, name), _value(other, name)
            if name == "params.seed":
                mine, theirs = mine is None, theirs is None
            if mine != theirs:
                return name
        return ""

    def obstacle(
        self, founder: LLMGenerationRequest, head: LLMGenerationRequest
    ) -> StallReason | None:
        """Why ``head`` may not join ``founder``'s batch; None if it may."""
        if self.first_difference(founder, head):
            return StallReason.INCOMPATIBLE
        for names, reason in (
            (self._guided, StallReason.GUIDED),
            (self._founder, StallReason.FOUNDER_ONLY),
        ):
            if any(_value(founder, name) or _value(head, name) for name in names):
                return reason
        return None


def _value(request: LLMGenerationRequest, name: str) -> object:
    owner, _, last = name.rpartition(".")
    value: object = getattr(getattr(request, owner) if owner else request, last)
    return value
