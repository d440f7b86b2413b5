"""Startup kits: made whole or not at all, closed to others, patched once, and read back whoever made them."""

from __future__ import annotations

import ipaddress
import json
import re
import shutil
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the engine for many machines needs nvflare")

from cryptography import x509

from moretta.deployment import checks, doctor, kits, provisioning, server_connection
from moretta.errors import ParameterError, RunFailed
from moretta.secure_aggregation.identity import Identity, public_line

SITES = ["hospital-1", "Clinic_B"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> kits.Kits:
    return provisioning.provision(tmp_path_factory.mktemp("made") / "kits", "fl.example.org", 8102, SITES)


@pytest.fixture
def own(made: kits.Kits, tmp_path: Path) -> kits.Kits:
    """A copy that a test may change."""
    folder = tmp_path / "kits"
    shutil.copytree(made.server.parent, folder)
    return kits.Kits(folder / "server", {site: folder / site for site in made.sites}, folder / "admin")


def all_of(found: kits.Kits) -> list[Path]:
    return [found.server, *found.sites.values(), found.admin]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_kits_are_plain_folders_of_their_names(made: kits.Kits) -> None:
    out = made.server.parent
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["server", "admin", "kits.json", "identity.key", "identity.pub", *SITES]
    )
    assert [kits.name_of(kit) for kit in all_of(made)] == ["server", *SITES, "admin@moretta.org"]
    assert {kits.address_of(kit) for kit in all_of(made)} == {("fl.example.org", 8102)}
    assert kits.is_server(made.server)
    assert not any(kits.is_server(kit) for kit in made.sites.values())


def test_kits_with_keys_that_were_made_here_say_so(made: kits.Kits) -> None:
    assert [kits.for_trials(kit) for kit in all_of(made)] == [False, True, True, False]
    for kit in made.sites.values():
        assert "could pose as the site" in (kit / kits.TRIAL).read_text()


def test_certificates_are_of_one_root_and_the_servers_is_for_its_host(made: kits.Kits) -> None:
    for kit in all_of(made):
        found = kits.certificates_of(kit)
        certificate, root = (
            x509.load_pem_x509_certificate(path.read_bytes()) for path in (found.certificate, found.root)
        )
        certificate.verify_directly_issued_by(root)
        assert found.key.read_text().startswith("-----BEGIN RSA PRIVATE KEY-----")
        assert kits.organisation_of(kit) == "moretta"
    server = x509.load_pem_x509_certificate(kits.certificates_of(made.server).certificate.read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"fl.example.org", "localhost"}
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("127.0.0.1")]


def test_nobody_else_may_read_them_and_the_key_of_the_root_is_gone(made: kits.Kits) -> None:
    out = made.server.parent
    for path in [out, *out.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_dir():
            assert mode == 0o700
        if path.suffix == ".key":
            assert mode == 0o600
    assert not list(out.rglob("cert.json"))
    assert sum(b"PRIVATE KEY" in content for content in files(out).values()) == 4  # a party's own, each


def test_making_them_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    provisioning.provision(tmp_path / "kits", "127.0.0.1", 8102, ["a"])
    assert capfd.readouterr() == ("", "")


def test_the_same_arguments_find_the_same_kits(own: kits.Kits) -> None:
    before = files(own.server.parent)
    assert provisioning.provision(own.server.parent, "fl.example.org", 8102, SITES) == own
    assert files(own.server.parent) == before


@pytest.mark.parametrize(
    ("host", "port", "sites"),
    [("other.example.org", 8102, SITES), ("fl.example.org", 8103, SITES), ("fl.example.org", 8102, ["hospital-1"])],
)
def test_other_arguments_are_refused(own: kits.Kits, host: str, port: int, sites: list[str]) -> None:
    before = files(own.server.parent)
    with pytest.raises(ParameterError, match=r"holds the kits of host fl\.example\.org, port 8102"):
        provisioning.provision(own.server.parent, host, port, sites)
    assert files(own.server.parent) == before


def test_an_empty_folder_is_taken_and_another_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    provisioning.provision(tmp_path / "empty", "localhost", 8102, ["a"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(ParameterError, match="holds no kits of Moretta"):
        provisioning.provision(tmp_path / "full", "localhost", 8102, ["a"])
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ParameterError, match="holds no kits of Moretta"):
        provisioning.provision(tmp_path / "file", "localhost", 8102, ["a"])


@pytest.mark.parametrize(
    ("host", "port", "sites"),
    [
        ("localhost", 8102, []),
        ("localhost", 0, ["a"]),
        ("localhost", 65536, ["a"]),
        ("localhost", 8102, ["a", "a"]),
        ("localhost", 8102, ["server"]),
        ("localhost", 8102, ["admin"]),
        ("localhost", 8102, ["localhost"]),
        ("localhost", 8102, ["../a"]),
        ("localhost", 8102, ["a b"]),
        ("localhost", 8102, [""]),
        ("two words", 8102, ["a"]),
        ("fe80::1", 8102, ["a"]),
        ("h" * 65, 8102, ["a"]),
    ],
)
def test_what_flare_cannot_take_leaves_nothing_behind(tmp_path: Path, host: str, port: int, sites: list[str]) -> None:
    with pytest.raises(ParameterError):
        provisioning.provision(tmp_path / "kits", host, port, sites)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_half_way_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*words: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(provisioning, "write_atomically", fails)
    with pytest.raises(ParameterError, match="cannot be written"):
        provisioning.provision(tmp_path / "kits", "localhost", 8102, ["a"])
    assert list(tmp_path.iterdir()) == []


def test_the_server_keeps_its_jobs_in_its_kit(own: kits.Kits, made: kits.Kits) -> None:
    text = (made.server / "local" / "resources.json").read_text()
    assert "/tmp/nvflare" not in text
    assert str(made.server.resolve() / "jobs-storage") in text
    assert json.loads(text)["servers"][0]["heart_beat_timeout"] == 30
    scheduler = next(each for each in json.loads(text)["components"] if each["id"] == "job_scheduler")
    assert scheduler["args"]["min_schedule_interval"] == 1.0
    moved = own.server.parent.parent / "moved"
    old = own.server.parent / "gone"
    resources = own.server / "local" / "resources.json"
    resources.write_text(text.replace(str(made.server.resolve()), str(old)))
    own.server.rename(moved)
    assert any("kept in the kit" in sentence for sentence in provisioning.patch(moved))
    patched = (moved / "local" / "resources.json").read_text()
    assert str(moved.resolve() / "jobs-storage") in patched
    assert str(moved.resolve() / "snapshot-storage") in patched


def test_a_patch_changes_once_what_we_need(own: kits.Kits) -> None:
    for kit in [own.server, *own.sites.values()]:
        startup = files(kit / "startup")
        assert len(provisioning.patch(kit)) == (2 if kit == own.server else 3)
        before = files(kit)
        assert provisioning.patch(kit) == []
        assert files(kit) == before
        assert files(kit / "startup") == startup  # which alone a signature of FLARE's may cover
        resources = json.loads((kit / "local" / "resources.json").read_text())
        assert resources["class_allow_list"][-1] == (
            provisioning.CONTROLLER if kit == own.server else provisioning.EXECUTOR
        )
        comm = json.loads((kit / "local" / "comm_config.json").read_text())
        assert comm == {"streaming_retry_timeout": 3, "streaming_retry_wait": 1}
        launchers = [each["path"] for each in resources["components"] if each["id"] == "process_launcher"]
        ours = "moretta.engines.flare.launcher.Launcher"
        assert launchers == (
            ["nvflare.app_common.job_launcher.server_process_launcher.ServerProcessJobLauncher"]
            if kit == own.server
            else [ours]
        )


def test_jobs_may_make_one_class_at_a_site_of_ours_and_bring_no_code(own: kits.Kits) -> None:
    for kit in own.sites.values():
        provisioning.patch(kit)
        allowed = json.loads((kit / "local" / "resources.json").read_text())["class_allow_list"]
        assert allowed == [provisioning.EXECUTOR]
        rights = json.loads((kit / "local" / "authorization.json").read_text())["permissions"]
        assert {role: (given["byoc"], given["shell_commands"]) for role, given in rights.items()} == {
            "project_admin": ("none", "none")
        }


def test_a_patch_keeps_what_it_does_not_know(own: kits.Kits) -> None:
    kit = own.sites["Clinic_B"]
    default = json.loads((kit / "local" / "resources.json.default").read_text())
    default["class_allow_list"].append("theirs.")
    default["theirs"] = {"a": 1}
    (kit / "local" / "resources.json").write_text(json.dumps(default))
    (kit / "local" / "comm_config.json").write_text('{"internal": {"port": 1}, "streaming_retry_timeout": 60}')
    provisioning.patch(kit)
    resources = json.loads((kit / "local" / "resources.json").read_text())
    assert resources["theirs"] == {"a": 1}
    assert resources["class_allow_list"][-2:] == ["theirs.", provisioning.EXECUTOR]
    assert json.loads((kit / "local" / "comm_config.json").read_text()) == {
        "internal": {"port": 1},
        "streaming_retry_timeout": 3,
        "streaming_retry_wait": 1,
    }


@pytest.mark.parametrize("wide", ["moretta.", "moretta.deployment.", "moretta.deployment.serve"])
def test_a_patch_takes_back_what_else_of_ours_jobs_could_name(own: kits.Kits, wide: str) -> None:
    """A job names any callable below a prefix, with arguments; `moretta doctor` says so of a kit with one."""
    kit = own.sites["Clinic_B"]
    provisioning.patch(kit)
    resources = json.loads((kit / "local" / "resources.json").read_text())
    resources["class_allow_list"] = ["theirs.", wide, provisioning.EXECUTOR, "morettas.own"]
    (kit / "local" / "resources.json").write_text(json.dumps(resources))
    assert "lacks 1 changes, which moretta serve and join make when they start" in str(checks.patched(kit, None))
    assert len(provisioning.patch(kit)) == 1
    resources = json.loads((kit / "local" / "resources.json").read_text())
    assert resources["class_allow_list"] == ["theirs.", provisioning.EXECUTOR, "morettas.own"]


def test_a_kit_in_which_a_job_may_bring_code_or_name_any_class_is_told(own: kits.Kits) -> None:
    kit = own.sites["Clinic_B"]
    local, policy = kit / "local", checks.policy
    assert policy(kit) == "lets nobody bring code"
    resources = json.loads((local / "resources.json").read_text())
    for opened in ({"class_allow_list": ["*"]}, {"class_list_enforcement_mode": "warn"}):
        (local / "resources.json").write_text(json.dumps(resources | opened))
        assert "a job may name any class;" in policy(kit)
    (local / "resources.json").write_text(json.dumps(resources | {"class_allow_list": None}))
    assert policy(kit) == "lets nobody bring code"
    (local / "authorization.json").unlink()  # FLARE's own counts then
    assert "project_admin, lead may bring code in a job" in policy(kit)
    (local / "authorization.json.default").unlink()
    assert "everybody may bring code" in policy(kit)
    for rights in ("none", {"submit_job": "any"}, {"byoc": "none"}):
        (local / "authorization.json").write_text(json.dumps({"permissions": {"lead": rights}}))
        assert "may bring code" not in policy(kit)


def test_a_site_that_allows_everything_is_left_so(own: kits.Kits) -> None:
    kit = own.sites["Clinic_B"]
    resources = json.loads((kit / "local" / "resources.json.default").read_text()) | {"class_allow_list": ["*"]}
    (kit / "local" / "resources.json").write_text(json.dumps(resources))
    provisioning.patch(kit)
    assert json.loads((kit / "local" / "resources.json").read_text())["class_allow_list"] == ["*"]


def test_a_launcher_of_another_kind_is_refused(own: kits.Kits) -> None:
    kit = own.sites["Clinic_B"]
    text = (kit / "local" / "resources.json.default").read_text()
    (kit / "local" / "resources.json").write_text(text.replace(provisioning.STOCK_LAUNCHER, "theirs.Docker"))
    before = files(kit)
    with pytest.raises(ParameterError, match=r"theirs\.Docker"):
        provisioning.patch(kit)
    assert files(kit) == before


def test_the_silo_is_written_down_for_job_processes(own: kits.Kits, tmp_path: Path) -> None:
    kit = own.sites["hospital-1"]
    provisioning.patch(kit)
    assert len(provisioning.patch(kit, tmp_path / "x" / ".." / "silo")) == 1
    assert json.loads((kit / "local" / "moretta.json").read_text()) == {"silo": str(tmp_path.resolve() / "silo")}
    assert provisioning.patch(kit, tmp_path / "silo") == []
    assert len(provisioning.patch(kit, tmp_path / "other")) == 1
    with pytest.raises(ParameterError, match="takes no silo"):
        provisioning.patch(own.server, tmp_path / "silo")


def test_the_servers_key_is_beside_the_kits_and_its_public_half_in_those_of_sites(made: kits.Kits) -> None:
    out = made.server.parent
    identity = Identity.load(out)
    assert (out / "identity.key").stat().st_mode & 0o777 == 0o600
    private = (out / "identity.key").read_bytes().split()[1]
    assert not any(private in data for kit in all_of(made) for data in files(kit).values())
    line = f"{public_line(identity.public_key)}\n".encode()
    for kit in all_of(made):
        found = [path for path, data in files(kit).items() if line.strip() in data]
        assert found == ([f"local/{kits.SERVER_KEY}"] if kit in made.sites.values() else [])
    assert kits.server_keys(made.sites["hospital-1"] / "local") == (identity.public_key,)
    assert kits.identity_of(made.server / "local").public_key == identity.public_key


def test_kits_of_a_version_without_keys_get_one(own: kits.Kits) -> None:
    out = own.server.parent
    for path in (out / "identity.key", *out.glob(f"*/local/{kits.SERVER_KEY}")):
        path.unlink()
    shutil.rmtree(own.sites["Clinic_B"])  # handed over, and deleted here
    assert kits.server_keys(own.sites["hospital-1"] / "local") == ()
    with pytest.raises(ParameterError, match="does not name the server's key; run: moretta keys new"):
        kits.identity_of(own.server / "local")
    provisioning.provision(out, "fl.example.org", 8102, SITES)
    identity = Identity.load(out)
    assert kits.server_keys(own.sites["hospital-1"] / "local") == (identity.public_key,)
    assert not own.sites["Clinic_B"].exists()
    provisioning.provision(out, "fl.example.org", 8102, SITES)
    assert Identity.load(out).public_key == identity.public_key


def test_a_server_key_is_written_down_once(own: kits.Kits, tmp_path: Path) -> None:
    kit, first, second = own.sites["hospital-1"], Identity.fresh(), Identity.fresh()
    first.save(tmp_path / "first")
    second.save(tmp_path / "second")
    provisioning.patch(kit)
    lines = [public_line(first.public_key), str(tmp_path / "second" / "identity.pub")]
    assert len(provisioning.patch(kit, None, lines)) == 1
    assert provisioning.patch(kit, None, lines) == provisioning.patch(kit) == []
    assert kits.server_keys(kit / "local") == (first.public_key, second.public_key)
    for bad, sentence in (
        ([*lines, public_line(Identity.fresh().public_key)], "expected one public key of the server, or two"),
        ([lines[0], lines[0]], "two different ones"),
        (["moretta-public-1 x"], "expected `moretta-public-1` and 32 bytes of Ed25519"),
    ):
        with pytest.raises(ParameterError, match=sentence):
            provisioning.patch(kit, None, bad)
    provisioning.patch(own.server)
    assert len(provisioning.patch(own.server, None, [str(tmp_path / "second")])) == 1
    assert kits.identity_of(own.server / "local").public_key == second.public_key
    assert provisioning.patch(own.server, None, [str(tmp_path / "second")]) == []
    for bad, sentence in ((["x", "y"], "a server signs by one key"), (["none"], "cannot be read")):
        with pytest.raises(ParameterError, match=sentence):
            provisioning.patch(own.server, None, bad)
    (kit / "local" / kits.SERVER_KEY).write_text("moretta-public-1 damaged\n")
    with pytest.raises(ParameterError, match="does not hold the server's public key"):
        kits.server_keys(kit / "local")


def test_what_is_no_kit_is_refused(own: kits.Kits, tmp_path: Path) -> None:
    for read in (provisioning.patch, kits.is_server, kits.name_of, kits.address_of, kits.certificates_of):
        with pytest.raises(ParameterError, match="is not a startup kit of FLARE"):
            read(tmp_path / "nothing")
    for read in (provisioning.patch, kits.is_server):
        with pytest.raises(ParameterError, match="administrator's"):
            read(own.admin)
    (own.server / "local" / "resources.json").write_text("{")
    with pytest.raises(ParameterError, match="readable JSON"):
        provisioning.patch(own.server)
    for file in ("resources.json", "resources.json.default"):
        (own.server / "local" / file).unlink()
    with pytest.raises(ParameterError, match=r"has neither resources\.json nor"):
        provisioning.patch(own.server)


@pytest.mark.parametrize(("before", "after", "said"), [
    ('"target": "fl.example.org:', '"was": "fl.example.org:', r"service\.target: it is damaged, or of another"),
    ('"target": "fl.example.org:', '"target": "fl.example.org-', "expected HOST:PORT"),
    ('"servers": [', '"server": [', r"has no servers\.0\.service\.target"),
    ('"ssl_root_cert"', '"root_cert"', r"has no client\.ssl_root_cert"),
    ('"client": {', '"site": {', r"has no client\."),
])  # fmt: skip
def test_a_kit_of_another_form_is_told(own: kits.Kits, before: str, after: str, said: str) -> None:
    """A site's kit of FLARE 2.6 names no target; doctor and join ended with a traceback."""
    (path := own.sites["Clinic_B"] / "startup" / kits.KINDS["client"]).write_text(
        path.read_text().replace(before, after)
    )
    found = doctor.examine(kit=own.sites["Clinic_B"], silo=None, run=None)
    assert any(not one.passes and re.search(said, one.sentence) for one in found)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> kits.Kits:
    return provisioning.provision(tmp_path_factory.mktemp("others") / "kits", "fl.example.org", 8102, SITES)


def put(source: Path, target: Path, *names: str) -> None:
    for name in names:
        shutil.copy(source / "startup" / name, target / "startup" / name)


def test_a_good_kit_is_found_good(made: kits.Kits) -> None:
    for kit in all_of(made):
        kits.check_certificates(kit)


@pytest.mark.parametrize("days", [-2, 361])
def test_a_certificate_of_another_time_is_found(made: kits.Kits, days: int) -> None:
    with pytest.raises(
        ParameterError, match=r"a certificate of .*, but this machine's clock says|a certificate of .* ended at"
    ):
        kits.check_certificates(made.sites["Clinic_B"], datetime.now(UTC) + timedelta(days=days))


def test_what_does_not_belong_together_is_found(own: kits.Kits, others: kits.Kits) -> None:
    kit, theirs, neighbour = own.sites["Clinic_B"], others.sites["Clinic_B"], own.sites["hospital-1"]
    put(theirs, kit, "rootCA.pem")
    with pytest.raises(ParameterError, match="not issued by the root"):
        kits.check_certificates(kit)
    put(own.server, kit, "rootCA.pem")
    put(theirs, kit, "client.key")
    with pytest.raises(ParameterError, match="not the key of the certificate"):
        kits.check_certificates(kit)
    put(neighbour, kit, "client.key", "client.crt")
    with pytest.raises(ParameterError, match="is for Clinic_B, and its certificate for hospital-1"):
        kits.check_certificates(kit)
    (kit / "startup" / "client.key").write_text("nothing")
    with pytest.raises(ParameterError, match="private key without a password") as caught:
        kits.check_certificates(kit)
    assert "nothing" not in str(caught.value)
    (kit / "startup" / "client.crt").write_text("nothing")
    with pytest.raises(ParameterError, match="is not a readable certificate"):
        kits.check_certificates(kit)


@pytest.fixture
def answering() -> Iterator[Callable[[Path], int]]:
    """Give what answers with a server's certificate, and asks for one of its root, at a port of this machine."""
    sockets, threads = [], []

    def serve(kit: Path) -> int:
        files = kits.certificates_of(kit)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        context.load_verify_locations(files.root)
        context.verify_mode = ssl.CERT_REQUIRED
        listening = socket.create_server(("127.0.0.1", 0))

        def answer() -> None:
            try:
                with listening.accept()[0] as plain, context.wrap_socket(plain, server_side=True) as secure:
                    secure.sendall(b"hello")
                    secure.recv(1)
            except OSError:  # what the other side is to find out
                pass

        threads.append(threading.Thread(target=answer))
        threads[-1].start()
        sockets.append(listening)
        return int(listening.getsockname()[1])

    yield serve
    for listening, thread in zip(sockets, threads, strict=True):
        listening.close()
        thread.join(10)


def aimed(kit: Path, host: str, port: int) -> Path:
    file = kit / "startup" / "fed_client.json"
    startup = json.loads(file.read_text())
    startup["servers"][0]["service"]["target"] = f"{host}:{port}"
    file.write_text(json.dumps(startup))
    return kit


def test_a_server_is_reached(own: kits.Kits, answering: Callable[[Path], int]) -> None:
    server_connection.reach(aimed(own.sites["Clinic_B"], "localhost", answering(own.server)))


def test_a_refused_certificate_is_told(own: kits.Kits, others: kits.Kits, answering: Callable[[Path], int]) -> None:
    kit = own.sites["Clinic_B"]
    aimed(kit, "localhost", answering(others.server))
    with pytest.raises(ParameterError, match="has no certificate for localhost of this kit's root"):
        server_connection.reach(kit)
    put(others.server, own.server, "rootCA.pem")  # a server that has changed its root, and not its certificate
    aimed(kit, "localhost", answering(own.server))
    with pytest.raises(ParameterError, match="does not accept the certificate of Clinic_B"):
        server_connection.reach(kit)


def test_another_host_and_nobody_are_told(
    own: kits.Kits, answering: Callable[[Path], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = own.sites["Clinic_B"]
    port = answering(own.server)
    there = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda address, wait: there(("127.0.0.1", address[1]), wait))
    with pytest.raises(ParameterError, match=r"no certificate for elsewhere\.example\.org"):
        server_connection.reach(aimed(kit, "elsewhere.example.org", port))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(RunFailed, match="no server of this federation answers"):
            server_connection.reach(aimed(kit, "localhost", closed.getsockname()[1]), 0.1)
