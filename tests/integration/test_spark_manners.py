"""A Spark session of eventjet leaves the environment and loggers of the process unchanged."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
from pyspark import SparkContext

from eventjet.spark.archiving import reading
from eventjet.spark.session import spark_session


def fail_without_jvm(spark: Any) -> None:
    with reading(spark):
        jvm: Any = SparkContext._gateway  # pyright: ignore[reportPrivateUsage]
        jvm.proc.kill()
        jvm.proc.wait()
        raise ZeroDivisionError


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_environment_and_loggers_are_unchanged_and_a_master_precedes_spark_remote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARK_REMOTE", "sc://127.0.0.1:1")
    level, filters, environ = logging.getLogger("py4j").level, list(logging.getLogger().filters), dict(os.environ)
    with spark_session("local[1]") as started:
        assert started.spark.range(5).count() == 5
        assert (logging.getLogger("py4j").level, logging.getLogger().filters) == (level, filters)
        assert {name: os.environ.get(name) for name in environ} == environ
        with pytest.raises(ZeroDivisionError):  # the lost session does not hide it
            fail_without_jvm(started.spark)
    assert dict(os.environ) == environ
    with spark_session("local[1]") as started:
        assert started.spark.range(5).count() == 5
    assert (logging.getLogger("pyspark").level, logging.getLogger("py4j").level) == (logging.NOTSET, level)
