"""The `eventjet` program: which commands there are, and how they end.

A failed command says one paragraph on standard error, never a traceback unless asked for. Exit status: 0 done · 1 the
answer is no, or the work could not be finished · 2 wrong usage · 3 a component is unreachable · 70 a fault of
eventjet's own · 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, cast

import typer

from eventjet import errors
from eventjet.cli.archive import archive, restore
from eventjet.cli.audit import audit
from eventjet.cli.cursor import cursor
from eventjet.cli.db import db, init
from eventjet.cli.doctor import doctor
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
from eventjet.cli.unique import unique
from eventjet.cli.void import void
from eventjet.cli.worker import demo, dev, pause, resume, worker

DONE = 0
WRONG_USAGE = 2
OWN_FAULT = 70
_ABOUT_USAGE = (errors.UsageError, errors.DefinitionError, errors.RebuildRefused, errors.Refused)
_ABOUT_COMPONENTS = (errors.Unreachable, errors.StoreUnavailable, errors.Forbidden)

app = typer.Typer(
    name="eventjet",
    help="Event sourcing on NATS JetStream: run, look at and rebuild the read models of an app.",
    epilog="Exit status: 0 done, 1 the answer is no, 2 wrong usage, 3 a component is unreachable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    new,
    init,
    worker,
    serve,
    rebuild,
    verify,
    audit,
    archive,
    restore,
    status,
    doctor,
    pause,
    resume,
    history,
    tail,
    void,
    dev,
    demo,
    nats_config,
):
    app.command()(command)
app.add_typer(quarantine, name="quarantine")
app.add_typer(process, name="process")
app.add_typer(deadlines, name="deadlines")
app.add_typer(cursor, name="cursor")
app.add_typer(unique, name="unique")
app.add_typer(schema)
app.add_typer(db)
app.add_typer(snapshots)


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
    given, debug = _without_debug(arguments)
    try:
        status = app(given, prog_name="eventjet", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (BrokenPipeError, SystemExit):
        # The reader of our output left, as `head` does (typer exits then); there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
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
    if isinstance(error, _ABOUT_USAGE) or _is_usage(error):
        return WRONG_USAGE
    if isinstance(error, _ABOUT_COMPONENTS):
        return UNREACHABLE
    return ANSWER_IS_NO if isinstance(error, errors.EventjetError) else OWN_FAULT


def _message(error: BaseException) -> str:
    if isinstance(error, errors.DefinitionError):
        return f"{error}\nFix them and try again."
    if isinstance(error, errors.EventjetError):
        return " ".join(str(error).split())
    if _is_usage(error):
        text = str(error.format_message())  # type: ignore[attr-defined]  known by its name only
        text = text if text.endswith((".", "?")) else f"{text}."
        return f"{text} See `eventjet --help`, or `--help` after the command."
    from eventjet.codec.faults import faults_of

    said = f"{type(error).__name__}: {' '.join(faults_of(error).split())}".rstrip(": .")
    return (
        f"This is a fault of eventjet's own, not of what you typed ({said}). "
        "Run it again with --debug, and report the traceback that it prints."
    )


def _is_usage(error: BaseException) -> bool:
    """Typer's own exceptions, wherever its version keeps them."""
    return hasattr(error, "format_message")


def _first_of(error: BaseException) -> BaseException:
    """What a group of errors is about: the first of eventjet's own in it, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    leaves = [_first_of(member) for member in group.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, errors.EventjetError)), leaves[0])
