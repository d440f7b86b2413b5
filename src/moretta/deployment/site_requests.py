"""What travels where a site makes its own key: its request for a certificate, and the server's reply.

    site      moretta join KIT --silo silo.toml --request              KIT/client.key stays; NAME.request goes out
    server    moretta kit sign NAME.request --kits KITS                looks, compares, issues: NAME.reply goes back
    site      moretta join KIT --silo silo.toml --reply NAME.reply     looks, compares, completes the kit

A request is a certificate signing request (PKCS #10 in PEM): the site's name and its public key, and when it was made,
signed by the private key, so that whoever sent it has that key. A reply is a JSON object: the certificate and its root,
the server's address, and the server's key with a signature by it over all of this and over the request's digest.

Nothing in either is secret and neither is trusted, as anybody could have put another in its place. What makes them good
is that people compare a fingerprint by a second way: the operator that of the request, with the site; the site that of
the server's key, with the operator, unless it has pinned that key before.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import AttributeOID, NameOID
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from moretta.errors import ParameterError
from moretta.secure_aggregation.identity import Identity, parse_public_line, public_line, verify

BITS, EXPONENT = 2048, 65537  # FLARE's ciphers between cells cut at the length of such a key's signatures
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")  # of what FLARE takes, what is a folder's name too and no option
LARGEST = 64 * 1024  # bytes of a request or a reply; both have about 1 and 4 KiB
LASTS, AHEAD = timedelta(days=14), timedelta(minutes=10)  # how old a request may be, and clocks apart
_MADE = "moretta-request-1 "  # before the time, in an attribute of the request
_PURPOSE = "reply to a site's request"
_REMEDY = "have the site make one by moretta join KIT --silo silo.toml --request"


@dataclass(frozen=True)
class Request:
    """A request whose signature was checked. name: of the site, in FLARE. digest: SHA-256 of all of it, in hex."""

    name: str
    key: rsa.RSAPublicKey
    made: datetime
    digest: str

    @property
    def fingerprint(self) -> str:
        """The first 128 bits of the digest, in groups of four digits, to read out by telephone."""
        return " ".join(self.digest[place : place + 4] for place in range(0, 32, 4))


def new_key() -> rsa.RSAPrivateKey:
    """Return a new private key of the kind that FLARE's kits have."""
    return rsa.generate_private_key(EXPONENT, BITS)


def write_request(key: rsa.RSAPrivateKey, name: str, now: datetime) -> bytes:
    """Return a request in PEM. name: of the site, in FLARE. now: with a time zone."""
    made = f"{_MADE}{now.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .add_attribute(AttributeOID.UNSTRUCTURED_NAME, made.encode())
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )


def read_request(data: bytes, now: datetime) -> Request:
    """Return a request that somebody sent. now: with a time zone.

    Raises `moretta.errors.ParameterError` for what is no request of ours, is not signed by its own key, has a key that
    FLARE cannot use, a name that is none, or another time.
    """
    try:
        found = x509.load_pem_x509_csr(data)
        key, proven = found.public_key(), found.is_signature_valid
        attributes, extensions = list(found.attributes), list(found.extensions)
        subject = [(each.oid, str(each.value)) for each in found.subject]
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.DuplicateExtension):
        raise ParameterError(f"this was expected to be a site's request, and is none: {_REMEDY}") from None
    if not isinstance(key, rsa.RSAPublicKey) or key.key_size != BITS or key.public_numbers().e != EXPONENT:
        raise ParameterError(f"the request's key was expected to be RSA of {BITS} bits, and is another: {_REMEDY}")
    if not proven or not isinstance(found.signature_hash_algorithm, hashes.SHA256):
        raise ParameterError(f"the request is not signed by its own key, or was changed on its way: {_REMEDY}")
    if extensions or len(attributes) != 1 or [oid for oid, _ in subject] != [NameOID.COMMON_NAME]:
        raise ParameterError(f"the request asks for more than a name, which no site needs: {_REMEDY}")
    if not NAME.fullmatch(subject[0][1]):
        raise ParameterError(f"the request's name was expected to be up to 63 letters, digits, '-' and '_': {_REMEDY}")
    made = _time_in(attributes[0])
    if not -AHEAD < now - made < LASTS:
        raise ParameterError(
            f"the request was made on {made:%Y-%m-%d %H:%M} UTC, and counts for {LASTS.days} days from then: "
            f"{_REMEDY}, or set the clock that is wrong"
        )
    return Request(subject[0][1], key, made, digest_of(data))


def digest_of(data: bytes) -> str:
    """Return SHA-256, in hex, of a request, whatever its line ends. Raises ParameterError for what is none."""
    try:
        return hashlib.sha256(x509.load_pem_x509_csr(data).public_bytes(Encoding.DER)).hexdigest()
    except ValueError:
        raise ParameterError(f"this was expected to be a site's request, and is none: {_REMEDY}") from None


def _time_in(attribute: x509.Attribute) -> datetime:
    text = attribute.value.decode(errors="replace")
    try:
        if attribute.oid == AttributeOID.UNSTRUCTURED_NAME and text.startswith(_MADE):
            return datetime.strptime(text.removeprefix(_MADE), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        pass
    raise ParameterError(f"the request does not say when it was made: {_REMEDY}")


class Reply(BaseModel):
    """What a site is sent back. root, certificate: PEM. server_key: a public line. signature: of the rest, base64."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    format: Literal[1] = 1
    name: Annotated[str, StringConstraints(pattern=rf"^{NAME.pattern}\z")]
    host: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,63}\z")]
    port: Annotated[int, Field(ge=1, le=65535)]
    certificate: str
    root: str
    server_key: str
    signature: str = ""

    def signed(self, identity: Identity, request: str) -> Reply:
        """Return the reply to a request, by its digest, with the server's key and signature."""
        whole = self.model_copy(update={"server_key": public_line(identity.public_key)})
        signature = identity.sign(_PURPOSE, *whole._parts(request))
        return whole.model_copy(update={"signature": base64.b64encode(signature).decode()})

    def key(self, request: str) -> bytes:
        """Return the server's key, which has signed this reply to this request.

        Raises `moretta.errors.ParameterError` for another request's, and for one that was changed.
        """
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
    """Return a reply that somebody sent; its signature is `Reply.key`'s to check. Raises ParameterError for another."""
    try:
        return Reply.model_validate_json(data)
    except ValidationError:  # which quotes what it was given
        raise ParameterError("this was expected to be a reply of moretta kit sign, and is none: ask for it") from None


def read_small(path: Path) -> bytes:
    """Return what a file holds that somebody sent. Raises ParameterError where it is too long for its kind."""
    with path.open("rb") as stream:
        data = stream.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ParameterError(f"{path} is longer than {LARGEST} bytes, as no request and no reply is: ask for another")
    return data


def same_fingerprint(given: str, own: str) -> bool:
    """Return whether somebody has written a fingerprint down rightly, with or without spaces, in any case."""
    plain = [re.sub(r"[\s:-]", "", each).lower() for each in (given, own)]
    return plain[0] == plain[1]
