"""A job folder for sites that already run FLARE: three files of plain JSON that name importable classes only."""

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.deployment import shared_settings
from moretta.deployment.provisioning import CONTROLLER, EXECUTOR
from moretta.engines.flare.envelope import digest_of
from moretta.engines.folder_lock import alone
from moretta.engines.journal import Journal
from moretta.errors import ParameterError
from moretta.secure_aggregation.identity import Identity, Roster, verify

META, SERVER, SITE = "meta.json", "moretta-server", "moretta-site"
OF_SERVER, OF_SITE = f"{SERVER}/config/config_fed_server.json", f"{SITE}/config/config_fed_client.json"
_PURPOSE = "job of the server"
PLAYED = "moretta-played.txt"  # in the local folder of a server's kit
OF_FLARE = ".__nvfl_"  # the start of names of files that FLARE adds to a job that it signs
_PLAIN: Mapping[str, Any] = {
    "format_version": 2,
    "task_data_filters": [],
    "task_result_filters": [],
    "components": [],
}


def check(run_file: RunFile) -> None:
    """Raise `moretta.errors.ParameterError` unless a run file is for many machines."""
    if run_file.engine.name != "flare":
        raise ParameterError(
            f'[engine] name = "{run_file.engine.name}" is for one machine; many need name = "flare", sites, and [data] '
            'source = "sites" (docs/deploy.md)'
        )


def site_names(run_file: RunFile) -> list[str]:
    """Return the sites' names in FLARE: the silos' own, unless the roster names others."""
    roster = run_file.secure_aggregation.roster
    names = list(run_file.engine.sites)
    return names if roster is None else [Roster.load(run_file.resolve(roster)).engine_name(name) for name in names]


def write_job(run_file: RunFile, folder: Path, identity: Identity, **controller: str | bool | float) -> None:
    """Write a job, and replace the folder's content.

    Args:
        run_file: The server's, whole.
        folder: Of the job.
        identity: The server's key. It signs the server's half, which its job checks before it reads anything.
        controller: Further arguments of `moretta.deployment.controller.Controller`.
    """
    check(run_file)
    shutil.rmtree(folder, ignore_errors=True)
    names, text = site_names(run_file), shared_settings.shared_text(run_file)
    server: dict[str, str | bool | float] = {
        "run": run_files.dumps(run_file),
        "base": str(run_file.base.absolute()),
        "digest": digest_of(text),
        "out": "",
        "resume": False,
        "wait": 120.0,
        "status": "",
        "made": time.time(),
        **controller,
    }
    server["signature"] = identity.sign(_PURPOSE, signed_part(**server)).hex()
    site = {"told": text, "digest": digest_of(text), "made": server["made"]}
    _write(
        folder / META,
        {
            "name": run_file.run.name,
            "resource_spec": {},
            # No mandatory client: FLARE would end the job with any that it considers gone.
            "min_clients": 1,
            "deploy_map": {SERVER: ["server"], SITE: names},
        },
    )
    _write(
        folder / OF_SERVER,
        {**_PLAIN, "task_request_interval": 1.0, "workflows": [{"id": "moretta", "path": CONTROLLER, "args": server}]},
    )
    _write(
        folder / OF_SITE,
        {**_PLAIN, "executors": [{"tasks": ["none"], "executor": {"id": "moretta", "path": EXECUTOR, "args": site}}]},
    )


def signed_part(**server: str | bool | float) -> str:
    """Return the signed part of a job: the arguments of its controller, as JSON."""
    return json.dumps(server, sort_keys=True)


def play_once(signature: str, local: Path) -> None:
    """Record that a job runs; of two copies at once, only one runs.

    Args:
        signature: Of the job, in hex.
        local: Of the server's kit.

    Raises:
        ParameterError: The job ran before.
    """
    with alone(local / PLAYED):
        _check_first(signature, local)
        Journal(local / PLAYED).append(signature)


def _check_first(signature: str, local: Path) -> None:
    if signature in Journal(local / PLAYED).lines():
        raise ParameterError(
            "this job ran before, and a signed job runs once; make another by moretta job, or continue "
            "a run by moretta serve --resume"
        )


def check_signed(signed: str, signature: str, identity: Identity, local: Path) -> None:
    """Check that the holder of the server's key made a job, and that it runs for the first time.

    FLARE lets every administrator who may submit jobs name the class of a server's job, with any arguments. These name
    paths and code of the server's machine, and sites trust the run as the server's. Such an administrator could also
    submit a copy, and each run reveals more about the same rows.

    Args:
        signed: As of `signed_part`.
        signature: In hex.
        identity: The server's key.
        local: Of the server's kit.

    Raises:
        ParameterError: The signature is another key's, or of other arguments, or the job ran before.
    """
    try:
        good = verify(identity.public_key, bytes.fromhex(signature), _PURPOSE, signed)
    except ValueError:
        good = False
    if not good:
        raise ParameterError(
            "the job is not signed by this server's key: it was edited by hand, or another administrator made it; make "
            "it anew by moretta serve, or by moretta job with --server-key"
        )
    _check_first(signature, local)


def check_replaced(folder: Path) -> None:
    """Raise `moretta.errors.ParameterError` unless a path is free, or a folder that is empty or holds a job of ours."""
    if folder.exists() and not _is_ours(folder):
        raise ParameterError(f"{folder} exists and is not a job of Moretta; name another folder by --out")


def _is_ours(folder: Path) -> bool:
    """Return whether a folder is empty, or holds a job of `write_job` and nothing else, signed by FLARE or not."""
    if not folder.is_dir():
        return False
    files = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    written = {path.relative_to(folder).as_posix() for path in files if not path.name.startswith(OF_FLARE)}
    if not written:
        return not files
    if not {OF_SERVER} <= written <= {META, OF_SERVER, OF_SITE}:
        return False
    return CONTROLLER.encode() in (folder / OF_SERVER).read_bytes()


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
