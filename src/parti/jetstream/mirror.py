"""The hot mirror on the server: making, describing, trimming and deleting it (`parti.core.hot_mirror`)."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from parti.core.hot_mirror import ORIGIN, MirrorState
from parti.errors import ApiError, NotFound
from parti.jetstream.api import JetStreamApi

_NAME_IN_USE = 10058


class Mirror:
    """One mirror, by its name; it need not exist."""

    def __init__(self, api: JetStreamApi, name: str) -> None:
        self.name = name
        self._api = api

    async def state(self) -> MirrorState | None:
        """What its leader says of it; None when there is none."""
        try:
            return _state(await self._api.call(f"STREAM.INFO.{self.name}"))
        except NotFound:
            return None

    async def make(self, config: dict[str, Any]) -> None:
        """Make it; nothing happens when somebody has been faster."""
        try:
            await self._api.call(f"STREAM.CREATE.{self.name}", config)
        except ApiError as error:
            # The others ask for another start; whose mirror it is, its metadata tell.
            if error.code != _NAME_IN_USE:
                raise

    async def unread(self) -> tuple[int, ...]:
        """For each of its consumers, how many messages it has not delivered; of the first 256."""
        answer = await self._api.call(f"CONSUMER.LIST.{self.name}")
        return tuple(info["num_pending"] for info in answer.get("consumers") or ())

    async def trim(self, seq: int) -> None:
        """Drop everything below `seq`."""
        await self._api.call(f"STREAM.PURGE.{self.name}", {"seq": seq})

    async def delete(self) -> None:
        """Delete it with all its consumers; nothing happens when it is gone."""
        try:
            await self._api.call(f"STREAM.DELETE.{self.name}")
        except NotFound:
            return

    async def leave(self, consumer: str) -> None:
        """Delete a consumer of it, and the mirror itself when that was the last one."""
        try:
            await self._api.delete_consumer(self.name, consumer)
        except NotFound:
            pass
        state = await self.state()
        if state and not state.consumers:
            await self.delete()


def _state(answer: dict[str, Any]) -> MirrorState:
    config, state = answer["config"], answer["state"]
    age_s = (_moment(answer["ts"]) - _moment(state["first_ts"])).total_seconds() if state["messages"] else 0.0
    return MirrorState(
        first_seq=state["first_seq"],
        last_seq=state["last_seq"],
        messages=state["messages"],
        size=state["bytes"],
        age_s=age_s,
        origin_created=(config.get("metadata") or {}).get(ORIGIN, ""),
        start=(config.get("mirror") or {}).get("opt_start_seq", 1),
        consumers=state.get("consumer_count", 0),
    )


def _moment(text: str) -> datetime:
    """The server writes nanoseconds; datetime keeps microseconds."""
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", text))
