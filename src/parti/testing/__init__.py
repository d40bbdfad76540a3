"""Fixtures that give tests a real NATS server.

What lives here: `plugin`, which pytest loads by itself wherever parti is installed.

May import: pytest and `parti.embedded`, the latter only inside fixtures. The plugin is loaded by every pytest run of
every project that has parti installed, so loading it must cost nothing and start nothing.

Invariant: what a fixture starts is gone when its scope ends.
"""
