"""The limit of loading: finished rows into PostgreSQL by one `COPY` and one commit.

`python -m benchmarks.subjects.copy <database> <count>`. The rows are those that `count` postings come to.
"""

from __future__ import annotations

import sys

import psycopg

from benchmarks.postings import balances
from benchmarks.readmodel import POSTGRESQL, libpq
from benchmarks.subjects.clock import Clock


def main(database: str, count: int) -> None:
    rows = [(key, *values) for key, values in balances(count).items()]
    with psycopg.connect(libpq(database)) as connection:
        connection.execute("select 1")
        clock = Clock()
        clock.start()
        connection.execute(POSTGRESQL)
        with connection.cursor().copy("copy account_balance from stdin") as copy:
            for row in rows:
                copy.write_row(row)
        connection.commit()
        clock.stop(count)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
