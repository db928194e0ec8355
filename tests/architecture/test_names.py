"""One name has one meaning."""

from __future__ import annotations

from collections import defaultdict

from tests.architecture.sources import sources


def test_no_class_name_is_defined_twice() -> None:
    """But for private names."""
    defined: defaultdict[str, list[str]] = defaultdict(list)
    for source in sources("src"):
        for node in source.classes():
            if not node.name.startswith("_"):
                defined[node.name].append(source.name)
    assert {name: files for name, files in defined.items() if len(files) > 1} == {}
