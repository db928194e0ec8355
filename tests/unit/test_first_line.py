"""What eventjet says of an error of Spark's JVM."""

from eventjet.spark.session import first_line


def test_the_jvms_own_error_is_shown_instead_of_the_call_of_py4j() -> None:
    error = Exception(
        "An error occurred while calling o46.text.\n: java.io.IOException: no such host\n\tat A.b(A.java)"
    )
    assert first_line(error) == "java.io.IOException: no such host"
    assert first_line(Exception("\nno such host\nelsewhere")) == "no such host"
    assert first_line(Exception()) == "Exception"
