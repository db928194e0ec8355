"""Settings given as people give them, and secrets where nobody looks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventjet.errors import UsageError
from eventjet.settings import Settings, redacted


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:can/ary@h/d",
        "postgresql://u:can@ary@h/d",
        "postgresql://u@h/d?sslmode=require&password=canary",
        "nats://u:can/ary@h:1",
        "at nats://u:canary@h:1,nats://u:canary@h:2",
    ],
)
def test_no_part_of_a_password_is_shown(url: str) -> None:
    shown = redacted(url)
    assert not {part for part in ("can", "ary") if part in shown}
    assert "***" in shown


def test_the_path_of_a_file_is_shown_as_it_is() -> None:
    for url in ("sqlite:////home/a@b/x.db", "sqlite:///x@y.db", "nats://h:4222"):
        assert redacted(url) == url


@pytest.mark.parametrize("servers", ["u:canary@h:4222", "nats://u:can/ary@h:4222", ("http://u:canary@h",)])
def test_a_wrong_address_is_refused_without_its_password(servers: str | tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        Settings.load({"servers": servers}, {})
    assert "ary" not in str(caught.value)


def test_keywords_may_be_text_as_in_the_environment() -> None:
    found = Settings.load({"credentials": "x.creds", "replicas": "3", "servers": ["nats://a:1"]}, {})
    assert (found.credentials, found.replicas, found.servers) == (Path("x.creds"), 3, ("nats://a:1",))
    assert Settings.load({"user": "12"}, {}).user == "12"


@pytest.mark.parametrize("name", ["save_timeout_s", "request_timeout_s"])
@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_no_wait_is_without_a_bound(name: str, seconds: float) -> None:
    with pytest.raises(UsageError, match=name):
        Settings.load({name: seconds}, {})
