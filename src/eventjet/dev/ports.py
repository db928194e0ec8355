"""Ports of 127.0.0.1 for servers that cannot choose one themselves."""

from __future__ import annotations

import socket
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager


@contextmanager
def reserved_ports(count: int) -> Generator[list[int]]:
    """Free ports that nobody else is given while the block runs, and that a server may nevertheless listen on.

    Linux lets two sockets share an address that both bound with SO_REUSEADDR as long as one at most listens, and does
    not hand out a bound port meanwhile. Elsewhere the ports are merely free when the block begins.
    """
    with ExitStack() as stack:
        holders = [stack.enter_context(socket.socket()) for _ in range(count)]
        for holder in holders:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
        ports = [int(holder.getsockname()[1]) for holder in holders]
        if sys.platform != "linux":
            stack.close()
        yield ports
