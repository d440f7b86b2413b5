"""The checks of `moretta doctor`: of a machine, a kit, a site and a run. `moretta join` begins with those of its site.

A check is a function that returns a sentence, `Warned` for a warning, or raises one of `moretta.errors` with a remedy.
It changes nothing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.config.silo_file import RowsSection, SiloFile
from moretta.contract.memory import free_memory
from moretta.data.images.folder import FOLDER
from moretta.data.tables.files import ENDINGS, is_table
from moretta.deployment import job, kits, provisioning, server_connection, shared_settings, site_policy
from moretta.deployment.agreed_settings import SiteAgreement, differences, pinned_settings
from moretta.deployment.kits import identity_of, load_json, server_keys
from moretta.deployment.site import EdgeRole
from moretta.engines.confinement import landlock
from moretta.errors import MissingExtra, MorettaError, ParameterError
from moretta.secure_aggregation.identity import Identity, Roster, fingerprint

if TYPE_CHECKING:
    from moretta.run.federation import Federation

T = TypeVar("T")


class Warned(str):
    """The sentence of a check that passes with a warning."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        sentence: The finding, and a remedy if the check fails.
        warns: Whether the check passes with a warning.
    """

    what: str
    passes: bool
    sentence: str
    warns: bool = False

    def line(self) -> str:
        """Return it as a line."""
        return f"{'FAIL' if not self.passes else 'warn' if self.warns else 'ok  '} {self.what}: {self.sentence}"


def look(what: str, check: Callable[[], str]) -> CheckResult:
    """Run a check; return its sentence or its error as a result."""
    try:
        text = check()
    except MorettaError as error:
        return CheckResult(what, False, str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("torch", "nvflare", "grpc", "sklearn"):
            raise
        return CheckResult(what, False, f"is unknown without {package}; install it by: pip install 'moretta[flare]'")
    except OSError as error:
        return CheckResult(what, False, f"{error.filename or what}: {error.strerror or error}; grant permission")
    return CheckResult(what, True, str(text), isinstance(text, Warned))


def loaded(what: str, path: Path, load: Callable[[], T]) -> tuple[T | None, CheckResult]:
    """Return a file's content, or None, and the result of reading it."""
    contents: list[T] = []

    def check() -> str:
        contents.append(load())
        return f"{path} is right"

    result = look(what, check)
    return (contents[0] if contents else None), result


PYTHONS = ((3, 11), (3, 13))  # the first and the last
FLARE = (2, 9)
COPIES = 4  # of a model's parameters in a round, at least: themselves, gradients, sent and received ones
LEAST_DISK, KEPT = 100 * 2**20, 20  # bytes; or a multiple of the parameters: checkpoints, views, released models


def python() -> str:
    """Check that FLARE runs on this Python."""
    version, (first, last) = sys.version_info[:2], PYTHONS
    if not first <= version <= last:
        raise ParameterError(
            f"is {version[0]}.{version[1]}; FLARE needs 3.11 to 3.13: make an environment with one of these"
        )
    return f"version {version[0]}.{version[1]}"


def pytorch(edge: bool) -> str:
    """Check that PyTorch is installed, unless the silo is an edge client."""
    if edge:
        return "an edge site does not use it"
    return f"version {_installed('torch', 'torch')}; sites run the server's, or one of [engine] torch-versions"


def _installed(package: str, extra: str) -> str:
    """Return the version of a package. extra: Moretta's extra that installs it."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(f"is not installed; install it by: pip install 'moretta[{extra}]'")
    return metadata.version(package)


def flare(extra: str) -> str:
    """Check that FLARE is installed. extra: Moretta's extra that installs it."""
    version = _installed("nvflare", extra)
    numbers = tuple(int(part) if part.isdecimal() else 0 for part in version.split(".")[:2])
    if numbers < FLARE:
        raise ParameterError(f"is version {version}, expected 2.9 or newer; run: pip install -U 'moretta[{extra}]'")
    return f"version {version}"


def confinement() -> str:
    """Check that the kernel can confine a process that runs another party's graph."""
    if not landlock():
        return Warned("this kernel has no Landlock (Linux 5.13), so a graph's process could read your files")
    return "Landlock keeps the process of a graph from your files"


def onnx_runtime() -> str:
    """Check that ONNX Runtime is installed."""
    return f"onnxruntime {_installed('onnxruntime', 'edge')}"


def device_is_there(device: str) -> str:
    """Check that PyTorch finds a GPU."""
    import torch

    number = int(device.partition(":")[2] or 0)
    if not torch.cuda.is_available() or number >= torch.cuda.device_count():
        raise ParameterError(f'PyTorch finds no {device}; correct [limits] device, for example to "cpu"')
    return f"{device} is available"


def memory(size: int, holders: int) -> str:
    """Check that a round fits.

    Args:
        size: The bytes of the parameters.
        holders: The number of silos whose uploads are in memory at once.

    Raises:
        ParameterError: Less memory is free.
    """
    free, needed = free_memory(), size * (COPIES + 2 * holders)  # sent numbers have 8 bytes
    if not size:
        return f"{_shown(free)} free; add --run to compare with what a model takes"
    if free < needed:
        raise ParameterError(
            f"{_shown(free)} free, and this model needs at least {_shown(needed)}; end other programs, or use another "
            "machine"
        )
    return f"{_shown(free)} free; parameters are {_shown(size)}, and a round needs at least {_shown(needed)}"


def disk(out: Path, size: int) -> str:
    """Check that a run fits at a folder. size: bytes of the parameters."""
    free, needed = shutil.disk_usage(_nearest(out)).free, max(LEAST_DISK, KEPT * size)
    if free < needed:
        raise ParameterError(f"{_shown(free)} free, expected {_shown(needed)}; make room, or name another folder")
    return f"{_shown(free)} free at {_nearest(out)}"


def writable(folder: Path) -> str:
    """Check that a folder can be written to, or made. Raises `moretta.errors.ParameterError`."""
    folder, there = folder.absolute(), _nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=there) as stream:
            stream.write(b"1")
    except OSError as error:
        raise ParameterError(
            f"{folder} cannot be written to ({error.strerror}); grant write permission, or name another folder"
        ) from None
    return f"{folder} can be {'written to' if there == folder else 'made'}"


def _nearest(folder: Path) -> Path:
    folder = folder.absolute()
    return next((parent for parent in (folder, *folder.parents) if parent.exists()), folder)


def _shown(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


SOON = timedelta(days=30)  # a certificate within it should be renewed
WAIT = 4.0  # seconds for a server's answer
TIME = 1.0  # seconds for its time
APART, FAR = 30.0, 600.0  # seconds between two clocks for a warning, and for a failure
POLICIES = ("authorization.json", "authorization.json.default")  # in local/; the first that exists counts
PORT = 8002  # of `moretta serve` unless another is named


def kind_of(kit: Path, with_silo: bool) -> str:
    """Return "server" or "site". with_silo: whether there is a silo.toml too, which only a site has."""
    kind = "server" if kits.is_server(kit) else "site"
    if with_silo and kind == "server":
        raise ParameterError(f"{kit} is the server's kit, but silo.toml is a site's; name the site's own kit")
    return kind


def certificate(kit: Path, now: datetime) -> str:
    """Check that FLARE would accept the certificate, and that it does not end soon."""
    kits.check_certificates(kit, now)
    until = kits.validity_of(kit)[1]
    if until - now < SOON:
        return Warned(
            f"ends in {(until - now).days} days, on {until:%Y-%m-%d}; have new kits made before, or run moretta join "
            "--request if the key is this site's own"
        )
    return f"is of {kits.name_of(kit)}, issued by the kit's root, valid until {until:%Y-%m-%d}"


def private_key(kit: Path) -> str:
    """Check that the private key is unreadable for others."""
    path = kits.certificates_of(kit).key
    mode = path.stat().st_mode & 0o777
    if os.name == "posix" and mode & 0o077:
        return Warned(f"is open to others (mode {mode:04o}); run: chmod 600 {path}")
    if kits.for_trials(kit):
        return Warned("was made by the server, for trials; make your own by moretta join KIT --silo --request")
    return "is closed to others"


def patched(kit: Path, silo: Path | None) -> str:
    """Check that the kit runs Moretta's jobs."""
    missing = provisioning.lacks(kit, silo)
    if missing:
        return (
            f"lacks {len(missing)} changes, which moretta serve and join make when they start; for a FLARE that you "
            f"start yourself run: moretta kit patch {kit}{'' if silo is None else f' --silo {silo}'}"
        )
    return "runs Moretta's jobs"


def policy(kit: Path) -> str:
    """Check who may bring code through a site's kit: by FLARE's own policy, administrators of every organisation."""
    path = next((path for name in POLICIES if (path := kit / "local" / name).exists()), None)
    roles = {} if path is None else load_json(path).get("permissions", {})
    byoc = {role: own.get("byoc", "none") if isinstance(own, dict) else own for role, own in roles.items()}
    open_to = [role for role, right in byoc.items() if right != "none"]
    if path is None or open_to:
        whom = ", ".join(open_to) if path is not None else "everybody"
        return Warned(
            f"{whom} may bring code in a job, which would run here with all rights of this site; set byoc to none for "
            f"each role in {kit / 'local' / POLICIES[0]}"
        )
    resources = kits.resources(kit)
    if "*" in (resources.get("class_allow_list") or []) or resources.get("class_list_enforcement_mode") == "warn":
        return Warned(
            "a job may name any class; in local/resources.json, remove '*' from class_allow_list, and warn from "
            "class_list_enforcement_mode"
        )
    return "lets nobody bring code"


def server_answers(kit: Path) -> str:
    """Check that the server answers FLARE's transport, and that both accept each other's certificate."""
    return f"answers at {server_connection.reach_by_grpc(kit, WAIT)}, and both accept each other's certificate"


def clock(kit: Path, now: datetime, named: bool) -> str:
    """Compare the clock with the certificate's dates, which begin when a kit is made, and with the server's clock."""
    begins, ends = kits.validity_of(kit)
    if now < begins:
        raise ParameterError(
            f"says {now:%Y-%m-%d %H:%M} UTC, but the kit was made at {begins:%Y-%m-%d %H:%M} UTC; set the clock"
        )
    ahead = server_connection.clock_of_server(kit, TIME) if named else None
    if ahead is None:
        return Warned(
            f"is unknown: no server sends its time; {now:%Y-%m-%d %H:%M} UTC is after the kit was made "
            f"({begins:%Y-%m-%d %H:%M} UTC){'' if now <= ends else ' and after its certificate ended'}"
        )
    difference = f"is {abs(ahead):.0f} s {'behind' if ahead > 0 else 'ahead of'} the server's"
    if abs(ahead) > FAR:
        raise ParameterError(f"{difference}; set the wrong clock, best by NTP")
    return Warned(f"{difference}; set both by NTP") if abs(ahead) > APART else f"{difference}, by its greeting"


def free_port(kit: Path | None, port: int | None) -> str:
    """Check that a server could listen at a port, else at its kit's."""
    port = port or (PORT if kit is None else kits.address_of(kit)[1])
    server_connection.check_port(port)
    return f"{port} is free"


def own_key(local: Path) -> str:
    """Check that the server has its own key. local: the folder of its kit."""
    return f"{fingerprint(identity_of(local).public_key)}; sites pin it, and compare it (moretta keys show)"


def belongs(kit: Path, silo: Path, file: SiloFile) -> str:
    """Check that a silo.toml and a site's kit belong to the same site. Raises `moretta.errors.ParameterError`."""
    if kits.is_server(kit):
        raise ParameterError(
            f"{kit} is the server's kit; a site needs its own: name the one that moretta serve made beside it"
        )
    name = file.engine_name
    if name != kits.name_of(kit):
        raise ParameterError(
            f"{silo} is of `{name}`, and {kit} is the kit of `{kits.name_of(kit)}`; use the kit of the same name"
        )
    return f"kit and silo.toml are both of {name}"


def identified(file: SiloFile) -> str:
    """Check a site's own key against its roster. Raises `moretta.errors.ParameterError`."""
    roster = file.load_roster()
    if roster is None or file.silo.roster is None or file.silo.identity is None:
        return "not set, so this site is for runs without a roster"
    identity = Identity.load(file.base / file.silo.identity)
    roster.check([file.silo.name])
    if roster.keys[file.silo.name] != identity.public_key:
        raise ParameterError(
            f"the key of {file.silo.name} in {file.base / file.silo.roster} is not that of "
            f"{file.base / file.silo.identity}; put the line of moretta keys show there"
        )
    mine = fingerprint(identity.public_key)
    return f"{mine}, in a roster of {len(roster.keys)} whose digest begins with {roster.digest[:32]}"


def pinned(kit: Path, file: SiloFile) -> str:
    """Check that a site pins its server's key. Raises `moretta.errors.ParameterError`."""
    local = kit / "local"
    keys, where = kits.pinned(file, local)
    if not keys:
        raise ParameterError(kits.NONE_PINNED)
    text = f"{' and '.join(map(fingerprint, keys))}, of {where}"
    others = server_keys(local)
    if others and not set(others) & set(keys):
        return Warned(f"{text}; the kit has {' and '.join(map(fingerprint, others))}: ask the operator which is right")
    return text


def _file_of(data: RowsSection) -> str:
    """Return the file of the rows: for a folder of images the table that names them."""
    return data.source if data.source != FOLDER or data.labels is None else str(data.labels)


def openable(file: SiloFile) -> str:
    """Check that the file of a site's rows can be opened. Raises `moretta.errors.ParameterError`."""
    source = _file_of(file.data)
    if not source.endswith((*ENDINGS, ".npz")):
        from moretta.data.references import OWN_CODE, resolve

        resolve(source, file.base, OWN_CODE)
        return f"{source} can be imported; add --run to see whether its rows fit"
    path = file.base / source
    try:
        with path.open("rb") as stream:
            some = stream.read(1)
    except OSError as error:
        raise ParameterError(f"{path} cannot be read ({error.strerror}); correct [data] source") from None
    if not some:
        raise ParameterError(f"{path} is empty; correct [data] source")
    return f"{path} can be read; add --run to see whether its rows fit"


def mapped(file: SiloFile) -> str:
    """Check that [mapping] fits the site's tables, and count its effect. Raises `moretta.errors.ParameterError`."""
    data, mapping = file.data, file.mapping
    source = _file_of(data)
    if not is_table(source):
        raise ParameterError(f"[mapping] needs tables, got [data] source = {source!r}; remove it")
    names = [source, *([] if data.test is None else [data.test])]
    return "; ".join(f"{name}: {mapping.read(file.base / name, data.form, name)[1].sentence()}" for name in names)


def for_many_machines(run_file: RunFile) -> str:
    """Check that a run file is for many machines."""
    job.check(run_file)
    return f"{len(run_file.engine.sites)} sites: {', '.join(run_file.engine.sites):.200}"


def model(run_file: RunFile, file: SiloFile | None, server: bool, built: list[Federation]) -> str:
    """Build the model as the server does, or at a site from shared settings and code that silo.toml lists.

    Args:
        built: Receives the federation, if any.
    """
    source = run_file.model.source
    if not server and file is not None and file.silo.edge:
        return f"{source}: an edge site runs none of its code, because the server sends the graph"
    if server:
        federation = shared_settings.server_side(run_file, run_file.folder)
        federation.rehearse(run_file.run.rounds, run_file.run.seed)
    else:
        run_file = _as_sent(run_file, file)
        federation = shared_settings.server_side(run_file, run_file.base)
    built.append(federation)
    digest = shared_settings.model_digest(federation, run_file)[:32]
    from moretta.protocols.common.modules import size  # needs torch, like the federation

    count = size(federation.model)
    return f"{source} of {count} parameters; its digest begins with {digest}, the same for all"


def roster_lists_all(run_file: RunFile) -> str:
    """Check that a run's roster lists its sites."""
    path = run_file.secure_aggregation.roster
    roster = Roster.load(run_file.resolve(path or ""))
    roster.check(run_file.engine.sites)
    return f"{len(roster.keys)} silos; its digest begins with {roster.digest[:32]}, the same for all"


def rows_fit(run_file: RunFile, file: SiloFile) -> str:
    """Check that a site's rows can be read in the form that a run expects."""
    known = _as_sent(run_file, file)
    silos = EdgeRole(known, file).silos if file.silo.edge else shared_settings.site_side(known, file).silos
    mine = next(silo for silo in silos if not silo.remote)
    held = sum(len(part[0]) for part in (mine.held_out, mine.validation) if part is not None)
    more = f"; {held} more are held back" if held else ""
    return f"{len(mine.x)} rows of shape {list(mine.x.shape[1:])}, as the run expects{more}"


def _as_sent(run_file: RunFile, file: SiloFile | None) -> RunFile:
    """Return a run as the site receives it, if its silo.toml permits it."""
    text = shared_settings.shared_text(run_file)
    if file is None:
        return run_files.loads(text, run_file.base / "run.toml")
    return site_policy.permitted(text, file)


def agreed(run_file: RunFile | None, file: SiloFile) -> str:
    """Report the settings that a site has agreed to, a refused run, and whether a run is among them."""
    agreement = SiteAgreement(file.out)
    known, waiting = agreement.agreed(), agreement.waiting()
    if closed := [entry for entry in known if entry.closed]:
        raise ParameterError(
            f"this site's rows did not fit the run's settings at {closed[0].closed} (see its log); correct the rows or "
            "silo.toml, then run moretta accept"
        )
    if known and run_file is not None:
        settings = pinned_settings(_as_sent(run_file, file))
        if all(entry.settings != settings for entry in known):
            changes = "; ".join(differences(known[-1].settings, settings))
            return Warned(f"the run differs from this site's agreed settings ({changes:.600}); see moretta accept")
    if waiting is not None:
        return Warned(f"a run was refused: {waiting.sentence}")
    return f"{len(known)} sets of settings" if known else "nothing yet: the first run's settings will be pinned"


def spent(file: SiloFile) -> str:
    """Report the epsilon that the site's runs may have spent of its own limit."""
    before, most = site_policy.spent_by(file), file.privacy.max_epsilon
    of = "of all runs" if file.privacy.per == "data set" else "of each run"
    return f"{len(before)} runs may have spent {sum(before.values()):g} together; the limit {of} is {most:g}"


def same_sums(run_file: RunFile, file: SiloFile) -> str:
    """Check that a run and a site agree whether there is a roster."""
    secure = run_file.secure_aggregation
    if (secure.roster is None) == (file.silo.roster is None) or secure.scheme == "none":
        return f"scheme {secure.scheme}, {'with' if secure.roster is not None else 'without'} a roster"
    if secure.roster is None:
        return Warned("silo.toml has a roster, but the run names none; have the run name the same one")
    raise ParameterError("the run has a roster, but silo.toml names none; add roster and identity to [silo]")


def bytes_of(federation: Federation) -> int:
    """Return the bytes of a run's parameters."""
    from moretta.protocols.common.modules import size

    width = 8 if federation.spec.run.dtype == "float64" else 4
    return size(federation.model) * width


def run_folder(out: Path, server: bool) -> str:
    """Check that a run folder can be written to, and warn of a used one."""
    text = writable(out)
    if server and out.exists() and any(out.iterdir()):
        return Warned(f"{out} is not empty; continue that run by --resume, or name another by --out")
    return text
