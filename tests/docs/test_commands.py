"""The page of commands is generated from the program."""

from __future__ import annotations

from tests.docs.commands import PAGE, page


def test_the_page_of_commands_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "Write it again: python -m tests.docs.commands"
