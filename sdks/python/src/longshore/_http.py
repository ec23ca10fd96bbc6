"""HTTP/1.1 with keep-alive: one pool for threads (`http.client`) and one per event loop (streams).

Owns connections and when to repeat a request. It does not know what requests mean; see `_operations.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import random
import selectors
import socket
import ssl
import time
from collections import deque
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ._errors import LongshoreError, Unavailable

#: A connection that was idle for longer is not used again. The server closes idle connections after 75 s.
MAX_IDLE = 60.0
#: How long a server may take to reply, in addition to the time that a request asks it to wait.
REPLY_TIMEOUT = 35.0
CONNECT_TIMEOUT = 10.0
_RETRYABLE = frozenset((408, 429, 500, 502, 503, 504))
_BASE_DELAY, _MAX_DELAY = 0.05, 5.0


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def retry_after(self) -> float:
        """How many seconds the server asks the client to wait; 0 if it does not say."""
        try:
            return max(0.0, float(self.headers.get("retry-after", "0")))
        except ValueError:  # a date
            return 0.0


@dataclass
class Request:
    """One HTTP request, independent of how it is sent."""

    method: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    #: How long the request asks the server to wait.
    wait: float = 0.0
    #: Whether a request whose reply was lost may be sent again.
    repeatable: bool = True


class ConnectFailed(OSError):
    """The connection could not be opened, so the server has not seen the request."""


class Server:
    """The address of a server and what each request needs to reach it."""

    def __init__(self, url: str, token: str | None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise LongshoreError(f"server: `{url}` is not an address like http://127.0.0.1:8080", slug="validation")
        try:
            port = parts.port
        except ValueError as error:
            raise LongshoreError(f"server: `{url}`: {error}", slug="validation") from None
        self.url = url
        self.is_tls = parts.scheme == "https"
        self.host = parts.hostname
        self.port = port or (443 if self.is_tls else 80)
        self.prefix = parts.path.rstrip("/")
        self.tls = ssl.create_default_context() if self.is_tls else None
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.host_header = host if port is None else f"{host}:{port}"
        self.headers = {"content-type": "application/json", "accept": "application/json"}
        token = (token or "").strip()  # secrets often end with a newline
        if not token.isprintable() or not token.isascii():
            raise LongshoreError("token: it contains a character that no token has; copy it again", slug="validation")
        if token:
            self.headers["authorization"] = f"Bearer {token}"


class Connection:
    """A keep-alive connection for one thread at a time."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._http: http.client.HTTPConnection | None = None
        self.last_used = 0.0
        self.is_aborted = False

    def send(self, request: Request, timeout: float = REPLY_TIMEOUT) -> Reply:
        """Sends a request. If a connection that was idle turns out to be closed, uses a new one."""
        was_open = self._http is not None
        if was_open and (time.monotonic() - self.last_used > MAX_IDLE or self._is_stale()):
            self.close()
            was_open = False
        try:
            return self._send(request, timeout)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            self.close()
            if not was_open or not request.repeatable:
                raise
            return self._send(request, timeout)

    def _send(self, request: Request, timeout: float) -> Reply:
        try:
            connection = self._open()
            if self.is_aborted:
                raise ConnectFailed("the request was aborted")
            if connection.sock is not None:
                connection.sock.settimeout(timeout + request.wait)
            headers = {**self.server.headers, **request.headers}
            try:
                connection.request(request.method, self.server.prefix + request.path, request.body, headers)
            except (BrokenPipeError, ConnectionResetError):
                # A server that refuses a large body replies before it has read all of it. The reply says why.
                response = _early_reply(connection)
            else:
                response = connection.getresponse()
            body = response.read()
            if response.will_close:
                self.close()
            self.last_used = time.monotonic()
            return Reply(response.status, {name.lower(): value for name, value in response.headers.items()}, body)
        except BaseException:
            # The reply of this request must not be read as the reply of the next one.
            self.close()
            raise

    def _is_stale(self) -> bool:
        """Whether the server has closed the connection: there is something to read without a request."""
        sock = self._http.sock if self._http is not None else None
        if sock is None:
            return True
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(sock, selectors.EVENT_READ)
            except (OSError, ValueError):
                return True
            return bool(selector.select(0))

    def _open(self) -> http.client.HTTPConnection:
        if self._http is None:
            server = self.server
            if server.tls is not None:
                self._http = http.client.HTTPSConnection(
                    server.host, server.port, timeout=CONNECT_TIMEOUT, context=server.tls
                )
            else:
                self._http = http.client.HTTPConnection(server.host, server.port, timeout=CONNECT_TIMEOUT)
            try:
                self._http.connect()
            except OSError as error:
                raise ConnectFailed(str(error)) from error
        return self._http

    def close(self) -> None:
        connection, self._http = self._http, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()

    def abort(self) -> None:
        """Ends a request that another thread waits for."""
        self.is_aborted = True
        connection = self._http
        sock = connection.sock if connection is not None else None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _early_reply(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    """The reply to a request that could not be sent completely. Raises an OSError if there is none."""
    if connection.sock is None:
        raise BrokenPipeError("the connection was closed")
    response = http.client.HTTPResponse(connection.sock)
    response.begin()
    response.will_close = True
    return response


class Backoff:
    """Decides whether and when to send a request again: decorrelated jitter, up to a deadline."""

    def __init__(self, request: Request, seconds: float) -> None:
        self.request = request
        self.deadline = time.monotonic() + seconds
        self.delay = _BASE_DELAY

    def after_reply(self, reply: Reply) -> float | None:
        if reply.status not in _RETRYABLE:
            return None
        if not self.request.repeatable and reply.status not in (429, 503):
            return None
        delay = max(self._next(), reply.retry_after())
        return delay if time.monotonic() + delay < self.deadline else None

    def after_error(self, error: BaseException) -> float | None:
        if not self.request.repeatable and not isinstance(error, ConnectFailed):
            return None
        delay = self._next()
        return delay if time.monotonic() + delay < self.deadline else None

    def _next(self) -> float:
        self.delay = min(_MAX_DELAY, random.uniform(_BASE_DELAY, self.delay * 3))
        return self.delay


def unreachable(server: Server, error: BaseException) -> Unavailable:
    what = str(error) or type(error).__name__
    return Unavailable(f"{server.url} cannot be reached: {what}; start it, or set LONGSHORE_SERVER")


class Pool:
    """Connections for threads."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._idle: deque[Connection] = deque()
        self._pid = os.getpid()

    def send(self, request: Request, retry_for: float) -> Reply:
        backoff = Backoff(request, retry_for)
        while True:
            try:
                reply = self._send_once(request)
                delay = backoff.after_reply(reply)
                if delay is None:
                    return reply
            except (OSError, http.client.HTTPException) as error:
                delay = backoff.after_error(error)
                if delay is None:
                    raise unreachable(self.server, error) from error
            time.sleep(delay)

    def _send_once(self, request: Request) -> Reply:
        if self._pid != os.getpid():  # a forked process must not share connections with its parent
            self._idle, self._pid = deque(), os.getpid()
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = Connection(self.server)
        reply = connection.send(request)
        self._idle.append(connection)
        return reply

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _Stream:
    """A keep-alive connection of one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.last_used = time.monotonic()

    async def send(self, server: Server, request: Request) -> tuple[Reply, bool]:
        headers = {"host": server.host_header, **server.headers, **request.headers}
        body = request.body or b""
        if request.body is not None or request.method in ("POST", "PUT", "PATCH"):
            headers["content-length"] = str(len(body))
        lines = [f"{request.method} {server.prefix}{request.path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body)
        await self.writer.drain()
        status_line, *header_lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(status_line.split(" ", 2)[1])
        received = {}
        for line in header_lines:
            name, separator, value = line.partition(":")
            if separator:
                received[name.strip().lower()] = value.strip()
        content = await self._read_body(request, status, received)
        self.last_used = time.monotonic()
        return Reply(status, received, content), received.get("connection", "").lower() != "close"

    async def _read_body(self, request: Request, status: int, headers: dict[str, str]) -> bytes:
        if status in (204, 304) or request.method == "HEAD":
            return b""
        if "chunked" in headers.get("transfer-encoding", "").lower():
            parts = []
            while size := int((await self.reader.readline()).split(b";")[0], 16):
                parts.append(await self.reader.readexactly(size))
                await self.reader.readline()
            while (await self.reader.readline()) not in (b"\r\n", b""):
                pass
            return b"".join(parts)
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        return await self.reader.read()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.writer.close()

    def drop(self) -> None:
        """Closes the socket of a loop that is closed, which `close` cannot do."""
        sock = self.writer.get_extra_info("socket")
        with contextlib.suppress(Exception):  # the classes of loops differ
            sock.shutdown(socket.SHUT_RDWR)
            sock._sock.close()  # otherwise the garbage collector closes it some day


class AsyncPool:
    """Connections for event loops. Each loop has its own."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._idle: dict[asyncio.AbstractEventLoop, deque[_Stream]] = {}

    async def send(self, request: Request, retry_for: float) -> Reply:
        backoff = Backoff(request, retry_for)
        while True:
            try:
                reply = await self._send_once(request)
                delay = backoff.after_reply(reply)
                if delay is None:
                    return reply
            except (OSError, EOFError, ValueError, asyncio.TimeoutError, asyncio.LimitOverrunError) as error:
                delay = backoff.after_error(error)
                if delay is None:
                    raise unreachable(self.server, error) from error
            await asyncio.sleep(delay)

    async def _send_once(self, request: Request) -> Reply:
        loop = asyncio.get_running_loop()
        if loop not in self._idle:
            self._forget_closed_loops()
        idle = self._idle.setdefault(loop, deque())
        while idle:
            stream = idle.pop()
            if time.monotonic() - stream.last_used > MAX_IDLE or stream.reader.at_eof():
                stream.close()
                continue
            try:
                return await self._use(stream, idle, request)
            except (ConnectionResetError, BrokenPipeError, asyncio.IncompleteReadError):
                if not request.repeatable:
                    raise
        return await self._use(await self._connect(), idle, request)

    async def _connect(self) -> _Stream:
        server = self.server
        opening = asyncio.open_connection(server.host, server.port, ssl=server.tls, limit=1 << 20)
        try:
            return _Stream(*await asyncio.wait_for(opening, CONNECT_TIMEOUT))
        except (OSError, asyncio.TimeoutError) as error:
            raise ConnectFailed(str(error) or "the connection timed out") from error

    async def _use(self, stream: _Stream, idle: deque[_Stream], request: Request) -> Reply:
        try:
            reply, keeps_open = await asyncio.wait_for(
                stream.send(self.server, request), REPLY_TIMEOUT + request.wait
            )
        except BaseException:
            stream.close()
            raise
        if keeps_open:
            idle.append(stream)
        else:
            stream.close()
        return reply

    def _forget_closed_loops(self) -> None:
        """A program that calls `asyncio.run` often would otherwise keep the connections of every loop open."""
        for loop in list(self._idle):
            if loop.is_closed():
                for stream in self._idle.pop(loop, ()):
                    stream.drop()

    async def close(self) -> None:
        for stream in self._idle.pop(asyncio.get_running_loop(), deque()):
            stream.close()
