"""What begins with a text is the range from it to the next one, in the order of code points."""

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
def test_the_range_holds_what_begins_so_and_nothing_else(prefix: str, text: str) -> None:
    for one in (text, prefix + text):
        end = next_text(prefix)
        assert one.startswith(prefix) == (one >= prefix and (end is None or one < end))


def test_pages_of_the_range_follow_one_another() -> None:
    known = ["", "%", "A", "a", "a%", "aB", "aa", "a\U0010ffff", "b", "ä", "\U0010ffff", "\U0010ffff\U0010ffff"]
    with create_engine("sqlite://", poolclass=NullPool).connect() as connection:
        keys.create(connection)
        connection.execute(keys.insert(), [{"id": one} for one in known])
        for prefix in ("", "a", "A", "\U0010ffff", "%", "c"):
            seen, after = list[str](), ""
            while found := list(connection.scalars(keys_from(keys, "id", TextOrder.PLAIN, prefix, after, 2))):
                seen += found
                after = found[-1]
            # An empty key is no id; where none is asked for, it only comes first.
            assert seen == sorted(one for one in known if one.startswith(prefix))


def test_postgresql_is_asked_in_the_order_of_its_index() -> None:
    def told(order: TextOrder) -> str:
        return " ".join(str(keys_from(keys, "id", order, "a", "ab", 2).compile(dialect=postgresql.dialect())).split())

    by_pattern = told(TextOrder.PATTERN)
    assert "keys.id ~>~ %(id_1)s" in by_pattern
    assert "ORDER BY keys.id USING ~<~ LIMIT" in by_pattern
    assert 'keys.id COLLATE "C" > %(param_1)s' in told(TextOrder.BYTES)
