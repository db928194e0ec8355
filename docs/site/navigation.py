"""The order of the pages. One that is not named here comes last in its folder; one that is not there is no fault."""

from __future__ import annotations

from pathlib import Path

FIRST = "README"

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"

# caption → folder, and its pages in order. A folder's last caption takes the pages that nobody names.
_SECTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Tutorial": ("tutorial", ("first-project", "bank", "transfers")),
    "How to: build": (
        "how-to",
        (
            "commands",
            "unique",
            "testing",
            "blocking",
            "django",
            "flask",
            "celery",
            "fastapi",
            "starlette",
            "jupyter",
            "read-models",
            "keys",
            "large-bodies",
            "read-your-writes",
            "schema",
            "revisions",
        ),
    ),
    "How to: make things happen": (
        "how-to",
        ("processes", "reactors", "publications", "inboxes", "serve", "tail", "nats-clients"),
    ),
    "How to: question the log": ("how-to", ("audit", "dataframes", "spark-source", "pipelines", "archive", "lake")),
    "How to: run": (
        "how-to",
        (
            "production",
            "doctor",
            "console",
            "workers",
            "deploy",
            "poolers",
            "nats-on-kubernetes",
            "security",
            "observe",
            "upgrade",
            "rebuild",
            "spark-cluster",
            "snapshots",
            "quarantine",
            "backup",
            "second-region",
            "restore",
            "partial-restore",
            "changed-log",
        ),
    ),
    "Reference": (
        "reference",
        (
            "cli",
            "commands",
            "settings",
            "platforms",
            "errors",
            "wire-format",
            "tables",
            "metrics",
            "bulk-jobs",
            "performance",
        ),
    ),
    "API": (
        "reference/api",
        (
            "declare",
            "connection",
            "read-models",
            "reactions",
            "testing",
            "errors",
            "bulk-jobs",
            "lake",
            "spark",
            "console",
        ),
    ),
    "Explanation": (
        "explanation",
        (
            "how-it-works",
            "glossary",
            "decisions",
            "exactly-once",
            "ordering",
            "durability",
            "jetstream",
            "scaling",
            "architecture",
        ),
    ),
    "Decisions": ("decisions", ("README",)),
}


def sections() -> dict[str, list[str]]:
    """Caption → its pages that are there, by their names from the root of the repository."""
    named = {(folder, page) for folder, pages in _SECTIONS.values() for page in pages}
    last = {folder: caption for caption, (folder, _) in _SECTIONS.items()}
    found: dict[str, list[str]] = {}
    for caption, (folder, pages) in _SECTIONS.items():
        there = sorted(path.stem for path in (_DOCS / folder).glob("*.md"))
        rest = [page for page in there if (folder, page) not in named] if last[folder] == caption else []
        found[caption] = [f"docs/{folder}/{page}" for page in (*pages, *rest) if page in there]
    return {**found, "Project": ["CHANGELOG", "CONTRIBUTING", "SECURITY", "tests/README"]}


def add(_app: object, docname: str, source: list[str]) -> None:
    """Give the first page the tree of all others, which the site shows beside each."""
    if docname == FIRST:
        trees = [
            "\n".join(("", "```{toctree}", ":hidden:", f":caption: {caption}", *(f"/{page}" for page in pages), "```"))
            for caption, pages in sections().items()
            if pages
        ]
        source[0] += "\n".join(trees) + "\n"
