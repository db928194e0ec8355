"""An app of which one publication cannot be told: `init`, `worker`, `status` and `doctor` all the same."""

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


def said_until(process: subprocess.Popen[str], word: str) -> str:
    """What it has said on standard error when the word came."""
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        said.append(line)
        if word in line:
            return "".join(said)
    raise AssertionError(f"it ended before it said {word!r}: {''.join(said)}")


def test_a_publication_without_a_stream_keeps_no_projection_from_work(bank: Program, ended_processes: Keep) -> None:
    module = bank.folder / "bank.py"
    source = module.read_text(encoding="utf-8")
    stream = f"pub-{time.time_ns()}"
    source = source.replace("\nbank = App(", _PUBLICATION.replace("STREAM", stream))
    module.write_text(source.replace("projections=[", "publications=[growth], projections=["), encoding="utf-8")
    begun = bank("init", "--json")
    assert begun.status == 1
    made = json.loads(begun.out)
    assert len(made["faults"]) == 1
    assert f"The stream '{stream}' of the publication 'growth'" in made["faults"][0]
    assert "balances" in made["created"]
    assert made["cursors"] == {"growth": 0}

    worker = bank.start("worker", "--http", "127.0.0.1:0")
    ended_processes(worker)
    said = said_until(worker, "ready: ")
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+", said)
    ready = Bank(bank)
    ready.await_balance(ready.deposit("a-1", 5, 7))
    found = {one["name"]: one for one in json.loads(bank("status", "--json").out)}
    assert (found["balances"]["state"], found["balances"]["reason"]) == ("active", None)
    assert found["growth"]["state"] == "failed"
    assert "it does not exist. Create it with the subject" in found["growth"]["reason"]
    assert "it does not exist" in bank("doctor").out
    until = time.monotonic() + _END_S
    while not ((answer := health(url))[1]["reason"] or "").startswith("growth: failed: The stream"):
        assert time.monotonic() < until, answer
        time.sleep(0.1)
    assert answer[0] == 503
    worker.send_signal(signal.SIGTERM)
    _, err = worker.communicate(timeout=_END_S)
    assert worker.returncode == 0
    assert (said + err).count("does not exist") == 1
