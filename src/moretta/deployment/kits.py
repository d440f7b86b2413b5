"""Startup kits of NVIDIA FLARE: made by us, or made by a hospital's own administrator and patched for us.

A kit is a folder with `startup/` (who the party is, whom it trusts, where the server is) and `local/` (what it allows
on its own machine). FLARE signs neither in a plain kit: its trust is mutual TLS, and `local/` is the party's to edit.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import NameOID

from moretta.deployment.server_key import SERVER_KEY, SILO, load_json
from moretta.engines.files import rename, write_atomically
from moretta.errors import ParameterError
from moretta.secure_aggregation.identity import (
    KEY_FILE,
    PUBLIC_FILE,
    Identity,
    parse_server_keys,
    public_line,
    read_public_key,
)

PROJECT = "moretta"
ADMIN = "admin@moretta.org"  # FLARE wants the form of an address; nobody writes to it
ORGANISATION = "moretta"
MANIFEST = "kits.json"
LONGEST_HOST = 64  # of a common name
SERVER_FOLDER, ADMIN_FOLDER = "server", "admin"
KINDS = {"server": "fed_server.json", "client": "fed_client.json", "admin": "fed_admin.json"}

CONTROLLER = "moretta.deployment.controller.Controller"  # what a job may make at a server, and at a site
EXECUTOR = "moretta.deployment.executor.Executor"
LAUNCHER_ID = "process_launcher"
LAUNCHER = "moretta.engines.flare.launcher.Launcher"
STOCK_LAUNCHER = "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher"
STREAMING = {"streaming_retry_timeout": 3, "streaming_retry_wait": 1}  # a timer thread a reply, else for 60 s

SHARED_STORAGE = "/tmp/nvflare/"  # FLARE's default: every server of a machine, and every user of it, would share it

HEARTBEATS = 30  # seconds without one of a site's, sent each 10, after which it counts as gone; FLARE's own are 600
SCHEDULING = {"min_schedule_interval": 1.0, "max_schedule_interval": 10.0, "max_schedule_count": 100_000}  # seconds


@dataclass(frozen=True)
class Kits:
    """Where the kits of one federation are: the server's, one a site, the administrator's."""

    server: Path
    sites: Mapping[str, Path]
    admin: Path


@dataclass(frozen=True)
class Certificates:
    """The files by which a kit proves who it is (certificate, private key) and knows the others (root)."""

    certificate: Path
    key: Path
    root: Path


def provision(out: Path, host: str, port: int, sites: Sequence[str]) -> Kits:
    """Make the kits of a server, of each site and of one administrator in `out`, or find those of the same arguments.

    host: the name or IPv4 address by which the sites reach the server; its certificate is for it and for localhost.
    port: of the server, for sites and administrator. sites: their names in the roster.
    The server's key, by which it signs what it sends, is in `out` too and in no kit; each site's has its public half.
    The key of the root is not kept: a site that comes later needs new kits for everybody.
    Raises ParameterError where FLARE cannot take a name, or `out` holds anything else.
    """
    wanted = {"host": host, "port": port, "sites": list(sites)}
    kits = Kits(out / SERVER_FOLDER, {site: out / site for site in sites}, out / ADMIN_FOLDER)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        _check_same(out, wanted)
        if not (out / KEY_FILE).exists():  # kits of a version that had none
            _make_key(out, sites)
        return kits
    for site in sites:
        if site in (SERVER_FOLDER, ADMIN_FOLDER, host) or list(sites).count(site) > 1:
            raise ParameterError(f"a site needs a name of its own, but {site!r} is taken: rename it")
    if not sites or not 0 < port < 65536:
        raise ParameterError(f"kits need at least one site and a port of 1 to 65535, got {len(sites)} and {port}")
    if len(host) > LONGEST_HOST:
        raise ParameterError(
            f"a certificate names a host of at most {LONGEST_HOST} characters: give {host} a short alias"
        )
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a crash
    try:
        partial.mkdir(mode=0o700, parents=True)
        made = _build(partial / "work", host, port, sites)
        for folder, name in [(SERVER_FOLDER, host), *((site, site) for site in sites), (ADMIN_FOLDER, ADMIN)]:
            rename(made / name, partial / folder)
        shutil.rmtree(partial / "work")  # with the key of the root
        _tune(partial / SERVER_FOLDER, kits.server)
        for site in sites:
            _restrict(partial / site)
        _make_key(partial, sites)
        _close_to_others(partial)
        write_atomically(partial / MANIFEST, _dump(wanted), 0o600)
        rename(partial, out)
    except OSError as error:
        raise ParameterError(f"the kits cannot be written to {out}: {error.strerror}; name another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return kits


def patch(kit: Path, silo: Path | None = None, server_key: Sequence[str] = ()) -> list[str]:
    """Make a server's or a site's kit able to run us; a second time changes nothing.

    silo: the site's silo.toml, written down for the job processes of a site. server_key: at a site, the server's public
    key as a line or a file, or two; at the server, the file or folder of its own, where that is not beside the kit.
    Returns a sentence for each change. Raises ParameterError where `kit` is no such kit, or a key is none.
    """
    files, done = _changes(kit, silo, server_key)
    for path, content in files.items():
        _write(path, content)
    return done


def lacks(kit: Path, silo: Path | None = None) -> list[str]:
    """Return what `patch` would change, and change nothing. Raises ParameterError where `patch` would."""
    return _changes(kit, silo)[1]


def _changes(
    kit: Path, silo: Path | None, server_key: Sequence[str] = ()
) -> tuple[dict[Path, Mapping[str, Any] | str], list[str]]:
    """Return the files that a patch writes, with what they are to hold, and a sentence for each change."""
    server = is_server(kit)
    if silo is not None and server:
        raise ParameterError(f"{kit} is the server's kit, and a server has no silo: patch a site's kit with it")
    local, files = kit / "local", dict[Path, Mapping[str, Any] | str]()
    resources = _resources(kit)
    done = [*_allow(resources, CONTROLLER if server else EXECUTOR)]
    done += _keep_jobs(resources, kit) if server else [*_replace_launcher(resources, kit), *_keep_logs(resources)]
    if done:
        files[local / "resources.json"] = resources
    comm = load_json(local / "comm_config.json") if (local / "comm_config.json").exists() else {}
    if any(comm.get(key) != value for key, value in STREAMING.items()):
        files[local / "comm_config.json"] = comm | STREAMING
        done.append("A reply that has been sent is given up after 3 s instead of 60 (comm_config.json).")
    if silo is not None:
        wanted = {"silo": os.path.abspath(silo)}  # links as given: what silo.toml names lies beside the link
        found = load_json(local / SILO) if (local / SILO).exists() else {}
        if found.get("silo") != wanted["silo"]:
            files[local / SILO] = found | wanted
            done.append(f"Where the site's silo.toml is has been written down ({SILO}).")
    if server and server_key:
        found = load_json(local / SILO) if (local / SILO).exists() else {}
        own = _own_key(kit, server_key)
        if own != found.get("identity"):
            files[local / SILO] = found | {"identity": own}
            done.append(f"Where the server's key is has been written down ({SILO}).")
    elif server_key:
        lines = "".join(f"{public_line(key)}\n" for key in _public_keys(server_key))
        if not (local / SERVER_KEY).exists() or (local / SERVER_KEY).read_text() != lines:
            files[local / SERVER_KEY] = lines
            done.append(f"Whom the site takes for the server has been written down ({SERVER_KEY}).")
    return files, done


def _make_key(out: Path, sites: Sequence[str]) -> None:
    """Make the server's key beside its kits, and put the public half into those of sites that are still there."""
    identity = Identity.fresh()
    for site in sites:
        if (out / site / "local").is_dir():
            _write(out / site / "local" / SERVER_KEY, f"{public_line(identity.public_key)}\n")
    (out / PUBLIC_FILE).unlink(missing_ok=True)  # of one whose key is gone
    identity.save(out)


def _own_key(kit: Path, given: Sequence[str]) -> str:
    if len(given) > 1:
        raise ParameterError(f"{kit} is the server's kit, and a server signs by one key; give one --server-key")
    Identity.load(given[0])
    return os.path.abspath(given[0])


def _public_keys(given: Sequence[str]) -> tuple[bytes, ...]:
    lines = [public_line(read_public_key(one)) if os.path.exists(one) else one for one in given]
    return parse_server_keys(lines)


def name_of(kit: Path) -> str:
    """Return the name of the party that a kit is for: a site's, "server", or the administrator's."""
    kind = _kind(kit)
    if kind == "server":
        return "server"
    if kind == "admin":
        return str(_startup(kit)["admin"]["username"] or _subject(kit))
    return str(_startup(kit)["client"].get("fqsn") or _subject(kit)).split(".")[-1]


def is_server(kit: Path) -> bool:
    """Tell a server's kit from a site's. Raises ParameterError where `kit` is neither."""
    kind = _kind(kit)
    if kind == "admin":
        raise ParameterError(f"expected a server's or a site's kit, and {kit} is an administrator's: name another")
    return kind == "server"


def address_of(kit: Path) -> tuple[str, int]:
    """Return host and port of the server that a kit belongs to."""
    kind, startup = _kind(kit), _startup(kit)
    if kind == "admin":
        return str(startup["admin"]["host"]), int(startup["admin"]["port"])
    host, _, port = str(startup["servers"][0]["service"]["target"]).rpartition(":")
    return host, int(port)


def organisation_of(kit: Path) -> str:
    """Return the organisation that a kit's certificate names; FLARE's authorisation goes by it."""
    return _named_in(_certificates(certificates_of(kit).certificate)[0], NameOID.ORGANIZATION_NAME)


def check(kit: Path, now: datetime | None = None) -> None:
    """Raise ParameterError where FLARE would fail at a kit's certificate, which it does without a word.

    The certificate is valid at `now` (with a time zone; else the clock's), issued by the kit's root, for the kit's key
    and, at a site, for the kit's name.
    """
    files, now = certificates_of(kit), now or datetime.now(UTC)
    chain = [*_certificates(files.certificate), _certificates(files.root)[0]]
    for each in chain:
        begins, ends = each.not_valid_before_utc, each.not_valid_after_utc
        if now < begins:
            raise ParameterError(
                f"a certificate of {kit} is valid from {begins:%Y-%m-%d %H:%M} UTC, and not now, as this machine's "
                f"clock says {now.astimezone(UTC):%Y-%m-%d %H:%M} UTC: set the clock"
            )
        if now > ends:
            raise ParameterError(
                f"a certificate of {kit} was valid until {ends:%Y-%m-%d}, and not now ({now:%Y-%m-%d}): get a new kit, "
                "or set this machine's clock if it is wrong"
            )
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
        raise ParameterError(
            f"{files.key} was expected to be a private key without a password: get a new kit"
        ) from error
    if key.public_key() != chain[0].public_key():
        raise ParameterError(f"{files.key} is not the key of the certificate beside it: get both from one kit")
    if _kind(kit) != "server" and _subject(kit) != name_of(kit):
        raise ParameterError(
            f"{kit} is for {name_of(kit)}, and its certificate for {_subject(kit)}: get both from one kit"
        )


def validity_of(kit: Path) -> tuple[datetime, datetime]:
    """Return from when until when all of a kit's certificates are valid."""
    files = certificates_of(kit)
    chain = [*_certificates(files.certificate), *_certificates(files.root)[:1]]
    return max(each.not_valid_before_utc for each in chain), min(each.not_valid_after_utc for each in chain)


def certificates_of(kit: Path) -> Certificates:
    """Return where a kit keeps its certificate, its private key and the root's certificate."""
    kind, startup = _kind(kit), _startup(kit)
    if kind == "admin":
        section, keys = startup["admin"], ("client_cert", "client_key", "ca_cert")
    else:
        section = startup["servers"][0] if kind == "server" else startup["client"]
        keys = ("ssl_cert", "ssl_private_key", "ssl_root_cert")
    return Certificates(*(kit / "startup" / section[key] for key in keys))


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
    text = json.dumps(_resources(made)).replace(SHARED_STORAGE, f"{json.dumps(str(kit.resolve()))[1:-1]}/")
    resources = json.loads(text)
    resources["servers"][0]["heart_beat_timeout"] = HEARTBEATS
    for component in resources["components"]:
        if component["id"] == "job_scheduler":
            component["args"] |= SCHEDULING
    _write(made / "local" / "resources.json", resources)


def _restrict(made: Path) -> None:
    """Let a site of ours run our jobs and nothing else: no other class, no code that a job brings, no shell.

    The administrator of these kits is the server's, whom a site does not trust with its machine.
    """
    resources = _resources(made)
    resources["class_allow_list"] = [EXECUTOR]
    _write(made / "local" / "resources.json", resources)
    rights = dict.fromkeys(("submit_job", "clone_job", "manage_job", "download_job", "view", "operate"), "any")
    rights |= dict.fromkeys(("shell_commands", "byoc", "server-predeployed-flwr"), "none")
    policy = {"format_version": "1.0", "permissions": {"project_admin": rights}}
    _write(made / "local" / "authorization.json", policy)


def _keep_jobs(resources: dict[str, Any], kit: Path) -> Iterator[str]:
    """Let a server of ours keep jobs and snapshots in its kit, also after the kit was moved."""
    none: dict[str, Any] = {}
    manager = next((each for each in resources.get("components", []) if each.get("id") == "job_manager"), none)
    snapshots = resources.get("snapshot_persistor", {}).get("args", {}).get("storage", {})
    changed = False
    for holder, key, folder in [(manager, "uri_root", "jobs-storage"), (snapshots, "root_dir", "snapshot-storage")]:
        found = Path(holder.get("args", {}).get(key, ""))
        if found.name == folder and not found.parent.exists():
            holder["args"][key] = str(kit.resolve() / folder)
            changed = True
    if changed:
        yield "Jobs and snapshots are kept in the kit, since the folder named for them is gone (resources.json)."


def _close_to_others(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            path.chmod(0o700)
        elif path.suffix == ".key":
            path.chmod(0o600)


def _allow(resources: dict[str, Any], wanted: str) -> Iterator[str]:
    """Let jobs make one class of ours, and nothing else of the package: a job names any callable, with arguments."""
    allowed = list(resources.get("class_allow_list", []))
    if wanted not in allowed and "*" not in allowed:
        resources["class_allow_list"] = [*allowed, wanted]
        yield f"Jobs may use {wanted} (class_allow_list in resources.json)."


def _replace_launcher(resources: dict[str, Any], kit: Path) -> Iterator[str]:
    components = resources.setdefault("components", [])
    found = next((each for each in components if each.get("id") == LAUNCHER_ID), None)
    if found is not None and found.get("path") not in (STOCK_LAUNCHER, LAUNCHER):
        raise ParameterError(
            f"{kit} starts its jobs by {found.get('path')}, and Moretta needs FLARE's own process launcher there: "
            f"remove {LAUNCHER_ID} from local/resources.json"
        )
    if found is None:
        components.append({"id": LAUNCHER_ID, "path": LAUNCHER, "args": {}})
    elif found["path"] != LAUNCHER:
        found["path"] = LAUNCHER
    else:
        return
    yield "A job process that dies is started again (process_launcher in resources.json)."


def _keep_logs(resources: dict[str, Any]) -> Iterator[str]:
    if resources.get("allow_log_streaming"):
        resources["allow_log_streaming"] = False
        yield "The site's logs stay at the site (allow_log_streaming in resources.json)."


def _kind(kit: Path) -> str:
    for kind, file in KINDS.items():
        if (kit / "startup" / file).is_file() and (kit / "local").is_dir():
            return kind
    raise ParameterError(
        f"{kit} is no startup kit of FLARE: expected local/ and one of {', '.join(KINDS.values())} in its startup/"
    )


def _startup(kit: Path) -> dict[str, Any]:
    return load_json(kit / "startup" / KINDS[_kind(kit)])


def _resources(kit: Path) -> dict[str, Any]:
    for file in ("resources.json", "resources.json.default"):
        if (kit / "local" / file).is_file():
            return load_json(kit / "local" / file)
    raise ParameterError(f"expected resources.json or resources.json.default in {kit / 'local'}, and there is neither")


def _write(path: Path, content: Mapping[str, Any] | str) -> None:
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        write_atomically(path, content.encode() if isinstance(content, str) else _dump(content), mode)
    except OSError as error:
        raise ParameterError(f"{path} cannot be written: {error.strerror}; give the right to it") from error


def _dump(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _subject(kit: Path) -> str:
    return _named_in(_certificates(certificates_of(kit).certificate)[0], NameOID.COMMON_NAME)


def _certificates(path: Path) -> list[x509.Certificate]:
    """Read a certificate, and those of its issuers below the root, where they follow it."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path} was expected to be a certificate: get a new kit") from error


def _named_in(certificate: x509.Certificate, attribute: x509.ObjectIdentifier) -> str:
    found = certificate.subject.get_attributes_for_oid(attribute)
    return str(found[0].value) if found else ""
