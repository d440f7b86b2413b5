"""`moretta compare --seeds`: which runs, what they come to, and that a sweep that was stopped goes on."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import call, here  # noqa: F401  # a fixture

from moretta.commands import compare as command
from moretta.commands.train import train_with_bar
from moretta.errors import ParameterError, RunFailed
from moretta.report.folder import read_run
from moretta.run.comparison import seeds_of

SWEEP = ("compare", "run.toml", "--protocols", "fedsgd,pbpfl", "--seeds", "2", "--out", "all")


@pytest.mark.parametrize(
    ("text", "seeds"), [("5", (7, 8, 9, 10, 11)), ("1", (7,)), ("3, 7,11", (3, 7, 11)), ("0,4", (0, 4))]
)
def test_seeds_are_counted_or_listed(text: str, seeds: tuple[int, ...]) -> None:
    assert seeds_of(text, 7) == seeds


@pytest.mark.parametrize("text", ["0", "-1", "1001", "a", "1,", "1,1", "1.5", "٣", "", "9" * 40])
def test_seeds_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ParameterError, match=r"^--seeds "):
        seeds_of(text, 0)


def test_a_sweep_has_a_folder_a_cell_and_tells_mean_and_deviation(here: Path) -> None:  # noqa: F811
    done = call(*SWEEP, "--json")
    told = done.told
    assert told["seeds"] == [7, 8]
    assert [(run["name"], run["seed"]) for run in told["runs"]] == [
        (name, seed) for seed in (7, 8) for name in ("fedsgd", "pbpfl")
    ]
    results = [json.loads((Path(run["folder"]) / "result.json").read_text()) for run in told["runs"]]
    assert [result["settings"]["run"]["seed"] for result in results] == [7, 7, 8, 8]
    for name in ("fedsgd", "pbpfl"):
        losses = [result["test"]["loss"] for result in results if result["protocol"] == name]
        assert len(set(losses)) == 2
        assert told["spread"][name]["loss"] == {
            "mean": pytest.approx(np.mean(losses)),
            "deviation": pytest.approx(np.std(losses, ddof=1)),
            "values": losses,
        }
    assert "run 4 of 4: pbpfl, seed 8" in done.err
    page = Path(told["report"]).read_text()
    assert "Over 2 seeds" in page
    assert "from seeds 7, 8" in page
    again = call(*SWEEP, "--resume")
    assert again.code == 0
    assert again.err.count("has ended before") == 4
    assert "from seeds 7, 8" in again.out
    assert " ± " in again.out
    other = call(*SWEEP, "--resume", "--set", "data.batch-size=8")
    assert other.code == 2
    assert "holds a run with other settings" in other.sentence
    assert "exists and is not empty" in call(*SWEEP).sentence


def test_a_sweep_that_was_stopped_goes_on_where_it_was(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    begun: list[tuple[Path, bool]] = []

    def dies(run_file: Any, folder: Path, resume: bool, **more: Any) -> Any:
        begun.append((folder, resume))
        if len(begun) == 2:
            changed = run_file.model_copy(update={"run": run_file.run.model_copy(update={"rounds": 1})})
            train_with_bar(changed, folder, resume, **more)
            (folder / "result.json").unlink()  # stopped after its first round
            raise RunFailed("stopped")
        return train_with_bar(run_file, folder, resume, **more)

    monkeypatch.setattr(command, "train_with_bar", dies)
    words = ("compare", "run.toml", "--protocols", "fedsgd", "--seeds", "4,9", "--out", "all")
    assert call(*words).code == 1
    first = (here / "all" / "fedsgd" / "seed-4" / "result.json").stat().st_mtime_ns
    done = call(*words, "--resume", "--json")
    assert done.code == 0, done.err
    assert begun[2:] == [(Path("all/fedsgd/seed-9"), True)]
    assert (here / "all" / "fedsgd" / "seed-4" / "result.json").stat().st_mtime_ns == first
    assert read_run(here / "all" / "fedsgd" / "seed-9").rounds == 3
    assert math.isfinite(done.told["spread"]["fedsgd"]["loss"]["deviation"])
    losses = done.told["spread"]["fedsgd"]["loss"]["values"]
    assert done.told["spread"]["fedsgd"]["loss"]["deviation"] == pytest.approx(statistics.stdev(losses))


def test_what_does_not_go_together_is_one_sentence(here: Path) -> None:  # noqa: F811
    for words in (["--seeds", "2"], ["--resume"]):
        assert "go with one run file" in call("compare", "folder", *words).sentence
    assert "--audit goes with one seed" in call("compare", "run.toml", "--seeds", "2", "--audit").sentence
    assert "expected how many" in call("compare", "run.toml", "--seeds", "many").sentence
