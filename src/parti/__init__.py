"""parti: partition ownership on NATS JetStream.

The public API is what this module exports, and nothing else:

    import parti

    app = parti.App(stream="DC", subject="dc.{tool}.{chamber}.completion")

    @app.handler
    async def handle(message: parti.Message) -> None:
        ...

Names are loaded when they are first used: the pytest plugin is imported by every pytest run on a machine that has
parti installed, and must not cost a second there.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from parti.version import __version__

if TYPE_CHECKING:
    from parti import jobs as jobs
    from parti.app.app import App
    from parti.app.worker import Worker
    from parti.config import Settings
    from parti.coordination.hooks import WorkerConsumerUpdater, current_worker_id
    from parti.coordination.manager import Manager
    from parti.coordination.sources import Callback, Discovered, FromKey, Static
    from parti.core.fleet_view import FleetState
    from parti.core.retry import HandlerTimeout, Reject, Retry
    from parti.errors import PartiError
    from parti.model.mapping import SubjectMapping
    from parti.model.message import Message, MessageContext
    from parti.model.partition import Partition, Template
    from parti.strategies.interface import Slot, Strategy

__all__ = [
    "App",
    "Callback",
    "Discovered",
    "FleetState",
    "FromKey",
    "HandlerTimeout",
    "Manager",
    "Message",
    "MessageContext",
    "PartiError",
    "Partition",
    "Reject",
    "Retry",
    "Settings",
    "Slot",
    "Static",
    "Strategy",
    "SubjectMapping",
    "Template",
    "Worker",
    "WorkerConsumerUpdater",
    "__version__",
    "current_worker_id",
]

_HOMES = {
    "App": "parti.app.app",
    "Callback": "parti.coordination.sources",
    "Discovered": "parti.coordination.sources",
    "FleetState": "parti.core.fleet_view",
    "FromKey": "parti.coordination.sources",
    "HandlerTimeout": "parti.core.retry",
    "Manager": "parti.coordination.manager",
    "Message": "parti.model.message",
    "MessageContext": "parti.model.message",
    "PartiError": "parti.errors",
    "Partition": "parti.model.partition",
    "Reject": "parti.core.retry",
    "Retry": "parti.core.retry",
    "Settings": "parti.config",
    "Slot": "parti.strategies.interface",
    "Static": "parti.coordination.sources",
    "Strategy": "parti.strategies.interface",
    "SubjectMapping": "parti.model.mapping",
    "Template": "parti.model.partition",
    "Worker": "parti.app.worker",
    "WorkerConsumerUpdater": "parti.coordination.hooks",
    "current_worker_id": "parti.coordination.hooks",
}


def __getattr__(name: str) -> Any:
    if name == "jobs":
        return import_module("parti.jobs")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'parti' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
