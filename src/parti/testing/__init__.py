"""What tests of apps need: real servers, an app inside the test, and interruptions at each await of its handler.

What lives here: `plugin`, which pytest loads by itself wherever parti is installed. Its fixtures `nats_server` and so
on start servers; `parti_run` (`Runner`, `Run`) runs an app inside a test, on workers (`member`) that reach the server
through a `link` which can be cut; a `lookout` sees the fleet's records change; `steps` drives a handler from await to
await, and `parti_every_await` (`exploration`) runs a test once for each of them.

May import: pytest and everything of parti, but only inside fixtures. The plugin is loaded by every pytest run of
every project that has parti installed, so loading it must cost nothing and start nothing.

Invariant: what a fixture starts is gone when its scope ends.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parti.testing.exploration import BrokenError, EveryAwait, Exploration, Failure, Runner
    from parti.testing.member import Call
    from parti.testing.run import DeadLetter, Fault, Run
    from parti.testing.steps import END, START, Point

__all__ = [
    "END",
    "START",
    "BrokenError",
    "Call",
    "DeadLetter",
    "EveryAwait",
    "Exploration",
    "Failure",
    "Fault",
    "Point",
    "Run",
    "Runner",
]

_HOMES = {
    "END": "steps",
    "START": "steps",
    "BrokenError": "exploration",
    "Call": "member",
    "DeadLetter": "run",
    "EveryAwait": "exploration",
    "Exploration": "exploration",
    "Failure": "exploration",
    "Fault": "run",
    "Point": "steps",
    "Run": "run",
    "Runner": "exploration",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'parti.testing' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"parti.testing.{home}"), name)
    return value
