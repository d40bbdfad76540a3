"""Threads copy what waits in a lane while the event loop appends to it."""

from __future__ import annotations

import gc
import threading
from collections import deque
from typing import cast

from parti.model.message import Message
from parti.worker.runners import _first


class _Restless:
    """Lets other threads run whenever it is collected, as finalizers in a user's code do."""

    def __del__(self) -> None:
        threading.Event().wait(0)


def test_a_copy_is_whole_although_the_loop_appends_in_the_middle_of_it() -> None:
    waiting: deque[Message] = deque(cast("list[Message]", list(range(1000))))
    done = threading.Event()

    def append() -> None:
        while not done.is_set():
            waiting.append(cast("Message", len(waiting)))
            if len(waiting) > 5000:
                waiting.pop()

    thread = threading.Thread(target=append)
    before = gc.get_threshold()
    gc.set_threshold(1)
    thread.start()
    try:
        for _ in range(300):
            ring: list[object] = [_Restless()]
            ring.append(ring)
            del ring
            assert cast("list[int]", _first(waiting, 16)) == list(range(16))
    finally:
        done.set()
        thread.join()
        gc.set_threshold(*before)
