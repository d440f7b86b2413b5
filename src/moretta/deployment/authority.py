"""The server's authority, of `moretta kit new`: it gives certificates to sites that have made their own keys.

    KITS/authority/root.key          the root's private key, mode 0600; needed for signing alone, and may lie elsewhere
                                     between signings: `moretta serve` does not read it
    KITS/authority/rootCA.pem        its certificate
    KITS/authority/issued/<digest>   a reply each, by its request's digest; none is ever deleted
    KITS/<name>.reply                the last reply to a site, to be sent to it

A name is given once, a key is signed once, and so is a request. FLARE has no list of revoked certificates: a site whose
key was lost is renewed by its operator's word (`--renew`), and the old certificate is good until it ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from moretta.deployment.holding import only_one
from moretta.deployment.kits import ADMIN_FOLDER, SERVER_FOLDER
from moretta.deployment.provisioning import AUTHORITY, MANIFEST, ORGANISATION, PROJECT, ROOT, ROOT_KEY, keys_at_sites
from moretta.deployment.server_key import load_json
from moretta.deployment.site_requests import Reply, Request, read_reply, read_request, read_small
from moretta.engines.files import make_folder, write_atomically
from moretta.errors import ParameterError
from moretta.secure_aggregation.identity import Identity

ISSUED = "issued"
DAYS = 360  # as FLARE's own certificates
HELD = "another moretta kit sign, {}, is at work there; wait for its end"


def sign(
    path: Path, folder: Path, agrees: Callable[[Request], bool], now: datetime, *, renew: bool = False
) -> tuple[Request, Path]:
    """Issue a certificate to a site that asks for one; return the request, and the file of the reply to it.

    path: of the request. folder: of the kits. agrees: asks a person whether the request's fingerprint is what the site
    has read out. now: with a time zone. renew: whether a site that has a certificate may have another one.
    Raises `moretta.errors.ParameterError`, and issues nothing, for a request that is not what it should be, a name or
    key that is taken, and where `agrees` does not.
    """
    if not keys_at_sites(folder):
        raise ParameterError(
            f"{folder} has no authority to sign by, as only moretta kit new makes one; the kits of moretta serve are "
            "for trials, and the key of their root is gone"
        )
    authority, manifest = folder / AUTHORITY, load_json(folder / MANIFEST)
    request = read_request(read_small(path), now)
    make_folder(authority / ISSUED, 0o700)
    with only_one(authority, HELD):
        _check_free(request, str(manifest["host"]), authority / ISSUED, renew)
        if not agrees(request):
            raise ParameterError(
                "not signed: the fingerprint is not what the site has read out, so this may be another's request; have "
                "the site send its own again"
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
        write_atomically(authority / ISSUED / request.digest, data, 0o600)  # from here on the name is given
    write_atomically(folder / f"{request.name}.reply", data)
    return request, folder / f"{request.name}.reply"


def _check_free(request: Request, host: str, issued: Path, renew: bool) -> None:
    """Raise `moretta.errors.ParameterError` where a request, its key or its name was given before, or is nobody's."""
    if request.name.lower() in {name.lower() for name in (SERVER_FOLDER, ADMIN_FOLDER, PROJECT, "localhost", host)}:
        raise ParameterError(f"the name {request.name} is the server's own: have the site choose another")
    given = [read_reply(path.read_bytes()) for path in sorted(issued.iterdir()) if not path.name.startswith(".")]
    if (issued / request.digest).exists():
        raise ParameterError(
            f"this request was signed before, and {issued / request.digest} is the reply to it: send that once more"
        )
    keys = [x509.load_pem_x509_certificate(each.certificate.encode()).public_key() for each in given]
    if request.key in keys:
        raise ParameterError("this key has a certificate already, and a key is signed once: have the site make another")
    taken = [each.name for each in given if each.name.lower() == request.name.lower()]
    if taken and (not renew or request.name not in taken):
        raise ParameterError(
            f"the name {taken[0]} is taken: have the site choose another, or, where that very site has asked for a new "
            "certificate, sign by --renew"
        )
    if renew and not taken:
        raise ParameterError(f"{request.name} has no certificate to renew: sign without --renew")


def _certify(request: Request, authority: Path, now: datetime) -> tuple[str, str]:
    """Return the certificate and its root's, in PEM. Of the request it takes the name and the key, and nothing else."""
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
    """Return the root's private key. Raises `moretta.errors.ParameterError` where it is open to others, or another."""
    if not path.exists():
        raise ParameterError(f"{path} is not there: bring it back from where it is kept, and take it away afterwards")
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise ParameterError(
            f"{path} is open to others (mode {path.stat().st_mode & 0o777:04o}); run: chmod 600 {path}"
        )
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, rsa.RSAPrivateKey) or key.public_key() != root.public_key():
        raise ParameterError(f"{path} is not the key of the certificate beside it: bring back the right one")
    return key
