"""`moretta compare --seeds`: which runs, what they come to, and that a sweep that was stopped goes on."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import call, here, patients  # noqa: F401  # a fixture

from moretta.commands import compare as command
from moretta.commands.train import train_with_bar
from moretta.errors import ParameterError, RunFailed
from moretta.report.folder import read_run
from moretta.run.comparison import seeds_of

VALIDATED = ("--set", "data.validation-fraction=0.2")
SWEEP = ("compare", "run.toml", "--protocols", "fedsgd,pbpfl", "--seeds", "2", "--out", "all", *VALIDATED)


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
        folders = [Path(run["folder"]) for run in told["runs"] if run["name"] == name]
        losses = [json.loads(_last_line(folder))["validation_loss"] for folder in folders]
        assert len(set(losses)) == 2
        assert told["spread"][name]["validation_loss"] == {
            "mean": pytest.approx(np.mean(losses)),
            "deviation": pytest.approx(np.std(losses, ddof=1)),
            "values": losses,
        }
        assert ("accuracy" in told["spread"][name]) == (name == told["chosen"])  # test rows are looked at once
        assert {"seconds", "up_per_silo_per_round"} < told["spread"][name].keys()
    tested = [result["test"]["accuracy"] for result in results if result["protocol"] == told["chosen"]]
    assert told["spread"][told["chosen"]]["accuracy"]["values"] == tested
    assert "run 4 of 4: pbpfl, seed 8" in done.err
    page = Path(told["report"]).read_text()
    assert "Over 2 seeds" in page
    assert "from seeds 7, 8" in page
    again = call(*SWEEP, "--resume")
    assert again.code == 0
    assert again.err.count("has ended before") == 4
    assert "from seeds 7, 8" in again.out
    assert " ± " in again.out
    assert "* is chosen: the lowest mean loss on validation rows" in again.out
    other = call(*SWEEP, "--resume", "--set", "data.batch-size=8")
    assert other.code == 2
    assert "holds a run with other settings" in other.sentence
    assert "exists and is not empty" in call(*SWEEP).sentence


def _last_line(folder: Path) -> str:
    return (folder / "history.jsonl").read_text().splitlines()[-1]


def test_any_key_is_varied_and_the_table_fits_80_columns(here: Path) -> None:  # noqa: F811
    variants = (
        "model.hidden=[8] protocol.learning-rate=0.1",
        "fedsgd learning-rate=1 data.batch-size=8 run.dtype=float64 model.hidden=[16,16,8]",
        "protocol.rho=2",
    )
    words = [word for one in variants for word in ("--variant", one)]
    done = call("compare", "run.toml", *words, *VALIDATED, "--out", "all", "--seeds", "2")
    assert done.code == 0, done.err
    assert max(map(len, done.out[: done.out.index("* is chosen")].splitlines())) <= 80
    assert "hidden-8-learning" in done.out
    assert "…" not in done.out
    assert done.out.count("Accuracy") == 2  # on validation rows of all, on test rows of the chosen
    told = call("compare", "run.toml", *words, *VALIDATED, "--out", "all", "--seeds", "2", "--resume", "--json").told
    kept = {name: json.loads((here / "all" / name / "seed-7" / "result.json").read_text()) for name in told["spread"]}
    settings = [one["settings"] for one in kept.values()]
    assert [one["model"]["hidden"] for one in settings] == [[8], [16, 16, 8], [4]]
    assert [one["protocol"]["learning-rate"] for one in settings] == [0.1, 1.0, 0.2]
    assert [one["data"]["batch-size"] for one in settings] == [16, 8, 16]


def test_a_sweep_needs_validation_rows_where_it_chooses(here: Path) -> None:  # noqa: F811
    several = ("compare", "run.toml", "--variant", "fedsgd", "--variant", "protocol.rho=2", "--out", "all")
    refused = call(*several)
    assert refused.code == 2
    assert "[data] validation-fraction is missing" in refused.sentence
    assert "add --set data.validation-fraction=0.2" in refused.sentence
    assert not (here / "all").exists()
    assert call(*several, *VALIDATED, "--json").told["judged_by"] == "validation_loss"  # the remedy, with one seed


def test_one_run_over_seeds_has_nothing_to_choose(here: Path) -> None:  # noqa: F811
    done = call("compare", "run.toml", "--protocols", "fedsgd", "--seeds", "2", "--out", "all", "--json")
    losses = [
        json.loads((Path(run["folder"]) / "result.json").read_text())["test"]["loss"] for run in done.told["runs"]
    ]
    assert done.told["spread"]["fedsgd"]["loss"]["values"] == losses


@pytest.mark.parametrize("change", ["data.validation-fraction=0.3", "data.test-fraction=0.4"])
def test_runs_that_would_be_judged_on_other_rows_are_refused(here: Path, change: str) -> None:  # noqa: F811
    words = ("--variant", "fedsgd", "--variant", change, *VALIDATED, "--out", "all")
    sentence = call("compare", "run.toml", *words).sentence
    assert "would be judged on other validation rows than fedsgd" in sentence
    assert not (here / "all").exists()


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


@pytest.mark.parametrize("more", [("--seeds", "7,8"), ("--variant", "protocol.learning-rate=0.5")])
def test_a_sweep_goes_on_with_the_rows_that_it_began_with(here: Path, more: tuple[str, str]) -> None:  # noqa: F811
    """It chose among runs of which some had been trained and scored on rows that are no longer there."""
    words = ("compare", "run.toml", "--protocols", "fedsgd", *VALIDATED, "--out", "all")
    begun = ("--seeds", "1") if "--seeds" in more else ("--variant", "protocol.learning-rate=0.2")
    assert call(*words, *begun).code == 0
    before = (here / "patients.csv").read_text()
    (here / "patients.csv").write_text(patients(seed=1))
    further = more if "--seeds" in more else (*begun, *more)
    sentence = call(*words, *further, "--resume").sentence
    assert re.search(r"the rows of silo-1, .*the test part, the validation part have changed since", sentence)
    assert len(list((here / "all").glob("**/result.json"))) == (1 if "--seeds" in more else 2)
    (here / "patients.csv").write_text(before)
    assert call(*words, *further, "--resume").code == 0


def test_what_does_not_go_together_is_one_sentence(here: Path) -> None:  # noqa: F811
    for words in (["--seeds", "2"], ["--resume"]):
        assert "need one run file" in call("compare", "folder", *words).sentence
    assert "--audit needs one seed" in call("compare", "run.toml", "--seeds", "2", "--audit").sentence
    assert "expected how many" in call("compare", "run.toml", "--seeds", "many").sentence
