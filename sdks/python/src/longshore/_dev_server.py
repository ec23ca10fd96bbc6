"""A `longshore dev` process for tests. `testing.py` exports it."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

from ._binary import MISSING, find_binary
from ._errors import LongshoreError


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
        environment = {
            name: value for name, value in os.environ.items() if not re.match("LONGSHORE_|DATABASE_URL", name)
        }
        log = self.folder / "server.log"
        with log.open("ab") as output:
            start = output.tell()
            self._process = subprocess.Popen(
                [*self._command, "--bind", "127.0.0.1:0"],
                stdout=output,
                stderr=output,
                env=environment,
                cwd=self.folder,
            )
        self.url = await_address(self._process, log, start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._temporary is not None:
            self._temporary.cleanup()


def await_address(process: subprocess.Popen[bytes], log: Path, start: int, timeout: float = 60.0) -> str:
    """Waits until a server that was just started writes its address to the log, from the position `start` on."""
    deadline = time.monotonic() + timeout
    while True:
        has_ended = process.poll() is not None  # before the log is read, so that nothing of it is missed
        text = log.read_bytes()[start:].decode(errors="replace")
        # With `--json` the server prints an object instead of a line.
        if found := re.search(r'(?:listening on |"url": ")(http://[^\s"]+)[\s"]', text):
            return found[1]
        if has_ended or time.monotonic() > deadline:
            raise LongshoreError(f"the server did not start: {text[-2000:]}")
        time.sleep(0.02)
