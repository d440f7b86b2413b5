"""`moretta reproduce`: the listing, one table end to end on tiny data, and what may be wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import reproduction
from play import listing
from reproduction import Reproduction, choose, find

from moretta.commands import main as cli
from moretta.engines.folder_lock import held
from moretta.errors import ParameterError

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
NAMES = sorted(find(EXPERIMENTS))


def quiet(line: str) -> None:
    """Say nothing."""


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    """A folder of data sets with eighty rows that look like bank marketing."""
    folder = tmp_path / "data" / "bank_marketing"
    folder.mkdir(parents=True)
    random = np.random.default_rng(5)
    lines = ['"age";"job";"duration";"euribor3m";"y"']
    for row in range(80):
        job, said = ("admin.", "retired")[row % 2], ("no", "no", "no", "yes")[row % 4]
        lines.append(f'{20 + row % 50};"{job}";{random.integers(1, 900)};{random.normal():.3f};"{said}"')
    (folder / "bank-additional-full.csv").write_text("\n".join(lines) + "\n")
    return folder.parent


def test_listing_names_every_table_of_the_papers() -> None:
    told = {one["name"]: one for one in listing(EXPERIMENTS)}
    tables = (*(f"pbpfl-table-{number}" for number in range(1, 6)), "pbpfl-figure-4")
    of_cgd = (*(f"cgd-table-{number}" for number in range(4, 9)), "cgd-figure-8", "cgd-vertical", "cgd-authors")
    assert {*tables, "pbpfl-first-table-2", *of_cgd} <= set(told)
    assert told["pbpfl-table-1"]["cells"] == 90  # five seeds of each
    assert told["pbpfl-table-1"]["quick_cells"] < 18
    assert told["baffle-table-1-mnist"]["cells"] == 24  # five seeds of four of eight levels
    assert told["baffle-table-1-mnist"]["quick_cells"] == 7
    assert told["baffle-table-1-mnist"]["data"] == {"mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/"}
    assert "uci.edu" in told["pbpfl-table-1"]["data"]["bank_marketing"]
    assert told["pbpfl-table-1"]["minutes"] > told["pbpfl-table-1"]["quick_minutes"] > 0
    assert not told["pbpfl-table-5"]["data"]


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_is_a_valid_run(name: str, tmp_path: Path) -> None:
    for folder in ("bank_marketing", "ham10000_subset", "cifar10", "cifar100_subset", "mnist", "aptos2019"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bank_marketing" / "bank-full.csv.gz").touch()
    for quick in (False, True):
        chosen = choose(name, EXPERIMENTS, tmp_path, quick)
        marks = [json.dumps(chosen.settings(cell)) for cell in chosen.cells()]
        assert all(chosen.run_file(cell).run.seed == cell.seed for cell in chosen.cells())
        assert len(set(marks)) == len(marks)
        assert chosen.results([])["why_they_differ"]


def test_a_table_end_to_end_and_a_second_time_without_training(
    bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, out, seen = choose("pbpfl-table-1", EXPERIMENTS, bank, quick=True), tmp_path / "out", set[str]()
    first = chosen.run(out, quiet, lambda cell, number, rounds: seen.add(cell))
    assert first == json.loads((out / "pbpfl-table-1-quick.json").read_text())
    assert len(seen) == len(chosen.cells()) == len(first["cells"])
    assert first["columns"] == ["k = 1", "k = 5", "k = 10"]
    rows = {row["row"]: row for row in first["rows"]}
    assert rows["PBPFL, MLP-5"]["paper"] == [0.059, 0.077, 0.101]
    assert rows["PBPFL, MLP-5"]["ours"] == pytest.approx(rows["FedAvg, MLP-5"]["ours"], rel=1e-3)  # PBPFL is exact
    assert "(0.077)" in _text(first)

    def refuse(*_: object) -> None:
        raise AssertionError("nothing is left to train")

    monkeypatch.setattr(Reproduction, "train", refuse)
    assert chosen.run(out, quiet) == first
    other = choose("pbpfl-table-1", EXPERIMENTS, bank, quick=True, overrides=["protocol.learning-rate=0.2"])
    with pytest.raises(ParameterError, match=r"has cells of other settings, seeds or length than now \(12 of 12\)"):
        other.run(out, quiet)
    assert json.loads((out / "pbpfl-table-1-quick.json").read_text()) == first
    with pytest.raises(AssertionError, match="nothing is left"):  # elsewhere they are trained
        other.run(tmp_path / "other", quiet)


def test_a_record_is_of_one_process_at_a_time(bank: Path, tmp_path: Path) -> None:
    chosen = choose("pbpfl-table-1", EXPERIMENTS, bank, quick=True)
    with (
        held(tmp_path / "unfinished" / "pbpfl-table-1-quick"),
        pytest.raises(ParameterError, match="is in use by proc"),
    ):
        chosen.run(tmp_path, quiet)
    assert not chosen.path(tmp_path).exists()


def _text(results: dict[str, object]) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as captured:
        console.print(reproduction.table(results))
    return captured.get()


def test_an_interrupted_table_goes_on_where_it_stopped(
    bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, train, trained = choose("pbpfl-table-1-rate", EXPERIMENTS, bank, quick=True), Reproduction.train, []

    def interrupted(self: Reproduction, cell: reproduction.Cell, *rest: object) -> dict[str, object]:
        trained.append(cell.levels[0])
        if len(trained) == 3:
            raise KeyboardInterrupt
        return train(self, cell)

    monkeypatch.setattr(Reproduction, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        chosen.run(tmp_path, quiet)
    results = chosen.run(tmp_path, quiet)
    assert trained == ["rate 0.01", "rate 0.03", "rate 0.1", "rate 0.1", "rate 0.3"]
    assert len(results["cells"]) == 4


def test_a_level_may_have_rounds_of_its_own(bank: Path, tmp_path: Path) -> None:
    home = tmp_path / "experiments" / "mine"
    home.mkdir(parents=True)
    (home / "run.toml").write_text((EXPERIMENTS / "pbpfl" / "table-1.toml").read_text())
    table = (
        '[mine]\ntitle = "Two lengths"\npaper = "none"\nrun = "run.toml"\nrounds = 2\n'
        'figures = [{ name = "MSE", path = "test.mse" }]\nquick = { rounds = 1 }\n'
        'axes = [{ levels = [{ name = "short" }, { name = "long", rounds = 3 }] }, { levels = [{ name = "bank" }] }]\n'
    )
    (home / "tables.toml").write_text(table)
    for quick, played in ((False, [2, 3]), (True, [1, 1])):
        chosen = choose("mine", home.parent, bank, quick=quick)
        cells = chosen.run(tmp_path, quiet)["cells"]
        assert [cell["rounds"] for cell in cells] == [cell["settings"]["length"]["rounds"] for cell in cells] == played
    with pytest.raises(ParameterError, match=r"run\.rounds is not what"):
        choose("mine", home.parent, bank, overrides=["run.rounds=9"]).run(tmp_path, quiet)
    (home / "tables.toml").write_text(table.replace("rounds = 3", 'set = ["run.rounds=3"]'))
    with pytest.raises(ParameterError, match=r"run\.rounds is not what"):
        find(home.parent)


def test_a_cell_goes_on_from_its_last_checkpoint(bank: Path, tmp_path: Path) -> None:
    home = tmp_path / "experiments" / "mine"
    home.mkdir(parents=True)
    (home / "run.toml").write_text((EXPERIMENTS / "pbpfl" / "table-1.toml").read_text())
    (home / "tables.toml").write_text(
        '[mine]\ntitle = "One cell"\npaper = "none"\nrun = "run.toml"\nrounds = 7\nset = ["run.checkpoint-every=2"]\n'
        'figures = [{ name = "MSE", path = "test.mse", digits = 9 }]\naxes = [{ levels = [{ name = "FedSGD" }] }, '
        '{ levels = [{ name = "bank" }] }]\n'
    )
    chosen, played = choose("mine", home.parent, bank), list[int]()

    def watch(_: str, number: int, rounds: int) -> None:
        played.append(number)
        if played == [1, 2, 3, 4, 5]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chosen.run(tmp_path / "one", quiet, watch)
    assert len(list((tmp_path / "one" / "unfinished").glob("mine-*"))) == 1
    found = chosen.run(tmp_path / "one", quiet, watch)
    assert played == [1, 2, 3, 4, 5, 6, 7]  # what a watcher raises leaves a checkpoint of its round
    assert not list((tmp_path / "one" / "unfinished").glob("mine-*"))
    whole = chosen.run(tmp_path / "other", quiet)
    assert found["rows"] == whole["rows"]
    assert found["cells"][0]["wall_seconds"] > 0
    assert found["cells"][0]["core_seconds"] > 0


def test_curves_and_deviations_over_seeds(bank: Path, tmp_path: Path) -> None:
    home = tmp_path / "experiments" / "mine"
    home.mkdir(parents=True)
    (home / "run.toml").write_text((EXPERIMENTS / "pbpfl" / "table-1.toml").read_text())
    (home / "tables.toml").write_text(
        '[mine]\ntitle = "Curves"\npaper = "none"\nrun = "run.toml"\nrounds = 4\nseeds = [1, 2]\n'
        'curve = "test_mse"\nfigures = [{ name = "up", path = "bytes.up_per_silo_per_round" }, '
        '{ name = "MSE", path = "test.mse" }]\naxes = [{ levels = [{ name = "FedSGD" }] }]\n'
    )
    results = choose("mine", home.parent, bank).run(tmp_path, quiet)
    assert results["columns"] == ["up", "MSE"]
    assert results["rows"][0]["deviations"][1] > 0
    assert [at for at, _ in results["cells"][0]["curve"]] == [1.0, 2.0, 3.0, 4.0]  # a silo has one batch
    assert (tmp_path / "mine.svg").read_text().startswith("<?xml")


def test_a_cell_that_diverges_is_kept_as_failed(bank: Path, tmp_path: Path) -> None:
    chosen = choose("pbpfl-table-1-rate", EXPERIMENTS, bank, overrides=["protocol.learning-rate=1e30"])
    results = chosen.run(tmp_path, quiet)
    assert all("finite" in cell["failed"] for cell in results["cells"])
    assert results["rows"][0]["ours"] == [None]
    assert chosen.run(tmp_path, quiet) == results


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ParameterError, match='did you mean "pbpfl-table-1"'):
        choose("pbpfl-tabel-1", EXPERIMENTS)


def test_missing_data_is_a_sentence(tmp_path: Path) -> None:
    for data, said in (
        (None, "--data, or by the variable MORETTA_DATA"),
        (tmp_path, "does not exist; name the folder"),
    ):
        with pytest.raises(ParameterError, match=said):
            choose("pbpfl-table-1", EXPERIMENTS, data, quick=True).run(tmp_path / "out", quiet)
    assert not (tmp_path / "out").exists()


def test_a_missing_folder_of_experiments_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="--experiments"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("colour = 3", "colour"),
        ("rounds = 3", "either epochs or rounds"),
        ('printed = { "FedAvg" = [1, 2] }', "no row is called FedAvg"),
    ],
)
def test_a_bad_experiment_is_a_sentence(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tables.toml").write_text(
        f'[mine]\ntitle = "T"\npaper = "P"\nrun = "run.toml"\nepochs = 4\n{line}\n'
        'figures = [{ name = "MSE", path = "test.mse" }]\naxes = [{ levels = [{ name = "k = 1" }] }]\n'
    )
    with pytest.raises(ParameterError, match=said):
        find(tmp_path)


def test_results_of_another_format_are_refused(bank: Path, tmp_path: Path) -> None:
    (tmp_path / "pbpfl-table-1-rate-quick.json").write_text('{"format": 99, "cells": []}')
    with pytest.raises(ParameterError, match="format 99"):
        choose("pbpfl-table-1-rate", EXPERIMENTS, bank, quick=True).run(tmp_path, quiet)


def test_without_a_checkout_it_is_said_where_experiments_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # as where the wheel is installed
    for words in ([], ["pbpfl-table-1", "--quick"]):
        monkeypatch.setattr("sys.argv", ["moretta", "reproduce", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert said.startswith("moretta: experiments holds no experiments, and pip does not install them")
        assert len(said.splitlines()) == 1


def _command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["moretta", "reproduce", "--experiments", str(EXPERIMENTS), *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command_lists_and_runs(
    bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _command(monkeypatch, "--json") == 0
    assert {one["name"] for one in json.loads(capsys.readouterr().out)["experiments"]} == set(NAMES)
    assert _command(monkeypatch) == 0
    listed = capsys.readouterr().out
    assert "pbpfl-figure-4" in listed
    assert re.search(r"quick form [\d.]+ min, whole [\d.]+ (min|h) on one core; data: mnist\n", listed)
    assert "    cifar10: https://" in listed
    table = ("pbpfl-table-1", "--quick", "--epochs", "1", "--data", str(bank), "--out", str(tmp_path / "out"))
    assert _command(monkeypatch, *table, "--json") == 0
    told, progress = capsys.readouterr()
    assert json.loads(told)["length"] == {"epochs": 1}
    assert "12/12 PBPFL, MLP-5, k = 10" in progress
    assert _command(monkeypatch, *table) == 0
    told, progress = capsys.readouterr()
    assert "0 to train" in progress
    assert "why they differ" in told


def test_the_command_fails_in_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("MORETTA_DATA", raising=False)
    assert _command(monkeypatch, "pbpfl-table-7") == 2
    assert "did you mean" in capsys.readouterr().err
    assert _command(monkeypatch, "pbpfl-table-5", "--epochs", "3") == 2
    assert "in rounds" in capsys.readouterr().err
    assert _command(monkeypatch, "pbpfl-table-2") == 2
    assert "MORETTA_DATA" in capsys.readouterr().err
