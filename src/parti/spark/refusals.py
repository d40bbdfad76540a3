"""Errors of parti as Spark shows them: one line, without the path that led to it.

Spark turns whatever a Python worker raises into text with a traceback. For a wrong option or a lost message that
hides the one line that helps. Other errors keep their traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from parti.errors import PartiError

_HIDES = "SPARK_HIDE_TRACEBACK"
"""Spark's worker looks at this when it reports an error, and ends right after."""


@contextmanager
def plainly() -> Iterator[None]:
    """Whatever parti raises inside, or in a function decorated with it, is shown by Spark as one line."""
    try:
        yield
    except PartiError:
        if _in_worker():
            os.environ[_HIDES] = "1"
        raise


def _in_worker() -> bool:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")
