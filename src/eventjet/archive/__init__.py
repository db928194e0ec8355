"""The log's past as sealed Parquet files: written, read, checked, and published again."""
