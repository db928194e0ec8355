"""When a standby finds an owner silent, by the standby's own clock."""

from __future__ import annotations

from dataclasses import replace

from eventjet.domain.position import ACTIVE
from eventjet.sql.checkpoint import Checkpoint
from eventjet.subscriptions.lease import silent_checkpoint
from eventjet.subscriptions.retry import OwnerWatch

HELD = Checkpoint("balances", 1, 1, 7, "e", "log", 3, "host:1:aa", 1e12, 2.0, ACTIVE, None)


def test_an_owner_is_silent_if_its_lease_stays_unchanged_for_its_duration() -> None:
    now = 100.0
    watch = OwnerWatch(lambda: now)
    assert silent_checkpoint(watch, None) is None
    assert silent_checkpoint(watch, HELD) is None
    now = 102.0
    assert silent_checkpoint(watch, HELD) is None
    now = 102.1
    assert silent_checkpoint(watch, HELD) == HELD


def test_a_renewal_another_epoch_or_a_release_restarts_the_time() -> None:
    now = 0.0
    watch = OwnerWatch(lambda: now)
    others = (replace(HELD, lease_until=1e12 - 3_600), replace(HELD, epoch=4), replace(HELD, owner=None), None)
    for other in others:
        silent_checkpoint(watch, HELD)
        now += 1.5
        assert silent_checkpoint(watch, other) is None
        now += 1.5
        assert silent_checkpoint(watch, HELD) is None
        now += 1.5
        assert silent_checkpoint(watch, HELD) is None
    now += 1.0
    assert silent_checkpoint(watch, HELD) == HELD


def test_a_checkpoint_without_an_owner_has_no_silent_owner() -> None:
    now = 0.0
    watch = OwnerWatch(lambda: now)
    free = replace(HELD, owner=None)
    silent_checkpoint(watch, free)
    now = 60.0
    assert silent_checkpoint(watch, free) is None
