"""What only the servers' monitoring endpoints tell: whether they sync what they acknowledge, and how full they are.

Measured on 2.15.1: `/varz` has `jetstream.config.sync_always` where `sync_interval: always` is set, else
`sync_interval` in nanoseconds. No answer over NATS has either.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from eventjet.doctor.clocks import tell_clock
from eventjet.doctor.diagnosis import Diagnoses, Installation, named
from eventjet.errors import StoreError, UsageError
from eventjet.findings import Level
from eventjet.jetstream.api import nanoseconds
from eventjet.nats.dial import dial_at, fault_of, tls_context
from eventjet.nats.endpoint import Endpoint
from eventjet.urls import parse

_BODY_MAX = 4_000_000
_REQUEST_S = 5.0
_SERVERS_MAX = 20
_NEAR = 0.8
_ALWAYS = "jetstream { sync_interval: always }"


@dataclass(frozen=True, slots=True)
class Greeting:
    """What one server says of itself, or why it says nothing."""

    peer: str
    info: dict[str, Any]
    """Its INFO; empty where there was none."""
    fault: str = ""


def greetings(endpoint: Endpoint, timeout_s: float) -> list[Greeting]:
    """Of every server that is named or known, one after the other; each is connected to and left. Never raises."""
    deadline = time.monotonic() + timeout_s
    addresses = endpoint.addresses()
    greeted: list[Greeting] = []
    for index, address in enumerate(addresses):
        share_s = (deadline - time.monotonic()) / (len(addresses) - index)
        try:
            dialled = dial_at(endpoint, address, time.monotonic() + max(share_s, 0.0))
        except (OSError, ValueError, StoreError) as error:
            greeted.append(Greeting(address.peer, {}, fault_of(error)))
        else:
            dialled.sock.close()
            greeted.append(Greeting(address.peer, dialled.info))
    return greeted


def monitoring_url(text: str) -> str:
    """`http://host:8222` as it may be shown; raises `UsageError` for anything else."""
    found = parse(text)
    plain = found is not None and found.user is None and not found.options and found.path in ("", "/")
    if found is None or not plain or found.scheme not in ("http", "https") or not found.host:
        raise UsageError(
            "What --monitoring names is not a monitoring endpoint. Write it as http://host:8222, without a user; it is "
            "not shown here, for it may hold a password."
        )
    return f"{found.scheme}://{found.host}:{found.port or 8222}"


def look_at_monitoring(
    installation: Installation, told: Diagnoses, servers: Callable[[], Sequence[Greeting] | None]
) -> None:
    """Every endpoint that was named; `servers` gives what the servers said of themselves."""
    seen: set[str] = set()
    for url in installation.monitoring[:_SERVERS_MAX]:
        try:
            before = installation.clock()
            varz = _fetched(url, installation)
            after = installation.clock()
        except (OSError, ValueError, http.client.HTTPException) as error:
            told.add(
                "monitoring",
                Level.UNREACHABLE,
                f"{url} did not tell: {str(error) or type(error).__name__}",
                "whether that server syncs what it acknowledges is not known",
                "http: HOST:8222  in its configuration, or another --monitoring",
            )
            continue
        domain = installation.settings.jetstream_domain
        if domain is not None and (has := _domain_of(varz)) != domain:
            what = f"the server of {url} has {f'the JetStream domain {has}' if has else 'no JetStream domain'}"
            fix = f"Name the endpoints of the servers that have {domain}."
            told.add("monitoring", Level.NOTE, f"{what}, and the log is in {domain}", "it keeps no events of it", fix)
            continue
        seen.add(str(varz.get("server_id")))
        tell_server(told, url, varz)
        if varz.get("now"):
            there = nanoseconds(str(varz["now"]).encode()) / 1e9
            tell_clock(told, "server", f"the server of {url}", (before, there, after))
    if Endpoint.of(installation.settings).is_elsewhere:
        _tell_elsewhere(told, installation, seen)
    else:
        _tell_unseen(told, servers() or (), seen, asked=bool(installation.monitoring))


def tell_server(told: Diagnoses, url: str, varz: Mapping[str, Any]) -> None:
    """What one server's `/varz` says."""
    jetstream: Mapping[str, Any] = varz.get("jetstream") or {}
    config: Mapping[str, Any] = jetstream.get("config") or {}
    stats: Mapping[str, Any] = jetstream.get("stats") or {}
    if not config:
        told.add("sync_interval", Level.NOTE, f"the server of {url} has no JetStream, so it keeps no events")
        return
    if config.get("sync_always"):
        told.ok("sync_interval", f"the server of {url} syncs what it acknowledges")
    else:
        every_s = float(config.get("sync_interval") or 0) / 1e9
        told.add(
            "sync_interval",
            Level.FAULT,
            f"the server of {url} syncs every {_spoken(every_s)}",
            "a power cut takes back what was acknowledged since: a young log all of it, and three replicas do not "
            "help where all lose their power, or one that did and one that was behind decide",
            f"{_ALWAYS}  and restart it; under load three replicas are the fast setting",
        )
    used, most = int(stats.get("storage") or 0), int(config.get("max_storage") or 0)
    if most and used / most >= _NEAR:
        told.add(
            "storage",
            Level.WARNING,
            f"JetStream of {url} has used {used:,} of {most:,} bytes ({used / most:.0%})",
            "saves are refused when it is full, and after a full disk the server has to be started again",
            "jetstream { max_file: … }  above, and a larger disk",
        )


def _tell_unseen(told: Diagnoses, greeted: Sequence[Greeting], seen: set[str], *, asked: bool) -> None:
    there = {str(one.info["server_id"]): one.peer for one in greeted if one.info.get("server_id")}
    strange = seen - there.keys()
    if there and strange:
        told.add(
            "monitoring",
            Level.WARNING,
            f"{len(strange)} of the monitoring endpoints are of servers that EVENTJET_SERVERS does not lead to",
            "what they tell may be about another cluster",
            "Name the endpoints of the servers that the app uses.",
        )
    unseen = [peer for server, peer in there.items() if server not in seen]
    if unseen or not asked:
        told.add(
            "sync_interval",
            Level.UNKNOWN,
            f"whether {named(unseen) or 'the server'} syncs what it acknowledges cannot be known over NATS",
            "with the server's own default of two minutes a power cut takes back acknowledged events",
            f"`eventjet doctor --monitoring http://HOST:8222` for each server; {_ALWAYS}",
        )


def _tell_elsewhere(told: Diagnoses, installation: Installation, seen: set[str]) -> None:
    """Of a log that is not in the JetStream of the servers that the app is connected to."""
    prefix = Endpoint.of(installation.settings).jetstream_prefix
    if not seen or installation.settings.jetstream_domain is None:
        told.add(
            "sync_interval",
            Level.UNKNOWN,
            f"whether the servers of the JetStream below {prefix} sync what they acknowledge cannot be known over NATS",
            "with the server's own default of two minutes a power cut takes back acknowledged events",
            f"`eventjet doctor --monitoring http://HOST:8222` for each of those servers; {_ALWAYS}",
        )


def _domain_of(varz: Mapping[str, Any]) -> str:
    jetstream: Mapping[str, Any] = varz.get("jetstream") or {}
    config: Mapping[str, Any] = jetstream.get("config") or {}
    return str(config.get("domain") or "")


def _spoken(seconds: float) -> str:
    """With the unit that a person would have written; `1m` without quotes is a million seconds to nats-server."""
    if seconds < 120:
        return f"{seconds:g} s"
    return f"{seconds / 60:g} minutes" if seconds < 7_200 else f"{seconds:,.0f} s ({seconds / 86_400:.1f} days)"


def _fetched(url: str, installation: Installation) -> Mapping[str, Any]:
    """What `/varz` tells; redirects are not followed. Raises `OSError`, `ValueError` and `HTTPException`."""
    where = urlsplit(url)
    # A share of the time, so that one that hangs does not hide the others.
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
