"""Mistakes of the first day, and the sentences that report them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table

from eventjet import App, DefinitionError, Recorded, UsageError, aggregate, event, projection


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

    def rename(self) -> Bought:
        return Bought(title="")


@dataclass(frozen=True, slots=True)
class Shelf:
    book_id: str
    times: int


def table() -> Table:
    return Table(
        "shelf", MetaData(), Column("book_id", String(20), primary_key=True), Column("times", Integer, nullable=False)
    )


def test_a_fold_of_events_without_recorded_is_refused() -> None:
    def bare(row: Shelf | None, event: Bought | Sold) -> Shelf | None:
        return row

    declared: Any = projection("shelf", table=table())
    with pytest.raises(DefinitionError) as raised:
        App("shop", aggregates=[Book], projections=[declared(bare)])
    assert raised.value.faults == (
        f"projection 'shelf': {bare.__qualname__} is given a `Recorded`: write `event: Recorded[Bought | Sold]`",
    )


def test_events_that_no_aggregate_folds_are_reported_in_one_line() -> None:
    @projection("shelf", table=table())
    def shelf(row: Shelf | None, event: Recorded[Bought | Sold]) -> Shelf | None:
        return row

    with pytest.raises(DefinitionError) as raised:
        App("shop", aggregates=[], projections=[shelf])
    assert raised.value.faults == ("projection 'shelf': it takes Bought, Sold, which no aggregate of the app folds",)


def test_an_app_without_aggregates_is_refused_with_a_fix() -> None:
    without: Any = App
    with pytest.raises(DefinitionError, match=r"App\(aggregates=\[…\]\) is missing"):
        without("shop")


class Seller:
    """A service of the application with a method that can be a decision."""

    def sell(self, book: Book, count: int) -> list[Sold]:
        return [Sold()] * count


async def test_a_wrong_decision_is_refused_with_the_right_call() -> None:
    async with App("shop", aggregates=[Book]).in_memory() as jet:
        books: Any = jet.repository(Book)
        state = Book()
        mistakes: dict[str, Any] = {
            "`rename` of one Book, whose state may be old": state.rename,
            "a Sold": Sold(),
            "its name": "rename",
            "a str": "lend",
            "the class Sold": Sold,
            "a NoneType": None,
        }
        for description, decision in mistakes.items():
            for use in (books.execute, books.command("c").execute):
                with pytest.raises(UsageError, match=f"this is {description}.*`execute\\(id, Book.rename, …\\)`"):
                    await use("a", decision, 1)
        assert (await books.execute("a", Seller().sell, 2)).version == 2
