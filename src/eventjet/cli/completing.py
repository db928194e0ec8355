"""What a shell is offered where a line names something of the app."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import typer

if TYPE_CHECKING:
    from eventjet.cli.target import AppTarget

Named: TypeAlias = Literal["projections", "aggregates", "processes", "work"]

_NAMES: Mapping[Named, Callable[[AppTarget], Iterable[str]]] = {
    "projections": lambda at: at.app().projections,
    "aggregates": lambda at: [info.name for info in at.app().aggregates.values()],
    "processes": lambda at: [info.name for info in at.app().processes.values()],
    "work": lambda at: at.work([]).names,
}


def _given(ctx: typer.Context) -> set[object]:
    """What the line names already."""
    values: Iterable[Any] = ctx.params.values()
    return {one for value in values if isinstance(value, list | tuple) for one in cast("Sequence[object]", value)}


def names_of(kind: Named) -> Callable[[typer.Context, str], list[str]]:
    """An `autocompletion` that offers the app's names of a kind.

    It imports the app and reaches nothing. Where that fails it offers nothing: a shell cannot show why.
    """

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        from eventjet.cli.target import target

        where: tuple[str | None, Path | None] = ctx.params.get("app"), ctx.params.get("app_dir")
        given = _given(ctx)
        try:
            # What an app prints when it is imported is not for the shell to read.
            with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                found = sorted(_NAMES[kind](target(*where, None, None)))
        except Exception:  # noqa: BLE001 - of the app's own module too
            return []
        return [name for name in found if name.startswith(incomplete) and name not in given]

    return complete
