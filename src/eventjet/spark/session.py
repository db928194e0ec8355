"""A Spark session for the length of a `with`: the one asked for, the one that runs already, or one of its own.

`master` (a URL of a cluster, `local[2]`, or `sc://…` for Spark Connect) comes first, then a session this process has
already, then `SPARK_REMOTE`, then all cores of this machine. A session started here is quiet, retries its tasks, and
leaves neither a process nor a file behind.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventjet.errors import Unreachable, UsageError
from eventjet.spark.gateway import InterruptedBy, end_jvm, running_gateway
from eventjet.spark.java import find_java, make_java_home
from eventjet.spark.scratch import scratch_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_TRIES = 4
"""What clusters give a task by default; `local[…]` gives one unless told."""

_BULK = {"spark.sql.extensions.test.loadFromCp": "false"}
"""Of a session on this machine that runs nothing but our own bulk work: without it Spark loads what the class path
offers to extend its SQL, and that is MLlib, whose few functions take a fifth of the JVM's start."""

_LOCAL = re.compile(r"local(?:\[([^,\]]+)(?:,[^\]]*)?\])?")
_MARKS = ("SPARK_CONNECT_MODE_ENABLED", "SPARK_LOCAL_REMOTE")
_LOG4J2 = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = spark: %p %c{1}: %m%n
# Spark prints two lines of its own unless this logger is at the root's level.
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
# A task that fails is reported by the error that reaches the driver.
logger.task.name = org.apache.spark.executor.Executor
logger.task.level = off
logger.taskset.name = org.apache.spark.scheduler.TaskSetManager
logger.taskset.level = off
"""


@dataclass(frozen=True, slots=True)
class Started:
    """A session and what must be known to use it well."""

    spark: SparkSession
    local: bool
    """Whether tasks run on this machine, as this user: files given by path are theirs too."""


@contextmanager
def spark_session(
    master: str | None = None,
    *,
    conf: Mapping[str, str] | None = None,
    environ: Mapping[str, str] = os.environ,
    bulk_only: bool = False,
    interrupted_by: InterruptedBy = lambda _: nullcontext(),
) -> Generator[Started]:
    """Raises `Unreachable` when pyspark, a Java or the master is not there.

    `bulk_only` leaves out what only other queries than ours would use. `interrupted_by` gets a function that ends the
    JVM of a local session at once, and with it whatever runs there.
    """
    existing = _existing()
    if existing is not None:
        if master is not None:
            raise UsageError(
                "A Spark session runs in this process already. Stop it, or leave the master out to use it."
            )
        yield existing
        return
    url, remote = _where(master, environ)
    conf = {**(_BULK if bulk_only and not remote and _is_local(url) else {}), **(conf or {})}
    with scratch_folder() as scratch, _running(url, remote, scratch, conf, environ, interrupted_by) as spark:
        yield Started(spark, _is_local(url))


def found_session(spark: SparkSession) -> Started:
    """A session that somebody else started."""
    return Started(spark, _is_local(str(spark.conf.get("spark.master", ""))))


def partition_id() -> int:
    """The number of the partition that the running task works on: the same when it is tried again."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    return context.partitionId()


def session_file(path: Path) -> Path:
    """A file of the driver's where a task runs: itself, or the copy that the session brought here."""
    if path.exists():
        return path
    from pyspark import SparkFiles

    return Path(SparkFiles.get(path.name))


def _existing() -> Started | None:
    session_type = _session_type()
    try:
        spark = session_type.active()
    except RuntimeError:
        return None
    return found_session(spark)


def _where(master: str | None, environ: Mapping[str, str]) -> tuple[str, bool]:
    """(URL, whether it is a Spark Connect one)."""
    if master is not None:
        return (master, True) if master.startswith("sc://") else (with_retries(master), False)
    if environ.get("SPARK_REMOTE"):
        return environ["SPARK_REMOTE"], True
    return with_retries("local[*]"), False


def with_retries(master: str) -> str:
    """`local`, `local[2]` and `local[*]` with a bounded number of tries for a task; any other URL as it is."""
    match = _LOCAL.fullmatch(master)
    return master if match is None else f"local[{match[1] or 1},{TASK_TRIES}]"


def _is_local(url: str) -> bool:
    return _LOCAL.fullmatch(url) is not None


def _session_type() -> type[SparkSession]:
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise Unreachable(
            "Spark",
            f"the package {error.name or 'pyspark'} is not installed",
            'Install it with `pip install "eventjet[spark]"`, or use `--engine local`.',
        ) from None
    return SparkSession


@contextmanager
def _running(
    url: str,
    remote: bool,
    scratch: Path,
    conf: Mapping[str, str],
    environ: Mapping[str, str],
    interrupted_by: InterruptedBy,
) -> Generator[SparkSession]:
    """A session with its JVM: of our own on this machine, started as its operator has it for a cluster."""
    builder: Any = _session_type().builder
    settings = {"spark.app.name": "eventjet", **_settings(url, scratch), **conf}
    for name, value in settings.items():
        builder = builder.config(name, value)
    builder = builder.remote(url) if remote else builder.master(url)
    taken = {"SPARK_REMOTE": None, **dict.fromkeys(_MARKS)} if not remote else {}
    variables = _variables(url, scratch, environ)
    with ExitStack() as stack:
        stack.enter_context(_silent_about_an_ended_jvm())
        if _is_local(url) and not remote:
            java = find_java(environ)
            on_command_line = {**settings, "spark.master": url}
            variables |= stack.enter_context(running_gateway(java, on_command_line, variables, scratch, interrupted_by))
        elif not url.startswith("sc://"):
            variables["JAVA_HOME"] = str(make_java_home(find_java(environ), scratch / "java"))
        with _environment({**taken, **variables}), _hushed():
            spark = _created(builder, url)
        if not remote and not url.startswith("sc://"):
            _hush_accumulators(spark)
        try:
            yield spark
        finally:
            _stop(spark)


def _created(builder: Any, url: str) -> SparkSession:
    try:
        spark: SparkSession = builder.getOrCreate()
        # Spark Connect has sent nothing before it is asked something.
        _ = spark.version
    except Exception as error:
        _forget_gateway()
        raise Unreachable(
            "Spark", f"no session at {url} ({_first_line(error)})", "Check --master and SPARK_REMOTE."
        ) from error
    return spark


def _settings(url: str, scratch: Path) -> dict[str, str]:
    """What a session of our own gets; on a cluster only what shows here, the rest is its operator's."""
    quiet = {} if url.startswith("sc://") else {"spark.ui.showConsoleProgress": "false"}
    if not _is_local(url):
        return quiet
    return quiet | {
        "spark.ui.enabled": "false",
        "spark.sql.adaptive.enabled": "false",
        "spark.local.dir": str(scratch / "local"),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.sql.artifact.isolation.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }


def _variables(url: str, scratch: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a JVM that runs on this machine."""
    if url.startswith("sc://"):
        return {}
    # Otherwise the data source is looked up, and local workers run, with whatever `python3` the PATH holds.
    found = {"PYSPARK_DRIVER_PYTHON": environ.get("PYSPARK_DRIVER_PYTHON") or sys.executable}
    if _is_local(url):
        found["PYSPARK_PYTHON"] = environ.get("PYSPARK_PYTHON") or sys.executable
        found["SPARK_LOCAL_IP"] = environ.get("SPARK_LOCAL_IP") or "127.0.0.1"
    if not environ.get("SPARK_CONF_DIR") and not environ.get("SPARK_HOME"):
        found["SPARK_CONF_DIR"] = str(_quiet_conf(scratch))
    return found


def _quiet_conf(scratch: Path) -> Path:
    folder = scratch / "conf"
    folder.mkdir()
    (folder / "log4j2.properties").write_text(_LOG4J2)
    return folder


@contextmanager
def _environment(variables: Mapping[str, str | None]) -> Generator[None]:
    """Set variables while the JVM starts; it and its workers keep them, this process does not."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        _set_environment(variables)
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
def _hushed() -> Generator[None]:
    """Keep Spark's remarks about this machine away from the terminal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("py4j", "pyspark"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        yield


@contextmanager
def _silent_about_an_ended_jvm() -> Generator[None]:
    """py4j tells it with a traceback, through the root logger; the call that met it raises as well."""
    root = logging.getLogger()
    root.addFilter(_is_not_of_py4j)
    try:
        yield
    finally:
        root.removeFilter(_is_not_of_py4j)


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return Path(record.pathname).parent.name != "py4j"


def _hush_accumulators(spark: SparkSession) -> None:
    """Their server prints a traceback when the JVM ends before it; whoever waits for the JVM is told in his turn."""
    server: Any = getattr(spark.sparkContext, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = _ignore


def _ignore(_request: object, _client: object) -> None: ...


def _stop(spark: SparkSession) -> None:
    with suppress(Exception), _hushed():
        spark.stop()
    _forget_gateway()
    _set_environment(dict.fromkeys(_MARKS))


def _forget_gateway() -> None:
    """End the JVM: pyspark keeps it until the interpreter exits. It goes by itself when its input closes."""
    from pyspark import SparkContext

    context: Any = SparkContext
    gateway: Any = getattr(context, "_gateway", None)
    context._gateway = context._jvm = None
    if gateway is None:
        return
    with suppress(Exception):
        gateway.shutdown()
    if gateway.proc is not None:
        end_jvm(gateway.proc)


def _first_line(error: Exception) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - py4j asks the JVM for the text, which may be gone
        text = "its JVM ended"
    return next((line for line in text.splitlines() if line.strip()), type(error).__name__)[:300]
