"""`spark_session` yields a Spark session for the length of a `with` block, and starts one if none is running.

A session that runs in this process already is used as it is. Otherwise a session is started on `master` (the URL of a
cluster, `local[2]`, or `sc://…` for Spark Connect), else on `SPARK_REMOTE`, else on all cores of this machine. A
session that is started here prints little, retries its tasks, and leaves neither a process nor a file behind.
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
"""How often a task is tried: the default of clusters; `local[…]` would try it once."""

_BULK_CONF = {"spark.sql.extensions.test.loadFromCp": "false"}
"""Settings of a session on this machine that runs only eventjet's bulk jobs. Without them Spark loads the SQL
extensions on the class path, and those of MLlib, a few functions, take a fifth of the JVM's start."""

_SCRATCH = "eventjet-spark-"
_LOCK_NAME = "alive"
"""A file in a scratch folder that is locked as long as the folder's process lives."""
_UNLOCKED_S = 3_600.0
"""The age from which a folder without that file counts as left by a process that was killed before it made the file."""
_Gateway: TypeAlias = Callable[[Mapping[str, str], Mapping[str, str]], AbstractContextManager[dict[str, str]]]
"""Starts a JVM from a configuration and environment variables; yields the variables that make pyspark use the JVM."""

_LOCAL = re.compile(r"local(?:\[([^,\]]+)(?:,[^\]]*)?\])?")
_CONNECT_VARIABLES = ("SPARK_CONNECT_MODE_ENABLED", "SPARK_LOCAL_REMOTE")
_LEFTOVER_VARIABLES = (*_CONNECT_VARIABLES, "SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE")
"""Environment variables that pyspark sets with a session and never removes."""
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
    """A running Spark session."""

    spark: SparkSession
    local: bool
    """Whether tasks run on this machine as this user, so that they can read files by the same paths."""


@contextmanager
def spark_session(
    master: str | None = None,
    *,
    conf: Mapping[str, str] | None = None,
    bulk_only: bool = False,
    interrupted_by: InterruptedBy = lambda _: nullcontext(),
    jvm_cache: JvmCache | None = None,
) -> Generator[Started]:
    """Yield a Spark session: the one that runs in this process, or a new one that ends with the `with` block.

    `master` is the URL of a cluster, `local[2]`, or `sc://…` for Spark Connect; the default is `SPARK_REMOTE`, else all
    cores of this machine. `conf` is added to the settings of a new session. `bulk_only` leaves out parts of Spark that
    only other queries than eventjet's would use. `interrupted_by` gets a function that ends the JVM of a local session
    at once, with everything that runs there. `jvm_cache` keeps the classes of such a JVM between sessions.

    Raises `Unreachable` when pyspark, Java or the master is missing, and `UsageError` for a `master` while a session
    runs already.
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
    url, remote = _master_url(master)
    conf = {**(_BULK_CONF if bulk_only and not remote and _is_local(url) else {}), **(conf or {})}
    with scratch_folder() as scratch:
        gateway = partial(running_gateway, scratch=scratch, interrupted_by=interrupted_by, cache=jvm_cache)
        with _new_session(url, remote, scratch, conf, gateway) as spark:
            yield Started(spark, _is_local(url))


def found_session(spark: SparkSession) -> Started:
    """Return a session that runs already, with whether its tasks run on this machine."""
    return Started(spark, _is_local(str(spark.conf.get("spark.master", ""))))


def is_remote(spark: Any) -> bool:
    """Tell whether a session is one of Spark Connect."""
    return "connect" in type(spark).__module__


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, up to 300 characters."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - py4j asks the JVM for the text, which may be gone
        text = "its JVM ended"
    return next((line for line in text.splitlines() if line.strip()), type(error).__name__)[:300]


@contextmanager
def scratch_folder() -> Generator[Path]:
    """Yield a private temporary folder, which may hold secrets, and first remove the folders of killed processes."""
    _remove_abandoned_folders()
    folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
    try:
        lock_file = folder / "new"
        with lock_file.open("wb") as file:
            try_lock(file)
            # The file gets its name when it is locked, so no other process finds it unlocked.
            lock_file.rename(folder / _LOCK_NAME)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned_folders() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        # Folders of other users, and new folders that are not locked yet, are left alone.
        with suppress(OSError):
            status = folder.stat()
            if status.st_uid != os.getuid():
                continue
            try:
                with (folder / _LOCK_NAME).open("r+b") as file:
                    if try_lock(file):
                        _remove(folder)
            except FileNotFoundError:
                if time.time() - status.st_mtime > _UNLOCKED_S:
                    shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Remove a folder, its lock last: if a JVM that is about to end writes meanwhile, the next process removes that."""
    for part in folder.iterdir():
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        elif part.name != _LOCK_NAME:
            part.unlink(missing_ok=True)
    if [part.name for part in folder.iterdir()] == [_LOCK_NAME]:
        shutil.rmtree(folder, ignore_errors=True)


def _master_url(master: str | None) -> tuple[str, bool]:
    """Return (URL of the master, whether it is a Spark Connect URL)."""
    remote = os.environ.get("SPARK_REMOTE")
    if master is None and remote:
        return remote, True
    url = with_retries(master or "local[*]")
    return url, url.startswith("sc://")


def with_retries(master: str) -> str:
    """Return the URL with `TASK_TRIES` tries for each task if it is `local` or `local[…]`; any other URL as it is."""
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
    """Return the error for a machine on which a package that Spark needs is not installed."""
    remedy = 'Install it with `pip install "eventjet[spark]"`, or use `--engine local`.'
    return Unreachable("Spark", f"the package {package} is not installed", remedy)


@contextmanager
def _new_session(
    url: str, remote: bool, scratch: Path, conf: Mapping[str, str], gateway: _Gateway
) -> Generator[SparkSession]:
    """Yield a new session; on this machine its JVM is started by `gateway`, for a cluster by pyspark's own scripts."""
    builder: Any = _session_type().builder
    settings = {"spark.app.name": "eventjet", **_settings(url, scratch), **conf}
    for name, value in settings.items():
        builder = builder.config(name, value)
    builder = builder.remote(url) if remote else builder.master(url)
    unset = {} if remote else dict.fromkeys(("SPARK_REMOTE", *_CONNECT_VARIABLES))
    variables = _variables(url, scratch)
    with ExitStack() as stack:
        stack.callback(_set_environment, {name: os.environ.get(name) for name in _LEFTOVER_VARIABLES})
        stack.enter_context(_quiet_loggers())
        stack.enter_context(_silent_about_an_ended_jvm())
        if _is_local(url) and not remote:
            gateway_conf = {**settings, "spark.master": url}
            variables |= stack.enter_context(gateway(gateway_conf, variables))
        elif not url.startswith("sc://"):
            variables["JAVA_HOME"] = str(make_java_home(find_java(), scratch / "java"))
        with _environment({**unset, **variables}), _without_warnings():
            spark = _create_session(builder, url)
        if not remote and not url.startswith("sc://"):
            _silence_accumulators(spark)
        try:
            yield spark
        finally:
            with suppress(Exception), _without_warnings():
                spark.stop()
            _forget_gateway()


def _create_session(builder: Any, url: str) -> SparkSession:
    try:
        spark: SparkSession = builder.getOrCreate()
        # Spark Connect makes no request before the first question, so ask for the version.
        _ = spark.version
    except Exception as error:
        _forget_gateway()
        shown_url, remedy = shown_master(url), "Check --master and SPARK_REMOTE."
        if shown_url != url:
            # Spark's message repeats a URL that it cannot use, with its token.
            raise Unreachable("Spark", f"no session at {shown_url} ({type(error).__name__})", remedy) from None
        raise Unreachable("Spark", f"no session at {url} ({first_line(error)})", remedy) from error
    return spark


def _settings(url: str, scratch: Path) -> dict[str, str]:
    """Return the settings of a new session; on a cluster only those for the terminal, the rest is its operator's."""
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
    """Return the environment variables of a JVM that runs on this machine."""
    if url.startswith("sc://"):
        return {}
    # Without these, the data source is looked up, and local workers run, with the `python3` on the PATH.
    defaults = {"PYSPARK_DRIVER_PYTHON": sys.executable}
    if _is_local(url):
        defaults |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    if not os.environ.get("SPARK_HOME"):
        conf = scratch / "conf"
        conf.mkdir()
        (conf / LOG4J2).write_text(_LOG4J2)
        defaults["SPARK_CONF_DIR"] = str(conf)
    return {name: os.environ.get(name) or value for name, value in defaults.items()}


@contextmanager
def _environment(variables: Mapping[str, str | None]) -> Generator[None]:
    """Set environment variables while the JVM starts; the JVM and its workers keep them, this process does not."""
    previous = {name: os.environ.get(name) for name in variables}
    try:
        _set_environment(variables)
        yield
    finally:
        _set_environment(previous)


def _set_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _without_warnings() -> Generator[None]:
    """Suppress Spark's warnings about this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _quiet_loggers() -> Generator[None]:
    """Silence the loggers of py4j and pyspark below CRITICAL, and restore their levels afterwards."""
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
    """Drop the log records of py4j, which logs a traceback when the JVM ends; the call in progress raises anyway."""

    def is_not_of_py4j(record: logging.LogRecord) -> bool:
        return Path(record.pathname).parent.name != "py4j"

    root = logging.getLogger()
    root.addFilter(is_not_of_py4j)
    try:
        yield
    finally:
        root.removeFilter(is_not_of_py4j)


def _silence_accumulators(spark: SparkSession) -> None:
    """Keep the accumulator server from printing a traceback when the JVM ends first; the waiting call raises anyway."""

    def ignore(*_: object) -> None: ...

    server: Any = getattr(spark.sparkContext, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = ignore


def _forget_gateway() -> None:
    """End the JVM, which pyspark would keep until the interpreter exits; it ends by itself when its input closes."""
    from pyspark import SparkContext

    context: Any = SparkContext
    gateway: Any = getattr(context, "_gateway", None)
    context._gateway = context._jvm = None
    if gateway is not None:
        with suppress(Exception):
            gateway.shutdown()
        if gateway.proc is not None:
            end_jvm(gateway.proc)
