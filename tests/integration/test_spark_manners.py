"""A Spark session of eventjet's own leaves the process as it was."""

from __future__ import annotations

import logging
import os

import pytest

from eventjet.spark.session import spark_session


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_levels_of_loggers_and_the_environment_are_as_before_after_a_session() -> None:
    logger = logging.getLogger("py4j")
    level, environ = logger.level, dict(os.environ)
    logger.setLevel(logging.WARNING)
    try:
        with spark_session("local[1]") as started:
            assert started.spark.range(5).count() == 5
        assert logger.level == logging.WARNING
    finally:
        logger.setLevel(level)
    assert dict(os.environ) == environ
