"""Texts with a prefix are a range in the order of code points, from the prefix to the next text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Column, MetaData, String, Table, create_engine
from sqlalchemy.dialects import postgresql
from sqlalchemy.pool import NullPool

from eventjet.sql.statements import TextOrder, keys_from, next_text

TEXT = st.text(st.sampled_from("ab\ud7ff\ue000\U0010fffe\U0010ffff") | st.characters(codec="utf-8"), max_size=5)
keys = Table("keys", MetaData(), Column("id", String(200), primary_key=True))


@given(TEXT, TEXT)
def test_the_range_has_the_texts_with_the_prefix_and_no_others(prefix: str, text: str) -> None:
    for candidate in (text, prefix + text):
        end = next_text(prefix)
        assert candidate.startswith(prefix) == (candidate >= prefix and (end is None or candidate < end))


def test_pages_of_the_range_are_consecutive() -> None:
    known = ["", "%", "A", "a", "a%", "aB", "aa", "a\U0010ffff", "b", "ä", "\U0010ffff", "\U0010ffff\U0010ffff"]
    with create_engine("sqlite://", poolclass=NullPool).connect() as connection:
        keys.create(connection)
        connection.execute(keys.insert(), [{"id": key} for key in known])
        for prefix in ("", "a", "A", "\U0010ffff", "%", "c"):
            read_keys, after = list[str](), ""
            while page := list(connection.scalars(keys_from(keys, "id", TextOrder.PLAIN, prefix, after, 2))):
                read_keys += page
                after = page[-1]
            # An empty key is no id: with an empty prefix it only comes first.
            assert read_keys == sorted(key for key in known if key.startswith(prefix))


def test_a_query_for_postgresql_uses_the_order_of_its_index() -> None:
    def sql_of(order: TextOrder) -> str:
        return " ".join(str(keys_from(keys, "id", order, "a", "ab", 2).compile(dialect=postgresql.dialect())).split())

    by_pattern = sql_of(TextOrder.PATTERN)
    assert "keys.id ~>~ %(id_1)s" in by_pattern
    assert "ORDER BY keys.id USING ~<~ LIMIT" in by_pattern
    assert 'keys.id COLLATE "C" > %(param_1)s' in sql_of(TextOrder.BYTES)
