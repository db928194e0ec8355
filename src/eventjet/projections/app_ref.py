"""`Application`, the part of an `App` that lower packages use, and `AppRef`, a reference from which an app is imported.

A projection consists of functions, types and tables that refer to one another, and pickling them fails in ways that
depend on their module. Therefore a process that needs an application imports it, and only the reference is pickled.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from eventjet.errors import EventjetError, UnexpectedExit, UsageError
from eventjet.text import listed, suggestion

if TYPE_CHECKING:
    # Only for checkers: a command line is parsed without SQLAlchemy.
    from eventjet.codec.catalog import Catalog
    from eventjet.domain.aggregate import AggregateInfo
    from eventjet.domain.decision import Served
    from eventjet.domain.process import ProcessInfo
    from eventjet.domain.reactor import Inbox, Publication, Reactor
    from eventjet.projections.projection import Entries, Projection
    from eventjet.projections.sql_projection import AnyResolved, SqlProjection

Declared: TypeAlias = "Projection[Any, Any] | Entries[Any, Any] | SqlProjection"
"""A projection as an application declares it."""


class Application(Protocol):
    """An application's declarations, checked and resolved; implemented by `eventjet.App`."""

    @property
    def name(self) -> str:
        """The name of the application, which is also the name of its stream."""
        ...

    @property
    def catalog(self) -> Catalog: ...

    @property
    def aggregates(self) -> Mapping[Any, AggregateInfo]: ...

    @property
    def projections(self) -> Mapping[str, AnyResolved]: ...

    @property
    def processes(self) -> Mapping[Any, ProcessInfo]:
        """The processes by their class."""
        ...

    @property
    def reactors(self) -> Mapping[str, Reactor[Any, Any]]: ...

    @property
    def inboxes(self) -> Mapping[str, Inbox[Any, Any]]: ...

    @property
    def publications(self) -> Mapping[str, Publication[Any]]: ...

    @property
    def served(self) -> Sequence[Served]: ...

    @property
    def deps(self) -> Callable[[], AbstractAsyncContextManager[Any]] | None:
        """The function that opens the dependencies of reactors; None where they have none."""
        ...


def projections_of(app: Application, names: Sequence[str]) -> list[AnyResolved]:
    """Return the projections of these names, once each, or all when no name is given; raises `UsageError`."""
    for name in names:
        if name not in app.projections:
            raise UsageError(
                f"The app {app.name!r} has no projection {name!r}. "
                f"{suggestion(name, app.projections)}It has {listed(app.projections)}."
            )
    return [app.projections[name] for name in dict.fromkeys(names)] or list(app.projections.values())


def aggregate_of(app: Application, name: str) -> tuple[Any, AggregateInfo]:
    """Return the class and the declaration of the aggregate of this name; raises `UsageError`."""
    for cls, info in app.aggregates.items():
        if info.name == name:
            return cls, info
    names = sorted(info.name for info in app.aggregates.values())
    raise UsageError(
        f"The app {app.name!r} has no aggregate {name!r}. {suggestion(name, names)}It has {listed(names)}."
    )


@dataclass(frozen=True, slots=True)
class AppRef:
    """A reference to an application in a module; a value that can be pickled.

    ```python
    ref = AppRef.parse("eventjet.examples.bank.app:bank")
    assert ref.load().name == "bank"
    ```
    """

    module: str
    attribute: str
    path: tuple[str, ...] = ()
    """Folders that `load` puts first on `sys.path`; folders that do not exist are skipped."""

    @classmethod
    def parse(cls, reference: str, folder: Path | None = None) -> AppRef:
        """Parse `module:attribute`, with `folder` (default: the current one) to import from; raises `UsageError`."""
        module, _, attribute = reference.partition(":")
        if not module or not attribute:
            raise UsageError(
                f"{reference!r} does not say what to import. Write it as module:name, for instance bank:bank."
            )
        return cls(module, attribute, (str((folder or Path.cwd()).resolve()),))

    @classmethod
    def of(cls, app: Application) -> AppRef:
        """Return the reference to the module and the name that hold this very app; raises `UsageError`."""
        # A module comes before those that it imports in `sys.modules`: the last holder is the app's own module.
        for module, loaded in reversed(list(sys.modules.items())):
            if module == "__main__" or getattr(loaded, "__spec__", None) is None:
                continue
            for attribute, value in list(vars(loaded).items()):
                if value is app:
                    top = top_level(module)
                    return cls.parse(f"{module}:{attribute}", top.parent if top is not None else None)
        raise UsageError(
            f"No module holds the app {app.name!r} by a name, so tasks cannot import it. Assign it at the top of a "
            'module that the program imports, or name it with `AppRef.parse("module:name")`.'
        )

    def load(self) -> Application:
        """Import the app; raises `UsageError` when that fails or it is not an app, and whatever its `App` raises."""
        module = self._imported()
        app: Any = getattr(module, self.attribute, None)
        if not _is_app(app):
            raise self._no_app(module)
        return app

    def function(self) -> Callable[..., Any]:
        """Import a function, where the reference names one instead of an app; raises `UsageError` for anything else."""
        module = self._imported()
        target: Any = getattr(module, self.attribute, None)
        if callable(target) and not isinstance(target, type):
            return target
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        hint = (
            "" if hasattr(module, self.attribute) else f"There is no such name. {suggestion(self.attribute, functions)}"
        )
        raise UsageError(
            f"{self.attribute!r} in the module {self.module!r} is not a function. {hint}Name one as module:name."
        )

    def _imported(self) -> ModuleType:
        for entry in reversed(self.path):
            if entry not in sys.path and Path(entry).is_dir():
                sys.path.insert(0, entry)
        try:
            return importlib.import_module(self.module)
        except EventjetError:
            raise
        except SystemExit as error:
            raise UsageError(
                f"The module of '{self.module}:{self.attribute}' ended the program when it was imported "
                f'(exit {error.code}). Move what it runs under `if __name__ == "__main__":`.'
            ) from error
        except ModuleNotFoundError as error:
            raise self._missing_module(error) from error
        except BaseException as exception:  # noqa: BLE001 - whatever it is, it is the application's
            error = UnexpectedExit.instead_of(exception)
            raise UsageError(
                f"The module {self.module!r} failed when it was imported: {type(exception).__name__}: {exception}. "
                "Fix it first."
            ) from error

    def _no_app(self, module: ModuleType) -> UsageError:
        apps = sorted(name for name, value in vars(module).items() if _is_app(value))
        hint = f"It holds {listed(apps)}." if apps else "It holds no App."
        module_name = f"{self.module}.{self.attribute}"
        if not apps and self.attribute in _modules_below(module):
            hint = f"It is a module: name an App that it holds, as in {module_name}:app."
        elif not hasattr(module, self.attribute):
            hint = f"There is no such name. {suggestion(self.attribute, apps)}{hint}"
        return UsageError(f"{self.attribute!r} in the module {self.module!r} is not an App. {hint}")

    def _missing_module(self, error: ModuleNotFoundError) -> UsageError:
        if error.name and (self.module == error.name or self.module.startswith(error.name + ".")):
            searched = f" in {', '.join(self.path)}" if self.path else ""
            package, dot, _ = error.name.rpartition(".")
            neighbours = _modules_below(sys.modules.get(package)) if package else _modules_in(self.path)
            hint = suggestion(error.name, [f"{package}{dot}{name}" for name in neighbours])
            if self.module.endswith(".py"):
                hint = f"Write the module's name, not its file's: {self.module.removesuffix('.py')}:{self.attribute}. "
            return UsageError(
                f"There is no module {error.name!r} for '{self.module}:{self.attribute}'{searched}. "
                f"{hint}Run from the folder that holds it, or name that folder with --app-dir."
            )
        return UsageError(
            f"The module {self.module!r} needs {error.name!r}, which is not installed. Install it and try again."
        )


def loaded(app: Application | AppRef) -> Application:
    """Return the application, imported if this is a reference; raises what `AppRef.load` raises."""
    return app.load() if isinstance(app, AppRef) else app


def top_level(module: str) -> Path | None:
    """Return the file or folder of a module's top-level package; None when it is installed or has no file."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is None:
        return None
    if spec.submodule_search_locations:
        top = Path(next(iter(spec.submodule_search_locations)))
    elif spec.origin and Path(spec.origin).exists():
        top = Path(spec.origin)
    else:
        return None
    installed = {Path(sysconfig.get_paths()[kind]).resolve() for kind in ("purelib", "platlib", "stdlib")}
    return None if installed & set(top.resolve().parents) else top.resolve()


def _modules_below(package: ModuleType | None) -> list[str]:
    return _modules_in(getattr(package, "__path__", ()))


def _modules_in(path: Iterable[str]) -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(list(path)))


def _is_app(value: object) -> bool:
    return isinstance(getattr(value, "projections", None), Mapping)
