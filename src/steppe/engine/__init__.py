"""The request engine (seed 000): many callers, one thread that owns the runtime."""

from steppe.engine.config import EngineConfig, EngineHealth, ShutdownMode
from steppe.engine.handle import RequestHandle
from steppe.engine.metrics import EngineMetrics
from steppe.engine.protocol import SteppedRuntime
from steppe.engine.record import TerminalStatus
from steppe.engine.request_engine import RequestEngine

__all__ = [
    "EngineConfig",
    "EngineHealth",
    "EngineMetrics",
    "RequestEngine",
    "RequestHandle",
    "ShutdownMode",
    "SteppedRuntime",
    "TerminalStatus",
]
