"""An audit reports what administrators and other programs did to a log, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from eventjet import App, Settings
from eventjet.codec.headers import RawRecord
from eventjet.dev.nats import NatsServer
from eventjet.errors import ArchiveBroken
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.jetstream.api import stream_info
from eventjet.jetstream.connection import NatsConnection, ask_once
from eventjet.log.integrity import repair
from eventjet.log.topology import IDENTITY, stream_config
from eventjet.rebuild import AuditReport, Kind, Progress, audit, restore
from tests.integration.restoring import NAME, append_raw, delete, endpoint, fill, records_of, seal
from tests.logs import block

APP = App(NAME, aggregates=[Account], upcasters=[withdrawn_has_a_reason])


class Log:
    """A bank's log of 155 events, and an archive of its first 120 events."""

    def __init__(self, url: str, folder: Path, **config: object) -> None:
        self.url = url
        self.settings = Settings(servers=(url,))
        delete(url)
        if config:
            full = {**stream_config(NAME, 1), "metadata": {IDENTITY: str(uuid4())}, **config}
            self.ask(f"STREAM.CREATE.{NAME}", **full)
        asyncio.run(fill(APP, url, 83))
        self.records: Sequence[RawRecord] = records_of(url)
        assert len(self.records) == 155
        self.identity = ask_once(endpoint(url), stream_info(NAME)).metadata[IDENTITY]
        self.archive = seal(folder, self.records[:120], self.identity)

    def ask(self, subject: str, **body: object) -> dict[str, Any]:
        with NatsConnection.open(endpoint(self.url)) as link:
            return link.api(subject, body)

    def update(self, **config: object) -> None:
        """Change the stream's configuration, as an administrator would."""
        stream = ask_once(endpoint(self.url), stream_info(NAME))
        self.ask(f"STREAM.UPDATE.{NAME}", **{**stream.config, **config})

    def audited(self, archive: str | None = None) -> AuditReport:
        return asyncio.run(audit(APP, self.settings, archive=archive, examples=1_000))

    def ranges_by_kind(self, archive: str | None = None) -> dict[Kind, list[str]]:
        """Return the examples of all findings as text, by kind of finding."""
        return {
            finding.kind: [
                f"{example.first}-{example.last} {example.subject.removeprefix(f'{NAME}.account.')}: {example.what}"
                for example in finding.examples
            ]
            for finding in self.audited(archive).findings
        }


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer(sync_interval="1m") as server:
        yield server


@pytest.fixture
def log(server: NatsServer, tmp_path: Path) -> Log:
    return Log(server.url, tmp_path / "past")


def test_a_log_that_only_apps_wrote_is_sound_also_after_a_restore(log: Log) -> None:
    report = log.audited()
    assert (report.sound, report.findings, report.events, report.aggregates) == (True, (), 155, 42)
    report = log.audited(log.archive)
    assert report.sound
    assert report.archive is not None
    assert (report.archive.first, report.archive.last, report.archive.compared) == (1, 120, 120)
    delete(log.url)
    asyncio.run(restore(APP, log.archive, log.settings, engine="local"))
    report = log.audited(log.archive)
    assert (report.findings, report.events) == ((), 120)


def test_an_empty_log_is_sound(log: Log) -> None:
    delete(log.url)

    async def init() -> None:
        async with APP.connect(log.settings) as jet:
            await jet.init()

    asyncio.run(init())
    assert (log.audited().sound, log.audited().events) == (True, 0)
    with pytest.raises(ArchiveBroken, match="it is of the log"):
        log.audited(log.archive)


def test_first_events_that_a_limit_dropped_are_reported(log: Log) -> None:
    log.update(max_msgs=100, discard="old")
    ranges = log.ranges_by_kind()
    assert ranges[Kind.SETTING] == [
        "0-0 : discard is 'old', declared is 'new'",
        "0-0 : max_msgs is 100, declared is -1",
    ]
    assert ranges[Kind.GONE] == ["1-55 : 55 events"]
    assert ranges[Kind.CHAIN][0].endswith("and no event of this aggregate comes before it")
    ranges = log.ranges_by_kind(log.archive)
    assert ranges.keys() == {Kind.SETTING, Kind.ARCHIVED}
    assert ranges[Kind.ARCHIVED] == ["1-55 : 55 events of several aggregates"]


def test_deleted_messages_and_a_purged_subject_are_reported(server: NatsServer, tmp_path: Path) -> None:
    log = Log(server.url, tmp_path / "past", deny_delete=False, deny_purge=False)
    for position in (30, 31, 130):
        log.ask(f"STREAM.MSG.DELETE.{NAME}", seq=position, no_erase=True)
    log.ask(f"STREAM.PURGE.{NAME}", filter=f"{NAME}.account.bob")
    of_bob = [record[0] for record in log.records if record[2].endswith(b".bob")]
    ranges = log.ranges_by_kind(log.archive)
    assert ranges[Kind.SETTING] == [
        "0-0 : deny_delete is False, declared is True",
        "0-0 : deny_purge is False, declared is True",
    ]
    assert ranges[Kind.GONE] == ["130-130 : 1 event"]
    archived = [run.partition(" ")[0] for run in ranges[Kind.ARCHIVED]]
    positions = {position for run in archived for position in range(int(run.split("-")[0]), int(run.split("-")[1]) + 1)}
    assert positions == {30, 31, *of_bob}
    assert f"{of_bob[0]}-{of_bob[0]} bob: 1 event" in ranges[Kind.ARCHIVED]


def test_an_accepted_loss_leaves_the_log_sound(server: NatsServer, tmp_path: Path) -> None:
    log = Log(server.url, tmp_path / "past", deny_delete=False)
    last_of = {record[2]: record[0] for record in log.records}
    ends = sorted(last_of.values())[:2]  # nothing follows them, so no chain is broken
    for position in ends:
        log.ask(f"STREAM.MSG.DELETE.{NAME}", seq=position, no_erase=True)
    assert log.ranges_by_kind().keys() == {Kind.SETTING, Kind.GONE}
    with NatsConnection.open(endpoint(log.url)) as link:
        repair(link, NAME, 1, log.identity, accept_loss=True)
    report = log.audited()
    assert (report.sound, report.accepted, [finding.kind for finding in report.findings]) == (True, 2, [Kind.GONE])


def test_events_that_other_programs_published_are_reported(log: Log) -> None:
    amount = b'{"amount":"1"}'
    first = (
        append_raw(
            log.url,
            [
                ("account.ada", b"NATS/1.0\r\n\r\n", b"hello"),
                ("account.new", block("account.deposited", version=7), amount),
                ("snap.ada", block("account.deposited", version=1), amount),
                ("account.a-1", block("account.renamed", version=9), amount),
            ],
        )
        - 3
    )
    assert log.ranges_by_kind() == {
        Kind.CHAIN: [
            f"{first + 1}-{first + 1} new: version 7, and no event of this aggregate comes before it",
            *forged_version_ranges(log),
        ],
        Kind.FOREIGN: [f"{first + 2}-{first + 2} {NAME}.snap.ada: account.deposited is an event of 'account'"],
        Kind.UNDECODABLE: [f"{first}-{first} ada: ?: it lacks Ej-Type, Ej-Schema or Ej-Version"],
        Kind.UNKNOWN: [f"{first + 3}-{first + 3} a-1: account.renamed schema 1"],
    }


def forged_version_ranges(log: Log) -> list[str]:
    """Return the range of the forged version 9 of a-1, which does not follow the version before it."""
    records = [record for record in log.records if record[2].endswith(b".a-1")]
    last = records[-1][0]
    return [f"159-159 a-1: version 9, and version {len(records)} at position {last} comes before it"]


def test_a_lost_end_is_reported_also_after_the_log_grew_again(log: Log) -> None:
    delete(log.url)
    asyncio.run(restore(APP, seal(Path(log.archive).parent / "half", log.records[:60], log.identity), log.settings))
    assert log.ranges_by_kind(log.archive) == {Kind.END: ["61-120 : 60 events of several aggregates"]}
    append_raw(log.url, [("account.late", block("account.opened", version=1), b'{"owner":"x"}')])
    ranges = log.ranges_by_kind(log.archive)
    assert ranges.keys() == {Kind.END, Kind.DIFFERS}
    assert ranges[Kind.DIFFERS][0].startswith("61-61 late: the log has the event ")


def test_progress_is_reported_by_position(log: Log) -> None:
    steps: list[Progress] = []
    asyncio.run(audit(APP, log.settings, progress=steps.append))
    assert (steps[-1].phase, steps[-1].done, steps[-1].total) == ("read", 155, 155)
