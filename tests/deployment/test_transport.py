"""The way to the server as FLARE goes it: proxies, names, ports, certificates and clocks, each named within seconds."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the engine for many machines needs nvflare")

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from one_site import aim, answering, free_port, make
from proxies import filtered, proxy, silent
from test_cli import Called, call

from moretta.deployment import checks, kits, processes, provisioning, server_connection
from moretta.deployment import join as joining
from moretta.errors import ParameterError, RunFailed

DAY = timedelta(days=1)
NOWHERE = "no-such-host.invalid"
ELSEWHERE = "192.0.2.1"  # no machine has it (RFC 5737)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kits, a run file and a site's folder, which no test changes; and kits whose root can sign more, in signed/."""
    folder = make(tmp_path_factory.mktemp("made"))
    provisioning.provision_authority(folder / "signed", "localhost", 8102)
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the same that a test may change; nothing of FLARE is started, and no proxy is set.

    A server's clock is looked at twice at once: what clocks say is for test_doctor.py.
    """
    folder = tmp_path / "here"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(processes, "start", lambda *given: pytest.fail("FLARE was started"))
    monkeypatch.setattr(joining, "LOOK", 0.02)
    monkeypatch.setattr(server_connection, "APART", 0.0)
    for name in (*server_connection.PROXIES, *server_connection.SPARED, *server_connection.UNREAD):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def serving(here: Path) -> Iterator[int]:
    """A server that answers as FLARE's, at which the site's kit is aimed."""
    with answering(here / "kits/server") as port:
        aim(here / "kits/north", port)
        yield port


def doctor(kit: str = "kits/north") -> dict[str, str]:
    """Return the lines of `moretta doctor` by what they are about, without their first five letters."""
    lines = call("doctor", "--kit", kit, "--silo", "silo.toml").out.splitlines() if "north" in kit else []
    lines = lines or call("doctor", "--kit", kit).out.splitlines()
    return {line[5:].partition(": ")[0]: line[:5].strip() + " " + line[5:].partition(": ")[2] for line in lines}


def join() -> Called:
    return call("join", "kits/north", "--silo", "silo.toml")


def serve(host: str, *more: object) -> Called:
    return call("serve", "run.toml", "--out", "out", "--host", host, "--port", free_port(), *more)


# -- which proxy gRPC takes --------------------------------------------------------------------------------------------

PROXY = "http://127.0.0.1:PORT"
HOST = "fl.example"
CHOSEN: list[tuple[dict[str, str], str]] = [
    ({}, HOST),
    *(({name: PROXY}, HOST) for name in (*server_connection.PROXIES, *server_connection.UNREAD)),
    ({"grpc_proxy": PROXY, "https_proxy": "http://127.0.0.1:9"}, HOST),
    ({"https_proxy": "http://127.0.0.1:9", "http_proxy": PROXY}, HOST),
    ({"https_proxy": "", "http_proxy": PROXY}, HOST),
    *(({"https_proxy": url}, HOST) for url in ("127.0.0.1:PORT", "localhost:PORT", f"{PROXY}/", f"{PROXY}/a?b")),
    *(({"https_proxy": f"{scheme}://127.0.0.1:PORT"}, HOST) for scheme in ("HTTP", "https", "socks5")),
    ({"https_proxy": "http://somebody:p%40ss@127.0.0.1:PORT"}, HOST),
    *(({"https_proxy": PROXY, "no_proxy": listed}, HOST) for listed in (HOST, ".example", "example", "FL.EXAMPLE")),
    *(({"https_proxy": PROXY, "no_proxy": listed}, HOST) for listed in ("*", "*.example", "", " ", f"{HOST}:8002")),
    *(({"https_proxy": PROXY, "no_proxy": listed}, HOST) for listed in ("a, fl.example ,b", "a,,b", "127.0.0.0/8")),
    ({"https_proxy": PROXY, "NO_PROXY": HOST}, HOST),
    ({"https_proxy": PROXY, "no_grpc_proxy": HOST, "no_proxy": ""}, HOST),
    ({"https_proxy": PROXY, "no_grpc_proxy": "", "no_proxy": HOST}, HOST),
    ({"https_proxy": PROXY}, "127.0.0.1"),
    ({"https_proxy": PROXY}, "localhost"),
    *(({"https_proxy": PROXY, "no_proxy": listed}, "127.0.0.1") for listed in ("127.0.0.0/8", "10.0.0.0/8", "0.1")),
]


@pytest.mark.parametrize(("environment", "host"), CHOSEN)
def test_the_proxy_is_the_one_that_grpc_takes(
    environment: dict[str, str], host: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import grpc

    with proxy("403 Forbidden") as found:
        for name, value in environment.items():
            monkeypatch.setenv(name, value.replace("PORT", str(found.port)))
        chosen = server_connection.proxy_to(host)
        with grpc.secure_channel(f"{host}:1", grpc.ssl_channel_credentials()) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/of/none")(b"", timeout=60)
        assert (chosen is not None and chosen.port == found.port) == bool(found.asked)
        if found.asked:
            head = found.asked[0]
            with pytest.raises(OSError, match="403 Forbidden"):
                server_connection.connect(host, 1, 60)
            assert found.asked[-1].split("\r\n")[0].startswith(f"CONNECT {host}:1 HTTP/1.")
            told = [{line for line in each.split("\r\n") if "Auth" in line} for each in (head, found.asked[-1])]
            assert told[0] == told[1]
            assert "ss" not in f"{chosen!r}{chosen}"


# -- proxies that are in the way, and that are the way -----------------------------------------------------------------


@pytest.mark.parametrize("name", server_connection.PROXIES)
@pytest.mark.parametrize("kind", ["closed", "403 Forbidden", "407 Proxy Authentication Required", "502 Bad Gateway"])
def test_a_proxy_that_keeps_a_site_out_is_named_and_the_remedy_works(
    name: str, kind: str, serving: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        port = free_port() if kind == "closed" else stack.enter_context(proxy(kind)).port
        monkeypatch.setenv(name, f"http://somebody:secret@127.0.0.1:{port}")
        server, joined = doctor()["server"], join()
        for said in (server.removeprefix("FAIL "), joined.err.splitlines()[-1].removeprefix("moretta: ")):
            assert said.startswith(f"gRPC, FLARE's transport, goes through the proxy 127.0.0.1:{port} ({name}), which ")
            assert ("refuses the connection" if kind == "closed" else f"answers '{kind}'") in said
            assert said.endswith(f"localhost:{serving} is reached without it: set no_proxy=localhost")
        assert joined.code == 2
        assert "secret" not in server + joined.err
        monkeypatch.setenv("no_proxy", "localhost")
        assert doctor()["server"].startswith(f"ok answers at localhost:{serving}, and both")


@pytest.mark.parametrize("listed", ["*", "other.example", ""])
def test_a_list_that_does_not_spare_the_server_is_named(
    listed: str, serving: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("no_proxy", listed)
    assert "add localhost to no_proxy (gRPC accepts names, endings and ranges, but no *)" in doctor()["server"]
    monkeypatch.setenv("no_proxy", f"{listed},localhost")
    assert doctor()["server"].startswith("ok ")


@pytest.mark.parametrize("name", server_connection.UNREAD)
def test_a_proxy_that_grpc_does_not_take_is_named_only_where_nothing_answers(
    name: str, here: Path, serving: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    assert doctor()["server"].startswith("ok ")
    aim(here / "kits/north", free_port())
    sentence = doctor()["server"]
    assert sentence.startswith("FAIL no server of this federation answers at localhost:")
    assert sentence.endswith(f"set https_proxy=http://HOST:PORT for gRPC, which ignores {name}")


def test_where_the_proxy_is_the_only_way_it_is_gone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a name that only the proxy can find, as in networks whose DNS knows nothing outside."""
    provisioning.provision(here / "far", NOWHERE, 8102, ["north"])
    with answering(here / "far/server") as port, proxy(leads_to=port) as way:
        monkeypatch.setenv("https_proxy", way.url)
        found = doctor("far/north")
        assert found["server's name"] == f"ok is left to the proxy 127.0.0.1:{way.port} (https_proxy), at 127.0.0.1"
        assert found["server"].startswith(f"ok answers at {NOWHERE}:8102 through the proxy 127.0.0.1:{way.port} (")
        assert "by its greeting" in found["clock"]
        server_connection.reach_by_grpc(here / "far/north")
        assert {head.split()[1] for head in way.asked} == {f"{NOWHERE}:8102"}
    with proxy("403 Forbidden") as way:
        monkeypatch.setenv("https_proxy", way.url)
        with pytest.raises(RunFailed, match=f"'403 Forbidden': have it let {NOWHERE}:8102 pass, or, if"):
            server_connection.reach_by_grpc(here / "far/north")
    monkeypatch.setenv("https_proxy", f"http://{NOWHERE}:1")
    assert f"the name {NOWHERE} of the proxy {NOWHERE}:1 (https_proxy) does not resolve" in doctor()["server's name"]


def test_a_proxy_that_opens_tls_is_told_from_the_server(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(here / "others/server") as port, proxy(leads_to=port) as way:
        monkeypatch.setenv("https_proxy", way.url)
        sentence = doctor()["server"]
    assert f"(through the proxy 127.0.0.1:{way.port} (https_proxy)) has no certificate for localhost" in sentence
    assert sentence.endswith("have nothing between inspect TLS")


@pytest.mark.slow
def test_a_run_goes_through_a_proxy(tmp_path: Path) -> None:
    """With FLARE itself: three sites that reach the server by HTTP CONNECT alone."""
    from hospitals import Hospitals

    with proxy() as way:
        hospital = Hospitals(tmp_path / "hospitals", protocol="fedsgd", rounds=5)
        try:
            hospital.serve()
            for name in hospital.sites:
                hospital.join(name, {"https_proxy": way.url})
            assert hospital.ends() == 0, hospital.said()
            for name in hospital.sites:
                assert hospital.ends(name) == 0, hospital.said(name)
        finally:
            hospital.end()
    assert not any(line["dropped"] for line in hospital.history())
    assert {head.split()[1] for head in way.asked} == {f"localhost:{hospital.port}"}


# -- the server's own name ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [NOWHERE, ELSEWHERE])
def test_a_server_that_does_not_reach_itself_says_so_at_once(
    host: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_connection, "WAIT", 1.0)
    called = serve(host)
    assert called.code == 2
    sentence = called.err.splitlines()[-1]
    assert f"this machine does not reach itself at {host}:" in sentence
    assert ("does not resolve on this machine" if host == NOWHERE else f"{host} ({host}) ") in sentence
    assert sentence.endswith(
        f"add the line `127.0.0.1 {host}` to /etc/hosts here, or give --host a name or address of this machine"
    )
    aim(here / "kits/server", free_port(), host)
    assert doctor("kits/server")["server's name"].startswith(f"FAIL this machine does not reach itself at {host}:")


def test_a_name_that_leads_from_the_server_to_another_machine(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    aim(here / "kits/server", port)
    monkeypatch.setattr(server_connection, "answering", lambda kit: contextlib.nullcontext())
    with pytest.raises(ParameterError, match=r"\(no server .*127\.0\.0\.1.*\) refuses the connection\): add the line"):
        server_connection.own_address(here / "kits/server")
    with answering(here / "others/server", port), pytest.raises(ParameterError, match="has no certificate for"):
        server_connection.own_address(here / "kits/server")


def test_a_server_with_a_proxy_to_itself(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{free_port()}")
    called = serve("localhost")
    assert called.code == 2
    assert "(https_proxy), which refuses the connection" in called.err
    assert called.err.rstrip().endswith(": set no_proxy=localhost")


def test_a_server_reaches_itself_whether_it_runs_or_not(here: Path) -> None:
    port = free_port()
    aim(here / "kits/server", port)
    assert doctor("kits/server")["server's name"].startswith("ok this machine reaches itself at localhost:")
    server_connection.check_port(port)  # which is free again
    with answering(here / "kits/server", port):
        assert doctor("kits/server")["server's name"].startswith("ok this machine reaches itself at localhost:")


# -- names and ports at a site -----------------------------------------------------------------------------------------


def test_a_name_that_nobody_tells_in_time(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "WAIT", 0.1)
    released, began = threading.Event(), time.monotonic()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: released.wait(60) and ())
    with pytest.raises(RunFailed, match="the name localhost of the server does not resolve on this machine"):
        server_connection.reach_by_grpc(here / "kits/north")
    assert time.monotonic() - began < 30
    released.set()


def test_ports_that_are_closed_filtered_silent_or_of_others(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "WAIT", 0.5)
    monkeypatch.setattr(checks, "WAIT", 0.5)
    kit = here / "kits/north"
    aim(kit, port := free_port(), "127.0.0.1")
    nobody = f"FAIL no server of this federation answers at 127.0.0.1:{port}, as 127.0.0.1 (127.0.0.1) "
    assert doctor()["server"] == (
        f"{nobody}refuses the connection: have it started there (moretta serve), and let a firewall pass that port"
    )
    with filtered() as port:
        aim(kit, port, "127.0.0.1")
        assert "127.0.0.1 (127.0.0.1) does not answer: have it started there" in doctor()["server"]
    with silent() as port:
        aim(kit, port, "127.0.0.1")
        assert "as the service there (127.0.0.1) does not greet by TLS" in doctor()["server"]
    with answering(here / "others/server") as port:  # the name leads to another machine of the kind
        aim(kit, port, "127.0.0.1")
        assert f"what answers at 127.0.0.1:{port} (127.0.0.1) has no certificate" in doctor()["server"]


def test_what_sockets_reach_and_grpc_does_not_is_told(
    here: Path, serving: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_connection, "proxy_to", lambda host: None)  # as if by a rule that is not ours
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(RunFailed, match=r"answers, but not to gRPC, FLARE's transport .*127\.0\.0\.1"):
        server_connection.reach_by_grpc(here / "kits/north")


# -- certificates and clocks -------------------------------------------------------------------------------------------


def dated(here: Path, kit: str, begins: datetime, ends: datetime) -> Path:
    """Sign a kit's certificate again, with other dates."""
    files = kits.certificates_of(here / "signed" / kit)
    old = x509.load_pem_x509_certificates(files.certificate.read_bytes())[0]
    made = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), old.serial_number, begins, ends)
    for each in old.extensions:
        made = made.add_extension(each.value, each.critical)
    key = load_pem_private_key((here / "signed/authority/root.key").read_bytes(), None)
    assert isinstance(key, RSAPrivateKey)
    files.certificate.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    return here / "signed" / kit


@pytest.mark.parametrize(("begins", "ends", "says"), [(-3, -1, "has expired"), (1, 3, "is not yet valid")])
def test_a_certificate_outside_of_its_dates_is_named_on_either_side(
    begins: int, ends: int, says: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    admin, server, ports = here / "signed/admin", here / "signed/server", list[int]()
    monkeypatch.setattr(kits, "address_of", lambda kit: ("localhost", ports[-1]))
    valid = kits.check_certificates
    monkeypatch.setattr(kits, "check_certificates", lambda kit, now=None: None)  # as by a clock that says another day
    with answering(server) as port:
        ports.append(port)
        dated(here, "admin", now + begins * DAY, now + ends * DAY)
        with pytest.raises(ParameterError, match=r"does not accept the certificate of .* set the clocks"):
            server_connection.reach_by_grpc(admin)
    dated(here, "admin", now - DAY, now + DAY)
    dated(here, "server", now + begins * DAY, now + ends * DAY)
    with answering(server) as port:
        ports.append(port)
        with pytest.raises(ParameterError, match=f"{says} by this machine's clock, which says"):
            server_connection.reach_by_grpc(admin)
    monkeypatch.setattr(kits, "check_certificates", valid)
    with pytest.raises(ParameterError, match=r"a certificate of .* (valid|ended)"):
        server_connection.own_address(server)
