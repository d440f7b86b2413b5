"""Code that a run folder names: it is imported only by whoever agrees, as the folder may be somebody else's.

A run file names models and data as ``module:function``. Whoever trains wrote that file or read it. A run folder may
come from anywhere, and nothing in it proves whose it is. So the user is asked each time before a finished run's code is
imported, for their own runs too. Built-in models and data need no question.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path

from moretta.config.run_files import RunFile
from moretta.data.references import is_reference
from moretta.errors import ParameterError
from moretta.models import catalogue
from moretta.protocols.common.own_loss import named


def code_named(run_file: RunFile, *, data: bool) -> tuple[str, ...]:
    """Return the "module:function" names of a run file: its model's, and with `data` those of rows and training."""
    wanted = [run_file.model.source]
    if data:
        wanted += [run_file.data.source, str(run_file.data.test or "")]
        wanted += [*map(named, run_file.protocol.own_code.values()), *run_file.run.metrics]
    return tuple(dict.fromkeys(one for one in wanted if one not in catalogue.BUILT_IN and is_reference(one)))


def question(folder: Path, run_file: RunFile, *, data: bool) -> str:
    """Return what is asked before the code of a run folder is imported; empty where there is none."""
    named = [_described(source, run_file.base) for source in code_named(run_file, data=data)]
    return f"{folder} names code that would be run as you: {', '.join(named)}" if named else ""


def check(folder: Path, run_file: RunFile, allowed: bool, *, data: bool = False) -> None:
    """Raise `moretta.errors.ParameterError` for a run folder that names code, unless that is allowed."""
    if not allowed and (asked := question(folder, run_file, data=data)):
        raise ParameterError(f"{asked}; read it, and if you trust it give --allow-code (from Python: allow_code=True)")


def check_model(folder: Path, source: str, base: Path, allowed: bool) -> None:
    """Raise the same for a folder of a run from Python, whose model a "module:function" builds."""
    if not allowed and source not in catalogue.BUILT_IN:
        said = f"{folder} names code that would be run as you: {_described(source, base)}"
        raise ParameterError(f"{said}; read it, and if you trust it give --allow-code (from Python: allow_code=True)")


def _described(source: str, base: Path) -> str:
    """Say which function of which file it is, without importing anything."""
    module, _, function = source.partition(":")
    found = PathFinder.find_spec(module.partition(".")[0], [str(base)])
    where = "an installed package" if found is None else str(found.origin or base / module.partition(".")[0])
    return f"{function} of {module} ({where})"
