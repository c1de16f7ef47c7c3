"""What a runtime has done so far (seed 002). Plain counters, written by the actor thread only."""

from __future__ import annotations

from dataclasses import dataclass

from steppe.stepping.cache_metrics import ContextCacheMetrics

__all__ = [
    "ContextCacheMetrics",
    "LLMGenerationMetrics",
    "LLMPrefillMetrics",
    "MultimodalMetrics",
    "SpecDecodeGenerationMetrics",
]


@dataclass(slots=True)
class LLMPrefillMetrics:
    """Prompt tokens: taken from the cache, computed, pruned away; and prompts completed."""

    reused_tokens: int = 0
    computed_tokens: int = 0
    pruned_tokens: int = 0
    total_runs: int = 0


@dataclass(slots=True)
class LLMGenerationMetrics:
    """Tokens generated, and steps that generated any."""

    generated_tokens: int = 0
    total_steps: int = 0


@dataclass(slots=True)
class SpecDecodeGenerationMetrics:
    """Verification steps and the fate of draft tokens. All zero without a draft."""

    total_iterations: int = 0
    total_generated_tokens: int = 0
    proposed_draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(slots=True)
class MultimodalMetrics:
    """Media seen. All zero without a multimodal runner."""

    images: int = 0
    image_tokens: int = 0
    audios: int = 0
    audio_tokens: int = 0
