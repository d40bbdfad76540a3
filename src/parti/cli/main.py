"""Entry point of the `parti` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.main import get_command

from parti.cli.streams import Streams, is_service
from parti.errors import PartiError
from parti.model.safe_text import one_line
from parti.version import __version__

_COMMANDS = {
    "worker": "Run a worker: start the same command as often as you like, and the workers share the partitions.",
    "status": "Show the fleet on one screen: rebalancer, workers, partitions, and whether all is well.",
    "top": "Show the fleet at work until q or Ctrl-C: rates, messages in hand, lags, handler times, failures, moves.",
    "console": "Show the fleet in a browser until Ctrl-C: partitions, workers, lags, moves, dead letters, jobs.",
    "workers": "List the workers of the fleet, or show one of them with its partitions.",
    "partitions": "List the partitions: who owns each, its fence token, its position, and how many messages wait.",
    "explain": "Tell the story of one partition: who owned it when, why it moved, where its position is, what waits.",
    "plan": "Show what would move, and why, if workers joined or left.",
    "move": "Move partitions to a worker, at once, and keep them there.",
    "drain": "Move everything away from workers, at once, and give them nothing more.",
    "pause": "Stop planned moves between live workers, or let nobody handle certain partitions.",
    "resume": "Take back what 'parti pause' has ordered: without partitions for moves, with partitions for these.",
    "dlq": "Look at dead letters, send them back to their stream, remove them.",
    "jobs": "Run heavy jobs under a weighted scheduler, and look at them.",
    "priority": "Look at priority groups of consumers, unpin a client, watch switches.",
    "pipeline": "Take a stream into the tables of a lake, with Spark.",
    "replay": "Hand a backlog to Spark and back, or read history again into a table.",
    "audit": "Check from the stream and the ledger whether the fleet kept its promises.",
    "migrate": "Move from one durable consumer per partition to one per worker, without loss, and back.",
    "doctor": "Look at server, account, stream, bucket, permissions, clock, Java and leftovers, and say what to do.",
    "perms": "Print the permissions that users of each role need on the server, and no others.",
    "alerts": "Write rules for Prometheus and dashboards for Grafana.",
    "sim": "Run seeded simulations of whole fleets and check what parti promises.",
    "bench": "Measure how fast messages are published and handled here, and how that compares with nats-py's fetch.",
    "init": "Write a commented parti.toml and a handler that runs at once, and say which three commands come next.",
    "dev": "Tools for development on this machine.",
}
"""What `parti --help` says of each command: the first sentence of its own help."""
_MODULES = {"resume": "pause"}
"""Where a command lives, if not in the module of its name."""
_MOST_SAID = 4_000
"""Characters of an error."""
_COMPLETION = "_PARTI_COMPLETE"
"""Set by a shell that wants to complete a command line; which one, only the commands know."""


def build_app(wanted: Collection[str] = _COMMANDS) -> typer.Typer:
    """The command line; other commands than these are listed, but not imported, because that takes a while."""
    app = typer.Typer(
        name="parti",
        help="Partition ownership on NATS JetStream.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_parti)
    for name, summary in _COMMANDS.items():
        if name not in wanted:
            app.command(name, help=summary)(_only_listed)
            continue
        module = import_module(f"parti.cli.{_MODULES.get(name, name)}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name))
    return app


def build_command(wanted: Collection[str] = _COMMANDS) -> Any:
    """The same, ready to run, with help that fits a terminal of any width."""
    command = get_command(build_app(wanted))
    _tidy(command)
    return command


def _tidy(command: Any) -> None:
    # Typer shows a type behind flags, as if they took a value, and keeps the line breaks of docstrings.
    for parameter in command.get_params(typer.Context(command)):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    command.help = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    for each in getattr(command, "commands", {}).values():
        _tidy(each)


def _only_listed() -> None:
    raise AssertionError("this command was not imported")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"parti {__version__}")
        raise typer.Exit


def _parti(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    # The options of `parti` itself; the work is done by its commands.
    pass


def main(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; every error becomes one line on stderr."""
    asked = next((argument for argument in arguments if not argument.startswith("-")), "")
    try:
        # Inside, because importing a command takes long enough for a Ctrl-C.
        command = build_command(_COMMANDS if _COMPLETION in os.environ else [asked])
        code = command.main(args=list(arguments), prog_name="parti", standalone_mode=False)
    except PartiError as error:
        return _complain(str(error))
    except typer.Abort:
        return _complain("interrupted", code=130)
    except typer.Exit as leaving:
        return leaving.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return _refuse(" ".join(message().split()).rstrip("."), getattr(error, "ctx", None))
    return code if isinstance(code, int) else 0


def _refuse(text: str, context: typer.Context | None) -> int:
    if not text:
        return 2  # called without a command: the help has been printed already
    return _complain(f"{text}; see '{context.command_path if context else 'parti'} --help'")


def _complain(text: str, code: int = 2) -> int:
    # An error from the user's own module may span lines.
    typer.echo(f"parti: {one_line(text, _MOST_SAID)}", err=True)
    return code


def run() -> None:
    """Run the command line of this process."""
    arguments = sys.argv[1:]
    streams = Streams(service=is_service([each for each in arguments if not each.startswith("-")]))
    streams.install()
    sys.exit(streams.finish(main(arguments)))


if __name__ == "__main__":
    run()
