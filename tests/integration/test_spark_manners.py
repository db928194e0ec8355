"""A Spark session of eventjet's own leaves the process as it was."""

from __future__ import annotations

import logging
import os

import pytest

from eventjet.spark.session import spark_session


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_environment_and_the_loggers_stay_as_they_are_and_a_master_precedes_spark_remote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARK_REMOTE", "sc://127.0.0.1:1")
    level, filters, environ = logging.getLogger("py4j").level, list(logging.getLogger().filters), dict(os.environ)
    with spark_session("local[1]") as started:
        assert started.spark.range(5).count() == 5
        assert (logging.getLogger("py4j").level, logging.getLogger().filters) == (level, filters)
        assert {name: os.environ.get(name) for name in environ} == environ
    assert dict(os.environ) == environ
    assert (logging.getLogger("pyspark").level, logging.getLogger("py4j").level) == (logging.NOTSET, level)
