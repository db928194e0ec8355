"""`docs/reference/cli.md` names each field of a command's JSON where it describes the command."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from eventjet.archive.bodies import CopiedBodies
from eventjet.commands.log_check import EventTypeRead, LogCheck, LogFault
from eventjet.commands.unique import ClaimReport, Mismatches
from eventjet.lake import LakeReport, LakeStatus, LakeVerification, TableStatus
from eventjet.lake.syncing import WrittenTable
from eventjet.lake.verifying import RangeDifference, VerifiedTable
from eventjet.log.sweep import Reference
from eventjet.operations.mirrors import MirrorStatus
from eventjet.operations.processes import ProcessView, Woken
from eventjet.operations.promotion import Beyond, Promotion
from eventjet.rebuild import ArchiveReport, AuditReport, Restored, VerifyReport
from eventjet.rebuild.auditing import AuditedArchive
from eventjet.rebuild.job import SnapshotTally
from eventjet.rebuild.log_audit import LogFinding, Place
from eventjet.rebuild.runner import Candidate, RebuildReport, Rebuilt
from eventjet.sql.migrations import Upgraded
from eventjet.sql.quarantine import DecisionOutcome, Listed
from eventjet.sql.revisions import Paused, Unused
from eventjet.subscriptions.work_status import WorkStatus

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
ANSWERS: dict[str, tuple[type[Any], ...]] = {
    "status": (WorkStatus,),
    "process show": (ProcessView,),
    "process sync": (Woken,),
    "pause": (Paused,),
    "quarantine list": (Listed, DecisionOutcome),
    "verify": (VerifyReport,),
    "rebuild": (RebuildReport, Rebuilt, Candidate),
    "audit": (AuditReport, AuditedArchive, LogFinding, Place),
    "archive": (ArchiveReport, CopiedBodies, Reference),
    "restore": (Restored,),
    "mirror create": (MirrorStatus,),
    "mirror promote": (Promotion, Beyond),
    "lake sync": (LakeReport, WrittenTable),
    "lake status": (LakeStatus, TableStatus),
    "lake verify": (LakeVerification, VerifiedTable, RangeDifference),
    "snapshots build": (SnapshotTally,),
    "schema check": (LogCheck, EventTypeRead, LogFault),
    "unique build": (ClaimReport, Mismatches),
    "db upgrade": (Upgraded,),
    "db unused": (Unused,),
}
"""The classes whose fields a command prints, by the words that begin its paragraph."""


@pytest.mark.parametrize("command", ANSWERS)
def test_every_field_of_an_answer_is_documented(command: str) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("\n## JSON\n")[2].partition("\n## ")[0]
    (paragraph,) = [text for text in section.split("\n\n") if text.lstrip().startswith(f"`{command}`")]
    named = set(re.findall(r"`([a-z_0-9]+)`", paragraph))
    missing = {field.name for answer in ANSWERS[command] for field in fields(answer)} - named
    assert missing == set()
