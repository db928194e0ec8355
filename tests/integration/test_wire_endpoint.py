"""An endpoint can be handed to another process, and never shows a secret."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from eventjet.errors import UsageError
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings


def test_userinfo_leaves_the_url_and_stays_out_of_the_repr() -> None:
    endpoint = Endpoint(("nats://ada:s%40cret@one:4222", "nats://ada:s%40cret@two"))
    assert endpoint.servers == ("nats://one:4222", "nats://two:4222")
    assert (endpoint.user, endpoint.password) == ("ada", "s@cret")
    assert "cret" not in repr(endpoint)


def test_a_token_in_the_url_stays_out_of_the_repr() -> None:
    endpoint = Endpoint(("nats://s3cret@one",))
    assert endpoint.token == "s3cret"
    assert "s3cret" not in repr(endpoint)
    assert "s3cret" not in repr(Endpoint(("one",), token="s3cret", password="s3cret"))


def test_an_endpoint_survives_pickling() -> None:
    endpoint = Endpoint(("tls://one",), user="ada", password="x", credentials=Path("/c"), inbox_prefix="_INBOX_ada")
    assert pickle.loads(pickle.dumps(endpoint)) == endpoint


def test_an_endpoint_takes_everything_from_the_settings() -> None:
    settings = Settings(
        servers=("nats://a:1", "tls://b:2"), user="u", password="p", token="t", nkey=Path("n"), tls_ca=Path("ca")
    )
    endpoint = Endpoint.of(settings)
    assert (endpoint.servers, endpoint.user, endpoint.password) == (settings.servers, "u", "p")
    assert (endpoint.token, endpoint.nkey, endpoint.tls_ca) == ("t", Path("n"), Path("ca"))


def test_servers_are_tried_in_order_from_the_first_or_from_a_random_one() -> None:
    endpoint = Endpoint(("nats://a:1", "tls://b:2", "nats://[::1]:3"))
    assert [address[:2] for address in endpoint.addresses()] == [("a", 1), ("b", 2), ("::1", 3)]
    orders = {tuple(address[0] for address in endpoint.addresses(shuffle=True)) for _ in range(100)}
    assert orders == {("a", "b", "::1"), ("b", "::1", "a"), ("::1", "a", "b")}


@pytest.mark.parametrize(
    "url", ["http://a", "nats://", "nats://a:0", "nats://a:99999", "nats://a/path", "nats://ada:s3cret@:4222", ""]
)
def test_an_invalid_url_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(UsageError, match="is not a NATS server") as raised:
        Endpoint((url,))
    assert "s3cret" not in str(raised.value)


def test_urls_that_are_separated_by_blanks_are_told_to_use_commas() -> None:
    with pytest.raises(UsageError, match=r"Separate several with commas, not with blanks\. Write"):
        Endpoint(("nats://a nats://b",))


def test_two_users_for_one_cluster_are_refused() -> None:
    with pytest.raises(UsageError, match="more than one user"):
        Endpoint(("nats://a:1@one", "nats://b:1@two"))


def test_no_server_at_all_is_refused() -> None:
    with pytest.raises(UsageError, match="No NATS server"):
        Endpoint(())


def test_discovered_servers_are_tried_after_the_configured_ones() -> None:
    endpoint = Endpoint(("tls://one.example:1",), tls_ca=Path("ca"))
    endpoint = endpoint.with_discovered(["10.0.0.2:4222", "one.example:1", "[::2]:5", "ada:s3cret@", "host:port"])
    addresses = endpoint.with_discovered(["two.example:7"]).addresses()
    assert addresses[0][:4] == ("one.example", 1, True, "one.example")
    # Servers announce addresses, and certificates contain names.
    assert {address[:4] for address in addresses[1:]} == {
        ("10.0.0.2", 4222, True, "one.example"),
        ("::2", 5, True, "one.example"),
        ("two.example", 7, True, "two.example"),
    }


def test_a_name_discovered_before_tls_is_not_used_for_certificates() -> None:
    """An attacker on the way may add a server of their own, with a certificate of a trusted authority."""
    endpoint = Endpoint(("tls://one.example:1",)).with_discovered(["thief.example:4222"])
    assert endpoint.addresses()[1][:4] == ("thief.example", 4222, True, "one.example")


def test_tls_for_one_server_applies_to_all() -> None:
    mixed = Endpoint(("nats://a:1", "tls://b:2")).with_discovered(["c:3"])
    assert [address.tls for address in mixed.addresses()] == [True, True, True]
