"""What is said of a line that typer cannot parse: what is wrong in it, what was perhaps meant, where to look."""

from __future__ import annotations

from typing import Any

from eventjet.spelling import meant


def is_of_typer(error: BaseException) -> bool:
    """Typer's own exceptions, wherever its version keeps them."""
    return hasattr(error, "format_message")


def told(error: Any) -> str:
    """One paragraph about an exception of typer's."""
    context = getattr(error, "ctx", None)
    path = "eventjet" if context is None else context.command_path
    option = getattr(error, "option_name", None)
    is_unknown = option is not None and hasattr(error, "possibilities")
    text = _unknown_option(str(option), context) if is_unknown else str(error.format_message())
    text = text if text.endswith((".", "?")) else f"{text}."
    return f"{text} See `{path} --help`."


def _unknown_option(option: str, context: Any) -> str:
    text = f"There is no option {option} here."
    if context is None:
        return text
    near = meant(option, _options(context.command))
    if near:
        return f"{text} {near.rstrip()}"
    # Options of all commands are looked for by those who put them first.
    holders = [name for name, one in getattr(context.command, "commands", {}).items() if option in _options(one)]
    return f"{text} It follows the command, as in `eventjet {holders[0]} {option}`." if holders else text


def _options(command: Any) -> list[str]:
    return [name for parameter in command.params for name in parameter.opts if name.startswith("--")]
