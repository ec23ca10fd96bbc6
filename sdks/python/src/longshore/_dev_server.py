"""A `longshore dev` process for tests. `testing.py` exports it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from ._binary import MISSING, find_binary
from ._errors import LongshoreError
from ._http import Connection, Request, Server


class DevServer:
    """A `longshore dev` process with its data in a folder. `with DevServer() as server: … server.url`."""

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        binary: Path | str | None = None,
        arguments: tuple[str, ...] = (),
    ) -> None:
        found = Path(binary) if binary else find_binary()
        if found is None:
            raise LongshoreError(MISSING, slug="no_server")
        self._temporary = tempfile.TemporaryDirectory() if folder is None else None
        self.folder = Path(self._temporary.name if self._temporary else str(folder))
        self.url = ""
        self._command = [str(found), "dev", "--data-dir", str(self.folder), *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DevServer:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        environment = {
            name: value for name, value in os.environ.items() if not re.match("LONGSHORE_|DATABASE_URL", name)
        }
        log = self.folder / "server.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*self._command, "--bind", f"127.0.0.1:{port}"],
                stdout=output,
                stderr=output,
                env=environment,
                cwd=self.folder,
            )
        await_server(self.url, self._process, log)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._temporary is not None:
            self._temporary.cleanup()


def free_port() -> int:
    """A port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def await_server(url: str, process: subprocess.Popen[bytes], log: Path, timeout: float = 30.0) -> None:
    """Waits until a server that was just started replies."""
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(OSError):
            if Connection(Server(url, None)).send(Request("GET", "/health"), timeout=2.0).status == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise LongshoreError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)
