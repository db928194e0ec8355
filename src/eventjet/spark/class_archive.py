"""The classes of Spark's JVM, kept between sessions in a folder that was asked for: the JVM starts in half the time.

An archive of class data sharing is a file of some 160 MB that a JVM maps, instead of looking thousands of classes up in
jars and linking them. The first session that finds none notes which classes it loads, and when it is over another JVM
makes the archive of them. It is good for one Java, one Spark and the same options; its name says which, and ends with
the sum of its bytes. Any file may be deleted at any time. Whatever is wrong with one is told once, and Spark starts
without it.

Whoever can write an archive decides what the JVM runs, so a folder that others may write to is not used.
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
"""Within its context the given function may be called, from any thread, to end what is being waited for."""

MADE_WITHIN_S = 300.0
"""How long the making of an archive may take: 15 to 25 seconds on two cores that nobody else needs."""
TRIED_WITHIN_S = 60.0
KEPT = 3
"""Archives that a folder keeps, the newest ones."""
ABANDONED_S = 3_600.0
"""How old a file is that somebody began to write and was killed."""

_ARCHIVE = re.compile(r"spark-.+-[0-9a-f]{16}-(?P<sum>[0-9a-f]{16})\.jsa")
_MAKING = ".making"
_OF_SHARING = re.compile(r"^.*\[(?:cds|aot)\b[^\]]*\]\s*(?P<why>.+)$", re.MULTILINE)
_SHOWN = 200
"""Characters of what a JVM said that are repeated."""


@dataclass(frozen=True, slots=True)
class JvmCache:
    """The folder that was asked for, and whom to tell what becomes of it."""

    folder: Path
    say: Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Jvm:
    """What an archive is good for."""

    program: Path
    version: int
    spark: str
    """Its version."""
    options: tuple[str, ...]
    """The same for the JVM that makes an archive and for the one that uses it, as Java wants it."""
    class_path: str
    jars: Path
    """The folder that the class path is made of."""

    def stem(self) -> str:
        """The beginning of an archive's name. The JVM itself refuses one made by another JVM, or of other jars."""
        parts = [str(self.program), *self.options, self.class_path]
        for file in (self.program.resolve().parent.parent / "lib" / "modules", *sorted(self.jars.glob("*.jar"))):
            with suppress(OSError):
                known = file.stat()
                parts.append(f"{file.name} {known.st_size} {known.st_mtime_ns}")
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
        self._used: Path | None = None

    def options(self) -> list[str]:
        """With what the JVM is to be started: to use the archive, or to note what belongs into it."""
        try:
            if fault := self._unusable():
                self._tell(fault)
                return []
            self._used = self._whole()
        except OSError as error:
            self._tell(f"it cannot be used ({error.strerror or error})")
            return []
        # What a JVM says of an archive would stand among what this program prints.
        quiet = ["-Xlog:disable", f'-Xlog:all=warning:file="{self._log}"']
        if self._used is not None:
            return [*quiet, f"-XX:SharedArchiveFile={self._used}"]
        return [*quiet, f"-XX:DumpLoadedClassList={self._classes}"]

    def check(self, pid: int) -> None:
        """Once the JVM runs, as this process: remove an archive that it did not take, so that another is made.

        Linux tells that; elsewhere such an archive stays where it is, and nothing is gained.
        """
        if self._used is None or not self._used.exists():
            return
        with suppress(OSError):
            if str(self._used) not in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace"):
                said = _OF_SHARING.search(self._log.read_text(encoding="utf-8", errors="replace"))
                why = "" if said is None else f" ({said['why'][:_SHOWN]})"
                self._tell(f"the JVM does not take {self._used.name}{why}, so it is removed")
                self._used.unlink(missing_ok=True)

    def make(self, interrupted_by: InterruptedBy) -> None:
        """After a session that found no archive: make it, unless another process does. Raises no `OSError`."""
        if self._used is not None or not self._classes.exists() or not self._classes.stat().st_size:
            return
        try:
            with (self._folder / f"{self._stem}.lock").open("ab") as lock:
                if try_lock(lock) and self._whole() is None:
                    self._make(self._folder / f"{self._stem}-{os.getpid()}{_MAKING}", interrupted_by)
        except OSError as error:
            self._tell(f"no archive can be written ({error.strerror or error})")

    def _unusable(self) -> str | None:
        """Why this folder is none for archives; it is made if it is not there."""
        if sys.platform == "win32":
            return "there are no archives on Windows"
        if self._jvm.class_path != str(self._jvm.jars / "*"):
            return "SPARK_CONF_DIR or SPARK_HOME puts a folder on the class path, for which Java makes no archives"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = self._folder.stat()
        if known.st_uid not in (os.getuid(), 0) or known.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return "others may write to it, and so decide what the JVM runs. Name a folder of your own, with mode 0700"
        return None

    def _whole(self) -> Path | None:
        """The archive, when it is there with all its bytes; one that is not is removed."""
        for making in self._folder.glob(f"spark-*{_MAKING}"):
            with suppress(OSError):
                if time.time() - making.stat().st_mtime > ABANDONED_S:
                    making.unlink()
        for file in _archives(self._folder, self._stem):
            named = _ARCHIVE.fullmatch(file.name)
            if named is not None and _sum_of(file) == named["sum"]:
                return file
            self._tell(f"{file.name} is damaged, so it is removed")
            file.unlink(missing_ok=True)
        return None

    def _make(self, making: Path, interrupted_by: InterruptedBy) -> None:
        """Under the lock."""
        self._tell("making an archive of Spark's classes, once; what was asked for is done")
        began = time.monotonic()
        share = [f"-XX:SharedArchiveFile={making}", "-cp", self._jvm.class_path]
        dump = ["-Xshare:dump", f"-XX:SharedClassListFile={self._classes}", *share]
        try:
            if fault := self._run(dump, MADE_WITHIN_S, interrupted_by):
                self._tell(f"no archive was made: {fault}")
                return
            if fault := self._run(["-Xshare:on", *share, "-version"], TRIED_WITHIN_S, interrupted_by):
                self._tell(f"the archive that was made is of no use: {fault}")
                return
            with making.open("rb") as file:
                os.fsync(file.fileno())
            made = self._folder / f"{self._stem}-{_sum_of(making)}.jsa"
            making.replace(made)
        finally:
            making.unlink(missing_ok=True)
        self._tell(f"{made.stat().st_size / 1e6:,.0f} MB in {time.monotonic() - began:.0f} s")
        for other in [one for one in _archives(self._folder) if one != made][KEPT - 1 :]:
            other.unlink(missing_ok=True)

    def _run(self, arguments: Sequence[str], within_s: float, interrupted_by: InterruptedBy) -> str | None:
        """Run the JVM with these; returns what went wrong."""
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
                    process.wait(within_s)
            except subprocess.TimeoutExpired:
                return f"it was not over within {within_s:g} s"
            finally:
                process.kill()
                process.wait()
        if not process.returncode:
            return None
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().partition("\n")[0]
        return f"its JVM ended with status {process.returncode} {said[:_SHOWN]}".rstrip()

    def _tell(self, what: str) -> None:
        self._say(f"JVM cache {self._folder}: {what}.")


def _archives(folder: Path, stem: str = "spark-") -> list[Path]:
    """The newest first."""

    def found() -> Iterator[tuple[float, Path]]:
        for file in folder.glob(f"{stem}*.jsa"):
            with suppress(OSError):
                yield file.stat().st_mtime, file

    return [file for _, file in sorted(found(), reverse=True)]


def _sum_of(file: Path) -> str | None:
    """Of its bytes, a tenth of a second of 160 MB; None when it is gone."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    except FileNotFoundError:
        return None
