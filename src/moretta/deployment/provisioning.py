"""Startup kits, made and patched: of a server, of one administrator, and of sites.

    KITS/server/  admin/  kits.json  identity.key  identity.pub     always; identity.key is the server's, in no kit
    KITS/<site>/                    for trials, by `moretta serve`: with a private key made here, and marked so
    KITS/authority/                 by `moretta kit new`: the root's key, which signs requests of sites

A patch lets a kit of any origin run Moretta: a class that jobs may use, a launcher that restarts them, and the server's
key that a site trusts.
"""

import contextlib
import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moretta.deployment import kits
from moretta.deployment.kits import ADMIN_FOLDER, SERVER_FOLDER, SERVER_KEY, SILO, TRIAL, Kits, load_json
from moretta.engines.files import check_unused, is_used, rename, write_atomically
from moretta.errors import ParameterError
from moretta.secure_aggregation.identity import (
    KEY_FILE,
    PUBLIC_FILE,
    Identity,
    parse_server_keys,
    public_line,
    read_public_key,
)

CONTROLLER = "moretta.deployment.controller.Controller"  # the class that a job may make at a server, and at a site
EXECUTOR = "moretta.deployment.executor.Executor"
LAUNCHER_ID = "process_launcher"
LAUNCHER = "moretta.engines.flare.launcher.Launcher"
STOCK_LAUNCHER = "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher"
COMMUNICATION = "comm_config.json"
STREAMING = {"streaming_retry_timeout": 3, "streaming_retry_wait": 1}  # a timer thread a reply, else for 60 s

Files = dict[Path, Mapping[str, Any] | str]


def patch(kit: Path, silo: Path | None = None, server_key: Sequence[str] = ()) -> list[str]:
    """Patch a server's or a site's kit to run Moretta; a second time changes nothing.

    Args:
        silo: the site's silo.toml, recorded for the job processes of a site.
        server_key: at a site, the server's public key as a line or a file, or two; at the server, the file or folder of
            its own key, where that is not beside the kit.

    Returns:
        A sentence for each change.

    Raises:
        ParameterError: a `kit` of another kind, or an invalid key.
    """
    files, done = _changes(kit, silo, server_key)
    for path, content in files.items():
        kits.write(path, content)
    return done


def lacks(kit: Path, silo: Path | None = None) -> list[str]:
    """Return the changes of `patch`, without making them. Raises ParameterError as `patch`."""
    return _changes(kit, silo)[1]


def _changes(kit: Path, silo: Path | None, server_key: Sequence[str] = ()) -> tuple[Files, list[str]]:
    """Return the files of a patch with their content, and a sentence for each change."""
    server, files, local = kits.is_server(kit), Files(), kit / "local"
    if silo is not None and server:
        raise ParameterError(f"{kit} is the server's kit, which takes no silo.toml: use --silo with a site's kit")
    resources = kits.resources(kit)
    communication, noted = (
        {} if not file.exists() else load_json(file) for file in (local / COMMUNICATION, local / SILO)
    )
    done = _allow(resources, CONTROLLER if server else EXECUTOR)
    done += _keep_jobs(resources, kit) if server else [*_replace_launcher(resources, kit), *_keep_logs(resources)]
    if done:
        files[local / "resources.json"] = resources
    if communication | STREAMING != communication:
        files[local / COMMUNICATION] = communication | STREAMING
        done.append("Retries of a sent reply end after 3 s instead of 60 (comm_config.json).")
    places = (
        {} if silo is None else {"silo": os.path.abspath(silo)}
    )  # links stay, because relative paths start beside them
    places |= {"identity": _own_key(kit, server_key)} if server and server_key else {}
    if noted | places != noted:
        files[local / SILO] = noted | places
        what = "The path of the site's silo.toml" if silo is not None else "The path of the server's key"
        done.append(f"{what} is recorded ({SILO}).")
    if server_key and not server:
        lines = [public_line(read_public_key(key)) if os.path.exists(key) else key for key in server_key]
        text = "".join(f"{public_line(key)}\n" for key in parse_server_keys(lines))
        if not (local / SERVER_KEY).exists() or (local / SERVER_KEY).read_text() != text:
            files[local / SERVER_KEY] = text
            done.append(f"The server's key is pinned at the site ({SERVER_KEY}).")
    return files, done


def _own_key(kit: Path, keys: Sequence[str]) -> str:
    if len(keys) > 1:
        raise ParameterError(f"{kit} is the server's kit, and a server signs by one key; name one --server-key")
    Identity.load(keys[0])
    return os.path.abspath(keys[0])


def _allow(resources: dict[str, Any], class_path: str) -> list[str]:
    """Let jobs make one class of the package and nothing else: a job names any callable, with arguments."""
    allowed = list(resources.get("class_allow_list") or [])
    kept = [
        each for each in allowed if each == class_path or each.partition(".")[0] != "moretta"
    ]  # an earlier version had "moretta."
    if class_path not in allowed and "*" not in allowed:
        kept.append(class_path)
    if kept == allowed:
        return []
    resources["class_allow_list"] = kept
    return [f"Jobs may use {class_path}, and nothing else of Moretta (class_allow_list in resources.json)."]


def _replace_launcher(resources: dict[str, Any], kit: Path) -> list[str]:
    components = resources.setdefault("components", [])
    launcher = next((each for each in components if each.get("id") == LAUNCHER_ID), None)
    if launcher is None:
        components.append(launcher := {"id": LAUNCHER_ID, "path": STOCK_LAUNCHER, "args": {}})
    if launcher.get("path") not in (STOCK_LAUNCHER, LAUNCHER):
        raise ParameterError(
            f"{kit} starts its jobs by {launcher.get('path')}, expected FLARE's own process launcher: remove "
            f"{LAUNCHER_ID} from local/resources.json"
        )
    if launcher["path"] == LAUNCHER:
        return []
    launcher["path"] = LAUNCHER
    return ["A job process that dies is started again (process_launcher in resources.json)."]


def _keep_logs(resources: dict[str, Any]) -> list[str]:
    if not resources.get("allow_log_streaming"):
        return []
    resources["allow_log_streaming"] = False
    return ["The site's logs stay at the site (allow_log_streaming in resources.json)."]


def _keep_jobs(resources: dict[str, Any], kit: Path) -> list[str]:
    """Let the server keep jobs and snapshots in its kit, also after the kit was moved."""
    managers = [each for each in resources.get("components", []) if each.get("id") == "job_manager"]
    snapshots = resources.get("snapshot_persistor", {}).get("args", {}).get("storage", {})
    changed = False
    folders = [
        *((manager, "uri_root", "jobs-storage") for manager in managers),
        (snapshots, "root_dir", "snapshot-storage"),
    ]
    for holder, key, folder in folders:
        path = Path(holder.get("args", {}).get(key, ""))
        if path.name == folder and not path.parent.exists():
            holder["args"][key] = str(kit.resolve() / folder)
            changed = True
    if not changed:
        return []
    return ["Jobs and snapshots are kept in the kit, since the folder named for them is gone (resources.json)."]


# Creation of kits

PROJECT = "moretta"
ADMIN = "admin@moretta.org"  # FLARE requires the form of an address; no mail is sent to it
ORGANISATION = "moretta"
MANIFEST = "kits.json"
AUTHORITY, ROOT_KEY, ROOT = "authority", "root.key", "rootCA.pem"
ROOT_DAYS = 3650  # of a root that signs requests; its certificates end after 360 days, as all of FLARE's
AT_SITES = "sites"  # in the manifest, as the place where keys are made
LONGEST_HOST = 64  # characters of a common name
TRIAL_TEXT = """This kit is for trials.

Its private key was made on the server's machine, and not at the site. Anyone who ran `moretta serve` there, or
saw this kit on its way, could pose as the site. Between organisations the site makes its own key, which nobody else
sees: moretta join KIT --silo silo.toml --request (docs/deploy.md).
"""
SHARED_STORAGE = "/tmp/nvflare/"  # FLARE's default, which all servers and users of a machine would share
HEARTBEATS = 30  # seconds without a site's heartbeat (every 10) after which it counts as gone; FLARE's default is 600
SCHEDULING = {"min_schedule_interval": 1.0, "max_schedule_interval": 2.0, "max_schedule_count": 100_000}  # seconds


def provision(out: Path, host: str, port: int, sites: Sequence[str]) -> Kits:
    """Make the kits of a server, of each site and of one administrator in `out`, or return existing ones.

    The server's key, which signs its messages, is in `out` too and in no kit; each site's kit has its public half. Kits
    made here are for trials, and marked so: they hold the sites' private keys. The key of the root is not kept, so a
    later site needs new kits for all. Kits of `provision_authority` serve any sites, which make their own.

    Args:
        host: the name or IPv4 address by which the sites reach the server; its certificate is for it and localhost.
        port: of the server, for sites and administrator.
        sites: their names in the roster.

    Raises:
        ParameterError: FLARE does not accept a name, or `out` holds anything else.
    """
    manifest = {"host": host, "port": port, "sites": list(sites)}
    if is_used(out):
        _check_same(out, manifest)
        if not (out / KEY_FILE).exists():  # kits of a version without one
            _make_key(out, sites)
    elif not sites:
        raise ParameterError("kits need at least one site, got none")
    else:
        _make(out, manifest)
    return Kits(out / SERVER_FOLDER, {site: out / site for site in sites}, out / ADMIN_FOLDER)


def provision_authority(out: Path, host: str, port: int) -> Kits:
    """Make the kits of a server and of one administrator in a new folder, and keep the root's key for requests.

    Args:
        host, port: As in `provision`.

    Raises:
        ParameterError: `out` is not empty or not writable, or the host or port is invalid.
    """
    check_unused(out, ", and kits are never overwritten: name a new folder")
    _make(out, {"host": host, "port": port, "keys": AT_SITES})
    return Kits(out / SERVER_FOLDER, {}, out / ADMIN_FOLDER)


def provision_site(folder: Path, name: str, host: str, port: int) -> Path:
    """Make the kit of a site below a folder, without key and certificates, and return its path.

    FLARE's start scripts and the site's permissions are from this machine, and not from the server.
    """
    from nvflare.lighter.constants import CtxKey

    kit = Path(_build(folder, host, port, (name,), ())[CtxKey.CURRENT_PROD_DIR]) / name
    _restrict(kit)
    return kit


def keys_at_sites(out: Path) -> bool:
    """Return whether a folder of kits is of `provision_authority`, so that sites make their own keys."""
    return (out / MANIFEST).is_file() and load_json(out / MANIFEST).get("keys") == AT_SITES


def _make(out: Path, manifest: Mapping[str, Any]) -> None:
    """Make a folder of kits whole or not at all. manifest: its manifest."""
    host, port, sites = manifest["host"], manifest["port"], manifest.get("sites", [])
    for site in sites:
        if site in (SERVER_FOLDER, ADMIN_FOLDER, host) or sites.count(site) > 1:
            raise ParameterError(f"the site's name {site!r} is taken: rename the site")
    if not 0 < port < 65536:
        raise ParameterError(f"kits need a port of 1 to 65535, got {port}")
    if len(host) > LONGEST_HOST:
        raise ParameterError(
            f"the host {host} is too long, expected at most {LONGEST_HOST} characters: use a short alias"
        )
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a crash
    try:
        _fill(partial, out / SERVER_FOLDER, manifest)
        rename(partial, out)
    except OSError as error:
        raise ParameterError(f"the kits cannot be written to {out}: {error.strerror}; name another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(folder: Path, server: Path, manifest: Mapping[str, Any]) -> None:
    """Make all kits in a folder. server: the later path of the server's."""
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.impl.cert import CertBuilder
    from nvflare.lighter.utils import serialize_pri_key

    signs, host, sites = "keys" in manifest, manifest["host"], manifest.get("sites", [])
    folder.mkdir(mode=0o700, parents=True)
    context = _build(folder / "work", host, manifest["port"], sites, [CertBuilder(*([ROOT_DAYS] if signs else []))])
    made = Path(context.get_result_location())
    for kit, name in [(SERVER_FOLDER, host), *((site, site) for site in sites), (ADMIN_FOLDER, ADMIN)]:
        rename(made / name, folder / kit)
    shutil.rmtree(folder / "work")  # with the key of the root
    if signs:
        (folder / AUTHORITY).mkdir(mode=0o700)
        write_atomically(folder / AUTHORITY / ROOT_KEY, serialize_pri_key(context[CtxKey.ROOT_PRI_KEY]), 0o600)
        shutil.copy(kits.certificates_of(folder / SERVER_FOLDER).root, folder / AUTHORITY / ROOT)
    _tune(folder / SERVER_FOLDER, server)
    for site in sites:
        _restrict(folder / site)
        kits.write(folder / site / TRIAL, TRIAL_TEXT)
    _make_key(folder, sites)
    write_atomically(folder / MANIFEST, kits.dump(manifest), 0o600)
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            path.chmod(0o700)
        elif path.suffix == ".key":
            path.chmod(0o600)


def _make_key(out: Path, sites: Sequence[str]) -> None:
    """Make the server's key beside its kits, and put the public half into the sites' kits that still exist."""
    identity = Identity.fresh()
    for site in sites:
        if (out / site / "local").is_dir():
            kits.write(out / site / "local" / SERVER_KEY, f"{public_line(identity.public_key)}\n")
    (out / PUBLIC_FILE).unlink(missing_ok=True)  # the public half of a lost key
    identity.save(out)


def _build(work: Path, host: str, port: int, sites: Sequence[str], further: Sequence[Any]) -> Any:
    """Let FLARE make the folders of all parties, each with its party's name, and return its context.

    further: FLARE's builders besides those of folders and of public files.
    """
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.entity import Participant, Project
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
        builders = [WorkspaceBuilder(), StaticFileBuilder(config_folder="config", scheme="grpc"), *further]
        context = Provisioner(str(work), builders).provision(project)
    if context.get(CtxKey.BUILD_ERROR):
        raise ParameterError(f"FLARE could not make the kits: {' '.join(context.get_errors())}")
    return context


def _check_same(out: Path, manifest: Mapping[str, Any]) -> None:
    existing = load_json(out / MANIFEST) if (out / MANIFEST).is_file() else None
    if existing is None:
        raise ParameterError(f"{out} is not empty and holds no kits of Moretta: name a new folder")
    brought = existing.get("keys") == AT_SITES
    if any(existing.get(key) != manifest[key] for key in ("host", "port", *(() if brought else ("sites",)))):
        sites = "any sites, who make their keys" if brought else f"sites {', '.join(existing.get('sites', []))}"
        raise ParameterError(
            f"{out} holds the kits of host {existing.get('host')}, port {existing.get('port')} and {sites}; this "
            "request differs: name a new folder"
        )


def _tune(made: Path, kit: Path) -> None:
    """Configure the server: jobs and snapshots stay in its kit, and it soon notices which sites come and go."""
    text = json.dumps(kits.resources(made)).replace(SHARED_STORAGE, f"{json.dumps(str(kit.resolve()))[1:-1]}/")
    resources = json.loads(text)
    resources["servers"][0]["heart_beat_timeout"] = HEARTBEATS
    for component in resources["components"]:
        if component["id"] == "job_scheduler":
            component["args"] |= SCHEDULING
    kits.write(made / "local" / "resources.json", resources)


def _restrict(made: Path) -> None:
    """Let a site run Moretta's jobs and nothing else: no other class, no code of a job, no shell.

    The administrator of these kits is the server's, whom a site does not trust with its machine.
    """
    resources = kits.resources(made)
    resources["class_allow_list"] = [EXECUTOR]
    kits.write(made / "local" / "resources.json", resources)
    rights = dict.fromkeys(("submit_job", "clone_job", "manage_job", "download_job", "view", "operate"), "any")
    rights |= dict.fromkeys(("shell_commands", "byoc", "server-predeployed-flwr"), "none")
    policy = {"format_version": "1.0", "permissions": {"project_admin": rights}}
    kits.write(made / "local" / "authorization.json", policy)
