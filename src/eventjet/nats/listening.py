"""Listening to core NATS on an application's own connection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from eventjet.errors import StoreUnavailable


async def listen(client: Client, subject: str, heard: Callable[[bytes], object]) -> None:
    """Have `heard` called with each payload, from now on and after every reconnect, until the connection ends.

    Raises `StoreUnavailable` on a connection that has ended. Messages are lost while there is none, and a subscription
    that the server denies only stays silent.
    """

    async def received(message: Msg) -> None:
        heard(message.data)

    subscribe = cast("Callable[..., Awaitable[object]]", getattr(client, "subscribe"))  # noqa: B009  nats-py leaves a type open
    try:
        await subscribe(subject, cb=received)
    except (NatsError, OSError) as error:
        raise StoreUnavailable(subject, f"{type(error).__name__}: {error}") from None
