"""Spark as processes of its own, started in an empty folder that knows neither the project nor any app.

What they run with is what an operator gives them: a Java, a `python3` on the PATH that has eventjet installed, nothing
else. Their addresses are read from what they log, so no port is chosen here.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import pyspark

import eventjet
from eventjet.dev.process import ServerProcess
from eventjet.dev.supervisor import Program
from eventjet.spark.session import find_java, make_java_home
from tests.integration.rebuild_log import Book

STARTS_S = 180.0
SPARK_HOME = Path(pyspark.__file__).parent
QUICK = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
_MASTER = re.compile(r"Starting Spark master at (spark://\S+)")
_REGISTERED = re.compile(r"Successfully registered with master")
_CONNECT = re.compile(r"Spark Connect server started at: \S+?:(\d+)")


class Daemon:
    """A Spark program with its log; it ends with this process at the latest."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        self.log = folder / f"{name}.log"
        program, *arguments = command
        there = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(folder), str(SPARK_HOME / "bin" / program), *arguments]
        self._process = ServerProcess(f"Spark's {name}", Program(there), self.log, environment(folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    def wait_for_log(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Wait until the log matches, and return the match."""
        deadline = time.monotonic() + STARTS_S
        while True:
            logged = self.log.read_text(errors="replace")
            match = pattern.search(logged)
            if match:
                return match
            assert self._process.running, logged
            assert time.monotonic() < deadline, logged
            time.sleep(0.05)


class Cluster:
    """A standalone master with two workers of one core each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.master = ""
        self.daemons: list[Daemon] = []

    def start(self, master: Daemon) -> Iterator[Daemon]:
        """Start the workers after the master listens, and wait until they are registered."""
        self.daemons.append(master)
        self.master = master.wait_for_log(_MASTER)[1]
        for number in (1, 2):
            place = ["--host", "127.0.0.1", "--webui-port", "0", "--work-dir", str(self.folder / f"work-{number}")]
            command = ["spark-class", "org.apache.spark.deploy.worker.Worker", *place, "--cores", "1", "--memory", "1g"]
            self.daemons.append(Daemon(f"worker-{number}", [*command, self.master], self.folder))
            yield self.daemons[-1]
        for worker in self.daemons[1:]:
            worker.wait_for_log(_REGISTERED)

    def executors(self) -> list[Path]:
        """Return the work folders of all executors that ever ran."""
        return list(self.folder.glob("work-*/app-*/*"))


@contextmanager
def standalone_cluster(folder: Path) -> Generator[Cluster]:
    """Start a master and workers in an empty folder."""
    cluster = Cluster(folder)
    place = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    with ExitStack() as stack:
        master = stack.enter_context(
            Daemon("master", ["spark-class", "org.apache.spark.deploy.master.Master", *place], folder)
        )
        for worker in cluster.start(master):
            stack.enter_context(worker)
        yield cluster


@contextmanager
def connect_server(folder: Path, master: str = "local[2]") -> Generator[str]:
    """Start a Spark Connect server, and yield its `sc://` URL."""
    conf = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.sql.shuffle.partitions": "2",
        **defaults(folder),
    }
    settings = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    server = "org.apache.spark.sql.connect.service.SparkConnectServer"
    with Daemon("connect", ["spark-submit", "--class", server, "--master", master, *settings], folder) as daemon:
        yield f"sc://127.0.0.1:{daemon.wait_for_log(_CONNECT)[1]}"


def defaults(folder: Path) -> dict[str, str]:
    """Return settings as in an operator's spark-defaults.conf: small executors, and an event log."""
    events = folder / "events"
    events.mkdir(exist_ok=True)
    return {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": QUICK,
        "spark.driver.extraJavaOptions": QUICK,
        "spark.ui.enabled": "false",
        # Blocks of a dead executor are not requested again and again.
        "spark.shuffle.io.maxRetries": "1",
        "spark.shuffle.io.retryWait": "1s",
    }


def driver_conf(folder: Path, settings: dict[str, str]) -> Path:
    """Write the settings to a folder for SPARK_CONF_DIR."""
    conf = folder / "conf"
    conf.mkdir()
    (conf / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    return conf


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a cluster machine, whose Python has eventjet installed."""
    environ = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    return environ | {
        "TMPDIR": str(temporary),
        "SPARK_LOCAL_DIRS": str(temporary),
        "JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={temporary}",
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": str(Path(eventjet.__file__).parents[1]),
        "JAVA_HOME": str(make_java_home(find_java(), folder / "java")),
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_JAVA_OPTS": QUICK,
        "SPARK_DAEMON_MEMORY": "640m",
    }


def cli(*arguments: str) -> list[str]:
    """Return a command line of eventjet."""
    return [sys.executable, "-m", "eventjet.cli", *arguments]


def settings_of(book: Book, user: str, password: str) -> dict[str, str]:
    """Return the environment of a driver, the only process with the secrets."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("EVENTJET_", "SPARK_"))}
    return environ | {
        "EVENTJET_SERVERS": book.settings.servers[0],
        "EVENTJET_USER": user,
        "EVENTJET_PASSWORD": password,
        "EVENTJET_INBOX_PREFIX": f"_INBOX_{user}",
        "EVENTJET_DATABASE": book.settings.database,
    }


@contextmanager
def watched(secrets: Sequence[str], command_lines: list[str]) -> Generator[None]:
    """Gather in `command_lines` the command lines of this machine that show a secret, ten times a second."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.1):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    line = path.read_bytes()
                    command_lines.extend(line.decode(errors="replace") for secret in secrets if secret.encode() in line)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def files_with(secrets: Sequence[str], folder: Path) -> tuple[int, list[Path]]:
    """Return the number of files in a folder, and the files that show a secret or the key of a sealed secret."""
    telling = b"|".join(re.escape(secret.encode()) for secret in secrets)
    key = telling + rb"|#[0-9a-f]{64}"
    files = [Path(inside, name) for inside, _, names in os.walk(folder) for name in names]
    # A Connect server logs plans with the keys, which decrypt nothing that it stores.
    return len(files), [path for path in files if _shows(path, telling if path.name == "connect.log" else key)]


def _shows(file: Path, secret: bytes) -> bool:
    try:
        return re.search(secret, file.read_bytes()) is not None
    except FileNotFoundError:  # a running process has removed it
        return False
