"""parti: partition ownership on NATS JetStream.

The public API is what this module exports, and nothing else:

    import parti

    app = parti.App(stream="DC", subject="dc.{tool}.{chamber}.completion")

    @app.handler
    async def handle(message: parti.Message) -> None:
        ...
"""

from parti.config import Settings
from parti.core.retry import HandlerTimeout, Reject, Retry
from parti.errors import PartiError
from parti.model.message import Message, MessageContext
from parti.model.partition import Partition, Template
from parti.version import __version__
from parti.worker.app import App
from parti.worker.worker import Worker

__all__ = [
    "App",
    "HandlerTimeout",
    "Message",
    "MessageContext",
    "PartiError",
    "Partition",
    "Reject",
    "Retry",
    "Settings",
    "Template",
    "Worker",
    "__version__",
]
