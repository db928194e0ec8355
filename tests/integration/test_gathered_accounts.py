"""The server gathers streams of another account into the stream of an inbox."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from eventjet import App, Incoming, Jet, Reaction, Recorded, Source, aggregate, event, inbox, publication
from eventjet.dev.nats import NatsServer
from eventjet.dev.server import reserved_port
from eventjet.doctor.report import Installation, Report
from eventjet.doctor.streams import check_streams
from eventjet.findings import Level
from eventjet.jetstream.api import create_stream
from eventjet.operations.roles import accounts, roles_of
from eventjet.settings import Settings
from eventjet.subscriptions.declarations import declarations_of
from eventjet.subscriptions.status import status
from tests.integration.reacting import eventually, until, working

pytestmark = pytest.mark.slow  # a server asks again after ten seconds

CREATE, INFO = "$JS.API.CONSUMER.CREATE.port", "$JS.API.STREAM.INFO.port"
FLOW, DELIVER = "$JS.FC.port.>", "deliver.port.>"
PARTS = {
    CREATE: ("service", "JS.port.API.CONSUMER.CREATE.port"),
    INFO: ("service", "JS.port.API.STREAM.INFO.port"),
    FLOW: ("service", ""),
    DELIVER: ("stream", ""),
}
"""What the account of the port exports: the kind, and the subject under which the other account imports it."""


@event("ship.moored")
class Moored:
    pass


@event("port.landed")
class Landed:
    ship: str


@aggregate("ship")
class Ship:
    moorings: int = 0

    def moor(self) -> Moored:
        return Moored()

    def evolve(self, event: Moored) -> Ship:
        return replace(self, moorings=self.moorings + 1)


@publication("ships", stream="port", source="https://port.example", start="beginning")
def ships(event: Recorded[Moored]) -> list[Landed]:
    return [Landed(ship=event.aggregate_id)]


@publication("bells", stream="town", source="https://town.example", start="beginning")
def bells(event: Recorded[Moored]) -> list[Landed]:
    return [Landed(ship=f"{event.aggregate_id} (seen)")]


@dataclass
class Desk:
    """The dependency of the handler, which records the messages."""

    received: list[Incoming[Landed]] = field(default_factory=list[Incoming[Landed]])

    def places(self) -> list[tuple[str, str, int]]:
        origins = [message.origin for message in self.received]
        return sorted({(origin.api, origin.stream, origin.position) for origin in origins if origin is not None})


HARBOUR, NEXT = (App(name, aggregates=[Ship], publications=[ships]) for name in ("harbour", "next_harbour"))
TOWN = App("town_app", aggregates=[Ship], publications=[bells])


def paper_of(desk: Desk, subject: str = "") -> App:
    """Return the app that gathers messages, from the port only those of `subject`."""
    port = Source("port", subject=subject, api="JS.port.API", deliver="deliver.port")

    @inbox("news", stream="news", subject=">", start="beginning", sources=["town", port])
    async def news(message: Incoming[Landed], to: Reaction[Desk]) -> None:
        to.deps.received.append(message)
        await to.repository(Ship).execute(message.data.ship, Ship.moor)

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Desk]:
        yield desk

    return App("paper", aggregates=[Ship], reactors=[news], deps=opened)


def exports(*without: str) -> str:
    items = [f'{{ {kind}: "{subject}" }}' for subject, (kind, _) in PARTS.items() if subject not in without]
    return f"exports: [ {', '.join(items)} ]"


def imports(*without: str) -> str:
    def item(subject: str, kind: str, to: str) -> str:
        renamed = f', to: "{to}"' if to else ""
        return f'{{ {kind}: {{ account: PORT, subject: "{subject}" }}{renamed} }}'

    items = [item(subject, *part) for subject, part in PARTS.items() if subject not in without]
    return f"imports: [ {', '.join(items)} ]"


def configuration(folder: Path, *without: str) -> str:
    """Return a configuration with accounts for the port and the paper, without some exports and imports."""
    return f"""jetstream {{ store_dir: "{folder}/data" }}
accounts {{
  PORT {{ jetstream: enabled, users: [ {{ user: port, password: port }} ], {exports(*without)} }}
  PAPER {{ jetstream: enabled, users: [ {{ user: paper, password: paper }} ], {imports(*without)} }}
}}"""


def served(folder: Path, *without: str) -> NatsServer:
    return NatsServer(folder / "server", jetstream=False, config=configuration(folder, *without))


def settings_of(server: NatsServer, user: str, **more: str) -> Settings:
    return Settings((server.url,), user=user, password=user, **more)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with served(tmp_path) as server:
        yield server


async def make(jet: Jet, name: str) -> None:
    """Make a stream that publications publish to."""
    assert jet.client is not None
    await jet.client.ask(create_stream({"name": name, "subjects": [f"{name}.>"], "allow_atomic": True}))


async def moor(jet: Jet, *names: str) -> None:
    for name in names:
        await jet.repository(Ship).execute(name, Ship.moor)


def doctor_findings(app: App, settings: Settings) -> list[tuple[Level, str, str]]:
    report = Report("streams")
    check_streams(Installation(app, settings, (), 60.0, time.time), report, list)
    return [
        (finding.level, finding.what, finding.fix)
        for finding in report.findings
        if finding.check in ("inbox", "sources")
    ]


async def reason_of(app: App, settings: Settings) -> str:
    (shown,) = await status(app, settings)
    return shown.reason or ""


async def test_publications_of_two_accounts_are_gathered_and_a_recreated_origin_is_reported(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    desk, paper, port = Desk(), settings_of(server, "paper"), settings_of(server, "port")
    app = paper_of(desk)
    async with AsyncExitStack() as stack:
        jet = await stack.enter_async_context(app.connect(paper))
        harbour = await stack.enter_async_context(HARBOUR.connect(port))
        town = await stack.enter_async_context(TOWN.connect(paper))
        await make(harbour, "port")
        await make(town, "town")
        assert (await harbour.init()).unusable == ()
        assert (await town.init()).unusable == ()
        topology = await jet.init()
        assert topology.unusable == ()
        assert "news" in topology.created
        await moor(harbour, "argo", "beagle")
        await moor(town, "vega")
        async with working(HARBOUR, port), working(TOWN, paper), working(app, paper):
            await until(lambda: len(desk.places()) == 3)
            assert desk.places() == [("", "town", 1), ("JS.port.API", "port", 1), ("JS.port.API", "port", 2)]
            sources = {message.source: message.origin for message in desk.received}
            assert {source: origin and origin.stream for source, origin in sources.items()} == {
                "https://port.example": "port",
                "https://town.example": "town",
            }
            assert await reason_of(app, paper) == ""
        assert (await jet.init()).unusable == ()
        assert [level for level, _, _ in doctor_findings(app, paper)] == [Level.OK]

        assert harbour.client is not None
        await harbour.client.api("STREAM.DELETE.port")
        await make(harbour, "port")
        again = await stack.enter_async_context(NEXT.connect(port))  # a publication does not continue in another stream
        await again.init()
        await moor(again, "calypso")
        async with working(NEXT, port), working(app, paper):
            await until(lambda: len(desk.received) == 4)
        assert desk.received[-1].data.ship == "calypso"
        assert (await jet.repository(Ship).load("calypso")).moorings == 1
        warnings = [record.getMessage() for record in caplog.records if "made again" in record.getMessage()]
        assert len(warnings) == 1
        doctor_warnings = [text for level, text, _ in doctor_findings(app, paper) if level is Level.WARNING]
        assert any("'port' (JS.port.API)" in text and "it was made again" in text for text in doctor_warnings), (
            doctor_warnings
        )


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (CREATE, "has not heard of its source 'port' (JS.port.API) yet"),
        (DELIVER, "has gathered none of the 1 messages of its source 'port' (JS.port.API)"),
    ],
)
async def test_a_source_that_is_not_exported_is_reported_with_the_imports_it_needs(
    tmp_path: Path, missing: str, message: str
) -> None:
    with served(tmp_path, missing) as server:
        app, paper, port = paper_of(Desk()), settings_of(server, "paper"), settings_of(server, "port")
        async with app.connect(paper) as jet, HARBOUR.connect(port) as harbour:
            await make(harbour, "port")
            await make(jet, "town")
            assert harbour.client is not None
            await harbour.client.request("port.ships.a", b"{}")
            assert (await jet.init()).unusable == ()
            shown = [(text, fix) for level, text, fix in doctor_findings(app, paper) if level is Level.WARNING]
            needs = "it needs imports of JS.port.API.CONSUMER.CREATE.port, deliver.port.> and $JS.FC.port.>"
            assert any(message in text and needs in f"{text}{fix}" for text, fix in shown), shown

            async def is_shown() -> bool:
                return needs in await reason_of(app, paper)

            async with working(app, paper):
                await eventually(is_shown)


async def test_a_part_of_a_stream_of_another_account_is_gathered(tmp_path: Path) -> None:
    desk = Desk()
    app = paper_of(desk, "port.ships.argo")
    config = configuration(tmp_path).replace('CREATE.port"', 'CREATE.port.>"')
    with NatsServer(tmp_path / "server", jetstream=False, config=config) as server:
        paper, port = settings_of(server, "paper"), settings_of(server, "port")
        async with app.connect(paper) as jet, HARBOUR.connect(port) as harbour:
            await make(harbour, "port")
            await make(jet, "town")
            await harbour.init()
            assert (await jet.init()).unusable == ()
            await moor(harbour, "beagle", "argo")
            async with working(HARBOUR, port), working(app, paper):
                await until(lambda: desk.places() == [("JS.port.API", "port", 2)])
            assert [level for level, _, _ in doctor_findings(app, paper)] == [Level.OK]


async def test_an_origin_whose_info_may_not_be_read_is_unknown(tmp_path: Path) -> None:
    with served(tmp_path, INFO) as server:
        app, paper, port = paper_of(Desk()), settings_of(server, "paper"), settings_of(server, "port")
        async with app.connect(paper) as jet, HARBOUR.connect(port) as harbour:
            await make(harbour, "port")
            await make(jet, "town")
            assert (await jet.init()).unusable == ()
            (unknown,) = [text for level, text, _ in doctor_findings(app, paper) if level is Level.UNKNOWN]
            assert unknown == (
                "the source 'port' (JS.port.API) of 'news' could not be read: nobody answers "
                "JS.port.API.STREAM.INFO.port: the account does not import it, or the other does not export it"
            )


async def test_the_roles_of_nats_config_gather_from_another_account(tmp_path: Path) -> None:
    desk = Desk()
    app = paper_of(desk)

    def config(*origins: tuple[str, str]) -> str:
        roles = roles_of(
            "paper", ["ship"], [], list(declarations_of(app)), received=[("news", "paper-news")],
            gathered=["news", "town"], origins=origins,
        )  # fmt: skip
        passwords = "".join(f"{role.variable}: {role.name}\n" for role in roles)
        # The imports that an operator adds to the account of the log.
        text = accounts("paper", roles).replace("jetstream: enabled", f"jetstream: enabled\n{imports()}", 1)
        other = (
            f"accounts {{\n  PORT {{ jetstream: enabled, users: [ {{ user: port, password: port }} ], {exports()} }}\n"
        )
        return f"SYS_PASSWORD: sys\n{passwords}{text.replace('accounts {', other, 1)}"

    def settings_as(server: NatsServer, role: str) -> Settings:
        return settings_of(server, role, inbox_prefix=f"_INBOX_{role}")

    store = f'jetstream {{ store_dir: "{tmp_path}/data" }}\n'
    with NatsServer(tmp_path / "a", jetstream=False, config=store + config(("JS.port.API", "port"))) as server:
        admin, actor = settings_as(server, "admin"), settings_as(server, "actor")
        async with app.connect(admin) as jet, HARBOUR.connect(settings_of(server, "port")) as harbour:
            await make(harbour, "port")
            assert (await jet.init()).unusable == ()
            await harbour.init()
            await moor(harbour, "argo")
            async with working(HARBOUR, settings_of(server, "port")), working(app, actor):
                await until(lambda: desk.places() == [("JS.port.API", "port", 1)])
            assert [level for level, _, _ in doctor_findings(app, admin)] == [Level.OK, Level.WARNING, Level.UNKNOWN]
    with NatsServer(tmp_path / "b", jetstream=False, config=store + config()) as server:
        unknown = [
            text for level, text, _ in doctor_findings(app, settings_as(server, "admin")) if level is Level.UNKNOWN
        ]
        assert any("The server denied JS.port.API.STREAM.INFO.port" in text for text in unknown), unknown


async def test_an_origin_of_another_account_may_be_behind_a_leaf_node(tmp_path: Path) -> None:
    """The port has its JetStream on a leaf node, and the hub's account of the port exports that domain's API."""
    desk = Desk()
    app = paper_of(desk)
    with reserved_port() as listening:
        here = exports().replace("$JS.API.", "$JS.leaf.API.")
        there = imports().replace('subject: "$JS.API.', 'subject: "$JS.leaf.API.')
        hub = f"""server_name: hub
jetstream {{ store_dir: "{tmp_path}/hub", domain: hub }}
leafnodes {{ listen: "127.0.0.1:{listening}", authorization {{ user: link, password: link, account: PORT }} }}
accounts {{
  PORT {{ users: [ {{ user: port, password: port }} ], {here} }}
  PAPER {{ jetstream: enabled, users: [ {{ user: paper, password: paper }} ], {there} }}
}}"""
        leaf = f"""server_name: leaf
jetstream {{ store_dir: "{tmp_path}/leaf", domain: leaf }}
leafnodes {{ remotes: [ {{ url: "nats-leaf://link:link@127.0.0.1:{listening}" }} ] }}"""
        with (
            NatsServer(tmp_path / "a", jetstream=False, config=hub) as far,
            NatsServer(tmp_path / "b", jetstream=False, config=leaf) as near,
        ):
            paper, port = settings_of(far, "paper"), Settings((near.url,))
            async with app.connect(paper) as jet, HARBOUR.connect(port) as harbour:
                await make(harbour, "port")
                await make(jet, "town")
                await harbour.init()
                await jet.init()
                await moor(harbour, "argo")
                async with working(HARBOUR, port), working(app, paper):
                    await until(lambda: desk.places() == [("JS.port.API", "port", 1)])

                async def is_right() -> bool:
                    return [level for level, _, _ in doctor_findings(app, paper)] == [Level.OK]

                await eventually(is_right)
