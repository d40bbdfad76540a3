"""`parti init`: a settings file in which every setting is explained, and an app that runs at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from pydantic import SecretStr

from parti.cli.control import listed, open_console, print_json
from parti.cli.options import JsonOption
from parti.config import Settings, load_settings
from parti.config.reference import settings_sections
from parti.config.sources import DEFAULT_CONFIG_FILE
from parti.errors import ConfigError

MODULE = "handlers"
_DEFAULT_PORT = 4222
_LOCAL = {"127.0.0.1", "localhost", "::1"}
_SECRETS = {"password", "token", "owner_token", "system_password"}
_HEADER = """\
# Settings of this app. A line that begins with "#" shows a setting that is not changed: its default, or an example
# where it has none. Strongest first: options of a command, arguments of parti.App, environment variables
# PARTI_<NAME>, this file, the defaults. 'parti doctor' looks whether all of it fits the server.
"""
_APP = '''\
"""What this app does with its messages: change `handle`, and keep the rest until you need to.

    {steps[0]:<30}  {server}
    {steps[1]:<30}  makes the stream and sends a few orders
    {steps[2]:<30}  handles them; start it as often as you like, and the workers share the customers
"""

import asyncio
import json

import nats
import parti

# Every customer is a partition: its orders are handled one after the other, in order; customers run in parallel.
app = parti.App(stream="{stream}", subject="{subject}.{{region}}.{{customer}}")


@app.handler
async def handle(message: parti.Message) -> None:
    """Handle one order. What raises is tried again; what is rejected becomes a dead letter ('parti dlq ls')."""
    order = json.loads(message.data)
    if order["amount"] <= 0:
        raise parti.Reject("the amount must be positive")
    print(message.partition.keys["customer"], "order", order["number"], flush=True)


async def send() -> None:
    """Make the stream, if it is not there, and send ten orders of each of three customers."""
    client = await nats.connect(list(parti.Settings().nats))
    stream = client.jetstream()
    await stream.add_stream(name="{stream}", subjects=["{subject}.*.*"], allow_direct=True)
    for number in range(1, 11):
        for customer in ("ada", "bob", "cy"):
            order = {{"number": number, "amount": 10 * number}}
            await stream.publish(f"{subject}.eu.{{customer}}", json.dumps(order).encode())
    await client.close()
    print("sent 30 orders to stream {stream}")


if __name__ == "__main__":
    asyncio.run(send())
'''


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to; made if it is missing.")] = Path(),
    nats: Annotated[str | None, typer.Option(metavar="URL", help="Server URL that the settings are to name.")] = None,
    json: JsonOption = False,
) -> None:
    """Write a commented parti.toml and a handler that runs at once, and say which three commands come next.

    Nothing is ever overwritten. Exit codes: 0 written, 2 refused, and nothing was written.
    """
    settings = load_settings({"nats": nats})
    name = _name_for(directory)
    steps = _steps(settings)
    texts = {
        DEFAULT_CONFIG_FILE: config_template({"nats": settings.nats, "prefix": name, "bucket": name}),
        f"{MODULE}.py": _APP.format(
            stream=name.upper(),
            subject=f"{name.lower()}.orders",
            steps=steps,
            server="a NATS server on this machine" if "server" in steps[0] else "looks whether all is well there",
        ),
    }
    _write(directory, texts)
    if json:
        print_json({"directory": str(directory), "files": list(texts), "next": steps})
        return
    console = open_console()
    where = "here" if directory == Path() else f"in {directory}"
    console.print(f"Wrote {' and '.join(texts)} {where}.", style="green", soft_wrap=True)
    console.print(f"Next, {where}, the first one in a terminal of its own:")
    for step in steps:
        console.print(f"  {step}", soft_wrap=True)


def _name_for(directory: Path) -> str:
    """A prefix and bucket of the app's own, after its directory."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", directory.absolute().name).strip("-")[:60]
    return name or "orders"


def _steps(settings: Settings) -> list[str]:
    """The commands that come next: a server of one's own where it is to be on this machine."""
    at = urlsplit(settings.nats[0])
    local = at.hostname in _LOCAL and len(settings.nats) == 1
    first = f"parti dev server --port {at.port or _DEFAULT_PORT}" if local else "parti doctor"
    return [first, f"python {MODULE}.py", f"parti worker {MODULE}:app"]


def _write(directory: Path, texts: Mapping[str, str]) -> None:
    """Write all of these files or none."""
    there = [name for name in texts if (directory / name).exists()]
    if there:
        are = "is" if len(there) == 1 else "are"
        raise ConfigError(
            f"{listed(there)} {are} in {directory} already, and nothing is overwritten; name another directory"
        )
    written: list[Path] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (directory / name).open("x", encoding="utf-8") as file:
                written.append(directory / name)
                file.write(text)
    except OSError as problem:
        for path in written:
            path.unlink(missing_ok=True)
        raise ConfigError(f"{directory} cannot be written to: {problem.strerror}; name another directory") from None


# ── the settings file ─────────────────────────────────────────────────────────────────────────────────────────────


def config_template(given: Mapping[str, object]) -> str:
    """A `parti.toml` with every setting, explained; all but those given are comments."""
    lines = [_HEADER]
    for section, names in settings_sections():
        lines += [f"# ── {section} {'─' * (100 - len(section))}", ""]
        for name in names:
            field = Settings.model_fields[name]
            lines += [f"# {part}" for part in _wrapped(field.description or "")]
            if name in given:
                lines.append(f"{name} = {_toml(given[name])}")
            elif name in _SECRETS:
                lines.append(f"# {name}: better in the environment, as PARTI_{name.upper()}, than in a file")
            elif field.default is None or field.default_factory is not None:
                lines.append(f"# {name} is not set")
            else:
                lines.append(f"# {name} = {_toml(field.default)}")
            lines.append("")
    return "\n".join(lines)


def _wrapped(text: str, width: int = 110) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + len(word) + 1 > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return [*lines, line] if line else lines


def _toml(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(each) for each in value)}]"
    assert not isinstance(value, SecretStr)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
