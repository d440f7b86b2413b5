"""The certificate of a site that makes its own key: its request, the server's signing of it, and its kit.

    site      moretta join KIT --silo silo.toml --request              KIT/client.key stays; NAME.request goes out
    server    moretta kit sign NAME.request --kits KITS                looks, compares, issues: NAME.reply goes back
    site      moretta join KIT --silo silo.toml --reply NAME.reply     looks, compares, completes the kit

A request is a certificate signing request (PKCS #10 in PEM): the site's name and its public key, and its time, signed
by the private key, so that its sender has that key. A reply is a JSON object: the certificate and its root, the
server's address, and the server's key with a signature by it over all of this and over the request's digest.

Neither holds a secret, and neither is trusted, because anyone could replace one. Trust comes from people who compare
fingerprints by a second way. ``docs/deploy.md`` has the ceremony, and the place of each file and key. A name is given
once, and a key and a request are signed once: KITS/authority/issued/ has each reply, by its request's digest.
"""

import base64
import binascii
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import AttributeOID, NameOID
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from moretta.config.silo_file import SiloFile
from moretta.deployment import kits, processes, provisioning
from moretta.deployment.kits import ADMIN_FOLDER, SERVER_FOLDER, SERVER_KEY, load_json
from moretta.deployment.provisioning import AUTHORITY, MANIFEST, ORGANISATION, PROJECT, ROOT, ROOT_KEY, keys_at_sites
from moretta.engines.files import check_unused, make_folder, rename, write_atomically
from moretta.engines.folder_lock import held
from moretta.errors import ParameterError
from moretta.secure_aggregation.identity import Identity, fingerprint, grouped, parse_public_line, public_line, verify

BITS, EXPONENT = 2048, 65537  # FLARE's ciphers between cells cut at the length of such a key's signatures
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")  # FLARE's names that are also folders' names and no options
LARGEST = 64 * 1024  # bytes of a request or a reply; both have about 1 and 4 KiB
LASTS, AHEAD = timedelta(days=14), timedelta(minutes=10)  # the age of a request, and the difference of clocks
_MADE = "moretta-request-1 "  # before the time, in an attribute of the request
_PURPOSE = "reply to a site's request"
_REMEDY = "have the site make one by moretta join KIT --silo silo.toml --request"


@dataclass(frozen=True)
class Request:
    """A request whose signature was checked.

    Attributes:
        name: The site's name in FLARE.
        digest: SHA-256 of the whole request, in hex.
    """

    name: str
    key: rsa.RSAPublicKey
    made: datetime
    digest: str

    @property
    def fingerprint(self) -> str:
        """The first 128 bits of the digest, in groups of four digits, to read out by telephone."""
        return grouped(self.digest)


def new_key() -> rsa.RSAPrivateKey:
    """Return a new private key of the kind that FLARE's kits have."""
    return rsa.generate_private_key(EXPONENT, BITS)


def write_request(key: rsa.RSAPrivateKey, name: str, now: datetime) -> bytes:
    """Return a request in PEM.

    Args:
        name: The site's name in FLARE.
        now: The present time, with a time zone.
    """
    made = f"{_MADE}{now.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .add_attribute(AttributeOID.UNSTRUCTURED_NAME, made.encode())
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )


def read_request(data: bytes, now: datetime) -> Request:
    """Return a received request.

    Args:
        now: The present time, with a time zone.

    Raises:
        ParameterError: The bytes are not a request of ours that its own key signed lately, with a name and a key that
            FLARE can use.
    """
    try:
        request = x509.load_pem_x509_csr(data)
        key, proven = request.public_key(), request.is_signature_valid
        attributes, extensions = list(request.attributes), list(request.extensions)
        subject = [(each.oid, str(each.value)) for each in request.subject]
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.DuplicateExtension):
        raise ParameterError(f"expected a site's request, got another file: {_REMEDY}") from None
    if not isinstance(key, rsa.RSAPublicKey) or key.key_size != BITS or key.public_numbers().e != EXPONENT:
        raise ParameterError(f"the request has another kind of key, expected RSA of {BITS} bits: {_REMEDY}")
    if not proven or not isinstance(request.signature_hash_algorithm, hashes.SHA256):
        raise ParameterError(f"the request is not signed by its own key, or was changed on its way: {_REMEDY}")
    if extensions or len(attributes) != 1 or [oid for oid, _ in subject] != [NameOID.COMMON_NAME]:
        raise ParameterError(f"the request asks for more than a name, which no site needs: {_REMEDY}")
    if not NAME.fullmatch(subject[0][1]):
        raise ParameterError(
            f"the request's name is invalid, expected up to 63 letters, digits, '-' and '_': {_REMEDY}"
        )
    try:
        text = attributes[0].value.decode() if attributes[0].oid == AttributeOID.UNSTRUCTURED_NAME else ""
        made = datetime.strptime(text, f"{_MADE}%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise ParameterError(f"the request has no time at which it was made: {_REMEDY}") from None
    if not -AHEAD < now - made < LASTS:
        raise ParameterError(
            f"the request was made on {made:%Y-%m-%d %H:%M} UTC, and is valid for {LASTS.days} days from then: "
            f"{_REMEDY}, or set the wrong clock"
        )
    return Request(subject[0][1], key, made, digest_of(data))


def digest_of(data: bytes) -> str:
    """Return SHA-256, in hex, of a request, for any line ends. Raises ParameterError for anything else."""
    try:
        return hashlib.sha256(x509.load_pem_x509_csr(data).public_bytes(Encoding.DER)).hexdigest()
    except ValueError:
        raise ParameterError(f"expected a site's request, got another file: {_REMEDY}") from None


class Reply(BaseModel):
    """The reply to a site.

    Attributes:
        certificate, root: Certificates in PEM.
        server_key: The server's public key, as a line.
        signature: The signature of the other fields, in base64.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    format: Literal[1] = 1
    name: Annotated[str, StringConstraints(pattern=rf"^{NAME.pattern}\z")]
    host: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,63}\z")]
    port: Annotated[int, Field(ge=1, le=65535)]
    certificate: str
    root: str
    server_key: str
    signature: str = ""

    def signed(self, identity: Identity, request: str) -> "Reply":
        """Return the reply to a request, by its digest, with the server's key and signature."""
        whole = self.model_copy(update={"server_key": public_line(identity.public_key)})
        signature = identity.sign(_PURPOSE, *whole._parts(request))
        return whole.model_copy(update={"signature": base64.b64encode(signature).decode()})

    def key(self, request: str) -> bytes:
        """Return the server's key that signed this reply to this request. Raises ParameterError for any other."""
        key = parse_public_line(self.server_key)
        try:
            signature = base64.b64decode(self.signature, validate=True)
        except binascii.Error:
            signature = b""
        if not verify(key, signature, _PURPOSE, *self._parts(request)):
            raise ParameterError(
                "the reply is to another request, or was changed on its way: ask the server's operator for it again"
            )
        return key

    def _parts(self, request: str) -> tuple[str | int, ...]:
        return request, self.name, self.host, self.port, self.certificate, self.root, self.server_key


def read_reply(data: bytes) -> Reply:
    """Return a received reply; `Reply.key` checks its signature. Raises ParameterError for another."""
    try:
        return Reply.model_validate_json(data)
    except ValidationError:  # which quotes its input
        raise ParameterError("expected a reply of moretta kit sign, got another file: ask for it") from None


def read_small(path: Path) -> bytes:
    """Return the content of a received file. Raises ParameterError if it is too long for its kind."""
    with path.open("rb") as stream:
        data = stream.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ParameterError(f"{path} is longer than {LARGEST} bytes, as no request and no reply is: ask for another")
    return data


def same_fingerprint(written: str, own: str) -> bool:
    """Return whether a written fingerprint is this one, with or without spaces, in any case."""
    plain = [re.sub(r"[\s:-]", "", each).lower() for each in (written, own)]
    return plain[0] == plain[1]


ISSUED = "issued"
DAYS = 360  # as FLARE's own certificates
LOCK = "sign.lock"
HELD = "another moretta kit sign, {holder}, is at work there; wait for its end"


def sign(
    path: Path, folder: Path, agrees: Callable[[Request], bool], now: datetime, *, renew: bool = False
) -> tuple[Request, Path]:
    """Issue a certificate to a site that requests one; return the request, and the file of the reply to it.

    Args:
        path: The file of the request.
        folder: The folder of the kits.
        agrees: Asks a person whether the site read out the request's fingerprint.
        now: The present time, with a time zone.
        renew: Whether a site with a certificate may have another one.

    Raises:
        ParameterError: The request is invalid, its name or key is in use, or `agrees` returns false. Nothing is issued.
    """
    processes.require()
    if not keys_at_sites(folder):
        raise ParameterError(
            f"{folder} has no authority to sign by; expected a folder of moretta kit new: the kits of moretta serve "
            "are for trials, and the key of their root is gone"
        )
    authority, manifest = folder / AUTHORITY, load_json(folder / MANIFEST)
    request = read_request(read_small(path), now)
    make_folder(authority / ISSUED, 0o700)
    with held(authority, LOCK, HELD):
        _check_free(request, str(manifest["host"]), authority / ISSUED, renew)
        if not agrees(request):
            raise ParameterError(
                "not signed: the fingerprint differs from the one that the site read out, so this may be another's "
                "request; have the site send its own again"
            )
        certificate, root = _certify(request, authority, now)
        reply = Reply(
            name=request.name,
            host=manifest["host"],
            port=manifest["port"],
            certificate=certificate,
            root=root,
            server_key="",
        ).signed(Identity.load(folder), request.digest)
        data = (reply.model_dump_json(indent=2) + "\n").encode()
        write_atomically(authority / ISSUED / request.digest, data, 0o600)  # from here on the name is in use
    write_atomically(folder / f"{request.name}.reply", data)
    return request, folder / f"{request.name}.reply"


def _check_free(request: Request, host: str, issued: Path, renew: bool) -> None:
    """Raise `moretta.errors.ParameterError` for a request, key or name that is in use, or a renewal without one."""
    if request.name.lower() in {name.lower() for name in (SERVER_FOLDER, ADMIN_FOLDER, PROJECT, "localhost", host)}:
        raise ParameterError(f"the name {request.name} is the server's own: have the site choose another")
    replies = [read_reply(path.read_bytes()) for path in sorted(issued.iterdir()) if not path.name.startswith(".")]
    if (issued / request.digest).exists():
        raise ParameterError(
            f"this request was signed before, and {issued / request.digest} is the reply to it: send that once more"
        )
    keys = [x509.load_pem_x509_certificate(each.certificate.encode()).public_key() for each in replies]
    if request.key in keys:
        raise ParameterError("this key has a certificate already, and a key is signed once: have the site make another")
    taken = [each.name for each in replies if each.name.lower() == request.name.lower()]
    if taken and (not renew or request.name not in taken):
        raise ParameterError(
            f"the name {taken[0]} is taken: have the site choose another, or, where that very site has asked for a new "
            "certificate, sign by --renew"
        )
    if renew and not taken:
        raise ParameterError(f"{request.name} has no certificate to renew: sign without --renew")


def _certify(request: Request, authority: Path, now: datetime) -> tuple[str, str]:
    """Return the certificate and its root's, in PEM. From the request it takes only the name and the key."""
    from nvflare.lighter.utils import Identity as Party
    from nvflare.lighter.utils import generate_cert

    root = x509.load_pem_x509_certificate((authority / ROOT).read_bytes())
    if now >= root.not_valid_after_utc:
        raise ParameterError(f"the root ended on {root.not_valid_after_utc:%Y-%m-%d}: make new kits by moretta kit new")
    until = min(now + timedelta(days=DAYS), root.not_valid_after_utc)
    certificate: x509.Certificate = generate_cert(
        Party(request.name, ORGANISATION),
        Party(PROJECT),
        _root_key(authority / ROOT_KEY, root),
        request.key,
        not_valid_before=now,
        not_valid_after=until,
    )
    return certificate.public_bytes(Encoding.PEM).decode(), root.public_bytes(Encoding.PEM).decode()


def _root_key(path: Path, root: x509.Certificate) -> rsa.RSAPrivateKey:
    """Return the root's private key. Raises `moretta.errors.ParameterError` if it is open to others, or another."""
    if not path.exists():
        raise ParameterError(f"{path} does not exist: restore it from where it is kept, and remove it afterwards")
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise ParameterError(
            f"{path} is open to others (mode {path.stat().st_mode & 0o777:04o}); run: chmod 600 {path}"
        )
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, rsa.RSAPrivateKey) or key.public_key() != root.public_key():
        raise ParameterError(f"{path} is not the key of the certificate beside it: restore the right one")
    return key


KEY = "client.key"


def request(kit: Path, file: SiloFile, now: datetime) -> tuple[Request, Path]:
    """Make a site's key in a new folder, and a request for a certificate; return the request and its file.

    Args:
        now: The present time, with a time zone.

    Raises:
        ParameterError: The folder holds anything, or FLARE cannot take the name.
    """
    name = file.engine_name
    if not NAME.fullmatch(name):
        raise ParameterError(
            f"the site's name in FLARE is {name!r}; expected up to 63 letters, digits, '-' and '_': rename the silo, "
            "or set its engine-name in the roster"
        )
    check_unused(kit, ", and a key is never overwritten: name a new folder")
    key = new_key()
    data = write_request(key, name, now)
    make_folder(kit, 0o700)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())  # as in FLARE's kits
    write_atomically(kit / KEY, pem, 0o600)
    write_atomically(kit / f"{name}.request", data)
    return read_request(data, now), kit / f"{name}.request"


def complete(kit: Path, file: SiloFile, path: Path, agrees: Callable[[bytes], bool]) -> str:
    """Complete the startup kit in a folder of `request`, and return the fingerprint of the server's key.

    Args:
        path: The file of the server's reply.
        agrees: Asks a person whether the operator read out this server's key, if neither silo.toml nor the roster pins
            one.

    Raises:
        ParameterError: The reply is invalid, to another request, or of another server. The folder stays unchanged.
    """
    processes.require("edge-flare" if file.silo.edge else "flare")
    name = file.engine_name
    request = kit / f"{name}.request"
    if not (kit / KEY).is_file() or not request.is_file():
        raise ParameterError(
            f"{kit} holds no request of {name}: name the folder that moretta join KIT --silo silo.toml --request made"
        )
    reply = read_reply(read_small(path))
    key = reply.key(digest_of(read_small(request)))
    if reply.name != name:
        raise ParameterError(f"the reply is to {reply.name}, and silo.toml is of {name}: ask for this site's")
    _check_server(key, file, kit, agrees)
    partial = kit / ".partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a crash
    try:
        partial.mkdir(mode=0o700)
        made = provisioning.provision_site(partial, reply.name, reply.host, reply.port)
        files = kits.certificates_of(made)
        write_atomically(files.key, (kit / KEY).read_bytes(), 0o600)
        write_atomically(files.certificate, reply.certificate.encode(), 0o600)
        write_atomically(files.root, reply.root.encode(), 0o600)
        kits.write(made / "local" / SERVER_KEY, f"{reply.server_key}\n")
        for folder in [made, *(each for each in made.rglob("*") if each.is_dir())]:
            folder.chmod(0o700)
        kits.check_certificates(made)
        for part in [each for each in made.iterdir() if each.name != "startup"]:
            shutil.rmtree(kit / part.name, ignore_errors=True)  # left by a crash
            rename(part, kit / part.name)
        rename(made / "startup", kit / "startup")  # last, as it makes the folder a kit
    except OSError as error:
        raise ParameterError(f"the kit cannot be written to {kit}: {error.strerror}; grant write permission") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    (kit / KEY).unlink()  # it is in startup/
    request.unlink()
    return fingerprint(key)


def _check_server(key: bytes, file: SiloFile, kit: Path, agrees: Callable[[bytes], bool]) -> None:
    """Raise `moretta.errors.ParameterError` unless a server's key is the expected one."""
    pinned, where = kits.pinned(file, kit / "local")
    if pinned and key not in pinned:
        raise ParameterError(
            f"the reply is signed by {fingerprint(key)}, but {where} pins {' and '.join(map(fingerprint, pinned))}: "
            "another server signed it, or the key has changed; ask the server's operator"
        )
    if not pinned and not agrees(key):
        raise ParameterError(
            "not completed: the fingerprint differs from the one that the server's operator read out, so this may be "
            "another's reply; have it sent again"
        )
