"""The datasets of the pipeline: those of the app, and what is made of them."""

from __future__ import annotations

from eventjet.spark import pipelines
from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from starter.app import app

pipelines.declare(app)
spark = SparkSession.active()


@dp.materialized_view(comment="How many tasks were added on each day.")
def added_per_day() -> DataFrame:
    return spark.read.table("task_added").groupBy(F.to_date("recorded_at").alias("day")).count()
