"""Entry point of the `parti` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from parti.cli import dev, drain, move, pause, plan, status, worker, workers
from parti.errors import PartiError
from parti.version import __version__

app = typer.Typer(
    name="parti",
    help="Partition ownership on NATS JetStream.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("worker")(worker.worker)
app.command("status")(status.status)
app.command("workers")(workers.workers)
app.command("plan")(plan.plan)
app.command("move")(move.move)
app.command("drain")(drain.drain)
app.command("pause")(pause.pause)
app.command("resume")(pause.resume)
app.add_typer(dev.app, name="dev")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"parti {__version__}")
        raise typer.Exit


@app.callback()
def _parti(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    # The options of `parti` itself; the work is done by its commands.
    pass


def main(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; every error becomes one line on stderr."""
    try:
        code = get_command(app).main(args=list(arguments), prog_name="parti", standalone_mode=False)
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
    typer.echo(f"parti: {' '.join(text.split())}", err=True)
    return code


def run() -> None:
    """Run the command line of this process."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
