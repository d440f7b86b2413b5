"""Consent to code that a run folder names: it is imported only if the user agrees.

A run file names models and data as ``module:function``. Its author wrote that file or read it, but a run folder may
come from anyone. So commands ask before they import a finished run's code. Built-in models and data need no question.

A run that this user trained needs none either, as long as its code has not changed (`is_own`). Training saves a digest
in the user's own state folder, which no run folder can change. The digest covers the folder's path, its run file, its
result (with digests of weights and views) and every module beside the run file that the code could import.
"""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder, all_suffixes
from pathlib import Path

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.data.references import is_reference
from moretta.engines.files import open_file, read_file
from moretta.engines.journal import Journal
from moretta.errors import MorettaError, ParameterError
from moretta.models import catalogue
from moretta.protocols.common.own_loss import named

MADE = "model.json"  # the construction of a run from Python
NOTES = "trained.txt"
MOST = 100_000  # files and folders to search for code; with more, no digest is saved
_UNKNOWN = (OSError, RuntimeError, ValueError, KeyError, TypeError, MorettaError)  # RuntimeError: no home folder
_NAMES_CODE = " names code that would be run as you: "
_TRUST = "; read it, and if you trust it give --allow-code (from Python: allow_code=True)"
log = logging.getLogger("moretta")


def code_named(run_file: RunFile, *, data: bool) -> tuple[str, ...]:
    """Return the "module:function" names of a run file's model and, with `data`, of its rows and training."""
    names = [run_file.model.source]
    if data:
        names += [run_file.data.source, str(run_file.data.test or "")]
        names += [*map(named, run_file.protocol.own_code.values()), *run_file.run.metrics]
    return tuple(dict.fromkeys(name for name in names if name not in catalogue.BUILT_IN and is_reference(name)))


def question(folder: Path, run_file: RunFile, *, data: bool) -> str:
    """Return the question before the code of a run folder is imported; empty if it names none."""
    named = [_described(source, run_file.base) for source in code_named(run_file, data=data)]
    return f"{folder}{_NAMES_CODE}{', '.join(named)}" if named else ""


def check(folder: Path, run_file: RunFile, allowed: bool, *, data: bool = False) -> None:
    """Raise `moretta.errors.ParameterError` if a run folder names code and importing it is not allowed."""
    if not allowed and (text := question(folder, run_file, data=data)):
        raise ParameterError(f"{text}{_TRUST}")


def check_model(folder: Path, source: str, base: Path, allowed: bool) -> None:
    """Raise the same if a "module:function" builds the model of a run from Python."""
    if not allowed and source not in catalogue.BUILT_IN:
        raise ParameterError(f"{folder}{_NAMES_CODE}{_described(source, base)}{_TRUST}")


def _described(source: str, base: Path) -> str:
    """Return a function's name, its module and its file, without an import."""
    module, _, function = source.partition(":")
    spec = PathFinder.find_spec(module.partition(".")[0], [str(base)])
    where = "an installed package" if spec is None else str(spec.origin or base / module.partition(".")[0])
    return f"{function} of {module} ({where})"


# -- runs of this user -------------------------------------------------------------------------------------------------


def state_folder() -> Path:
    """Return this user's folder for data that outlives a command: below XDG_STATE_HOME, or the platform's place."""
    folder = os.environ.get("XDG_STATE_HOME", "")
    usual = "Library/Application Support" if sys.platform == "darwin" else ".local/state"
    return (Path(folder) if os.path.isabs(folder) else Path.home() / usual) / "moretta"


def code_digest(folder: Path) -> str:
    """Return the SHA-256, in hex, of all modules that a run folder's code may import; empty without readable code."""
    digests = list[tuple[str, str]]()
    try:
        for path in (path for root in _roots(folder) for path in _modules(root)):
            digests.append((str(path), hashlib.sha256(read_file(path.parent, path.name)).hexdigest()))
    except _UNKNOWN as error:
        log.debug("the code of %s is not looked through: %s", folder, error)
        return ""
    return _digest(digests) if digests else ""


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def note(folder: Path, code: str) -> None:
    """Record that this user has trained the run of a folder. code: its `code_digest` when training began."""
    try:
        if code:
            Journal(state_folder() / NOTES, forces=False).append(_note_of(folder, code))
    except _UNKNOWN as error:
        log.info("it is not noted that this run is your own, so later commands will ask: %s", error)


def is_own(folder: Path) -> bool:
    """Return whether this user trained this run in this folder, with code that has not changed since."""
    try:
        code = code_digest(folder)
        with open_file(state_folder(), NOTES) as file:
            status = os.fstat(file.fileno())
            others = status.st_uid != os.geteuid() or status.st_mode & 0o077  # others could have written or read it
            own = bool(code) and not others and _note_of(folder, code) in file.read().decode().splitlines()
    except _UNKNOWN as error:  # then the caller asks the user, or reports the folder's fault
        log.debug("not taken for a run of one's own: %s", error)
        return False
    if own:
        # Bytecode beside the sources could differ from them, and no digest covers it, so it is not used.
        sys.pycache_prefix = str(state_folder() / "bytecode")
    return own


def _note_of(folder: Path, code: str) -> str:
    kept = [read_file(folder, "run.toml" if (folder / "run.toml").exists() else MADE), read_file(folder, "result.json")]
    return _digest([str(folder.resolve()), *(hashlib.sha256(file).hexdigest() for file in kept), code])


def _roots(folder: Path) -> Iterator[Path]:
    """Yield the folder of a run folder's code, and the places of installed code that it names."""
    if (folder / "run.toml").exists():
        run_file = run_files.of_folder(folder)
        sources, base = code_named(run_file, data=True), run_file.base
    else:
        made = json.loads(read_file(folder, MADE))
        sources = (made["source"],) * is_reference(made["source"])
        base = Path(os.path.normpath(folder.absolute() / made["base"]))
    if sources:
        yield base
    for top in dict.fromkeys(source.partition(":")[0].partition(".")[0] for source in sources):
        spec = PathFinder.find_spec(top, [str(base), *sys.path])
        if spec is None:
            raise ParameterError(f"{top} is not where Python looks")
        places = map(Path, spec.submodule_search_locations or [str(spec.origin)])
        yield from (place for place in places if not place.is_relative_to(base))


def _modules(root: Path) -> Iterator[Path]:
    """Yield each file at or below a path that Python could import, in a fixed order."""
    if root.is_file():
        yield root
    left = MOST
    for above, folders, files in os.walk(root, followlinks=True):
        left -= len(folders) + len(files)
        if left < 0:
            raise ParameterError(f"{root} holds more than {MOST:,} files")
        folders[:] = sorted(name for name in folders if name.isidentifier() and name != "__pycache__")
        yield from (Path(above, name) for name in sorted(files) if name.endswith(tuple(all_suffixes())))
