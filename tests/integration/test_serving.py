"""Served commands have one outcome for each id, typed errors, and discoverable schemas."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

import pytest
from nats.micro.service import ServiceInfo, ServicePing, ServiceStats

from eventjet import (
    App,
    DefinitionError,
    Jet,
    Metadata,
    StoreUnavailable,
    Unreachable,
    UsageError,
    aggregate,
    event,
    served,
    with_metadata,
)
from eventjet.codec.headers import header_block
from eventjet.commands.repository import open_repositories
from eventjet.dev.nats import NatsServer
from eventjet.errors import CommandFailed, CommandReused, LogUnusable, NobodyServes
from eventjet.jetstream.client import connect, connected
from eventjet.nats.protocol import Frame
from eventjet.serving import service as serving
from eventjet.serving.remote import RemoteApp
from eventjet.serving.service import Service
from eventjet.settings import Settings
from tests.logs import fresh_name


class Overdrawn(Exception):
    """There is less."""


@event("purse.filled")
class Filled:
    amount: Decimal
    at: datetime | None = None


@event("purse.emptied")
class Emptied:
    amount: Decimal


@aggregate("purse")
class Purse:
    balance: Decimal = Decimal(0)

    def fill(self, amount: Decimal, *, at: datetime | None = None) -> Filled:
        """Put something in."""
        return Filled(amount=amount, at=at)

    def take(self, amount: Decimal) -> Emptied:
        if amount > self.balance:
            raise Overdrawn(f"there is {self.balance}")
        return Emptied(amount=amount)

    def break_(self) -> None:
        raise RuntimeError("a secret of ours")

    def look(self) -> None:
        return None

    def many(self, *amounts: Decimal) -> None:
        return None

    def pay(self, amount: Decimal, /) -> None:
        return None

    def strange(self, what: object) -> None:
        return None

    def evolve(self, event: Filled | Emptied) -> Purse:
        by = event.amount if isinstance(event, Filled) else -event.amount
        return replace(self, balance=self.balance + by)


COMMANDS = [
    served(Purse, Purse.fill, ignoring=("at",)),
    served(Purse, Purse.take, Overdrawn),
    served(Purse, Purse.break_, name="break"),
    served(Purse, Purse.look),
]


@pytest.fixture
def settings(eventjet_nats: NatsServer) -> Settings:
    return Settings(servers=(eventjet_nats.url,), request_timeout_s=30.0)


@pytest.fixture
def purses() -> App:
    return App(fresh_name(), aggregates=[Purse], served=COMMANDS)


@pytest.fixture
async def jet(purses: App, settings: Settings) -> AsyncGenerator[Jet]:
    async with purses.connect(settings) as jet:
        await jet.init()
        yield jet


@asynccontextmanager
async def service(app: App, settings: Settings) -> AsyncGenerator[Service]:
    async with open_repositories(app, settings) as (repositories, client):
        opened = Service(repositories, client, app.served)
        await opened.open()
        await client.api("INFO")  # the server has processed the subscriptions then
        yield opened
        await opened.close()


@pytest.fixture
async def remote(purses: App, jet: Jet, settings: Settings) -> AsyncGenerator[RemoteApp]:
    async with service(purses, settings), purses.client(settings) as remote:
        yield remote


async def request(settings: Settings, subject: str, body: bytes, headers: bytes = b"") -> tuple[bytes, Any]:
    """Return headers and answer of a request, as any NATS client gets them."""
    client = await connect(settings)
    try:
        frame: Frame = await client.request(subject, body, headers)
        return frame[3], json.loads(frame[4])
    finally:
        await client.close()


async def test_a_command_is_executed_by_a_remote_service(remote: RemoteApp, jet: Jet) -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    result = await remote.repository(Purse).execute("p/1", Purse.fill, Decimal("2.50"), at=at)
    assert (result.version, result.events) == (1, 1)
    (filled,) = await jet.repository(Purse).history("p/1")
    assert (filled.data, filled.position) == (Filled(amount=Decimal("2.50"), at=at), result.position)
    assert result.token.startswith(f"{jet.name}:{result.position}@")


async def test_a_command_id_makes_a_command_idempotent_and_metadata_is_sent(remote: RemoteApp, jet: Jet) -> None:
    once = remote.repository(Purse).command("request-1", metadata=Metadata(correlation="c", extra={"tenant": "t"}))
    times = [datetime(2030, 1, day, tzinfo=UTC) for day in (1, 2)]  # the service ignores which it is
    first, second = [await once.execute("p", Purse.fill, Decimal(1), at=at) for at in times]
    assert first == second
    (filled,) = await jet.repository(Purse).history("p")
    assert (filled.command_id, filled.metadata.correlation) == ("request-1", "c")
    assert filled.metadata.extra == {"tenant": "t"}


async def test_metadata_of_a_block_is_sent_with_and_without_a_command_id(remote: RemoteApp, jet: Jet) -> None:
    purse = remote.repository(Purse)
    once = purse.command("request-7", metadata=Metadata(actor="clerk"))
    with with_metadata(Metadata(correlation="order-9")):
        await purse.execute("p", Purse.fill, Decimal(1))
        await once.execute("p", Purse.fill, Decimal(1))
    recorded = await jet.repository(Purse).history("p")
    assert [(event.metadata.correlation, event.metadata.actor) for event in recorded] == [
        ("order-9", None),
        ("order-9", "clerk"),
    ]


@pytest.fixture
async def recorder(purses: App, settings: Settings) -> AsyncGenerator[None]:
    """Create a stream that stores each request, and so acknowledges it to the caller."""
    name = f"requests_{purses.name}"
    async with connected(settings) as client:
        await client.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"cmd.{purses.name}.>"]})
        yield
        await client.api(f"STREAM.DELETE.{name}")


async def test_the_acknowledgement_of_a_stream_is_not_taken_for_an_answer(
    recorder: None, remote: RemoteApp, jet: Jet
) -> None:
    purse = remote.repository(Purse)
    for number in range(1, 21):
        result = await purse.execute("p", Purse.fill, Decimal(1))
        assert (result.version, result.events) == (number, 1)
    with pytest.raises(Overdrawn, match="there is 20"):
        await purse.execute("p", Purse.take, Decimal(21))
    assert (await jet.repository(Purse).load("p")).balance == 20


async def test_a_request_that_only_a_stream_acknowledges_is_not_done(
    recorder: None, purses: App, jet: Jet, settings: Settings
) -> None:
    async with purses.client(replace(settings, request_timeout_s=5.0)) as remote:
        with pytest.raises(StoreUnavailable, match=r"no answer within 5 s; only b'.*requests_.*' answered"):
            await remote.repository(Purse).execute("p", Purse.fill, Decimal(1))


async def test_a_reused_command_id_raises_command_reused(remote: RemoteApp) -> None:
    once = remote.repository(Purse).command("request-2")
    await once.execute("p", Purse.fill, Decimal(1))
    with pytest.raises(CommandReused, match=r"'request-2' on .* was refused: at version 1") as caught:
        await once.execute("p", Purse.fill, Decimal(2))
    assert (caught.value.command_id, caught.value.version) == ("request-2", 1)
    assert caught.value.arguments == ("amount",)
    assert caught.value.recorded != caught.value.asked


async def test_domain_errors_are_raised_by_the_caller_and_other_errors_are_hidden(
    remote: RemoteApp, caplog: pytest.LogCaptureFixture
) -> None:
    purse = remote.repository(Purse)
    with pytest.raises(Overdrawn, match="there is 0"):
        await purse.execute("p", Purse.take, Decimal(1))
    with caplog.at_level(logging.WARNING), pytest.raises(CommandFailed) as caught:
        await purse.command("break-1").execute("p/1", Purse.break_)
    assert (caught.value.status, caught.value.kind) == (500, "Internal")
    assert "secret" not in str(caught.value)
    assert str(caught.value).count("log says") == 1
    assert "purse-break of 'p/1' (command break-1) failed: RuntimeError: a secret of ours" in caplog.text


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, GeneratorExit, KeyboardInterrupt])
async def test_a_base_exception_of_a_decision_is_answered_as_an_internal_error(
    jet: Jet, settings: Settings, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def ends(purse: Purse) -> None:
        raise kind

    app = App(jet.name, aggregates=[Purse], served=[served(Purse, ends), served(Purse, Purse.fill)])
    async with service(app, settings), app.client(settings) as remote:
        purse = remote.repository(Purse)
        with pytest.raises(CommandFailed) as caught:
            await purse.execute("p", ends)
        assert caught.value.status == 500
        assert f"raised {kind.__name__}" in caplog.text
        assert (await purse.execute("p", Purse.fill, Decimal(1))).version == 1


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(("error", "message"), [(Unprintable(), ""), (Overdrawn("a \ud800 b"), "a ? b")])
async def test_a_domain_error_without_a_message_in_unicode_is_answered(
    jet: Jet, settings: Settings, error: Exception, message: str
) -> None:
    def fails(purse: Purse) -> None:
        raise error

    app = App(jet.name, aggregates=[Purse], served=[served(Purse, fails, type(error))])
    async with service(app, settings), app.client(settings) as remote:
        with pytest.raises(type(error)) as caught:
            await remote.repository(Purse).execute("p", fails)
    assert caught.value.args == (message,)


async def test_commands_that_are_not_served_or_do_not_fit_are_refused_before_they_are_sent(remote: RemoteApp) -> None:
    purse = remote.repository(Purse)
    with pytest.raises(UsageError, match="is not served"):
        await purse.execute("p", Purse.strange, 1)
    with pytest.raises(UsageError, match="These arguments do not fit take"):
        await purse.execute("p", Purse.take, "3")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="These arguments do not fit take"):
        await purse.execute("p", Purse.take)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("token", "body"),
    [
        ("p", b"{}"),
        ("p", b"{"),
        ("p", b"\xff\x00"),
        ("p", b'{"amount": 1}'),
        ("p", b'{"amount": "1", "more": 1}'),
        ("p", b'{"amount": null}'),
        ("p", b'{"amount": "NaN"}'),
        ("p", b'{"amount": "1E999999999999"}'),
        ("p", b'{"amount": "1_000"}'),
        ("p", b'{"amount": " 1"}'),
        ("p", b'{"amount": "01"}'),
        ("p", b'{"amount": "+1"}'),
        ("p", b'{"amount": "1", "amount": "2"}'),
        ("p", b"[" * 100_000),
        ("p=ZZ", b'{"amount": "1"}'),
        ("p=", b'{"amount": "1"}'),
    ],
)
async def test_a_wrong_payload_gets_a_typed_error_and_the_service_goes_on(
    purses: App, remote: RemoteApp, jet: Jet, settings: Settings, token: str, body: bytes
) -> None:
    headers, answer = await request(settings, f"cmd.{purses.name}.purse.fill.{token}", body)
    assert b"Nats-Service-Error: Invalid\r\nNats-Service-Error-Code: 400\r\n" in headers
    assert answer["type"] == "Invalid"
    assert await jet.repository(Purse).history("p") == []
    await remote.repository(Purse).execute("p", Purse.fill, Decimal(1))


async def test_a_command_without_events_is_answered(remote: RemoteApp) -> None:
    result = await remote.repository(Purse).execute("p", Purse.look)
    assert (result.version, result.events) == (0, 0)


async def test_a_service_is_discovered_and_described_as_adr_32_requires(
    purses: App, remote: RemoteApp, settings: Settings
) -> None:
    await remote.repository(Purse).execute("p", Purse.fill, Decimal(1))
    _, ping = await request(settings, f"$SRV.PING.{purses.name}", b"")
    _, info = await request(settings, f"$SRV.INFO.{purses.name}.{ping['id']}", b"")
    _, stats = await request(settings, f"$SRV.STATS.{purses.name}", b"")
    assert (ping["type"], ping["name"]) == ("io.nats.micro.v1.ping_response", purses.name)
    assert [endpoint["name"] for endpoint in info["endpoints"]] == [
        "purse-fill",
        "purse-take",
        "purse-break",
        "purse-look",
    ]
    fill = info["endpoints"][0]
    assert (fill["subject"], fill["queue_group"]) == (f"cmd.{purses.name}.purse.fill.*", "q")
    schema = json.loads(fill["metadata"]["schema"])
    assert schema["properties"]["amount"]["type"] == "string"
    assert schema["required"] == ["amount"]
    assert schema["additionalProperties"] is False
    assert fill["metadata"]["doc"] == "Put something in."
    assert info["endpoints"][1]["metadata"]["errors"] == "Overdrawn"
    assert (stats["endpoints"][0]["num_requests"], stats["endpoints"][0]["num_errors"]) == (1, 0)


async def test_nats_py_reads_the_description_of_a_service(purses: App, remote: RemoteApp, settings: Settings) -> None:
    _, ping = await request(settings, f"$SRV.PING.{purses.name}", b"")
    _, info = await request(settings, f"$SRV.INFO.{purses.name}", b"")
    _, stats = await request(settings, f"$SRV.STATS.{purses.name}", b"")
    assert ServicePing.from_dict(ping).to_dict() == ping
    assert ServiceInfo.from_dict(info).to_dict() == info
    assert ServiceStats.from_dict(stats).to_dict() == stats


async def test_a_thousand_repeated_commands_have_one_outcome_each(purses: App, jet: Jet, settings: Settings) -> None:
    """Two instances serve; each command is sent twice at once, and a third time."""
    async with service(purses, settings), service(purses, settings), purses.client(settings) as remote:
        purse = remote.repository(Purse)

        async def ask(n: int) -> set[int]:
            once = purse.command(f"c-{n}")
            results = await asyncio.gather(*(once.execute(f"p{n % 50}", Purse.fill, Decimal(1)) for _ in range(2)))
            return {result.position for result in (*results, await once.execute(f"p{n % 50}", Purse.fill, Decimal(1)))}

        positions = await asyncio.gather(*(ask(n) for n in range(1_000)))
        assert [len(same) for same in positions] == [1] * 1_000
    loaded = [await jet.repository(Purse).load(f"p{n}") for n in range(50)]
    assert sum(purse.balance for purse in loaded) == 1_000


async def test_an_overloaded_service_answers_busy(
    purses: App, jet: Jet, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "WAITING_MAX", 0)
    async with service(purses, settings), purses.client(settings) as remote:
        with pytest.raises(CommandFailed, match=r"Busy \(503\)"):
            await remote.repository(Purse).execute("p", Purse.fill, Decimal(1))


async def test_an_open_connection_can_serve_and_is_usable_afterwards(purses: App, jet: Jet, settings: Settings) -> None:
    async with purses.client(settings) as remote:
        async with jet.service():
            assert jet.client is not None
            await jet.client.api("INFO")
            await remote.repository(Purse).execute("p", Purse.fill, Decimal(1))
        assert (await jet.repository(Purse).load("p")).balance == 1
        with pytest.raises(StoreUnavailable):
            await remote.repository(Purse).execute("p", Purse.fill, Decimal(1))


async def test_a_service_that_cannot_begin_serves_nothing(purses: App, settings: Settings) -> None:
    async with purses.connect(settings) as jet, purses.client(settings) as remote:
        with pytest.raises(LogUnusable, match="does not exist"):
            async with jet.service():
                pytest.fail("there is no log")
        with pytest.raises(NobodyServes):
            await remote.repository(Purse).execute("p", Purse.fill, Decimal(1))


@pytest.mark.parametrize(
    ("code", "body", "error"),
    [
        ("400", b"", r"answered Wrong \(400\)\. Change"),
        ("400", b"not JSON", r"answered Wrong \(400\)\. Change"),
        ("409", b"[]", r"answered Wrong \(409\)\. Send"),
        ("none", b'{"detail": "It is."}', r"answered Wrong \(500\): It is\. Look"),
        ("0", b"{}", r"answered Wrong \(500\)\. Look"),
    ],
)
async def test_an_error_in_the_form_of_another_library_is_raised(
    purses: App, settings: Settings, code: str, body: bytes, error: str
) -> None:
    async with connected(settings) as client, purses.client(settings) as remote:

        def answer(frame: Frame) -> None:
            client.publish(
                frame[2].decode(), body, header_block([(serving.ERROR, "Wrong"), (serving.ERROR_CODE, code)])
            )

        await client.serve(f"cmd.{purses.name}.>", answer)
        await client.api("INFO")  # the server has processed the subscription then
        with pytest.raises(CommandFailed, match=error):
            await remote.repository(Purse).execute("p", Purse.fill, Decimal(1))


async def test_a_command_without_a_service_is_unreachable(purses: App, jet: Jet, settings: Settings) -> None:
    async with purses.client(settings) as remote:
        with pytest.raises(
            Unreachable, match=f"nobody serves purse.fill of {purses.name}. Start `eventjet serve`"
        ) as raised:
            await remote.repository(Purse).command("c").execute("p", Purse.fill, Decimal(1))
    assert isinstance(raised.value, StoreUnavailable)
    assert "JetStream" not in str(raised.value)


@pytest.mark.parametrize(
    ("status", "ending"),
    [
        (400, "Change what is asked for: as it is, it is refused each time."),
        (409, "Send it again."),
        (503, "Send it again under the same command id."),
        (504, "Send it again under the same command id."),
        (500, "Look there before you send it again."),
    ],
)
def test_the_advice_of_a_failed_command_depends_on_its_status(status: int, ending: str) -> None:
    message = str(CommandFailed("Kind", status, "Something."))
    assert message == f"The service answered Kind ({status}): Something. {ending}"


async def test_a_closing_service_finishes_its_open_requests(purses: App, jet: Jet, settings: Settings) -> None:
    async with service(purses, settings), purses.client(settings) as remote:
        purse = remote.repository(Purse)
        requests = [
            asyncio.ensure_future(purse.command(f"c{n}").execute("p", Purse.fill, Decimal(1))) for n in range(20)
        ]
        await asyncio.sleep(0)
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    answered = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    assert (await jet.repository(Purse).load("p")).balance >= len(answered)


async def test_no_request_is_lost_when_a_service_closes_beside_another(
    purses: App, jet: Jet, settings: Settings
) -> None:
    async with service(purses, settings), connected(settings) as caller:
        answered, closing = asyncio.Semaphore(0), True

        async def ask(n: int) -> None:
            while closing:
                await caller.request(f"cmd.{purses.name}.purse.look.p{n}", b"{}")
                answered.release()

        requests = [asyncio.create_task(ask(n)) for n in range(60)]
        for _ in range(5):
            async with service(purses, settings):
                for _ in range(120):
                    await answered.acquire()
        closing = False
        await asyncio.gather(*requests)


@pytest.mark.parametrize(
    "hostile",
    [
        b"PUB cmd.%b.purse.look.p _INBOX.\xff 2\r\n{}\r\n",
        b"PUB cmd.%b.purse.look.\xff _INBOX.a.b 2\r\n{}\r\n",
        b"HPUB cmd.%b.purse.look.p _INBOX.a.b 16 18\r\nNATS/1.0 \xff\xff\xff\r\n\r\n{}\r\n",
        b"HPUB cmd.%b.purse.look.p _INBOX.a.b 18 20\r\nNATS/1.0 404 \xff\r\n\r\n{}\r\n",
        b"HPUB cmd.%b.purse.look.p _INBOX.a.b 8 10\r\nNATS/1.0{}\r\n",
    ],
)
async def test_a_service_goes_on_after_bytes_that_are_not_text(
    hostile: bytes, purses: App, remote: RemoteApp, settings: Settings
) -> None:
    url = urlsplit(settings.servers[0])
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(b'CONNECT {"verbose": false, "headers": true}\r\n' + hostile % purses.name.encode() + b"PING\r\n")
    assert [(await reader.readline())[:4] for _ in range(2)] == [b"INFO", b"PONG"]
    assert (await remote.repository(Purse).execute("p", Purse.look)).version == 0
    writer.close()
    await writer.wait_closed()


def test_all_faults_of_served_commands_are_reported_together() -> None:
    class Elsewhere:
        def do(self) -> None: ...

    declarations = [
        served(Purse, Purse.many),
        served(Purse, Purse.pay, Overdrawn("x")),  # type: ignore[arg-type]
        served(Purse, Purse.fill, ignoring=("when",)),
        served(Purse, Purse.take, name="fill"),
        served(Purse, Purse.look, name="Bad Name"),
        served(Elsewhere, Elsewhere.do),  # type: ignore[arg-type]
        "take",
    ]
    with pytest.raises(DefinitionError) as caught:
        App("purses", aggregates=[Purse], served=declarations)  # type: ignore[arg-type]
    for part in (
        "Purse.many takes *amounts, which cannot be served, since arguments travel by name: take a parameter",
        "served Purse.pay: its error Overdrawn('x') is not a class of exceptions",
        "Purse.pay takes amount, /, which cannot be served",
        "Purse.fill has no argument 'when' that could be ignored",
        "purse serves two commands called 'fill'",
        "its name 'Bad Name' is not",
        "is not an aggregate of the app",
        "take is not `served(…)`",
    ):
        assert part in str(caught.value), part
