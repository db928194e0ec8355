"""PURE: which engine a job takes when nobody named one, from what the log and the machine tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from eventjet.rebuild.plan import EngineName

EngineChoice: TypeAlias = EngineName | Literal["auto"]
"""`auto`: Spark where one is configured or where it pays, otherwise this process."""

CHOICES: tuple[EngineChoice, ...] = ("auto", "spark", "local")

LOCAL_S = 8.96e-6
"""Of this process, an event: 111,667 events/s in the table "Rebuild of 1,000,000 events" of the performance page."""
SPARK_CORE_S = 14.8e-6
"""Of one core of Spark, an event: 135,054 events/s on two cores in the same table."""
SPARK_START_S = 5.16
"""From nothing to the first read, more than in this process, in the same run."""
LOCAL_ROWS_MAX = 5_000_000
"""Rows, of some hundred bytes each, that this process may hold; Spark spreads and spills them."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a job has to do, and with what."""

    events: int
    keys: int
    """About how many rows or states there may be."""
    cores: int
    """Of this machine."""
    cluster: str | None = None
    """A Spark that is configured; None where it would have to be started here."""
    installed: bool = True
    """Whether pyspark is."""
    remote_archive: bool = False
    """The past is read from an archive that only Spark reaches."""


def spark_pays_from(cores: int) -> int | None:
    """Events from which Spark on so many cores of one machine is done first; None where it never is."""
    saved_s = LOCAL_S - SPARK_CORE_S / cores
    return round(SPARK_START_S / saved_s / 10_000) * 10_000 if saved_s > 0 else None


def choose(work: Work) -> tuple[EngineName, str]:
    """The engine, and in a line why."""
    events = f"{work.events:,} event{'' if work.events == 1 else 's'}"
    if work.cluster is not None:
        return "spark", f"Engine: Spark on {work.cluster}, which is configured; {events}."
    if work.remote_archive:
        return "spark", f"Engine: Spark, since the archive is no folder of this machine; {events}."
    least = spark_pays_from(work.cores)
    many = work.keys > LOCAL_ROWS_MAX
    if many or (least is not None and work.events >= least):
        why = f"{work.keys:,} rows may be too many for one process" if many else f"it pays from about {least:,} here"
        if work.installed:
            return "spark", f"Engine: Spark on this machine: {events}, and {why}."
        return "local", f"Engine: local, since pyspark is not installed, though {events}: {why}."
    pays = "does not pay on one core" if least is None else f"pays from about {least:,} on {work.cores} cores"
    return "local", f"Engine: local: {events}; Spark {pays}, or on a cluster."


def slower_than_local(work: Work) -> str:
    """What to say of Spark on this machine where this process is done before it; empty where that is not so."""
    if choose(work)[0] == "spark":
        return ""
    least = spark_pays_from(work.cores)
    pays = "never, with one core" if least is None else f"from about {least:,} events, with {work.cores} cores"
    return (
        f"The local engine would be quicker than starting Spark here, which pays {pays}: this log has {work.events:,}."
    )
