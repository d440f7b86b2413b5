"""Checks of a site: that its silo.toml, its kit, its keys and its rows belong together."""

from __future__ import annotations

from pathlib import Path

from moretta.config.silo_file import SiloFile
from moretta.data.tables.files import ENDINGS
from moretta.deployment import kits, server_key
from moretta.deployment.check_result import Warned
from moretta.deployment.server_key import server_keys
from moretta.errors import ParameterError
from moretta.secure_aggregation.identity import Identity, Roster, fingerprint


def belongs(kit: Path, silo: Path, file: SiloFile) -> str:
    """Check that a silo.toml and a site's kit are of the same site. Raises `moretta.errors.ParameterError`."""
    if kits.is_server(kit):
        raise ParameterError(f"{kit} is the server's kit; a site joins by its own, which moretta serve made beside it")
    name = file.silo.name
    if file.silo.roster is not None:
        name = Roster.load(file.base / file.silo.roster).engine_name(name)
    if name != kits.name_of(kit):
        raise ParameterError(
            f"{silo} is of `{name}`, and {kit} is the kit of `{kits.name_of(kit)}`; use the kit of the same name"
        )
    return f"kit and silo.toml are both of {name}"


def identified(file: SiloFile) -> str:
    """Check a site's own key against its list of everybody's. Raises `moretta.errors.ParameterError`."""
    if file.silo.roster is None or file.silo.identity is None:
        return "none, so it is for runs without a roster"
    roster, identity = Roster.load(file.base / file.silo.roster), Identity.load(file.base / file.silo.identity)
    roster.check([file.silo.name])
    if roster.keys[file.silo.name] != identity.public_key:
        raise ParameterError(
            f"the key of {file.silo.name} in {file.base / file.silo.roster} is not that of "
            f"{file.base / file.silo.identity}; put there what moretta keys show prints"
        )
    mine = fingerprint(identity.public_key)
    return f"{mine}, in a roster of {len(roster.keys)} whose digest begins with {roster.digest[:16]}"


def pinned(kit: Path, file: SiloFile) -> str:
    """Check that a site knows its server by a key. Raises `moretta.errors.ParameterError`."""
    local = kit / "local"
    keys, where = server_key.pinned(file, local)
    if not keys:
        raise ParameterError(server_key.NONE_PINNED)
    said = f"{' and '.join(map(fingerprint, keys))}, of {where}"
    others = server_keys(local)
    if others and not set(others) & set(keys):
        return Warned(f"{said}; the kit has {' and '.join(map(fingerprint, others))}: ask which the server has")
    return said


def openable(file: SiloFile) -> str:
    """Check that the file of a site's rows can be opened. Raises `moretta.errors.ParameterError`."""
    source = file.data.source
    if not source.endswith((*ENDINGS, ".npz")):
        from moretta.data.references import OWN_CODE, resolve

        resolve(source, file.base, OWN_CODE)
        return f"{source} can be imported; give --run to see whether its rows fit"
    path = file.base / source
    try:
        with path.open("rb") as stream:
            some = stream.read(1)
    except OSError as error:
        raise ParameterError(f"{path} cannot be read ({error.strerror}); correct [data] source") from None
    if not some:
        raise ParameterError(f"{path} is empty; correct [data] source")
    return f"{path} can be read; give --run to see whether its rows fit"
