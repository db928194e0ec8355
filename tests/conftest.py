"""The servers that tests share, the choice of slow tests, and properties without a time limit.

`make test` runs tests that are neither slow nor a campaign. Slow are those that start a JVM or a cluster, the demo, and
those that kill, stop or cut off a process: all of `tests/faults`, tests with the fixture `spark`, and marked ones.

A test that restarts, stops or limits a server starts one of its own. On the shared servers a test uses a stream and a
database that no other test has.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from eventjet.dev.nats import NatsServer

# A busy machine takes seconds for an example that takes milliseconds: that says nothing about the property.
settings.register_profile("eventjet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("eventjet")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would the programs they interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A JVM of a test lives for seconds, in which an optimizing compiler takes more time than it saves; and the byte code of
# Spark's classes, which compilers made, need not be verified.
os.environ.setdefault(
    "SPARK_SUBMIT_OPTS",
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote",
)

FAULTS = Path(__file__).parent / "faults"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow; tests that share a session of Spark come first, so that few processes need one.

    `EVENTJET_TEST_TIMEOUT_S` replaces the timeout of every test, for busy machines.
    """
    timeout_s = os.environ.get("EVENTJET_TEST_TIMEOUT_S")
    for item in items:
        if timeout_s is not None:
            item.add_marker(pytest.mark.timeout(float(timeout_s)), append=False)
        if wants_spark(item) or FAULTS in item.path.parents:
            item.add_marker(pytest.mark.slow)
    files = {item.path for item in items if wants_spark(item)}
    items.sort(key=lambda item: item.path not in files)  # Stable: files, and the tests in them, keep their order.


def pytest_collection_finish() -> None:
    """Spare the garbage collector the thousands of tests: it would visit them all each time that one of them asks."""
    gc.collect()
    gc.freeze()


def wants_spark(item: pytest.Item) -> bool:
    """Return whether a test runs in the session of Spark that tests share."""
    return "spark" in getattr(item, "fixturenames", ())


@pytest.fixture
def hang_ups() -> Iterator[None]:
    """Restore SIGHUP, which tests started with `nohup` ignore and pass on to the programs they start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def eventjet_nats() -> Iterator[NatsServer]:
    """A server in place of the plugin's: the log of a test need not survive the machine."""
    with NatsServer(sync_interval="1m") as server:
        yield server


@pytest.fixture(scope="session")
def nats(eventjet_nats: NatsServer) -> NatsServer:
    """The server that all tests of a process share."""
    return eventjet_nats


@pytest.fixture(params=["postgresql", "sqlite"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, of each kind in turn."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("eventjet_database"))
    return f"sqlite:///{tmp_path}/read.db"


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    """A stack of processes that end with the test."""
    with ExitStack() as stack:
        yield stack
