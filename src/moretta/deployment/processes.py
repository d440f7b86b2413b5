"""The parent processes of kits, started, watched and ended by us; and what an administrator asks the server."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import secrets
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from moretta.deployment import kits
from moretta.engines.files import write_atomically
from moretta.errors import MissingExtra, MorettaError, ParameterError, RunFailed

LOGIN = 10.0  # seconds in which the server is to answer an administrator
COMMAND = 15.0  # seconds in which it is to answer a command; stopping sites takes the longest
MALLOC = {"MALLOC_ARENA_MAX": "4"}  # as the start scripts of FLARE do
MARK = "MORETTA_FAMILY"  # in the environment, which job processes inherit and nothing else has
STEP = 0.05  # seconds between two looks at processes that are to end
DATES = (9, 10)  # OpenSSL's codes for a certificate that is not valid yet, or no longer
HELLO = 2  # of TLS: the kind of message by which a server begins
APART, CLOSE = 2.1, 1.5  # seconds between two looks at a server's clock, which counts whole ones; and what they allow


class Parent(subprocess.Popen[bytes]):
    """The process of a kit. family: what its environment, and that of all that it starts, is marked with."""

    family: str = ""


def require(extra: str = "flare") -> None:
    """Raise MissingExtra where FLARE is not installed; its processes would only end with a stack trace in a log.

    extra: what it comes with.
    """
    if importlib.util.find_spec("nvflare") is None:
        raise MissingExtra(f"this command needs nvflare; install it by: pip install 'moretta[{extra}]'")


def check_port(port: int) -> None:
    """Raise ParameterError where a server could not listen at a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            raise ParameterError(
                f"port {port} cannot be used ({error.strerror}); end what uses it, or choose another by --port"
            ) from None


def start(kit: Path, log: Path, env: Mapping[str, str] | None = None) -> Parent:
    """Start the server or the site of a kit; what it and its job processes print goes to the end of `log`.

    env: instead of this process's own. The process leads a session of its own, so that ^C here does not reach it.
    Raises ParameterError where FLARE would fail at the kit's certificate (`kits.check`), or is not installed.
    """
    require()
    kits.check(kit)
    kind = "server" if kits.is_server(kit) else "client"
    kit = kit.resolve()
    words = [sys.executable, "-u", "-m", f"nvflare.private.fed.app.{kind}.{kind}_train", "-m", str(kit)]
    words += ["-s", f"fed_{kind}.json", "--set", "secure_train=true"]
    # By its heartbeat the server knows that a site is there again: each 2 seconds, not 10.
    words += [f"uid={kits.name_of(kit)}", "heart_beat_interval=2"] if kind == "client" else []
    words += [f"org={kits.organisation_of(kit)}", "config_folder=config"]
    (kit / "transfer").mkdir(mode=0o700, exist_ok=True)
    family = secrets.token_hex(16)
    with log.open("ab") as sink:
        parent = Parent(
            words,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=kit,
            env={**MALLOC, **(os.environ if env is None else env), MARK: family},
            start_new_session=True,
        )
    parent.family = family
    return parent


def stop(parent: Parent, patience: float = 10.0) -> None:
    """End a process that `start` gave, and every job process that it has started; afterwards none is left.

    patience: seconds in which they may end by themselves after a SIGTERM to the parent. A job process leads a session
    of its own and looks once a second whether its parent lives.
    """
    if parent.poll() is None:
        parent.terminate()
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and (parent.poll() is None or family_of(parent)):
        time.sleep(STEP)
    _end_marked(parent.family, parent.pid)
    parent.wait()


def remember(parent: Parent, path: Path) -> None:
    """Write down a process that `start` gave, for `end_left_over`."""
    write_atomically(path, json.dumps({"pid": parent.pid, "family": parent.family}).encode(), 0o600)


def end_left_over(path: Path) -> bool:
    """End what `remember` wrote down, and all that it has started; tell whether anything of it was still there.

    For who starts after one that was killed and could not `stop`. Processes are known by the mark in their environment,
    so that one which has got the same number since is left alone. The file is gone afterwards.
    """
    try:
        left = json.loads(path.read_text())
        pid, family = int(left["pid"]), str(left["family"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    there = _marked(family)
    _end_marked(family, pid)
    path.unlink(missing_ok=True)
    return bool(there)


def family_of(parent: Parent) -> list[int]:
    """Return the ids of the processes that a parent has started, directly or not, and that have not ended."""
    return [process.pid for process in _marked(parent.family) if process.pid != parent.pid]


def _marked(family: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended, or is another user's
            if process.environ().get(MARK) == family:
                found.append(process)
    return found


def _end_marked(family: str, first: int) -> None:
    """Kill all of a family. first: the parent, which goes before the others: it would start them again."""
    while found := _marked(family):
        for process in [one for one in found if one.pid == first] or found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(STEP)


def resolve(kit: Path) -> list[str]:
    """Return the addresses of the server that a kit names. Raises RunFailed where its name means nothing here."""
    host, port = kits.address_of(kit)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise RunFailed(
            f"the name {host} of the server means nothing to this machine: look at its network, or have the name put "
            "into DNS or /etc/hosts"
        ) from None
    return sorted({str(address[0]) for *_, address in found})


def reach(kit: Path, wait: float = LOGIN, pause: float = STEP) -> None:
    """Open the connection of a site or an administrator to the server once; FLARE would try for ever and say nothing.

    wait: seconds in which the server is to answer. pause: seconds between two tries. Raises RunFailed where there is
    none, and ParameterError where the two do not take each other's certificate.
    """
    kits.check(kit)
    host, port = kits.address_of(kit)
    deadline = time.monotonic() + wait
    while not _answers(kit, host, port, max(deadline - time.monotonic(), STEP)):
        if time.monotonic() > deadline:
            raise RunFailed(f"no server of this federation answers at {host}:{port}: start it, then do this again")
        time.sleep(pause)


def clock_of_server(kit: Path, wait: float = LOGIN) -> float | None:
    """Return by how many seconds the clock of a kit's server is ahead of this machine's; None: it cannot be told.

    Up to TLS 1.2 a server may begin its random bytes with its time in whole seconds (RFC 5246, 7.4.1.2), and gRPC's
    does. What others send there, random or always the same, does not count on by the second from one connection to the
    next: so two are made.
    """
    host, port = kits.address_of(kit)
    found = []
    for pause in (0.0, APART):
        time.sleep(pause)
        try:
            with socket.create_connection((host, port), wait) as plain:
                plain.sendall(_client_hello(host))
                greeting = plain.recv(64)
        except OSError:
            return None
        if len(greeting) < 15 or greeting[0] != 22 or greeting[5] != HELLO:  # 22: a handshake, not an alert
            return None
        found.append(int.from_bytes(greeting[11:15], "big") - time.time())
    return found[1] if abs(found[1] - found[0]) < CLOSE else None


def _client_hello(host: str) -> bytes:
    """Return how a client that knows TLS 1.2 at most begins; it is not gone on with, so nobody need be trusted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    said = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said, server_hostname=host).do_handshake()
    return said.read()


def _answers(kit: Path, host: str, port: int, wait: float) -> bool:
    """Tell whether the server is there by now. Raises ParameterError where it is, and will not do."""
    files = kits.certificates_of(kit)
    context = ssl.create_default_context(cafile=str(files.root))
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    trusted = False
    try:
        with (
            socket.create_connection((host, port), wait) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            trusted = True
            if not secure.recv(1):  # of gRPC's greeting; a server that refuses us hangs up here, and not before
                raise ConnectionResetError
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in DATES:
            raise ParameterError(
                f"of the server at {host}:{port} the {error.verify_message} by this machine's clock, which says "
                f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC: set the clock, or have the server's kit made anew"
            ) from error
        raise ParameterError(
            f"what answers at {host}:{port} has no certificate for {host} of this kit's root "
            f"({error.verify_message}): get the kit and the address from one federation"
        ) from error
    except OSError as error:
        if trusted and not isinstance(error, TimeoutError):
            raise ParameterError(
                f"the server at {host}:{port} does not take the certificate of {kits.name_of(kit)}: "
                "get a kit of its federation"
            ) from error
        return False
    return True


def submit(admin_kit: Path, job: Path, wait: float = LOGIN) -> str:
    """Hand a folder that holds a job to the server; returns the job's id. wait: seconds in which the server answers."""
    with _session(admin_kit, wait) as session:
        return str(session.submit_job(str(job.resolve())))


def status(admin_kit: Path, job: str, wait: float = LOGIN) -> str:
    """Return FLARE's word for where a job is: SUBMITTED, DISPATCHED, RUNNING, or one that begins with FINISHED."""
    with _session(admin_kit, wait) as session:
        return str(session.get_job_status(job))


def abort(admin_kit: Path, job: str, wait: float = LOGIN) -> None:
    """End a job at the server and all sites; one that has ended stays as it is."""
    with _session(admin_kit, wait) as session:
        session.abort_job(job)


def connected(admin_kit: Path, wait: float = LOGIN) -> list[str]:
    """Return the names of the sites that the server counts as connected: heard of in its heartbeat timeout."""
    with _session(admin_kit, wait) as session:
        return sorted(client.name for client in session.get_connected_client_list())


def shut_down(admin_kit: Path, wait: float = LOGIN) -> None:
    """End all sites and the server; what `start` gave ends by itself soon after."""
    with _session(admin_kit, wait) as session:
        session.shutdown("all", wait=False)


@contextlib.contextmanager
def _session(admin_kit: Path, wait: float) -> Iterator[Any]:
    """Log in, and turn what FLARE raises into one sentence of ours. Nothing that FLARE prints is shown."""
    from nvflare.fuel.flare_api.api_spec import AuthenticationError, AuthorizationError, NoConnection
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    reach(admin_kit, wait)
    host, port = kits.address_of(admin_kit)
    noise, session = io.StringIO(), None
    with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
        try:
            session = new_secure_session(kits.name_of(admin_kit), str(admin_kit.resolve()), timeout=wait)
            session.set_timeout(COMMAND)
            yield session
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
            raise RunFailed(f"the server at {host}:{port} did not do what it was asked: {error}") from error
        finally:
            if session is not None:
                with contextlib.suppress(Exception):  # a server that has just ended cannot be told of it
                    session.close()
