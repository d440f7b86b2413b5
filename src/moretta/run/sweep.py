"""Runs by several protocols and from several seeds, each in a folder of its own, which can be gone on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.engines.checkpoint import rounds_kept
from moretta.errors import ParameterError

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
    return [
        Cell(name, _from(run_file, seed), home / name / f"seed-{seed}")
        for seed in seeds
        for name, run_file in runs.items()
    ]


def _from(run_file: RunFile, seed: int) -> RunFile:
    given = run_file.run.model_dump(mode="json", by_alias=True, exclude_none=True)
    run = run_files.section("run", type(run_file.run), given | {"seed": seed})  # validated: a seed has a range
    return run_file.model_copy(update={"run": run})
