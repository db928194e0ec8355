"""Keep the classes of Spark's JVM between sessions in a folder, so that the JVM starts in half the time.

An archive of class data sharing is a file of some 160 MB that a JVM maps, instead of looking up thousands of classes in
jars and linking them. A session that finds no archive records which classes it loads, and after its end another JVM
makes an archive of these classes. An archive fits one Java, one Spark and one set of options; its name says which, and
ends with a checksum of its bytes. Any file may be deleted at any time. A fault of an archive is reported once, and
Spark starts without the archive.

A user who can write an archive decides what the JVM runs, so a folder to which others may write is not used.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from eventjet.runtime import try_lock

InterruptedBy: TypeAlias = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""A context within which the given function may be called, from any thread, to end a process that is waited for."""

MADE_WITHIN_S = 300.0
"""How long making an archive may take; it takes 15 to 25 seconds on two idle cores."""
TRIED_WITHIN_S = 60.0
"""How long trying a new archive may take."""
KEPT = 3
"""How many archives a folder keeps: the newest."""
ABANDONED_S = 3_600.0
"""The age from which an incomplete file counts as left by a killed process."""

_ARCHIVE = re.compile(r"spark-.+-[0-9a-f]{16}-(?P<sum>[0-9a-f]{16})\.jsa")
_MAKING = ".making"
_SHARING_MESSAGE = re.compile(r"^.*\[(?:cds|aot)\b[^\]]*\]\s*(?P<why>.+)$", re.MULTILINE)
_MESSAGE_MAX = 200
"""The maximum number of characters of a JVM's message that are shown."""


@dataclass(frozen=True, slots=True)
class JvmCache:
    """The folder for class archives, and the function to which messages about it go."""

    folder: Path
    say: Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Jvm:
    """The JVM for which an archive is made."""

    program: Path
    version: int
    spark: str
    """The version of Spark."""
    options: tuple[str, ...]
    """The options of the JVM, which must be the same for making an archive and for using it."""
    class_path: str
    jars: Path
    """The folder of Spark's jars."""

    def stem(self) -> str:
        """Return the beginning of the archive's name; a JVM itself refuses an archive of another JVM or other jars."""
        parts = [str(self.program), *self.options, self.class_path]
        for file in (self.program.resolve().parent.parent / "lib" / "modules", *sorted(self.jars.glob("*.jar"))):
            with suppress(OSError):
                status = file.stat()
                parts.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
        key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        return f"spark-{self.spark}-java-{self.version}-{key}"


class ClassArchive:
    """The archive of one JVM, for the length of one session."""

    def __init__(self, cache: JvmCache, jvm: Jvm, scratch: Path) -> None:
        self._folder = cache.folder.absolute()
        self._say = cache.say
        self._jvm = jvm
        self._stem = jvm.stem()
        self._log = scratch / "jvm.log"
        self._classes = scratch / "classes"
        self._archive: Path | None = None

    def options(self) -> list[str]:
        """Return the options with which the JVM uses the archive, or records the classes for a new archive.

        Returns none when the folder cannot be used.
        """
        try:
            if fault := self._unusable():
                self._tell(fault)
                return []
            self._archive = self._valid_archive()
        except OSError as error:
            self._tell(f"it cannot be used ({error.strerror or error})")
            return []
        # The JVM's messages about an archive would mix with this program's output.
        quiet = ["-Xlog:disable", f'-Xlog:all=warning:file="{self._log}"']
        if self._archive is not None:
            return [*quiet, f"-XX:SharedArchiveFile={self._archive}"]
        return [*quiet, f"-XX:DumpLoadedClassList={self._classes}"]

    def check(self, pid: int) -> None:
        """Remove an archive that the running JVM, process `pid`, did not take, so that the next session makes another.

        This can be seen only on Linux; elsewhere such an archive stays, and the JVM starts without its benefit.
        """
        if self._archive is None or not self._archive.exists():
            return
        with suppress(OSError):
            if str(self._archive) not in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace"):
                match = _SHARING_MESSAGE.search(self._log.read_text(encoding="utf-8", errors="replace"))
                reason = "" if match is None else f" ({match['why'][:_MESSAGE_MAX]})"
                self._tell(f"the JVM does not take {self._archive.name}{reason}, so it is removed")
                self._archive.unlink(missing_ok=True)

    def make(self, interrupted_by: InterruptedBy) -> None:
        """Make an archive after a session that had none, unless another process makes it. Raises no `OSError`."""
        if self._archive is not None or not self._classes.exists() or not self._classes.stat().st_size:
            return
        try:
            with (self._folder / f"{self._stem}.lock").open("ab") as lock:
                if try_lock(lock) and self._valid_archive() is None:
                    self._make(self._folder / f"{self._stem}-{os.getpid()}{_MAKING}", interrupted_by)
        except OSError as error:
            self._tell(f"no archive can be written ({error.strerror or error})")

    def _unusable(self) -> str | None:
        """Create the folder if it is missing; return why it cannot be used for archives, or None when it can."""
        if sys.platform == "win32":
            return "there are no archives on Windows"
        if self._jvm.class_path != str(self._jvm.jars / "*"):
            return "SPARK_CONF_DIR or SPARK_HOME puts a folder on the class path, for which Java makes no archives"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self._folder.stat()
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return "others may write to it, and so decide what the JVM runs. Name a folder of your own, with mode 0700"
        return None

    def _valid_archive(self) -> Path | None:
        """Return the archive if it is there and undamaged; remove damaged archives and abandoned files."""
        for making in self._folder.glob(f"spark-*{_MAKING}"):
            with suppress(OSError):
                if time.time() - making.stat().st_mtime > ABANDONED_S:
                    making.unlink()
        for file in _archives(self._folder, self._stem):
            match = _ARCHIVE.fullmatch(file.name)
            if match is not None and _checksum_of(file) == match["sum"]:
                return file
            self._tell(f"{file.name} is damaged, so it is removed")
            file.unlink(missing_ok=True)
        return None

    def _make(self, unfinished: Path, interrupted_by: InterruptedBy) -> None:
        """Make and try an archive, and give it its name; the caller holds the lock."""
        self._tell("making an archive of Spark's classes, once; what was asked for is done")
        began = time.monotonic()
        share = [f"-XX:SharedArchiveFile={unfinished}", "-cp", self._jvm.class_path]
        dump = ["-Xshare:dump", f"-XX:SharedClassListFile={self._classes}", *share]
        try:
            if fault := self._run(dump, MADE_WITHIN_S, interrupted_by):
                self._tell(f"no archive was made: {fault}")
                return
            if fault := self._run(["-Xshare:on", *share, "-version"], TRIED_WITHIN_S, interrupted_by):
                self._tell(f"the archive that was made is of no use: {fault}")
                return
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            archive = self._folder / f"{self._stem}-{_checksum_of(unfinished)}.jsa"
            unfinished.replace(archive)
        finally:
            unfinished.unlink(missing_ok=True)
        self._tell(f"{archive.stat().st_size / 1e6:,.0f} MB in {time.monotonic() - began:.0f} s")
        for outdated in [path for path in _archives(self._folder) if path != archive][KEPT - 1 :]:
            outdated.unlink(missing_ok=True)

    def _run(self, arguments: Sequence[str], timeout_s: float, interrupted_by: InterruptedBy) -> str | None:
        """Run the JVM with these arguments; return what went wrong, or None."""
        options = [*self._jvm.options, "-Xlog:disable", "-Xlog:all=error"]
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [str(self._jvm.program), *options, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
            try:
                with interrupted_by(process.kill):
                    process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return f"it was not over within {timeout_s:g} s"
            finally:
                process.kill()
                process.wait()
        if not process.returncode:
            return None
        message = self._log.read_text(encoding="utf-8", errors="replace").strip().partition("\n")[0]
        return f"its JVM ended with status {process.returncode} {message[:_MESSAGE_MAX]}".rstrip()

    def _tell(self, message: str) -> None:
        self._say(f"JVM cache {self._folder}: {message}.")


def _archives(folder: Path, stem: str = "spark-") -> list[Path]:
    """Return the archives in a folder, the newest first."""

    def found() -> Iterator[tuple[float, Path]]:
        for file in folder.glob(f"{stem}*.jsa"):
            with suppress(OSError):
                yield file.stat().st_mtime, file

    return [file for _, file in sorted(found(), reverse=True)]


def _checksum_of(file: Path) -> str | None:
    """Return the checksum of a file's bytes, in a tenth of a second for 160 MB; None when the file is gone."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    except FileNotFoundError:
        return None
