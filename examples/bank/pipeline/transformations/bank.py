"""The bank's datasets, and two of its analysts' own on top of them."""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it

from eventjet.examples.bank.app import bank
from eventjet.spark import pipelines

pipelines.declare(bank)
spark = SparkSession.active()


@dp.table(comment="Withdrawals of 1,000 and more, one row each, as they come.")
def large_withdrawals() -> DataFrame:
    return spark.readStream.table("account_withdrawn").where("amount >= 1000")


@dp.materialized_view(comment="What was deposited on each day, by owner.")
def deposits_per_day() -> DataFrame:
    owners = spark.read.table("balances").select("account_id", "owner")
    deposits = spark.read.table("account_deposited").withColumnRenamed("aggregate_id", "account_id")
    by_day = deposits.join(owners, "account_id").groupBy("owner", F.to_date("recorded_at").alias("day"))
    return by_day.agg(F.sum("amount").alias("amount"))
