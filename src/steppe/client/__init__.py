"""How a server or a replica talks to an engine, wherever it runs: an asynchronous protocol, and the
implementation over an engine in this process.
"""

from steppe.client.local import LocalClient
from steppe.client.protocol import ClientHandle, EngineClient, ModelCard, ReplicaReport
from steppe.client.rate import ServiceRate
from steppe.client.text import LONG_TEXT, LocalText, TextService, WithText

__all__ = [
    "LONG_TEXT",
    "ClientHandle",
    "EngineClient",
    "LocalClient",
    "LocalText",
    "ModelCard",
    "ReplicaReport",
    "ServiceRate",
    "TextService",
    "WithText",
]
