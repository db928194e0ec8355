"""The page of tables names every column that eventjet's own tables have, in their order."""

from __future__ import annotations

import re
from pathlib import Path

from eventjet.sql.own_tables import metadata

PAGE = (Path(__file__).parents[2] / "docs/reference/tables.md").read_text(encoding="utf-8")


def test_the_page_lists_every_table_with_its_columns() -> None:
    sections = dict(re.findall(r"^## (eventjet_\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    listed = {name: re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) for name, section in sections.items()}
    assert listed == {table.name: [column.name for column in table.columns] for table in metadata.tables.values()}
