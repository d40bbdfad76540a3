"""Bad input to every command of the command line: one clear line on stderr, exit code 2, nothing changed.

The table names each command. A new one fails the first test here until it is in the table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Kit, Record
from tests.integration.operations.operators import FLEET, Operator
from typer.main import get_command

from parti.cli.main import build_app, main
from parti.jetstream.kv import Bucket

NOWHERE = "nats://127.0.0.1:1"
APP = """
import parti

app = parti.App(stream="S", subject="s.{p}")
jobs = parti.jobs.JobApp(stream="S", subject="s.*")


@app.handler
@jobs.handler
async def handle(message):
    pass


def rows(message):
    return {}
"""


@dataclass(frozen=True)
class Typed:
    """How a command is typed in good order, and how not."""

    good: str = ""
    """Arguments with which it would go to a server; those that are never asked for one say so below."""
    server: bool = True
    settings: bool = True
    """Whether it reads parti.toml."""
    wrong: tuple[tuple[str, str], ...] = ()
    """Arguments that are refused beside a running fleet, and what is said of them."""


WORKER, PARTITION = "there is no worker 'wroker-0'; did you mean worker-0?", "there is no partition 'p00'"
UNREADABLE = (("--bucket nowhere", "bucket 'nowhere' does not exist"),)
LETTERS = (("--stream nowhere", "there is no dead-letter stream 'nowhere'"),)
SERVERLESS: dict[str, Any] = {"server": False, "settings": False}

COMMANDS: dict[str, Typed] = {
    "worker": Typed(
        "app:app",
        wrong=(
            ("nowhere:app", "there is no module 'nowhere' here"),
            ("app:nothing", "has nothing named 'nothing'"),
            ("broken:app", "fails on import: SyntaxError"),
            ("app:app --processes 0", "'--processes'"),
        ),
    ),
    "status": Typed(wrong=(*UNREADABLE, ("--watch", "draws on a terminal"))),
    "top": Typed("--once", wrong=(("--once --bucket nowhere", "does not exist"), ("", "draws on a terminal"))),
    "workers": Typed(wrong=(*UNREADABLE, ("wroker-0", WORKER))),
    "partitions": Typed(
        wrong=(
            *UNREADABLE,
            ("--owner wroker-0", WORKER),
            ("--unowned --owner worker-0", "exclude each other"),
            ("--limit 0", "'--limit'"),
        )
    ),
    "explain": Typed("p0", wrong=(("p0 --bucket nowhere", "bucket 'nowhere' does not exist"), ("p00", PARTITION))),
    "plan": Typed(
        wrong=(
            *UNREADABLE,
            ("--leave wroker-0", WORKER),
            ("--join -1", "'--join'"),
            ("--strategy x", "unknown strat"),
        )
    ),
    "move": Typed(
        "p0 --to worker-0",
        wrong=(("p0 --to wroker-0", WORKER), ("p00 --to worker-0", PARTITION), ("p0", "--to WORKER, or --auto")),
    ),
    "drain": Typed("worker-0", wrong=(("wroker-0", WORKER), ("worker-0 --bucket nowhere", "does not exist"))),
    "pause": Typed(wrong=(("p00", PARTITION), *UNREADABLE)),
    "resume": Typed(wrong=(("p00", PARTITION), *UNREADABLE)),
    "dlq ls": Typed(
        wrong=(*LETTERS, ("--partition p00", "no dead letters of partition 'p00'"), ("--limit 0", "limit"))
    ),
    "dlq show": Typed("1", wrong=(("1 --stream nowhere", "no dead-letter stream"), ("77", "no letter 77"))),
    "dlq replay": Typed(
        "1 --yes",
        wrong=(
            ("--partition p00 --yes", "no dead letters of partition 'p00'"),
            ("77 --yes", "no letter 77"),
            ("--yes", "say which dead letters"),
        ),
    ),
    "dlq purge": Typed(
        "1 --yes",
        wrong=(("--partition p00 --yes", "no dead letters of partition 'p00'"), ("77 --yes", "no letter 77")),
    ),
    "jobs run": Typed("app:jobs", wrong=(("nowhere:jobs", "no module 'nowhere'"), ("app:app", "not a parti.jobs"))),
    "jobs ls": Typed(wrong=(("--state asleep", "expected one of"), ("", "no job worker has ever run"))),
    # It refuses to draw before it asks for anything.
    "jobs top": Typed(server=False, settings=False, wrong=(("", "draws on a terminal"),)),
    "jobs cancel": Typed("1", wrong=(("1", "no job worker has ever run"), ("1 --timeout -1", "'--timeout'"))),
    "jobs retry": Typed("1", wrong=(("1", "no job worker has ever run"),)),
    "priority status": Typed(wrong=(("NOPE", "NOPE"),)),
    "priority unpin": Typed("S C", wrong=(("NOPE C", "NOPE"),)),
    "priority watch": Typed(wrong=(("NOPE", "NOPE"),)),
    "pipeline run": Typed("--once --lake lake --stream S", wrong=(("sideways --lake lake --stream S", "sideways"),)),
    # Without a server it still shows what is in the lake, and ends with 1.
    "pipeline status": Typed("--lake lake --stream S", server=False, wrong=(("--lake lake", "stream"),)),
    "pipeline compact": Typed("--lake lake", server=False),
    "replay run": Typed("app:app --all", wrong=(("nowhere:app --all", "no module 'nowhere'"),)),
    "replay table": Typed(
        "--stream S --handler app:rows --output out --schema a", wrong=(("--stream S", "'--handler'"),)
    ),
    "audit": Typed(
        "--stream S",
        wrong=(("--from yesterday --stream S", "yesterday"), ("--stream S --metrics no/x.prom", "is no file in a")),
    ),
    "alerts": Typed(
        "new",
        **SERVERLESS,
        wrong=(("app.py/below", "cannot be written to"), ("new --latency-p95 0.3", "0.3 does not work")),
    ),
    "console": Typed(
        "--port 0",
        wrong=(
            ("--port 0 --bucket nowhere", "does not exist"),
            ("--host 0.0.0.0", "nobody would be asked for a secret"),
            ("--port 70000", "less than or equal to 65535"),
        ),
    ),
    "migrate plan": Typed(
        "app:app --consumers s-{partition}",
        wrong=(
            ("nowhere:app --consumers s-{partition}", "no module 'nowhere'"),
            ("app:app --consumers s-{partition}", "stream 'S' does not exist"),
            ("app:app --list nowhere.txt", "nowhere.txt"),
        ),
    ),
    "migrate run": Typed(
        "app:app --consumers s-{partition} --phase shadow --yes",
        wrong=(("--phase shadow", "needs MODULE:APP"), ("--phase sideways", "sideways"), ("", "--phase")),
    ),
    "migrate status": Typed(wrong=UNREADABLE),
    "doctor": Typed(wrong=(("--stream NOPE", "there is no stream 'NOPE'"), ("--role king", "expected one of"))),
    "sim": Typed(**SERVERLESS, wrong=(("--bug beetle", "expected one of"), ("--seeds 0", "'--seeds'"))),
    "bench": Typed(wrong=(("--messages 5", "'--messages'"), ("--size 0", "'--size'"))),
    "perms": Typed(
        "--stream S --subject s.>",
        server=False,
        wrong=(("--stream S --role king", "expected one of"), ("--stream A.B", "expected a stream name")),
    ),
    "init": Typed("new", server=False, wrong=(("app.py/below", "cannot be written to"),)),
    "dev demo": Typed(
        **SERVERLESS, wrong=(("--workers 0", "expected 2 to 8"), ("--report no/where.html", "no directory"))
    ),
    "dev server": Typed(**SERVERLESS, wrong=(("--nodes 2", "expected 1 or 3"), ("--port 70000", "expected 1 to"))),
}


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from leaves(each, (*path, name))
    else:
        yield " ".join(path), command


def everything() -> dict[str, Any]:
    return dict(leaves(get_command(build_app())))


def test_every_command_is_in_the_table() -> None:
    assert set(COMMANDS) == set(everything())


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """What a command says that must refuse: exit code 2, one line on stderr, nothing on stdout."""
    capsys.readouterr()
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), (arguments, code, out, err)
    assert len(err.splitlines()) == 1, (arguments, err)
    assert err.startswith("parti: "), (arguments, err)
    assert "Traceback" not in err
    return err


@pytest.fixture
def in_a_directory(no_settings_of_this_machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "broken.py").write_text("def (")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PARTI_CONNECT_TIMEOUT_S", "0.15")
    return tmp_path


@pytest.mark.parametrize("name", [name for name, typed in COMMANDS.items() if typed.server])
def test_a_server_that_cannot_be_reached(name: str, in_a_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, [*name.split(), *COMMANDS[name].good.split(), "--nats", NOWHERE])
    assert "127.0.0.1:1" in said
    assert not (in_a_directory / "lake").exists()


def test_a_malformed_settings_file(in_a_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (in_a_directory / "parti.toml").write_text("nats = [")
    for name in [name for name, typed in COMMANDS.items() if typed.settings]:
        said = refused(capsys, [*name.split(), *COMMANDS[name].good.split()])
        assert "parti.toml is not valid TOML" in said, name
    (in_a_directory / "parti.toml").write_text("lease_ttl_s = 'soon'")
    for name in [name for name, typed in COMMANDS.items() if typed.settings and typed.server]:
        said = refused(capsys, [*name.split(), *COMMANDS[name].good.split()])
        assert "lease_ttl_s" in said, name


def test_an_option_that_does_not_exist(in_a_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, typed in COMMANDS.items():
        assert "--sideways" in refused(capsys, [*name.split(), *typed.good.split(), "--sideways"])


async def test_names_that_nobody_has_beside_a_running_fleet(
    kit: Kit,
    operator: Operator,
    in_a_directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PARTI_CONNECT_TIMEOUT_S", "20")  # there is a server, on a machine that may be busy
    places = {"--nats": kit.url, "--bucket": f"b{kit.root}"}
    async with kit.app(Record().handle, ["p0", "p1", "p2"], **FLEET).running():
        await operator.all_is_well(1)
        before, unclear = await kit.api.stream_names(), []
        orders = await Bucket(kit.api, f"b{kit.root}").get("orders")
        for name, command in everything().items():
            takes = {option for parameter in command.params for option in parameter.opts}
            for line, reason in COMMANDS[name].wrong:
                arguments = [*name.split(), *line.split()]
                for option, value in places.items():
                    arguments += [option, value] if option in takes and option not in arguments else []
                said = await asyncio.to_thread(refused, capsys, arguments)
                unclear += [(arguments, said)] if reason not in said else []
        assert unclear == []
        assert await Bucket(kit.api, f"b{kit.root}").get("orders") == orders
        assert await kit.api.stream_names() == before
        claims = (await operator.records()).claims
        assert {claim.owner for claim in claims.values()} == {"worker-0"}
