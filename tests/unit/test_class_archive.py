"""The archive of a JVM's classes: made once, used, and never in the way. With a real Java and one jar."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from pyspark.find_spark_home import _find_spark_home  # pyright: ignore[reportPrivateUsage]

from eventjet.dev.stack import Stack
from eventjet.errors import UsageError
from eventjet.rebuild import EngineOptions
from eventjet.settings import Settings
from eventjet.spark.class_archive import KEPT, ClassArchive, Jvm, JvmCache
from eventjet.spark.jvm import find_java

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no archives there")

MAIN = "org.apache.commons.codec.cli.Digest"


def uninterrupted(_: Callable[[], None]) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass
class Room:
    """A folder of archives, a small program, and what was told."""

    path: Path
    jvm: Jvm
    told: list[str] = field(default_factory=list[str])
    sessions: int = 0

    @property
    def folder(self) -> Path:
        return self.path / "cache"

    def archives(self) -> list[Path]:
        return sorted(self.folder.glob("*.jsa"))

    def archive(self, folder: Path | None = None, jvm: Jvm | None = None) -> ClassArchive:
        """For the next session."""
        self.sessions += 1
        scratch = self.path / f"scratch-{self.sessions}"
        scratch.mkdir()
        return ClassArchive(JvmCache(folder or self.folder, self.told.append), jvm or self.jvm, scratch)

    def run(self, archive: ClassArchive, options: Sequence[str] | None = None) -> str:
        """Run the program, and tell where its class was loaded from."""
        log = self.path / f"loaded-{self.sessions}"
        command = [str(self.jvm.program), "-cp", self.jvm.class_path, *self.jvm.options]
        command += archive.options() if options is None else options
        command += [f'-Xlog:class+load:file="{log}"', MAIN, "MD5"]
        ran = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: ran.poll() is not None or (log.exists() and f" {MAIN} " in log.read_text()))
            archive.check(ran.pid)
            said, _ = ran.communicate(b"text", timeout=60)  # it reads to the end, and writes its sum
        finally:
            ran.kill()
            ran.wait()
        assert said.startswith(b"1cb251ec0d568de6a929b520c4aed8d1"), said
        return next(line for line in log.read_text().splitlines() if f" {MAIN} " in line)

    def session(self, folder: Path | None = None, jvm: Jvm | None = None) -> str:
        """A whole one; returns where its program's class came from."""
        archive = self.archive(folder, jvm)
        loaded = self.run(archive)
        archive.make(uninterrupted)
        return loaded


def wait_until(true: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def room(tmp_path: Path) -> Room:
    jars = tmp_path / "jars"
    jars.mkdir()
    (jar,) = (Path(_find_spark_home()) / "jars").glob("commons-codec-*.jar")
    shutil.copy(jar, jars)
    java = find_java()
    return Room(tmp_path, Jvm(java.program, java.version, "9.9", ("-Xmx64m", "-XX:+UseSerialGC"), f"{jars}/*", jars))


def test_the_first_session_makes_an_archive_and_the_next_uses_it(room: Room) -> None:
    assert "shared objects file" not in room.session()
    (made,) = room.archives()
    assert ["once" in told for told in room.told] == [True, False]
    assert room.folder.stat().st_mode & 0o777 == 0o700
    assert "shared objects file" in room.session()
    assert room.archives() == [made]
    assert len(room.told) == 2
    assert {file.suffix for file in room.folder.iterdir()} == {".jsa", ".lock"}


def test_sessions_that_end_at_the_same_time_make_one_archive(room: Room) -> None:
    # A lock of a file is its opener's, so threads exclude each other as processes do.
    ended = [room.archive() for _ in range(4)]
    for archive in ended:
        room.run(archive)
    threads = [threading.Thread(target=archive.make, args=(uninterrupted,)) for archive in ended]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(room.archives()) == 1
    assert len([told for told in room.told if "making" in told]) == 1
    assert list(room.folder.glob("*.making")) == []


def test_a_damaged_archive_is_removed_and_made_again(room: Room) -> None:
    room.session()
    (made,) = room.archives()
    made.chmod(0o600)
    with made.open("r+b") as file:
        file.seek(made.stat().st_size // 2)
        file.write(b"not what was there")
    room.told.clear()
    assert "shared objects file" not in room.session()
    assert "is damaged" in room.told[0]
    assert "shared objects file" in room.session()
    assert len(room.told) == 3


def test_an_archive_that_the_jvm_does_not_take_is_removed_and_nothing_fails(room: Room) -> None:
    other = replace(room.jvm, options=("-Xmx64m", "-XX:+UseSerialGC", "-XX:ObjectAlignmentInBytes=16"))
    room.session()
    (made,) = room.archives()
    made.rename(room.folder / made.name.replace(room.jvm.stem(), other.stem()))
    room.told.clear()
    archive = room.archive(jvm=other)
    room.jvm = other
    assert "shared objects file" not in room.run(archive)
    archive.make(uninterrupted)
    (told,) = room.told
    assert "does not take" in told
    assert room.archives() == []
    room.session()
    assert "shared objects file" in room.session()


def test_an_archive_that_is_deleted_before_the_jvm_starts_is_not_missed(room: Room) -> None:
    room.session()
    archive = room.archive()
    options = archive.options()
    shutil.rmtree(room.folder)
    assert "shared objects file" not in room.run(archive, options)
    archive.make(uninterrupted)
    room.session()
    assert "shared objects file" in room.session()


@pytest.mark.parametrize("folder", ["/proc/eventjet-cache", "/proc/self"])
def test_a_folder_that_cannot_be_written_to_is_told_once_a_session(room: Room, folder: str) -> None:
    assert "shared objects file" not in room.session(Path(folder))
    (told,) = room.told
    assert told.startswith(f"JVM cache {folder}: ")


def test_a_folder_that_others_may_write_to_is_not_used(room: Room) -> None:
    room.session()
    room.folder.chmod(0o777)
    room.told.clear()
    archive = room.archive()
    assert archive.options() == []
    archive.make(uninterrupted)
    (told,) = room.told
    assert "others may write to it" in told


def test_a_class_path_with_a_folder_is_told_and_left_alone(room: Room) -> None:
    other = replace(room.jvm, class_path=f"{room.path}:{room.jvm.class_path}")
    assert room.archive(jvm=other).options() == []
    assert "class path" in room.told[0]
    assert not room.folder.exists()


def test_another_spark_another_java_other_options_and_other_jars_have_archives_of_their_own(room: Room) -> None:
    (jar,) = room.jvm.jars.iterdir()
    before = room.jvm.stem()
    others = [replace(room.jvm, spark="9.8"), replace(room.jvm, version=99), replace(room.jvm, options=("-Xmx65m",))]
    stems = {before, *(other.stem() for other in others)}
    os.utime(jar, (1, 1))
    assert len({*stems, room.jvm.stem()}) == 5


def test_a_folder_keeps_few_archives_and_nothing_of_those_that_were_not_finished(room: Room) -> None:
    room.folder.mkdir(mode=0o700)
    for number in range(KEPT + 2):
        old = room.folder / f"spark-1-java-1-{number:016x}-{number:016x}.jsa"
        old.touch()
        os.utime(old, (number + 1, number + 1))
    (room.folder / "notes.txt").touch()
    abandoned, fresh = room.folder / "spark-1-java-1-0-1.making", room.folder / "spark-1-java-1-0-2.making"
    abandoned.touch()
    fresh.touch()
    os.utime(abandoned, (1, 1))
    room.session()
    assert len(room.archives()) == KEPT
    assert (room.folder / f"spark-1-java-1-{KEPT + 1:016x}-{KEPT + 1:016x}.jsa").exists()
    assert not abandoned.exists()
    assert fresh.exists()
    assert (room.folder / "notes.txt").exists()


def test_a_making_that_is_interrupted_leaves_nothing(room: Room) -> None:
    def interrupted(end: Callable[[], None]) -> AbstractContextManager[None]:
        end()
        return nullcontext()

    archive = room.archive()
    room.run(archive)
    archive.make(interrupted)
    assert "no archive was made" in room.told[-1]
    assert [file.suffix for file in room.folder.iterdir()] == [".lock"]


def test_a_stack_passes_the_folder_on_to_the_shells_that_are_pointed_at_it(tmp_path: Path) -> None:
    stack = Stack(tmp_path, "nats://127.0.0.1:4222", "sqlite:///read.db", "http://127.0.0.1:8222")
    assert "EVENTJET_JVM_CACHE" not in stack.write_exports("bank:bank").read_text()
    written = stack.write_exports("bank:bank", Path("a folder")).read_text()
    assert f"export EVENTJET_JVM_CACHE='{Path.cwd()}/a folder'\n" in written


def test_a_folder_that_java_would_read_as_two_is_refused(tmp_path: Path) -> None:
    named = f"{tmp_path}{os.pathsep}more"
    with pytest.raises(UsageError, match="EVENTJET_JVM_CACHE holds a ':'"):
        Settings.load(environ={"EVENTJET_JVM_CACHE": named})
    assert Settings.load(environ={"EVENTJET_JVM_CACHE": str(tmp_path)}).jvm_cache == tmp_path
    assert Settings.load(environ={}).jvm_cache is None


def test_what_is_named_for_one_job_comes_before_the_settings(tmp_path: Path) -> None:
    settings = Settings.load({"jvm_cache": tmp_path}, environ={})
    assert EngineOptions().on(settings).jvm_cache == tmp_path
    assert EngineOptions(jvm_cache=tmp_path / "own").on(settings).jvm_cache == tmp_path / "own"
    assert EngineOptions().on(Settings()).jvm_cache is None
