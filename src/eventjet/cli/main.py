"""The `eventjet` program: which commands there are, and how they end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from eventjet.cli import failure
from eventjet.cli.archive import archive
from eventjet.cli.db import db
from eventjet.cli.demo import demo
from eventjet.cli.dev import dev
from eventjet.cli.history import history
from eventjet.cli.init import init
from eventjet.cli.pause import pause, resume
from eventjet.cli.quarantine import commands as quarantine
from eventjet.cli.rebuild import rebuild
from eventjet.cli.restore import restore
from eventjet.cli.snapshots import snapshots
from eventjet.cli.status import status
from eventjet.cli.tail import tail
from eventjet.cli.verify import verify
from eventjet.cli.worker import worker

app = typer.Typer(
    name="eventjet",
    help="Event sourcing on NATS JetStream: run, look at and rebuild the read models of an app.",
    epilog="Exit status: 0 done, 1 the answer is no, 2 wrong usage, 3 a component is unreachable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (init, worker, rebuild, verify, archive, restore, status, pause, resume, history, tail, dev, demo):
    app.command()(command)
app.add_typer(quarantine, name="quarantine")
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
    """The console script."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit status."""
    given, debug = _without_debug(arguments)
    try:
        status = app(given, prog_name="eventjet", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return failure.INTERRUPTED
    except (BrokenPipeError, SystemExit):
        # The reader of our output left, as `head` does (typer exits then); there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return failure.DONE
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error)
            return failure.WRONG_USAGE
        return failure.report(error, debug=debug)
    return status if isinstance(status, int) else failure.DONE


def _without_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """`--debug` may stand anywhere before a lone `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [one for one in arguments[:end] if one != "--debug"]
    return [*kept, *arguments[end:]], len(kept) < end


if __name__ == "__main__":
    run()
