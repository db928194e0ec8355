"""The record alone says which event it is, of which aggregate, and which projections it concerns."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from eventjet import App, aggregate, event
from eventjet.codec.headers import RawRecord, header_block
from eventjet.codec.records import Decoder
from eventjet.errors import CodecError, UndecodableEvent, UnknownEvent


@event("account.deposited", schema=1)
class Deposited:
    cents: int


@event("account.closed", schema=1)
class Closed:
    pass


@event("snap.taken", schema=1)
class Taken:
    pass


@aggregate("account")
class Account:
    def evolve(self, event: Deposited | Closed) -> Account:
        return self


@aggregate("snap")
class Snap:
    def evolve(self, event: Taken) -> Snap:
        return self


CATALOG = App("bank", aggregates=[Account, Snap], retired_events=["account.frozen"]).catalog
ACCOUNTS, SNAPS = (Deposited,), (Taken,)


def record(subject: str = "account.a1", body: bytes = b'{"cents":5}', **more: str | None) -> RawRecord:
    pairs = {"Nats-Msg-Id": "m", "Ej-Type": "account.deposited", "Ej-Schema": "1", "Ej-Version": "1"}
    fields = pairs | {name.replace("_", "-"): value for name, value in more.items()}
    block = header_block([(name, value) for name, value in fields.items() if value is not None])
    return 9, 1_750_000_000_000_000_000, f"bank.{subject}".encode(), block, body


def verdict(raw: RawRecord, only: Collection[type] | None) -> str:
    try:
        return "passed over" if Decoder(CATALOG, only)(raw) is None else "taken"
    except CodecError as error:
        return type(error).__name__


@pytest.mark.parametrize(
    ("raw", "of_accounts", "of_snaps"),
    [
        (record(), "taken", "passed over"),
        (record(body=b"?"), "UndecodableEvent", "passed over"),
        (record(Ej_Encoding="zip"), "UndecodableEvent", "passed over"),
        (record(Ej_Schema="2"), "UnknownEvent", "passed over"),
        (record(Ej_Schema="x"), "UndecodableEvent", "passed over"),
        (record(Ej_Version=None), "UndecodableEvent", "passed over"),
        (record(Ej_Type=None), "UndecodableEvent", "passed over"),
        (record(Ej_Type="account.renamed"), "UnknownEvent", "passed over"),
        (record(Ej_Type="account.frozen"), "passed over", "passed over"),
        (record(Ej_Type="account.closed", Ej_Schema="7"), "passed over", "passed over"),
        (record(Ej_Type="account.closed", body=b"?", Ej_Version=None), "passed over", "passed over"),
        ((*record()[:3], b"", b"+ACK"), "UndecodableEvent", "passed over"),
        ((*record()[:3], record()[3][:-2], b"{}"), "UndecodableEvent", "passed over"),
        (record("elsewhere.a1", Ej_Type="else.where"), "passed over", "passed over"),
        ((*record("snap.a1")[:3], b"", b"+ACK"), "passed over", "UndecodableEvent"),
    ],
)
def test_a_projection_fails_only_for_records_that_may_be_its_own(
    raw: RawRecord, of_accounts: str, of_snaps: str
) -> None:
    assert (verdict(raw, ACCOUNTS), verdict(raw, SNAPS)) == (of_accounts, of_snaps)
    both = {of_accounts, of_snaps} - {"passed over"}
    assert verdict(raw, (*ACCOUNTS, *SNAPS)) == (both.pop() if both else "passed over")


def test_an_event_on_the_subject_of_another_aggregate_is_undecodable() -> None:
    forged = record("snap.a1")
    assert verdict(forged, SNAPS) == "passed over"
    for read in (Decoder(CATALOG, ACCOUNTS), Decoder(CATALOG), Decoder(CATALOG).link):
        with pytest.raises(
            UndecodableEvent, match=r"belongs to the aggregate 'account', and its subject to 'snap'.*`eventjet skip`"
        ):
            read(forged)


def test_an_event_of_a_renamed_aggregate_suggests_the_former_name() -> None:
    renamed = record("konto.a1")
    for read in (Decoder(CATALOG, ACCOUNTS), Decoder(CATALOG), Decoder(CATALOG).link):
        with pytest.raises(UndecodableEvent, match="@aggregate\\('konto'\\)") as raised:
            read(renamed)
        assert raised.value.unknown_aggregate == "konto"
        assert "skip" not in str(raised.value)


@pytest.mark.parametrize(
    ("version", "expected", "is_sound"),
    [
        ("1", "0", True),
        ("2", "1", True),
        ("2", "8", True),
        ("9", "8", True),
        ("9", None, True),
        ("0", "0", False),
        ("2", "0", False),
        ("3", "1", False),
        ("10", "8", False),
        ("10", None, False),
        ("1", "9", False),
        ("1", "x", False),
        ("1", "-1", False),
    ],
)
def test_a_version_must_fit_the_position_and_the_expectation(
    version: str, expected: str | None, is_sound: bool
) -> None:
    pairs = [("Nats-Msg-Id", "m"), ("Nats-Expected-Last-Subject-Sequence", expected), ("Ej-Type", "account.deposited")]
    pairs += [("Ej-Schema", "1"), ("Ej-Version", version)]
    raw = (*record()[:3], header_block([(name, value) for name, value in pairs if value is not None]), record()[4])
    for read in (Decoder(CATALOG), Decoder(CATALOG).link):
        if is_sound:
            assert read(raw) is not None
        else:
            with pytest.raises(UndecodableEvent):
                read(raw)


def test_a_skipped_record_changes_nothing_for_other_decoders() -> None:
    decode = Decoder(CATALOG, SNAPS)
    assert decode(record(Ej_Schema="2")) is None
    with pytest.raises(UnknownEvent):
        Decoder(CATALOG)(record(Ej_Schema="2"))
    assert decode(record("snap.a1", b"{}", Ej_Type="snap.taken")) is not None
