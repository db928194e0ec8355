"""`llms.txt` and `llms-full.txt` (llmstxt.org): the same pages for those that read text alone."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING

import navigation
import reference

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_ROOT = Path(__file__).parents[2]
_LEFT_OUT = ("Decisions", "Project")
"""Of the whole text: history, which answers no question on how to do something."""


def write(app: Sphinx, failure: Exception | None) -> None:
    """Beside the site, once that is built."""
    if failure is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir)
    for name, text in texts().items():
        (folder / name).write_text(text, encoding="utf-8")


def texts() -> dict[str, str]:
    """Both files: one lists the pages with what each is about, the other is what they say."""
    readme = (_ROOT / "README.md").read_text(encoding="utf-8")
    listed, optional, whole = ["# eventjet", "", f"> {_summary(readme)}", "", "- [README](README.html)"], [""], [readme]
    for caption, pages in navigation.sections().items():
        lines = optional if caption in _LEFT_OUT else listed
        lines += [] if lines is optional else ["", f"## {caption}", ""]
        for page in pages:
            text = (_ROOT / f"{page}.md").read_text(encoding="utf-8")
            lines.append(f"- [{_title(text)}]({page}.html): {_summary(text)}")
            if lines is listed:
                whole.append(f"<!-- {page}.md -->\n\n{_expanded(text)}")
    listed += ["", "## Optional", *optional]
    return {"llms.txt": "\n".join(listed) + "\n", "llms-full.txt": "\n\n".join(whole) + "\n"}


def _title(text: str) -> str:
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    assert found is not None, text[:80]
    return found[1]


def _summary(text: str) -> str:
    """The first sentence below the title, without its links."""
    paragraphs = [one for one in re.split(r"\n\n+", text) if re.match(r"\w|\*\*|[`\[@](?!``)", one)] or [""]
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(paragraphs[0].split()))
    return re.split(r"(?<=\w\.)\s", plain, maxsplit=1)[0].rstrip(":")


def _expanded(text: str) -> str:
    return reference.NOTE.sub(lambda found: _text_of(next(iter(reference.entries(found[0])))), text)


def _text_of(entry: reference.Entry) -> str:
    """An entry of the reference as text: signatures and docstrings of a name and its members."""
    value = entry.value
    parts = [f"### {entry.name}{entry.signature or _signature(value)}", inspect.getdoc(value) or ""]
    if inspect.isclass(value):
        for name, member in vars(value).items():
            if name.startswith("_") or (entry.only and name not in entry.only) or not inspect.getdoc(member):
                continue
            if inspect.isfunction(member) or isinstance(member, property | classmethod):
                parts += [f"#### {name}{_signature(member)}", inspect.getdoc(member) or ""]
    return "\n\n".join(parts)


def _signature(value: object) -> str:
    try:
        return str(inspect.signature(getattr(value, "__func__", value)))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
