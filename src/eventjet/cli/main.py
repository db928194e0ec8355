"""The `eventjet` program: which commands there are, and how they end.

A failed command says one paragraph on standard error, never a traceback unless asked for. Exit status: 0 done · 1 the
answer is no, or the work could not be finished · 2 wrong usage · 3 a component is unreachable · 70 a fault of
eventjet's own · 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, cast

import typer

from eventjet import errors
from eventjet.cli.archive import archive, restore
from eventjet.cli.audit import audit
from eventjet.cli.cursor import cursor
from eventjet.cli.db import db, init
from eventjet.cli.doctor import doctor
from eventjet.cli.help_text import PlainGroup, complete_help
from eventjet.cli.history import history, tail
from eventjet.cli.nats_config import nats_config
from eventjet.cli.new import new
from eventjet.cli.process import deadlines, process
from eventjet.cli.quarantine import commands as quarantine
from eventjet.cli.rebuild import rebuild, snapshots, verify
from eventjet.cli.schema import schema
from eventjet.cli.serve import serve
from eventjet.cli.status import status
from eventjet.cli.terminal import ANSWER_IS_NO, INTERRUPTED, UNREACHABLE, note
from eventjet.cli.ui import ui
from eventjet.cli.unique import unique
from eventjet.cli.void import void
from eventjet.cli.worker import demo, dev, pause, resume, worker
from eventjet.cli.wrong_usage import is_of_typer, told

DONE = 0
WRONG_USAGE = 2
OWN_FAULT = 70
_COMPLETING = "_EVENTJET_COMPLETE"
"""A shell that completes a line sets it, and asks by the exit status too."""
_ABOUT_USAGE = (errors.UsageError, errors.DefinitionError, errors.RebuildRefused, errors.Refused)
_ABOUT_COMPONENTS = (errors.Unreachable, errors.StoreUnavailable, errors.Forbidden)

app = typer.Typer(
    name="eventjet",
    help="Event sourcing on NATS JetStream: run, look at and rebuild the read models of an app.",
    epilog="Exit status: 0 done, 1 the answer is no, 2 wrong usage, 3 a component is unreachable.",
    no_args_is_help=True,
    cls=PlainGroup,
    pretty_exceptions_enable=False,
)
_PANELS: dict[str, tuple[Callable[..., None] | typer.Typer, ...]] = {
    "Begin": (new, dev, demo),
    "Run": (init, worker, serve, pause, resume, nats_config),
    "Look": (status, doctor, ui, history, tail, process, deadlines, quarantine, cursor),
    "Read models": (rebuild, verify, db, snapshots),
    "The log": (archive, restore, audit, void, unique, schema),
}
for panel, commands in _PANELS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, rich_help_panel=panel)
        else:
            app.command(rich_help_panel=panel)(command)
complete_help(app)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks; also allowed after a command.")] = False,
) -> None:
    """Event sourcing on NATS JetStream: run, look at and rebuild the read models of an app."""
    del debug  # taken by `main` before typer sees it
    if version:
        from importlib.metadata import version as installed

        print(installed("eventjet"))
        raise typer.Exit


def run() -> None:
    """What the console script comes to."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit status."""
    try:
        status = _ended(arguments)
        sys.stdout.flush()
        return status
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (BrokenPipeError, SystemExit) as ended:
        if isinstance(ended, SystemExit) and (not ended.code or _COMPLETING in os.environ):
            sys.stdout.flush()
            return ended.code if isinstance(ended.code, int) else DONE
        # The reader of our output left, as `head` does (typer exits then); there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def _ended(arguments: Sequence[str]) -> int:
    given, debug = _without_debug(arguments)
    try:
        status = app(given, prog_name="eventjet", standalone_mode=False)
    except (BrokenPipeError, typer.Abort):
        raise
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error)
            return WRONG_USAGE
        return report(error, debug=debug)
    return status if isinstance(status, int) else DONE


def _without_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """`--debug` may stand anywhere before a lone `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != "--debug"]
    return [*kept, *arguments[end:]], len(kept) < end


def report(error: BaseException, *, debug: bool) -> int:
    """Say what happened on standard error; returns the exit status."""
    cause = _first_of(error)
    if debug:
        traceback.print_exception(error)
    note(f"eventjet: {_message(cause)}")
    return exit_status(cause)


def exit_status(error: BaseException) -> int:
    """The status a command ends with when this is what stopped it."""
    if isinstance(error, _ABOUT_USAGE) or is_of_typer(error):
        return WRONG_USAGE
    if isinstance(error, _ABOUT_COMPONENTS):
        return UNREACHABLE
    return ANSWER_IS_NO if isinstance(error, errors.EventjetError) else OWN_FAULT


def _message(error: BaseException) -> str:
    if isinstance(error, errors.DefinitionError):
        return f"{error}\nFix them and try again."
    if isinstance(error, errors.EventjetError):
        return " ".join(str(error).split())
    if is_of_typer(error):
        return told(error)
    from eventjet.codec.reasons import faults_of

    said = f"{type(error).__name__}: {' '.join(faults_of(error).split())}".rstrip(": .")
    return (
        f"This is a fault of eventjet's own, not of what you typed ({said}). "
        "Run it again with --debug, and report the traceback that it prints."
    )


def _first_of(error: BaseException) -> BaseException:
    """What a group of errors is about: the first of eventjet's own in it, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    leaves = [_first_of(member) for member in group.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, errors.EventjetError)), leaves[0])
