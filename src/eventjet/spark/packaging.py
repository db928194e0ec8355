"""Take an application to where it is needed: by reference, and its top-level package where the folder is not there.

A projection is made of functions, types and tables that refer to one another, and pickling them fails in ways that
depend on the module they are in (facts in `docs/explanation`). So tasks import the application themselves.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from eventjet.codec.catalog import Catalog
from eventjet.domain.aggregate import AggregateInfo
from eventjet.errors import UsageError
from eventjet.projections.sql_projection import AnyResolved

if TYPE_CHECKING:
    from eventjet.spark.session import Started

SHIPPED_BYTES_MAX = 50_000_000
"""A top-level package larger than this is data, and belongs into the executors' image."""

_MAIN = "__eventjet_main__"
_EPOCH = (1980, 1, 1, 0, 0, 0)


class Wired(Protocol):
    """What bulk work needs of an `App`."""

    @property
    def name(self) -> str: ...
    @property
    def catalog(self) -> Catalog: ...
    @property
    def aggregates(self) -> Mapping[Any, AggregateInfo]: ...
    @property
    def projections(self) -> Mapping[str, AnyResolved]: ...


@dataclass(frozen=True, slots=True)
class AppRef:
    """Where an application is; a value that can be pickled."""

    module: str
    attribute: str
    path: tuple[str, ...] = ()
    """Folders that come first on the path of whoever loads it; those that are not there are passed over."""
    file: str | None = None
    """The file of a program (`__main__`), which is imported under another name elsewhere."""

    @classmethod
    def parse(cls, reference: str, folder: Path | None = None) -> AppRef:
        """`module:attribute`, with `folder` (default: the current one) on the path; raises `UsageError`."""
        module, _, attribute = reference.partition(":")
        if not module or not attribute:
            raise UsageError(f"{reference!r} does not name an app. Write it as module:name, for instance bank:bank.")
        path = (str((folder or Path.cwd()).resolve()),)
        if module != "__main__":
            return cls(module, attribute, path)
        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is None:
            raise UsageError("An app typed into a console cannot be imported elsewhere. Write it into a module.")
        return cls(module, attribute, (str(Path(file).resolve().parent),), str(Path(file).resolve()))

    @classmethod
    def of(cls, app: Wired) -> AppRef:
        """Where a module holds this very app by a name; raises `UsageError`."""
        found = [
            (module, attribute)
            for module, loaded in list(sys.modules.items())
            for attribute, value in list(getattr(loaded, "__dict__", {}).items())
            if value is app and (module == "__main__" or getattr(loaded, "__spec__", None) is not None)
        ]
        if not found:
            raise UsageError(
                f"No module holds the app {app.name!r} by a name, so tasks cannot import it. Assign it at the top of a "
                'module, or name it with `AppRef.parse("module:name")`.'
            )
        # A module is entered before those it imports: the last one is the app's own.
        module, attribute = next((one for one in reversed(found) if one[0] != "__main__"), found[-1])
        top = None if module == "__main__" else _top_level(module)
        return cls.parse(f"{module}:{attribute}", top.parent if top is not None else None)

    def load(self) -> Wired:
        """Import it; what its module raises passes through. Raises `UsageError` when there is no app there."""
        for entry in reversed(self.path):
            if entry not in sys.path and Path(entry).is_dir():
                sys.path.insert(0, entry)
        found: Any = getattr(self._module(), self.attribute, None)
        if not isinstance(getattr(found, "projections", None), Mapping):
            raise UsageError(f"{self.attribute!r} in the module {self.module!r} is not an App. Name the one it holds.")
        return found

    def _module(self) -> ModuleType:
        if self.file is None:
            return importlib.import_module(self.module)
        running = sys.modules["__main__"]
        if getattr(running, "__file__", None) and Path(str(running.__file__)).resolve() == Path(self.file):
            return running
        if not Path(self.file).exists():
            return importlib.import_module(Path(self.file).stem)
        return sys.modules.get(_MAIN) or _imported_from(self.file)


def ship(started: Started, app: AppRef, scratch: Path) -> AppRef:
    """The reference to use in this session's tasks, after its package has been sent where it has to be.

    Tasks on this machine read the folder itself. Anywhere else they get the top-level package (or module) unless it is
    installed, in which case it must be installed there too.
    """
    if started.local:
        return app
    top = Path(app.file) if app.file else _top_level(app.module)
    if top is None:
        return app
    packed = pack(top)
    archive = scratch / f"{top.stem}-{hashlib.sha256(packed).hexdigest()[:12]}.zip"
    archive.write_bytes(packed)
    spark: Any = started.spark
    spark.addArtifacts(str(archive), pyfile=True)
    return replace(app, path=())


def send_files(folder: Path, started: Started) -> None:
    """Give the tasks of a cluster the files of a folder: in neither plan nor log, and gone with the session."""
    spark: Any = started.spark
    for file in sorted(folder.iterdir()) if not started.local else ():
        spark.addArtifacts(str(file), file=True)


def pack(top: Path) -> bytes:
    """A module or a package as a zip that Python can import from; equal content gives equal bytes."""
    buffer = io.BytesIO()
    total = 0
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in _contents(top):
            name = path.relative_to(top.parent).as_posix()
            if path.is_dir():
                # Python finds packages without `__init__.py` in a zip by the entry of their folder.
                archive.writestr(zipfile.ZipInfo(f"{name}/", _EPOCH), b"")
                continue
            data = path.read_bytes()
            total += len(data)
            if total > SHIPPED_BYTES_MAX:
                raise UsageError(
                    f"{top} holds more than {SHIPPED_BYTES_MAX // 1_000_000} MB, too much to send along with a task. "
                    "Install it where the tasks run and pass --no-ship."
                )
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data)
    return buffer.getvalue()


def _contents(top: Path) -> Iterator[Path]:
    yield top
    if top.is_dir():
        for path in sorted(top.rglob("*")):
            parts = path.relative_to(top).parts
            if not any(part == "__pycache__" or part.startswith(".") for part in parts):
                yield path


def _top_level(module: str) -> Path | None:
    """The file or folder of a module's top-level package; None when it is installed."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is None:
        return None
    if spec.submodule_search_locations:
        found = Path(next(iter(spec.submodule_search_locations)))
    elif spec.origin and Path(spec.origin).exists():
        found = Path(spec.origin)
    else:
        return None
    installed = {Path(sysconfig.get_paths()[kind]).resolve() for kind in ("purelib", "platlib", "stdlib")}
    return None if installed & set(found.resolve().parents) else found.resolve()


def _imported_from(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MAIN, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} is not Python. Write the app into a module.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MAIN] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # A task that is tried again would find the half of it.
        sys.modules.pop(_MAIN, None)
        raise
    return module
