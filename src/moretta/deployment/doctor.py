"""`moretta doctor`: check whether a machine could take part, with a remedy for each failed check.

This file chooses the checks (`moretta.deployment.checks`) and their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from moretta import __version__
from moretta.config import run_files, silo_file
from moretta.config.run_files import RunFile
from moretta.config.silo_file import SiloFile
from moretta.data.tables.mapping import ColumnMapping
from moretta.deployment import checks, kits, server_connection
from moretta.deployment.checks import CheckResult, loaded, look
from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.run.federation import Federation


def examine(
    *, kit: Path | None, silo: Path | None, run: Path | None, port: int | None = None, now: datetime | None = None
) -> list[CheckResult]:
    """Make every check that the arguments allow.

    Args:
        kit, silo: a site's.
        run: the server's run file, with its kit or without; at a site, the run file that its rows must fit.
        port: the port of the server; None takes its kit's.
        now: with a time zone; None takes the clock's.

    Raises:
        moretta.errors.ParameterError: without arguments.
    """
    if kit is None and silo is None and run is None:
        raise ParameterError(
            "--kit, --silo and --run are missing; set --kit and --silo at a site, --run at the server, or all three "
            "at a site"
        )
    return list(_results(kit, silo, run, port, now or datetime.now(UTC)))


def _results(
    kit: Path | None, silo: Path | None, run: Path | None, port: int | None, now: datetime
) -> Iterator[CheckResult]:
    run_file = file = kind = None
    of_files = []
    if run is not None:
        run_file, result = loaded("run file", run, lambda: run_files.load(run))
        of_files.append(result)
    if silo is not None:
        file, result = loaded("silo.toml", silo, lambda: silo_file.load(silo))
        of_files.append(result)
    edge = file is not None and file.silo.edge
    yield look("python", checks.python)
    yield look("moretta", lambda: f"version {__version__}; server and sites run the same")
    yield look("torch", lambda: checks.pytorch(edge))
    yield look("nvflare", lambda: checks.flare("edge-flare" if edge else "flare"))
    yield from of_files
    alone = kit is None and silo is None
    if alone and run_file is not None:  # the server's kit that `moretta serve` makes beside a run folder
        beside = run_file.folder.with_name(f"{run_file.folder.name}-kits") / kits.SERVER_FOLDER
        kit = beside if beside.is_dir() else None
    if (named := kit) is not None:
        kind, result = loaded("kit", named, lambda: checks.kind_of(named, silo is not None))
        yield result
    server, kit = alone if kind is None else kind == "server", kit if kind else None
    if kit is not None:
        yield from _of_kit(kit, silo, server, now)
    if server:
        yield look("port", lambda: checks.free_port(kit, port))
    if server and (servers := kit) is not None:
        yield look("server's key", lambda: checks.own_key(servers / "local"))
    if file is not None:
        yield from _of_site(file, silo, kit, run_file)
    yield from _of_run(run_file, file, server)


def _of_kit(kit: Path, silo: Path | None, server: bool, now: datetime) -> Iterator[CheckResult]:
    certificate = look("certificate", lambda: checks.certificate(kit, now))
    yield certificate
    yield look("private key", lambda: checks.private_key(kit))
    yield look("patched", lambda: checks.patched(kit, silo))
    yield look("kit writable", lambda: checks.writable(kit / "local"))
    if server:
        text = f"says {now:%Y-%m-%d %H:%M} UTC; moretta doctor at a site compares it with others"
        yield CheckResult("clock", True, text)
        if certificate.passes:
            yield look("server's name", lambda: server_connection.own_address(kit))
        return
    yield look("policy", lambda: checks.policy(kit))
    named = look("server's name", lambda: server_connection.resolve(kit))
    yield named
    if named.passes and certificate.passes:
        yield look("server", lambda: checks.server_answers(kit))
    else:
        yield CheckResult("server", False, "is unknown until the name and the certificate pass; fix those first")
    yield look("clock", lambda: checks.clock(kit, now, named.passes))


def _of_site(file: SiloFile, silo: Path | None, kit: Path | None, run_file: RunFile | None) -> Iterator[CheckResult]:
    if kit is not None and silo is not None:
        yield look("name", lambda: checks.belongs(kit, silo, file))
    yield look("identity", lambda: checks.identified(file))
    if kit is not None:
        yield look("server's key", lambda: checks.pinned(kit, file))
    yield look("agreed", lambda: checks.agreed(run_file, file))
    if file.privacy.max_epsilon is not None:
        yield look("epsilon", lambda: checks.spent(file))
    if file.limits.device != "cpu" and not file.silo.edge:
        yield look("device", lambda: checks.device_is_there(file.limits.device))
    if file.silo.edge:
        yield look("edge", checks.onnx_runtime)
        yield look("confinement", checks.confinement)


def _of_run(run_file: RunFile | None, file: SiloFile | None, server: bool) -> Iterator[CheckResult]:
    built: list[Federation] = []
    mapped = True
    if file is not None and file.mapping != ColumnMapping():
        yield (effect := look("mapping", lambda: checks.mapped(file)))
        mapped = effect.passes  # else the data fails with the same sentence
    if run_file is not None:
        played = look("many machines", lambda: checks.for_many_machines(run_file))
        yield played
        if played.passes:
            yield look("model", lambda: checks.model(run_file, file, server, built))
            if server and run_file.secure_aggregation.roster is not None:
                yield look("roster", lambda: checks.roster_lists_all(run_file))
            if file is not None and mapped:
                yield look("data", lambda: checks.rows_fit(run_file, file))
            if file is not None:
                yield look("sums", lambda: checks.same_sums(run_file, file))
    elif file is not None:
        yield look("data", lambda: checks.openable(file))
    size = checks.bytes_of(built[0]) if built else 0
    holders = len(built[0].silos) if built and server else 0
    yield look("memory", lambda: checks.memory(size, holders))
    out = file.out if file is not None else run_file.folder if run_file is not None and server else None
    if out is not None:
        yield look("out", lambda: checks.run_folder(out, server))
        yield look("disk", lambda: checks.disk(out, size))
