"""`eventjet new` makes a project that passes its own tests and every check, and runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import eventjet
from tests import forked
from tests.acceptance.conftest import Program

TOOLS = {
    "tests": ("-m", "pytest", "-q"),
    "mypy": ("-m", "mypy"),
    "lint": ("-m", "ruff", "check", "."),
    "format": ("-m", "ruff", "format", "--check", "."),
    "pyright": ("-m", "pyright", "--pythonpath", sys.executable),
}


def new_project(folder: Path, name: str = "shop", *options: str) -> subprocess.CompletedProcess[str]:
    return forked.run("eventjet.cli", ("new", name, *options), folder=folder, environ=os.environ, timeout_s=120)


def test_a_project_has_no_other_name_than_its_own(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()  # an empty folder is accepted
    assert new_project(tmp_path).returncode == 0
    files = [file for file in (tmp_path / "shop").rglob("*") if file.is_file()]
    assert {".gitignore", "ci.yaml", "compose.yaml", "app.py", "test_tasks.py"} <= {file.name for file in files}
    assert not [file for file in files if "starter" in file.read_text(encoding="utf-8") or "starter" in str(file)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["shop"]


def test_caches_of_tools_in_the_template_are_not_copied(tmp_path: Path) -> None:
    package = tmp_path / "places/eventjet"
    shutil.copytree(Path(eventjet.__file__).parent, package, ignore=shutil.ignore_patterns("*.pyc"))
    for cache in (".ruff_cache/0.17", "starter/__pycache__"):
        (package / "starter" / cache).mkdir(parents=True, exist_ok=True)
        (package / "starter" / cache / "entry").write_bytes(b"\xff")
    ended = subprocess.run(
        [sys.executable, "-m", "eventjet.cli", "new", "shop"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (ended.returncode, list((tmp_path / "shop").rglob("*cache*"))) == (0, []), ended.stderr


def test_a_project_has_a_pipeline_with_the_option(tmp_path: Path) -> None:
    with_pipeline = forked.run(
        "eventjet.cli", ("new", "shop", "--pipeline"), folder=tmp_path, environ=os.environ, timeout_s=120
    )
    assert new_project(tmp_path, "plain").returncode == with_pipeline.returncode == 0
    assert not list(tmp_path.glob("plain/**/*pipeline*"))
    assert "duckdb" not in (tmp_path / "plain/pyproject.toml").read_text()
    files = {str(file.relative_to(tmp_path / "shop")): file for file in (tmp_path / "shop").rglob("*pipeline*/**/*")}
    assert {"pipeline/spark-pipeline.yml", "pipeline/transformations/tasks.py", "pipeline/.gitignore"} <= set(files)
    written = "".join(file.read_text() for file in files.values() if file.is_file())
    assert "/path/to" not in written
    # Spark refuses a relative folder.
    assert f"storage: {(tmp_path / 'shop/pipeline/storage').as_uri()}\n" in written
    assert f"databaseName={tmp_path}/shop/pipeline/catalog;" in written
    project = tomllib.loads((tmp_path / "shop/pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["eventjet[spark]"]
    assert "duckdb>=1.4" in project["optional-dependencies"]["dev"]


def test_a_folder_without_a_pipeline_is_named(tmp_path: Path) -> None:
    ended = forked.run("eventjet.cli", ("pipeline",), folder=tmp_path, environ=os.environ, timeout_s=120)
    assert (ended.returncode, "There is no spark-pipeline.yml in pipeline." in " ".join(ended.stderr.split())) == (
        2,
        True,
    )
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline/spark-pipeline.yml").touch()
    both = ("pipeline", "--dry-run", "--full-refresh")
    ended = forked.run("eventjet.cli", both, folder=tmp_path, environ=os.environ, timeout_s=120)
    assert (ended.returncode, "Leave one of them out." in " ".join(ended.stderr.split())) == (2, True)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Shop", "lowercase"),
        ("a-b", "as in a_b."),
        ("class", "lowercase"),
        ("json", "would hide"),
        ("pytest", "would hide"),
    ],
)
def test_a_name_that_is_no_package_is_refused(tmp_path: Path, name: str, says: str) -> None:
    ended = new_project(tmp_path, name)
    assert ended.returncode == 2
    assert says in " ".join(ended.stderr.split())
    assert not list(tmp_path.iterdir())


def test_a_folder_with_files_is_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/mine").touch()
    ended = new_project(tmp_path)
    assert (ended.returncode, "not empty" in ended.stderr) == (2, True)
    assert [entry.name for entry in tmp_path.rglob("*")] == ["shop", "mine"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_project_passes_its_tests_and_every_check(tmp_path: Path) -> None:
    assert new_project(tmp_path, "shop", "--pipeline").returncode == 0
    environ = {**os.environ, "SPARK_TESTING": "1"}  # a port of its own for Spark Connect
    for name, command in TOOLS.items():
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path / "shop", env=environ, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"


@pytest.mark.slow
def test_the_project_runs(tmp_path: Path, bank: Program) -> None:
    assert new_project(tmp_path).returncode == 0
    where = {name: bank.environ[name] for name in ("EVENTJET_SERVERS", "EVENTJET_DATABASE")}
    environ = {**os.environ, **where}
    environ.pop("EVENTJET_APP", None)

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=tmp_path / "shop",
            env=environ,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("eventjet.cli", "init")
    worker = subprocess.Popen([sys.executable, "-m", "eventjet.cli", "worker"], cwd=tmp_path / "shop", env=environ)
    try:
        assert run("shop", "add", "t-1", "Make tea") == "- t-1 Make tea\n"
        assert run("shop", "done", "t-1") == "x t-1 Make tea\n"
        refused = subprocess.run(
            [sys.executable, "-m", "shop", "done", "t-9"],
            cwd=tmp_path / "shop",
            env=environ,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert (refused.returncode, refused.stderr) == (1, "There is no such task; add it first.\n")
        assert "0 differences" in run("eventjet.cli", "verify", "tasks")
    finally:
        worker.terminate()
        worker.wait(120)
