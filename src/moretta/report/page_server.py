"""Serves the living page of one run to browsers of this machine, by the standard library.

It excludes others. It listens on 127.0.0.1 alone, and answers only requests with the address's token of 256 random
bits. A request must name this very host, so that a foreign page cannot reach it under its own name (DNS rebinding). It
answers only GET, and writes nothing. The page loads nothing from elsewhere, and its content security policy forbids it.

At most `MOST` connections with the token are open, and beside them at most `MOST` without it. The latter take no slot
from the former: each has `PATIENCE` for its whole request, and the oldest is closed if another arrives.

As a program (`python -m moretta.report.page_server FOLDER DESCRIPTOR`) it serves for a run's command, on a socket that
the command has opened. Standard input has the token, then a JSON object a line (`Status`), and ends with the command. A
separate process takes none of the run's time, and adds no threads to the process that forks.
"""

import hmac
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any, cast

from moretta.engines.run_folder import why
from moretta.errors import ParameterError
from moretta.report.living import Follower, News, Status

HOST = "127.0.0.1"
MOST = 16  # simultaneous connections with the token, and again without it
LOOK = 0.5  # seconds between two checks of the folder
PATIENCE = 10.0  # seconds for a browser to send its request, or to receive an answer
HEARTBEAT = 10.0  # seconds without news after which a browser gets a sign of life
LINGER = 2.0  # seconds for browsers to receive the last news

_TEMPLATES = Path(__file__).with_name("templates")
_FILES = {
    "": ("living.html", "text/html; charset=utf-8"),
    "living.css": ("living.css", "text/css; charset=utf-8"),
    "living.js": ("living.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def listening(port: int) -> socket.socket:
    """Return a socket on a port of this machine alone, 0 for any free one. Raises ParameterError for a used port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(MOST)
    except OSError as error:
        listener.close()
        raise ParameterError(
            f"the page cannot be served at port {port} of {HOST}: {error.strerror}; name another port, or 0 for any "
            "that is free"
        ) from None
    return listener


def address_of(listener: socket.socket, token: str) -> str:
    """Return the page's address."""
    return f"http://{HOST}:{listener.getsockname()[1]}/{token}/"


class PageServer(ThreadingHTTPServer):
    """Serves the page of the run in a folder, which may appear later. listener: a socket of `listening`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, token: str, folder: Path, status: Status) -> None:
        super().__init__(listener.getsockname(), _Request, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.token, self.folder, self.status = token, folder, status
        self.hosts = {f"{name}:{listener.getsockname()[1]}" for name in (HOST, "localhost")}
        self.ended = threading.Event()
        self.streams = set[int]()  # the threads that send news
        self._lock = threading.Lock()
        self._strangers = dict[Any, float]()  # connections without the token, oldest first, and their deadlines
        self._guests = set[Any]()  # connections that have shown the token

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve while the block lasts; then browsers have a moment to receive the last news."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.ended.set()
            until = time.monotonic() + LINGER
            while self.streams and time.monotonic() < until:
                time.sleep(0.02)
            self.shutdown()
            self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; close the oldest connection without the token if there are too many."""
        with self._lock:
            self._strangers[request] = time.monotonic() + PATIENCE
            self._close(list(self._strangers)[:-MOST])
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections whose request is not complete in time."""
        with self._lock:
            now = time.monotonic()
            self._close([stranger for stranger, deadline in self._strangers.items() if deadline < now])

    def admits(self, request: Any) -> bool:
        """Give a slot to a connection that has just shown the token; return whether one was free."""
        with self._lock:
            free = len(self._guests) < MOST and self._strangers.pop(request, None) is not None
            if free:
                self._guests.add(request)
            return free

    def _close(self, strangers: Sequence[Any]) -> None:
        """End connections; their waiting threads notice it."""
        for request in strangers:
            del self._strangers[request]
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, then free the connection's slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._strangers.pop(request, None)
                self._guests.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that went away or was too slow; report other errors as usual."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Request(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "Moretta", ""
    timeout = PATIENCE

    def do_GET(self) -> None:
        token, _, name = self.path.removeprefix("/").partition("/")
        if self.headers.get_all("Host", []) not in ([host] for host in self.server.hosts):
            self._say(HTTPStatus.FORBIDDEN)
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._say(HTTPStatus.NOT_FOUND)
        elif not self.server.admits(self.connection):
            self._say(HTTPStatus.SERVICE_UNAVAILABLE)
        elif name == "events":
            self._stream()
        elif name in _FILES:
            file, kind = _FILES[name]
            self._begin(HTTPStatus.OK, kind)
            self.wfile.write((_TEMPLATES / file).read_bytes())
        else:
            self._say(HTTPStatus.NOT_FOUND)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse all but GET over HTTP."""
        wrong = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._say(wrong)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because an address has the token in it."""

    def _say(self, status: HTTPStatus) -> None:
        self._begin(status, "text/plain; charset=utf-8")
        if self.command != "HEAD":
            self.wfile.write(f"{status.value} {status.phrase}\n".encode())

    def _begin(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS}.items():
            self.send_header(name, value)
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.end_headers()

    def _stream(self) -> None:
        """Send news as they come, until the run's command ends or the browser goes."""
        self._begin(HTTPStatus.OK, "text/event-stream; charset=utf-8")
        self.server.streams.add(threading.get_ident())
        try:
            self.wfile.write(b"retry: 1000\n\n")
            follower, sent = Follower(self.server.folder, self.headers.get("Last-Event-ID", "")), time.monotonic()
            while True:
                last = self.server.ended.is_set()  # before the check, so that nothing is missed
                for event in follower.news(self.server.status):
                    self.wfile.write(_written(event))
                    sent = time.monotonic()
                if last:
                    self.wfile.write(b"event: bye\ndata: {}\n\n")
                    return
                if time.monotonic() > sent + HEARTBEAT:  # otherwise a closed browser would never be noticed
                    self.wfile.write(b": nothing new\n\n")
                    sent = time.monotonic()
                self.server.ended.wait(LOOK)
        finally:
            self.server.streams.discard(threading.get_ident())


def _written(event: News) -> bytes:
    return f"id: {event.id}\nevent: {event.kind}\ndata: {json.dumps(event.data, allow_nan=False)}\n\n".encode()


def main() -> None:
    """Serve for the command that started this process, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command is interrupted too, and reports its end
    folder, descriptor = Path(sys.argv[1]), int(sys.argv[2])
    token = sys.stdin.readline().strip()
    server = PageServer(socket.socket(fileno=descriptor), token, folder, Status(has_command=True))
    with server.serving():
        for line in sys.stdin:
            server.status = replace(server.status, **json.loads(line))


PROGRAM = (sys.executable, "-P", "-m", "moretta.report.page_server")
ENDING = 3.0  # seconds for the process to end after the run

Say = Callable[[str], None]


@contextmanager
def page_beside(folder: Path, port: int, say: Say) -> Iterator[Say]:
    """Serve the living page of a run while the block lasts.

    Args:
        folder: The run's folder, which may appear later.
        say: Receives the address.

    Yields:
        A function that sends the page a sentence, such as the silos that the run waits for. It never blocks and never
            fails.

    Raises:
        ParameterError: The port is unavailable.
    """
    token = secrets.token_urlsafe(32)
    with listening(port) as listener:
        process = _started(folder, listener.fileno(), token)
        if process is not None:
            say(f"the run's page is at {address_of(listener, token)}")
    if process is None:
        say("the run's page cannot be served, because no process could be started for it; the run continues without it")
        yield lambda sentence: None
        return
    try:
        yield lambda sentence: _send_status(process, note=sentence)
    except BaseException as error:
        _send_status(process, failed=why(error))
        raise
    finally:
        _end(process)


def _started(folder: Path, descriptor: int, token: str) -> subprocess.Popen[bytes] | None:
    """Start the process; its token is sent by standard input, because others can read arguments."""
    try:
        process = subprocess.Popen(
            [*PROGRAM, str(folder), str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[descriptor],
        )
    except OSError:
        return None
    os.set_blocking(_input(process).fileno(), False)
    _write(process, f"{token}\n")
    return process


def _send_status(process: subprocess.Popen[bytes], **status: str) -> None:
    _write(process, json.dumps(status) + "\n")


def _write(process: subprocess.Popen[bytes], line: str) -> None:
    with suppress(OSError):  # a dead process, or one that does not read, misses a sentence
        os.write(_input(process).fileno(), line.encode())


def _input(process: subprocess.Popen[bytes]) -> IO[bytes]:
    return cast("IO[bytes]", process.stdin)  # `_started` opens a pipe


def _end(process: subprocess.Popen[bytes]) -> None:
    _input(process).close()
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
