"""Every line that is logged has a stable name and bounded fields, as text and as JSON."""

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


def test_a_line_has_its_name_its_fields_and_its_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        logs.TOOK_LEASE.tell(LOGGER, name="balances", position=7, epoch=2)
    (told,) = lines(caplog)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(told.pop("at")))
    assert told == {
        "level": "info",
        "logger": "eventjet.tests",
        "event": "eventjet.took_lease",
        "message": "balances: took the lease at position 7, epoch 2",
        "name": "balances",
        "position": 7,
        "epoch": 2,
    }


def test_a_long_field_is_cut_and_a_hostile_one_stays_on_its_line(caplog: pytest.LogCaptureFixture) -> None:
    logs.STOPPED.tell(LOGGER, name="a\nb\u2028\ud800", reason="x" * 800_000)
    formatted = logs.JsonLines().format(caplog.records[0])
    assert len(formatted) < 4_000
    assert "\n" not in formatted
    assert json.loads(formatted)["reason"].endswith("… (800,000 characters)")


def test_what_others_log_is_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise LookupError("a\nb")
    except LookupError:
        logging.getLogger("others").warning("%s\nand more", "y" * 20_000, exc_info=sys.exc_info())
    (told,) = lines(caplog)
    assert (told["event"], told["error"]) == ("log", "LookupError")
    assert "Traceback" in str(told["trace"])
    assert len(str(told["message"])) < 9_000


@pytest.mark.parametrize("event", logs.LOG_EVENTS, ids=lambda event: event.name)
def test_every_kind_can_be_told(event: logs.LogEvent, caplog: pytest.LogCaptureFixture) -> None:
    numbers = set(re.findall(r"%\((\w+)\)[dg]", event.text))
    fields = {name: 1 if name in numbers else "a" for name in re.findall(r"%\((\w+)\)", event.text)}
    with caplog.at_level(logging.DEBUG):
        event.tell(LOGGER, **fields)
    assert lines(caplog)[0]["event"] == event.name
    assert "%(" not in caplog.text


def test_names_are_unique_and_nothing_is_logged_without_one() -> None:
    assert len({event.name for event in logs.LOG_EVENTS}) == len(logs.LOG_EVENTS)
    direct = re.compile(r"(?<!self)\b_log\.(debug|info|warning|error|exception|critical|log)\(")
    assert [source.name for source in sources("src") if direct.search(source.text)] == []
