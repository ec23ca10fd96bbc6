"""A TCP proxy that can cut the replies of a server after it has handled the request."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from urllib.parse import urlsplit


class Proxy:
    def __init__(self, url: str) -> None:
        self.redirect(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._to_cut = 0
        self._every = 0
        self._replies = 0
        self._is_closed = False
        self._is_dark = False
        self._is_silent = threading.Event()
        #: How many replies were cut.
        self.cut = 0
        #: How many connections are open.
        self.open = 0
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        self._listener.close()
        self.disconnect()

    def redirect(self, url: str) -> None:
        """Connects to another server from now on."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)

    def cut_replies(self, number: int) -> None:
        """Cuts the next replies."""
        with self._lock:
            self._to_cut = number

    def cut_every(self, number: int) -> None:
        """Cuts every n-th reply; 0 for none."""
        with self._lock:
            self._every = number

    def disconnect(self) -> None:
        """Closes all connections."""
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._sockets.clear()

    def go_silent(self) -> None:
        """Accepts requests and passes nothing on."""
        self._is_silent.set()

    def go_dark(self) -> None:
        """Closes all connections, also new ones."""
        self._is_dark = True
        self.disconnect()

    def recover(self) -> None:
        self._is_silent.clear()
        self._is_dark = False
        self.disconnect()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            if self._is_dark:
                client.close()
                server.close()
                continue
            for connection in (client, server):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [client, server]
            with self._lock:
                self.open += 1
            threading.Thread(target=self._copy, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._copy, args=(server, client, True), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self._is_silent.is_set():
                    continue
                if is_reply and data.startswith(b"HTTP/") and self._must_cut():
                    break
                target.sendall(data)
        for connection in (source, target):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if not is_reply:
            with self._lock:
                self.open -= 1

    def _must_cut(self) -> bool:
        with self._lock:
            self._replies += 1
            if self._to_cut > 0:
                self._to_cut -= 1
            elif not (self._every and self._replies % self._every == 0):
                return False
            self.cut += 1
            return True
