"""What SQLite stores about its tables: features, indexes, and the views and triggers that name a table.

Views, triggers and foreign keys refer to a table by name, and so to whatever has that name; only a table's own triggers
go with it. What no pragma of SQLite returns is read from the statement that made the table, which SQLite stores.
"""

from __future__ import annotations

import re
from collections.abc import Container, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress

from sqlalchemy import Connection, Table, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from eventjet.sql.dialect import Feature, creation, qualified

_TOKEN = re.compile(
    r"""--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|"(?:[^"]|"")*"|\[[^]]*\]|`(?:[^`]|``)*`|[\w$]+|\S""", re.DOTALL
)
_TABLE_SQL = text("select sql from sqlite_master where type = 'table' and lower(name) = lower(:name)")
TRIGGERS = text(
    "select 'the trigger ' || name from sqlite_master "
    "where type = 'trigger' and lower(tbl_name) = lower(:name) and name not glob 'eventjet_identity_*' order by 1"
)
_SCHEMA = text(
    "select sql from sqlite_master where sql is not null and name not like 'sqlite!_%' escape '!' "
    "order by instr('table index view trigger', type), rowid"
)
_NAMING = text("select type, name, tbl_name, sql from sqlite_master where type in ('view', 'trigger') order by 1, 2")
REFERRING = text(
    "select 'a foreign key of ' || m.name from sqlite_master m join pragma_foreign_key_list(m.name) f "
    """where m.type = 'table' and lower(f."table") = lower(:name) and lower(m.name) <> lower(:name) order by 1"""
)
INDEXES = text(
    "select name, sql from sqlite_master "
    "where type = 'index' and sql is not null and lower(tbl_name) = lower(:name) order by 1"
)
_COLUMNS = text('select name, "notnull", dflt_value, pk, hidden from pragma_table_xinfo(:name) order by cid')
_KEYS = text(
    "select l.name, l.origin, lower(i.name), case "
    "when i.coll = 'BINARY' then '' else ' collate ' || lower(i.coll) end || iif(i.desc, ' desc', '') "
    "from pragma_index_list(:name) l join pragma_index_xinfo(l.name) i "
    "where l.origin in ('u', 'pk') and i.key order by l.name, i.seqno"
)
_FOREIGN_KEYS = text(
    """select lower("from"), case when lower("table") = lower(:name) then 'itself' else lower("table") end, """
    """lower(coalesce("to", '')), lower(on_update), lower(on_delete) """
    "from pragma_foreign_key_list(:name) order by id, seq"
)
_NUMBER = re.compile(r"'(-?[\d.]+)'")


_NAME = r'"(?:[^"]|"")*"|\[[^]]*\]|`[^`]*`|[^\s(]+'
INDEX_HEAD = re.compile(rf"\s*CREATE\s+(UNIQUE\s+)?INDEX\s+(?:{_NAME})\s+ON\s+(?:{_NAME})\s*(?=\()", re.IGNORECASE)
TABLE = text("select name from sqlite_master where type = 'table' and lower(name) = lower(:name)")
MARKS = text(
    "select name from sqlite_master "
    "where type = 'trigger' and lower(tbl_name) = lower(:name) and name glob 'eventjet_identity_*' order by 1"
)


def broken_by_name(connection: Connection) -> set[str]:
    """Return the views and triggers that SQLite cannot prepare; reads and writes no rows."""
    broken: set[str] = set()
    for kind, name, table, statement in connection.execute(_NAMING).all():
        try:
            connection.exec_driver_sql(f"explain {_probe(connection, str(kind), str(table), str(statement))}").close()
        except DBAPIError:
            broken.add(f"the {kind} {name}")
    return broken


def broken_without(connection: Connection, name: str) -> list[str]:
    """Return the views and triggers that SQLite could not prepare without the table, tried on a copy of the schema.

    The copy is in memory. A view or trigger that cannot be prepared there even with the table, say because it calls a
    function of the application, counts if it names the table.
    """
    with modelled(()) as copy:
        for statement in connection.scalars(_SCHEMA):
            with suppress(DBAPIError):
                copy.exec_driver_sql(statement)
        before = broken_by_name(copy)
        copy.exec_driver_sql(f"drop table if exists {qualified(None, name)}")
        after = broken_by_name(copy)
        naming = {f"the {kind} {item_name}": str(statement) for kind, item_name, _, statement in copy.execute(_NAMING)}
    return sorted(item for item in after if item not in before or name.lower() in map(_plain, _tokens(naming[item])))


def _probe(connection: Connection, kind: str, table: str, statement: str) -> str:
    """Return a statement that can be prepared only if everything exists that the view, or trigger on `table`, names."""
    quoted = qualified(None, table)
    if kind == "view":
        return f"select * from {quoted}"  # noqa: S608 - of a known view
    event = next(token for token in map(str.lower, _tokens(statement)) if token in ("insert", "update", "delete"))
    if event == "update":
        columns = connection.execute(_COLUMNS, {"name": table})
        sets = ", ".join(f"{qualified(None, str(column.name))} = null" for column in columns if not column.hidden)
        return f"update {quoted} set {sets}"  # noqa: S608 - of a known table
    return f"insert into {quoted} default values" if event == "insert" else f"delete from {quoted}"  # noqa: S608 - as above


@contextmanager
def modelled(tables: Sequence[Table]) -> Generator[Connection]:
    """Create empty tables as they are declared, in memory."""
    # Without the statement cache, which would keep an `explain` prepared even if a table is dropped.
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"cached_statements": 0})
    try:
        with engine.begin() as connection:
            for statement in creation(tables):
                connection.execute(statement)
            yield connection
    finally:
        engine.dispose()


def features_of(connection: Connection, name: str) -> Iterator[Feature]:
    key: list[tuple[int, str]] = []
    columns: set[str] = set()
    for column, not_null, default, in_key, _ in connection.execute(_COLUMNS, {"name": name}):
        column_name = str(column).lower()
        columns.add(column_name)
        yield Feature(f"column {column_name}", f"the column {column}")
        if not_null and not in_key:
            yield Feature(f"not null {column_name}", f"NOT NULL of the column {column}")
        if default is not None:
            # '1' and 1 are the same to a column.
            value = _NUMBER.sub(r"\1", str(default)) if _NUMBER.fullmatch(str(default)) else _normal(default, columns)
            yield Feature(
                f"default {column_name}", f"the default of the column {column}", f"{column_name} default {value}"
            )
        if in_key:
            key.append((in_key, column_name))
    constraints: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for index, origin, column, suffix in connection.execute(_KEYS, {"name": name}):
        constraints.setdefault((str(origin), str(index)), []).append((str(column), f"{column}{suffix}"))
    if key:
        exactly = [
            ", ".join(column for _, column in parts) for (origin, _), parts in constraints.items() if origin == "pk"
        ]
        words = ", ".join(key_column for _, key_column in sorted(key))
        yield Feature("key", f"the primary key ({words})", exactly[0] if exactly else words)
    for parts in (parts for (origin, _), parts in constraints.items() if origin == "u"):
        words, exact = (", ".join(names) for names in zip(*parts, strict=True))
        yield Feature(f"unique {words}", f"the constraint UNIQUE ({words})", f"unique ({exact})")
    for column, table, target, update, delete in connection.execute(_FOREIGN_KEYS, {"name": name}):
        definition = f"{column} references {table} ({target}) on update {update} on delete {delete}"
        yield Feature(f"foreign {column} {table}", f"the foreign key of the column {column}", definition)
    for index, statement in connection.execute(INDEXES, {"name": name}):
        # `Sqlite.relocate` adds this suffix in other locations.
        index_name = str(index).removesuffix(f"__{name}")
        tokens = list(_tokens(str(statement)))
        unique = "unique " if tokens[1].lower() == "unique" else ""
        body = " ".join(word for word in _normal(tokens[tokens.index("(") :], columns).split(" ") if word != "asc")
        yield Feature(
            f"index {index_name.lower()}", f"the index {index_name}", f"{unique}index {index_name.lower()} {body}"
        )
    yield from _statement_features(str(connection.scalar(_TABLE_SQL, {"name": name})), columns)


def _statement_features(statement: str, columns: Container[str]) -> Iterator[Feature]:
    """Yield the features that only the table's statement has: checks, expressions, collations, ON CONFLICT, options."""
    tokens = list(_tokens(statement))
    depth, column, referring = 0, "", ""
    for number, token in enumerate(tokens):
        word, next_tokens = token.lower(), [following.lower() for following in tokens[number + 1 : number + 3]]
        if depth == 1 and tokens[number - 1] in ("(", ","):
            column = referring = _plain(token)
        if depth == 1 and word == "check":
            rule = list(_group(tokens[number + 1 :]))
            is_named = tokens[number - 2].lower() == "constraint"
            definition = f"CHECK {_normal(rule, columns)}"
            key = f"check {_plain(tokens[number - 1]) if is_named else definition}"
            yield Feature(key, f"the constraint CHECK {' '.join(rule)}", definition)
        elif depth == 1 and word == "as":
            rule = list(_group(tokens[number + 1 :]))
            is_stored = [following.lower() for following in tokens[number + 1 + len(rule) :][:1]] == ["stored"]
            definition = f"{column} {'stored' if is_stored else 'virtual'} as {_normal(rule, columns)}"
            yield Feature(f"generated {column}", f"how it generates the column {column}", definition)
        elif depth == 1 and word == "collate" and _plain(next_tokens[0]) != "binary":
            yield Feature(
                f"collate {column}",
                f"the collation of the column {column}",
                f"{column} collate {_plain(next_tokens[0])}",
            )
        elif depth == 1 and word == "on" and next_tokens[0] == "conflict":
            yield Feature(f"on conflict {column} {next_tokens[1]}", f"ON CONFLICT {next_tokens[1].upper()} of {column}")
        elif depth == 1 and word == "autoincrement":
            yield Feature(f"autoincrement {column}", f"AUTOINCREMENT of the column {column}")
        elif depth == 1 and word == "foreign":
            referring = _normal(list(_group(tokens[number + 2 :]))[1:-1], columns)
        elif depth == 1 and word == "deferrable" and next_tokens == ["initially", "deferred"]:
            if tokens[number - 1].lower() != "not":
                words = f"DEFERRABLE INITIALLY DEFERRED of the foreign key of {referring}"
                yield Feature(f"deferred {referring}", words)
        elif depth == 0 and word in ("strict", "without"):
            words = {"strict": "being STRICT", "without": "being WITHOUT ROWID"}[word]
            yield Feature(f"option {word}", words)
        depth += {"(": 1, ")": -1}.get(token, 0)


def _group(tokens: Sequence[str]) -> Iterator[str]:
    """Yield the tokens up to the end of the first group in parentheses."""
    depth = 0
    for token in tokens:
        depth += {"(": 1, ")": -1}.get(token, 0)
        yield token
        if depth == 0:
            return


def _tokens(statement: str) -> Iterator[str]:
    """Return the tokens of a statement, without comments."""
    return (token for token in _TOKEN.findall(statement) if not token.startswith(("--", "/*")))


def _normal(sql: str | Sequence[str], columns: Container[str]) -> str:
    """Return SQL in a normal form, in which names that are the same to SQLite are written alike; literals stay.

    To SQLite, text in double quotes that names no column is a literal.
    """
    tokens = _tokens(sql) if isinstance(sql, str) else sql
    return " ".join(
        token if token.startswith("'") or (token.startswith('"') and _plain(token) not in columns) else _plain(token)
        for token in tokens
    )


def _plain(token: str) -> str:
    """Return a name as SQLite compares it: without quotes, in lower case."""
    return token[1:-1].lower() if token[:1] in '"[`' else token.lower()
