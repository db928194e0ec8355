"""The values of the NATS chart in `deploy` make a valid configuration, and eventjet reports no fault on its servers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from eventjet.dev.nats import NatsServer, nats_program
from eventjet.dev.server import reserved_port
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import bank
from eventjet.operations.roles import accounts, roles_of
from eventjet.settings import Settings
from tests.docs.nats_chart import CA, CERTIFICATES, KNOWN, named, nats_conf
from tests.docs.pages import blocks_of
from tests.integration.wire_secrets import certificates
from tests.nats_cluster import wait_agreed

ROOT = Path(__file__).parents[2]
VALUES: dict[str, Any] = yaml.safe_load((ROOT / "deploy/kubernetes/nats-values.yaml").read_text(encoding="utf-8"))
ROLES = roles_of("bank", ("account",), [f"{name}-r{number}" for name in ("balances", "postings") for number in (1, 2)])
PASSWORDS = {role.variable: f"p-{role.name}" for role in ROLES} | {"SYS_PASSWORD": "p-sys"}


def configured(folder: Path, values: dict[str, Any] = VALUES) -> str:
    """Return the configuration of the values, with certificates and files that exist."""
    pems = certificates(folder)
    (folder / "accounts.conf").write_text(accounts("bank", ROLES), encoding="utf-8")
    text = nats_conf(values).replace(CA, str(pems["ca.pem"])).replace("/var/run/nats", str(folder))
    for protocol in ("nats", "cluster"):
        text = text.replace(f"{CERTIFICATES}/{protocol}/tls.crt", str(pems["server.pem"]))
        text = text.replace(f"{CERTIFICATES}/{protocol}/tls.key", str(pems["server.key"]))
    return text


def checked(folder: Path, text: str) -> str:
    """Return what nats-server says against a configuration, or nothing when it accepts it."""
    (folder / "nats.conf").write_text(text, encoding="utf-8")
    ended = subprocess.run(
        [str(nats_program()), "-t", "-c", str(folder / "nats.conf")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **PASSWORDS, "SERVER_NAME": "nats-0"},
        timeout=60,
    )
    return ended.stderr if ended.returncode else ""


def test_every_value_exists_in_the_chart() -> None:
    assert named(VALUES) - KNOWN == set()


def test_the_server_accepts_the_configuration_of_the_values(tmp_path: Path) -> None:
    text = configured(tmp_path)
    assert checked(tmp_path, text) == ""
    assert '"sync_interval": "always"' in text
    assert "include accounts.conf;" in text


def test_a_word_that_the_server_does_not_know_is_detected(tmp_path: Path) -> None:
    wrong = json.loads(json.dumps(VALUES))
    wrong["config"]["jetstream"]["merge"] = {"sync_intervall": "always"}
    assert "sync_intervall" in checked(tmp_path, configured(tmp_path, wrong))


def test_the_page_makes_a_password_for_each_user(tmp_path: Path) -> None:
    (program,) = [
        block for block in blocks_of(ROOT / "docs/how-to/nats-on-kubernetes.md") if block.path == "passwords.py"
    ]
    (tmp_path / "accounts.conf").write_text(accounts("bank", ROLES), encoding="utf-8")
    subprocess.run([sys.executable, "-c", program.text], cwd=tmp_path, check=True, timeout=60)
    passwords = (tmp_path / "nats-passwords.env").read_text(encoding="utf-8")
    assert {line.partition("=")[0] for line in passwords.splitlines()} == set(PASSWORDS)
    assert (tmp_path / "nats-passwords.env").stat().st_mode & 0o077 == 0


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[NatsServer]]:
    """Three servers on ports of their own, with everything else as the values say."""
    text = configured(tmp_path)
    # The embedded server has these from its own configuration.
    for line in ("http_port", "port", "server_name"):
        text = re.sub(rf'^  "{line}": .*\n', "", text, flags=re.MULTILINE)
    # The server includes only files beside its configuration.
    users = accounts("bank", ROLES)
    for name, password in PASSWORDS.items():
        users = users.replace(f"${name} ", f"{password} ").replace(f"${name},", f"{password},")
    text = text.replace("include accounts.conf;", users)
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(3)]
        for number, port in enumerate(ports):
            text = text.replace(f"nats-{number}.nats-headless:6222", f"127.0.0.1:{port}")
        started = []
        for number, port in enumerate(ports):
            own = text.replace('"port": 6222', f'"listen": "127.0.0.1:{port}"')
            own = own.replace('"/data"', json.dumps(str(tmp_path / f"data-{number}")))
            own = own.replace("nats.pid", f"nats-{number}.pid").strip().removeprefix("{").removesuffix("}")
            server = NatsServer(config=f"server_name: nats-{number}\n{own}")
            stack.callback(server.close)
            started.append(server.start(60.0))
        wait_agreed(started, 240.0)
        yield started


def environment(folder: Path, servers: list[NatsServer], role: str) -> dict[str, str]:
    """Return the environment of a process of this role, as in `deploy`."""
    return {name: value for name, value in os.environ.items() if not name.startswith("EVENTJET_")} | {
        "EVENTJET_APP": "eventjet.examples.bank.app:bank",
        "EVENTJET_SERVERS": ",".join(server.url.replace("nats://", "tls://") for server in servers),
        "EVENTJET_TLS_CA": str(folder / "ca.pem"),
        "EVENTJET_REPLICAS": "3",
        "EVENTJET_USER": role,
        "EVENTJET_PASSWORD": PASSWORDS[f"{role.upper()}_PASSWORD"],
        "EVENTJET_INBOX_PREFIX": f"_INBOX_{role}",
        "EVENTJET_DATABASE": f"sqlite:///{folder / 'read.db'}",
        "EVENTJET_MONITORING": " ".join(server.monitor_url for server in servers),
    }


def eventjet(environ: dict[str, str], *words: str) -> str:
    """Return the output of the command, which must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "eventjet.cli", *words],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
async def test_the_doctor_reports_no_fault_on_such_servers(tmp_path: Path, servers: list[NatsServer]) -> None:
    admin = environment(tmp_path, servers, "admin")
    eventjet(admin, "init")
    async with bank.connect(Settings.load(environ=environment(tmp_path, servers, "writer"))) as jet:
        await jet.repository(Account).execute("a-1", Account.open, "ada")
        await jet.repository(Account).execute("a-1", Account.deposit, Decimal(1))
    # The state of their readers is in the servers' memory, of which the chart's default gives streams none.
    bulk = environment(tmp_path, servers, "rebuild")
    eventjet(bulk, "rebuild", "balances", "postings", "--engine", "local")
    assert "0 differences" in eventjet(bulk, "verify", "balances", "--engine", "local")
    report = json.loads(eventjet(admin, "doctor", "--strict", "--json"))
    assert [report["counts"][level] for level in ("fault", "warning", "unknown", "unreachable")] == [0, 0, 0, 0]
    assert [finding["level"] for finding in report["found"] if finding["check"] == "sync_interval"] == ["ok"] * 3
    assert "bank has 3 replicas" in [finding["what"] for finding in report["found"]]
