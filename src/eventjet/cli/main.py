"""The `eventjet` program: which commands there are, and how they end.

A failed command says one paragraph on standard error, never a traceback unless asked for. Exit status: 0 done · 1 the
answer is no, or the work could not be finished · 2 wrong usage · 3 a component is unreachable · 70 a fault of
eventjet's own · 130 interrupted.
"""

from __future__ import annotations

import errno
import inspect
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandInfo

from eventjet import errors
from eventjet.cli.bulk import archive, audit, pipeline, rebuild, restore, snapshots, verify
from eventjet.cli.dev import demo, dev, server
from eventjet.cli.lake import lake
from eventjet.cli.log import history, skip, tail
from eventjet.cli.mirror import mirror
from eventjet.cli.new import new
from eventjet.cli.objects import objects
from eventjet.cli.output import ANSWER_IS_NO, INTERRUPTED, UNREACHABLE, note, warn_in_notes
from eventjet.cli.quarantine import commands as quarantine
from eventjet.cli.schema import schema
from eventjet.cli.setup import db, init, nats_config
from eventjet.cli.status import doctor, status
from eventjet.cli.subscriptions import cursor, deadlines, process
from eventjet.cli.ui import ui
from eventjet.cli.unique import unique
from eventjet.cli.worker import pause, resume, serve, worker
from eventjet.text import cut, suggestion

DONE = 0
WRONG_USAGE = 2
OWN_FAULT = 70
_COMPLETING = "_EVENTJET_COMPLETE"
"""The variable that a shell sets when it completes a line; it also uses the exit status."""
_ABOUT_USAGE = (errors.UsageError, errors.DefinitionError, errors.RebuildRefused, errors.Refused)
_ABOUT_COMPONENTS = (errors.Unreachable, errors.StoreUnavailable, errors.Forbidden)

EXAMPLES: Mapping[str, Sequence[str]] = {
    "new": ("eventjet new shop", "eventjet new shop --pipeline"),
    "dev": ("eventjet dev", "eventjet dev --reload --ui", "eventjet dev --temporary --postgres"),
    "server": ("eventjet server", "eventjet server --port 0 --store nats-data"),
    "demo": ("eventjet demo",),
    "init": ("eventjet init", "eventjet init --reset balances", "eventjet init --repair"),
    "worker": ("eventjet worker", "eventjet worker balances receipts --http 127.0.0.1:8080"),
    "serve": ("eventjet serve",),
    "pause": ("eventjet pause balances", "eventjet pause balances --revision 1"),
    "resume": ("eventjet resume balances",),
    "nats-config": ("eventjet nats-config > nats.conf", "eventjet nats-config --postgres > grants.sql"),
    "status": ("eventjet status", "eventjet status --watch --interval 5", "eventjet status --json"),
    "doctor": ("eventjet doctor",),
    "ui": (
        "eventjet ui",
        "eventjet ui --allow-actions",
        "eventjet ui --host 0.0.0.0 --access shop.access:by_proxy --public-url https://ops.example/shop",
    ),
    "history": ("eventjet history account a-1",),
    "tail": ("eventjet tail --follow", "eventjet tail --from 1 --json"),
    "process list": (
        "eventjet process list transfer",
        "eventjet process list transfer --stage postponed --older-than 2h",
    ),
    "process show": ("eventjet process show transfer t-1",),
    "process sync": ("eventjet process sync transfer", "eventjet process sync transfer t-1 t-2"),
    "deadlines list": ("eventjet deadlines list", "eventjet deadlines list transfer"),
    "quarantine list": ("eventjet quarantine list", "eventjet quarantine list balances --all"),
    "quarantine show": ("eventjet quarantine show balances 1234",),
    "quarantine retry": ("eventjet quarantine retry balances 1234", "eventjet quarantine retry balances --all"),
    "quarantine drop": ("eventjet quarantine drop balances 1234 1240",),
    "cursor set": ("eventjet cursor set receipts 1200",),
    "cursor drop": ("eventjet cursor drop old_receipts",),
    "rebuild": (
        "eventjet rebuild balances postings",
        "eventjet rebuild balances --dry-run",
        "eventjet rebuild balances --engine spark --master spark://head:7077",
        "eventjet rebuild balances --from-archive /var/archives/bank",
    ),
    "verify": ("eventjet verify balances postings", "eventjet verify balances --engine local --json"),
    "pipeline": (
        "eventjet pipeline",
        "eventjet pipeline --dry-run",
        "eventjet pipeline /srv/shop/pipeline --full-refresh",
    ),
    "snapshots build": ("eventjet snapshots build account", "eventjet snapshots build account --min-events 500"),
    "db upgrade": ("eventjet db upgrade",),
    "db promote": ("eventjet db promote balances",),
    "db unused": ("eventjet db unused", "eventjet db unused --drop balances:1"),
    "archive": ("eventjet archive /var/archives/bank", "eventjet archive s3a://bucket/bank --to 5000000"),
    "restore": ("eventjet restore /var/archives/bank",),
    "audit": ("eventjet audit", "eventjet audit --archive /var/archives/bank --examples 20"),
    "mirror create": ("eventjet mirror create", "eventjet mirror create --origin-api bank.api"),
    "mirror status": ("eventjet mirror status",),
    "mirror promote": ("eventjet mirror promote --dry-run", "eventjet mirror promote"),
    "objects status": ("eventjet objects status",),
    "objects sweep": ("eventjet objects sweep --dry-run", "eventjet objects sweep --older-than 7d"),
    "objects verify": ("eventjet objects verify",),
    "objects restore": ("eventjet objects restore /var/archives/bank",),
    "lake sync": (
        "eventjet lake sync /var/lake/bank",
        "eventjet lake sync s3://bucket/bank",
        "eventjet lake sync /var/lake/bank --format iceberg --from-archive /var/archives/bank",
    ),
    "lake export": (
        "eventjet lake export /var/lake/bank balances",
        "eventjet lake export /var/lake/bank balances --to 1000000",
    ),
    "lake status": ("eventjet lake status /var/lake/bank",),
    "lake verify": ("eventjet lake verify /var/lake/bank --json",),
    "unique build": ("eventjet unique build user", "eventjet unique build user email --keep-shared"),
    "unique check": ("eventjet unique check", "eventjet unique check user email"),
    "schema export": ("eventjet schema export --out schemas", "eventjet schema export --asyncapi > asyncapi.json"),
    "schema check": ("eventjet schema check --against main", "eventjet schema check --against-log 100"),
    "skip": ('eventjet skip 1234 --reason "published by a script, no event"',),
}
"""Examples in the help of each command, by the words after `eventjet`."""


class _PlainCommand(TyperCommand):
    """A command whose help does not mark flags as `<bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))


class _PlainGroup(TyperGroup):
    """A group of commands whose help does not mark flags as `<bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))


def _plain(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def _complete_help(app: typer.Typer) -> None:
    """Make the help of each command of its docstring and its examples, and leave `<bool>` out of every help."""
    for group in app.registered_groups:
        group.cls = _PlainGroup
    for name, command in commands_of(app):
        command.cls = _PlainCommand
        # typer keeps the line breaks of all paragraphs but the first.
        paragraphs = inspect.cleandoc(getattr(command.callback, "__doc__", None) or "").split("\n\n")
        command.help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
        lines = EXAMPLES.get(name, ())
        if lines:
            command.epilog = "\n".join([f"Example{'s' if len(lines) > 1 else ''}:", *(f"  {line}" for line in lines)])


def commands_of(app: typer.Typer) -> Iterator[tuple[str, CommandInfo]]:
    """Yield every command, those of groups too, with the words that name it."""
    for command in app.registered_commands:
        assert command.callback is not None
        yield command.name or command.callback.__name__.replace("_", "-"), command
    for group in app.registered_groups:
        within = group.typer_instance
        assert within is not None
        yield from ((f"{within.info.name} {name}", command) for name, command in commands_of(within))


app = typer.Typer(
    name="eventjet",
    help="Event sourcing on NATS JetStream: run, look at and rebuild the read models of an app.",
    epilog="Exit status: 0 done, 1 the answer is no, 2 wrong usage, 3 a component is unreachable.",
    no_args_is_help=True,
    cls=_PlainGroup,
    pretty_exceptions_enable=False,
)
_PANELS: dict[str, tuple[Callable[..., None] | typer.Typer, ...]] = {
    "Begin": (new, dev, server, demo),
    "Run": (init, worker, serve, pause, resume, nats_config),
    "Look": (status, doctor, ui, history, tail, process, deadlines, quarantine, cursor),
    "Read models": (rebuild, verify, db, snapshots, pipeline),
    "The log": (archive, restore, audit, mirror, objects, lake, skip, unique, schema),
}
for panel, commands in _PANELS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, rich_help_panel=panel)
        else:
            app.command(rich_help_panel=panel)(command)
_complete_help(app)


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


PROGRAM: Any = typer.main.get_command(app)
"""All commands as click has them; made once, since reading all their signatures takes a tenth of a second."""


def run() -> None:
    """Run the command line of this process, and end it with the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What goes to files and pipes is written on Windows in a code page that lacks most letters.
            stream.reconfigure(encoding="utf-8" if sys.platform == "win32" else None, errors="backslashreplace")
    warn_in_notes()
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command line, and return its exit status."""
    status = DONE
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (OSError, SystemExit) as error:
        if isinstance(error, SystemExit) and (not error.code or _COMPLETING in os.environ):
            sys.stdout.flush()
            return error.code if isinstance(error.code, int) else DONE
        # Standard output takes no more, and Python would write what is left when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError | SystemExit):
            return DONE  # its reader has closed it, as `head` does: typer exits then, and nobody could read a message
        if status == DONE:
            note(f"eventjet: The output could not be written: {error.strerror}. Send it elsewhere.")
        return status or ANSWER_IS_NO


def _run(arguments: Sequence[str]) -> int:
    remaining, debug = _without_debug(arguments)
    try:
        status = PROGRAM(remaining, prog_name="eventjet", standalone_mode=False)
    except (BrokenPipeError, typer.Abort):
        raise
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error)
            return WRONG_USAGE
        return report(error, debug=debug)
    return status if isinstance(status, int) else DONE


def _without_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments without `--debug`, and whether it was among them; it may stand anywhere before a `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    leading = [argument for argument in arguments[:end] if argument != "--debug"]
    return [*leading, *arguments[end:]], len(leading) < end


def report(error: BaseException, *, debug: bool) -> int:
    """Print an error on standard error, and return the exit status for it."""
    cause = _first_of(error)
    if debug:
        traceback.print_exception(error)
    note(f"eventjet: {_message(cause)}")
    return exit_status(cause)


def exit_status(error: BaseException) -> int:
    """Return the exit status of a command that ends with this error."""
    if isinstance(error, _ABOUT_USAGE) or _is_of_typer(error):
        return WRONG_USAGE
    if isinstance(error, _ABOUT_COMPONENTS):
        return UNREACHABLE
    return ANSWER_IS_NO if isinstance(error, errors.EventjetError) or _is_about_files(error) else OWN_FAULT


def _message(error: BaseException) -> str:
    if isinstance(error, errors.DefinitionError):
        return f"{error}\nFix them and try again."
    if isinstance(error, errors.EventjetError):
        return " ".join(str(error).split())
    if _is_of_typer(error):
        return _usage_text(error)
    if isinstance(error, OSError) and _is_about_files(error):
        what = f"{error.filename} cannot be used" if error.filename else "A file could not be written"
        return f"{what}: {error.strerror}. Make room, get the right to it, or name another place; then run it again."
    from eventjet.codec.reasons import faults_of

    description = f"{type(error).__name__}: {' '.join(faults_of(error).split())}".rstrip(": .")
    return (
        f"This is a fault of eventjet's own, not of what you typed ({description}). "
        "Run it again with --debug, and report the traceback that it prints."
    )


def _is_about_files(error: BaseException) -> bool:
    """Return whether an error is that of a file or folder, or of a full disk, and not of a connection."""
    return isinstance(error, OSError) and (error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT))


def _first_of(error: BaseException) -> BaseException:
    """Return the error to report of a group: the first of eventjet's own errors in it, else the first error."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    leaves = [_first_of(member) for member in group.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, errors.EventjetError)), leaves[0])


def _is_of_typer(error: BaseException) -> bool:
    """Return whether an error is one of typer's own, in whatever module its version defines them."""
    return hasattr(error, "format_message")


def _usage_text(error: Any) -> str:
    """Return one paragraph about an exception of typer's."""
    context = getattr(error, "ctx", None)
    path = "eventjet" if context is None else context.command_path
    option = getattr(error, "option_name", None)
    is_unknown = option is not None and hasattr(error, "possibilities")
    if is_unknown:
        text = _unknown_option(str(option), context)
    else:
        text = _invalid_value(error) or str(error.format_message())
    text = text if text.endswith((".", "?")) else f"{text}."
    return f"{text} See `{path} --help`."


def _invalid_value(error: Any) -> str:
    """Return what a parameter takes where its value is no such number; empty for any other error."""
    cause, param = error.__cause__, getattr(error, "param", None)
    if param is None or not hasattr(cause, "errors"):
        return ""
    (fault, *_) = cause.errors(include_url=False)
    takes = {
        "int_parsing": "a whole number",
        "float_parsing": "a number",
        "greater_than_equal": "{ge} or more",
        "less_than_equal": "{le} or less",
    }.get(fault["type"])
    if takes is None:
        return ""
    text = takes.format(**fault.get("ctx", {}))
    if param.metavar == "POSITION":
        text = "a position of the log, which is a whole number: 1, 2, 3 and on"
    name = next((name for name in param.opts if name.startswith("--")), param.metavar)
    return f"{name} is given as {cut(str(fault['input']), 60)!r}. Give {text}."


def _unknown_option(option: str, context: Any) -> str:
    text = f"There is no option {option} here."
    if context is None:
        return text
    # Without their dashes, which make all options similar.
    near = suggestion(option.lstrip("-"), [name.lstrip("-") for name in _options(context.command)])
    if near:
        return f"{text} {near.rstrip()}".replace("mean '", "mean '--")
    # Some people put the option of a command before the command.
    holders = [
        name for name, command in getattr(context.command, "commands", {}).items() if option in _options(command)
    ]
    return f"{text} It follows the command, as in `eventjet {holders[0]} {option}`." if holders else text


def _options(command: Any) -> list[str]:
    return [name for parameter in command.params for name in parameter.opts if name.startswith("--")]
