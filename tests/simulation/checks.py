"""The checks of every schedule: each outcome agrees with the log."""

from __future__ import annotations

from collections.abc import Sequence

from eventjet.log.outcome import Stored, Unknown
from tests.simulation.client import LEAST_S, Attempt
from tests.simulation.stream import CLAIMED, Stream

SLACK_S = 0.000_001


class Broken(AssertionError):
    """A broken promise; the message says which, and of what."""


def check(stream: Stream, attempts: Sequence[Attempt], request_s: float, *, final: bool = True) -> None:
    """Raise `Broken` for a broken promise; before the end, check only what must hold already."""
    if final:
        _check_log(stream)
    for attempt in attempts:
        _check_outcome(stream, attempt, final=final)
        if not attempt.was_unknown or not final:
            _check_time(attempt, request_s)


def check_repeated(command: str, positions: Sequence[int]) -> None:
    """Raise `Broken` if a repeated command is not in the log on all of its subjects."""
    if not all(positions):
        raise Broken(f"the command {command} is in the log in part: {list(positions)}")


def _check_log(stream: Stream) -> None:
    """Check that no event or command is in the log twice, and that versions and chains are unbroken."""
    saves: dict[str, str] = {}
    event_keys: set[tuple[str, str | None]] = set()
    last: dict[str, tuple[int, int]] = {}
    for position, message in enumerate(stream.log, 1):
        if message.subject == CLAIMED:
            continue
        if (message.subject, message.event_id) in event_keys:
            raise Broken(f"{message.event_id} is in the log twice")
        event_keys.add((message.subject, message.event_id))
        if message.command:
            save = (message.event_id or "").rstrip("+").rsplit(".", 2)[0]
            if saves.setdefault(message.command, save) != save:
                raise Broken(f"the command {message.command} is in the log twice: {saves[message.command]} and {save}")
        before, version = last.get(message.subject, (0, 0))
        if message.version != version + 1:
            raise Broken(f"{message.event_id} is version {message.version} after {version}")
        if message.expected is not None and message.expected != before:
            raise Broken(f"{message.event_id} expected {message.expected} and follows {before}")
        last[message.subject] = (position, message.version)


def _check_outcome(stream: Stream, attempt: Attempt, *, final: bool) -> None:
    positions_of_sets = [_positions(stream, ids) for ids in attempt.ids]
    present = [positions for positions in positions_of_sets if any(positions)]
    for positions in present:
        consecutive = list(range(positions[0], positions[0] + len(positions)))
        if positions != consecutive:
            raise Broken(f"{attempt.name} is in the log in part, or apart: {positions}")
    if len(present) > 1:
        raise Broken(f"{attempt.name} is in the log {len(present)} times, under different ids")
    if isinstance(attempt.outcome, Stored):
        if not present:
            raise Broken(f"{attempt.name} was called stored and is not in the log")
        if present[0][-1] != attempt.outcome.position:
            raise Broken(f"{attempt.name} was called stored at {attempt.outcome.position} and is at {present[0]}")
    elif present and not isinstance(attempt.outcome, Unknown):
        raise Broken(f"{attempt.name} was called {attempt.outcome} and is in the log at {present[0]}")


def _check_time(attempt: Attempt, request_s: float) -> None:
    """Check that a save ends one request after its deadline at the latest, and is unknown only then."""
    if attempt.decided_at > attempt.deadline + LEAST_S + request_s + SLACK_S:
        raise Broken(f"{attempt.name} took {attempt.decided_at - attempt.deadline:.3f} s longer than its deadline")
    if isinstance(attempt.outcome, Unknown) and attempt.decided_at < attempt.deadline - SLACK_S:
        raise Broken(f"{attempt.name} gave up {attempt.deadline - attempt.decided_at:.3f} s before its deadline")


def _positions(stream: Stream, ids: Sequence[str]) -> list[int]:
    """Return the positions of the events, 0 for those that are not in the log."""
    index_of_id = {event_id: index for index, event_id in enumerate(ids)}
    positions = [0] * len(ids)
    for position, message in enumerate(stream.log, 1):
        index = index_of_id.get(message.event_id or "")
        if index is not None and message.subject != CLAIMED:
            positions[index] = position
    return positions
