"""`eventjet doctor`: the real program, its exit statuses, its width, and that it prints no secret."""

from __future__ import annotations

import json

from eventjet.dev.nats import NatsServer
from tests.acceptance.conftest import Program

REMOTE = {"SPARK_REMOTE": "sc://127.0.0.1"}


def test_it_says_what_each_fault_costs_and_how_to_mend_it(bank: Program, eventjet_nats: NatsServer) -> None:
    before = bank("doctor", **REMOTE)
    assert before.status == 1
    assert "fix   `eventjet init`" in before.out
    assert not (bank.folder / "read.db").exists()
    assert bank("init").status == 0
    ended = bank("doctor", **REMOTE)
    assert (ended.status, ended.err) == (0, "")
    assert [line for line in ended.out.splitlines() if len(line) > 80 and max(map(len, line.split())) < 60] == []
    for line in ("server", "monitoring", "streams", "database", "read models", "environment"):
        assert line in ended.out.splitlines()
    assert "costs" in ended.out
    assert bank("doctor", "--strict", **REMOTE).status == 1
    unsafe = bank("doctor", "--monitoring", eventjet_nats.monitor_url, **REMOTE)
    assert unsafe.status == 1
    assert "jetstream { sync_interval: always }" in unsafe.out


def test_an_unreachable_part_is_reported_with_the_others(bank: Program) -> None:
    assert bank("init").status == 0
    away = {"EVENTJET_DATABASE": "postgresql://ada:opensesame@127.0.0.1:1/read", **REMOTE}
    ended = bank("doctor", "--json", **away)
    assert ended.status == 3
    report = json.loads(ended.out)
    assert (report["status"], report["counts"]["unreachable"]) == (3, 1)
    assert {finding["part"] for finding in report["found"] if finding["level"] == "unreachable"} == {"database"}
    assert [finding["level"] for finding in report["found"] if finding["check"] == "stream"] == ["ok", "ok"]
    assert "opensesame" not in ended.out + ended.err


def test_a_wrong_monitoring_url_is_not_printed(bank: Program) -> None:
    for url in ("http://ada:opensesame@host:8222", "nats://host:4222", "http://host:8222/varz", "opensesame"):
        ended = bank("doctor", "--monitoring", url)
        assert (ended.status, ended.is_one_paragraph()) == (2, True)
        assert "opensesame" not in ended.out + ended.err
