"""Check the servers: are they reachable, new enough, and within the limits of the account?

Whether a server syncs what it acknowledges, and how full it is, only its monitoring endpoint says.

Measured on 2.15.1: `/varz` has `jetstream.config.sync_always` where `sync_interval: always` is set, else
`sync_interval` in nanoseconds. No answer over NATS has either field.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from eventjet.doctor.report import Installation, Report, check_clock
from eventjet.errors import LogUnusable, NoResponders, StoreError, StoreUnavailable, Unreachable, UsageError
from eventjet.findings import Level
from eventjet.jetstream.api import call, nanoseconds
from eventjet.jetstream.client import BEFORE_2_15, RECOMMENDED_SERVER, check_server, shown_version, version_of
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.login import tls_context
from eventjet.text import listed
from eventjet.urls import parse

_DESIRED_STATE = (2, 15)
"""The first version whose meta layer records where a stream is to be moved."""
_NEAR, _FULL = 0.8, 0.95
"""Used shares of a limit from which on it is a warning, and a fault."""
_BODY_MAX = 4_000_000
_REQUEST_S = 5.0
_SERVERS_MAX = 20
_LIMITED = (
    ("bytes of storage", "storage", "max_storage"),
    ("streams", "streams", "max_streams"),
    ("consumers", "consumers", "max_consumers"),
)
"""(noun, key of what is used, key of the limit) in the information of an account."""
_ALWAYS = "jetstream { sync_interval: always }"


def check_servers(installation: Installation, report: Report) -> Sequence[Greeting]:
    """Check every known server of the cluster and the account's limits; return what each server says of itself."""
    endpoint = Endpoint.of(installation.settings).with_name("eventjet doctor")
    with NatsConnection.open(endpoint) as link:
        greeted = _distinct_greetings(
            endpoint.with_discovered(link.info.get("connect_urls") or ()), installation.timeout_s / 3
        )
        check_greetings(report, greeted)
        with report.guarded("account"):
            try:
                _check_account(report, link.ask(call("INFO")))
            except (NoResponders, LogUnusable):
                report.fault(
                    "jetstream",
                    "JetStream is switched off, on the server or for this account",
                    "there is nowhere to store an event",
                    "jetstream { store_dir: …, sync_interval: always }  and `jetstream: enabled` in the account",
                )
            except StoreUnavailable as error:
                cost = "nothing is stored while no server leads"
                fix = "Start the servers that are down, and look at their logs."
                report.unreachable("jetstream", f"JetStream: {error.reason}", cost, fix)
    return greeted


def _distinct_greetings(endpoint: Endpoint, timeout_s: float) -> list[Greeting]:
    """Return the greeting of each server; a server that answers at two addresses counts once."""
    by_server: dict[str, Greeting] = {}
    for greeting in greetings(endpoint, timeout_s):
        by_server.setdefault(str(greeting.info.get("server_id") or greeting.peer), greeting)
    return list(by_server.values())


def check_greetings(report: Report, greeted: Sequence[Greeting]) -> None:
    """Report whether each server answers and is new enough."""
    answering = [greeting for greeting in greeted if greeting.info]
    for greeting in greeted:
        if not greeting.info:
            report.warning(
                "servers",
                f"the server at {greeting.peer} {greeting.fault}",
                "clients try it in vain first, and one server fewer may fail",
                "Start it, or take it out of --servers or EVENTJET_SERVERS.",
            )
    for greeting in answering:
        where = f"nats-server at {greeting.peer}"
        try:
            check_server(where, greeting.info)
        except Unreachable as error:
            report.fault("version", f"{where}: {error.reason}", "every connection is refused", error.remedy)
            continue
        is_clustered = bool(greeting.info.get("cluster"))
        step = f"Upgrade every server of the cluster to {shown_version(BEFORE_2_15)} first, one by one. "
        first = step if is_clustered and version_of(greeting.info) < BEFORE_2_15 else ""
        if version_of(greeting.info) < RECOMMENDED_SERVER:
            report.warning(
                "version",
                f"{where} is {greeting.info['version']}, and eventjet is tested on {shown_version(RECOMMENDED_SERVER)}",
                "three replicas that sync always store about a seventh under load of what they do from 2.15 on",
                f"{first}Upgrade it to {shown_version(RECOMMENDED_SERVER)} or newer.",
            )
    versions = {str(greeting.info.get("version")): greeting.peer for greeting in answering}
    report.ok("version", f"nats-server {listed(versions)} at {listed(greeting.peer for greeting in answering)}")
    numbers = [version_of(greeting.info) for greeting in answering]
    if numbers and min(numbers) < BEFORE_2_15 and max(numbers) >= _DESIRED_STATE:
        report.warning(
            "version",
            f"servers older than {shown_version(BEFORE_2_15)} run beside 2.15, and were not made for that",
            "a stream that is moved, scaled or evacuated meanwhile may not arrive",
            f"Move nothing until each older server is {shown_version(BEFORE_2_15)}, then upgrade them to 2.15.",
        )
    elif len(versions) > 1:
        report.note(
            "version",
            "the servers of the cluster are of different versions",
            "what the newer ones can do is not there when an older one leads",
            "Upgrade the others too.",
        )


def _check_account(report: Report, info: Mapping[str, Any]) -> None:
    """Report how close the account is to its limits, of which it has one set, or one for each number of replicas."""
    tiers: Mapping[str, Mapping[str, Any]] = info.get("tiers") or {"": info}
    demands = any(bool(part["limits"].get("max_bytes_required")) for part in tiers.values())
    is_limited = False
    for tier, part in tiers.items():
        for noun, used_key, limit_key in _LIMITED:
            used, limit = int(part.get(used_key) or 0), int(part["limits"].get(limit_key) or 0)
            if limit > 0:
                is_limited = True
                _check_limit(report, noun if not tier else f"{noun} of {tier}", used, limit)
    if demands:
        report.fault(
            "account",
            "the account demands `max_bytes` of every stream, and eventjet declares none",
            "`eventjet init` is refused, and a log that has one loses room for its next event",
            "max_bytes_required: false  in the account's JetStream limits",
        )
    if not is_limited and not demands:
        report.ok("account", "the account has no limits but the disk")


def _check_limit(report: Report, noun: str, used: int, limit: int) -> None:
    share = used / limit
    usage = f"the account has {used:,} of {limit:,} {noun} ({share:.0%})"
    is_storage = noun.startswith("bytes")
    if share < _NEAR:
        cost = "a save of several events that meets the limit may be torn" if is_storage else "more are refused"
        report.note("account", usage, cost, "Let nothing but the disk limit the account of a log.")
        return
    torn = "saves are refused, and one of several events may be torn: the server keeps only a part of it"
    cost = torn if is_storage else "workers, rebuilds and `eventjet init` cannot make what they need"
    fix = "Raise `max_file` (or `max_store`)" if is_storage else f"Raise `max_{noun.split(maxsplit=1)[0]}`"
    level = Level.FAULT if share >= _FULL else Level.WARNING
    report.add(level, "account", usage, cost, f"{fix} of the account, or take the limit away.")


@dataclass(frozen=True, slots=True)
class Greeting:
    """The INFO message of one server, or why there is none."""

    peer: str
    info: dict[str, Any]
    """The server's INFO message; empty where it did not answer."""
    fault: str = ""


def greetings(endpoint: Endpoint, timeout_s: float) -> list[Greeting]:
    """Return the greeting of every named or discovered server; an error of a connection becomes its `fault`."""
    deadline = time.monotonic() + timeout_s
    addresses = endpoint.addresses()
    greeted: list[Greeting] = []
    for index, address in enumerate(addresses):
        share_s = (deadline - time.monotonic()) / (len(addresses) - index)
        try:
            with NatsConnection.open(endpoint, timeout_s=max(share_s, 0.001), addresses=[address]) as link:
                greeted.append(Greeting(address.peer, link.info))
        except (Unreachable, StoreError) as error:
            reason = str(getattr(error, "reason", error)).removeprefix(f"{address.peer} ")
            greeted.append(Greeting(address.peer, {}, reason))
    return greeted


def monitoring_url(text: str) -> str:
    """Return a monitoring URL as `http://host:8222`. Raises `UsageError` for anything else, a URL with a user too."""
    url = parse(text)
    plain = url is not None and url.user is None and not url.options and url.path in ("", "/")
    if url is None or not plain or url.scheme not in ("http", "https") or not url.host:
        raise UsageError(
            "What --monitoring or EVENTJET_MONITORING names is not a monitoring endpoint. Write http://host:8222, "
            "without a user; the variable takes several, with blanks between them. It is not shown here, for it may "
            "hold a password."
        )
    return f"{url.scheme}://{url.host}:{url.port or 8222}"


def check_monitoring(
    installation: Installation, report: Report, servers: Callable[[], Sequence[Greeting] | None]
) -> None:
    """Check every given monitoring endpoint; `servers` waits for the greetings of the servers."""
    monitored: set[str] = set()
    for url in installation.monitoring[:_SERVERS_MAX]:
        try:
            before = installation.clock()
            varz = _fetch_varz(url, installation)
            after = installation.clock()
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            if reason.startswith("INFO {"):  # how a NATS server greets its clients
                reason = "a NATS server listens there for clients, which is not its monitoring port"
            report.unreachable(
                "monitoring",
                f"{url} gave no answer: {reason}",
                "whether that server syncs what it acknowledges is not known",
                "http: HOST:8222  in its configuration, or another --monitoring",
            )
            continue
        domain = installation.settings.jetstream_domain
        jetstream: Mapping[str, Any] = varz.get("jetstream") or {}
        config: Mapping[str, Any] = jetstream.get("config") or {}
        actual = str(config.get("domain") or "")
        if domain is not None and actual != domain:
            description = f"the JetStream domain {actual}" if actual else "no JetStream domain"
            fix = f"Name the endpoints of the servers that have {domain}."
            what = f"the server of {url} has {description}, and the log is in {domain}"
            report.note("monitoring", what, "it keeps no events of it", fix)
            continue
        monitored.add(str(varz.get("server_id")))
        check_monitored(report, url, varz)
        if varz.get("now"):
            server_now = nanoseconds(str(varz["now"]).encode()) / 1e9
            check_clock(report, "server", f"the server of {url}", (before, server_now, after))
    endpoint = Endpoint.of(installation.settings)
    if not endpoint.is_elsewhere:
        _check_unseen(report, servers() or (), monitored, has_monitoring=bool(installation.monitoring))
    elif not monitored or installation.settings.jetstream_domain is None:
        # The log is in another JetStream than that of the connected servers.
        _report_unknown_syncing(report, f"the servers of the JetStream below {endpoint.jetstream_prefix} sync", "those")


def _report_unknown_syncing(report: Report, whose: str, servers: str) -> None:
    report.unknown(
        "sync_interval",
        f"whether {whose} what is acknowledged cannot be known over NATS",
        "with the server's own default of two minutes a power cut takes back acknowledged events",
        f"`eventjet doctor --monitoring http://HOST:8222` for each of {servers} servers; {_ALWAYS}",
    )


def check_monitored(report: Report, url: str, varz: Mapping[str, Any]) -> None:
    """Report what one server's `/varz` says of syncing and of its storage."""
    jetstream: Mapping[str, Any] = varz.get("jetstream") or {}
    config: Mapping[str, Any] = jetstream.get("config") or {}
    stats: Mapping[str, Any] = jetstream.get("stats") or {}
    if not config:
        report.note("sync_interval", f"the server of {url} has no JetStream, so it keeps no events")
        return
    if config.get("sync_always"):
        report.ok("sync_interval", f"the server of {url} syncs what it acknowledges")
    else:
        every_s = float(config.get("sync_interval") or 0) / 1e9
        report.fault(
            "sync_interval",
            f"the server of {url} syncs every {_duration_text(every_s)}",
            "a power cut loses what was acknowledged since then, of a young log everything. Three replicas do not help "
            "if all lose their power, or if one that lost it and one that was behind elect the leader",
            f"{_ALWAYS}  and restart it; under load three replicas are the fast setting",
        )
    used, limit = int(stats.get("storage") or 0), int(config.get("max_storage") or 0)
    if limit and used / limit >= _NEAR:
        report.warning(
            "storage",
            f"JetStream of {url} has used {used:,} of {limit:,} bytes ({used / limit:.0%})",
            "saves are refused when it is full, and after a full disk the server has to be started again",
            "jetstream { max_file: … }  above, and a larger disk",
        )


def _check_unseen(report: Report, greeted: Sequence[Greeting], monitored: set[str], *, has_monitoring: bool) -> None:
    peers = {str(greeting.info["server_id"]): greeting.peer for greeting in greeted if greeting.info.get("server_id")}
    unknown = monitored - peers.keys()
    if peers and unknown:
        report.warning(
            "monitoring",
            f"{len(unknown)} of the monitoring endpoints are of servers that the app is not connected to",
            "what they tell may be about another cluster",
            "Name the endpoints of the servers that the app uses.",
        )
    unseen = [peer for server, peer in peers.items() if server not in monitored]
    if unseen or not has_monitoring:
        whose = f"{listed(unseen)} {'syncs' if len(unseen) == 1 else 'sync'}" if unseen else "the servers sync"
        _report_unknown_syncing(report, whose, "the")


def _duration_text(seconds: float) -> str:
    """Return a duration as a person would write it, in days too: nats-server reads `1m` as a million seconds."""
    if seconds < 120:
        return f"{seconds:g} s"
    return f"{seconds / 60:g} minutes" if seconds < 7_200 else f"{seconds:,.0f} s ({seconds / 86_400:.1f} days)"


def _fetch_varz(url: str, installation: Installation) -> Mapping[str, Any]:
    """Return `/varz` of a monitoring endpoint, without redirects; raises `OSError`, `ValueError`, `HTTPException`."""
    where = urlsplit(url)
    # Each endpoint gets a share of the time, so that one that hangs does not hide the others.
    timeout_s = min(_REQUEST_S, installation.timeout_s / (len(installation.monitoring) + 1))
    if where.scheme == "https":
        context = tls_context(Endpoint.of(installation.settings))
        link = http.client.HTTPSConnection(where.netloc, timeout=timeout_s, context=context)
    else:
        link = http.client.HTTPConnection(where.netloc, timeout=timeout_s)
    try:
        link.request("GET", "/varz")
        answer = link.getresponse()
        body = answer.read(_BODY_MAX + 1)
    finally:
        link.close()
    if answer.status != http.client.OK or len(body) > _BODY_MAX:
        raise ValueError(f"it answered with status {answer.status} and {len(body):,} bytes")
    varz = json.loads(body)
    if not isinstance(varz, dict) or "server_id" not in varz:
        raise ValueError("what answers there is no monitoring endpoint of a nats-server")
    return cast("Mapping[str, Any]", varz)
