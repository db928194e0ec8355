"""Command line options that benchmarks share."""

from __future__ import annotations

import argparse
import os


def parser_of(description: str | None, runs: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the docstring of a benchmark, and with `--runs` when it has a default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if runs is not None:
        parser.add_argument("--runs", type=int, default=runs, help="laps of each subject (%(default)s)")
    return parser


def add_size(parser: argparse.ArgumentParser, prefix: str, name: str, default: int, meaning: str) -> None:
    """Add an option whose default can come from an environment variable."""
    variable = f"{prefix}_{name.upper()}"
    value = int(os.environ.get(variable, default))
    flag = f"--{name.replace('_', '-')}"
    parser.add_argument(flag, type=int, default=value, help=f"{meaning} ({value:,}; {variable})")
