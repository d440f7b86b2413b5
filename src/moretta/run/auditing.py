"""The audit of a run folder, as the command line asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from moretta.audit.auditor import Audit, Progress, audit, opened
from moretta.audit.catalogue import all_attacks
from moretta.config import run_files
from moretta.contract.messages import Array
from moretta.contract.wording import nearest
from moretta.data.images.sets import read_npz
from moretta.data.layout import SampleLayout, gather
from moretta.data.references import OWN_CODE, beside, cause, resolve
from moretta.engines.folder_lock import held
from moretta.engines.run_folder import read_json
from moretta.errors import ParameterError
from moretta.run import consent
from moretta.run.assembly import federation_of
from moretta.run.federation import Federation
from moretta.run.foreign_views import run_folder_of
from moretta.run.trained_model import MADE


def audit_folder(
    folder: Path,
    *,
    thorough: bool = False,
    background: Path | None = None,
    progress: Progress | None = None,
    needed: Iterable[str] = (),
    allow_code: bool = False,
    federation: str | None = None,
    views: bool = False,
) -> Audit:
    """Audit a finished run; its rows and architecture are made again from its own run file.

    background: a file of `read_background`. allow_code: import the code of model and rows that the folder names
    (`moretta.run.consent`). federation: of a run made from Python, the "module:function", beside the working directory,
    that returns the federation that trained it, with its rows. views: the folder has what sites of another framework
    recorded (`moretta.run.foreign_views`), whose silos and steps that federation has. The rest as of
    `moretta.audit.auditor.audit`.
    Raises `moretta.errors.ParameterError` for a folder that holds no finished run, or a run made from Python
    without `federation`, as its rows are not in the folder, and as `moretta.audit.auditor.audit`.
    """
    if views:
        played, rounds, seed = _recorded_elsewhere(folder, federation)
    else:
        played, rounds, seed = _played(folder, allow_code, federation)
    rows = None if background is None else read_background(background, played.layout)
    return audit(
        folder,
        played,
        rounds,
        seed,
        thorough=thorough,
        background=rows,
        background_name="" if background is None else background.name,
        progress=progress,
        needed=needed,
    )


def check_folder(folder: Path, allow_code: bool = False) -> None:
    """Refuse, as `audit_folder` does, a folder that cannot be audited."""
    opened(folder, *_played(folder, allow_code))


def _played(folder: Path, allow_code: bool, federation: str | None = None) -> tuple[Federation, int, int]:
    """Return what a run folder's own run file makes, or a function: the federation, its rounds and its seed."""
    if not folder.is_dir():
        raise ParameterError(f"{folder}: expected a run folder; there is no such directory")
    if not (folder / "result.json").exists():
        raise ParameterError(f"{folder}: expected a finished run; it has no result.json, so go on with it by --resume")
    if not (folder / "run.toml").exists():
        return _from_python(folder, federation)
    if federation is not None:
        raise ParameterError(f"{folder} has a run file, which says what was trained; leave out --federation")
    run_file = run_files.of_folder(folder)
    consent.check(folder, run_file, allow_code, data=True)
    return federation_of(run_file, folder), run_file.run.rounds, run_file.run.seed


def _from_python(folder: Path, federation: str | None) -> tuple[Federation, int, int]:
    """Return a federation that a function makes; the audit compares it with the run by digests of rows and settings."""
    if federation is None:
        raise ParameterError(
            f"{folder}: expected a run of `moretta train`; one made from Python has its rows there, so call "
            "Result.audit() of what train() returned, or name a function that returns its Federation by --federation "
            "module:function"
        )
    made = _made_by(federation)
    settings = read_json(folder / MADE)
    return made, int(settings["rounds"]), int(settings["seed"])


def _recorded_elsewhere(folder: Path, federation: str | None) -> tuple[Federation, int, int]:
    if federation is None:
        raise ParameterError("--views needs --federation module:function: what returns the silos, their rows and steps")
    if (folder / "run.toml").exists() or (folder / MADE).exists() or not (folder / "views").is_dir():
        raise ParameterError(f"{folder}: expected the folder that a mod or filter was given; leave out --views")
    with held(folder):
        return *run_folder_of(folder, _made_by(federation)), 0


def _made_by(federation: str) -> Federation:
    """Return what a function returns. Raises `moretta.errors.ParameterError` unless that is a federation."""
    function = resolve(federation, Path(), OWN_CODE)
    try:
        with beside(Path()):
            made = function()
    except (Exception, SystemExit) as error:
        raise ParameterError(f'--federation "{federation}" failed with {cause(error)}; fix the function') from error
    if not isinstance(made, Federation):
        raise ParameterError(
            f'--federation "{federation}" must return the moretta.Federation of the run, got {type(made).__name__}'
        )
    return made


def read_background(path: Path, layout: SampleLayout | None = None) -> tuple[Array, Array]:
    """Return rows that attackers may have: x and y of a .npz file, as silos have theirs.

    layout: of samples of several arrays, which the file has as x.NAME; they are packed.
    """
    where, arrays = f"--background {path}", read_npz(path)
    named = arrays if layout is None else {"x": layout.pack(gather(arrays, "x"), where), "y": arrays.get("y")}
    x, y = (named.get(name) for name in "xy")
    if x is None or y is None:
        raise ParameterError(f"{where}: expected a .npz file with arrays x and y; got {', '.join(arrays) or 'none'}")
    if not x.ndim or not y.ndim or y.dtype.kind not in "iufb":
        raise ParameterError(
            f"{where}: expected a row of x and a number of y for each sample, got x {x.dtype}{list(x.shape)} and y "
            f"{y.dtype}{list(y.shape)}"
        )
    return x, y


def limits_of(texts: Sequence[str]) -> Mapping[str, float]:
    """Return the scores of ``--fail-above NAME=SCORE``, by attack.

    Raises `moretta.errors.ParameterError` for a text that is no such pair, or names an unknown attack.
    """
    limits: dict[str, float] = {}
    known = [attack.name for attack in all_attacks()] if texts else []
    for text in texts:
        name, sign, number = text.rpartition("=")
        try:
            limits[name] = float(number)
        except ValueError:
            sign = ""
        if not sign or not name or np.isnan(limits[name]):
            raise ParameterError(f"--fail-above {text}: expected NAME=SCORE, for example gamma-least-squares=0.5")
        if name not in known:
            close = " or ".join(attack for attack in known if attack.startswith(name)) or nearest(name, known)
            hint = f"did you mean {close}?" if close else f"the attacks are {', '.join(known)}"
            raise ParameterError(f"--fail-above {text}: there is no attack {name}; {hint}")
    return limits
