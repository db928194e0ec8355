"""A Spark session for the length of a `with`: the one asked for, the one that runs already, or one of its own.

`master` (a URL of a cluster, `local[2]`, or `sc://…` for Spark Connect) comes first, then a session this process has
already, then `SPARK_REMOTE`, then all cores of this machine. A session started here is quiet, retries its tasks, and
leaves neither a process nor a file behind.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from eventjet.errors import Unreachable, UsageError
from eventjet.runtime import try_lock
from eventjet.spark.class_archive import InterruptedBy, JvmCache
from eventjet.spark.jvm import LOG4J2, end_jvm, find_java, make_java_home, running_gateway
from eventjet.urls import shown_master

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_TRIES = 4
"""What clusters give a task by default; `local[…]` gives one unless told."""

_BULK = {"spark.sql.extensions.test.loadFromCp": "false"}
"""Of a session on this machine that runs nothing but our own bulk work: without it Spark loads what the class path
offers to extend its SQL, and that is MLlib, whose few functions take a fifth of the JVM's start."""

_SCRATCH = "eventjet-spark-"
_ALIVE = "alive"
"""A file that is locked for as long as the process of its scratch folder lives."""
_UNLOCKED_S = 3_600.0
"""How old a folder without that file is when whoever made it was killed before there was one."""
_Gateway: TypeAlias = Callable[[Mapping[str, str], Mapping[str, str]], AbstractContextManager[dict[str, str]]]
"""Of a configuration and an environment: a JVM, as the variables that make pyspark use it."""

_LOCAL = re.compile(r"local(?:\[([^,\]]+)(?:,[^\]]*)?\])?")
_MARKS = ("SPARK_CONNECT_MODE_ENABLED", "SPARK_LOCAL_REMOTE")
_LEFT_SET = (*_MARKS, "SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE")
"""Variables that pyspark sets with a session, and never takes back."""
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
    """A session in use."""

    spark: SparkSession
    local: bool
    """Whether tasks run on this machine, as this user: files given by path are theirs too."""


@contextmanager
def spark_session(
    master: str | None = None,
    *,
    conf: Mapping[str, str] | None = None,
    bulk_only: bool = False,
    interrupted_by: InterruptedBy = lambda _: nullcontext(),
    jvm_cache: JvmCache | None = None,
) -> Generator[Started]:
    """Raises `Unreachable` when pyspark, a Java or the master is not there.

    `bulk_only` leaves out what only other queries than ours would use. `interrupted_by` gets a function that ends the
    JVM of a local session at once, and with it whatever runs there. `jvm_cache` keeps the classes of such a JVM.
    """
    existing = None
    with suppress(RuntimeError):
        existing = _session_type().active()
    if existing is not None:
        if master is not None:
            raise UsageError(
                "A Spark session runs in this process already. Stop it, or leave the master out to use it."
            )
        yield found_session(existing)
        return
    url, remote = _where(master)
    conf = {**(_BULK if bulk_only and not remote and _is_local(url) else {}), **(conf or {})}
    with scratch_folder() as scratch:
        gateway = partial(running_gateway, scratch=scratch, interrupted_by=interrupted_by, cache=jvm_cache)
        with _running(url, remote, scratch, conf, gateway) as spark:
            yield Started(spark, _is_local(url))


def found_session(spark: SparkSession) -> Started:
    return Started(spark, _is_local(str(spark.conf.get("spark.master", ""))))


def is_remote(spark: Any) -> bool:
    return "connect" in type(spark).__module__


def first_line(error: Exception) -> str:
    """What Spark says first."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - py4j asks the JVM for the text, which may be gone
        text = "its JVM ended"
    return next((line for line in text.splitlines() if line.strip()), type(error).__name__)[:300]


@contextmanager
def scratch_folder() -> Generator[Path]:
    """A private temporary folder, which may hold secrets; those of killed processes are removed by the next one."""
    _remove_abandoned_folders()
    folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
    try:
        made = folder / "new"
        with made.open("wb") as file:
            try_lock(file)
            # Nobody sees it by its name before it is locked.
            made.rename(folder / _ALIVE)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned_folders() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        # What is not ours, or has just been made and is not locked yet, is left alone.
        with suppress(OSError):
            made = folder.stat()
            if made.st_uid != os.getuid():
                continue
            try:
                with (folder / _ALIVE).open("r+b") as file:
                    if try_lock(file):
                        _remove(folder)
            except FileNotFoundError:
                if time.time() - made.st_mtime > _UNLOCKED_S:
                    shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path) -> None:
    """The lock last: what a JVM that is about to end writes meanwhile is left to the next one."""
    for part in folder.iterdir():
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        elif part.name != _ALIVE:
            part.unlink(missing_ok=True)
    if [part.name for part in folder.iterdir()] == [_ALIVE]:
        shutil.rmtree(folder, ignore_errors=True)


def _where(master: str | None) -> tuple[str, bool]:
    """(URL, whether it is a Spark Connect one)."""
    remote = os.environ.get("SPARK_REMOTE")
    if master is None and remote:
        return remote, True
    url = with_retries(master or "local[*]")
    return url, url.startswith("sc://")


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
        raise not_installed(error.name or "pyspark") from None
    return SparkSession


def not_installed(package: str) -> Unreachable:
    """The error for a machine without Spark."""
    remedy = 'Install it with `pip install "eventjet[spark]"`, or use `--engine local`.'
    return Unreachable("Spark", f"the package {package} is not installed", remedy)


@contextmanager
def _running(
    url: str, remote: bool, scratch: Path, conf: Mapping[str, str], gateway: _Gateway
) -> Generator[SparkSession]:
    """A session with its JVM: by `gateway` on this machine, started as its operator has it for a cluster."""
    builder: Any = _session_type().builder
    settings = {"spark.app.name": "eventjet", **_settings(url, scratch), **conf}
    for name, value in settings.items():
        builder = builder.config(name, value)
    builder = builder.remote(url) if remote else builder.master(url)
    taken = {} if remote else dict.fromkeys(("SPARK_REMOTE", *_MARKS))
    variables = _variables(url, scratch)
    with ExitStack() as stack:
        stack.callback(_set_environment, {name: os.environ.get(name) for name in _LEFT_SET})
        stack.enter_context(_quiet_loggers())
        stack.enter_context(_silent_about_an_ended_jvm())
        if _is_local(url) and not remote:
            given = {**settings, "spark.master": url}
            variables |= stack.enter_context(gateway(given, variables))
        elif not url.startswith("sc://"):
            variables["JAVA_HOME"] = str(make_java_home(find_java(), scratch / "java"))
        with _environment({**taken, **variables}), _hushed():
            spark = _created(builder, url)
        if not remote and not url.startswith("sc://"):
            _hush_accumulators(spark)
        try:
            yield spark
        finally:
            with suppress(Exception), _hushed():
                spark.stop()
            _forget_gateway()


def _created(builder: Any, url: str) -> SparkSession:
    try:
        spark: SparkSession = builder.getOrCreate()
        # Spark Connect has sent nothing before it is asked something.
        _ = spark.version
    except Exception as error:
        _forget_gateway()
        shown, remedy = shown_master(url), "Check --master and SPARK_REMOTE."
        if shown != url:
            # Spark repeats a URL that it cannot use, token and all.
            raise Unreachable("Spark", f"no session at {shown} ({type(error).__name__})", remedy) from None
        raise Unreachable("Spark", f"no session at {url} ({first_line(error)})", remedy) from error
    return spark


def _settings(url: str, scratch: Path) -> dict[str, str]:
    """What a session of our own gets; on a cluster only what shows here, the rest is its operator's."""
    if not _is_local(url):
        return {} if url.startswith("sc://") else {"spark.ui.showConsoleProgress": "false"}
    return {
        "spark.ui.showConsoleProgress": "false",
        "spark.ui.enabled": "false",
        "spark.sql.adaptive.enabled": "false",
        "spark.local.dir": str(scratch / "local"),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.sql.artifact.isolation.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }


def _variables(url: str, scratch: Path) -> dict[str, str]:
    """The environment of a JVM that runs on this machine."""
    if url.startswith("sc://"):
        return {}
    # Otherwise the data source is looked up, and local workers run, with whatever `python3` the PATH holds.
    wanted = {"PYSPARK_DRIVER_PYTHON": sys.executable}
    if _is_local(url):
        wanted |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    if not os.environ.get("SPARK_HOME"):
        conf = scratch / "conf"
        conf.mkdir()
        (conf / LOG4J2).write_text(_LOG4J2)
        wanted["SPARK_CONF_DIR"] = str(conf)
    return {name: os.environ.get(name) or value for name, value in wanted.items()}


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
        yield


@contextmanager
def _quiet_loggers() -> Generator[None]:
    """Keep what Spark's loggers say of a session of our own away from the terminal; they are as before afterwards."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ("py4j", "pyspark"))}
    try:
        for logger in levels:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextmanager
def _silent_about_an_ended_jvm() -> Generator[None]:
    """py4j tells it with a traceback, through the root logger; the call that met it raises as well."""

    def is_not_of_py4j(record: logging.LogRecord) -> bool:
        return Path(record.pathname).parent.name != "py4j"

    root = logging.getLogger()
    root.addFilter(is_not_of_py4j)
    try:
        yield
    finally:
        root.removeFilter(is_not_of_py4j)


def _hush_accumulators(spark: SparkSession) -> None:
    """Their server prints a traceback when the JVM ends before it; whoever waits for the JVM is told in his turn."""

    def ignore(*_: object) -> None: ...

    server: Any = getattr(spark.sparkContext, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = ignore


def _forget_gateway() -> None:
    """End the JVM: pyspark keeps it until the interpreter exits. It goes by itself when its input closes."""
    from pyspark import SparkContext

    context: Any = SparkContext
    gateway: Any = getattr(context, "_gateway", None)
    context._gateway = context._jvm = None
    if gateway is not None:
        with suppress(Exception):
            gateway.shutdown()
        if gateway.proc is not None:
            end_jvm(gateway.proc)
