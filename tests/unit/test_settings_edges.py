"""Settings given as people give them, and secrets where nobody looks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventjet.errors import UsageError
from eventjet.settings import Settings


def test_keywords_may_be_text_as_in_the_environment() -> None:
    found = Settings.load({"credentials": "x.creds", "replicas": "3", "servers": ["nats://a:1"]}, {})
    assert (found.credentials, found.replicas, found.servers) == (Path("x.creds"), 3, ("nats://a:1",))
    assert Settings.load({"user": "12"}, {}).user == "12"


@pytest.mark.parametrize("name", ["save_timeout_s", "request_timeout_s"])
@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_no_wait_is_without_a_bound(name: str, seconds: float) -> None:
    with pytest.raises(UsageError, match=name):
        Settings.load({name: seconds}, {})


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("EVENTJET_DATABSE", "EVENTJET_DATABASE"),
        ("EVENTJET_SERVER", "EVENTJET_SERVERS"),
        ("EVENTJET_SAVE_TIMEOUT", "EVENTJET_SAVE_TIMEOUT_S"),
    ],
)
def test_a_misspelled_variable_is_refused_with_the_one_that_was_meant(given: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"{given} is set.*Did you mean {meant}"):
        Settings.load(environ={given: "x"})


@pytest.mark.parametrize(
    "given", ["EVENTJET_APP", "EVENTJET_LOG_FORMAT", "EVENTJET_SERVICE_HOST", "EVENTJET_PORT", "EVENTJET_DB_PASSWORD"]
)
def test_a_variable_that_is_called_otherwise_is_left_to_others(given: str) -> None:
    assert Settings.load(environ={given: "x"}) == Settings()
