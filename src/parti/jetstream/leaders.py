"""Questions to a stream's leader: only its "there is no more" can be believed, a replica may lag."""

from __future__ import annotations

from typing import Any

from parti.errors import ApiError, NotFound
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.chunks import Wanted


def check_same(info: dict[str, Any], stream: str, created: str) -> None:
    """Raise NotFound unless this is the stream that was planned for."""
    if info["created"] != created:
        raise NotFound(10059, f"stream {stream!r} was deleted and made anew: its old messages are gone")


def leaders_next(client: BlockingClient, stream: str, seq: int, subjects: tuple[str, ...]) -> int | None:
    """The first sequence from `seq` on that the stream's leader holds on one of these subjects (none given: any)."""
    found = []
    for subject in subjects or (">",):
        try:
            answer = client.api(f"STREAM.MSG.GET.{stream}", {"seq": max(1, seq), "next_by_subj": subject})
        except NotFound:
            continue
        found.append(int(answer["message"]["seq"]))
    return min(found, default=None)


def nothing_left(client: BlockingClient, wanted: Wanted, seq: int, subjects: tuple[str, ...]) -> bool:
    """Whether the leader, and one that has the whole range, holds nothing more of it on these subjects."""
    following = leaders_next(client, wanted.stream, seq, subjects)
    if following is not None:
        return following >= wanted.end
    info = client.stream_info(wanted.stream)
    check_same(info, wanted.stream, wanted.created)
    last = int(info["state"]["last_seq"])
    if last < wanted.end - 1:
        raise ApiError(
            0,
            f"stream {wanted.stream!r} ends at {last} and was expected to reach {wanted.end - 1}: the server is "
            f"behind, or the stream was restored from an older copy; try again, or start over from its present end",
        )
    # Asked again after the check, because another server may have answered before it.
    following = leaders_next(client, wanted.stream, seq, subjects)
    return following is None or following >= wanted.end
