"""The connection to a kit's server: its address, certificates, clock, and an administrator's requests.

gRPC, FLARE's transport, reaches a server by its name, or by a proxy of the environment. FLARE tries for ever without a
message. `connect` takes the same way by a plain socket, which shows obstacles; `carries` opens a channel as FLARE does.
"""

import base64
import contextlib
import io
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from moretta.deployment import kits
from moretta.errors import MorettaError, ParameterError, RunFailed

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # gRPC uses the first that is set
SPARED = ("no_grpc_proxy", "no_proxy")  # likewise
UNREAD = ("all_proxy", *(name.upper() for name in (*PROXIES, "all_proxy")))  # other programs use these, but not gRPC
HTTPS = 443  # gRPC's port of a proxy that names none
WAIT = 5.0  # seconds for a name to resolve, and for a connection
STRAIGHT = 1.0  # seconds to try the way without the proxy
TUNNEL = "Tunnel connection failed: "  # the start of http.client's error with a proxy's answer


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
    """Return the proxy by which gRPC reaches a host from this process, by the rules of gRPC's HttpProxyMapper."""
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
    """Return how to make gRPC reach a host without a proxy."""
    variable = next((name for name in SPARED if name in os.environ), "")
    if not variable:
        return f"set no_proxy={host}"
    return f"add {host} to {variable} (gRPC accepts names, endings and ranges, but no *)"


def addresses(host: str, port: int) -> list[str]:
    """Return the addresses of a name; empty if it does not resolve, or not in time."""
    places: list[str] = []

    def look() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            places.extend({str(at[0]): None for *_, at in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})

    thread = threading.Thread(target=look, daemon=True)  # it may take a minute, and cannot be ended
    thread.start()
    thread.join(WAIT)
    return places


def connect(host: str, port: int, wait: float) -> socket.socket:
    """Open a connection by gRPC's way. Raises OSError, for `hindrance`."""
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
    """Describe the obstacle between `connect` and a server, and the remedy.

    Raises:
        ParameterError: The server can be reached without the proxy.
    """
    proxy = proxy_to(host)
    what = f"cannot be reached ({error.strerror or error})"
    if isinstance(error, ConnectionRefusedError):
        what = "refuses the connection"
    elif isinstance(error, TimeoutError):
        what = "does not answer"
    elif isinstance(error, socket.gaierror):
        what = "does not resolve on this machine"
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
    return f"{sentence}: have it let {host}:{port} pass, or, if no proxy is needed, {without_proxy(host)}"


def _unread(host: str) -> str:
    """Name the variables with a proxy that gRPC does not use."""
    names = [name for name in (*PROXIES, *UNREAD) if os.environ.get(name)]
    if not names or _spared(host):
        return ""
    ignored = ", ".join(names)
    return f"; if a proxy is needed, set https_proxy=http://HOST:PORT for gRPC, which ignores {ignored}"


def carries(kit: Path, wait: float) -> str:
    """Return "" if gRPC connects as FLARE's processes do, else its own message. wait: seconds."""
    import grpc

    files = kits.certificates_of(kit)
    root, key, certificate = (path.read_bytes() for path in (files.root, files.key, files.certificate))
    host, port = kits.address_of(kit)
    with grpc.secure_channel(f"{host}:{port}", grpc.ssl_channel_credentials(root, key, certificate)) as channel:
        try:
            channel.unary_unary("/moretta/none")(b"", timeout=wait)
        except grpc.RpcError as error:  # a reachable server replies that it has no such method
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return " ".join(str(error.details()).split()).replace(": ", ", ")
    return ""


@contextlib.contextmanager
def answering(kit: Path) -> Iterator[None]:
    """Answer at the port of a server's kit instead of FLARE's server."""
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


LOGIN = 10.0  # seconds for the server to answer
PATIENT = 30.0  # seconds for a busy machine to answer itself
STEP = 0.05  # seconds between two tries to reach it
DATES = (9, 10)  # OpenSSL's codes for a certificate that is not valid yet, or no longer
HELLO = 2  # of TLS: the kind of message by which a server begins
APART, CLOSE = 2.1, 1.5  # seconds between two looks at a server's clock, which counts whole ones; their tolerance


def check_port(port: int) -> None:
    """Raise ParameterError if a server could not listen at a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            raise ParameterError(
                f"port {port} cannot be used ({error.strerror}); end what uses it, or choose another by --port"
            ) from None


def resolve(kit: Path) -> str:
    """Return the addresses of a kit's server in words. Raises RunFailed if its name, or its proxy's, is unknown."""
    host, port = kits.address_of(kit)
    proxy = proxy_to(host)
    name = host if proxy is None else proxy.host
    if not (places := addresses(name, port)):
        raise RunFailed(
            f"the name {name} of {proxy or 'the server'} does not resolve on this machine: check its network, or add "
            "the name to DNS or /etc/hosts"
        )
    return f"{'is' if proxy is None else f'is left to {proxy},'} at {', '.join(places)}"


def reach(kit: Path, wait: float = LOGIN) -> None:
    """Open the connection of a site or an administrator to the server once; FLARE would try for ever in silence.

    Args:
        wait: Seconds for the server to answer.

    Raises:
        RunFailed: The server does not answer.
        ParameterError: The two do not accept each other's certificate.
    """
    kits.check_certificates(kit)
    deadline = time.monotonic() + wait
    while away := _away(kit, max(deadline - time.monotonic(), STEP)):
        if time.monotonic() > deadline:
            raise RunFailed(away)
        time.sleep(STEP)


def reach_by_grpc(kit: Path, wait: float = WAIT) -> str:
    """Connect once as FLARE does, by its transport; return the server's address.

    Args:
        wait: Seconds for the TLS connection; gRPC's own has `LOGIN`.

    Raises:
        RunFailed: The server's name does not resolve, it does not answer, or it answers but not to gRPC.
        ParameterError: As `reach`.
    """
    kits.check_certificates(kit)
    resolve(kit)
    if away := _away(kit, wait):
        raise RunFailed(away)
    host, port = kits.address_of(kit)
    if words := carries(kit, LOGIN):
        raise RunFailed(
            f"{host}:{port} answers, but not to gRPC, FLARE's transport ({words}); check the proxies between"
        )
    proxy = proxy_to(host)
    return f"{host}:{port}" if proxy is None else f"{host}:{port} through {proxy}"


def own_address(kit: Path) -> str:
    """Return a sentence with the address by which a server reaches itself under the name that sites use.

    Until FLARE's server runs, a stand-in answers.

    Raises:
        ParameterError: The address cannot be reached.
    """
    kits.check_certificates(kit)
    host, port = kits.address_of(kit)
    stand_in: contextlib.AbstractContextManager[None] = answering(kit)
    try:
        check_port(port)
    except ParameterError:  # the port is in use already
        stand_in = contextlib.nullcontext()
    try:
        with stand_in:
            return f"this machine reaches itself at {reach_by_grpc(kit, PATIENT)}"
    except MorettaError as error:
        hosts = f"add the line `127.0.0.1 {host}` to /etc/hosts here, or give --host a name or address of this machine"
        remedy = hosts if proxy_to(host) is None else without_proxy(host)
        raise ParameterError(
            f"this machine does not reach itself at {host}:{port}, the address that sites and FLARE use "
            f"({str(error).partition(': ')[0]}): {remedy}"
        ) from error


def clock_of_server(kit: Path, wait: float = LOGIN) -> float | None:
    """Return by how many seconds the clock of a kit's server is ahead of this machine's; None if it is unknown.

    Up to TLS 1.2 a server may begin its random bytes with its time in whole seconds (RFC 5246, 7.4.1.2), as gRPC does.
    Other servers' bytes there are random or constant and do not advance by the second, so two connections are compared.

    Args:
        wait: Seconds for each connection.
    """
    host, port = kits.address_of(kit)
    differences = []
    for pause in (0.0, APART):
        time.sleep(pause)
        try:
            with connect(host, port, wait) as plain:
                plain.sendall(_client_hello(host))
                greeting = plain.recv(64)
        except OSError:
            return None
        if len(greeting) < 15 or greeting[0] != 22 or greeting[5] != HELLO:  # 22: a handshake, not an alert
            return None
        differences.append(int.from_bytes(greeting[11:15], "big") - time.time())
    return differences[1] if abs(differences[1] - differences[0]) < CLOSE else None


def _client_hello(host: str) -> bytes:
    """Return the first message of a TLS 1.2 client; the handshake stops there, so it needs no trust."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname=host).do_handshake()
    return hello.read()


def _away(kit: Path, wait: float) -> str:
    """Try the server once: return "" if it answers, else why not. Raises ParameterError for a wrong certificate."""
    host, port = kits.address_of(kit)
    files, nobody = kits.certificates_of(kit), f"no server of this federation answers at {host}:{port}"
    context = ssl.create_default_context(cafile=str(files.root))
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    try:
        plain = connect(host, port, wait)
    except OSError as error:
        return f"{nobody}, as {hindrance(error, host, port)}"
    plain.settimeout(wait)
    trusted, proxy = False, proxy_to(host)
    at = ", ".join(addresses(host, port)) if proxy is None else f"through {proxy}"
    try:
        with plain, context.wrap_socket(plain, server_hostname=host) as secure:
            trusted = True
            if not secure.recv(1):  # of gRPC's greeting; a server that refuses us hangs up here, and not before
                raise ConnectionResetError
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in DATES:
            raise ParameterError(
                f"at the server at {host}:{port} the {error.verify_message} by this machine's clock, which says "
                f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC: set the clock, or have the server's kit made again"
            ) from error
        raise ParameterError(
            f"what answers at {host}:{port} ({at}) has no certificate for {host} of this kit's root "
            f"({error.verify_message}): get the kit and the address from one federation, and have nothing between "
            "inspect TLS"
        ) from error
    except OSError as error:
        if trusted and not isinstance(error, TimeoutError):
            raise ParameterError(
                f"the server at {host}:{port} does not accept the certificate of {kits.name_of(kit)}: get a kit of its "
                "federation, or set the clocks if they differ (moretta doctor)"
            ) from error
        reason = getattr(error, "reason", None) or error.strerror or "nothing more"
        return (
            f"{nobody}, as the service there ({at}) does not greet by TLS ({reason}); check that this is the server's "
            "port"
        )
    return ""


COMMAND = 15.0  # seconds for the server to answer a command; stopping sites takes the longest


@contextlib.contextmanager
def logged_in(admin_kit: Path, wait: float = LOGIN) -> "Iterator[Administrator]":
    """Log in once for several requests: a login takes FLARE more than a second.

    Args:
        wait: Seconds for the server to answer.

    Raises:
        ParameterError: The server does not admit this administrator.
        RunFailed: The server does not answer.
    """
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    reach(admin_kit, wait)
    with _plain(admin_kit):
        session = new_secure_session(kits.name_of(admin_kit), str(admin_kit.resolve()), timeout=wait)
        session.set_timeout(COMMAND)
    try:
        yield Administrator(admin_kit, session)
    finally:
        with contextlib.suppress(Exception), _plain(admin_kit):  # the server may have just ended
            session.close()


class Administrator:
    """One login at the server of a kit."""

    def __init__(self, admin_kit: Path, session: Any) -> None:
        self._kit, self._session = admin_kit, session

    def submit(self, job: Path) -> str:
        """Submit a folder with a job to the server; return the job's id."""
        with self.asked() as session:
            return str(session.submit_job(str(job.resolve())))

    def abort(self, job: str) -> None:
        """End a job at the server and all sites; a finished one stays unchanged."""
        with self.asked() as session:
            session.abort_job(job)

    def connected(self) -> list[str]:
        """Return the names of the sites that the server has heard of within its heartbeat timeout."""
        with self.asked() as session:
            return sorted(client.name for client in session.get_connected_client_list())

    def shut_down(self) -> None:
        """End all sites and the server, whose process ends soon after."""
        with self.asked() as session:
            session.shutdown("all", wait=False)

    @contextlib.contextmanager
    def asked(self) -> Iterator[Any]:
        """Yield FLARE's session for a request. Turns FLARE's errors into one sentence of Moretta."""
        with _plain(self._kit):
            yield self._session


@contextlib.contextmanager
def _plain(admin_kit: Path) -> Iterator[None]:
    """Turn FLARE's errors into one sentence of Moretta, and hide what FLARE prints."""
    from nvflare.fuel.flare_api.api_spec import AuthenticationError, AuthorizationError, NoConnection

    host, port = kits.address_of(admin_kit)
    noise = io.StringIO()
    with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
        try:
            yield
        except (AuthenticationError, AuthorizationError) as error:
            raise ParameterError(
                f"the server at {host}:{port} does not let {kits.name_of(admin_kit)} do that: "
                "use an administrator's kit of this federation"
            ) from error
        except (NoConnection, ConnectionError, TimeoutError) as error:
            raise RunFailed(
                f"no server of this federation answers at {host}:{port}: start it, then do this again"
            ) from error
        except MorettaError:
            raise
        except Exception as error:  # FLARE raises classes of many kinds, and its own bare ones
            raise RunFailed(f"the server at {host}:{port} did not fulfil the request: {error}") from error
