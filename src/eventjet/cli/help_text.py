"""What `--help` shows beside what typer takes from signatures: lines that people type, which tests parse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandInfo

EXAMPLES: Mapping[str, Sequence[str]] = {
    "new": ("eventjet new shop",),
    "dev": ("eventjet dev", "eventjet dev --reload --ui", "eventjet dev --temporary --postgres"),
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
    "verify": ("eventjet verify balances", "eventjet verify balances --engine local --json"),
    "snapshots build": ("eventjet snapshots build account", "eventjet snapshots build account --min-events 500"),
    "db upgrade": ("eventjet db upgrade",),
    "db promote": ("eventjet db promote balances",),
    "db unused": ("eventjet db unused", "eventjet db unused --drop balances:1"),
    "archive": ("eventjet archive /var/archives/bank", "eventjet archive s3a://bucket/bank --to 5000000"),
    "restore": ("eventjet restore /var/archives/bank",),
    "audit": ("eventjet audit", "eventjet audit --archive /var/archives/bank --examples 20"),
    "unique build": ("eventjet unique build user", "eventjet unique build user email --keep-shared"),
    "unique check": ("eventjet unique check", "eventjet unique check user email"),
    "schema export": ("eventjet schema export --out schemas", "eventjet schema export --asyncapi > asyncapi.json"),
    "schema check": ("eventjet schema check --against main", "eventjet schema check --against-log 100"),
    "void": ('eventjet void 1234 --reason "published by a script, no event"',),
}
"""By the words after `eventjet`."""


class PlainCommand(TyperCommand):
    """A command whose help says of no flag that it is a `<bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """As `PlainCommand`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))


def _plain(params: list[Any]) -> list[Any]:
    for one in params:
        if getattr(one, "is_flag", False) and one.metavar is None:
            one.metavar = ""
    return params


def complete_help(app: typer.Typer) -> None:
    """Have the help of each command end with its examples, and say no more than it must."""
    for group in app.registered_groups:
        group.cls = PlainGroup
    for name, command in commands_of(app):
        command.cls = PlainCommand
        lines = EXAMPLES.get(name, ())
        if lines:
            command.epilog = "\n".join([f"Example{'s' if len(lines) > 1 else ''}:", *(f"  {line}" for line in lines)])


def commands_of(app: typer.Typer) -> Iterator[tuple[str, CommandInfo]]:
    """All commands with the words that name them."""
    for command in app.registered_commands:
        assert command.callback is not None
        yield command.name or command.callback.__name__.replace("_", "-"), command
    for group in app.registered_groups:
        within = group.typer_instance
        assert within is not None
        yield from ((f"{within.info.name} {name}", command) for name, command in commands_of(within))
