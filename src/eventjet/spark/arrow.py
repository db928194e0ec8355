"""Raw records as Arrow carries them between Spark and its Python workers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from eventjet.codec.envelope import RawRecord


def pyarrow() -> Any:
    """pyarrow, which has no types to check against."""
    return import_module("pyarrow")


def records_of(batch: Any) -> Iterator[RawRecord]:
    """The records of a batch in the source's `SCHEMA`."""
    position, time_ns, subject, headers, body = batch.columns
    return zip(
        position.to_pylist(),
        time_ns.to_pylist(),
        subject.cast(pyarrow().binary()).to_pylist(),
        headers.to_pylist(),
        body.to_pylist(),
        strict=True,
    )
