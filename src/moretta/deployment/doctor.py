"""`moretta doctor`: looks whether a machine could take part, and says of each thing that keeps it how to mend it.

A check is a function that returns a sentence, `Warned` where it passes and should be heeded, or raises one of
`moretta.errors` with what to do; it changes nothing. `moretta join` begins by those that its site needs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from moretta import __version__
from moretta.config import run_files, silo_file
from moretta.config.run_files import RunFile
from moretta.config.silo_file import SiloFile
from moretta.deployment import kits, processes, server_key
from moretta.deployment.server_key import identity_of, server_keys
from moretta.errors import MissingExtra, MorettaError, ParameterError, RunFailed
from moretta.secure_aggregation.identity import Identity, Roster, fingerprint

if TYPE_CHECKING:
    from moretta.run.federation import Federation

T = TypeVar("T")

PYTHONS = ((3, 11), (3, 13))  # the first and the last
FLARE = (2, 9)
SOON = timedelta(days=30)  # in which a certificate should be renewed
WAIT = 5.0  # seconds in which a server is to answer
APART, FAR = 30.0, 600.0  # seconds between two clocks that should be heeded, and that do not pass
COPIES = 4  # of a model's parameters that a round takes at least: themselves, gradients, what is sent, what came
LEAST_DISK, KEPT = 100 * 2**20, 20  # bytes; or so many times the parameters: checkpoints, views, released models
PORT = 8002  # of `moretta serve` where no other is named


class Warned(str):
    """A sentence about what passes and should be heeded."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. sentence: what was found, and where it does not pass what to do.

    warns: it passes, and should be heeded all the same.
    """

    what: str
    passes: bool
    sentence: str
    warns: bool = False

    def told(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"what": self.what, "passes": self.passes, "warns": self.warns, "sentence": self.sentence}

    def line(self) -> str:
        """Return it as a line."""
        return f"{'FAIL' if not self.passes else 'warn' if self.warns else 'ok  '} {self.what}: {self.sentence}"


def examine(
    *, kit: Path | None, silo: Path | None, run: Path | None, port: int | None = None, now: datetime | None = None
) -> list[Finding]:
    """Look at everything that can be looked at with what is given.

    kit, silo: of a site. run: of the server, with its kit or without; beside a site's own, what its rows are to fit.
    port: that the server is to listen at, else its kit's. now: instead of the clock's, with a time zone.
    Raises `moretta.errors.ParameterError` where nothing is given.
    """
    if kit is None and silo is None and run is None:
        raise ParameterError(
            "nothing to look at: give --kit and --silo of a site, or --run of the server, or all three at a site"
        )
    return list(_findings(kit, silo, run, port, now or datetime.now(UTC)))


def _findings(
    kit: Path | None, silo: Path | None, run: Path | None, port: int | None, now: datetime
) -> Iterator[Finding]:
    run_file, file, server, of_files = None, None, False, list[Finding]()
    if run is not None:
        run_file, finding = _loaded("run file", run, lambda: run_files.load(run))
        of_files.append(finding)
    if silo is not None:
        file, finding = _loaded("silo.toml", silo, lambda: silo_file.load(silo))
        of_files.append(finding)
    edge = file is not None and file.silo.edge
    yield _look("python", _python)
    yield _look("moretta", lambda: f"version {__version__}; server and sites run the same")
    yield _look("torch", lambda: _torch(edge))
    yield _look("nvflare", lambda: _flare("edge-flare" if edge else "flare"))
    yield from of_files
    if kit is None and silo is None:
        server = True
        if run_file is not None:
            beside = run_file.folder
            beside = beside.with_name(f"{beside.name}-kits") / kits.SERVER_FOLDER
            kit = beside if beside.is_dir() else None
    if kit is not None:
        named = kit
        kind, finding = _loaded("kit", kit, lambda: _kind(named, silo is not None))
        yield finding
        if kind is None:
            kit = None
        else:
            server = kind == "server"
            yield from _of_kit(named, silo, server, now)
    if server:
        yield _look("port", lambda: _port(kit, port))
        if kit is not None:
            of_server = kit / "local"
            yield _look("server's key", lambda: _own_key(of_server))
    if file is not None:
        yield from _of_silo(file, silo, kit)
    yield from _of_run(run_file, file, server)


def _look(what: str, check: Callable[[], str]) -> Finding:
    """Make a finding of what a check returns or raises."""
    try:
        said = check()
    except MorettaError as error:
        return Finding(what, False, str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("torch", "nvflare", "sklearn"):
            raise
        return Finding(what, False, f"cannot be told without {package}; install it by: pip install 'moretta[flare]'")
    except OSError as error:
        return Finding(what, False, f"{error.filename or what}: {error.strerror or error}; give the right to it")
    return Finding(what, True, str(said), isinstance(said, Warned))


def _loaded(what: str, path: Path, load: Callable[[], T]) -> tuple[T | None, Finding]:
    found: list[T] = []

    def check() -> str:
        found.append(load())
        return f"{path} is right"

    finding = _look(what, check)
    return (found[0] if found else None), finding


# What is installed


def _python() -> str:
    here, (first, last) = sys.version_info[:2], PYTHONS
    if not first <= here <= last:
        raise ParameterError(f"is {here[0]}.{here[1]}, and FLARE runs on 3.11 to 3.13; make an environment with one")
    return f"version {here[0]}.{here[1]}"


def _torch(edge: bool) -> str:
    if edge:
        return "an edge site runs none, whether it is there or not"
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("is not installed; install it by: pip install 'moretta[torch]'")
    return f"version {metadata.version('torch')}; sites run the server's, or one of [engine] torch-versions"


def _flare(extra: str) -> str:
    if importlib.util.find_spec("nvflare") is None:
        raise MissingExtra(f"is not installed; install it by: pip install 'moretta[{extra}]'")
    version = metadata.version("nvflare")
    found = tuple(int(part) if part.isdecimal() else 0 for part in version.split(".")[:2])
    if found < FLARE:
        raise ParameterError(
            f"is version {version}, and 2.9 at least is needed; run: pip install -U 'moretta[{extra}]'"
        )
    return f"version {version}"


# A kit


def _kind(kit: Path, with_silo: bool) -> str:
    kind = "server" if kits.is_server(kit) else "site"
    if with_silo and kind == "server":
        raise ParameterError(f"{kit} is the server's kit, and silo.toml a site's; give the site's own kit")
    return kind


def _of_kit(kit: Path, silo: Path | None, server: bool, now: datetime) -> Iterator[Finding]:
    certificate = _look("certificate", lambda: _certificate(kit, now))
    yield certificate
    yield _look("private key", lambda: _private(kit))
    yield _look("patched", lambda: _patched(kit, silo))
    yield _look("kit writable", lambda: writable(kit / "local"))
    if server:
        said = f"says {now:%Y-%m-%d %H:%M} UTC; with what others say it is compared by moretta doctor at a site"
        yield _look("clock", lambda: said)
        return
    named = _look("server's name", lambda: f"is at {', '.join(processes.resolve(kit))}")
    yield named
    if not named.passes or not certificate.passes:
        yield Finding("server", False, "cannot be told until the name and the certificate pass; mend those first")
    else:
        yield _look("server", lambda: _server(kit))
    yield _look("clock", lambda: _clock(kit, now, named.passes))


def _certificate(kit: Path, now: datetime) -> str:
    kits.check(kit, now)
    until = kits.validity_of(kit)[1]
    if until - now < SOON:
        return Warned(f"ends in {(until - now).days} days, on {until:%Y-%m-%d}; have new kits made before")
    return f"is of {kits.name_of(kit)}, issued by the kit's root, valid until {until:%Y-%m-%d}"


def _private(kit: Path) -> str:
    path = kits.certificates_of(kit).key
    mode = path.stat().st_mode & 0o777
    if os.name == "posix" and mode & 0o077:
        return Warned(f"is open to others (mode {mode:04o}); run: chmod 600 {path}")
    return "is closed to others"


def _patched(kit: Path, silo: Path | None) -> str:
    missing = kits.lacks(kit, silo)
    if missing:
        return Warned(
            f"not yet, {len(missing)} changes are missing; moretta serve and join make them, and for a FLARE that you "
            f"start yourself run: moretta kit patch {kit}{'' if silo is None else f' --silo {silo}'}"
        )
    return "runs Moretta's jobs"


def _server(kit: Path) -> str:
    host, port = kits.address_of(kit)
    try:
        processes.reach(kit, WAIT)
    except RunFailed:
        raise RunFailed(
            f"nothing of this federation answers at {host}:{port}; have it started (moretta serve), and let a firewall "
            "pass that port"
        ) from None
    return f"answers at {host}:{port}, and each takes the other's certificate"


def _clock(kit: Path, now: datetime, named: bool) -> str:
    """Compare with the dates of the certificate, which a new kit has from its making, and with the server's clock."""
    begins, ends = kits.validity_of(kit)
    if now < begins:
        raise ParameterError(
            f"says {now:%Y-%m-%d %H:%M} UTC, and the kit was made at {begins:%Y-%m-%d %H:%M} UTC; set the clock"
        )
    ahead = processes.clock_of_server(kit, WAIT) if named else None
    if ahead is None:
        return Warned(
            f"cannot be told: no server says its time; {now:%Y-%m-%d %H:%M} UTC is after the kit was made "
            f"({begins:%Y-%m-%d %H:%M} UTC){'' if now <= ends else ' and after its certificate ended'}"
        )
    apart = f"is {abs(ahead):.0f} s {'behind' if ahead > 0 else 'ahead of'} the server's"
    if abs(ahead) > FAR:
        raise ParameterError(f"{apart}; set the clock that is wrong, best by NTP")
    return Warned(f"{apart}; set both by NTP") if abs(ahead) > APART else f"{apart}, as its greeting has it"


def _port(kit: Path | None, port: int | None) -> str:
    port = port or (PORT if kit is None else kits.address_of(kit)[1])
    processes.check_port(port)
    return f"{port} is free"


# A site


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
    if not source.endswith((".csv", ".csv.gz", ".npz")):
        from moretta.data.references import resolve

        resolve(source, file.base)
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


def writable(folder: Path) -> str:
    """Check that a folder can be written to, or made. Raises `moretta.errors.ParameterError`."""
    folder, there = folder.absolute(), _nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=there) as stream:
            stream.write(b"1")
    except OSError as error:
        raise ParameterError(
            f"{folder} cannot be written to ({error.strerror}); give the right to it, or name another folder"
        ) from None
    return f"{folder} can be {'written to' if there == folder else 'made'}"


def _nearest(folder: Path) -> Path:
    folder = folder.absolute()
    return next((one for one in (folder, *folder.parents) if one.exists()), folder)


def _of_silo(file: SiloFile, silo: Path | None, kit: Path | None) -> Iterator[Finding]:
    if kit is not None and silo is not None:
        yield _look("name", lambda: belongs(kit, silo, file))
    yield _look("identity", lambda: identified(file))
    if kit is not None:
        yield _look("server's key", lambda: pinned(kit, file))
    if file.limits.device != "cpu" and not file.silo.edge:
        yield _look("device", lambda: _device(file.limits.device))
    if file.silo.edge:
        yield _look("edge", _edge)


def _device(device: str) -> str:
    import torch

    number = int(device.partition(":")[2] or 0)
    if not torch.cuda.is_available() or number >= torch.cuda.device_count():
        raise ParameterError(f'PyTorch finds no {device} here; correct [limits] device, for example to "cpu"')
    return f"{device} is there"


def _edge() -> str:
    if importlib.util.find_spec("onnxruntime") is None:
        raise MissingExtra("an edge client needs onnxruntime; install it by: pip install 'moretta[edge]'")
    return f"onnxruntime {metadata.version('onnxruntime')}"


# A run, and what it takes


def _of_run(run_file: RunFile | None, file: SiloFile | None, server: bool) -> Iterator[Finding]:
    built: list[Federation] = []
    if run_file is not None:
        asked = run_file
        played = _look("many machines", lambda: _many(asked))
        yield played
        if played.passes:
            yield _look("model", lambda: _model(asked, file, server, built))
            if server and asked.secure_aggregation.roster is not None:
                yield _look("roster", lambda: _roster(asked))
            if file is not None:
                yield _look("data", lambda: _rows(asked, file))
                yield _look("sums", lambda: _same_sums(asked, file))
    elif file is not None:
        yield _look("data", lambda: openable(file))
    size = _bytes_of(built[0]) if built else 0
    holders = len(built[0].silos) if built and server else 0
    yield _look("memory", lambda: _memory(size, holders))
    out = file.out if file is not None else run_file.folder if run_file is not None and server else None
    if out is not None:
        yield _look("out", lambda: _out(out, server))
        yield _look("disk", lambda: _disk(out, size))


def _many(run_file: RunFile) -> str:
    from moretta.deployment import job

    job.check(run_file)
    return f"{len(run_file.engine.sites)} sites: {', '.join(run_file.engine.sites):.200}"


def _model(run_file: RunFile, file: SiloFile | None, server: bool, built: list[Federation]) -> str:
    """Build the model as the server does, or from what a site is told; there only of code that silo.toml lists."""
    from moretta.deployment import shared_settings as told

    source = run_file.model.source
    if not server and file is not None and file.silo.edge:
        return f"{source}: an edge site runs no code of it, and the server sends the graph"
    if server:
        federation = told.server_side(run_file, run_file.folder)
        federation.rehearse(run_file.run.rounds, run_file.run.seed)
    else:
        told.check_code(source, () if file is None else file.silo.models)
        base = run_file.base if file is None else file.base
        run_file = run_files.loads(told.told(run_file), base / "told.toml")
        federation = told.server_side(run_file, base)
    built.append(federation)
    digest = told.model_digest(federation, run_file)[:16]
    count = sum(parameter.numel() for parameter in federation.model.parameters())
    return f"{source} of {count} parameters; its digest begins with {digest}, the same for all"


def _roster(run_file: RunFile) -> str:
    path = run_file.secure_aggregation.roster
    roster = Roster.load(run_file.resolve(path or ""))
    roster.check(run_file.engine.sites)
    return f"{len(roster.keys)} silos; its digest begins with {roster.digest[:16]}, the same for all"


def _own_key(local: Path) -> str:
    return f"{fingerprint(identity_of(local).public_key)}; sites have it pinned, and compare it (moretta keys show)"


def _rows(run_file: RunFile, file: SiloFile) -> str:
    from moretta.deployment import shared_settings as told
    from moretta.deployment.edge_role import EdgeRole

    known = run_files.loads(told.told(run_file), file.base / "told.toml")
    silos = EdgeRole(known, file).silos if file.silo.edge else told.site_side(known, file).silos
    mine = next(silo for silo in silos if not silo.elsewhere)
    return f"{len(mine.x)} rows of shape {list(mine.x.shape[1:])}, as the run wants them"


def _same_sums(run_file: RunFile, file: SiloFile) -> str:
    secure = run_file.secure_aggregation
    if (secure.roster is None) == (file.silo.roster is None) or secure.scheme == "none":
        return f"scheme {secure.scheme}, {'with' if secure.roster is not None else 'without'} a roster"
    if secure.roster is None:
        return Warned("silo.toml has a roster, and the run none; have the run name the same one")
    raise ParameterError("the run has a roster, and silo.toml none; add roster and identity to [silo]")


def _bytes_of(federation: Federation) -> int:
    width = 8 if federation.dtype == "float64" else 4
    return sum(parameter.numel() for parameter in federation.model.parameters()) * width


def _memory(size: int, holders: int) -> str:
    free, needed = _free_memory(), size * (COPIES + 2 * holders)  # what is sent has 8 bytes a number
    if not size:
        return f"{_shown(free)} free; give --run to compare with what a model takes"
    if free < needed:
        raise ParameterError(
            f"{_shown(free)} free, and this model takes {_shown(needed)} at least; end other programs, or use another "
            "machine"
        )
    return f"{_shown(free)} free; parameters are {_shown(size)}, and a round takes {_shown(needed)} at least"


def _free_memory() -> int:
    """Return the bytes of memory that are free: of the machine, and of what a container may take of it."""
    found = [psutil.virtual_memory().available]
    with suppress(OSError, ValueError):  # "max" is no number
        most, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(max(most - used, 0))
    return min(found)


def _out(out: Path, server: bool) -> str:
    said = writable(out)
    if server and out.exists() and any(out.iterdir()):
        return Warned(f"{out} is not empty; go on with that run by --resume, or name another by --out")
    return said


def _disk(out: Path, size: int) -> str:
    free, needed = shutil.disk_usage(_nearest(out)).free, max(LEAST_DISK, KEPT * size)
    if free < needed:
        raise ParameterError(f"{_shown(free)} free, and {_shown(needed)} should be; make room, or name another folder")
    return f"{_shown(free)} free at {_nearest(out)}"


def _shown(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"
