"""Checks of a run: that it is for many machines, and that a site's rows and the model fit it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.config.silo_file import SiloFile
from moretta.deployment import site_policy
from moretta.deployment.agreed_settings import SiteAgreement, differences, pinned_settings
from moretta.deployment.check_result import Warned
from moretta.deployment.machine_checks import writable
from moretta.errors import ParameterError
from moretta.secure_aggregation.identity import Roster

if TYPE_CHECKING:
    from moretta.run.federation import Federation


def for_many_machines(run_file: RunFile) -> str:
    """Check that a run file is for many machines."""
    from moretta.deployment import job

    job.check(run_file)
    return f"{len(run_file.engine.sites)} sites: {', '.join(run_file.engine.sites):.200}"


def model(run_file: RunFile, file: SiloFile | None, server: bool, built: list[Federation]) -> str:
    """Build the model as the server does, or at a site from shared settings and code that silo.toml lists.

    built: is given the federation, if there is one.
    """
    from moretta.deployment import shared_settings

    source = run_file.model.source
    if not server and file is not None and file.silo.edge:
        return f"{source}: an edge site runs no code of it, and the server sends the graph"
    if server:
        federation = shared_settings.server_side(run_file, run_file.folder)
        federation.rehearse(run_file.run.rounds, run_file.run.seed)
    else:
        run_file = _as_sent(run_file, file)
        federation = shared_settings.server_side(run_file, run_file.base)
    built.append(federation)
    digest = shared_settings.model_digest(federation, run_file)[:16]
    from moretta.protocols.common.modules import size  # it needs torch, as the federation does

    count = size(federation.model)
    return f"{source} of {count} parameters; its digest begins with {digest}, the same for all"


def roster_lists_all(run_file: RunFile) -> str:
    """Check that a run's roster lists its sites."""
    path = run_file.secure_aggregation.roster
    roster = Roster.load(run_file.resolve(path or ""))
    roster.check(run_file.engine.sites)
    return f"{len(roster.keys)} silos; its digest begins with {roster.digest[:16]}, the same for all"


def rows_fit(run_file: RunFile, file: SiloFile) -> str:
    """Check that a site's rows can be read as a run wants them."""
    from moretta.deployment import shared_settings
    from moretta.deployment.edge_role import EdgeRole

    known = _as_sent(run_file, file)
    silos = EdgeRole(known, file).silos if file.silo.edge else shared_settings.site_side(known, file).silos
    mine = next(silo for silo in silos if not silo.remote)
    return f"{len(mine.x)} rows of shape {list(mine.x.shape[1:])}, as the run wants them"


def _as_sent(run_file: RunFile, file: SiloFile | None) -> RunFile:
    """Return a run as a site has it, which its silo.toml permits."""
    from moretta.deployment import shared_settings

    text = shared_settings.shared_text(run_file)
    if file is None:
        return run_files.loads(text, run_file.base / "run.toml")
    return site_policy.permitted(text, file)


def agreed(run_file: RunFile | None, file: SiloFile) -> str:
    """Say which settings a site has agreed to, what waits, and whether a run is among them."""
    agreement = SiteAgreement(file.out)
    known, waiting = agreement.agreed(), agreement.waiting()
    if closed := [one for one in known if one.closed]:
        raise ParameterError(
            f"this site's rows did not fit the run's settings at {closed[0].closed}, as its log says; correct the rows "
            "or silo.toml, then run moretta accept"
        )
    if known and run_file is not None:
        settings = pinned_settings(_as_sent(run_file, file))
        if all(one.settings != settings for one in known):
            changes = "; ".join(differences(known[-1].settings, settings))
            return Warned(f"the run differs from what this site has agreed to ({changes:.600}); see moretta accept")
    if waiting is not None:
        return Warned(f"a run was refused: {waiting.sentence}")
    return f"{len(known)} sets of settings" if known else "nothing yet: the first run's settings will be pinned"


def same_sums(run_file: RunFile, file: SiloFile) -> str:
    """Check that a run and a site agree whether there is a roster."""
    secure = run_file.secure_aggregation
    if (secure.roster is None) == (file.silo.roster is None) or secure.scheme == "none":
        return f"scheme {secure.scheme}, {'with' if secure.roster is not None else 'without'} a roster"
    if secure.roster is None:
        return Warned("silo.toml has a roster, and the run none; have the run name the same one")
    raise ParameterError("the run has a roster, and silo.toml none; add roster and identity to [silo]")


def bytes_of(federation: Federation) -> int:
    """Return the bytes of a run's parameters."""
    from moretta.protocols.common.modules import size

    width = 8 if federation.spec.dtype == "float64" else 4
    return size(federation.model) * width


def run_folder(out: Path, server: bool) -> str:
    """Check that a run folder can be written to, and warn of one that a server has used already."""
    said = writable(out)
    if server and out.exists() and any(out.iterdir()):
        return Warned(f"{out} is not empty; go on with that run by --resume, or name another by --out")
    return said
