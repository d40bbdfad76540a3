"""A real nats-server as a child process, for development, tests and benchmarks.

What lives here: finding the binary (`binary`), its private directory (`rundir`), its life as a child process
(`child`, `launcher`), questions to its monitoring port (`monitor`), one server (`server`) and several with routes
between them (`cluster`), both of which are used as blocks (`blocks`).

May import: the standard library and `parti.errors`. Never a NATS client: being ready must not need credentials.

Invariant: whatever starts here ends with this Python process and listens on loopback only. A normal exit stops the
servers and removes their temporary directories; after a SIGKILL the kernel ends the servers (Linux) and the next
start removes the directories. Production servers are run by other means.
"""

from parti.embedded.binary import MIN_SERVER_VERSION, Binary, find_binary
from parti.embedded.cluster import Cluster
from parti.embedded.server import Server

__all__ = ["MIN_SERVER_VERSION", "Binary", "Cluster", "Server", "find_binary"]
