"""`docs/reference/commands.md`, made from what the program itself knows: `python -m tests.docs.commands` writes it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from eventjet.cli.main import EXAMPLES, app, commands_of

PAGE = Path(__file__).parents[2] / "docs/reference/commands.md"
SHARED = ("--json", "--app", "--app-dir", "--servers", "--database")
"""Told once, at the top."""
_WIDTH = 120
_HEAD = """\
# Commands: arguments, options, examples

What `--help` says of every command, made from the program by `python -m tests.docs.commands`. What the commands do in
full, and the JSON that they print: [command line](cli.md).

Most commands take these as well; their own help says which.

{shared}
"""


def page() -> str:
    """The whole page."""
    found = {name: _parsed(name) for name, _ in commands_of(app)}
    options = {one.opts[0]: one for command in found.values() for one in command.params if one.opts[0] in SHARED}
    parts = [_HEAD.format(shared="\n".join(_told(options[name]) for name in SHARED))]
    parts += ["\n".join(_section(name, command)) for name, command in found.items()]
    return "\n".join(parts)


def _parsed(name: str) -> Any:
    command: Any = typer.main.get_command(app)
    for word in name.split():
        command = command.commands[word]
    return command


def _section(name: str, command: Any) -> Iterator[str]:
    usage = " ".join(command.collect_usage_pieces(typer.Context(command)))
    yield f"## eventjet {name}\n"
    yield f"`eventjet {name} {usage}`\n"
    for paragraph in inspect.cleandoc(command.help).split("\n\n"):
        yield textwrap.fill(" ".join(paragraph.split()), _WIDTH, break_on_hyphens=False) + "\n"
    own = [one for one in command.params if one.opts[0] not in SHARED and not getattr(one, "hidden", False)]
    if own:
        yield "\n".join(map(_told, own)) + "\n"
    yield "\n".join(["```text", *EXAMPLES[name], "```", ""])


def _told(one: Any) -> str:
    is_option = one.param_type_name == "option"
    called = " ".join(filter(None, [", ".join(one.opts), one.metavar])) if is_option else str(one.metavar)
    default = one.default if one.default not in (None, False, ()) and one.show_default else None
    told = [
        one.help or "",
        "" if default is None or callable(default) else f"Default: `{default}`.",
        f"Environment: `{one.envvar}`." if one.envvar else "",
        "Required." if is_option and one.required else "",
    ]
    text = f"* `{called}`: {' '.join(filter(None, told))}"
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
