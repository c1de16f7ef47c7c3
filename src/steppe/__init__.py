"""Steppe: a stepped LLM inference engine.

A runtime advances many generations one typed step at a time, and a request engine owns that
runtime from one thread. The names importable from here are the public ones.
"""

from steppe.engine.config import EngineConfig, ShutdownMode
from steppe.engine.handle import RequestHandle
from steppe.engine.metrics import EngineMetrics
from steppe.engine.record import TerminalStatus
from steppe.engine.request_engine import RequestEngine
from steppe.errors import (
    BackendError,
    BackpressureError,
    CacheFileError,
    ChatTemplateError,
    CheckpointError,
    CircuitOpenError,
    ConfigError,
    ContentFilteredError,
    ContextLengthError,
    CredentialsError,
    DeadlineExceededError,
    EngineDirectoryError,
    EngineFailedError,
    ExecutionError,
    ExecutionLostError,
    InvalidRequestError,
    LoadTimeoutError,
    ModelError,
    ModelNotFoundError,
    NetworkError,
    RateLimitedError,
    ReplicaError,
    ReplicaLostError,
    RequestCancelledError,
    RequestFailedError,
    SteppeError,
    SubmitError,
    TokenizerError,
    UnsupportedModelError,
    UnsupportedRequestError,
    UpstreamError,
    UpstreamTimeoutError,
)
from steppe.llm import LLM
from steppe.request import (
    FinishReason,
    Guided,
    LLMGenerationRequest,
    LLMGenerationResponse,
    SamplingParams,
    SequenceOutput,
    TokenLogprob,
    Usage,
)
from steppe.streaming import StreamChannel, StreamChunk

__version__ = "0.1.0.dev0"

__all__ = [
    "LLM",
    "BackendError",
    "BackpressureError",
    "CacheFileError",
    "ChatTemplateError",
    "CheckpointError",
    "CircuitOpenError",
    "ConfigError",
    "ContentFilteredError",
    "ContextLengthError",
    "CredentialsError",
    "DeadlineExceededError",
    "EngineConfig",
    "EngineDirectoryError",
    "EngineFailedError",
    "EngineMetrics",
    "ExecutionError",
    "ExecutionLostError",
    "FinishReason",
    "Guided",
    "InvalidRequestError",
    "LLMGenerationRequest",
    "LLMGenerationResponse",
    "LoadTimeoutError",
    "ModelError",
    "ModelNotFoundError",
    "NetworkError",
    "RateLimitedError",
    "ReplicaError",
    "ReplicaLostError",
    "RequestCancelledError",
    "RequestEngine",
    "RequestFailedError",
    "RequestHandle",
    "SamplingParams",
    "SequenceOutput",
    "ShutdownMode",
    "SteppeError",
    "StreamChannel",
    "StreamChunk",
    "SubmitError",
    "TerminalStatus",
    "TokenLogprob",
    "TokenizerError",
    "UnsupportedModelError",
    "UnsupportedRequestError",
    "UpstreamError",
    "UpstreamTimeoutError",
    "Usage",
]
