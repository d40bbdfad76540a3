"""Spark sessions: on a JVM of this machine, quiet and with temporary files only; on a cluster; by Spark Connect."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from parti.errors import ConfigError
from parti.spark.java import Java, find_java
from parti.spark.shipping import pack

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_LOG_CONFIG = Path(__file__).with_name("log4j2.properties")
_JVM_EXIT_TIMEOUT_S = 15.0
_LOCAL = re.compile(r"local(?:\[(\d+|\*)\])?")
_CLUSTER = re.compile(r"spark://|k8s://|yarn$")
_LOOPBACK = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}


@contextmanager
def open_session(
    app_name: str, master: str | None = None, *, conf: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """A session where `master` says: on this machine (`local[2]`, or None), on a cluster, or by Spark Connect.

    Clusters (`spark://host:7077`, `yarn`, `k8s://…`) are sent parti's modules, so their machines need only PySpark.
    A Spark Connect server (`sc://host:15002`) is sent them too. Raises ConfigError as `local_session` does.
    """
    local = _LOCAL.fullmatch(master or "local[*]")
    if local:
        wanted = local[1] or "1"
        cores = (os.cpu_count() or 1) if wanted == "*" else int(wanted)
        with local_session(app_name, cores=cores, conf=conf) as spark:
            yield spark
    elif master is not None and master.startswith("sc://"):
        with _connect_session(app_name, master, conf or {}) as spark:
            yield spark
    elif master is not None and _CLUSTER.match(master):
        with _own_jvm(app_name, master, _cluster_settings(master), conf or {}, ship=True) as spark:
            yield spark
    else:
        raise ConfigError(
            f"master: {master!r}; expected local[N], spark://host:port, yarn, k8s://… or, for Spark Connect, "
            f"sc://host:port"
        )


@contextmanager
def local_session(app_name: str, *, cores: int = 2, conf: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """Run a SparkSession on a JVM of its own; end the JVM and delete its files on the way out.

    `conf` is added last and wins. Starting takes seconds, so share one session between jobs where you can.
    A SIGTERM that reaches the JVM too, as one to a process group does, is left to this process to act upon; so is
    SIGINT, and a handler that this process has for it stays.
    Raises ConfigError if Java or the `spark` extra is missing, or if this process already runs Spark.

        with local_session("count") as spark:
            assert spark.range(10).count() == 10
    """
    with _own_jvm(app_name, f"local[{cores}]", _local_settings(cores), conf or {}) as session:
        yield session


@contextmanager
def _own_jvm(
    app_name: str, master: str, settings: Mapping[str, str], conf: Mapping[str, str], *, ship: bool = False
) -> Iterator[SparkSession]:
    if find_spec("pyspark") is None:
        raise ConfigError("pyspark is not installed, Spark sessions need it; install the extra: parti[spark]")
    java = find_java()

    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 - costs a second and needs the `spark` extra
    from pyspark.sql import SparkSession  # noqa: PLC0415

    if SparkContext._gateway is not None:
        raise ConfigError(
            "this process already runs Spark, and a process has one Spark JVM; "
            "use the session it has, or end it first"
        )
    with tempfile.TemporaryDirectory(prefix="parti-spark-") as directory:
        modules = pack(Path(directory)) if ship else None
        wanted = {**_settings(Path(directory)), **settings, **conf}
        builder = SparkSession.builder.master(master).appName(app_name)
        for key, value in wanted.items():
            builder = builder.config(key, value)
        try:
            with _launch_environment(java, settings, modules):
                with _own_interrupt():
                    context = SparkConf().setMaster(master).setAppName(app_name).setAll(list(wanted.items()))
                    _ignore_sigterm(SparkContext.getOrCreate(context))
                session = builder.getOrCreate()
            try:
                if modules is not None:
                    session.sparkContext.addPyFile(str(modules))
                register(session)
                yield session
            finally:
                session.stop()
        finally:
            _end_jvm()


@contextmanager
def _connect_session(app_name: str, address: str, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    if find_spec("pyspark") is None or find_spec("grpc") is None:
        raise ConfigError("Spark Connect needs pyspark with its client; install the extra: parti[spark]")

    from pyspark.sql import SparkSession  # noqa: PLC0415

    builder = SparkSession.builder.remote(address).appName(app_name)
    for key, value in {"spark.sql.session.timeZone": "UTC", **conf}.items():
        builder = builder.config(key, value)
    with tempfile.TemporaryDirectory(prefix="parti-spark-") as directory:
        session = builder.getOrCreate()
        try:
            session.addArtifacts(str(pack(Path(directory))), pyfile=True)
            register(session)
            yield session
        finally:
            session.stop()


def register(spark: SparkSession) -> None:
    """Teach a session `format("jetstream")`, and let it push filters down; again does no harm.

    Where parti is installed Spark finds the format by itself, but leaves filters to itself unless told otherwise.
    """
    from parti.spark.source import JetStreamDataSource  # noqa: PLC0415 - imports pyspark

    spark.dataSource.register(JetStreamDataSource)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


def _settings(directory: Path) -> dict[str, str]:
    """Settings of a session whose driver's files live in `directory`."""
    java_options = (f"-Dlog4j2.configurationFile={_LOG_CONFIG.as_uri()}", f"-Djava.io.tmpdir={directory}")
    return {
        "spark.driver.extraJavaOptions": " ".join(f'"{option}"' for option in java_options),
        "spark.local.dir": str(directory / "local"),
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }


def _local_settings(cores: int) -> dict[str, str]:
    return {
        **_LOOPBACK,
        # The default of 200 is for clusters; on one machine it only adds empty tasks.
        "spark.sql.shuffle.partitions": str(cores),
    }


def _cluster_settings(master: str) -> dict[str, str]:
    # Executors must reach the driver; where the master is on this machine, so are they.
    return _LOOPBACK if "//127.0.0.1:" in master or "//localhost:" in master else {}


@contextmanager
def _launch_environment(java: Java, settings: Mapping[str, str], modules: Path | None) -> Iterator[None]:
    """Set what Spark reads from the environment only, while it starts; put everything back afterwards."""
    wanted: dict[str, str | None] = {
        # Without these two, Spark takes the first `java` and `python3` of PATH: perhaps not the checked
        # runtime, and perhaps not this interpreter.
        "JAVA_HOME": str(java.home),
        "PYSPARK_PYTHON": sys.executable,
        # Wins over spark.local.dir where it is set.
        "SPARK_LOCAL_DIRS": None,
    }
    if "spark.driver.host" in settings:
        # Otherwise Spark looks up the host name and warns about the address it finds.
        wanted["SPARK_LOCAL_IP"] = "127.0.0.1"
    if modules is not None:
        # Executors may have another interpreter; the driver plans streaming reads with theirs.
        wanted["PYSPARK_PYTHON"] = os.environ.get("PYSPARK_PYTHON", sys.executable)
        wanted["PYTHONPATH"] = os.pathsep.join(filter(None, (str(modules), os.environ.get("PYTHONPATH"))))
    before = {name: os.environ.get(name) for name in wanted}
    _set_environment(wanted)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _own_interrupt() -> Iterator[None]:
    """Keep the handler of SIGINT that somebody chose.

    pyspark puts its own in place, which calls the JVM from within whatever call to the JVM it interrupts. Instead of
    Python's it may stay: it ends the jobs, too.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        chosen = before is not None and before is not signal.default_int_handler
        if chosen and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def _ignore_sigterm(context: SparkContext) -> None:
    """Let the JVM ignore SIGTERM, as pyspark lets it ignore SIGINT; it ends with this process in any case."""
    assert context._jvm is not None
    signals = context._jvm.sun.misc
    signals.Signal.handle(signals.Signal("TERM"), signals.SignalHandler.SIG_IGN)


def kill_jvm() -> None:
    """Kill the JVM of this process, if it has one, for a process that ends at once.

    Left to itself, it would notice a moment later, and say at length what was cut off.
    """
    context = sys.modules.get("pyspark.core.context")
    gateway = context.SparkContext._gateway if context else None
    if gateway is not None:
        gateway.proc.kill()


def _end_jvm() -> None:
    """End the JVM of the stopped session and wait for it.

    pyspark would keep it until this process ends. A JVM remembers its first `spark.local.dir` for life, so a
    later session would write into the deleted directory of an earlier one.
    """
    from pyspark import SparkContext  # noqa: PLC0415

    gateway = SparkContext._gateway
    if gateway is None:
        return
    SparkContext._gateway = None
    SparkContext._jvm = None
    process: subprocess.Popen[bytes] = gateway.proc
    gateway.shutdown()
    if process.stdin is not None:
        process.stdin.close()  # the JVM ends itself when its input does
    try:
        process.wait(_JVM_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
