"""`Application`: what everything below `app` needs of an `App`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from eventjet.codec.catalog import Catalog
from eventjet.domain.aggregate import AggregateInfo
from eventjet.projections.projection import Entries, Projection
from eventjet.projections.sql_projection import AnyResolved, SqlProjection

Declared: TypeAlias = Projection[Any, Any] | Entries[Any, Any] | SqlProjection
"""A projection as an application declares it."""


class Application(Protocol):
    """An application's declarations, checked and resolved; `eventjet.App` is one."""

    @property
    def name(self) -> str:
        """Also the name of its stream."""
        ...

    @property
    def catalog(self) -> Catalog: ...

    @property
    def aggregates(self) -> Mapping[Any, AggregateInfo]: ...

    @property
    def projections(self) -> Mapping[str, AnyResolved]: ...
