"""Several protocols or settings of one run file, from the same seeds, and the differences of their final weights.

A variant is a protocol with settings of its own, such as "pbpfl partitions=all loss=cross-entropy", or settings of any
section, such as "model.hidden=[8] protocol.learning-rate=0.1". Its text names its folder.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moretta.config import rules, run_files
from moretta.config.run_files import PROTOCOLS, RunFile
from moretta.contract.wording import shown, wrong_choice
from moretta.data.silo import digests_of
from moretta.engines.checkpoint import rounds_kept
from moretta.engines.run_folder import ROWS_BY_SILO, RunFolder, read_model
from moretta.errors import ParameterError
from moretta.protocols.common.training import Training
from moretta.protocols.registry import ENTRIES, REFERENCE
from moretta.report.folder import read_run
from moretta.run.assembly import federation_of
from moretta.run.evaluation import largest_relative_difference

MODEL = "model.safetensors"


RECORDED = 20  # the first rounds to record, beside the last, for an audit of a run that names none


def variants(
    path: Path, overrides: Sequence[str], protocols: Sequence[str], further: Sequence[str] = ()
) -> dict[str, RunFile]:
    """Return the run file of each protocol and variant, by the name of its folder.

    The file's own protocol keeps its settings in the file; any other keeps those that all protocols share.

    Args:
        path: Of the run file.
        overrides: As in `run_files.load`.
        protocols: Their names.
        further: Variants, each "PROTOCOL KEY=VALUE ..." or "SECTION.KEY=VALUE ...", the latter under the file's
            protocol. A value is TOML, or else a string; `partitions=all` is the number of the model's outputs.

    Raises:
        ParameterError: A protocol is unknown or repeated, or the file refuses a setting.
    """
    run_files_by_name: dict[str, RunFile] = {}
    for name in protocols:
        if name not in PROTOCOLS:
            raise ParameterError(f"--protocols {name}: expected some of {', '.join(PROTOCOLS)}")
        if name in run_files_by_name:
            raise ParameterError(f"--protocols names {name} twice")
        run_files_by_name[name] = _changed(path, overrides, [f"protocol.name={name}"])
    for text in further:
        try:
            label, changed = _variant(path, overrides, text)
        except ParameterError as error:
            raise ParameterError(f'--variant "{text}": {error}') from None
        if label in run_files_by_name:
            raise ParameterError(f'--variant "{text}": another run is called {label} already')
        run_files_by_name[label] = changed
    return run_files_by_name


def recording(run_file: RunFile) -> RunFile:
    """Return a run file that records views for an audit: in its own rounds, else in its first rounds and its last."""
    if run_file.run.record_views:
        return run_file
    rounds = run_file.run.rounds
    recorded = tuple(sorted({*range(1, min(RECORDED, rounds) + 1), rounds}))
    return run_file.model_copy(update={"run": run_file.run.model_copy(update={"record_views": recorded})})


OF_THE_SWEEP = {"run.seed": "--seeds", "run.out": "--out", "run.base": "the run file"}


def _variant(path: Path, overrides: Sequence[str], text: str) -> tuple[str, RunFile]:
    """Return the name of a variant and its folder, without sections, and its run file."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if not words:
        raise ParameterError(
            "expected PROTOCOL KEY=VALUE ..., for example pbpfl partitions=2, or SECTION.KEY=VALUE ..."
        )
    name = [] if "=" in words[0] else [words[0]]
    if name and name[0] not in PROTOCOLS:
        raise ParameterError(wrong_choice("protocol", "name", name[0], PROTOCOLS))
    sets = [f"protocol.name={protocol}" for protocol in name]
    for word in words[len(name) :]:
        key, equals, value = word.partition("=")
        if not key or not equals or not value:
            raise ParameterError(f"expected KEY=VALUE after the protocol, got {shown(word)}")
        if key in OF_THE_SWEEP:
            raise ParameterError(f"{key} follows from {OF_THE_SWEEP[key]}; remove it here")
        sets.append(word if "." in key else f"protocol.{word}")
    if "protocol.partitions=all" in sets:  # the last value of a key counts
        trial = _changed(path, overrides, [*sets, "protocol.partitions=1"])
        sets.append(f"protocol.partitions={federation_of(trial, None).outputs}")
    short = (re.sub(r"^[^=]*\.(?=[^=.]*=)", "", word) for word in words)
    label = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-") for word in short)
    return label, _changed(path, overrides, sets)


def _changed(path: Path, overrides: Sequence[str], sets: Sequence[str]) -> RunFile:
    """Return the run file with these overrides; another protocol keeps only the keys that all share."""

    def change(tables: dict[str, Any]) -> None:
        own = tables.get("protocol") or {}
        named = own.get("name")
        for text in sorted(sets, key=lambda text: not text.startswith("protocol.name=")):
            run_files.override(tables, text, "--variant")
            if own.get("name") != named:
                named = own["name"]
                for key in [key for key in own if key.replace("-", "_") not in {*Training.model_fields, "name"}]:
                    del own[key]

    return run_files.load(path, overrides, change)


def rehearse(cells: "Sequence[Cell]") -> None:
    """Raise any error that one of the runs would raise before its first round, before a run begins.

    Raises:
        ParameterError: Runs of one seed have different validation rows, so that their scores are not comparable. A run
            began with other rows than the present ones.
    """
    targets = dict[int, tuple[str, Any]]()
    for cell in cells:
        run = cell.run_file.run
        federation = federation_of(cell.run_file, None)
        federation.rehearse(run.rounds, run.seed)
        if (cell.folder / ROWS_BY_SILO).exists():  # otherwise all rows would be read in vain
            RunFolder(cell.folder).check_rows(digests_of(federation.silos, federation.test, federation.validation))
        if federation.validation is not None:
            first, y = targets.setdefault(run.seed, (cell.name, federation.validation[1]))
            if not np.array_equal(y, federation.validation[1]):
                raise ParameterError(
                    f"{cell.name} would be judged on other validation rows than {first}; vary what is trained, and not "
                    "which rows there are"
                )


def refuse_a_run(home: Path) -> None:
    """Raise `moretta.errors.ParameterError` if a comparison would overwrite a run's own report."""
    if (home / "run.toml").exists() or (home / "result.json").exists():
        raise ParameterError(f"{home} is the folder of a run, with a report of its own; name another folder by --out")


def weight_differences(folders: Sequence[Path]) -> dict[str, float]:
    """Return the largest relative difference of each run's weights from those of the first run of FedSGD.

    Keys are protocols, or run folders if several runs have one protocol. Without a run of FedSGD the result is empty.

    Raises:
        ParameterError: A folder has no finished run.
    """
    protocols = [read_run(folder).protocol for folder in folders]
    if REFERENCE not in protocols:
        return {}
    first = protocols.index(REFERENCE)
    reference = read_model(folders[first], MODEL)
    differences: dict[str, float] = {}
    for number, (name, folder) in enumerate(zip(protocols, folders, strict=True)):
        if number != first and (folder / MODEL).exists() and ENTRIES[name].common_model:
            ours = read_model(folder, MODEL)
            if {key: value.shape for key, value in ours.items()} == {key: v.shape for key, v in reference.items()}:
                label = name if protocols.count(name) == 1 else str(folder)
                differences[label] = largest_relative_difference(ours, reference)
    return differences


MOST = 1_000  # seeds of a comparison


@dataclass(frozen=True)
class Cell:
    """One run of a sweep. name: its protocol or variant."""

    name: str
    run_file: RunFile
    folder: Path

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.run_file.run.seed

    @property
    def has_begun(self) -> bool:
        """Whether the run has a checkpoint to continue from."""
        return bool(rounds_kept(self.folder / "checkpoint"))

    @property
    def has_ended(self) -> bool:
        """Whether the folder holds this run, finished. Raises `moretta.errors.ParameterError` if it holds another."""
        if not (self.folder / "result.json").exists() or not (self.folder / "run.toml").exists():
            return False
        stored = run_files.of_folder(self.folder)
        if run_files.digest(stored) != run_files.digest(self.run_file):
            raise ParameterError(
                f"{self.folder} holds a run with other settings; go on with the run file it was begun with, or name "
                "another folder by --out"
            )
        return stored.run.rounds == self.run_file.run.rounds


def seeds_of(text: str, first: int) -> tuple[int, ...]:
    """Return a text's seeds: a number of them from `first` on, or "3,7,11". Raises ParameterError for other text."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 20 for word in words):
        raise ParameterError(f"--seeds {text[:80]}: expected how many, for example 5, or a list, for example 3,7,11")
    if len(words) == 1:
        if not 1 <= int(text) <= MOST:
            raise ParameterError(f"--seeds {text}: expected 1 to {MOST} seeds")
        return tuple(range(first, first + int(text)))
    seeds = tuple(map(int, words))
    if len(set(seeds)) < len(seeds):
        raise ParameterError(f"--seeds {text[:80]}: expected each seed once")
    return seeds


def cells(runs: Mapping[str, RunFile], seeds: Sequence[int] | None, home: Path) -> list[Cell]:
    """Return each run from each seed, seed by seed. seeds: None for the run file's own, which names no folder."""
    if seeds is None:
        return [Cell(name, run_file, home / name) for name, run_file in runs.items()]
    listing = []
    for seed in seeds:
        for name, run_file in runs.items():
            settings = run_file.run.model_dump(mode="json", by_alias=True, exclude_none=True)
            run = run_files.section(
                "run", type(run_file.run), settings | {"seed": seed}
            )  # validated, because a seed has a range
            listing.append(Cell(name, run_file.model_copy(update={"run": run}), home / name / f"seed-{seed}"))
    return listing


def check_validated(runs: Mapping[str, RunFile]) -> None:
    """Raise `moretta.errors.ParameterError` if one of the runs to choose from has no validation rows."""
    if len(runs) > 1 and not all(rules.has_validation(run_file.data) for run_file in runs.values()):
        raise ParameterError(
            "[data] validation-fraction is missing; a sweep chooses among runs by it, as test rows are for the chosen "
            "one: add --set data.validation-fraction=0.2, or name one run alone"
        )
