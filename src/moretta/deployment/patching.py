"""Changes that let a kit run us: a class that jobs may use, a launcher that restarts them, whom a site trusts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moretta.deployment import kits
from moretta.deployment.server_key import SERVER_KEY, SILO, load_json
from moretta.errors import ParameterError
from moretta.secure_aggregation.identity import Identity, parse_server_keys, public_line, read_public_key

CONTROLLER = "moretta.deployment.controller.Controller"  # what a job may make at a server, and at a site
EXECUTOR = "moretta.deployment.executor.Executor"
LAUNCHER_ID = "process_launcher"
LAUNCHER = "moretta.engines.flare.launcher.Launcher"
STOCK_LAUNCHER = "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher"
STREAMING = {"streaming_retry_timeout": 3, "streaming_retry_wait": 1}  # a timer thread a reply, else for 60 s

Files = dict[Path, Mapping[str, Any] | str]


def patch(kit: Path, silo: Path | None = None, server_key: Sequence[str] = ()) -> list[str]:
    """Make a server's or a site's kit able to run us; a second time changes nothing.

    silo: the site's silo.toml, written down for the job processes of a site. server_key: at a site, the server's public
    key as a line or a file, or two; at the server, the file or folder of its own, where that is not beside the kit.
    Returns a sentence for each change. Raises ParameterError for a `kit` of another kind and for an invalid key.
    """
    files, done = _changes(kit, silo, server_key)
    for path, content in files.items():
        kits.write(path, content)
    return done


def lacks(kit: Path, silo: Path | None = None) -> list[str]:
    """Return what `patch` would change, and change nothing. Raises ParameterError where `patch` would."""
    return _changes(kit, silo)[1]


def _changes(kit: Path, silo: Path | None, server_key: Sequence[str] = ()) -> tuple[Files, list[str]]:
    """Return the files that a patch writes, with what they are to hold, and a sentence for each change."""
    server, files = kits.is_server(kit), Files()
    if silo is not None and server:
        raise ParameterError(f"{kit} is the server's kit, and a server has no silo: patch a site's kit with it")
    done = [*_resources(kit, files, server=server), *_streaming(kit, files)]
    if silo is not None:  # links as given: what silo.toml names lies beside the link
        done += _noted(kit, files, "silo", os.path.abspath(silo), "Where the site's silo.toml is")
    if server and server_key:
        done += _noted(kit, files, "identity", _own_key(kit, server_key), "Where the server's key is")
    elif server_key:
        done += _pinned(kit, files, server_key)
    return files, done


def _resources(kit: Path, files: Files, *, server: bool) -> Iterator[str]:
    resources = kits.resources(kit)
    done = [*_allow(resources, CONTROLLER if server else EXECUTOR)]
    done += _keep_jobs(resources, kit) if server else [*_replace_launcher(resources, kit), *_keep_logs(resources)]
    if done:
        files[kit / "local" / "resources.json"] = resources
    yield from done


def _streaming(kit: Path, files: Files) -> Iterator[str]:
    path = kit / "local" / "comm_config.json"
    found = _json(path)
    if any(found.get(key) != value for key, value in STREAMING.items()):
        files[path] = found | STREAMING
        yield "A reply that has been sent is given up after 3 s instead of 60 (comm_config.json)."


def _noted(kit: Path, files: Files, key: str, value: str, what: str) -> Iterator[str]:
    """Write down, for the job processes of a kit, where something is."""
    found = _json(kit / "local" / SILO)
    if found.get(key) != value:
        files[kit / "local" / SILO] = found | {key: value}
        yield f"{what} has been written down ({SILO})."


def _pinned(kit: Path, files: Files, server_key: Sequence[str]) -> Iterator[str]:
    path, lines = kit / "local" / SERVER_KEY, "".join(f"{public_line(key)}\n" for key in _public_keys(server_key))
    if not path.exists() or path.read_text() != lines:
        files[path] = lines
        yield f"Whom the site takes for the server has been written down ({SERVER_KEY})."


def _json(path: Path) -> dict[str, Any]:
    return load_json(path) if path.exists() else {}


def _own_key(kit: Path, given: Sequence[str]) -> str:
    if len(given) > 1:
        raise ParameterError(f"{kit} is the server's kit, and a server signs by one key; give one --server-key")
    Identity.load(given[0])
    return os.path.abspath(given[0])


def _public_keys(given: Sequence[str]) -> tuple[bytes, ...]:
    lines = [public_line(read_public_key(one)) if os.path.exists(one) else one for one in given]
    return parse_server_keys(lines)


def _allow(resources: dict[str, Any], wanted: str) -> Iterator[str]:
    """Let jobs make one class of ours, and nothing else of the package: a job names any callable, with arguments."""
    allowed = list(resources.get("class_allow_list", []))
    kept = [each for each in allowed if each == wanted or each.partition(".")[0] != "moretta"]  # once it was "moretta."
    if wanted not in allowed and "*" not in allowed:
        kept.append(wanted)
    if kept != allowed:
        resources["class_allow_list"] = kept
        yield f"Jobs may use {wanted}, and nothing else of Moretta (class_allow_list in resources.json)."


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
