"""Startup kits that `moretta serve` makes: of the server, of each site and of one administrator."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moretta.deployment import kits
from moretta.deployment.kits import ADMIN_FOLDER, SERVER_FOLDER, Kits
from moretta.deployment.patching import EXECUTOR
from moretta.deployment.server_key import SERVER_KEY, load_json
from moretta.engines.files import rename, write_atomically
from moretta.errors import ParameterError
from moretta.secure_aggregation.identity import KEY_FILE, PUBLIC_FILE, Identity, public_line

PROJECT = "moretta"
ADMIN = "admin@moretta.org"  # FLARE wants the form of an address; nobody writes to it
ORGANISATION = "moretta"
MANIFEST = "kits.json"
LONGEST_HOST = 64  # of a common name
SHARED_STORAGE = "/tmp/nvflare/"  # FLARE's default: every server of a machine, and every user of it, would share it
HEARTBEATS = 30  # seconds without one of a site's, sent each 10, after which it counts as gone; FLARE's own are 600
SCHEDULING = {"min_schedule_interval": 1.0, "max_schedule_interval": 2.0, "max_schedule_count": 100_000}  # seconds


def provision(out: Path, host: str, port: int, sites: Sequence[str]) -> Kits:
    """Make the kits of a server, of each site and of one administrator in `out`, or find those of the same arguments.

    host: the name or IPv4 address by which the sites reach the server; its certificate is for it and for localhost.
    port: of the server, for sites and administrator. sites: their names in the roster.
    The server's key, by which it signs what it sends, is in `out` too and in no kit; each site's has its public half.
    The key of the root is not kept: a site that comes later needs new kits for everybody.
    Raises ParameterError where FLARE cannot take a name, or `out` holds anything else.
    """
    wanted = {"host": host, "port": port, "sites": list(sites)}
    made = Kits(out / SERVER_FOLDER, {site: out / site for site in sites}, out / ADMIN_FOLDER)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        _check_same(out, wanted)
        if not (out / KEY_FILE).exists():  # kits of a version that had none
            _make_key(out, sites)
        return made
    _check_wanted(host, port, sites)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a crash
    try:
        _make(partial, made.server, host, port, sites)
        write_atomically(partial / MANIFEST, kits.dump(wanted), 0o600)
        rename(partial, out)
    except OSError as error:
        raise ParameterError(f"the kits cannot be written to {out}: {error.strerror}; name another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return made


def _check_wanted(host: str, port: int, sites: Sequence[str]) -> None:
    for site in sites:
        if site in (SERVER_FOLDER, ADMIN_FOLDER, host) or list(sites).count(site) > 1:
            raise ParameterError(f"a site needs a name of its own, but {site!r} is taken: rename it")
    if not sites or not 0 < port < 65536:
        raise ParameterError(f"kits need at least one site and a port of 1 to 65535, got {len(sites)} and {port}")
    if len(host) > LONGEST_HOST:
        raise ParameterError(
            f"a certificate names a host of at most {LONGEST_HOST} characters: give {host} a short alias"
        )


def _make(folder: Path, server: Path, host: str, port: int, sites: Sequence[str]) -> None:
    """Make all kits in a folder. server: where the server's is going to be."""
    folder.mkdir(mode=0o700, parents=True)
    made = _build(folder / "work", host, port, sites)
    for kit, name in [(SERVER_FOLDER, host), *((site, site) for site in sites), (ADMIN_FOLDER, ADMIN)]:
        rename(made / name, folder / kit)
    shutil.rmtree(folder / "work")  # with the key of the root
    _tune(folder / SERVER_FOLDER, server)
    for site in sites:
        _restrict(folder / site)
    _make_key(folder, sites)
    _close_to_others(folder)


def _make_key(out: Path, sites: Sequence[str]) -> None:
    """Make the server's key beside its kits, and put the public half into those of sites that are still there."""
    identity = Identity.fresh()
    for site in sites:
        if (out / site / "local").is_dir():
            kits.write(out / site / "local" / SERVER_KEY, f"{public_line(identity.public_key)}\n")
    (out / PUBLIC_FILE).unlink(missing_ok=True)  # of a key that is gone
    identity.save(out)


def _build(work: Path, host: str, port: int, sites: Sequence[str]) -> Path:
    """Let FLARE make the folders of all parties, and return where they are; each has its party's name."""
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.entity import Participant, Project
    from nvflare.lighter.impl.cert import CertBuilder
    from nvflare.lighter.impl.static_file import StaticFileBuilder
    from nvflare.lighter.impl.workspace import WorkspaceBuilder
    from nvflare.lighter.provisioner import Provisioner

    noise = io.StringIO()
    with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
        try:
            project = Project(name=PROJECT, description="")
            props = {"fed_learn_port": port, "admin_port": port, "host_names": ["localhost", "127.0.0.1"]}
            project.add_participant(Participant("server", host, ORGANISATION, {**props, "default_host": host}))
            for site in sites:
                project.add_participant(Participant("client", site, ORGANISATION))
            project.add_participant(Participant("admin", ADMIN, ORGANISATION, {"role": "project_admin"}))
        except ValueError as error:
            raise ParameterError(
                f"FLARE takes letters, digits, '-' and '_' in the name of a site, and a host name or an IPv4 address "
                f"of a server: {error}"
            ) from error
        builders = [WorkspaceBuilder(), StaticFileBuilder(config_folder="config", scheme="grpc"), CertBuilder()]
        context = Provisioner(str(work), builders).provision(project)
    if context.get(CtxKey.BUILD_ERROR):
        raise ParameterError(f"FLARE could not make the kits: {' '.join(context.get_errors())}")
    return Path(context.get_result_location())


def _check_same(out: Path, wanted: Mapping[str, Any]) -> None:
    found = load_json(out / MANIFEST) if (out / MANIFEST).is_file() else None
    if found is None:
        raise ParameterError(f"{out} is not empty and holds no kits of ours: name a new folder")
    if found != wanted:
        raise ParameterError(
            f"{out} holds the kits of host {found.get('host')}, port {found.get('port')} and sites "
            f"{', '.join(found.get('sites', []))}, which is not what is asked for: name a new folder"
        )


def _tune(made: Path, kit: Path) -> None:
    """Set a server of ours: jobs and snapshots stay in its kit, and it notices soon who is there and who is gone."""
    text = json.dumps(kits.resources(made)).replace(SHARED_STORAGE, f"{json.dumps(str(kit.resolve()))[1:-1]}/")
    resources = json.loads(text)
    resources["servers"][0]["heart_beat_timeout"] = HEARTBEATS
    for component in resources["components"]:
        if component["id"] == "job_scheduler":
            component["args"] |= SCHEDULING
    kits.write(made / "local" / "resources.json", resources)


def _restrict(made: Path) -> None:
    """Let a site of ours run our jobs and nothing else: no other class, no code that a job brings, no shell.

    The administrator of these kits is the server's, whom a site does not trust with its machine.
    """
    resources = kits.resources(made)
    resources["class_allow_list"] = [EXECUTOR]
    kits.write(made / "local" / "resources.json", resources)
    rights = dict.fromkeys(("submit_job", "clone_job", "manage_job", "download_job", "view", "operate"), "any")
    rights |= dict.fromkeys(("shell_commands", "byoc", "server-predeployed-flwr"), "none")
    policy = {"format_version": "1.0", "permissions": {"project_admin": rights}}
    kits.write(made / "local" / "authorization.json", policy)


def _close_to_others(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            path.chmod(0o700)
        elif path.suffix == ".key":
            path.chmod(0o600)
