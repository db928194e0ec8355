"""The page of commands is what the program says of itself."""

from __future__ import annotations

from tests.docs.commands import PAGE, page


def test_the_page_of_commands_is_what_the_program_says_now() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "Write it again: python -m tests.docs.commands"
