"""Read, check and publish again archives of a log, which are sealed Parquet files."""
