"""Checks of a startup kit: that it proves who it is, and that its server answers."""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from pathlib import Path

from moretta.deployment import certificates, kits, patching, server_connection
from moretta.deployment.check_result import Warned
from moretta.deployment.server_key import identity_of, load_json
from moretta.errors import ParameterError, RunFailed
from moretta.secure_aggregation.identity import fingerprint

SOON = timedelta(days=30)  # in which a certificate should be renewed
WAIT = 5.0  # seconds in which a server is to answer
APART, FAR = 30.0, 600.0  # seconds between two clocks that should be heeded, and that do not pass
POLICIES = ("authorization.json", "authorization.json.default")  # in local/; the first that is there counts
PORT = 8002  # of `moretta serve` where no other is named


def kind_of(kit: Path, with_silo: bool) -> str:
    """Return "server" or "site". with_silo: whether a silo.toml was given too, which only a site has."""
    kind = "server" if kits.is_server(kit) else "site"
    if with_silo and kind == "server":
        raise ParameterError(f"{kit} is the server's kit, and silo.toml a site's; give the site's own kit")
    return kind


def certificate(kit: Path, now: datetime) -> str:
    """Check that FLARE would take the certificate, and that it lasts a while."""
    certificates.check(kit, now)
    until = certificates.validity_of(kit)[1]
    if until - now < SOON:
        return Warned(
            f"ends in {(until - now).days} days, on {until:%Y-%m-%d}; have new kits made before, or ask again by "
            "moretta join --request where the key is this site's own"
        )
    return f"is of {kits.name_of(kit)}, issued by the kit's root, valid until {until:%Y-%m-%d}"


def private_key(kit: Path) -> str:
    """Check that nobody else can read the private key."""
    path = kits.certificates_of(kit).key
    mode = path.stat().st_mode & 0o777
    if os.name == "posix" and mode & 0o077:
        return Warned(f"is open to others (mode {mode:04o}); run: chmod 600 {path}")
    if kits.for_trials(kit):
        return Warned("was made by the server, for trials; for another, made here: moretta join KIT --silo --request")
    return "is closed to others"


def patched(kit: Path, silo: Path | None) -> str:
    """Check that the kit runs our jobs."""
    missing = patching.lacks(kit, silo)
    if missing:
        return Warned(
            f"not yet, {len(missing)} changes are missing; moretta serve and join make them, and for a FLARE that you "
            f"start yourself run: moretta kit patch {kit}{'' if silo is None else f' --silo {silo}'}"
        )
    return "runs Moretta's jobs"


def policy(kit: Path) -> str:
    """Check whom a site's kit lets bring code: FLARE's own policy lets administrators of every organisation."""
    path = next((path for name in POLICIES if (path := kit / "local" / name).exists()), None)
    roles = {} if path is None else load_json(path).get("permissions", {})
    open_to = [role for role, rights in roles.items() if _right(rights, "byoc") != "none"]
    if path is None or open_to:
        whom = ", ".join(open_to) if path is not None else "everybody"
        return Warned(
            f"{whom} may bring code in a job, and it would run here with all rights of this site; set byoc to none for "
            f"each role in {kit / 'local' / POLICIES[0]}"
        )
    resources = kits.resources(kit)
    if "*" in resources.get("class_allow_list", []) or resources.get("class_list_enforcement_mode") == "warn":
        return Warned(
            "a job may name any class here; in local/resources.json, take '*' out of class_allow_list, and warn out of "
            "class_list_enforcement_mode"
        )
    return "lets nobody bring code"


def _right(rights: object, right: str) -> object:
    return rights.get(right, "none") if isinstance(rights, dict) else rights


def server_answers(kit: Path) -> str:
    """Check that the server is there, and that each takes the other's certificate."""
    host, port = kits.address_of(kit)
    try:
        server_connection.reach(kit, WAIT)
    except RunFailed:
        raise RunFailed(
            f"nothing of this federation answers at {host}:{port}; have it started (moretta serve), and let a firewall "
            "pass that port"
        ) from None
    return f"answers at {host}:{port}, and each takes the other's certificate"


def servers_clock(now: datetime) -> str:
    """Say the time; there is nothing that a server could compare its own with."""
    return f"says {now:%Y-%m-%d %H:%M} UTC; with what others say it is compared by moretta doctor at a site"


def clock(kit: Path, now: datetime, named: bool) -> str:
    """Compare with the dates of the certificate, which a new kit has from its making, and with the server's clock."""
    begins, ends = certificates.validity_of(kit)
    if now < begins:
        raise ParameterError(
            f"says {now:%Y-%m-%d %H:%M} UTC, and the kit was made at {begins:%Y-%m-%d %H:%M} UTC; set the clock"
        )
    ahead = server_connection.clock_of_server(kit, WAIT) if named else None
    if ahead is None:
        return Warned(
            f"cannot be told: no server says its time; {now:%Y-%m-%d %H:%M} UTC is after the kit was made "
            f"({begins:%Y-%m-%d %H:%M} UTC){'' if now <= ends else ' and after its certificate ended'}"
        )
    apart = f"is {abs(ahead):.0f} s {'behind' if ahead > 0 else 'ahead of'} the server's"
    if abs(ahead) > FAR:
        raise ParameterError(f"{apart}; set the clock that is wrong, best by NTP")
    return Warned(f"{apart}; set both by NTP") if abs(ahead) > APART else f"{apart}, as its greeting has it"


def free_port(kit: Path | None, port: int | None) -> str:
    """Check that a server could listen at a port, else at its kit's."""
    port = port or (PORT if kit is None else kits.address_of(kit)[1])
    server_connection.check_port(port)
    return f"{port} is free"


def own_key(local: Path) -> str:
    """Check that the server has its own key. local: the folder of its kit."""
    return f"{fingerprint(identity_of(local).public_key)}; sites have it pinned, and compare it (moretta keys show)"
