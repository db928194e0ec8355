"""The states of a subscription's position, and every transition between them. PURE.

The position of a projection is its checkpoint, a row in SQL (`sql.checkpoint`). The position of a reactor, process,
publication or inbox is its cursor, a key in the key-value bucket (`subscriptions.cursor`), which is only ever active,
paused or failed. Each cell is the state after the transition: `=` keeps the state, `-` refuses the transition and
changes nothing. A transition that *deposes* ends the owner's session: its next write is fenced, and another session
begins with what was decided. A checkpoint deposes by raising the epoch, which every write of an owner names. A cursor
deposes by the write itself, since every write of an owner names the sequence of the one before.

| transition   | new      | building | active  | paused  | failed  | retired | deposes |
|--------------|----------|----------|---------|---------|---------|---------|---------|
| take         | building | =        | =       | -       | active  | -       | yes     |
| note         | =        | =        | =       | =       | =       | =       | no      |
| fail         | failed   | failed   | failed  | -       | =       | -       | no      |
| resume       | -        | -        | -       | before  | -       | -       | yes     |
| pause        | paused   | paused   | paused  | -       | -       | -       | yes     |
| pause cursor | -        | -        | paused  | =       | paused  | -       | yes     |
| depose       | =        | =        | =       | =       | =       | =       | yes     |
| set cursor   | -        | -        | =       | =       | active  | -       | yes     |
| activate     | active   | active   | =       | -       | -       | -       | no      |
| stand back   | active   | active   | =       | -       | active  | -       | no      |
| retire       | retired  | retired  | retired | retired | retired | -       | yes     |
| begin anew   | -        | -        | -       | -       | -       | new     | yes     |
| reset        | =        | new      | new     | -       | new     | -       | yes     |
| assign       | =        | =        | =       | =       | =       | -       | no      |
| promote      | active   | active   | =       | =       | =       | -       | yes     |
| displace     | =        | =        | =       | =       | =       | -       | yes     |
| swap in      | active*  | active*  | =       | =       | active* | -       | yes     |

A cursor takes, notes, fails and resumes as a checkpoint does, and has a pause of its own; `set cursor` also stands for
a decision about a quarantined event, and for dividing a reactor's cursors anew. `before` is the state in which it was
paused; for a cursor, active. `active*` is building where the revision is still to take the declared location. An
advance, a renewal, a release and a reason to wait are notes. Notes, activate, fail and stand back are for the owner.
`take` succeeds only while nobody has the position, or its owner has gone silent. Apart from advances, only begin anew,
reset, swap in and set cursor move a position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NEW, BUILDING, ACTIVE, PAUSED, RETIRED, FAILED = "new", "building", "active", "paused", "retired", "failed"
STATES = (NEW, BUILDING, ACTIVE, PAUSED, FAILED, RETIRED)


@dataclass(frozen=True, slots=True)
class Transition:
    """A transition of the state machine: one row of the table in the module's docstring."""

    name: str
    states: Mapping[str, str]
    """The state after the transition by the state before; states that are missing refuse the transition."""
    deposes: bool = False


_ANY = {state: state for state in STATES}
_LIVING = {state: state for state in STATES if state != RETIRED}

TAKE = Transition("take", {NEW: BUILDING, BUILDING: BUILDING, ACTIVE: ACTIVE, FAILED: ACTIVE}, deposes=True)
NOTE = Transition("note", _ANY)
FAIL = Transition("fail", dict.fromkeys((NEW, BUILDING, ACTIVE, FAILED), FAILED))
RESUME_AS = {state: Transition("resume", {PAUSED: state}, deposes=True) for state in (NEW, BUILDING, ACTIVE)}
PAUSE = Transition("pause", dict.fromkeys((NEW, BUILDING, ACTIVE), PAUSED), deposes=True)
PAUSE_CURSOR = Transition("pause cursor", dict.fromkeys((ACTIVE, PAUSED, FAILED), PAUSED), deposes=True)
DEPOSE = Transition("depose", _ANY, deposes=True)
SET_CURSOR = Transition("set cursor", {ACTIVE: ACTIVE, PAUSED: PAUSED, FAILED: ACTIVE}, deposes=True)
ACTIVATE = Transition("activate", dict.fromkeys((NEW, BUILDING, ACTIVE), ACTIVE))
STAND_BACK = Transition("stand back", dict.fromkeys((NEW, BUILDING, ACTIVE, FAILED), ACTIVE))
RETIRE = Transition("retire", dict.fromkeys(_LIVING, RETIRED), deposes=True)
BEGIN_ANEW = Transition("begin anew", {RETIRED: NEW}, deposes=True)
RESET = Transition("reset", dict.fromkeys((NEW, BUILDING, ACTIVE, FAILED), NEW), deposes=True)
ASSIGN = Transition("assign", _LIVING)
PROMOTE = Transition("promote", _LIVING | {NEW: ACTIVE, BUILDING: ACTIVE}, deposes=True)
DISPLACE = Transition("displace", _LIVING, deposes=True)
SWAP_IN = Transition("swap in", _LIVING | dict.fromkeys((NEW, BUILDING, FAILED), ACTIVE), deposes=True)
SWAP_IN_BESIDE = Transition("swap in", _LIVING | dict.fromkeys((NEW, BUILDING, FAILED), BUILDING), deposes=True)
