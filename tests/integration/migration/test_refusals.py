"""What makes no sense is refused with one line and exit code 2, and nothing is changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.migration.conftest import MakeScene

from parti.cli.main import main

PLAN = ("plan", "{module}")
SHADOW = ("run", "{module}", "--phase", "shadow")
REFUSED = [
    (PLAN, "say which consumers"),
    ((*PLAN, "--consumers", "old-{{partition}}", "--list", "x"), "say which consumers"),
    ((*PLAN, "--consumers", "orders"), "expected a name with {partition} in it once"),
    ((*PLAN, "--consumers", "{{partition}}-{{partition}}"), "expected a name with {partition} in it once"),
    ((*PLAN, "--consumers", "other-{{partition}}"), "no consumer fits 'other-{partition}'; the stream has 3"),
    ((*PLAN, "--list", "absent.txt"), "cannot be read"),
    ((*PLAN, "--list", "empty.txt"), "lists no consumer"),
    ((*PLAN, "--list", "words.txt"), "line 2: expected a consumer, or it and its partition"),
    ((*PLAN, "--list", "twice.txt"), "line 2: old-p0 is listed twice"),
    (("plan", "nowhere:app", "--consumers", "old-{{partition}}"), "there is no module"),
    ((*SHADOW,), "say which consumers"),
    ((*SHADOW, "--list", "missing.txt"), "consumers that are listed do not exist"),
    ((*SHADOW, "--consumers", "old-{{partition}}", "--workers", "1"), "one position for all of them"),
    (("run", "--phase", "shadow"), "needs MODULE:APP"),
    (("run",), "say what to do"),
    (("run", "--phase", "switch", "--rollback"), "say what to do"),
    (("run", "--abandon", "--rollback"), "say what to do"),
    (("run", "--abandon", "--phase", "cleanup"), "say what to do"),
    (("run", "--phase", "nonsense"), "nonsense"),
    (("run", "{module}", "--phase", "switch"), "leave out MODULE:APP"),
    (("run", "{module}", "--abandon"), "leave out MODULE:APP"),
    (("run", "--phase", "validate"), "bucket"),
    (("run", "--phase", "cleanup", "--yes"), "bucket"),
    (("run", "--rollback"), "bucket"),
    (("run", "--abandon", "--yes"), "bucket"),
    (("status",), "bucket"),
]


@pytest.mark.parametrize(("arguments", "expected"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
async def test_bad_input(make_scene: MakeScene, tmp_path: Path, arguments: tuple[str, ...], expected: str) -> None:
    scene = await make_scene(2)
    api, stream = scene.kit.api, scene.kit.stream
    for name in ("old-p0", "old-p1"):
        config = {"durable_name": name, "filter_subject": scene.kit.subject(name[4:]), "ack_policy": "explicit"}
        await api.put_consumer(stream, {"name": name, **config}, action="create")
    wide = {"name": "old-all", "durable_name": "old-all", "filter_subject": f"{scene.kit.root}.>"}
    await api.put_consumer(stream, {**wide, "ack_policy": "explicit"}, action="create")
    (tmp_path / "empty.txt").write_text("# nothing\n")
    (tmp_path / "words.txt").write_text("old-p0\nold-p1 p1 p2\n")
    (tmp_path / "twice.txt").write_text("old-p0 p0\nold-p0\n")
    (tmp_path / "missing.txt").write_text("old-p0\nold-p1\nold-p7\n")
    told = [argument.format(module=scene.module) for argument in arguments]
    if "one position" in expected:
        # Why it cannot be matched is what the plan shows; the refusal names the consumer.
        answer = await scene.does("plan", *told[1:2], *told[4:], code=1)
        assert expected in answer["unmatched"]["old-all"]
        expected = "consumers that are meant and have no partition of their own"
    assert expected in await scene.is_refused(*told)


@pytest.mark.parametrize(
    ("phases", "wrong", "expected"),
    [
        ([], ("--phase", "switch"), "it is not the time for 'switch'; expected"),
        ([], ("--phase", "cleanup", "--yes"), "it is not the time for 'cleanup'"),
        ([("--rollback",)], ("--phase", "validate"), "planned, or was rolled back"),
        ([("--phase", "validate", "--windows", "1", "--window", "0.1")], ("--phase", "cleanup"), "'cleanup'"),
        (
            [("--phase", "validate", "--windows", "1", "--window", "0.1")],
            ("--phase", "switch"),
            "no worker of the fleet is running",
        ),
    ],
)
async def test_phases_follow_one_another(
    make_scene: MakeScene, phases: list[tuple[str, ...]], wrong: tuple[str, ...], expected: str
) -> None:
    scene = await make_scene(2)
    async with scene.old_worker():
        await scene.does(*scene.shadow)
        for phase in phases:
            await scene.does("run", *phase)
        assert expected in await scene.is_refused("run", *wrong)


def test_a_server_that_cannot_be_reached(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "app_unreachable.py").write_text(
        "import parti\napp = parti.App(stream='S', subject='s.{p}', partitions=['a'], connect_timeout_s=0.2)\n"
        "app.handler(print)\n"
    )
    code = main(
        ["migrate", "plan", "app_unreachable:app", "--consumers", "x-{partition}", "--nats", "nats://127.0.0.1:1"]
    )
    said = capsys.readouterr()
    assert (code, said.out, len(said.err.splitlines())) == (2, "", 1)
