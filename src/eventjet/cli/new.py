"""The command `eventjet new`: create a small project that runs, as a start for an application."""

from __future__ import annotations

import importlib.machinery
import keyword
import re
import shutil
import sys
import sysconfig
import tempfile
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

from eventjet.cli.output import Lines, show
from eventjet.cli.target import argument, switch
from eventjet.errors import UsageError

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_CACHE = re.compile(r"(^|/)(\.|__pycache__/)")
_TEMPLATE = "starter"
"""The name of the template project in the package, which the chosen name replaces."""
_PLACES = {
    "gitignore": ".gitignore",
    "ci.yaml": ".github/workflows/ci.yaml",
    "pipeline/gitignore": "pipeline/.gitignore",
}
"""Target of each template file that is packaged elsewhere, so that tools of eventjet's own project ignore it."""
_OF_PIPELINE = ("pipeline/", "tests/test_pipeline.py")
"""The places of the template that only a project with a pipeline has."""
_FOLDER = "/path/to/starter"
"""The name of the project's folder in the template: Spark takes no relative one."""
_WITH_PIPELINE = {
    'dependencies = ["eventjet"]': 'dependencies = ["eventjet[spark]"]',
    'dev = ["eventjet[dev,testing]", ': 'dev = ["eventjet[dev,testing]", "duckdb>=1.4", ',
    "* `compose.yaml`": "* `pipeline`: what Spark makes of the events; `eventjet pipeline` runs it.\n* `compose.yaml`",
}
"""Texts of the template, and what a project with a pipeline has instead."""


def new(
    name: Annotated[str, argument("NAME", "Of the project, its package and its app: letters, digits and _.")],
    pipeline: Annotated[bool, switch("--pipeline", "Add a pipeline on Spark: tables of the events in a lake.")] = False,
) -> None:
    """Make a folder with a small project that runs: a domain, a read model, tests, containers and CI.

    An existing folder is taken when it is empty. Nothing is started or installed.
    """
    folder = Path.cwd() / _checked(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{name!r} exists here already and is not empty. Choose another name, or move it away.")
    written = _write(name, folder, pipeline=pipeline)
    steps = Lines([f"  cd {name}", "  pytest", "  eventjet dev"])
    show([f"{len(written)} files in {name}. Next:", steps, "README.md there has the rest."])


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        near = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:40].rstrip("_")
        instead = f", as in {near}" if near != name and _NAME.fullmatch(near) and not keyword.iskeyword(near) else ""
        raise UsageError(
            f"{name!r} cannot be a package and a stream. Use up to 40 lowercase letters, digits and _, a letter "
            f"first{instead}."
        )
    if name in sys.stdlib_module_names or name in {"examples", "tests"} or _is_installed(name):
        raise UsageError(f"{name!r} would hide a module of that name. Choose another one.")
    return name


def _is_installed(name: str) -> bool:
    """Return whether a package of this name is installed, which the project would hide in its folder."""
    spec = importlib.machinery.PathFinder.find_spec(name, [sysconfig.get_paths()["purelib"]])
    return spec is not None or name == "eventjet"


def _write(name: str, folder: Path, *, pipeline: bool) -> list[Path]:
    """Write the project beside the folder, then move it there whole; return its files. Raises `UsageError`."""
    try:
        with (
            as_file(files("eventjet") / _TEMPLATE) as source,
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as beside,
        ):
            project = Path(beside) / name
            for template in sorted(source.rglob("*")):
                place = template.relative_to(source).as_posix()
                # Tools that have read the template leave caches in it.
                if template.is_dir() or _CACHE.search(place) or (place.startswith(_OF_PIPELINE) and not pipeline):
                    continue
                target = project / _PLACES.get(place, place.replace(_TEMPLATE, name))
                target.parent.mkdir(parents=True, exist_ok=True)
                text = template.read_text(encoding="utf-8")
                for part, instead in _WITH_PIPELINE.items() if pipeline else ():
                    text = text.replace(part, instead)
                text = _renamed(text, name, folder)
                target.write_text(text, encoding="utf-8", newline="\n")
            written = [file for file in project.rglob("*") if file.is_file()]
            if folder.exists():
                folder.rmdir()
            shutil.move(project, folder)
            return written
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}. Go to a folder that can be.") from error


def _renamed(text: str, name: str, folder: Path) -> str:
    parts = text.replace(f"file://{_FOLDER}", folder.as_uri()).split(_FOLDER)
    return str(folder).join(re.sub(rf"\b{_TEMPLATE}\b", name, part) for part in parts)
