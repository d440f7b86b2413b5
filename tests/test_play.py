"""`experiments/play.py`: pieces end in time and go on where they were, after a kill too; the plan; wrong names."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import play
import pytest

pytest.importorskip("torch", reason="models need torch")

import reproduction
from reproduction import choose

from moretta.engines.checkpoint import rounds_kept

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
TABLE = """
[mine]
title = "One table"
paper = "none"
run = "run.toml"
rounds = 30
figures = [{ name = "loss", path = "test.loss", digits = 9 }]
axes = [
  { levels = [{ name = "short", rounds = 3 }, { name = "long" }] },
  { levels = [{ name = "wdbc", set = ["data.silos=3"] }] },
]
"""
RUN = """
[run]
rounds = 3
seed = 1
checkpoint-every = 5
[data]
source = "wdbc"
silos = 3
batch-size = 4
[model]
source = "mlp"
hidden = [4]
[protocol]
name = "fedsgd"
loss = "cross-entropy"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of experiments with one table of two cells."""
    (tmp_path / "experiments" / "mine").mkdir(parents=True)
    (tmp_path / "experiments" / "mine" / "tables.toml").write_text(TABLE)
    (tmp_path / "experiments" / "mine" / "run.toml").write_text(RUN)
    monkeypatch.setattr(play, "HERE", tmp_path / "experiments")
    listed(tmp_path / "experiments", '[[row]]\ntable = "Mine"\nreproduce = "mine"\n')
    return tmp_path / "experiments"


def listed(home: Path, text: str) -> None:
    """Write the list of rows."""
    (home / "rows.toml").write_text(text)


def checkpoint(out: Path) -> int:
    """Return the last round that a cell in the making would go on from."""
    return max((max(rounds_kept(path / "checkpoint"), default=0) for path in out.glob("unfinished/*")), default=0)


def test_every_row_can_be_played_and_is_in_the_plan(tmp_path: Path) -> None:
    rows = play.rows()
    told = play.plan(rows, tmp_path).splitlines()
    assert len(told) == len(rows) + 2
    assert len({row.table for row in rows}) == len(rows)
    for row, line in zip(rows, told[2:], strict=True):
        assert row.command in line
        script = next((word for word in row.run.split() if word.endswith(".py")), "experiments/play.py")
        assert (EXPERIMENTS.parent / script).is_file()


def test_a_piece_ends_after_its_seconds_and_the_next_goes_on(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(play, "clock", lambda: next(ticks))  # a second a round
    out, ends, rounds = tmp_path / "out", list[int](), list[int]()
    while 0 not in ends and len(ends) < 9:
        ends.append(play.main(["--out", str(out), "--seconds", "10"]))
        rounds.append(checkpoint(out))
    assert ends == [play.LEFT, play.LEFT, play.LEFT, 0]
    assert rounds == [8, 19, 30, 0]  # three rounds of the first piece were of the short cell
    assert play.main(["--out", str(out)]) == 0  # nothing is left
    kept = json.loads((out / "mine.json").read_text())
    whole = choose("mine", home).run(tmp_path / "whole", lambda line: None)
    assert kept["rows"] == whole["rows"]
    assert all(0 <= cell["core_seconds"] < 60 for cell in kept["cells"])  # of a quick machine less than is kept


def test_a_piece_has_at_least_a_round_however_long(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(step=64)
    monkeypatch.setattr(play, "clock", lambda: next(ticks))  # 64 seconds a round
    rounds = list[int]()
    for _ in range(3):
        assert play.main(["--out", str(tmp_path / "out"), "--seconds", "130"]) == play.LEFT
        rounds.append(checkpoint(tmp_path / "out"))
    assert rounds == [2, 2, 4]  # a third one would end more than GRACE past them
    monkeypatch.setattr(play, "clock", lambda: next(ticks) * 100)  # longer than a piece
    assert play.main(["--out", str(tmp_path / "out"), "--seconds", "130"]) == play.LEFT
    assert checkpoint(tmp_path / "out") == rounds[-1] + 1


def test_it_goes_on_after_a_kill(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (home / "mine" / "tables.toml").write_text(TABLE.replace("rounds = 30\n", "rounds = 3000\n"))
    code = f"import play; play.HERE = play.Path({str(home)!r}); play.main(['--out', {str(out)!r}])"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=EXPERIMENTS, stderr=subprocess.DEVNULL)
    while checkpoint(out) < 10 and child.poll() is None:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    before = checkpoint(out)
    assert 10 <= before < 3000
    assert play.main(["--out", str(out), "--seconds", "0.01"]) == play.LEFT
    assert checkpoint(out) > before
    assert len(json.loads((out / "mine.json").read_text())["cells"]) == 1  # the short one was kept


def test_a_command_ends_with_its_piece(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "sleeps.py").write_text("import time; time.sleep(60)")
    (home / "writes.py").write_text("import sys, json; json.dump({'rows': [1, 2]}, open(sys.argv[1], 'w'))")
    sleeps, writes = (f"python experiments/{name}.py {{out}}/{name}.json" for name in ("sleeps", "writes"))
    listed(home, f'[[row]]\ntable = "S"\nrun = "{sleeps}"\nrecord = "sleeps.json"\n')
    monkeypatch.setattr(play, "GRACE", 0.0)
    began = time.monotonic()
    assert play.main(["--out", str(tmp_path), "--seconds", "0.3"]) == play.LEFT
    assert time.monotonic() - began < 20
    listed(home, f'[[row]]\ntable = "W"\nrun = "{writes}"\nrecord = "writes.json"\ncells = 2\n')
    assert play.main(["--out", str(tmp_path)]) == 0
    assert "| W | 2 | 2 |" in play.plan(play.rows(), tmp_path)


def test_a_row_that_cannot_be_played_is_a_sentence_and_others_are_played(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "mine" / "tables.toml").write_text(
        TABLE + TABLE.replace("[mine]", "[bank]").replace("run.toml", "bank.toml")
    )
    (home / "mine" / "bank.toml").write_text(RUN.replace("wdbc", 'bank-marketing"\npath = "bank_marketing'))
    listed(
        home, '[[row]]\ntable = "B"\nreproduce = "bank"\n[[row]]\ntable = "M"\nreproduce = "mine"\nonly = ["short"]\n'
    )
    assert play.main(["--out", str(tmp_path)]) == play.FAILED
    assert "--data" in capsys.readouterr().err
    assert "| M | 1 | 1 |" in play.plan(play.rows(), tmp_path)


def test_wrong_names_are_sentences(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert play.main(["Mina", "--plan"]) == play.FAILED
    assert 'did you mean "Mine"' in capsys.readouterr().err
    listed(home, '[[row]]\ntable = "A"\nreproduce = "mine"\nonly = ["shrt"]\n')
    assert play.main(["--plan"]) == play.FAILED
    assert 'did you mean "short"' in capsys.readouterr().err


def test_hours_are_of_timed_rounds(home: Path, tmp_path: Path) -> None:
    assert "not timed" in play.plan(play.rows(), tmp_path)
    assert play.main(["--time", "--out", str(tmp_path)]) == 0
    (told,) = json.loads((home / "seconds.json").read_text()).values()  # two cells of one cost
    assert told["round"] > 0
    assert "not timed" not in play.plan(play.rows(), tmp_path)
    chosen = choose("mine", home)
    short, long = (play.estimated(chosen, cell) for cell in chosen.cells())
    assert short is not None
    assert long is not None
    assert long - short == pytest.approx(27 * told["round"])


@pytest.mark.parametrize("order", [(1, 2, 9), (9, 1, 2), (2, 9, 1)])
def test_hours_follow_the_median_of_the_records_whatever_order_they_are_read_in(
    home: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]
) -> None:
    chosen = choose("mine", home)
    short, _ = chosen.cells()
    cells = [{"wall_seconds": 0, "core_seconds": seconds} for seconds in order] + [{"wall_seconds": 50}]
    for place, seconds in enumerate(cells):
        cell = {"settings": chosen.settings(short), "rounds": 1, "epochs": 1, **seconds}
        folder = home / "mine" / "results" / str(place)
        folder.mkdir(parents=True)
        (folder / "mine.json").write_text(json.dumps({"cells": [cell]}))
    monkeypatch.setattr(play, "_played_before", play._played_before.__wrapped__)
    assert play.estimated(chosen, short) == pytest.approx(3 * 2)


def test_a_cell_of_another_device_is_done(home: Path, tmp_path: Path) -> None:
    assert play.main(["--out", str(tmp_path)]) == 0
    chosen = choose("mine", home, overrides=["run.device=cuda"])
    assert len(chosen.done(tmp_path)) == 2


@pytest.mark.parametrize("kept", ["results", "results/longer"])
def test_cells_that_have_a_record_are_not_played_again(
    home: Path, tmp_path: Path, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "mine" / "tables.toml").write_text(TABLE.replace("rounds = 30\n", "rounds = 4\n"))
    choose("mine", home, only=["long"]).run(home / "mine" / "results" / "4-rounds", lambda line: None)
    (home / "mine" / "tables.toml").write_text(TABLE)
    choose("mine", home, only=["short"]).run(home / "mine" / kept, lambda line: None)
    choose("mine", home, only=["long"]).run(tmp_path / "out", lambda line: None)
    capsys.readouterr()
    assert play.main(["--out", str(tmp_path / "out")]) == 0
    assert "to train" not in capsys.readouterr().err  # one here and one there are all
    assert play.main(["--out", str(tmp_path / "new")]) == 0
    assert "mine: 2 cells, 1 to train" in capsys.readouterr().err


REPLAYED = {
    "baffle": 'name = "baffle"\nloss = "cross-entropy"\nk = 4\nlearning-rate = 0.1\n',
    "pbpfl": 'name = "pbpfl"\nloss = "cross-entropy"\nlearning-rate = 0.1\n',
}


def quiet(line: str) -> None:
    """Say nothing."""


def recorded(home: Path, out: Path, protocol: str) -> None:
    """Play one cell of a protocol and keep its record among the results."""
    (home / "mine" / "run.toml").write_text(RUN.partition("[protocol]")[0] + f"[protocol]\n{REPLAYED[protocol]}")
    chosen = choose("mine", home, only=["short"])
    chosen.run(out, quiet)
    (home / "mine" / "results").mkdir(exist_ok=True)
    chosen.path(out).rename(home / "mine" / "results" / "mine.json")


@pytest.mark.parametrize("protocol", sorted(REPLAYED))
def test_a_cell_replays_to_the_byte(
    protocol: str, home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recorded(home, tmp_path / "out", protocol)
    assert play.main(["--replay", "mine[short, wdbc; seed 1]"]) == 0
    assert "mine[short, wdbc; seed 1]: equal to the byte" in capfd.readouterr().err


def test_a_record_that_was_changed_is_not_replayed(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recorded(home, tmp_path / "out", "baffle")
    path = home / "mine" / "results" / "mine.json"
    record = json.loads(path.read_text())
    kept = json.dumps(record)
    record["cells"][0]["figures"]["loss"] += 1e-15
    path.write_text(json.dumps(record))
    assert play.main(["--replay", "mine[short, wdbc; seed 1]"]) == play.FAILED
    assert "differs in figures" in capfd.readouterr().err
    for key, said in (("public_secret_seed", "its record has no public secret seed"), ("settings", "other settings")):
        record = json.loads(kept)
        record["cells"][0][key] = None if key != "settings" else {**record["cells"][0][key], "data.silos": "2"}
        path.write_text(json.dumps(record))
        assert play.main(["--replay", "mine[short, wdbc; seed 1]"]) == play.FAILED
        assert said in capfd.readouterr().err
    assert play.main(["--replay", "mine[short, wdbc; seed 2]"]) == play.FAILED
    assert "no cell is called" in capfd.readouterr().err


def test_a_cell_that_was_stopped_ends_with_the_same_bytes(home: Path, tmp_path: Path) -> None:
    (home / "mine" / "run.toml").write_text(RUN.partition("[protocol]")[0] + f"[protocol]\n{REPLAYED['baffle']}")
    (whole,) = choose("mine", home, only=["long"]).run(tmp_path / "whole", quiet)["cells"]

    def stop(_: str, number: int, __: int) -> None:
        if number == 13:
            raise play.TimeIsUp

    with pytest.raises(play.TimeIsUp):
        choose("mine", home, only=["long"]).run(tmp_path / "pieces", quiet, stop)
    (pieces,) = choose("mine", home, only=["long"]).run(tmp_path / "pieces", quiet)["cells"]
    assert json.dumps(reproduction.replayed(pieces)) == json.dumps(reproduction.replayed(whole))
