"""`ObjectStore`: a server that speaks S3 in a process of its own, whose answers a test can lose, delay and refuse.

It has to be another process: libraries keep the interpreter's lock while they wait, so no thread of it could answer.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import urllib.request
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest
from localbucket import S3Error, S3Handler

BUCKET = "books"
KEY_ID, SECRET = "writer", "only-the-writer-knows"
LOST, FAILED, HELD = "lost", "failed", "held"
"""Faults of a write: its answer is lost, a gateway answers, or it waits until it is released."""
ROOT = Path(__file__).parents[1]


class ObjectStore:
    """A bucket in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / BUCKET
        self.folder.mkdir(parents=True)
        command = [sys.executable, "-m", "tests.object_store", str(folder)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def be_alone(self, patch: pytest.MonkeyPatch, home: Path) -> None:
        """Leave in the environment the variables that a user of this store sets, and no others of a store."""
        for name in [name for name in os.environ if name.startswith(("AWS_", "PYICEBERG_"))]:
            patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.setenv("AWS_ENDPOINT_URL", self.url)
        patch.setenv("AWS_ALLOW_HTTP", "true")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)

    def tell(self, **settings: Any) -> dict[str, Any]:
        """Change settings of the server, and return them all.

        `fault` befalls the first write to each path that contains one of `paths`, `conditional` is whether a write with
        `If-None-Match: *` is refused where an object is; `faults` has the paths that a fault has befallen.
        """
        request = urllib.request.Request(f"{self.url}/-", json.dumps(settings).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


class _Handler(S3Handler):
    settings: dict[str, Any]

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def _dispatch(self, action: Any) -> None:
        super()._dispatch(action if f"={KEY_ID}/" in self.headers.get("Authorization", "") else self._refuse)

    def _refuse(self, bucket: str, key: str) -> None:
        del bucket, key
        self._read_body()
        raise S3Error(HTTPStatus.FORBIDDEN, "InvalidAccessKeyId", "The Access Key Id does not exist in our records.")

    def do_POST(self) -> None:  # noqa: N802
        if self.path != "/-":
            super().do_POST()
            return
        self.settings.update(json.loads(self._read_body()))
        self._send(HTTPStatus.OK, json.dumps(self.settings).encode())

    def do_PUT(self) -> None:  # noqa: N802
        path = self.path.partition("?")[0]
        if not self.settings["conditional"]:
            del self.headers["If-None-Match"]
        if path.endswith("/"):  # a folder, as Arrow makes them
            self._read_body()
            self._send(HTTPStatus.OK)
            return
        fault, faults = self.settings["fault"], self.settings["faults"]
        if not any(part in path for part in self.settings["paths"]) or path in faults:
            fault = None
        if fault:
            faults.append(path)
        while fault == HELD and self.settings["fault"] == HELD:
            time.sleep(0.01)
        answer = self.wfile
        if fault in (LOST, FAILED):
            self.wfile = io.BytesIO()
        super().do_PUT()
        if self.wfile is not answer:
            self.wfile, self.close_connection = answer, True
            if fault == FAILED:
                self._send(HTTPStatus.BAD_GATEWAY, headers={"Connection": "close"})


def _serve(folder: str) -> None:
    settings: dict[str, Any] = {"fault": None, "paths": [], "conditional": True, "faults": []}
    kind = type("Handler", (_Handler,), {"data_root": Path(folder), "settings": settings})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        print(f"http://127.0.0.1:{server.server_port}", flush=True)  # noqa: T201
        server.serve_forever()


if __name__ == "__main__":
    _serve(sys.argv[1])
