"""Several protocols on one run file, from the same seed, and how far their weights end apart.

A variant is a protocol with settings of its own, written "pbpfl partitions=all loss=cross-entropy"; its folder is
called by what was written.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moretta.config import run_files
from moretta.config.run_files import PROTOCOLS, RunFile
from moretta.contract.wording import shown, wrong_choice
from moretta.engines.checkpoint import rounds_kept
from moretta.engines.run_folder import read_model
from moretta.errors import ParameterError
from moretta.protocols.common.training import Training
from moretta.protocols.registry import ENTRIES, REFERENCE
from moretta.report.folder import read_run
from moretta.run.assembly import federation_of
from moretta.run.evaluation import largest_relative_difference

MODEL = "model.safetensors"


RECORDED = 20  # rounds from the first on, and the last, of a run that is to be audited and does not say


def variants(run_file: RunFile, protocols: Sequence[str], further: Sequence[str] = ()) -> dict[str, RunFile]:
    """Return the run file once for each protocol: its own settings for its own, the shared ones for the others.

    further: variants, each "PROTOCOL KEY=VALUE ..." with keys of [protocol]; the value is TOML, else a string, and that
    of partitions may be all, for as many as the model has outputs.
    Raises `moretta.errors.ParameterError` for a protocol that is not known or named twice, and for settings that the
    run file could not have either.
    """
    found: dict[str, RunFile] = {}
    for name in protocols:
        if name not in PROTOCOLS:
            raise ParameterError(f"--protocols {name}: expected some of {', '.join(PROTOCOLS)}")
        if name in found:
            raise ParameterError(f"--protocols names {name} twice")
        found[name] = _with(run_file, name, {})
    for text in further:
        try:
            label, changed = _variant(run_file, text)
        except ParameterError as error:
            raise ParameterError(f'--variant "{text}": {error}') from None
        if label in found:
            raise ParameterError(f'--variant "{text}": another run is called {label} already')
        found[label] = changed
    return found


def recording(run_file: RunFile) -> RunFile:
    """Return a run file that records views for an audit: as it says, else the first rounds and the last."""
    if run_file.run.record_views:
        return run_file
    rounds = run_file.run.rounds
    wanted = tuple(sorted({*range(1, min(RECORDED, rounds) + 1), rounds}))
    return run_file.model_copy(update={"run": run_file.run.model_copy(update={"record_views": wanted})})


def _variant(run_file: RunFile, text: str) -> tuple[str, RunFile]:
    """Return what a variant is called, and its run file."""
    try:
        name, *words = shlex.split(text)
    except ValueError:
        raise ParameterError("expected PROTOCOL KEY=VALUE ..., for example pbpfl partitions=2") from None
    if name not in PROTOCOLS:
        raise ParameterError(wrong_choice("protocol", "name", name, PROTOCOLS))
    given: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals or not value:
            raise ParameterError(f"expected KEY=VALUE after the protocol, got {shown(word)}")
        given[key] = _value(value)
    if given.get("partitions") == "all":
        given["partitions"] = federation_of(_with(run_file, name, {**given, "partitions": 1}), None).outputs
    label = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in (name, *words))
    return label, _with(run_file, name, given)


def _value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text


def _with(run_file: RunFile, name: str, given: Mapping[str, Any]) -> RunFile:
    """Return the run file by another protocol. given: keys of [protocol] as a run file has them."""
    shared = run_file.protocol.model_fields_set & (
        set(type(run_file.protocol).model_fields) if name == run_file.protocol.name else set(Training.model_fields)
    )
    kept = run_file.protocol.model_dump(mode="json", by_alias=True, include=shared, exclude_none=True)
    own = run_files.section("protocol", PROTOCOLS[name], {**kept, "name": name, **given}, name)
    parts = {part: getattr(run_file, part) for part in RunFile.model_fields}
    return RunFile(**parts | {"protocol": own})  # validated again, as keys may not fit each other


def rehearse(run_files: Sequence[RunFile]) -> None:
    """Raise what any of the runs would raise before its first round, while none has begun."""
    for run_file in run_files:
        federation_of(run_file, None).rehearse(run_file.run.rounds, run_file.run.seed)


def refuse_existing(folders: Sequence[Path]) -> None:
    """Raise `moretta.errors.ParameterError` if any of the folders has something in it, before a run begins."""
    for folder in folders:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ParameterError(f"{folder} exists and is not empty; name another folder by --out")


def refuse_a_run(home: Path) -> None:
    """Raise `moretta.errors.ParameterError` if a comparison would be written over a run's own report."""
    if (home / "run.toml").exists() or (home / "result.json").exists():
        raise ParameterError(f"{home} is the folder of a run, with a report of its own; name another folder by --out")


def weight_differences(folders: Sequence[Path]) -> dict[str, float]:
    """Return the largest relative difference of each run's weights from FedSGD's, where both are there.

    By protocol, or by run folder where several are of one protocol; what they differ from is the first run of FedSGD.
    Raises `moretta.errors.ParameterError` for a folder that holds no finished run.
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


MOST = 1_000  # seeds


@dataclass(frozen=True)
class Cell:
    """One run of a sweep. name: of its protocol or variant."""

    name: str
    run_file: RunFile
    folder: Path

    @property
    def seed(self) -> int:
        """From which it starts."""
        return self.run_file.run.seed

    @property
    def has_begun(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return bool(rounds_kept(self.folder / "checkpoint"))

    @property
    def has_ended(self) -> bool:
        """Whether this very run is there. Raises `moretta.errors.ParameterError` where another one is."""
        if not (self.folder / "result.json").exists() or not (self.folder / "run.toml").exists():
            return False
        there = run_files.of_folder(self.folder)
        if run_files.digest(there) != run_files.digest(self.run_file):
            raise ParameterError(
                f"{self.folder} holds a run with other settings; go on with the run file it was begun with, or name "
                "another folder by --out"
            )
        return there.run.rounds == self.run_file.run.rounds


def seeds_of(text: str, first: int) -> tuple[int, ...]:
    """Return the seeds that a text asks for: a number of them, from `first` on, or a list, such as "3,7,11".

    Raises `moretta.errors.ParameterError` for other text.
    """
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
    """Return each run from each seed, seed by seed. seeds: None for the run file's own alone, which no folder names."""
    if seeds is None:
        return [Cell(name, run_file, home / name) for name, run_file in runs.items()]
    found = []
    for seed in seeds:
        for name, run_file in runs.items():
            given = run_file.run.model_dump(mode="json", by_alias=True, exclude_none=True)
            run = run_files.section("run", type(run_file.run), given | {"seed": seed})  # validated: a seed has a range
            found.append(Cell(name, run_file.model_copy(update={"run": run}), home / name / f"seed-{seed}"))
    return found
