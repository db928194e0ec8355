"""The order of files, and properties that are not held to a time.

A file stays in one process, so long ones begin first, and those that share a JVM together.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# A busy machine takes seconds for an example that takes milliseconds: that says nothing about the property.
settings.register_profile("eventjet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("eventjet")

FIRST = (
    # These share a session of Spark.
    "test_spark_rebuild.py",
    "test_spark_stream.py",
    "test_spark_source.py",
    "test_spark_frames.py",
    "test_rebuild_edges.py",
    "test_archive.py",
    "test_snapshots_build.py",
    "test_archive_law.py",
    "test_quarantine_rebuild.py",
    "test_restore_spark.py",
    # These take the longest otherwise.
    "test_pages.py",
    "test_bank_on_three_engines.py",
    "test_cluster_connect.py",
    "test_kills.py",
    "test_outages.py",
    "test_bad_events.py",
    "test_rebuild_interrupts.py",
    "test_rebuild_kills.py",
    "test_rebuild_outages.py",
    "test_worker_takeover.py",
    "test_worker.py",
    "test_demo.py",
)
_PLACES = {name: place for place, name in enumerate(FIRST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Python sorts stably, so the tests of a file and all other files stay in their order."""
    items.sort(key=lambda item: _PLACES.get(item.path.name, len(FIRST)))
