"""Entries of the reference: `<!-- api: eventjet.App -->` in a page becomes what its signature and its docstring say.

`()` after the name leaves out how it is made, since eventjet makes it; `only load, history` tells which of its members
are described, and `only nothing` that none is. Docstrings are written as the rest is,
in Markdown; Sphinx takes reStructuredText, so what differs of what they use is translated: code in single back-ticks,
and fenced blocks.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from typing import Any

NOTE = re.compile(r"^<!-- api: (?P<name>[\w.]+)(?P<made>\(\))?(?: only (?P<only>[\w, ]+))? -->$", re.MULTILINE)
_CODE = re.compile(r"(?<![`:\w])`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
_IDENTIFIER = re.compile(r"[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that the reference describes."""

    name: str
    """From the package on, as it is imported."""
    signature: str
    """`()` instead of its own; empty for its own."""
    only: tuple[str, ...]
    """Its members; empty for all."""

    @property
    def value(self) -> Any:
        """What has that name."""
        module, _, attribute = self.name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def entries(page: str) -> list[Entry]:
    """All that a page describes."""
    return [_entry(found) for found in NOTE.finditer(page)]


def add(_app: object, _docname: str, source: list[str]) -> None:
    """Put the directives of Sphinx where a page names what they are to describe."""
    source[0] = NOTE.sub(lambda found: _directive(_entry(found)), source[0])


def translate(_app: object, _what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Make reStructuredText of a docstring."""
    lines[:] = _translated("\n".join(lines)).split("\n")


def sign(_app: object, _what: str, _name: str, obj: Any, _options: object, signature: str | None, returned: str) -> Any:
    """What is written, where Sphinx cannot read back what it has made of a decision's own parameters (PEP 612)."""
    if signature is None or "~P" not in signature:
        return None
    own = inspect.signature(obj)
    shown = own.replace(parameters=[one for one in own.parameters.values() if one.name != "self"])
    parameters, _, returned = (
        str(shown.replace(return_annotation=own.return_annotation)).replace("'", "").partition(" -> ")
    )
    return parameters, returned


def _entry(found: re.Match[str]) -> Entry:
    return Entry(found["name"], found["made"] or "", tuple(re.findall(r"\w+", found["only"] or "")))


def _directive(entry: Entry) -> str:
    kind = "class" if inspect.isclass(entry.value) else "function"
    kind = "exception" if kind == "class" and issubclass(entry.value, BaseException) else kind
    lines = [f".. auto{kind}:: {entry.name}{entry.signature}"]
    if kind != "function" and entry.only != ("nothing",):
        lines.append(f"   :members: {', '.join(entry.only)}")
    if kind == "exception":
        lines.append("   :show-inheritance:")
    return "\n".join(("```{eval-rst}", *lines, "```"))


def _translated(text: str) -> str:
    parts = re.split(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    texts = [_with_code(parts[0])]
    for language, block, after in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        indented = "\n".join(f"   {line}" if line else "" for line in block.splitlines())
        texts += [f".. code-block:: {language}\n\n{indented}\n", _with_code(after)]
    return "\n".join(texts)


def _with_code(text: str) -> str:
    return _CODE.sub(lambda found: _code(" ".join(found[1].split("\n"))), text)


def _code(text: str) -> str:
    return f":py:obj:`{text}`" if _IDENTIFIER.fullmatch(text) else f"``{text}``"
