"""Keep tables in a lakehouse at a position of the log, in the formats Delta and Iceberg.

* `sync` appends what the tables lack, each event exactly once
* `export` writes the rows of read models as of a position
* `status` says how far the tables are
* `verify` compares them with the log

Each name is imported when it is first used, and `deltalake` or `pyiceberg` when a lake is opened.
"""

from typing import TYPE_CHECKING

from eventjet.lazy import lazy

if TYPE_CHECKING:
    from eventjet.lake.read_models import export
    from eventjet.lake.syncing import LakeReport, LakeStatus, TableStatus, WrittenTable, status, sync
    from eventjet.lake.verifying import LakeVerification, RangeDifference, VerifiedTable, verify

__all__ = [
    "LakeReport",
    "LakeStatus",
    "LakeVerification",
    "RangeDifference",
    "TableStatus",
    "VerifiedTable",
    "WrittenTable",
    "export",
    "status",
    "sync",
    "verify",
]

__getattr__ = lazy(
    __name__,
    {
        "eventjet.lake.read_models": "export",
        "eventjet.lake.syncing": "LakeReport LakeStatus TableStatus WrittenTable status sync",
        "eventjet.lake.verifying": "LakeVerification RangeDifference VerifiedTable verify",
    },
)
