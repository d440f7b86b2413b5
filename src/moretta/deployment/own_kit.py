"""A site's kit whose private key was made at the site: first the request, then, with the server's reply, the rest.

KIT/client.key  KIT/<name>.request      after the request; the key is of mode 0600 and is sent to nobody
KIT/startup/  KIT/local/                after the reply: a startup kit of FLARE's, with the key moved to startup/
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from moretta.config.silo_file import SiloFile
from moretta.deployment import certificates, kits, processes, provisioning, server_key
from moretta.deployment.server_key import SERVER_KEY
from moretta.deployment.site_requests import (
    NAME,
    Reply,
    Request,
    digest_of,
    new_key,
    read_reply,
    read_request,
    read_small,
    write_request,
)
from moretta.engines.files import make_folder, rename, write_atomically
from moretta.errors import ParameterError
from moretta.secure_aggregation.identity import Roster, fingerprint

KEY = "client.key"


def request(kit: Path, file: SiloFile, now: datetime) -> tuple[Request, Path]:
    """Make a site's key in a new folder, and a request for a certificate; return the request and its file.

    now: with a time zone. Raises `moretta.errors.ParameterError` where the folder holds anything, or the site has a
    name that FLARE cannot take.
    """
    name = _name_in_flare(file)
    if not NAME.fullmatch(name):
        raise ParameterError(
            f"FLARE takes up to 63 letters, digits, '-' and '_' as a site's name, got {name!r}; rename the silo, or "
            "give it an engine-name in the roster"
        )
    if kit.exists() and (not kit.is_dir() or any(kit.iterdir())):
        raise ParameterError(f"{kit} exists and is not empty, and a key is never overwritten: name a new folder")
    key = new_key()
    data = write_request(key, name, now)
    make_folder(kit, 0o700)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())  # as FLARE's kits have it
    write_atomically(kit / KEY, pem, 0o600)
    write_atomically(kit / f"{name}.request", data)
    return read_request(data, now), kit / f"{name}.request"


def complete(kit: Path, file: SiloFile, path: Path, agrees: Callable[[bytes], bool]) -> str:
    """Make a startup kit of a folder that `request` made, and return the fingerprint of the server's key.

    path: of the server's reply. agrees: asks a person whether a server's key is what its operator has read out; asked
    where silo.toml or the roster pins none. Raises `moretta.errors.ParameterError`, and leaves the folder as it was,
    where the reply is to another request, of another server, or not what it should be.
    """
    processes.require("edge-flare" if file.silo.edge else "flare")
    name = _name_in_flare(file)
    wanted = kit / f"{name}.request"
    if not (kit / KEY).is_file() or not wanted.is_file():
        raise ParameterError(
            f"{kit} holds no request of {name}: name the folder that moretta join KIT --silo silo.toml --request made"
        )
    reply = read_reply(read_small(path))
    key = reply.key(digest_of(read_small(wanted)))
    if reply.name != name:
        raise ParameterError(f"the reply is to {reply.name}, and silo.toml is of {name}: ask for this site's")
    _check_server(key, file, kit, agrees)
    partial = kit / ".partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a crash
    try:
        made = _build(partial, kit, reply)
        certificates.check(made)
        for part in [each for each in made.iterdir() if each.name != "startup"]:
            _replace(part, kit / part.name)
        rename(made / "startup", kit / "startup")  # last, as it makes the folder a kit
    except OSError as error:
        raise ParameterError(f"the kit cannot be written to {kit}: {error.strerror}; give the right to it") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    (kit / KEY).unlink()  # it is in startup/
    wanted.unlink()
    return fingerprint(key)


def _name_in_flare(file: SiloFile) -> str:
    name = file.silo.name
    return name if file.silo.roster is None else Roster.load(file.base / file.silo.roster).engine_name(name)


def _check_server(key: bytes, file: SiloFile, kit: Path, agrees: Callable[[bytes], bool]) -> None:
    """Raise `moretta.errors.ParameterError` unless a server's key is the one that is meant."""
    pinned, where = server_key.pinned(file, kit / "local")
    if pinned and key not in pinned:
        raise ParameterError(
            f"the reply is signed by {fingerprint(key)}, and {where} pins {' and '.join(map(fingerprint, pinned))}: it "
            "is another server's, or its key has changed; ask its operator"
        )
    if not pinned and not agrees(key):
        raise ParameterError(
            "not completed: the fingerprint is not what the server's operator has read out, so this may be another's "
            "reply; have it sent again"
        )


def _build(partial: Path, kit: Path, reply: Reply) -> Path:
    """Make the kit below a folder, and return where it is."""
    partial.mkdir(mode=0o700)
    made = provisioning.provision_site(partial, reply.name, reply.host, reply.port)
    files = kits.certificates_of(made)
    write_atomically(files.key, (kit / KEY).read_bytes(), 0o600)
    write_atomically(files.certificate, reply.certificate.encode(), 0o600)
    write_atomically(files.root, reply.root.encode(), 0o600)
    kits.write(made / "local" / SERVER_KEY, f"{reply.server_key}\n")
    for folder in [made, *(each for each in made.rglob("*") if each.is_dir())]:
        folder.chmod(0o700)
    return made


def _replace(part: Path, target: Path) -> None:
    """Move a part of the kit to its place, also where a crash has left it there."""
    if target.is_dir():
        shutil.rmtree(target)
    rename(part, target)
