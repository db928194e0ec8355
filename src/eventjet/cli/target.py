"""The target of a command: an app, its folder and settings, and the options that name them.

The app is named by `--app`, else `EVENTJET_APP`, else `[tool.eventjet] app = "…"` in `./pyproject.toml`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Literal, ParamSpec, TypeAlias, cast

import typer

from eventjet.cli.output import Answer
from eventjet.errors import UsageError
from eventjet.projections.app_ref import AppRef, projections_of
from eventjet.settings import Settings
from eventjet.urls import database_url, server_url, shown_master

if TYPE_CHECKING:
    from eventjet.app import App
    from eventjet.jet import Jet
    from eventjet.jetstream.client import Client
    from eventjet.jetstream.connection import NatsConnection
    from eventjet.nats.endpoint import Endpoint
    from eventjet.projections.sql_projection import AnyResolved
    from eventjet.subscriptions.supervisor import Chosen

P = ParamSpec("P")

Names: TypeAlias = Literal["projections", "aggregates", "processes", "work"]

_NAMES: Mapping[Names, Callable[[AppTarget], Iterable[str]]] = {
    "projections": lambda at: at.app().projections,
    "aggregates": lambda at: [info.name for info in at.app().aggregates.values()],
    "processes": lambda at: [info.name for info in at.app().processes.values()],
    "work": lambda at: at.work([]).names,
}


def argument(metavar: str, help: str, names: Names | None = None, **typer_options: Any) -> Any:  # noqa: A002 - as typer has it
    """Return an argument of a command; `names` is the kind of the app's names that a shell completes for it."""
    return typer.Argument(
        metavar=metavar, help=help, autocompletion=None if names is None else _complete(names), **typer_options
    )


def option(flag: str, metavar: str, help: str, names: Names | None = None, **typer_options: Any) -> Any:  # noqa: A002
    """Return an option with a value; `names` as for `argument`."""
    complete = None if names is None else _complete(names)
    return typer.Option(flag, metavar=metavar, help=help, autocompletion=complete, **typer_options)


def switch(flag: str, help: str, **typer_options: Any) -> Any:  # noqa: A002
    """Return an option without a value."""
    return typer.Option(flag, help=help, **typer_options)


def _complete(kind: Names) -> Callable[[typer.Context, str], list[str]]:
    """Return a function that completes the app's names of a kind, except those that the line has already.

    It imports the app and connects to nothing. Where the import fails it offers nothing, as a shell cannot show why.
    """

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        where: tuple[str | None, Path | None] = ctx.params.get("app"), ctx.params.get("app_dir")
        values: Iterable[Any] = ctx.params.values()
        lists = [cast("Sequence[object]", value) for value in values if isinstance(value, list | tuple)]
        typed = {item for value in lists for item in value}
        try:
            # Discard what the app prints on import: the shell would read it as names.
            with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                names = sorted(_NAMES[kind](target(*where, None, None)))
        except Exception:  # noqa: BLE001 - of the app's own module too
            return []
        return [name for name in names if name.startswith(incomplete) and name not in typed]

    return complete


AppOption = Annotated[
    str | None,
    option(
        "--app", "MODULE:NAME", "The App to work on; else tool.eventjet.app in ./pyproject.toml.", envvar="EVENTJET_APP"
    ),
]
AppDirOption = Annotated[
    Path | None,
    option("--app-dir", "FOLDER", "Where its module is imported from; default: the current folder."),
]
ServersOption = Annotated[
    str | None, option("--servers", "URL[,URL]", "NATS servers; else EVENTJET_SERVERS. No passwords here.")
]
DatabaseOption = Annotated[
    str | None, option("--database", "URL", "SQL database; else EVENTJET_DATABASE. No passwords here.")
]
MonitoringOption = Annotated[
    list[str] | None,
    option(
        "--monitoring",
        "URL",
        "A server's monitoring endpoint, http://host:8222; several times for several servers.",
        envvar="EVENTJET_MONITORING",
    ),
]
JsonOption = Annotated[bool, switch("--json", "Print JSON for programs.")]
YesOption = Annotated[bool, switch("--yes", "Do not ask.")]
PersonalOption = Annotated[
    bool, switch("--show-personal", "Show the fields that are marked personal; else they are hidden.")
]
AggregateArgument = Annotated[str, argument("AGGREGATE", "The aggregate's name, for instance account.", "aggregates")]
ProjectionArgument = Annotated[str, argument("PROJECTION", "Which one.", "projections")]


@dataclass(frozen=True, slots=True)
class AppTarget:
    """The reference of an app with its folder and settings; `app` imports it."""

    reference: str
    folder: Path
    settings: Settings

    @property
    def ref(self) -> AppRef:
        """The app's reference, for other processes that import it too."""
        return AppRef.parse(self.reference, self.folder)

    def chosen(self, names: Sequence[str]) -> list[str]:
        """Return the names of these projections, or of all for none. Raises `UsageError` for an unknown name."""
        return [resolved.name for resolved in projections_of(self.app(), names)]

    def work(self, names: Sequence[str]) -> Chosen:
        """Return the subscriptions of these names, or all for none; raises `UsageError` for an unknown name."""
        from eventjet.subscriptions.supervisor import chosen_of

        return chosen_of(self.app(), names)

    @asynccontextmanager
    async def jet(self) -> AsyncGenerator[Jet]:
        """Open a connection to the app's log. Raises `LogUnusable` where `eventjet init` has not run."""
        async with self.app().connect(self.settings) as jet:
            await jet.log()
            yield jet

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[Client]:
        """Open a connection to the server."""
        from eventjet.jetstream.client import connected

        async with connected(self.settings) as client:
            yield client

    def connection(self, name: str = "init") -> NatsConnection:
        """Open a connection to the server for requests that block, to be closed by `with`; `name` is the command's."""
        from eventjet.jetstream.connection import NatsConnection

        return NatsConnection.open(self.endpoint(name))

    def endpoint(self, name: str) -> Endpoint:
        """Return where the server is; `name` is the command's."""
        from eventjet.nats.endpoint import Endpoint

        return Endpoint.of(self.settings).with_name(f"eventjet {name}")

    def projection(self, name: str) -> AnyResolved:
        """Return the projection of this name. Raises `UsageError` for one that the app does not declare."""
        return projections_of(self.app(), [name])[0]

    def app(self) -> App:
        """Import the app and return it. Raises `UsageError` and `DefinitionError`."""
        from eventjet.app import load_app

        return load_app(self.reference, self.folder)


def on_app(
    *, servers: bool = True, database: bool = True
) -> Callable[[Callable[Concatenate[AppTarget, P], Answer | None]], Callable[..., None]]:
    """Return a decorator that makes a command of a function of an `AppTarget`.

    The command gets the options that name the app, and with `servers` and `database` their URLs. A command that returns
    an `Answer` also gets `--json`.
    """
    options = {"app": AppOption, "app_dir": AppDirOption}
    options |= {"servers": ServersOption} if servers else {}
    options |= {"database": DatabaseOption} if database else {}
    added = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind) for name, kind in options.items()]
    as_json = Parameter("json", Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption)

    def declare(run: Callable[Concatenate[AppTarget, P], Answer | None]) -> Callable[..., None]:
        declared = signature(run, eval_str=True)
        answers = declared.return_annotation is Answer
        _, *own_parameters = declared.parameters.values()
        parameters = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in own_parameters]
        parameters += [as_json, *added] if answers else added

        def command(**arguments: Any) -> None:
            where = [arguments.pop(name, None) for name in ("app", "app_dir", "servers", "database")]
            json = arguments.pop("json") if answers else False
            answer = cast("Callable[..., Answer | None]", run)(target(*where), **arguments)
            if answer is not None:
                answer.give(as_json=json)

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        setattr(command, "__signature__", Signature(parameters))  # noqa: B010 - a function declares no such attribute
        return command

    return declare


def target(app: str | None, app_dir: Path | None, servers: str | None, database: str | None) -> AppTarget:
    """Return the target that a command's options, the environment and pyproject.toml name. Raises `UsageError`."""
    settings = safe_settings(servers, database)
    folder = (app_dir or Path.cwd()).resolve()
    if not folder.is_dir():
        raise UsageError(f"--app-dir {folder} is not a folder. Name the one that holds the app's module.")
    return AppTarget(app or _from_pyproject(Path.cwd() / "pyproject.toml"), folder, settings)


def safe_settings(servers: str | None = None, database: str | None = None) -> Settings:
    """Return the settings with a command's options; raises `UsageError` for options that may hold a secret."""
    settings = Settings.load({"servers": servers, "database": database})
    # A user without a password in the URL of a NATS server may be a token.
    if servers and any(server_url(url).user is not None for url in settings.servers):
        raise _may_hold_secret("--servers", "EVENTJET_SERVERS")
    if database and database_url(database).holds_secret:
        raise _may_hold_secret("--database", "EVENTJET_DATABASE")
    return settings


def without_token(master: str | None) -> str | None:
    """Return the master of Spark from an option. Raises `UsageError` for parameters in it, which may hold a token."""
    if master is not None and master.startswith("sc:") and shown_master(master) != master.rstrip("/"):
        raise _may_hold_secret("--master", "SPARK_REMOTE")
    return master


def _may_hold_secret(option: str, variable: str) -> UsageError:
    return UsageError(
        f"The URL given with {option} may hold a secret, and everyone on this machine can read a command line. "
        f"Put it into the environment as {variable} instead."
    )


def _from_pyproject(file: Path) -> str:
    try:
        value: Any = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        value = None
    except (OSError, ValueError) as error:
        raise _unusable(file, str(error)) from None
    for key in ("tool", "eventjet", "app"):
        value = cast("dict[str, Any]", value).get(key) if isinstance(value, dict) else None
    if value is None:
        parent = next((folder for folder in file.parent.parents if _names_an_app(folder / "pyproject.toml")), None)
        hint = "" if parent is None else f" {parent}/pyproject.toml names one: run it in that folder."
        raise UsageError(
            "No app is named. Give --app module:name, set EVENTJET_APP, or write `[tool.eventjet]` with "
            f'`app = "module:name"` into ./pyproject.toml.{hint}'
        )
    if not isinstance(value, str):
        raise _unusable(file, f"[tool.eventjet] app is {value!r}, not text")
    return value


def _names_an_app(file: Path) -> bool:
    try:
        return "app" in tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["eventjet"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _unusable(file: Path, reason: str) -> UsageError:
    return UsageError(f"{file} cannot be used: {reason}. Fix it, or name the app with --app module:name.")
