"""The home of Spark: a session that brings its own JVM, and the log as a data source.

`spark_session` starts or reaches Spark; `spark.read.format("jetstream")` reads a range of the log; `Shipped` takes an
application's code to where the tasks run. Nothing here is imported before a rebuild asks for it.
"""
