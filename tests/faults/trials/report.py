"""The counts of the trials, as Markdown."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.faults.trials.trial import Options, Scenario
from tests.faults.trials.verdict import Figures

COLUMNS = (
    "commands", "acked", "shared", "unknown", "unsettled", "refused", "lost", "twice", "wrong", "stale", "torn", "gaps",
    "models",
)  # fmt: skip
MUST_BE_ZERO = ("lost", "twice", "wrong", "stale", "torn", "gaps", "models")
HEAD = """# Faults: seed {seed}

{machine}. `python -m tests.faults --seed {seed} --rounds {rounds} --seconds {seconds:g} --only NAME` repeats one.

- acked: saves that were called stored; shared: those in the log that shared a batch; unknown: answers
  `OutcomeUnknown`, settled later by `resolve` or by the same
  command again, but for those unsettled; refused: any other error, after which nothing may be stored.
- lost: acked and not in the log; twice: in the log more than once; wrong: any other answer that the log contradicts;
  stale: a decision without events on an older state than one acked before; torn: batches of which the
  server kept a part; gaps: positions, versions or numbers that
  are not contiguous; models: read models that neither equal the log nor say why.
- A control runs as others are warned not to; that it loses shows that a loss would have been seen.
"""


@dataclass(slots=True)
class Outcome:
    """The outcome of a scenario."""

    scenario: Scenario
    figures: Figures = field(default_factory=Figures)
    notes: list[str] = field(default_factory=list[str])
    seconds: float = 0.0
    skipped: str = ""
    error: str = ""

    @property
    def name(self) -> str:
        return self.scenario.name

    @property
    def failed(self) -> bool:
        return not self.skipped and self.verdict not in ("held", "has lost, as it must")

    @property
    def verdict(self) -> str:
        if self.skipped:
            return "skipped"
        if self.error:
            return "ERROR"
        if self.scenario.must_lose:
            return "has lost, as it must" if self.figures.lost else "BLIND: it has lost nothing"
        broken = [name for name in MUST_BE_ZERO if getattr(self.figures, name) and name not in self.scenario.may]
        return f"BROKEN: {', '.join(broken)}" if broken else "held"

    def counts(self) -> dict[str, str]:
        """Return the figures for the report; nothing for the parts that count for themselves."""
        counted = self.figures.commands > 0
        return {name: f"{getattr(self.figures, name):,}" if counted else "" for name in COLUMNS}

    def line(self) -> str:
        """Return the lines for the terminal."""
        if self.skipped:
            return f"{self.name}: skipped: {self.skipped}"
        counted = ", ".join(f"{count} {name}" for name, count in self.counts().items() if count) or "see below"
        more = "".join(f"\n  {note}" for note in [*self.notes, *self.figures.problems])
        failure = f"\n{self.error}" if self.error else ""
        return f"{self.name}: {self.verdict} ({self.seconds:.0f} s): {counted}{more}{failure}"


def page(outcomes: Sequence[Outcome], options: Options) -> str:
    """Return the whole report."""
    machine = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    lines = [HEAD.format(seed=options.seed, machine=machine, rounds=options.rounds, seconds=options.seconds)]
    lines += [f"| scenario | verdict | s | {' | '.join(COLUMNS)} |", f"|---|---|---|{'---|' * len(COLUMNS)}"]
    for outcome in outcomes:
        cells = " | ".join(outcome.counts().values())
        lines.append(f"| {outcome.name} | {outcome.verdict} | {outcome.seconds:.0f} | {cells} |")
    for outcome in outcomes:
        lines += ["", f"## {outcome.name}", "", outcome.scenario.what, ""]
        lines += [f"- skipped: {outcome.skipped}"] if outcome.skipped else []
        lines += [f"- {note}" for note in [*outcome.notes, *outcome.figures.problems]]
        lines += ["", "```", outcome.error.strip(), "```"] if outcome.error else []
    return "\n".join(lines) + "\n"
