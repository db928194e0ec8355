"""The servers: which there are, their versions, JetStream, the limits of the account."""

from __future__ import annotations

from collections.abc import Sequence

from eventjet.doctor.diagnosis import Diagnoses, Installation, named
from eventjet.doctor.monitoring import Greeting, greetings
from eventjet.errors import LogUnusable, NoResponders, StoreUnavailable, Unreachable
from eventjet.findings import Level
from eventjet.jetstream.client import RECOMMENDED_SERVER, check_server, shown_version, version_of
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.operations.inspection import AccountLimits, Limit, account_limits

_NEAR, _FULL = 0.8, 0.95
"""Shares of a limit from which it is a warning, and a fault."""


def look_at_server(installation: Installation, told: Diagnoses) -> Sequence[Greeting]:
    """Returns what every server of the cluster said of itself, as far as they are known."""
    endpoint = Endpoint.of(installation.settings).with_name("eventjet doctor")
    with NatsConnection.open(endpoint) as link:
        greeted = _greeted(endpoint.with_discovered(link.info.get("connect_urls") or ()), installation.timeout_s / 3)
        tell_greetings(told, greeted)
        with told.guarded("account"):
            try:
                tell_limits(told, link.ask(account_limits()))
            except (NoResponders, LogUnusable):
                told.add(
                    "jetstream",
                    Level.FAULT,
                    "JetStream is switched off, on the server or for this account",
                    "there is nowhere to store an event",
                    "jetstream { store_dir: …, sync_interval: always }  and `jetstream: enabled` in the account",
                )
            except StoreUnavailable as error:
                cost = "nothing is stored while no server leads"
                fix = "Start the servers that are down, and look at their logs."
                told.add("jetstream", Level.UNREACHABLE, f"JetStream: {error.reason}", cost, fix)
    return greeted


def _greeted(endpoint: Endpoint, timeout_s: float) -> list[Greeting]:
    """One that answers under two addresses counts once."""
    known: dict[str, Greeting] = {}
    for one in greetings(endpoint, timeout_s):
        known.setdefault(str(one.info.get("server_id") or one.peer), one)
    return list(known.values())


def tell_greetings(told: Diagnoses, greeted: Sequence[Greeting]) -> None:
    """Of each server: does it answer, and is it new enough?"""
    there = [one for one in greeted if one.info]
    for one in greeted:
        if not one.info:
            told.add(
                "servers",
                Level.WARNING,
                f"the server at {one.peer} {one.fault}",
                "who connects tries it in vain first, and one less may fail",
                "Start it, or take it out of EVENTJET_SERVERS.",
            )
    for one in there:
        where = f"nats-server at {one.peer}"
        try:
            check_server(where, one.info)
        except Unreachable as error:
            told.add("version", Level.FAULT, f"{where}: {error.reason}", "every connection is refused", error.remedy)
            continue
        if version_of(one.info) < RECOMMENDED_SERVER:
            told.add(
                "version",
                Level.WARNING,
                f"{where} is {one.info['version']}, and eventjet is tested on {shown_version(RECOMMENDED_SERVER)}",
                "three replicas that sync always store about a seventh under load of what they do from 2.15 on",
                f"Upgrade it to {shown_version(RECOMMENDED_SERVER)} or newer.",
            )
    versions = {str(one.info.get("version")): one.peer for one in there}
    told.ok("version", f"nats-server {named(versions)} at {named(one.peer for one in there)}")
    if len(versions) > 1:
        told.add(
            "version",
            Level.NOTE,
            "the servers of the cluster are of different versions",
            "what the newer ones can do is not there when an older one leads",
            "Upgrade the others too.",
        )


def tell_limits(told: Diagnoses, account: AccountLimits) -> None:
    """How close the account has come to what it may have."""
    for limit in account.limits:
        _tell_limit(told, limit)
    if account.needs_max_bytes:
        told.add(
            "account",
            Level.FAULT,
            "the account demands `max_bytes` of every stream, and eventjet declares none",
            "`eventjet init` is refused, and a log that has one loses room for its next event",
            "max_bytes_required: false  in the account's JetStream limits",
        )
    if not account.limits and not account.needs_max_bytes:
        told.ok("account", "the account has no limits but the disk")


def _tell_limit(told: Diagnoses, limit: Limit) -> None:
    share = limit.used / limit.most
    said = f"the account has {limit.used:,} of {limit.most:,} {limit.of} ({share:.0%})"
    is_storage = limit.of.startswith("bytes")
    if share < _NEAR:
        cost = "a save of several events that meets the limit may be torn" if is_storage else "more are refused"
        told.add("account", Level.NOTE, said, cost, "Let nothing but the disk limit the account of a log.")
        return
    torn = "saves are refused, and one of several events may be torn: the server keeps only a part of it"
    cost = torn if is_storage else "workers, rebuilds and `eventjet init` cannot make what they need"
    fix = "Raise `max_file` (or `max_store`)" if is_storage else f"Raise `max_{limit.of.split()[0]}`"
    level = Level.FAULT if share >= _FULL else Level.WARNING
    told.add("account", level, said, cost, f"{fix} of the account, or take the limit away.")
