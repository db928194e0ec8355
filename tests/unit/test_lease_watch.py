"""When a standby calls an owner silent, by its own clock."""

from __future__ import annotations

from dataclasses import replace

from eventjet.sql.checkpoint import ACTIVE, Checkpoint
from eventjet.subscriptions.lease import LeaseWatch

HELD = Checkpoint("balances", 1, 1, 7, "e", "log", 3, "host:1:aa", 1e12, 2.0, ACTIVE, None)


def test_an_owner_is_silent_once_its_lease_was_seen_unchanged_for_as_long_as_it_lasts() -> None:
    now = 100.0
    watch = LeaseWatch(lambda: now)
    assert watch.saw(None) is None
    assert watch.saw(HELD) is None
    now = 102.0
    assert watch.saw(HELD) is None
    now = 102.1
    assert watch.saw(HELD) == HELD


def test_a_renewal_another_epoch_and_an_end_begin_the_time_anew() -> None:
    now = 0.0
    watch = LeaseWatch(lambda: now)
    others = (replace(HELD, lease_until=1e12 - 3_600), replace(HELD, epoch=4), replace(HELD, owner=None), None)
    for other in others:
        watch.saw(HELD)
        now += 1.5
        assert watch.saw(other) is None
        now += 1.5
        assert watch.saw(HELD) is None
        now += 1.5
        assert watch.saw(HELD) is None
    now += 1.0
    assert watch.saw(HELD) == HELD


def test_what_nobody_holds_has_no_silent_owner() -> None:
    now = 0.0
    watch = LeaseWatch(lambda: now)
    free = replace(HELD, owner=None)
    watch.saw(free)
    now = 60.0
    assert watch.saw(free) is None
