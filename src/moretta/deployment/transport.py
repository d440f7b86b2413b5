"""The way of gRPC, FLARE's transport, from this machine to a server: by its name, or by a proxy of the environment.

FLARE tries for ever and says nothing. `connect` goes the same way by a plain socket, which shows what is in it;
`carries` opens a channel as FLARE does.
"""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from ipaddress import ip_address, ip_network
from pathlib import Path
from urllib.parse import unquote, urlsplit

from moretta.deployment import kits
from moretta.errors import ParameterError

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # gRPC takes the first that is set
SPARED = ("no_grpc_proxy", "no_proxy")  # likewise
UNREAD = ("all_proxy", *(name.upper() for name in (*PROXIES, "all_proxy")))  # other programs take these, and gRPC none
HTTPS = 443  # gRPC's port of a proxy that names none
WAIT = 5.0  # seconds in which a name is found, and something takes a connection
STRAIGHT = 1.0  # seconds for a look whether it would go without the proxy
TUNNEL = "Tunnel connection failed: "  # how http.client begins what a proxy answers


@dataclass(frozen=True)
class Proxy:
    """A proxy that gRPC asks for connections by HTTP CONNECT. variable: of the environment; credentials: a secret."""

    variable: str
    host: str
    port: int
    credentials: str = field(repr=False)

    def __str__(self) -> str:
        return f"the proxy {self.host}:{self.port} ({self.variable})"


def proxy_to(host: str) -> Proxy | None:
    """Return the proxy by which gRPC reaches a host from this process; chosen as gRPC's HttpProxyMapper does."""
    variable = next((name for name in PROXIES if name in os.environ), "")
    with contextlib.suppress(ValueError):
        url = urlsplit(os.environ.get(variable, "").strip())
        if url.scheme == "http" and url.hostname and not _spared(host):
            return Proxy(variable, url.hostname, url.port or HTTPS, unquote(url.netloc.rpartition("@")[0]))
    return None


def _spared(host: str) -> bool:
    listed = next((os.environ[name] for name in SPARED if name in os.environ), "")
    for entry in filter(None, map(str.strip, listed.lower().split(","))):
        if host.lower().endswith(entry):
            return True
        with contextlib.suppress(ValueError):
            if "/" in entry and ip_address(host) in ip_network(entry, strict=False):
                return True
    return False


def without_proxy(host: str) -> str:
    """Return what is to be done so that gRPC takes no proxy to a host."""
    variable = next((name for name in SPARED if name in os.environ), "")
    if not variable:
        return f"set no_proxy={host}"
    return f"add {host} to {variable} (gRPC takes names, endings and ranges, and no *)"


def addresses(host: str, port: int) -> list[str]:
    """Return the addresses of a name; none where it means nothing to this machine, or nobody says so in time."""
    places: list[str] = []

    def look() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            places.extend({str(at[0]): None for *_, at in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})

    thread = threading.Thread(target=look, daemon=True)  # it may take a minute, and cannot be ended
    thread.start()
    thread.join(WAIT)
    return places


def connect(host: str, port: int, wait: float) -> socket.socket:
    """Open a connection by the way of gRPC. Raises OSError, for `hindrance`."""
    wait, proxy = min(wait, WAIT), proxy_to(host)
    if proxy is None:
        return socket.create_connection((host, port), wait)
    tunnel = HTTPConnection(proxy.host, proxy.port, timeout=wait)
    encoded = base64.b64encode(proxy.credentials.encode()).decode()
    tunnel.set_tunnel(host, port, {"Proxy-Authorization": f"Basic {encoded}"} if encoded else {})
    try:
        tunnel.connect()
    except HTTPException as error:
        raise OSError(f"{TUNNEL}{error or 'nothing'}") from error
    return tunnel.sock


def hindrance(error: OSError, host: str, port: int) -> str:
    """Say what keeps a connection of `connect` from a server, and what to do.

    Raises ParameterError where a proxy does that the server is reached without.
    """
    proxy = proxy_to(host)
    what = f"cannot be reached ({error.strerror or error})"
    if isinstance(error, ConnectionRefusedError):
        what = "refuses the connection"
    elif isinstance(error, TimeoutError):
        what = "does not answer"
    elif isinstance(error, socket.gaierror):
        what = "is no name that this machine can find"
    elif str(error).startswith(TUNNEL):
        what = f"answers {str(error).removeprefix(TUNNEL)!r:.100}"
    if proxy is None:
        at = ", ".join(addresses(host, port)) or "no address"
        return (
            f"{host} ({at}) {what}: have it started there (moretta serve), and let a firewall pass that port"
            f"{_unread(host)}"
        )
    sentence = f"gRPC, FLARE's transport, goes through {proxy}, which {what}"
    with contextlib.suppress(OSError), socket.create_connection((host, port), STRAIGHT):
        raise ParameterError(f"{sentence}, and {host}:{port} is reached without it: {without_proxy(host)}")
    return f"{sentence}: have it let {host}:{port} pass, or, where the way needs no proxy, {without_proxy(host)}"


def _unread(host: str) -> str:
    """Say which variables name a proxy that gRPC does not take."""
    names = [name for name in (*PROXIES, *UNREAD) if os.environ.get(name)]
    if not names or _spared(host):
        return ""
    ignored = ", ".join(names)
    return f"; if the way is through a proxy, gRPC wants https_proxy=http://HOST:PORT, and takes nothing of {ignored}"


def carries(kit: Path, wait: float) -> str:
    """Return "" where gRPC connects as FLARE's processes do, else what it says itself. wait: seconds."""
    import grpc

    files = kits.certificates_of(kit)
    root, key, certificate = (path.read_bytes() for path in (files.root, files.key, files.certificate))
    host, port = kits.address_of(kit)
    with grpc.secure_channel(f"{host}:{port}", grpc.ssl_channel_credentials(root, key, certificate)) as channel:
        try:
            channel.unary_unary("/moretta/none")(b"", timeout=wait)
        except grpc.RpcError as error:  # of a server that is there, that it has no such method
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return " ".join(str(error.details()).split()).replace(": ", ", ")
    return ""


@contextlib.contextmanager
def answering(kit: Path) -> Iterator[None]:
    """Answer at the port of a server's kit as FLARE's server is going to."""
    import grpc

    files = kits.certificates_of(kit)
    pair, root = (files.key.read_bytes(), files.certificate.read_bytes()), files.root.read_bytes()
    server = grpc.server(ThreadPoolExecutor(1))
    credentials = grpc.ssl_server_credentials([pair], root, require_client_auth=True)
    server.add_secure_port(f"0.0.0.0:{kits.address_of(kit)[1]}", credentials)
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()
