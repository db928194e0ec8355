"""PostgreSQL's GRANTs by role. PURE.

Three roles: `eventjet_owner` makes and moves tables (`init`, workers, rebuilds, promotions), for moving a table takes
its ownership; `eventjet_reader` reads read models and positions; nobody else has anything.
"""

from __future__ import annotations

from collections.abc import Iterable

OWNER = "eventjet_owner"
READER = "eventjet_reader"


def grants(tables: Iterable[tuple[str | None, str]]) -> str:
    """For these tables, as (schema, name): to be run by the database's owner once `eventjet init` has."""
    schemas = sorted({schema or "public" for schema, _ in tables} | {"public"})
    lines = [
        f"create role {OWNER} login;",
        f"create role {READER} login;",
        "-- Rebuilds and revisions have schemas of their own.",
        f"do $$ begin execute format('grant connect, create on database %I to {OWNER}', current_database()); end $$;",
        f"do $$ begin execute format('grant connect on database %I to {READER}', current_database()); end $$;",
    ]
    for schema in map(_quoted, schemas):
        lines += [
            f"revoke create on schema {schema} from public;",
            f"grant usage, create on schema {schema} to {OWNER};",
            f"grant usage on schema {schema} to {READER};",
        ]
    lines += [
        f"-- What {OWNER} makes, swaps in or promotes can be read without another grant.",
        f"alter default privileges for role {OWNER} grant select on tables to {READER};",
    ]
    return "\n".join([*lines, ""])


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
