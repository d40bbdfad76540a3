"""Entry point of the `parti` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer
from typer.main import get_command

from parti.errors import PartiError
from parti.version import __version__

_COMMANDS = ("worker", "status", "workers", "plan", "move", "drain", "pause", "resume", "sim", "dev")
_MODULES = {"resume": "pause"}
"""Where a command lives, if not in the module of its name."""


def build_app(wanted: Sequence[str] = _COMMANDS) -> typer.Typer:
    """The command line with these commands; each is imported only when it is needed, because that takes a while."""
    app = typer.Typer(
        name="parti",
        help="Partition ownership on NATS JetStream.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_parti)
    for name in wanted:
        module = import_module(f"parti.cli.{_MODULES.get(name, name)}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name))
    return app


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
    asked = next(iter(arguments), "")
    app = build_app([asked] if asked in _COMMANDS else _COMMANDS)
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
