"""The contract of dialects, for PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from eventjet.projections.row_type import OWN_TABLES
from eventjet.sql.database import Database
from eventjet.sql.own_tables import metadata
from tests.contracts.dialect_contract import DialectContract


class TestDialects(DialectContract):
    @pytest.fixture
    def engine(self, database: str) -> Iterator[Engine]:
        engine = Database(database).sync_engine()
        yield engine
        engine.dispose()


def test_the_reserved_names_are_those_of_eventjets_own_tables() -> None:
    assert set(OWN_TABLES) == set(metadata.tables)
