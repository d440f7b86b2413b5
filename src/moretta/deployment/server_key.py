"""Whom a site takes for the server: the public keys that it has pinned, one or, while they change, two.

    silo.toml       [silo] server-key       counts where it is there
    roster.toml     [server] key            else this, of the site's own copy, if it names one
    <kit>/local/moretta-server.pub          else this, which is in the kits that `moretta serve` makes

The server's own key (`moretta.secure_aggregation.identity.Identity`) is a file on its machine: beside the kits and in
none of them, or where the server's kit says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moretta.config.silo_file import SiloFile
from moretta.engines.flare.signing import Trust
from moretta.errors import ParameterError, PeerError
from moretta.secure_aggregation.identity import KEY_FILE, Identity, Roster, fingerprint, parse_server_keys

SILO = "moretta.json"  # in local/: at a site where its silo.toml is, at the server where its key is
SERVER_KEY = "moretta-server.pub"  # in local/ of a site: the server's public key, a line, or two while it changes
NONE_PINNED = (
    "no key of the server's is pinned here, so that anybody could pose as it: have its operator run moretta keys show "
    "KITS, and put that line into silo.toml as [silo] server-key, or run moretta kit patch KIT --server-key LINE"
)


def pinned(file: SiloFile, local: Path) -> tuple[tuple[bytes, ...], str]:
    """Return the keys that a site has pinned, and where from; none without any.

    local: of the site's kit. Raises `moretta.errors.ParameterError` for what should hold them and does not.
    """
    if file.silo.server_key:
        return parse_server_keys(file.silo.server_key), "silo.toml"
    if (roster := file.load_roster()) is not None and roster.server:
        return roster.server, str(file.silo.roster)
    return server_keys(local), SERVER_KEY


def trust_of(file: SiloFile, local: Path) -> Trust:
    """Return what a site checks and opens the messages sent to it by: the server's pinned keys, and its own.

    Raises `moretta.errors.PeerError` where no key is pinned, and `moretta.errors.ParameterError` for a damaged file.
    """
    keys, _ = pinned(file, local)
    if not keys:
        raise PeerError(NONE_PINNED)
    own = file.silo.identity
    return Trust(file.silo.name, keys, None if own is None else Identity.load(file.base / own), file.out)


def check_listed(identity: Identity, roster: Roster | None) -> None:
    """Raise `moretta.errors.ParameterError` where a roster names the server's keys, and this is none of them."""
    if roster is not None and roster.server and identity.public_key not in roster.server:
        raise ParameterError(
            f"the roster lists {' and '.join(map(fingerprint, roster.server))} as the server's key, and this server's "
            f"is {fingerprint(identity.public_key)}; serve by that key, or correct [server] in all copies of the roster"
        )


def server_keys(local: Path) -> tuple[bytes, ...]:
    """Return the server's public keys that a site's kit has, by its local folder; none where it has none.

    Raises ParameterError for a file that holds something else.
    """
    path = local / SERVER_KEY
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        return parse_server_keys(lines) if lines else ()
    except (OSError, ValueError, ParameterError) as error:
        raise ParameterError(
            f"{path} was expected to hold the server's public key ({error}); write it anew by moretta kit patch KIT "
            "--server-key"
        ) from None


def identity_of(local: Path) -> Identity:
    """Return the server's own key: what the local folder of its kit names, else what is beside the kit.

    Raises ParameterError where there is neither.
    """
    beside = local.resolve().parent.parent / KEY_FILE
    path = (load_json(local / SILO) if (local / SILO).exists() else {}).get("identity", str(beside))
    if not isinstance(path, str) or (path == str(beside) and not beside.exists()):
        raise ParameterError(
            f"{local / SILO} does not say where the server's key is; run: moretta keys new --out DIR, and then: "
            "moretta kit patch KIT --server-key DIR"
        )
    return Identity.load(path)


def load_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file. Raises ParameterError for anything else."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path} was expected to be readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ParameterError(f"{path} was expected to hold a JSON object, and holds a {type(content).__name__}")
    return content
