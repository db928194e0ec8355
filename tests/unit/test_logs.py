"""Every logged line has a stable name and short fields, as text and as JSON."""

from __future__ import annotations

import json
import logging
import re
import sys

import pytest

from eventjet.observability import logs
from tests.architecture.sources import sources

LOGGER = logging.getLogger("eventjet.tests")


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [json.loads(logs.JsonLines().format(record)) for record in caplog.records]


def test_a_line_has_a_name_fields_and_a_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        logs.TOOK_LEASE.log(LOGGER, name="balances", position=7, epoch=2)
    (line,) = lines(caplog)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(line.pop("at")))
    assert line == {
        "level": "info",
        "logger": "eventjet.tests",
        "event": "eventjet.took_lease",
        "message": "balances: took the lease at position 7, epoch 2",
        "name": "balances",
        "position": 7,
        "epoch": 2,
    }


def test_a_long_field_is_cut_and_control_characters_stay_on_their_line(caplog: pytest.LogCaptureFixture) -> None:
    logs.STOPPED.log(LOGGER, name="a\nb\u2028\ud800", reason="x" * 800_000)
    formatted = logs.JsonLines().format(caplog.records[0])
    assert len(formatted) < 4_000
    assert "\n" not in formatted
    assert json.loads(formatted)["reason"].endswith("… (800,000 characters)")


def test_records_of_other_loggers_are_lines_too(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise LookupError("a\nb")
    except LookupError:
        logging.getLogger("others").warning("%s\nand more", "y" * 20_000, exc_info=sys.exc_info())
    (line,) = lines(caplog)
    assert (line["event"], line["error"]) == ("log", "LookupError")
    assert "Traceback" in str(line["trace"])
    assert len(str(line["message"])) < 9_000


@pytest.mark.parametrize("event", logs.LOG_EVENTS, ids=lambda event: event.name)
def test_every_log_event_can_be_logged(event: logs.LogEvent, caplog: pytest.LogCaptureFixture) -> None:
    numbers = set(re.findall(r"%\((\w+)\)[dg]", event.text))
    fields = {name: 1 if name in numbers else "a" for name in re.findall(r"%\((\w+)\)", event.text)}
    with caplog.at_level(logging.DEBUG):
        event.log(LOGGER, **fields)
    assert lines(caplog)[0]["event"] == event.name
    assert "%(" not in caplog.text


def test_names_of_log_events_are_unique_and_every_logged_line_has_one() -> None:
    assert len({event.name for event in logs.LOG_EVENTS}) == len(logs.LOG_EVENTS)
    direct = re.compile(r"(?<!self)\b_log\.(debug|info|warning|error|exception|critical|log)\(")
    assert [source.name for source in sources("src") if direct.search(source.text)] == []
