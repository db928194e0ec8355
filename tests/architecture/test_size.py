"""Files, functions and their parameters stay few enough to be read at once."""

from __future__ import annotations

from statistics import median, quantiles

from tests.architecture.sources import Function, Source, sources

LINES_MAX = 400
FUNCTION_LINES_MAX = 60
MEDIAN_LINES_MAX = 200
FUNCTION_LINES_P95_MAX = 30
PARAMETERS_MAX = 7

EVERYTHING = ("src", "tests", "examples", "benchmarks")
FEW_PARAMETERS = tuple(f"src/eventjet/{package}" for package in ("rebuild", "sql", "workers", "writers"))


def length(source: Source) -> int:
    return len(source.text.splitlines())


def function_length(node: Function) -> int:
    """Decorators and docstring included."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return (node.end_lineno or first) - first + 1


def parameters(node: Function) -> int:
    """All that a caller may pass."""
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([argument for argument in named if argument.arg not in {"self", "cls"}])


def test_a_file_can_be_read_at_once() -> None:
    assert {source.name: n for source in sources(*EVERYTHING) if (n := length(source)) > LINES_MAX} == {}


def test_a_function_fits_on_a_screen() -> None:
    functions = [function for source in sources(*EVERYTHING) for function in source.functions()]
    assert {name: n for name, node in functions if (n := function_length(node)) > FUNCTION_LINES_MAX} == {}


def test_most_of_the_source_is_smaller_still() -> None:
    assert median(map(length, sources("src"))) <= MEDIAN_LINES_MAX
    lengths = [function_length(node) for source in sources("src") for _, node in source.functions()]
    assert quantiles(lengths, n=20)[-1] <= FUNCTION_LINES_P95_MAX


def test_a_function_takes_few_parameters() -> None:
    functions = [function for source in sources(*FEW_PARAMETERS) for function in source.functions()]
    assert {name: n for name, node in functions if (n := parameters(node)) > PARAMETERS_MAX} == {}
