"""Faults of a value are reported by field, up to a limit, and without the value."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from eventjet.codec.reasons import FIELDS_MAX, faults_of

SECRET = "ada@example.org"


class Line(BaseModel, strict=True):
    price: int
    note: str | bool | None = None


class Order(BaseModel, strict=True):
    lines: list[Line]
    named: dict[str, int] = {}
    code: str = ""

    @field_validator("code")
    @classmethod
    def short(cls, value: str) -> str:
        if len(value) > 3:
            raise ValueError("it is too long")
        return value


def text_of_faults(value: object) -> str:
    with pytest.raises(ValidationError) as caught:
        Order.model_validate(value)
    return faults_of(caught.value)


def test_every_field_is_named_with_its_reason() -> None:
    text = text_of_faults({"lines": [{"price": 1}, {"price": SECRET}, {}], "code": "abcd"})
    assert text == (
        "lines[1].price: Input should be a valid integer; lines[2].price: Field required; code: it is too long"
    )


def test_neither_a_value_nor_the_key_of_a_dict_is_shown() -> None:
    text = text_of_faults({"lines": [{"price": 1, "note": [SECRET]}], "named": {SECRET: SECRET}})
    assert SECRET not in text
    assert "named.…: Input should be a valid integer" in text


def test_many_fields_are_cut_and_counted() -> None:
    text = text_of_faults({"lines": [{}] * 40})
    assert text.count("Field required") == FIELDS_MAX
    assert text.endswith(f"; and {40 - FIELDS_MAX} more")


def test_other_errors_are_reported_with_their_first_line() -> None:
    assert faults_of(KeyError("amount")) == "'amount'"
    assert faults_of(ValueError("one\ntwo")) == "one"
