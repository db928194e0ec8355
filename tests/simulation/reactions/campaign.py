"""Runs of many seeded schedules of reactors and processes."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.campaign import Report, Trace, run_each, run_on_all_processors, traced_of
from tests.simulation.reactions.streams import Rules
from tests.simulation.reactions.world import PRODUCT, ReactionWorld

CHUNK = 25
"""Schedules that one process runs before it reports."""


def run_reactions(first_seed: int, count: int, rules: Rules = PRODUCT) -> Report:
    """Run some schedules in this process."""
    return run_each(lambda seed: ReactionWorld(seed, rules), first_seed, count)


def run_reactions_on_all_processors(
    first_seed: int, count: int, progress: Callable[[Report], object] = lambda report: None
) -> Report:
    """Run some schedules on all processors; `progress` gets the sum so far after each chunk."""
    return run_on_all_processors(first_seed, count, progress, run_reactions, CHUNK)


def traced_reactions(seed: int, rules: Rules = PRODUCT) -> tuple[list[str], str | None]:
    """Return the trace of a schedule, and the broken promise."""
    trace: Trace = []
    return traced_of(ReactionWorld(seed, rules, trace), trace)
