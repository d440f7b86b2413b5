"""A proxy as hospitals have one: it takes HTTP CONNECT, and nothing else."""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Connecting:
    """A proxy at a port of this machine, and what it was asked. asked: heads of requests."""

    port: int
    asked: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def proxy(answer: str = "200 Connection established", leads_to: int | None = None) -> Iterator[Connecting]:
    """Answer each CONNECT so, and where that is 2xx lead on. leads_to: a port here, whatever was asked for."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            head = b""
            while b"\r\n\r\n" not in head:
                if not (more := self.request.recv(1)):
                    return
                head += more
            found.asked.append(head.decode())
            self.request.sendall(f"HTTP/1.1 {answer}\r\n\r\n".encode())
            if answer.startswith("2"):
                port = leads_to or int(head.split()[1].rpartition(b":")[2])
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as there:
                    self._lead(there)

        def _lead(self, there: socket.socket) -> None:
            while True:
                for ready in select.select([self.request, there], [], [])[0]:
                    if not (data := ready.recv(65536)):
                        return
                    (there if ready is self.request else self.request).sendall(data)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, block_on_close = True, False

    with Server(("127.0.0.1", 0), Handler) as server:
        found = Connecting(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def filtered() -> Iterator[int]:
    """Give a port of this machine at which nothing comes back, as where a firewall drops what is sent."""
    with socket.socket() as listening, contextlib.ExitStack() as held:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):  # until Linux drops what asks for another connection
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield int(listening.getsockname()[1])


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """Give a port at which connections are taken, and nothing is said, as by a firewall or another program."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield int(listening.getsockname()[1])
