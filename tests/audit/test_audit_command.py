"""`moretta audit` as a shell user calls it, and `Result.audit()` from Python."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import test_cli
from recorded import recorded
from torch import nn

from moretta import PBPFL, Federation, Silo
from moretta.audit import auditor
from moretta.audit.attacks.pbpfl.head_offset import GAMMA
from moretta.audit.attacks.pbpfl.head_offset import LEMMA_SEVEN as OTHER
from moretta.errors import ParameterError
from moretta.run import auditing

NAME = "gamma-least-squares"


def call(*words: object) -> tuple[int, str, str]:
    called = test_cli.call(*words)
    return called.code, called.out, called.err


def sentence(code: int, *words: object) -> str:
    got, out, err = call(*words)
    lines = err.strip().splitlines()
    assert (got, out, len(lines)) == (code, "", 1), err
    return lines[0].removeprefix("moretta: ")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two attacks, of which one fits."""
    for room in (auditor, auditing):
        monkeypatch.setattr(room, "all_attacks", lambda: [GAMMA, OTHER])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("trained")
    recorded(home, run={"rounds": 16}, protocol={"name": "pbpfl"}, data={"source": "wdbc", "standardise": True})
    return home / "out"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_an_audit_is_told_and_written(run):
    code, out, err = call("audit", run)
    assert (code, err.strip()) == (0, "")
    for words in ("A silo", NAME, "succeeded", "0 is guessing, 1 perfect", "(lemma-7-hit-rate): not run, as",
                  "audit.json", "How good: ", "What attacks got: "):  # fmt: skip
        assert words in " ".join(out.split())
    assert "\nsafe" not in out
    written = json.loads((run / "audit.json").read_text())
    assert written["format"] == 1
    assert written["run"] == json.loads((run / "result.json").read_text())["run"]


def test_json_is_what_was_written_and_a_limit_is_exit_1_after_all(run):
    code, out, err = call("audit", run, "--json", "--fail-above", f"{NAME}=2")
    assert code == 0, err
    assert json.loads(out) == json.loads((run / "audit.json").read_text())
    (run / "audit.json").unlink()
    code, out, err = call("audit", run, "--json", "--fail-above", f"{NAME}=0.5")
    assert code == 1
    score = json.loads(out)["attacks"][0]["score"]
    assert err.strip() == f"moretta: {NAME} scores {score:.4g}, above 0.5"
    assert (run / "audit.json").exists()


def test_a_limited_attack_that_crashed_hides_no_other_ones_score(run, monkeypatch):
    def crash(claim, truth):
        raise ValueError("no")

    lost = dataclasses.replace(GAMMA, name="lost", score=crash)
    for room in (auditor, auditing):
        monkeypatch.setattr(room, "all_attacks", lambda: [lost, GAMMA])
    code, out, err = call("audit", run, "--json", "--fail-above", "lost=0.5", "--fail-above", f"{NAME}=0.5")
    score = json.loads(out)["attacks"][0]["score"]
    assert err.strip() == (
        f"moretta: lost has no score: it ended with ValueError: no; {NAME} scores {score:.4g}, above 0.5"
    )
    assert code == 1


def test_of_runs_side_by_side_one_that_cannot_be_audited_is_refused_before_any_attack(run, trained, tmp_path):
    other = Path(shutil.copytree(trained, tmp_path / "other"))
    without_views(other)
    assert "has no recorded views" in sentence(2, "compare", run, other, "--audit")
    assert not (run / "audit.json").exists()


def test_a_limit_for_an_attack_that_is_not_tried_is_refused_before_any_attack(run):
    says = sentence(2, "audit", run, "--fail-above", "lemma-7-hit-rate=0.5")
    assert "expected an attack that is tried on this run; it is not: a model of one output" in says
    assert not (run / "audit.json").exists()


@pytest.mark.parametrize(("limit", "says"), [
    ("gamma-least-square=0.5", "there is no attack gamma-least-square; did you mean gamma-least-squares?"),
    ("gamma=0.5", "there is no attack gamma; did you mean gamma-least-squares?"),
    ("nonsense=0.5", "there is no attack nonsense; the attacks are gamma-least-squares, lemma-7-hit-rate"),
    (NAME, f"--fail-above {NAME}: expected NAME=SCORE"),
    (f"{NAME}=high", "expected NAME=SCORE"),
    (f"{NAME}=nan", "expected NAME=SCORE"),
    ("=1", "expected NAME=SCORE"),
])  # fmt: skip
def test_a_limit_that_means_nothing_is_refused_before_any_attack(run, limit, says):
    assert says in sentence(2, "audit", run, "--fail-above", limit)
    assert not (run / "audit.json").exists()


def without_views(run):
    shutil.rmtree(run / "views")


def of_another_run(run):
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"run": "0" * 32}))


def of_another_version(run):
    import hashlib

    index = run / "views" / "index.jsonl"
    index.write_text(index.read_text().replace('"format": 2', '"format": 1', 1))
    result = json.loads((run / "result.json").read_text())
    views = hashlib.sha256(index.read_bytes()).hexdigest()
    (run / "result.json").write_text(json.dumps(result | {"views": views}))


def with_a_tampered_view(run):
    path = run / "views" / "silo-2" / "round-000002.0.bin"
    *most, last = path.read_bytes()
    path.write_bytes(bytes([*most, last ^ 1]))


def with_a_tampered_index(run):
    with (run / "views" / "index.jsonl").open("a") as file:
        file.write("\n")


def without_truth(run):
    shutil.rmtree(run / "truth")


def without_an_index(run):
    (run / "views" / "index.jsonl").unlink()


def of_another_seed(run):
    text = (run / "run.toml").read_text()
    assert "seed = 5" in text
    (run / "run.toml").write_text(text.replace("seed = 5", "seed = 6"))


def of_other_rows(run):
    (run / "truth" / "rows.sha256").write_text("0" * 64)


def unfinished(run):
    (run / "result.json").unlink()


def from_python(run):
    (run / "run.toml").unlink()


def gone(run):
    shutil.rmtree(run)


@pytest.mark.parametrize(("change", "says"), [
    (without_views, "has no recorded views; run it again with record-views in [run]"),
    (of_another_run, "expected the views of this run, these are of another one"),
    (of_another_version, "expected views of format 2; were they recorded by another version?"),
    (with_a_tampered_view, "round-000002.0.bin is not as it was recorded (SHA-256 differs)"),
    (with_a_tampered_index, "is not the index that this run ended with"),
    (without_truth, "lacks the states of the recorded rounds, by which attacks are scored"),
    (without_an_index, "has views and no index.jsonl, by which they are checked"),
    (of_another_seed, "the settings or the seed in run.toml have changed since the run"),
    (of_other_rows, "the silos' rows have changed since the run"),
    (unfinished, "expected a finished run; it has no result.json"),
    (from_python, "Result.audit() of what train() returned"),
    (gone, "there is no such directory"),
])  # fmt: skip
def test_a_folder_that_cannot_be_audited_is_one_sentence(run, change, says):
    change(run)
    assert says in sentence(2, "audit", run)
    assert not (run / "audit.json").exists()


@pytest.mark.parametrize(("x", "y", "says"), [
    (np.zeros((4, 7)), np.zeros(4), "background: expected rows of shape (30,), as the silos', got (7,)"),
    (np.zeros((4, 30)), np.zeros(3), "as many of x as of y, got 4 and 3"),
    (np.zeros((1, 30)), np.zeros(1), "at least two rows"),
    (np.full((4, 30), np.nan), np.zeros(4), "expected x of finite numbers"),
    (np.zeros((4, 30)).astype(str), np.zeros(4), "expected x of finite numbers"),
])  # fmt: skip
def test_background_that_does_not_fit_is_one_sentence(run, tmp_path, x, y, says):
    np.savez(tmp_path / "rows.npz", x=x, y=y)
    assert says in sentence(2, "audit", run, "--background", tmp_path / "rows.npz")


def test_background_that_cannot_be_read_is_one_sentence(run, tmp_path):
    assert "there is no file" in sentence(2, "audit", run, "--background", tmp_path / "none.npz")
    for name, data in (("empty.npz", b""), ("text.npz", b"x,y\n1,2\n"), ("cut.npz", b"PK\x03\x04junk")):
        (tmp_path / name).write_bytes(data)
        said = sentence(2, "audit", run, "--background", tmp_path / name)
        assert "is not an .npz file of plain arrays" in said
        assert "allow_pickle" not in said
    np.savez(tmp_path / "one.npz", x=np.zeros((2, 30)))
    said = sentence(2, "audit", run, "--background", tmp_path / "one.npz")
    assert "expected a .npz file with arrays x and y; " in said


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.first(x).relu())


def federation(out, **given):
    random = np.random.default_rng(0)
    x = random.normal(size=(90, 5)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    parts = [Silo(f"site-{number}", x[number::4], y[number::4]) for number in range(3)]
    return Federation(
        Custom(), parts, PBPFL(learning_rate=0.1), test=(x[3::4], y[3::4]), out=out, batch_size=8, **given
    )


def test_a_run_from_python_is_audited_from_python(tmp_path):
    result = federation(tmp_path / "out", record_views=True).train(4, 3)
    found = result.audit()
    assert NAME in [one["attack"] for one in found.attacks]
    assert next(one for one in found.attacks if one["attack"] == NAME)["succeeded"], found.record
    assert json.loads((tmp_path / "out" / "audit.json").read_text())["attacks"] == list(found.attacks)
    with pytest.raises(ParameterError, match="an attack that is tried on this run"):
        found.above({"nonsense": 0.5})
    assert "Result.audit()" in sentence(2, "audit", tmp_path / "out")


def test_a_run_from_python_without_folder_or_views_says_what_it_needs(tmp_path):
    with pytest.raises(ParameterError, match=r"train with Federation\(\.\., out=FOLDER, record_views=True\)"):
        federation(None).train(1, 3).audit()
    with pytest.raises(ParameterError, match="from Python: Federation record_views"):
        federation(tmp_path / "out").train(1, 3).audit()
