"""What a sweep chooses, and by what: validation rows alone, seed by seed; a table of what it came to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from moretta.errors import RunFailed
from moretta.report.folder import RoundRecord, read_run
from moretta.report.page import page
from moretta.report.sweep import Sweep
from moretta.report.table import OverSeeds

GOOD, SAME, BAD = (0.30, 0.34, 0.29), (0.31, 0.33, 0.30), (0.50, 0.55, 0.48)


def runs(make_run: Any, name: str, losses: Sequence[float | None], accuracy: float = 0.9, **settings: Any) -> OverSeeds:
    """Runs of a variant, one a loss on validation rows."""
    records = []
    for seed, loss in enumerate(losses):
        folder: Path = make_run("fedsgd", folder=f"{name}-{seed}")
        told = json.loads((folder / "result.json").read_text())
        told["test"]["accuracy"] = accuracy
        told["settings"]["protocol"] |= settings
        told["facts"] = {"best_round": 80.0}
        (folder / "result.json").write_text(json.dumps(told))
        lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        lines[-1] |= {"validation_loss": loss, "validation_accuracy": 0.99 if loss is None else 1 - loss}
        (folder / "history.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        records.append(read_run(folder))
    return OverSeeds(name, tuple(range(len(losses))), tuple(records))


def sweep(make_run: Any, of: Mapping[str, Sequence[float | None]], **accuracy: float) -> Sweep:
    return Sweep({name: runs(make_run, name, losses, accuracy.get(name, 0.9)) for name, losses in of.items()})


def test_validation_rows_choose_and_test_rows_do_not(make_run: Any) -> None:
    found = sweep(make_run, {"bad": BAD, "good": GOOD}, bad=0.999, good=0.5)  # the worse one has better test rows
    assert (found.chosen, found.key) == ("good", "loss")
    told = found.as_json()
    assert (told["chosen"], told["judged_by"]) == ("good", "validation_loss")
    assert told["spread"]["good"]["accuracy"]["mean"] == pytest.approx(0.5)
    assert not {"accuracy", "loss", "auc", "balanced_accuracy"} & told["spread"]["bad"].keys()
    assert told["spread"]["bad"]["validation_loss"]["values"] == list(BAD)
    assert "0.999" not in json.dumps(told)
    rows = {row.measure: row.cells for row in found.table().rows}
    assert set(rows) == {"bad", "* good"}
    assert rows["* good"] == ("0.310 ± 0.026", "–", "0.690")


def test_differences_are_paired_and_have_students_interval(make_run: Any) -> None:
    found = sweep(make_run, {"good": GOOD, "bad": BAD, "same": SAME})
    mean, half = found.difference("bad")
    assert mean is not None
    assert half is not None
    oracle = stats.ttest_rel(BAD, GOOD).confidence_interval(0.95)
    np.testing.assert_allclose((mean - half, mean + half), (oracle.low, oracle.high), rtol=1e-12)
    shown = {row.measure: row.cells[1] for row in found.table().rows}
    assert shown["bad"] == "+0.200 [+0.175, +0.225]"
    (_, near) = found.sentences()
    assert near == "These seeds do not separate it from: same."
    assert "separate it from: twin." in sweep(make_run, {"one": GOOD, "twin": GOOD}).sentences()[-1], (
        "not even by a digit"
    )


def test_the_score_is_that_of_the_round_that_a_run_returned_to(make_run: Any) -> None:
    one = runs(make_run, "early", GOOD)
    lines = [line.model_copy(update={"validation_loss": 0.1 * line.round}) for line in one.records[0].history]
    record = one.records[0].model_copy(update={"history": tuple(lines), "facts": {"best_round": 3.0}})
    assert Sweep({"early": OverSeeds("early", (0,), (record,))}).scores("early", "loss") == (pytest.approx(0.3),)


def test_what_diverged_is_never_chosen(make_run: Any) -> None:
    found = sweep(make_run, {"gone": (0.1, None, 0.1), "bad": BAD})
    assert found.chosen == "bad"
    assert next(row.cells for row in found.table().rows if row.measure == "gone") == ("diverged", "–", "diverged")
    with pytest.raises(RunFailed, match=r"no variant has a finite loss on validation rows .* lower learning-rate"):
        _ = Sweep({"gone": found.runs["gone"]}).chosen


@pytest.mark.parametrize("lacking", ["score", "line"])
def test_a_model_without_a_score_has_not_diverged(make_run: Any, lacking: str) -> None:
    scored = runs(make_run, "unscored", GOOD)
    lines = [line for line in scored.records[0].history if line.round != 80]
    if lacking == "score":
        lines.append(RoundRecord(round=80))
    records = (scored.records[0].model_copy(update={"history": tuple(lines)}), *scored.records[1:])
    unscored = OverSeeds("unscored", scored.seeds, records)
    found = Sweep({"unscored": unscored, "bad": runs(make_run, "bad", BAD)})
    assert found.chosen == "bad"
    row = next(row.cells for row in found.table().rows if row.measure == "unscored")
    assert row == ("not evaluated", "–", "not evaluated")
    with pytest.raises(RunFailed, match=r"some last rounds were not evaluated; set evaluate-every = 1"):
        _ = Sweep({"unscored": unscored}).chosen


def test_runs_of_several_losses_are_judged_by_accuracy(make_run: Any) -> None:
    mse, entropy = runs(make_run, "mse", BAD), runs(make_run, "entropy", (0.6, 0.7, 0.65), loss="cross-entropy")
    found = Sweep({"mse": mse, "entropy": entropy})
    assert (found.key, found.chosen) == ("accuracy", "mse")
    assert found.table().heads == ("Run", "Validation accuracy", "From the chosen [95 %]")
    assert "the highest mean accuracy" in found.sentences()[0]


def test_a_diverged_run_that_names_the_commonest_class_is_not_chosen_by_accuracy(make_run: Any) -> None:
    gone, entropy = runs(make_run, "gone", (None,) * 3), runs(make_run, "entropy", BAD, loss="cross-entropy")
    found = Sweep({"gone": gone, "entropy": entropy})
    assert (found.key, found.chosen) == ("accuracy", "entropy")
    assert "validation_accuracy" not in found.as_json()["spread"]["gone"]


def test_one_seed_has_no_interval_and_says_so(make_run: Any) -> None:
    found = sweep(make_run, {"good": GOOD[:1], "bad": BAD[:1]})
    assert [row.cells[:2] for row in found.table().rows] == [("0.3000", "–"), ("0.5000", "+0.2000")]
    assert "give --seeds 5" in found.sentences()[-1]
    assert not math.isnan(found.as_json()["spread"]["bad"]["from_chosen"]["mean"])


def test_the_page_is_of_the_chosen_alone(make_run: Any) -> None:
    found = sweep(make_run, {"bad": BAD, "good": GOOD}, bad=0.1777, good=0.5)
    good = found.runs["good"]
    written = page([good.records[0]], spreads=[good], sweep=found)
    assert "Chosen among 2 runs by validation rows" in written
    assert "Over 3 seeds" in written
    assert "0.1777" not in written
