"""Facilities of the machine for trials: disks whose power can be cut, networks that can be cut, full file systems.

`missing` says why the machine lacks one; a trial that needs it is skipped with these words.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Self
from uuid import uuid4

_EXT4_SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN of Linux."""
_NO_LOG_FLUSH = 2
"""Do not write the journal either."""
_CLONE_NEWNS = 0x20000
_CLONE_NEWNET = 0x40000000
_UNMOUNTS_S = 20.0
_COMMAND_S = 60.0


def apart() -> None:
    """Give this process mounts and networks of its own, which end with it and with what it starts."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS | _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    run("mount", "--make-rprivate", "/")
    run("ip", "link", "set", "lo", "up")


def run(*command: str | Path) -> None:
    """Run a program of the system; its error message is in the exception."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=_COMMAND_S)
    if done.returncode:
        message = (done.stderr or done.stdout).strip().split("\n")[0]
        raise OSError(f"{' '.join(map(str, command))}: {message}")


class Disk:
    """An ext4 file system of its own. Cut, it keeps what was synced and what the kernel had written back by itself.

    The cut is the kernel's own: from one moment to the next nothing reaches the disk any more, the journal included. A
    disk that loses what it has confirmed, from a cache of its own, is not simulated.
    """

    def __init__(self, folder: Path, name: str, megabytes: int = 256) -> None:
        self.path = folder / name
        self._image = folder / f"{name}.img"
        self._megabytes = megabytes

    def __enter__(self) -> Self:
        self.path.mkdir()
        run("truncate", "-s", f"{self._megabytes}M", self._image)
        run("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0", self._image)
        self._mount()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._unmount()
        self._image.unlink(missing_ok=True)

    def write_back(self) -> None:
        """Write everything back, as the kernel does by itself half a minute after a write."""
        place = os.open(self.path, os.O_RDONLY)
        try:
            ctypes.CDLL(None).syncfs(place)
        finally:
            os.close(place)

    def cut(self) -> None:
        """Cut the power: nothing is written any more. Processes that use the disk must be dead before `restore`."""
        place = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(place, _EXT4_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(place)

    def restore(self) -> None:
        """Return the power: mount what the disk has again."""
        self._unmount()
        self._mount()

    def fill(self) -> Path:
        """Leave no room; return the file that takes it up."""
        ballast = self.path / "ballast"
        with ballast.open("ab") as file, suppress(OSError):
            for size in (1 << 20, 1 << 12):
                with suppress(OSError):
                    while True:
                        os.write(file.fileno(), b"\0" * size)
        return ballast

    def _mount(self) -> None:
        run("mount", "-o", "loop,noatime", self._image, self.path)

    def _unmount(self) -> None:
        deadline = time.monotonic() + _UNMOUNTS_S
        while True:
            try:
                return run("umount", self.path)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


class Network:
    """Some hosts on a bridge, each a network namespace of its own. The test itself is on the bridge, too."""

    def __init__(self, hosts: int) -> None:
        # Names of links have 15 characters at most.
        self._tag = f"ej{uuid4().hex[:6]}"
        # 198.18.0.0/15 is for tests of networks (RFC 2544).
        self._net = f"198.18.{os.getpid() % 250}"
        self.gateway = f"{self._net}.254"
        self.addresses = [f"{self._net}.{10 + number}" for number in range(hosts)]

    def __enter__(self) -> Self:
        try:
            run("ip", "link", "add", self._tag, "type", "bridge")
            run("ip", "addr", "add", f"{self.gateway}/24", "dev", self._tag)
            run("ip", "link", "set", self._tag, "up")
            for number, address in enumerate(self.addresses):
                self._add(self._host(number), f"{self._tag}{number}", address)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(len(self.addresses)):
            with suppress(OSError):
                run("ip", "netns", "del", self._host(number))
        with suppress(OSError):
            run("ip", "link", "del", self._tag)

    @contextmanager
    def inside(self, number: int) -> Generator[None]:
        """Put what this thread starts meanwhile on that host."""
        libc = ctypes.CDLL(None, use_errno=True)
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{self._host(number)}", os.O_RDONLY)
        try:
            if libc.setns(there, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            yield
        finally:
            libc.setns(here, _CLONE_NEWNET)
            os.close(here)
            os.close(there)

    def cut_off(self, number: int, others: list[str]) -> None:
        """Drop all that this host sends to the others, without an answer."""
        for address in others:
            run("ip", "-n", self._host(number), "route", "add", "blackhole", f"{address}/32")

    def heal(self, number: int, others: list[str]) -> None:
        for address in others:
            run("ip", "-n", self._host(number), "route", "del", "blackhole", f"{address}/32")

    def _host(self, number: int) -> str:
        return f"{self._tag}-{number}"

    def _add(self, host: str, link: str, address: str) -> None:
        run("ip", "netns", "add", host)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", host)
        run("ip", "link", "set", link, "master", self._tag)
        run("ip", "link", "set", link, "up")
        run("ip", "-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
        run("ip", "-n", host, "link", "set", "eth0", "up")
        run("ip", "-n", host, "link", "set", "lo", "up")


def _try_disk() -> None:
    with tempfile.TemporaryDirectory(prefix="eventjet-disk-") as folder, Disk(Path(folder), "disk", 16) as disk:
        disk.cut()
        disk.restore()


def _try_network() -> None:
    with Network(1) as network, network.inside(0):
        pass


_TRIES: dict[str, tuple[str, tuple[str, ...], Callable[[], None]]] = {
    "disk": (
        "a file system on a loop device, cut by the kernel (root, ext4)",
        ("mount", "mkfs.ext4"),
        _try_disk,
    ),
    "network": ("network namespaces on a bridge (root, iproute2)", ("ip",), _try_network),
}


@cache
def missing(need: str) -> str | None:
    """Return why this machine lacks a facility, or None when a try shows that it has it."""
    facility, programs, attempt = _TRIES[need]
    absent = [program for program in programs if shutil.which(program) is None]
    if absent:
        return f"needs {facility}; {', '.join(absent)} is not installed"
    try:
        attempt()
    except OSError as error:
        return f"needs {facility}; {error}"
    return None
