"""The driver's connection beneath SQLAlchemy's, and in which state its transaction is."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy.ext.asyncio import AsyncConnection


async def driver_of(connection: AsyncConnection) -> Any:
    return (await connection.get_raw_connection()).driver_connection


def is_over(driver: Any) -> bool:
    """Whether no transaction is open, so that whatever is executed would stay."""
    if isinstance(driver, psycopg.AsyncConnection):
        return driver.info.transaction_status == TransactionStatus.IDLE
    return not driver.in_transaction


def is_spoilt(driver: Any) -> bool:
    """Whether nothing but a rollback is possible: PostgreSQL would answer a commit with one, and say nothing."""
    return isinstance(driver, psycopg.AsyncConnection) and driver.info.transaction_status == TransactionStatus.INERROR
