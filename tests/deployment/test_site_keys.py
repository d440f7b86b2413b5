"""Keys that are made at sites: asked for, compared, signed, completed; and whatever else is sent in their place."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the engine for many machines needs nvflare")

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import AttributeOID, NameOID
from hospitals import Hospitals, wait_for
from test_cli import call
from test_join import aim, answering

from moretta.config import silo_file
from moretta.deployment import certificate_requests, checks, kits, provisioning, server_connection
from moretta.deployment.certificate_requests import read_request
from moretta.errors import ParameterError
from moretta.secure_aggregation.identity import Identity, Roster, fingerprint, public_line

NOW = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kits of two federations whose sites make their own keys, which no test changes."""
    folder = tmp_path_factory.mktemp("founded")
    provisioning.provision_authority(folder / "kits", "localhost", 8102)
    provisioning.provision_authority(folder / "others", "localhost", 8102)
    return folder


@pytest.fixture
def here(founded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may change, in which it is."""
    shutil.copytree(founded, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture(scope="module")
def key() -> rsa.RSAPrivateKey:
    return certificate_requests.new_key()


def silo(name: str = "north", more: str = "") -> Path:
    path = Path(f"{name}.toml")
    path.write_text(f'[silo]\nname = "{name}"\n{more}\n[data]\nsource = "rows.npz"\n')
    return path


def ask(name: str = "north", kit: str = "", now: datetime = NOW) -> Path:
    return certificate_requests.request(Path(kit or name), silo_file.load(silo(name)), now)[1]


def sign(request: Path, folder: str = "kits", renew: bool = False, now: datetime = NOW) -> Path:
    return certificate_requests.sign(request, Path(folder), lambda found: True, now, renew=renew)[1]


def complete(reply: Path, name: str = "north", kit: str = "") -> Path:
    folder = Path(kit or name)
    certificate_requests.complete(folder, silo_file.load(Path(f"{name}.toml")), reply, lambda found: True)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def refused(sentence: str, folder: Path | None = None) -> Iterator[None]:
    """What happens within is refused by one sentence, and leaves a folder as it was, but for a lock."""
    before = unlocked(folder)
    with pytest.raises(ParameterError, match=sentence) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert "PRIVATE" not in str(caught.value)
    assert unlocked(folder) == before


def unlocked(folder: Path | None) -> dict[str, bytes]:
    found = contents(folder) if folder else {}
    return {name: data for name, data in found.items() if not name.endswith("join.lock")}


# -- the whole way -----------------------------------------------------------------------------------------------------


def test_a_key_is_made_at_the_site_and_stays_there(here: Path) -> None:
    request = ask()
    assert sorted(path.name for path in Path("north").iterdir()) == ["client.key", "north.request"]
    private = Path("north/client.key").read_bytes()
    assert stat.S_IMODE(Path("north/client.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(Path("north").stat().st_mode) == 0o700
    sent = Path("sent.request")
    shutil.copy(request, sent)
    reply = sign(sent)
    kit = complete(reply)
    secret = private.split(b"\n")[2]  # a line of its base64
    assert not any(secret in data for data in contents(here / "kits").values())
    holders = [path for path, data in contents(here).items() if secret in data]
    assert holders == ["north/startup/client.key"]
    assert stat.S_IMODE((kit / "startup/client.key").stat().st_mode) == 0o600
    kits.check_certificates(kit)
    assert (kits.kind_of(kit), kits.name_of(kit), kits.address_of(kit)) == ("client", "north", ("localhost", 8102))
    assert kits.organisation_of(kit) == "moretta"
    assert not kits.for_trials(kit)
    allowed = json.loads((kit / "local/resources.json").read_text())["class_allow_list"]
    assert allowed == ["moretta.deployment.executor.Executor"]
    rights = json.loads((kit / "local/authorization.json").read_text())["permissions"]
    assert rights["project_admin"]["byoc"] == "none"


def test_a_certificate_says_the_name_and_nothing_that_the_site_could_choose(here: Path) -> None:
    reply = json.loads(sign(ask()).read_text())
    certificate = x509.load_pem_x509_certificate(reply["certificate"].encode())
    subject = [(each.oid, each.value) for each in certificate.subject]
    assert subject == [(NameOID.COMMON_NAME, "north"), (NameOID.ORGANIZATION_NAME, "moretta")]
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(each.value) for each in names] == ["north"]
    assert not [each for each in certificate.extensions if isinstance(each.value, x509.BasicConstraints)]
    assert certificate.not_valid_after_utc - NOW == timedelta(days=360)


def test_either_takes_the_others_certificate_and_a_further_site_needs_nothing_of_the_others(here: Path) -> None:
    first = complete(sign(ask("north")), "north")
    before = contents(first)
    with answering(Path("kits/server")) as port:
        further = complete(sign(ask("south")), "south")  # the server runs on, with the kit that it has
        assert contents(first) == before
        for kit in (first, further):
            aim(kit, port)
            server_connection.reach(kit)
        theirs = complete(sign(ask("west"), "others"), "west")
        aim(theirs, port)
        with pytest.raises(ParameterError, match="has no certificate for localhost of this kit's root"):
            server_connection.reach(theirs)
        shutil.copy(first / "startup/rootCA.pem", theirs / "startup/rootCA.pem")
        with pytest.raises(ParameterError, match="not issued by the root"):
            server_connection.reach(theirs)


def test_serve_finds_the_kits_whatever_the_sites(here: Path) -> None:
    made = provisioning.provision(here / "kits", "localhost", 8102, ["north", "south"])
    assert made.admin == here / "kits/admin"
    assert not (here / "kits/north").exists()
    shutil.rmtree(here / "kits/authority")  # which a careful operator keeps elsewhere
    provisioning.provision(here / "kits", "localhost", 8102, ["west"])
    with refused("of host localhost, port 8102 and any sites, who make their keys"):
        provisioning.provision(here / "kits", "elsewhere", 8102, ["north"])


def test_the_commands_lead_through_it(here: Path) -> None:
    made = call("kit", "new", "mine", "--host", "localhost", "--json").told
    assert made["server-key"] == fingerprint(Identity.load(here / "mine").public_key)
    asked = call("join", "north", "--silo", silo(), "--request", "--json").told
    assert asked["request"] == "north/north.request"
    words = ("kit", "sign", "north/north.request", "--kits", "mine")
    assert "set --fingerprint to the one that was read out" in call(*words).sentence
    assert "this may be another's request" in call(*words, "--fingerprint", "0000 1111").sentence
    assert not (here / "mine/north.reply").exists()
    signed = call(*words, "--fingerprint", asked["fingerprint"].upper().replace(" ", ""), "--json").told
    assert signed == {"format": 1, "name": "north", "fingerprint": asked["fingerprint"], "reply": "mine/north.reply"}
    join = ("join", "north", "--silo", silo(), "--reply", "mine/north.reply")
    assert "set --fingerprint to the one that was read out" in call(*join).sentence
    assert "this may be another's reply" in call(*join, "--fingerprint", "00").sentence
    assert not (here / "north/startup").exists()
    called = call(*join, "--fingerprint", made["server-key"])
    assert (called.code, called.err) == (0, "")
    assert called.out.startswith(f"north is complete, of the server {made['server-key']}")
    assert "holds no request of north" in call(*join, "--fingerprint", made["server-key"]).sentence
    assert "a key is never overwritten" in call("join", "north", "--silo", silo(), "--request").sentence
    assert "--request and --reply exclude each other" in call(*join, "--request").sentence
    assert checks.private_key(Path("north")) == "is closed to others"


def test_kits_for_trials_have_no_authority(here: Path) -> None:
    Path("trial").mkdir()
    Path("trial/kits.json").write_text('{"host": "localhost", "port": 8102, "sites": ["north"]}')
    with refused("has no authority to sign by", here / "trial"):
        sign(ask(), "trial")


# -- requests that are none --------------------------------------------------------------------------------------------


@dataclass
class Forged:
    """A request as somebody might build it."""

    name: str = "north"
    made: bytes | None = f"moretta-request-1 {NOW:%Y-%m-%dT%H:%M:%SZ}".encode()
    role: str = ""
    extension: x509.ExtensionType | None = None
    algorithm: type[hashes.SHA256 | hashes.SHA512] = hashes.SHA256

    def by(self, key: Any) -> bytes:
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, self.name)]
        subject += [x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, self.role)] if self.role else []
        builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(subject))
        if self.made is not None:
            builder = builder.add_attribute(AttributeOID.UNSTRUCTURED_NAME, self.made)
        if self.extension is not None:
            builder = builder.add_extension(self.extension, critical=True)
        return builder.sign(key, self.algorithm()).public_bytes(Encoding.PEM)


def test_a_plain_request_is_read(key: rsa.RSAPrivateKey) -> None:
    found = read_request(Forged().by(key), NOW)
    assert (found.name, found.made, found.key) == ("north", NOW, key.public_key())
    assert len(found.fingerprint.replace(" ", "")) == 32


@pytest.mark.parametrize(
    ("forged", "sentence"),
    [
        (Forged(name="../north"), "name is invalid"),
        (Forged(name="-rf"), "name is invalid"),
        (Forged(name="admin@moretta.org"), "name is invalid"),
        (Forged(name="north.reply"), "name is invalid"),
        (Forged(name="n" * 64), "name is invalid"),
        (Forged(name="nörth"), "name is invalid"),
        (Forged(name="north\nroot"), "name is invalid"),
        (Forged(role="project_admin"), "asks for more than a name"),
        (Forged(extension=x509.BasicConstraints(ca=True, path_length=None)), "asks for more than a name"),
        (Forged(extension=x509.SubjectAlternativeName([x509.DNSName("localhost")])), "asks for more than a name"),
        (Forged(made=None), "asks for more than a name"),
        (Forged(made=b"today"), "has no time at which it was made"),
        (Forged(made=b"moretta-request-1 2026-13-45T00:00:00Z"), "has no time at which it was made"),
        (Forged(made=b"moretta-request-1 2020-01-01T00:00:00Z"), "is valid for 14 days"),
        (Forged(made=b"moretta-request-1 2999-01-01T00:00:00Z"), "set the wrong clock"),
        (Forged(algorithm=hashes.SHA512), "not signed by its own key"),
    ],
)
def test_what_a_site_may_not_ask_for(forged: Forged, sentence: str, key: rsa.RSAPrivateKey) -> None:
    with refused(sentence):
        read_request(forged.by(key), NOW)


@pytest.mark.parametrize(
    "other",
    [
        lambda: rsa.generate_private_key(65537, 1024),
        lambda: rsa.generate_private_key(65537, 3072),
        lambda: rsa.generate_private_key(3, 2048),
        lambda: ec.generate_private_key(ec.SECP256R1()),
    ],
)
def test_keys_of_another_kind(other: Callable[[], Any]) -> None:
    with refused("expected RSA of 2048 bits"):
        read_request(Forged().by(other()), NOW)


def test_a_request_that_was_changed(key: rsa.RSAPrivateKey) -> None:
    der = x509.load_pem_x509_csr(Forged().by(key)).public_bytes(Encoding.DER)
    other = x509.load_pem_x509_csr(Forged(name="south").by(key)).public_bytes(Encoding.DER)
    for changed in (der.replace(b"north", b"south"), der[:-1] + bytes([der[-1] ^ 1]), other[:-256] + der[-256:]):
        with refused("not signed by its own key, or was changed"):
            read_request(pem(changed), NOW)


def pem(der: bytes) -> bytes:
    label = b"CERTIFICATE REQUEST-----\n"
    return b"-----BEGIN " + label + base64.encodebytes(der) + b"-----END " + label


def test_bytes_that_are_no_request(here: Path, key: rsa.RSAPrivateKey) -> None:
    ask()
    good = Forged().by(key)
    bad = [b"", b"north", good[:200], good.replace(b"REQUEST", b"THING"), Path("north/client.key").read_bytes()]
    for data in bad:
        Path("bad.request").write_bytes(data)
        with refused("expected a site's request", here / "kits"):
            sign(Path("bad.request"))
    Path("long.request").write_bytes(good + b"\n" * certificate_requests.LARGEST)
    with refused("is longer than 65536 bytes", here / "kits"):
        sign(Path("long.request"))


# -- what is signed once -----------------------------------------------------------------------------------------------


def test_a_name_is_given_once_and_a_request_is_signed_once(here: Path) -> None:
    first = ask()
    shutil.copy(first, "kept.request")
    sign(first)
    with refused("was signed before, and .* is the reply", here / "kits"):
        sign(Path("kept.request"))
    with refused("was signed before", here / "kits"):
        sign(Path("kept.request"), renew=True)
    for name in ("north", "NORTH"):
        with refused("the name north is taken", here / "kits"):
            sign(ask(name, f"again-{name}"))
    with refused("the name north is taken", here / "kits"):
        sign(Path("again-NORTH/NORTH.request"), renew=True)
    with refused("has no certificate to renew", here / "kits"):
        sign(ask("south"), renew=True)
    old = json.loads(Path("kits/north.reply").read_text())
    renewed = sign(Path("again-north/north.request"), renew=True)
    assert json.loads(renewed.read_text())["certificate"] != old["certificate"]
    kits.check_certificates(complete(renewed, "north", "again-north"))
    with refused("to another request", here / "north"):
        complete(renewed)


def test_a_key_is_signed_once(here: Path, key: rsa.RSAPrivateKey) -> None:
    Path("one").write_bytes(Forged().by(key))
    sign(Path("one"))
    Path("two").write_bytes(Forged(name="south").by(key))
    with refused("this key has a certificate already", here / "kits"):
        sign(Path("two"))


def test_names_of_the_servers_own_are_taken(here: Path, key: rsa.RSAPrivateKey) -> None:
    for name in ("server", "Admin", "localhost", "moretta"):
        Path("one").write_bytes(Forged(name=name).by(key))
        with refused("is the server's own", here / "kits"):
            sign(Path("one"))


def test_nothing_is_issued_that_was_not_compared(here: Path) -> None:
    request = ask()
    seen: list[str] = []

    def disagrees(found: certificate_requests.Request) -> bool:
        seen.append(found.fingerprint)
        return False

    with refused("not signed: the fingerprint", here / "kits"):
        certificate_requests.sign(request, Path("kits"), disagrees, NOW)
    assert seen == [read_request(request.read_bytes(), NOW).fingerprint]
    sign(request)  # which has not spent it


def test_a_request_that_waited_too_long(here: Path) -> None:
    request = ask(now=NOW - timedelta(days=15))
    with refused("is valid for 14 days", here / "kits"):
        sign(request)
    sign(ask("south", now=NOW - timedelta(days=13)))


def test_the_roots_key_is_looked_at(here: Path) -> None:
    root = here / "kits/authority/root.key"
    request = ask()
    root.chmod(0o644)
    with refused(r"is open to others \(mode 0644\); run: chmod 600", here / "kits"):
        sign(request)
    shutil.copy(here / "others/authority/root.key", root)
    root.chmod(0o600)
    with refused("is not the key of the certificate beside it", here / "kits"):
        sign(request)
    root.unlink()
    with refused("restore it from where it is kept"):
        sign(request)
    with refused("the root ended on"):
        Path("late").write_bytes(
            certificate_requests.write_request(certificate_requests.new_key(), "late", NOW + timedelta(4000))
        )
        sign(Path("late"), now=NOW + timedelta(days=4000))


def test_a_name_that_flare_cannot_take_is_told_at_the_site(here: Path) -> None:
    with refused("rename the silo, or set its engine-name"):
        certificate_requests.request(Path("kit"), silo_file.load(silo("st.mary")), NOW)
    assert not Path("kit").exists()
    mine = Identity.fresh()
    mine.save("keys")
    Path("roster.toml").write_text(
        f'[[silo]]\nname = "st.mary"\nkey = "{public_line(mine.public_key)}"\nengine-name = "site-1"\n'
    )
    assert Roster.load("roster.toml").engine_name("st.mary") == "site-1"
    file = silo_file.load(silo("st.mary", 'identity = "keys"\nroster = "roster.toml"'))
    made, path = certificate_requests.request(Path("kit"), file, NOW)
    assert (made.name, path) == ("site-1", Path("kit/site-1.request"))


# -- replies that are none ---------------------------------------------------------------------------------------------


def test_a_reply_that_was_changed(here: Path) -> None:
    reply = sign(ask())
    good = json.loads(reply.read_text())
    other = json.loads(sign(ask("north", "theirs"), "others").read_text())
    changes: list[dict[str, Any]] = [
        {"host": "evil.example.org"},
        {"port": 1},
        {"root": other["root"]},
        {"certificate": other["certificate"]},
        {"server_key": other["server_key"]},
        {"signature": other["signature"]},
        {"signature": "!"},
    ]
    for change in changes:
        reply.write_text(json.dumps(good | change))
        with refused("to another request, or was changed", here / "north"):
            complete(reply)
    shapes: list[dict[str, Any]] = [
        {"name": "../north"},
        {"port": "8102"},
        {"port": 0},
        {"host": "a b"},
        {"format": 2},
        {"more": 1},
    ]
    for change in shapes:
        reply.write_text(json.dumps(good | change))
        with refused("expected a reply", here / "north"):
            complete(reply)
    for text in ("", "{}", "[" * 60_000, "moretta"):
        reply.write_text(text)
        with refused("expected a reply", here / "north"):
            complete(reply)
    reply.write_text(" " * 70_000)
    with refused("longer than", here / "north"):
        complete(reply)


def test_a_reply_of_another_server_is_found_by_its_key(here: Path) -> None:
    """An attacker on the way has answered the request by a federation of its own."""
    reply = sign(ask(), "others")
    theirs = Identity.load(here / "others").public_key
    seen: list[bytes] = []

    def denied(found: bytes) -> bool:
        seen.append(found)
        return False

    with refused("not completed: the fingerprint", here / "north"):
        certificate_requests.complete(Path("north"), silo_file.load(silo()), reply, denied)
    assert seen == [theirs]
    line = public_line(Identity.load(here / "kits").public_key)
    pins = silo_file.load(silo(more=f'server-key = "{line}"'))
    with refused("silo.toml pins", here / "north"):
        certificate_requests.complete(
            Path("north"), pins, reply, lambda found: pytest.fail("nobody is asked where one is pinned")
        )
    shutil.copytree("north", "kept")
    certificate_requests.complete(
        Path("north"), pins, sign(Path("kept/north.request")), lambda found: pytest.fail("asked")
    )
    kits.check_certificates(Path("north"))


def test_a_server_that_signs_what_is_no_certificate_of_its_own(here: Path) -> None:
    request = ask()
    reply = certificate_requests.read_reply(sign(request).read_bytes())
    other = certificate_requests.read_reply(sign(ask("north", "theirs"), "others").read_bytes())
    digest = read_request(request.read_bytes(), NOW).digest
    mine = Identity.load(here / "kits")
    for change, sentence in (
        ({"root": other.root}, "not issued by the root"),
        ({"root": other.root, "certificate": other.certificate}, "not the key of the certificate"),
        ({"certificate": "none"}, "is not a readable certificate"),
        ({"name": "south"}, "the reply is to south"),
    ):
        Path("bad.reply").write_text(reply.model_copy(update=change).signed(mine, digest).model_dump_json())
        with refused(sentence, here / "north"):
            complete(Path("bad.reply"))


def test_a_crash_half_way_is_made_good_by_the_same_command(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = sign(ask())
    with monkeypatch.context() as patched:
        patched.setattr(
            certificate_requests, "rename", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        with pytest.raises(ParameterError, match="cannot be written to north: No space left"):
            complete(reply)
    assert not Path("north/startup").exists()
    kits.check_certificates(complete(reply))
    assert sorted(path.name for path in Path("north").iterdir()) == ["local", "readme.txt", "startup", "transfer"]


# -- with FLARE itself -------------------------------------------------------------------------------------------------


class OwnKeys(Hospitals):
    """Hospitals whose kits are made at the sites."""

    def kit(self, name: str) -> Path:
        return self.site(name) / "kit"

    def certify(self, name: str) -> None:
        """Go the whole way, by the commands."""
        silo = self.site(name) / "silo.toml"
        asked = call("join", self.kit(name), "--silo", silo, "--request", "--json").told
        kits_folder = self.server / "run-kits"
        signed = call("kit", "sign", asked["request"], "--kits", kits_folder, "--fingerprint", asked["fingerprint"])
        assert signed.code == 0, signed.err
        mine = fingerprint(Identity.load(kits_folder).public_key)
        reply = kits_folder / f"{name}.reply"
        done = call("join", self.kit(name), "--silo", silo, "--reply", reply, "--fingerprint", mine)
        assert done.code == 0, done.err


@pytest.mark.slow
def test_a_run_by_keys_of_sites_one_of_which_comes_while_the_server_waits(tmp_path: Path) -> None:
    """Over mutual TLS, in processes of their own: the last site asks for its certificate when `serve` has begun."""
    hospital = OwnKeys(tmp_path / "hospital", protocol="fedsgd", rounds=4, every=2)
    try:
        made = call("kit", "new", hospital.server / "run-kits", "--host", "localhost", "--port", hospital.port)
        assert made.code == 0, made.err
        hospital.certify("north")
        hospital.certify("south")
        hospital.serve()
        hospital.join("north")
        hospital.join("south")
        wait_for(lambda: "no certificate is signed for west yet" in hospital.said(), "serve names west", hospital.said)
        hospital.certify("west")
        hospital.join("west")
        assert hospital.ends() == 0, hospital.said()
        for name in hospital.sites:
            assert hospital.ends(name) == 0, hospital.said(name)
            assert "for trials" not in hospital.said(name)
        assert [line["round"] for line in hospital.history()] == [1, 2, 3, 4]
        assert all(not line["dropped"] for line in hospital.history())
        own = [path.read_bytes().split(b"\n")[2] for path in (tmp_path / "hospital/sites").rglob("*.key")]
        assert len(own) == 3
        assert not any(one in data for one in own for data in contents(hospital.server).values())
    finally:
        hospital.end()
