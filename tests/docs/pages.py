"""Markdown pages as something to run: their blocks in order, in a folder of their own.

A block is written to the file that a comment before it names (`<!-- file: bank.py -->`), whatever its language. Other
Python is executed in that folder, in a module that all such blocks of the page share, unless it is a `part` of a file;
`await` may stand at its top, and tests that it defines are called.

Lines of shell blocks run one by one. `eventjet dev` and workers run in the background until the page is done. `export`,
`. file` and `cd` act on the page's environment. `eventjet`, `python`, `pytest` and `node` run to their end, which must
be success. A `python` with `&` runs on once it has printed a line, and has to end by itself. Of `nats-server` only the
configuration is tested, since each page runs beside a server; with `&` it is started, on free ports in place of those
that the page names, and `pkill` ends servers started like this, or the workers.

A block of text after a block that printed something must be in what was printed, apart from numbers and durations.
"""

from __future__ import annotations
import __future__

import ast
import asyncio
import gc
import inspect
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import types
import warnings
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path

from eventjet.dev.nats import nats_program
from tests import forked, javascript

_BLOCK = re.compile(r"(?:<!-- (\w+): (\S+) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RUN = frozenset({"eventjet", "python", "pytest", "node"})
_LEFT_RUNNING = re.compile(
    r"eventjet (dev|worker)|python manage.py eventjet worker|python -m celery .* worker|python .*&$"
)
_NOT_HERE = frozenset({"pip", "make", "git", "cd", "python3", "nats"})
"""Programs that a reader runs and a test does not: they have run already, or the program `nats` does it otherwise."""
_LINE_S = 600.0
_STOP_S = 120.0


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    line: int
    language: str
    text: str
    note: str | None
    """The kind of the comment before the block: `file` or `from`."""
    path: str | None


def blocks_of(page: Path) -> list[Block]:
    """Return all fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, match.start(4)) + 1, match[3], match[4], match[1], match[2])
        for match in _BLOCK.finditer(text)
    ]


@dataclass(slots=True)
class Running:
    """The state of a page that is being run."""

    page: Path
    folder: Path
    environ: dict[str, str]
    module: types.ModuleType = field(init=False)
    printed: str | None = None
    """The output of the shell block just before, if there was one."""
    background: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])
    programs: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])
    """Processes of the background that end by themselves."""
    servers: list[tuple[str, subprocess.Popen[bytes]]] = field(
        default_factory=list[tuple[str, subprocess.Popen[bytes]]]
    )
    """nats-servers that the page started, with their command lines."""
    ports: dict[str, str] = field(default_factory=dict[str, str])
    """The port in place of each that the page names."""

    def __post_init__(self) -> None:
        self.module = types.ModuleType(f"page_{self.page.stem.replace('-', '_').lower()}")
        sys.modules[self.module.__name__] = self.module

    def run(self, block: Block) -> None:
        """Run a block; raise whatever is wrong with it."""
        printed, self.printed = self.printed, None
        if block.note == "part":
            return
        block = replace(block, text=re.sub(r"\d+", lambda number: self.ports.get(number[0], number[0]), block.text))
        if block.note == "file":
            path = self.folder / str(block.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            self._execute(block)
        elif block.language == "sh":
            self.printed = ""
            for line in block.text.splitlines():
                self._shell(line, block)
        elif block.language == "text" and printed is not None:
            missing = [line for line in _plain(block.text) if line not in _plain(printed)]
            assert not missing, f"{self.page}:{block.line} promises {missing}, printed was\n{printed}"

    def close(self) -> None:
        """End what runs in the background, with SIGINT as a reader does."""
        own = [
            name for name, module in sys.modules.items() if str(self.folder) in str(getattr(module, "__file__", None))
        ]
        for name in (self.module.__name__, *own):
            sys.modules.pop(name, None)
        vars(self.module).clear()
        with warnings.catch_warnings():
            # A page need not close what it opens; on Python 3.13 whichever test runs later would fail for it.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        try:
            for process in list(self.background):
                self._end(process, None if process in self.programs else signal.SIGINT)
        finally:
            for process in (*self.background, *(server for _, server in self.servers)):
                process.kill()
                process.communicate(timeout=_STOP_S)

    def _end(self, process: subprocess.Popen[str], number: signal.Signals | None) -> None:
        if number is not None:
            process.send_signal(number)
        printed, _ = process.communicate(timeout=_STOP_S)
        self.background.remove(process)
        # Celery's own status says 1 after Ctrl-C.
        assert process.returncode == 0 or "celery" in str(process.args), f"{process.args}\n{printed}"

    def _execute(self, block: Block) -> None:
        padded = "\n" * (block.line - 1) + block.text
        printed = io.StringIO()
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | __future__.annotations.compiler_flag
        code = compile(padded, str(self.page), "exec", flags)
        before = dict(os.environ)
        os.environ.update(self.environ)
        sys.path.insert(0, str(self.folder))
        try:
            known = set(vars(self.module))
            with chdir(self.folder), redirect_stdout(printed):
                value = eval(code, vars(self.module))
                if inspect.iscoroutine(value):
                    asyncio.run(value)
            for name in [name for name in vars(self.module) if name.startswith("test_") and name not in known]:
                tested = vars(self.module)[name]()
                if inspect.iscoroutine(tested):
                    asyncio.run(tested)
        finally:
            sys.path.remove(str(self.folder))
            os.environ.clear()
            os.environ.update(before)
        self.printed = printed.getvalue() or None

    def _shell(self, line: str, block: Block) -> None:
        words = shlex.split(line, comments=True)
        if words[:1] == ["cd"] and (self.folder / words[1]).is_dir():
            self.folder /= words[1]
            return
        if not words or words[0] in _NOT_HERE or words == [".", "venv/bin/activate"]:
            return
        if words[0] == "export":
            self.environ.update(dict([words[1].split("=", 1)]))
        elif words[0] == ".":
            for exported in (self.folder / words[1]).read_text().splitlines():
                self._shell(exported, block)
        elif _LEFT_RUNNING.match(line):
            self._start(words)
        elif words[-1] == "&" and "nats-server" in words:
            program, end = words.index("nats-server"), words.index("2>")
            environ = dict(word.split("=", 1) for word in words[:program])
            self._serve(words[program:end], environ, self.folder / words[end + 1])
        elif words[:3] == ["pkill", "-9", "-f"]:
            servers = [server for command, server in self.servers if words[3] in command]
            assert servers, f"{self.page}:{block.line}: no server runs as {words[3]!r}"
            for server in servers:
                server.kill()
        elif words == ["pkill", "-f", "eventjet worker"]:
            for worker in [process for process in self.background if process not in self.programs]:
                self._end(worker, signal.SIGTERM)
        elif words[0] in _RUN or words[0] == "nats-server":
            done = self._ended(words)
            self.printed = (self.printed or "") + done.stdout
            assert done.returncode == 0, f"{self.page}:{block.line}: {line}\n{done.stdout}{done.stderr}"
        else:
            raise AssertionError(f"{self.page}:{block.line}: nothing runs {line!r}")

    def _ended(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        if words[0] == "eventjet":
            return forked.run("eventjet.cli", words[1:], folder=self.folder, environ=self.environ, timeout_s=_LINE_S)
        if words[0] == "node":
            return javascript.run(words[1:], folder=self.folder, environ=self.environ, timeout_s=_LINE_S)
        return subprocess.run(
            _command(words), cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=_LINE_S
        )

    def _serve(self, words: list[str], environ: dict[str, str], log: Path) -> None:
        command = [str(nats_program()), *words[1:]]
        with log.open("wb") as stderr:
            server = subprocess.Popen(command, cwd=self.folder, env=os.environ | environ, stderr=stderr)
        self.servers.append((shlex.join(words), server))
        deadline = time.monotonic() + _LINE_S
        while "Server is ready" not in (printed := log.read_text(encoding="utf-8")):
            assert server.poll() is None, f"{shlex.join(words)}\n{printed}"
            assert time.monotonic() < deadline, f"{shlex.join(words)}\n{printed}"
            time.sleep(0.01)

    def _start(self, words: list[str]) -> None:
        is_program = words[0] == "python" and words[-1] == "&"
        process = subprocess.Popen(
            _command([word for word in words if word != "&"]),
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.background.append(process)
        assert process.stdout is not None
        lines: list[str] = []
        if is_program:
            self.programs.append(process)
        while not (lines and (is_program or lines[-1].startswith("ready") or lines[-1].endswith(" ready.\n"))):
            lines.append(process.stdout.readline())
            assert lines[-1], f"{shlex.join(words)} ended before it was ready\n{''.join(lines)}"


def _command(words: list[str]) -> list[str]:
    """Return the same program in this environment."""
    if words[0] == "nats-server":
        return [str(nats_program()), *words[1:], "-t"]
    modules = {"eventjet": ["-P", "-m", "eventjet.cli"], "pytest": ["-P", "-m", "pytest", "-q"], "python": []}
    return [sys.executable, *modules[words[0]], *words[1:]]


def _plain(text: str) -> list[str]:
    """Return the lines without numbers, durations (`0.4s`, `2m16s`) and spacing, which differ from run to run."""
    number = re.compile(r"(?:[\d.,]+[dhmsy])+\b|[\d.,:-]+")
    return [number.sub("0", " ".join(line.split())) for line in text.splitlines() if line.strip()]
