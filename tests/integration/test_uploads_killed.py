"""Uploads and sweeps are killed at random moments, and no body to which an event refers is lost."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.objects import Bucket
from eventjet.log.sweep import faults_of, references_of, sweep_objects
from eventjet.nats.endpoint import Endpoint
from tests.blobs import documents
from tests.forked import Forked
from tests.logs import fresh_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_600)]

KILLS = int(os.environ.get("EVENTJET_TEST_UPLOAD_KILLS", "8"))
WRITERS = 2
PATIENCE_S = 120.0


def start(module: str, folder: Path, name: str, *arguments: str) -> Forked:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("EVENTJET_")}
    out = folder / name
    return Forked(module, arguments, folder=folder, environ=environ, out=out, err=folder / f"{name}.err")


def wait_for_output(file: Path, process: Forked) -> None:
    end = time.monotonic() + PATIENCE_S
    while not (file.exists() and file.stat().st_size):
        assert process.poll() is None, file.with_name(f"{file.name}.err").read_text()
        assert time.monotonic() < end
        time.sleep(0.005)


async def test_no_body_is_lost_to_which_an_event_refers(eventjet_nats: NatsServer, tmp_path: Path) -> None:
    seed = time.time_ns() % 10**9
    print(f"seed {seed}")  # noqa: T201
    chance, name, url = random.Random(seed), fresh_name(), eventjet_nats.url
    endpoint, bucket = Endpoint((url,)), Bucket(name)
    async with documents(name).connect(servers=url) as jet:
        await jet.init()
    killed = swept = uploads = sweeps_killed = 0
    with NatsConnection.open(endpoint) as link:
        while killed < KILLS:
            writers = [
                start("tests.uploading", tmp_path, f"{killed}-{number}", name, url, str(seed + killed * 10 + number))
                for number in range(WRITERS)
            ]
            for number, writer in enumerate(writers):
                wait_for_output(tmp_path / f"{killed}-{number}", writer)
            for writer in writers:
                time.sleep(chance.random() * 0.1)
                writer.kill()
                writer.wait(PATIENCE_S)
                killed += 1
            if chance.random() < 0.2:
                sweeper = start("tests.integration.sweeping", tmp_path, f"sweep-{killed}", name, url)
                wait_for_output(tmp_path / f"sweep-{killed}", sweeper)
                time.sleep(chance.random() * 0.03)
                sweeper.kill()
                sweeper.wait(PATIENCE_S)
                sweeps_killed += 1
            outcome = sweep_objects(link, endpoint, name, age_s=0, removes=True)
            swept, uploads = swept + outcome.removed, uploads + outcome.removed_uploads
            assert not outcome.missing
            assert outcome.removed == len(outcome.orphans)
        references = references_of(link, endpoint, name)
        assert list(faults_of(link, name, references.values())) == []
        objects = sweep_objects(link, endpoint, name, age_s=0)
        assert (objects.objects, len(objects.orphans), objects.unfinished) == (len(references), 0, 0)
        metas = link.run(bucket.reading_metas())
        assert {meta.digest for meta in metas if not meta.is_deleted} == set(references)
    figures = f"{len(references)} bodies, {swept} orphans and {uploads} uploads swept"
    print(f"{killed} kills of uploads, {sweeps_killed} of sweeps: {figures}")  # noqa: T201
