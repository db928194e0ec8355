"""Metadata of the work in progress, carried by a context variable: tasks inherit it, threads do not."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from eventjet.domain.recorded import NO_METADATA, Metadata

_current: ContextVar[Metadata] = ContextVar("eventjet_metadata", default=NO_METADATA)


def current_metadata() -> Metadata:
    """What is recorded beside the events of this task."""
    return _current.get()


@contextmanager
def with_metadata(metadata: Metadata) -> Generator[Metadata]:
    """Record this beside every event saved within; what it leaves None comes from the outer one."""
    merged = merge(_current.get(), metadata)
    token = _current.set(merged)
    try:
        yield merged
    finally:
        _current.reset(token)


def merge(outer: Metadata, inner: Metadata) -> Metadata:
    """`inner` laid over `outer`, field by field."""
    if inner is NO_METADATA or outer is NO_METADATA:
        return outer if inner is NO_METADATA else inner
    return replace(
        inner,
        correlation=inner.correlation or outer.correlation,
        causation=inner.causation or outer.causation,
        actor=inner.actor or outer.actor,
        traceparent=inner.traceparent or outer.traceparent,
        extra={**outer.extra, **inner.extra},
    )
