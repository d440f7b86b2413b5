"""Bad input: one clear sentence, exit code 2, and nothing half-written."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from refused_rows import lines, same
from test_cli import Called, call, prepare
from test_runs_with_a_roster import enrol

from moretta import Federation, FedSGD, Silo
from moretta.engines.checkpoint import last_checkpoint
from moretta.errors import ParameterError

MODELS = """
import numpy as np
from torch import nn

def squashed(): return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1), nn.Sigmoid())

class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        h = self.head(x)
        return h if h.sum() > 0 else -h

def branching(): return Branch()
def narrow(): return nn.Linear(4, 1)
def twins(): return nn.Linear(3, 2)
def fails(): raise RuntimeError("no weights here")
def no_module(): return 3

def table(bad):
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 4)).astype("float32")
    x[3, 1] = bad
    return x, random.integers(0, 2, 60), x[10:20], random.integers(0, 2, 10)

def with_nan(): return table(np.nan)
def with_infinity(): return table(np.inf)
def negative():
    x, y, x_test, y_test = table(0)
    return x, -y, x_test, y_test
def fractions():
    x, y, x_test, y_test = table(0)
    return x, y + 0.5, x_test, y_test + 0.5
def pairs():
    x, y, x_test, y_test = table(0)
    return x, np.stack([y, y], 1) + 0.5, x_test, np.stack([y_test, y_test], 1) + 0.5
"""


ROSTER = ("secure-aggregation.roster=roster.toml", "secure-aggregation.identity=keys/{silo}")

# What `--set` changes of a run file that trains ("-key" takes a key out of it), and what the sentence says.
TABLE = dict(lines("train.txt"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path)
    header, *rows = (tmp_path / "patients.csv").read_text().splitlines()
    without = ["," + row.split(",", 1)[1] for row in rows]
    gaps = {"gaps": [without[0], without[1], *rows[2:]], "sparse": [*without[:-3], *rows[-3:]]}
    gaps["untold"] = [rows[0][:-1], *rows[1:]]
    for name, some in gaps.items():
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *some, ""]))
    (tmp_path / "bad_input_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(here: Path, *arguments: str) -> str:
    """Call, and return the sentence; exit code 2, and every file and folder is as it was."""
    before, folders = content(here), sorted(path for path in here.rglob("*") if path.is_dir())
    done = call(*arguments)
    assert done.code == 2, done.err
    sentence = done.sentence
    assert content(here) == before
    assert sorted(path for path in here.rglob("*") if path.is_dir()) == folders
    return sentence


@pytest.mark.parametrize("changed", TABLE)
def test_a_run_that_cannot_work_is_refused_before_anything_is_written(changed: str, here: Path) -> None:
    changes = changed.split("; ")
    out = [change[1:].rpartition(".")[2] for change in changes if change.startswith("-")]
    lines = (here / "run.toml").read_text().splitlines()
    (here / "run.toml").write_text("\n".join(line for line in lines if line.partition(" ")[0] not in out))
    sets = [word for change in changes if not change.startswith("-") for word in ("--set", change)]
    assert same(TABLE[changed], refused(here, "train", "run.toml", *sets, "--out", "mine"), whole=False)


@pytest.mark.parametrize(
    ("spoil", "identity", "sentence"),
    [
        (
            lambda here: enrol(here, ("silo-1", "silo-2"), keys="fewer"),
            "keys/{silo}",
            r"expected each silo of the run in the roster, but it lacks silo-3; add a \[\[silo\]\] each",
        ),
        (
            lambda here: None,
            "keys/silo-1",
            r"the identity of silo `silo-2` is not the one that the roster .*; expected [\w ]{39}, got [\w ]{39} ",
        ),
        (
            lambda here: (here / "keys" / "silo-3" / "identity.key").unlink(),
            "keys/{silo}",
            r"the key file .*keys/silo-3/identity\.key cannot be read \(No such file or directory\)",
        ),
        (
            lambda here: shutil.rmtree(here / "keys" / "silo-3"),
            "keys/{silo}",
            r"the key file .*keys/silo-3 cannot be read \(No such file or directory\)",
        ),
        (
            lambda here: (here / "keys" / "silo-2" / "identity.key").chmod(0o640),
            "keys/{silo}",
            r"keys/silo-2/identity\.key is open to others \(mode 0640\); run: chmod 600 ",
        ),
        (
            lambda here: (here / "keys" / "silo-2" / "identity.key").write_text("moretta-identity-1 cut"),
            "keys/{silo}",
            r"keys/silo-2/identity\.key: expected one line, `moretta-identity-1` and 32 bytes in base64",
        ),
        (
            lambda here: (here / "roster.toml").write_text("[[silo]"),
            "keys/{silo}",
            r"roster\.toml: expected a roster in TOML",
        ),
    ],
    ids=["lacking", "another's", "no file", "no folder", "open", "damaged", "no TOML"],
)
@pytest.mark.parametrize("protocol", ["pbpfl", "fedsgd"])
def test_identities_that_cannot_work_are_refused_before_anything_is_written(
    here: Path, protocol: str, spoil: Callable[[Path], object], identity: str, sentence: str
) -> None:
    enrol(here, ("silo-1", "silo-2", "silo-3"))
    spoil(here)
    changes = (ROSTER[0], f"secure-aggregation.identity={identity}", f"protocol.name={protocol}")
    sets = [word for change in changes for word in ("--set", change)]
    said = refused(here, "train", "run.toml", *sets, "--out", "mine")
    assert re.search(sentence, said)
    for secret in here.rglob("identity.key"):
        assert secret.read_text().split()[1] not in said


def test_from_python_a_bad_number_is_named_with_its_silo() -> None:
    x, y = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)
    bad = x.copy()
    bad[2, 1] = np.nan
    with pytest.raises(ParameterError, match="silo `south`: column '1' is NaN or infinite in 1 row as float32"):
        Federation(torch.nn.Linear(2, 1), [Silo("north", x, y), Silo("south", bad, y)], FedSGD())


def test_a_run_file_that_is_not_there(here: Path) -> None:
    assert refused(here, "train", "no.toml") == "the run file no.toml does not exist; name an existing TOML file"
    assert "not TOML" in refused(here, "train", "patients.csv")


@pytest.mark.parametrize(("device", "there"), [("cuda", 0), ("cuda:2", 2)])
def test_a_device_that_is_not_there(here: Path, device: str, there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    sentence = refused(here, "train", "run.toml", "--set", f"run.device={device}")
    assert sentence == f'device = "{device}" is not available: this PyTorch finds {there} GPUs; use "cpu"'


def test_values_beyond_the_ring_name_the_tensor_and_the_range(here: Path) -> None:
    done = call("train", "run.toml", "--out", "mine", "--set", "secure-aggregation.limit=1e-6", "--json")
    assert done.code == 2
    assert re.search(
        r"round 1: silo-1: `\w[\w.]*`: a value is outside the range of the secure sum, "
        r"\+-[\d.e+-]+; nothing was sent \(bring inputs to scale by standardise, .* a higher `limit` "
        r"widens the range and coarsens its step\); the largest "
        r"magnitude is \d",
        done.err.splitlines()[-1],  # after what it trains on
    )
    assert not (here / "mine").exists(), "nothing half-written: the mended run may take the same folder"


def test_a_run_that_diverges_fails_by_its_round_with_its_checkpoint_whole(here: Path) -> None:
    done = call("train", "run.toml", "--out", "mine", "--set", "protocol.learning-rate=1e9", "--set", "run.rounds=30")
    assert done.code == 1
    assert re.search(r"round \d+: silo-1: .*probably diverged: a lower learning rate helps", done.err)
    assert last_checkpoint(here / "mine" / "checkpoint") is not None
    assert not (here / "mine" / "result.json").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of three rounds: `fedsgd`, and `local` without a model of all."""
    home = tmp_path_factory.mktemp("finished")
    prepare(home)
    for name in ("fedsgd", "local"):
        done = call("train", home / "run.toml", "--out", home / name, "--set", f"protocol.name={name}", "--json")
        assert done.code == 0, done.err
    return home


@pytest.fixture
def mine(here: Path, finished: Path) -> Path:
    """A copy of a finished run."""
    return Path(shutil.copytree(finished / "fedsgd", here / "mine"))


FEDSGD = ("--set", "protocol.name=fedsgd", "--out", "mine")


def test_a_folder_with_a_run_is_not_touched(here: Path, mine: Path) -> None:
    sentence = refused(here, "train", "run.toml", *FEDSGD)
    assert sentence == "mine exists and is not empty; go on with that run by --resume, or name another folder by --out"
    shutil.copytree(mine, here / "both" / "pbpfl")
    assert "name another folder by --out" in refused(
        here, "compare", "run.toml", "--protocols", "fedsgd,pbpfl", "--out", "both"
    )


def test_a_run_is_not_resumed_where_it_cannot_be(here: Path, mine: Path) -> None:
    resume = ("train", "run.toml", *FEDSGD, "--resume")
    assert "mine is at round 3 already, past the 2 asked for" in refused(here, *resume, "--set", "run.rounds=2")
    for change in ("run.seed=8", "protocol.learning-rate=0.3", "data.batch-size=8", "model.hidden=[5]"):
        sentence = refused(here, *resume, "--set", change)
        assert "mine was begun with another run file" in sentence
        assert "mine/run.toml" in sentence
    assert "begun with another run file" in refused(here, "train", "run.toml", "--out", "mine", "--resume")
    for folder in ("new", "empty"):
        (here / "empty").mkdir(exist_ok=True)
        sentence = refused(here, "train", "run.toml", "--out", folder, "--resume")
        assert f"{folder} holds no checkpoint to resume from; start" in sentence


def test_a_damaged_checkpoint_is_named(here: Path, mine: Path) -> None:
    last = mine / "checkpoint" / "round-000003"
    (last / "server.safetensors").write_bytes(b"cut")
    sentence = refused(here, "train", "run.toml", *FEDSGD, "--resume")
    assert "mine/checkpoint/round-000003: the checkpoint is damaged" in sentence
    assert "delete it to go on from the one before" in sentence


@pytest.mark.parametrize(("arguments", "sentence"), lines("compare.txt"))
def test_a_comparison_that_cannot_be(here: Path, mine: Path, arguments: str, sentence: str) -> None:
    assert same(sentence, refused(here, "compare", *arguments.split(), "--out", "both"), whole=False)


@pytest.mark.parametrize("command", ["report", "compare"])
@pytest.mark.parametrize(("put", "sentence"), lines("broken_folder.txt"))
def test_a_broken_folder(here: Path, mine: Path, finished: Path, command: str, put: str, sentence: str) -> None:
    file, written, text = put.partition(" | ")
    if written:
        (mine / file).write_text(text)
    else:
        (mine / file).unlink()
    assert sentence in refused(here, command, "mine", str(finished / "fedsgd"))


@pytest.mark.parametrize("command", [("report", "mine"), ("compare", "mine", "mine")])
def test_a_page_that_cannot_be_written(here: Path, mine: Path, command: tuple[str, ...]) -> None:
    assert "patients.csv" in refused(here, *command, "--out", "patients.csv/page.html")


def predict(data: str, out: str = "outputs.csv", *more: str) -> tuple[str, ...]:
    return ("predict", "mine", "--data", data, "--out", out, *more)


def test_rows_that_cannot_be_predicted(here: Path, mine: Path) -> None:
    np.save(here / "single.npy", np.zeros((2, 5), np.float32))
    (here / "single.npy").rename(here / "single.npz")
    assert "single.npz holds a single array without a name" in refused(here, *predict("single.npz"))
    for put, sentence in lines("predict.txt"):
        name, written, content = put.partition(" | ")
        if name.endswith(".npz") and "=" in content:
            np.savez(here / name, **eval(f"dict({content})"))
        elif written:
            (here / name).write_text(content.replace("\\n", "\n"), encoding="latin-1")
        assert same(f"{name}...{sentence}", refused(here, *predict(name)), whole=False), name


def test_predictions_that_have_nowhere_to_go(here: Path, mine: Path, finished: Path) -> None:
    assert "expected a file that ends in .csv or .npy, got .txt" in refused(here, *predict("patients.csv", "out.txt"))
    assert "in an existing folder; make nowhere" in refused(here, *predict("patients.csv", "nowhere/out.csv"))
    (mine / "released.safetensors").unlink()
    assert "mine/released.safetensors: expected a model of a finished" in refused(here, *predict("patients.csv"))
    (mine / "inputs.json").unlink()
    assert "mine/inputs.json: expected a file of a finished run" in refused(here, *predict("patients.csv"))
    for more in ([], ["--true-model"]):
        lone = ("predict", str(finished / "local"), "--data", "patients.csv", "--out", "outputs.csv", *more)
        assert "expected a run with one model; here each silo has its own, name one by --silo" in refused(here, *lone)


def test_a_run_from_python_is_not_predicted_from_a_shell(here: Path) -> None:
    x, y = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)
    silos = [Silo("north", x, y), Silo("south", x, y)]
    Federation(torch.nn.Linear(2, 1), silos, FedSGD(), out=here / "mine").train(rounds=1)
    assert "name that by --model module:function" in refused(here, *predict("patients.csv"))


def test_the_helper_sees_more_than_one_line() -> None:
    with pytest.raises(AssertionError):
        _ = Called(2, "", "moretta: one\nTraceback\n").sentence
