"""Every setting of parti, in one schema, with the relations between them checked at construction.

Sources, strongest first: constructor arguments, environment `PARTI_<NAME>`, the keys of `parti.toml` (in the
current directory, or the file named by `PARTI_CONFIG` or `config_file`), the defaults of the schema. An empty
environment variable counts as unset. Relative paths start at the current directory.

What lives here: the fields (`schema`), what they demand of each other (`relations`), where values come from
(`sources`), reading them all with errors that say what to do (`loading`), and the page about them (`reference`).
May import `parti.setting_types`, `parti.core` and `parti.errors`.

Invariant guarded here: no secret (password, token, key, user info inside a URL) appears in an error, a
repr or a JSON dump of the settings.
"""

from __future__ import annotations

from parti.config.loading import load_settings
from parti.config.schema import Settings

__all__ = ["Settings", "load_settings"]
