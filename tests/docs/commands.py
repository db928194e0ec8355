"""`docs/reference/commands.md`, made from the program itself: `python -m tests.docs.commands` writes it."""

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
"""Options that are described once, at the top."""
_WIDTH = 120
_HEAD = """\
# Commands: arguments, options, examples

What `--help` says of every command, made from the program by `python -m tests.docs.commands`. What the commands do in
full, and the JSON that they print: [command line](cli.md).

Most commands take these as well; their own help says which.

{shared}
"""


def page() -> str:
    """Return the whole page."""
    commands = {name: _parsed(name) for name, _ in commands_of(app)}
    options = {
        option.opts[0]: option for command in commands.values() for option in command.params if option.opts[0] in SHARED
    }
    parts = [_HEAD.format(shared="\n".join(_described(options[name]) for name in SHARED))]
    parts += ["\n".join(_section(name, command)) for name, command in commands.items()]
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
    own = [option for option in command.params if option.opts[0] not in SHARED and not getattr(option, "hidden", False)]
    if own:
        yield "\n".join(map(_described, own)) + "\n"
    yield "\n".join(["```text", *EXAMPLES[name], "```", ""])


def _described(option: Any) -> str:
    is_option = option.param_type_name == "option"
    called = " ".join(filter(None, [", ".join(option.opts), option.metavar])) if is_option else str(option.metavar)
    default = option.default if option.default not in (None, False, ()) and option.show_default else None
    sentences = [
        option.help or "",
        "" if default is None or callable(default) else f"Default: `{default}`.",
        f"Environment: `{option.envvar}`." if option.envvar else "",
        "Required." if is_option and option.required else "",
    ]
    text = f"* `{called}`: {' '.join(filter(None, sentences))}"
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
