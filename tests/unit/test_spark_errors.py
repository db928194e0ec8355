"""What eventjet says of an error of Spark's JVM."""

from eventjet.spark.running import reason_of
from eventjet.spark.session import first_line


def test_the_jvms_own_error_is_shown_instead_of_the_call_of_py4j() -> None:
    error = Exception(
        "An error occurred while calling o46.text.\n: java.io.IOException: no such host\n\tat A.b(A.java)"
    )
    assert first_line(error) == "java.io.IOException: no such host"
    assert first_line(Exception("\nno such host\nelsewhere")) == "no such host"
    assert first_line(Exception()) == "Exception"


def test_what_a_task_of_the_jvm_failed_of_is_its_innermost_cause() -> None:
    lines = (
        "An error occurred while calling o77.parquet.",
        ": org.apache.spark.SparkException: Job aborted due to stage failure: Lost task 0.3:",
        "org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed while writing rows. SQLSTATE: 58030",
        "\tat org.apache.spark.A.b(A.scala:1)",
        "Caused by: org.apache.hadoop.fs.FSError: java.io.IOException: No space left on device",
        "\tat org.apache.hadoop.A.b(A.java:1)",
        "Caused by: java.io.IOException: No space left on device",
        "\t... 21 more",
    )
    assert reason_of(Exception("\n".join(lines))) == "java.io.IOException: No space left on device"
    of_python = (
        *lines[:4],
        "Caused by: org.apache.spark.api.python.PythonException: Traceback:",
        "ValueError: no stamp",
    )
    assert reason_of(Exception("\n".join(of_python))) == "ValueError: no stamp"
