"""A standalone Spark cluster, and a Spark Connect server, on this machine: started from the installed PySpark.

Executors may be given a Python that has PySpark's own dependencies and nothing else, so that whatever else a task
needs must have been sent to it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path

from parti.spark.java import find_java

LOOPBACK = "127.0.0.1"
BARE_PACKAGES = ("pyarrow", "numpy", "pandas", "dateutil", "pytz", "six", "tzdata")
_START_S = 60.0


def free_port() -> int:
    """A port that nobody uses now."""
    with closing(socket.socket()) as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def bare_python(directory: Path) -> Path:
    """An interpreter with what PySpark itself needs: no parti, nothing of parti's dependencies."""
    packages = directory / "packages"
    packages.mkdir(parents=True)
    for name in BARE_PACKAGES:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        origin = Path(spec.origin)
        source = origin.parent if origin.name == "__init__.py" else origin
        (packages / source.name).symlink_to(source)
        for libraries in source.parent.glob(f"{name}.libs"):
            (packages / libraries.name).symlink_to(libraries)
    script = directory / "python"
    script.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" PYTHONDONTWRITEBYTECODE=1 exec "{sys.executable}" -S "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


@contextmanager
def standalone(directory: Path, *, cores: int = 2, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """A master and a worker; gives the address of the master."""
    port, web_port = free_port(), free_port()
    master = f"spark://{LOOPBACK}:{port}"
    host = ["--host", LOOPBACK]
    at = ["--port", str(port), "--webui-port", str(web_port)]
    with _java(directory, "master", ["org.apache.spark.deploy.master.Master", *host, *at], environment):
        work = ["--cores", str(cores), "--memory", "3g", "--webui-port", "0", "--work-dir", str(directory / "work")]
        command = ["org.apache.spark.deploy.worker.Worker", *host, *work, master]
        _wait(lambda: _alive_workers(web_port) is not None, "the Spark master", directory / "master.log")
        with _java(directory, "worker", command, environment):
            _wait(lambda: _alive_workers(web_port) == 1, "the Spark worker", directory / "worker.log")
            yield master


@contextmanager
def connect_server(
    directory: Path, *, conf: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """A Spark Connect server on two local cores; gives its address."""
    port = free_port()
    settings = {
        "spark.connect.grpc.binding.address": LOOPBACK,
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.ui.enabled": "false",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.local.dir": str(directory / "local"),
        **(conf or {}),
    }
    flags = [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
    submit = ["org.apache.spark.deploy.SparkSubmit", "--master", "local[2]", *flags]
    server = [*submit, "--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    with _java(directory, "connect", server, environment):
        _wait(lambda: _listens(port), "the Spark Connect server", directory / "connect.log")
        yield f"sc://{LOOPBACK}:{port}"


@contextmanager
def _java(
    directory: Path, name: str, arguments: list[str], environment: Mapping[str, str] | None
) -> Iterator[subprocess.Popen[bytes]]:
    import pyspark  # noqa: PLC0415

    home = Path(pyspark.__file__).parent
    variables = {
        **os.environ,
        "JAVA_HOME": str(find_java().home),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": LOOPBACK,
        "PYSPARK_PYTHON": sys.executable,
        **(environment or {}),
    }
    with (directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [str(home / "bin" / "spark-class"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=variables,
            cwd=directory,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(ready: object, what: str, log: Path) -> None:
    assert callable(ready)
    deadline_s = time.monotonic() + _START_S
    while not ready():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what} did not start within {_START_S:g} s:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)


def _alive_workers(web_port: int) -> int | None:
    try:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{web_port}/json/", timeout=5) as answer:
            return int(json.load(answer)["aliveworkers"])
    except (OSError, ValueError, KeyError):
        return None


def _listens(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((LOOPBACK, port)) == 0
