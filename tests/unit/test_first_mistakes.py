"""What somebody gets wrong on the first day, and the sentence that says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table

from eventjet import App, DefinitionError, Recorded, aggregate, event, projection


@event("book.bought")
class Bought:
    title: str


@event("book.sold")
class Sold:
    pass


@aggregate("book")
class Book:
    def evolve(self, event: Bought | Sold) -> Book:
        return self


@dataclass(frozen=True, slots=True)
class Shelf:
    book_id: str
    times: int


def table() -> Table:
    return Table(
        "shelf", MetaData(), Column("book_id", String(20), primary_key=True), Column("times", Integer, nullable=False)
    )


def test_a_fold_that_takes_the_event_itself_would_never_match_and_is_refused() -> None:
    def bare(row: Shelf | None, event: Bought | Sold) -> Shelf | None:
        return row

    declared: Any = projection("shelf", table=table())
    with pytest.raises(DefinitionError) as told:
        App("shop", aggregates=[Book], projections=[declared(bare)])
    assert told.value.faults == (
        f"projection 'shelf': {bare.__qualname__} is given a `Recorded`: write `event: Recorded[Bought | Sold]`",
    )


def test_events_that_nobody_folds_are_told_in_one_line() -> None:
    @projection("shelf", table=table())
    def shelf(row: Shelf | None, event: Recorded[Bought | Sold]) -> Shelf | None:
        return row

    with pytest.raises(DefinitionError) as told:
        App("shop", aggregates=[], projections=[shelf])
    assert told.value.faults == ("projection 'shelf': it takes Bought, Sold, which no aggregate of the app folds",)
