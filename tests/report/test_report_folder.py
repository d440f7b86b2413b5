import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from moretta.errors import ParameterError
from moretta.report.folder import read_run
from moretta.report.page import page
from moretta.report.statements import privacy_statements, verdicts
from moretta.report.table import OverSeeds


def test_a_whole_folder(make_run):
    record = read_run(make_run("pbpfl"))
    assert (record.protocol, record.rounds, record.silos, record.parameters) == ("pbpfl", 80, 3, 2081)
    assert record.test.accuracy == 0.9737
    assert record.test.mse is None
    assert record.test.metrics["auc"] == 0.9963
    assert record.traffic.down_per_silo_per_round == 9120.5
    assert record.seconds["total"] == 8.1
    assert record.dropped[0].silo == "silo-2"
    assert record.setting("data", "batch-size") == 32
    assert record.setting("nowhere", "at-all") is None
    assert len(record.history) == 80
    assert record.history[9].test_accuracy is not None
    assert record.history[10].test_accuracy is None


def test_the_record_is_frozen(make_run):
    record = read_run(make_run())
    with pytest.raises(ValidationError):
        record.protocol = "fedsgd"


def test_keys_that_are_not_known_are_ignored_and_folder_is_the_true_one(make_run):
    folder = make_run(later="news", folder_size=3, history=[], folder="true")
    assert read_run(folder).folder == folder


def test_a_run_that_diverged_can_be_read(make_run):
    folder = make_run(test={"loss": float("nan"), "accuracy": 0.5, "metrics": {"auc": None}})
    record = read_run(folder)
    assert record.test.loss != record.test.loss
    assert record.test.metrics["auc"] is None


def broken(folder: Path, **replaced: object) -> Path:
    file = folder / "result.json"
    found = {key: value for key, value in (json.loads(file.read_text()) | replaced).items() if value != "gone"}
    file.write_text(json.dumps(found))
    return folder


@pytest.mark.parametrize("regression", [False, True])
def test_a_diverged_run_s_null_is_no_loss_and_its_report_says_so(make_run, regression):
    """Its result.json, as runs write it, was "broken"; of numbers the report said that there were no test rows."""
    score = {"mse": None} if regression else {"accuracy": 0.5}
    gone = read_run(make_run(regression=regression, test={"rows": 60, "loss": None, **score}))
    good = read_run(make_run(regression=regression, folder="good", test={"rows": 60, "loss": 1.0, **score}))
    assert (gone.test.available, gone.test.diverged) == (True, True)
    assert (good.test.available, good.test.diverged) == (True, False)
    assert read_run(make_run(folder="unscored", test={})).test.available is False
    said = "On 60 test rows the model has no finite loss, because training diverged."
    assert verdicts([gone])[0].good == said
    assert said in page([gone])
    seeds = [OverSeeds("FedSGD", (0, 1), runs) for runs in ((good, gone), (gone, gone))]
    for over in seeds:  # no mean over the others
        (verdict,) = verdicts(over.records[:1], spreads=[over])
        assert verdict.good == said.replace("the model", ", on average over 2 seeds, the model").replace(" ,", ",")
        assert over.as_json().get("accuracy", {"mean": None})["mean"] is None


@pytest.mark.parametrize(
    ("replaced", "says"),
    [
        ({"format": 2}, r"is of format 2, and this version of Moretta reads format 1 only"),
        ({"format": "gone"}, r"result\.json lacks the key format"),
        ({"protocol": "gone"}, r"result\.json lacks the key protocol"),
        ({"test": {"accuracy": 0.9}}, r"broken at test: an accuracy or an mse needs a loss beside it"),
        ({"test": {"mse": 0.9}}, r"broken at test: an accuracy or an mse needs a loss beside it"),
        ({"test": {"loss": "low", "accuracy": 0.9}}, r"broken at test\.loss: input should be a valid number"),
        ({"rounds": "300"}, r"broken at rounds: input should be a valid integer"),
        ({"bytes": {"up_per_silo_per_round": 1}}, r"lacks the key bytes\.down_per_silo_per_round"),
        ({"seconds": {"update": 1.0}}, r"seconds has no total"),
        ({"seconds": {"total": float("nan")}}, r"broken at seconds\.total"),
        (
            {"bytes": {"up_per_silo_per_round": 1.0, "down_per_silo_per_round": float("inf")}},
            r"down_per_silo_per_round: ",
        ),
        ({"task": "clustering"}, r"broken at task: input should be 'classification' or 'regression'"),
        ({"dropped": [{"round": 1, "silo": "a"}]}, r"lacks the key dropped\.0\.reason"),
    ],
)
def test_what_is_wrong_in_the_result_is_said_in_one_sentence(make_run, replaced, says):
    with pytest.raises(ParameterError, match=says) as caught:
        read_run(broken(make_run(), **replaced))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_files_that_are_missing_or_cut_off(make_run, tmp_path):
    with pytest.raises(ParameterError, match="no such directory"):
        read_run(tmp_path / "nowhere")
    folder = make_run()
    lines = folder / "history.jsonl"
    lines.write_text(lines.read_text() + '{"round": 81, "lo')
    with pytest.raises(ParameterError, match=r"history\.jsonl, line 81, is not JSON: EOF"):
        read_run(folder)
    lines.unlink()
    with pytest.raises(ParameterError, match=r"has no history\.jsonl: the folder is not whole"):
        read_run(folder)
    (folder / "result.json").write_bytes(b"\xff\x00")
    with pytest.raises(ParameterError, match=r"result\.json is not JSON"):
        read_run(folder)
    (folder / "result.json").unlink()
    with pytest.raises(ParameterError, match=r"has no result\.json: the run has not finished.*--resume"):
        read_run(folder)


def test_counts_that_are_not_numbers_are_no_counts(make_run):
    """Facts and settings of a folder may be anything."""
    facts = {"free_scales": float("nan"), "forced_to_one": float("inf"), "frozen": -1.0}
    record = read_run(broken(make_run(), protocol="pbpfl", facts=facts, settings={"run": {"participation": 10**400}}))
    assert privacy_statements(record)
