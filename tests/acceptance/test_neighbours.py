"""An app with one publication that cannot be published: `init`, `worker`, `status` and `doctor` work all the same."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.acceptance.conftest import Program
from tests.acceptance.test_commands import Bank, Keep

pytestmark = pytest.mark.slow

_END_S = 90.0
_PUBLICATION = """
from eventjet import publication


@event("account.grown")
class Grown:
    amount: Decimal


@publication("growth", stream="STREAM", source="https://bank.example", start="beginning")
def growth(event: Recorded[Deposited]) -> Grown:
    return Grown(amount=event.data.amount)


bank = App("""


def health(url: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def errors_until(process: subprocess.Popen[str], word: str) -> str:
    """Return what the process wrote to standard error up to the line with the word."""
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if word in line:
            return "".join(lines)
    raise AssertionError(f"it ended before it said {word!r}: {''.join(lines)}")


def test_a_publication_without_a_stream_keeps_no_projection_from_work(bank: Program, ended_processes: Keep) -> None:
    module = bank.folder / "bank.py"
    source = module.read_text(encoding="utf-8")
    stream = f"pub-{time.time_ns()}"
    source = source.replace("\nbank = App(", _PUBLICATION.replace("STREAM", stream))
    module.write_text(source.replace("projections=[", "publications=[growth], projections=["), encoding="utf-8")
    init = bank("init", "--json")
    assert init.status == 1
    report = json.loads(init.out)
    assert len(report["faults"]) == 1
    assert f"The stream '{stream}' of the publication 'growth'" in report["faults"][0]
    assert "balances" in report["created"]
    assert report["cursors"] == {"growth": 0}

    worker = bank.start("worker", "--http", "127.0.0.1:0")
    ended_processes(worker)
    errors = errors_until(worker, "ready: ")
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+", errors)
    ready = Bank(bank)
    ready.await_balance(ready.deposit("a-1", 5, 7))
    statuses = {status["name"]: status for status in json.loads(bank("status", "--json").out)}
    assert (statuses["balances"]["state"], statuses["balances"]["reason"]) == ("active", None)
    assert statuses["growth"]["state"] == "failed"
    assert "it does not exist. Create it with the subject" in statuses["growth"]["reason"]
    assert "it does not exist" in bank("doctor").out
    deadline = time.monotonic() + _END_S
    while not ((answer := health(url))[1]["reason"] or "").startswith("growth: failed: The stream"):
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)
    assert answer[0] == 503
    worker.send_signal(signal.SIGTERM)
    _, err = worker.communicate(timeout=_END_S)
    assert worker.returncode == 0
    assert (errors + err).count("does not exist") == 1
