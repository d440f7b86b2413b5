"""Startup kits of NVIDIA FLARE: their content, of any origin, and whether FLARE would accept their certificates.

A kit is a folder with `startup/` (the party, its trusted root, the server's address) and `local/` (what it allows on
its own machine). FLARE signs neither in a plain kit: its trust is mutual TLS, and the party may edit `local/`. FLARE
fails silently at a wrong certificate, so Moretta checks first. `provisioning` makes and patches kits.

A site recognises the server by a pinned key, or two while they change:

    silo.toml       [silo] server-key       counts if set
    roster.toml     [server] key            else this, of the site's own copy, if it names one
    <kit>/local/moretta-server.pub          else this, which is in the kits that `moretta serve` makes

The server's own key (`moretta.secure_aggregation.identity.Identity`) is a file on its machine: beside the kits and
outside them all, or where the server's kit names it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import NameOID

from moretta.config.silo_file import SiloFile
from moretta.engines.files import write_atomically
from moretta.engines.flare.signing import Trust
from moretta.errors import ParameterError, PeerError
from moretta.secure_aggregation.identity import KEY_FILE, Identity, Roster, fingerprint, parse_server_keys

SILO = "moretta.json"  # in local/: the place of a site's silo.toml, or of the server's key
SERVER_KEY = "moretta-server.pub"  # in local/ of a site: the server's public key, a line, or two while it changes
NONE_PINNED = (
    "no key of the server is pinned here, so anybody could pose as it: have its operator run moretta keys show KITS, "
    "and put that line into silo.toml as [silo] server-key, or run moretta kit patch KIT --server-key LINE"
)


def pinned(file: SiloFile, local: Path) -> tuple[tuple[bytes, ...], str]:
    """Return a site's pinned keys, may be empty, and their origin.

    Args:
        local: The folder ``local`` of the site's kit.

    Raises:
        ParameterError: A file of keys is damaged.
    """
    if file.silo.server_key:
        return parse_server_keys(file.silo.server_key), "silo.toml"
    if (roster := file.load_roster()) is not None and roster.server:
        return roster.server, str(file.silo.roster)
    return server_keys(local), SERVER_KEY


def trust_of(file: SiloFile, local: Path) -> Trust:
    """Return the keys by which a site checks and opens messages: the server's pinned keys, and its own.

    Raises:
        PeerError: No key of the server is pinned.
        ParameterError: A file of keys is damaged.
    """
    keys, _ = pinned(file, local)
    if not keys:
        raise PeerError(NONE_PINNED)
    own = file.silo.identity
    return Trust(file.silo.name, keys, None if own is None else Identity.load(file.base / own), file.out)


def check_listed(identity: Identity, roster: Roster | None) -> None:
    """Raise `moretta.errors.ParameterError` if a roster names the server's keys, without this one."""
    if roster is not None and roster.server and identity.public_key not in roster.server:
        raise ParameterError(
            f"the roster lists {' and '.join(map(fingerprint, roster.server))} as the server's key, and this server's "
            f"is {fingerprint(identity.public_key)}; serve by that key, or correct [server] in all copies of the roster"
        )


def server_keys(local: Path) -> tuple[bytes, ...]:
    """Return the server's public keys of a site's local folder, may be empty. Raises ParameterError for bad ones."""
    path = local / SERVER_KEY
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        return parse_server_keys(lines) if lines else ()
    except (OSError, ValueError, ParameterError) as error:
        raise ParameterError(
            f"{path} does not hold the server's public key ({error}); write it again by moretta kit patch KIT "
            "--server-key"
        ) from None


def identity_of(local: Path) -> Identity:
    """Return the server's own key, which its local folder names, or beside the kit. Raises ParameterError without."""
    beside = local.resolve().parent.parent / KEY_FILE
    path = (load_json(local / SILO) if (local / SILO).exists() else {}).get("identity", str(beside))
    if not isinstance(path, str) or (path == str(beside) and not beside.exists()):
        raise ParameterError(
            f"{local / SILO} does not name the server's key; run: moretta keys new --out DIR, and then: "
            "moretta kit patch KIT --server-key DIR"
        )
    return Identity.load(path)


def load_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ParameterError for other content."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path} is not readable JSON ({error}); restore it, or get a new kit") from error
    if not isinstance(content, dict):
        raise ParameterError(
            f"{path} holds a {type(content).__name__}, expected a JSON object; restore it, or get a new kit"
        )
    return content


SERVER_FOLDER, ADMIN_FOLDER = "server", "admin"
TRIAL = "for-trials.txt"  # in a site's kit whose private key was made by the server
KINDS = {"server": "fed_server.json", "client": "fed_client.json", "admin": "fed_admin.json"}


@dataclass(frozen=True)
class Kits:
    """The folders of one federation's kits: the server's, one a site, the administrator's."""

    server: Path
    sites: Mapping[str, Path]
    admin: Path


@dataclass(frozen=True)
class Certificates:
    """The files that prove a kit's identity (certificate, private key) and check that of others (root)."""

    certificate: Path
    key: Path
    root: Path


def name_of(kit: Path) -> str:
    """Return the name of a kit's party: a site's, "server", or the administrator's."""
    kind = kind_of(kit)
    if kind == "server":
        return "server"
    if kind == "admin":
        return str(_entry(kit, "admin", "username") or subject(kit))
    return str(_entry(kit, "client").get("fqsn") or subject(kit)).split(".")[-1]


def is_server(kit: Path) -> bool:
    """Return whether a kit is a server's and not a site's. Raises ParameterError for any other."""
    kind = kind_of(kit)
    if kind == "admin":
        raise ParameterError(f"{kit} is an administrator's kit, expected a server's or a site's: name another")
    return kind == "server"


def for_trials(kit: Path) -> bool:
    """Return whether a site's kit is marked for trials: its private key was not made at the site."""
    return (kit / TRIAL).exists()


def address_of(kit: Path) -> tuple[str, int]:
    """Return host and port of a kit's server."""
    if kind_of(kit) == "admin":
        return str(_entry(kit, "admin", "host")), int(_entry(kit, "admin", "port"))
    host, _, port = (target := str(_entry(kit, "servers", 0, "service", "target"))).rpartition(":")
    if not (host and port.isdecimal()):
        raise ParameterError(
            f"{kit} has the server's address {target!r:.100}, expected HOST:PORT; correct its startup/"
        )
    return host, int(port)


def organisation_of(kit: Path) -> str:
    """Return the organisation that a kit's certificate names; FLARE's authorisation goes by it."""
    return _named_in(chain_in(certificates_of(kit).certificate)[0], NameOID.ORGANIZATION_NAME)


def certificates_of(kit: Path) -> Certificates:
    """Return the places of a kit's certificate, its private key and the root's certificate."""
    kind = kind_of(kit)
    of: tuple[str | int, ...] = ("servers", 0) if kind == "server" else (kind,)
    admins, parties = ("client_cert", "client_key", "ca_cert"), ("ssl_cert", "ssl_private_key", "ssl_root_cert")
    keys = admins if kind == "admin" else parties
    return Certificates(*(kit / "startup" / str(_entry(kit, *of, key)) for key in keys))


def kind_of(kit: Path) -> str:
    """Return a kit's kind: "server", "client" or "admin". Raises ParameterError for a folder that is not a kit."""
    for kind, file in KINDS.items():
        if (kit / "startup" / file).is_file() and (kit / "local").is_dir():
            return kind
    raise ParameterError(
        f"{kit} is not a startup kit of FLARE: expected local/ and one of {', '.join(KINDS.values())} in its startup/"
    )


def _entry(kit: Path, *keys: str | int) -> Any:
    """Return an entry of a kit's file in startup/. Raises ParameterError without it."""
    entry: Any = load_json(path := kit / "startup" / KINDS[kind_of(kit)])
    try:
        for key in keys:
            entry = entry[key]
    except (KeyError, IndexError, TypeError):
        missing = ".".join(map(str, keys))
        raise ParameterError(
            f"{path} has no {missing}: it is damaged, or of another FLARE than 2.9; get a new kit"
        ) from None
    return entry


def resources(kit: Path) -> dict[str, Any]:
    """Return what a kit allows on its machine. Raises ParameterError without such a file."""
    for file in ("resources.json", "resources.json.default"):
        if (kit / "local" / file).is_file():
            return load_json(kit / "local" / file)
    raise ParameterError(f"{kit / 'local'} has neither resources.json nor resources.json.default; get a new kit")


def write(path: Path, content: Mapping[str, Any] | str) -> None:
    """Write a file of a kit, with its present permissions. Raises ParameterError if it is not writable."""
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        write_atomically(path, content.encode() if isinstance(content, str) else dump(content), mode)
    except OSError as error:
        raise ParameterError(f"{path} cannot be written: {error.strerror}; grant write permission") from error


def dump(content: Mapping[str, Any]) -> bytes:
    """Return JSON in the form of a kit's files."""
    return (json.dumps(content, indent=2) + "\n").encode()


def subject(kit: Path) -> str:
    """Return the name in a kit's certificate."""
    return _named_in(chain_in(certificates_of(kit).certificate)[0], NameOID.COMMON_NAME)


def chain_in(path: Path) -> list[x509.Certificate]:
    """Read a certificate, and those of its issuers below the root, if they follow it."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path} is not a readable certificate: get a new kit") from error


def _named_in(certificate: x509.Certificate, attribute: x509.ObjectIdentifier) -> str:
    values = certificate.subject.get_attributes_for_oid(attribute)
    return str(values[0].value) if values else ""


def check_certificates(kit: Path, now: datetime | None = None) -> None:
    """Raise ParameterError if FLARE would fail at a kit's certificate.

    The certificate must be valid now, issued by the kit's root, for the kit's key and, at a site, for the kit's name.

    Args:
        now: The present time, with a time zone; None takes the clock's.
    """
    files, now = certificates_of(kit), now or datetime.now(UTC)
    chain = [*chain_in(files.certificate), chain_in(files.root)[0]]
    _check_dates(kit, chain, now)
    try:
        for each, issuer in pairwise(chain):
            each.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise ParameterError(
            f"{files.certificate} was not issued by the root beside it: get both from one federation"
        ) from error
    try:
        key = load_pem_private_key(files.key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ParameterError(f"{files.key} is not a private key without a password: get a new kit") from error
    if key.public_key() != chain[0].public_key():
        raise ParameterError(f"{files.key} is not the key of the certificate beside it: get both from one kit")
    if kind_of(kit) != "server" and subject(kit) != name_of(kit):
        raise ParameterError(
            f"{kit} is for {name_of(kit)}, and its certificate for {subject(kit)}: get both from one kit"
        )


def _check_dates(kit: Path, chain: Sequence[x509.Certificate], now: datetime) -> None:
    for each in chain:
        begins, ends = each.not_valid_before_utc, each.not_valid_after_utc
        if now < begins:
            raise ParameterError(
                f"a certificate of {kit} is valid from {begins:%Y-%m-%d %H:%M} UTC, but this machine's clock says "
                f"{now.astimezone(UTC):%Y-%m-%d %H:%M} UTC: set the clock"
            )
        if now > ends:
            raise ParameterError(
                f"a certificate of {kit} ended at {ends:%Y-%m-%d}, and it is now {now:%Y-%m-%d}: get a new kit, or "
                "set this machine's clock if it is wrong"
            )


def validity_of(kit: Path) -> tuple[datetime, datetime]:
    """Return the begin and the end of the time in which all of a kit's certificates are valid."""
    files = certificates_of(kit)
    chain = [*chain_in(files.certificate), *chain_in(files.root)[:1]]
    return max(each.not_valid_before_utc for each in chain), min(each.not_valid_after_utc for each in chain)
