"""Every block of Python and every command in README and docs runs, and prints what the page shows."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import nbformat
import pytest
from opentelemetry import trace
from opentelemetry.util._once import Once

from eventjet.cli.main import app
from eventjet.dev.nats import NatsServer
from eventjet.dev.server import reserved_port
from eventjet.observability import tracing
from tests.docs.pages import Running, blocks_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOK = ROOT / "docs/how-to/jupyter.md"
LONG = {
    "second-region.md",
    "workers.md",
    "snapshots.md",
    "tail.md",
    "rebuild.md",
    "bank.md",
    "celery.md",
    "django.md",
    "fastapi.md",
    "first-project.md",
    "flask.md",
    "keys.md",
    "lake.md",
    "processes.md",
    "quarantine.md",
    "read-models.md",
    "revisions.md",
    "starlette.md",
    "testing.md",
    "transfers.md",
}
"""Pages that start many programs one after the other."""
ON_SPARK = {
    "README.md",
    "archive.md",
    "backup.md",
    "dataframes.md",
    "partial-restore.md",
    "pipelines.md",
    "restore.md",
    "spark-cluster.md",
    "spark-source.md",
}
"""Pages that start Spark."""
READ_BY_OTHERS = {"nats-clients.md", "publications.md", "wire-format.md"}
"""Pages whose readers are other programs: FastStream, and node with what `make test-slow` installs."""


@pytest.fixture
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    """A page in an empty folder, beside a server of its own and an empty database: every page has a bank."""
    with NatsServer(sync_interval="1m") as nats, pytest.MonkeyPatch.context() as patch:
        # A page may set OpenTelemetry's provider, which is for the whole process, and other tests run in it.
        patch.setattr(trace, "_TRACER_PROVIDER", None)
        patch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
        patch.setattr(tracing, "_active", None)
        yield from _running(request.param, tmp_path, nats)


def _running(path: Path, tmp_path: Path, nats: NatsServer) -> Iterator[Running]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("EVENTJET_")}
    environ |= {
        "EVENTJET_SERVERS": nats.url,
        "EVENTJET_DATABASE": f"sqlite:///{tmp_path / 'read.db'}",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "COLUMNS": "80",
        # Otherwise every Spark Connect server of this machine takes the same port.
        "SPARK_TESTING": "1",
    }
    page = Running(path, tmp_path, environ)
    try:
        with ExitStack() as stack:
            # The ports that configurations on the page name may be taken on this machine.
            named = {port for block in blocks_of(path) for port in re.findall(r"127\.0\.0\.1:(43\d\d)\b", block.text)}
            page.ports = {port: str(stack.enter_context(reserved_port())) for port in sorted(named)}
            yield page
    finally:
        page.close()


@pytest.mark.timeout(1_500)
@pytest.mark.parametrize(
    "running",
    [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=[pytest.mark.slow] if page.name in ON_SPARK | READ_BY_OTHERS | LONG else [],
        )
        for page in PAGES
        if page != NOTEBOOK
    ],
    indirect=True,
)
def test_the_page_does_what_it_says(running: Running) -> None:
    for block in blocks_of(running.page):
        running.run(block)


@pytest.mark.slow
@pytest.mark.timeout(1_500)
@pytest.mark.parametrize("running", [NOTEBOOK], indirect=True)
def test_the_cells_of_the_notebook_page_run_in_a_kernel(running: Running) -> None:
    cells = [nbformat.v4.new_code_cell(block.text) for block in blocks_of(running.page) if block.language == "python"]
    path = running.folder / "page.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    done = subprocess.run(
        [sys.executable, "-c", "from nbclient.cli import main; main()", "--timeout=1200", str(path)],
        cwd=running.folder, env=running.environ, capture_output=True, text=True, timeout=1_300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_a_block_that_is_copied_from_a_file_is_in_that_file(page: Path) -> None:
    for block in blocks_of(page):
        if block.note in ("from", "part"):
            source = (ROOT / str(block.path)).read_text(encoding="utf-8")
            assert block.text in source, f"{page}:{block.line} is not in {block.path}"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_the_text_before_a_file_names_it(page: Path) -> None:
    """The comment that names the file for the tests is not visible to readers."""
    text = page.read_text(encoding="utf-8")
    for comment in re.finditer(r"<!-- file: (\S+) -->", text):
        preceding = text[: comment.start()].rpartition("\n```\n")[2]
        assert f"`{comment[1]}`" in preceding, f"{page} names no {comment[1]}"


def test_the_readme_and_the_demo_have_one_bank() -> None:
    (block_text,) = [block.text for block in blocks_of(ROOT / "README.md") if block.path == "bank.py"]
    assert block_text == (ROOT / "examples/demo_bank.py").read_text(encoding="utf-8")


def test_the_reference_names_every_command_and_option() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    commands = [("", command) for command in app.registered_commands]
    for group in app.registered_groups:
        assert group.typer_instance is not None
        named = group.name if isinstance(group.name, str) else group.typer_instance.info.name
        commands += [(f"{named} ", registered) for registered in group.typer_instance.registered_commands]
    for group_name, command in commands:
        assert command.callback is not None
        assert f"`eventjet {group_name}{command.name or command.callback.__name__.replace('_', '-')}" in page
        for name, parameter in inspect.signature(command.callback, eval_str=True).parameters.items():
            for declaration in getattr(parameter.annotation, "__metadata__", ()):
                options = [
                    option for option in getattr(declaration, "param_decls", ()) or () if option.startswith("--")
                ]
                assert declaration.hidden or all(option in page for option in options), (
                    command.callback.__name__,
                    name,
                )


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page} links to {target}"


def test_the_tutorial_is_the_example_in_files_of_the_readers_own() -> None:
    blocks = {block.path: block.text for block in blocks_of(ROOT / "docs/tutorial/bank.md")}
    files = {"account.py": "account.py", "read_models.py": "read_models.py", "bank.py": "app.py"}
    for name, path in (files | {"test_bank.py": "tests/test_bank.py"}).items():
        source = (ROOT / "examples/bank" / path).read_text(encoding="utf-8")
        for own, module in files.items():
            source = source.replace(f"eventjet.examples.bank.{module[:-3]} ", f"{own[:-3]} ")
        assert blocks[name] == source
