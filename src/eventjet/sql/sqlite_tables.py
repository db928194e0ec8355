"""What a table of SQLite has, and what depends on it.

Views, triggers and foreign keys name a table and find whatever has that name; only a table's own triggers go with it.
What SQLite tells in no pragma is read from the statement that made the table, which it keeps.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection, Table, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from eventjet.sql.dialect import Feature, creation, qualified

_TOKEN = re.compile(
    r"""--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|"(?:[^"]|"")*"|\[[^]]*\]|`(?:[^`]|``)*`|[\w$]+|\S""", re.DOTALL
)
_MADE = text("select sql from sqlite_master where type = 'table' and lower(name) = lower(:name)")
_TRIGGERS = text(
    "select 'the trigger ' || name from sqlite_master "
    "where type = 'trigger' and lower(tbl_name) = lower(:name) and name not glob 'eventjet_identity_*' order by 1"
)
_NAMING = text("select type, name, tbl_name, sql from sqlite_master where type in ('view', 'trigger') order by 1, 2")
_REFERRING = text(
    "select 'a foreign key of ' || m.name from sqlite_master m join pragma_foreign_key_list(m.name) f "
    """where m.type = 'table' and lower(f."table") = lower(:name) and lower(m.name) <> lower(:name) order by 1"""
)
_INDEXES = text(
    "select name, sql from sqlite_master "
    "where type = 'index' and sql is not null and lower(tbl_name) = lower(:name) order by 1"
)
_COLUMNS = text('select name, "notnull", dflt_value, pk, hidden from pragma_table_xinfo(:name) order by cid')
_UNIQUE = text(
    "select l.name, i.name from pragma_index_list(:name) l join pragma_index_info(l.name) i "
    "where l.origin = 'u' order by l.name, i.seqno"
)
_FOREIGN = text(
    """select id, lower("from"), lower("table"), lower(coalesce("to", '')), on_update, on_delete """
    "from pragma_foreign_key_list(:name) order by id, seq"
)


def dependents(connection: Connection, name: str, along: Iterable[str], *, for_good: bool) -> list[str]:
    """The table's own triggers; where no other table takes the name, whatever names it."""
    found = [str(one) for one in connection.scalars(_TRIGGERS, {"name": name})]
    if for_good:
        found += [
            f"the {kind} {its}"
            for kind, its, of, made in connection.execute(_NAMING)
            if str(of).lower() != name.lower() and name.lower() in map(_plain, _tokens(str(made)))
        ]
        together = {f"a foreign key of {one}".lower() for one in along}
        found += [one for one in connection.scalars(_REFERRING, {"name": name}) if one.lower() not in together]
    return found


def broken_by_name(connection: Connection) -> set[str]:
    """Views and triggers that SQLite cannot prepare: nothing is read or written."""
    broken: set[str] = set()
    for kind, name, of, _ in connection.execute(_NAMING).all():
        table = qualified(None, str(of))
        statements = [f"select * from {qualified(None, str(name))}"]  # noqa: S608 - of a known view
        if kind == "trigger":
            columns = [str(one[0]) for one in connection.execute(_COLUMNS, {"name": str(of)})]
            statements = [f"insert into {table} default values", f"delete from {table}"]  # noqa: S608 - as above
            statements += [f"update {table} set {qualified(None, one)} = null" for one in columns]  # noqa: S608 - as above
        for statement in statements:
            try:
                connection.exec_driver_sql(f"explain {statement}").close()
            except DBAPIError:
                broken.add(f"the {kind} {name}")
    return broken


def features(connection: Connection, name: str) -> list[Feature]:
    """Everything that makes one table differ from another; nothing of it can be carried over by a statement."""
    return [Feature(f"{kind} {which}", words) for kind, which, words in _features(connection, name)]


@contextmanager
def modelled(tables: Sequence[Table]) -> Generator[Connection]:
    """Empty tables as they are declared, in memory."""
    engine = create_engine("sqlite://", poolclass=StaticPool)
    try:
        with engine.begin() as connection:
            for statement in creation(tables):
                connection.execute(statement)
            yield connection
    finally:
        engine.dispose()


def _features(connection: Connection, name: str) -> Iterator[tuple[str, str, str]]:
    """(kind, which of its kind, in words)."""
    key: list[tuple[int, str]] = []
    for column, not_null, default, in_key, hidden in connection.execute(_COLUMNS, {"name": name}):
        known = str(column).lower()
        yield "column", known, f"the column {column}"
        if not_null and not in_key:
            yield "not null", known, f"NOT NULL of the column {column}"
        if default is not None:
            yield "default", known, f"the default of the column {column}"
        if hidden:
            yield "generated", known, f"how it generates the column {column}"
        if in_key:
            key.append((in_key, known))
    if key:
        columns = ", ".join(one for _, one in sorted(key))
        yield "key", columns, f"the primary key ({columns})"
    uniques: dict[str, list[str]] = {}
    for index, column in connection.execute(_UNIQUE, {"name": name}):
        uniques.setdefault(str(index), []).append(str(column).lower())
    for columns in (", ".join(one) for one in uniques.values()):
        yield "unique", columns, f"the constraint UNIQUE ({columns})"
    for number, *what in connection.execute(_FOREIGN, {"name": name}):
        del number
        yield "foreign key", " ".join(map(str, what)), f"the foreign key of the column {what[0]}"
    for index, _ in connection.execute(_INDEXES, {"name": name}):
        # As `Sqlite.relocate` names it in other locations.
        own = str(index).removesuffix(f"__{name}")
        yield "index", own.lower(), f"the index {own}"
    yield from _written(str(connection.scalar(_MADE, {"name": name})))


def _written(made: str) -> Iterator[tuple[str, str, str]]:
    """What only the statement that made a table says: checks, collations, what conflicts do, options."""
    tokens = list(_tokens(made))
    depth, of = 0, ""
    for number, token in enumerate(tokens):
        word, after = token.lower(), [one.lower() for one in tokens[number + 1 : number + 3]]
        if depth == 1 and tokens[number - 1] in ("(", ","):
            of = _plain(token)
        if depth == 1 and word == "check":
            rule = " ".join(_group(tokens[number + 1 :]))
            yield "check", rule.lower(), f"the constraint CHECK {rule}"
        elif depth == 1 and word == "collate":
            yield "collate", f"{of} {_plain(after[0])}", f"the collation of the column {of}"
        elif depth == 1 and word == "on" and after[0] == "conflict":
            yield "on conflict", f"{of} {after[1]}", f"ON CONFLICT {after[1].upper()} of {of}"
        elif depth == 1 and word == "autoincrement":
            yield "autoincrement", of, f"AUTOINCREMENT of the column {of}"
        elif depth == 0 and word in ("strict", "without"):
            words = {"strict": "being STRICT", "without": "being WITHOUT ROWID"}[word]
            yield "option", word, words
        depth += {"(": 1, ")": -1}.get(token, 0)


def _group(tokens: Sequence[str]) -> Iterator[str]:
    """The tokens up to where the first parenthesis closes."""
    depth = 0
    for token in tokens:
        depth += {"(": 1, ")": -1}.get(token, 0)
        yield token
        if depth == 0:
            return


def _tokens(statement: str) -> Iterator[str]:
    """Without comments."""
    return (one for one in _TOKEN.findall(statement) if not one.startswith(("--", "/*")))


def _plain(token: str) -> str:
    """A name as SQLite compares it."""
    return token[1:-1].lower() if token[:1] in '"[`' else token.lower()
