"""Jobs of the console: their phases as a page shows them."""

from __future__ import annotations

from eventjet.console.jobs import Job
from eventjet.rebuild import Progress


def a_job() -> Job:
    return Job("a" * 32, "verify", ("balances", "openings"), "local", "", "ada")


def test_a_job_that_has_not_begun_has_no_phases() -> None:
    assert a_job().phases() == []


def test_a_phase_is_over_when_the_next_phase_begins_or_the_job_ends() -> None:
    job = a_job()
    job.report("balances", Progress("read", 10, 30))
    job.report("balances", Progress("read", 20, 0))
    job.report("openings", Progress("read", 0, 0))

    phases = [(step["names"], step["done"], step["total"], step["is_over"]) for step in job.phases()]
    assert phases == [("balances", 20, 30, True), ("openings", 0, 0, False)]

    job.end("done")
    assert [step["is_over"] for step in job.phases()] == [True, True]


def test_a_note_is_no_phase() -> None:
    job = a_job()
    job.report("balances", Progress("start", 0, 0, "Engine: local"))

    assert job.phases() == []
    assert job.notes == ("Engine: local",)
