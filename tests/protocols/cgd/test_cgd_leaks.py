"""The attacks of `experiments/cgd/leaks.py` succeed where they must, and their controls fail where those must."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moretta.config import run_files

SCRIPT = Path(__file__).parents[3] / "experiments" / "cgd" / "leaks.py"


@pytest.fixture(scope="module")
def leaks() -> Iterator[ModuleType]:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("cgd_leaks", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def scores(leaks: ModuleType, name: str) -> list[Any]:
    """What a measurement's small form comes to."""
    return leaks.MEASUREMENTS[name](None, True)  # type: ignore[no-any-return]


def test_d_alone_is_better_than_most_confined_models(leaks: ModuleType) -> None:
    (score,) = scores(leaks, "d-alone")
    assert score.value > score.beside["mean of confined models"]
    assert score.beside["share of them that D beats"] > 0.5


def test_one_leaked_iterate_gives_the_whole_path(leaks: ModuleType) -> None:
    (score,) = scores(leaks, "leaked-iterate")
    assert score.value < 1e-6  # float32
    assert score.beside["one's own models instead"] > 0.5


def test_of_two_each_learns_the_others_part_and_of_three_not(leaks: ModuleType) -> None:
    two, three, row_of_two, row_of_three = scores(leaks, "two-parties")
    assert max(two.value, row_of_two.value) < 1e-9
    assert min(three.value, row_of_three.value) > 0.5


def test_a_head_and_who_knows_d1_recover_raw_features(leaks: ModuleType) -> None:
    found = {score.case.partition("H1 16, ")[2]: score for score in scores(leaks, "raw-features")}
    assert found["float64, 2 iterations"].value > 0.1  # 16 equations for 32 unknowns
    assert found["float64, 3 iterations"].value < 1e-4  # ceil(32 / 16) + 1
    assert found["float32, 5 iterations"].value < 0.1
    assert all(score.beside["other starts' D1"] > 1 for score in found.values())


def test_the_head_of_a_single_row_learns_all_inner_products_alone(leaks: ModuleType) -> None:
    one_partner, two_partners, two_rows = scores(leaks, "one-row")
    assert one_partner.value < 1e-4
    assert two_partners.value < 1e-3  # of their sum
    assert two_rows.value > 0.4


def test_delta_sorts_rows_by_label_at_once(leaks: ModuleType) -> None:
    for score in scores(leaks, "labels"):
        assert score.value > 0.9 > score.beside["from its own columns"]
        assert abs(score.beside["in a wrong order"]) < 0.05


def test_sums_of_linear_regression_give_the_second_moments(leaks: ModuleType) -> None:
    eight, thirty = scores(leaks, "linear-regression")
    assert eight.value < 0.1 < eight.beside["from one's own rows"]
    assert thirty.value < 1e-5
    assert thirty.beside["from sums in a wrong order"] > 1


def test_distance_stays_and_epsilon_grows_where_regret_does_not(leaks: ModuleType) -> None:
    distance, narrow, ten, fifty = scores(leaks, "theorem-1")
    assert distance.value < 1e-12 * distance.beside["distance"]
    assert narrow.value < ten.value / 10
    assert fifty.beside["epsilon"] > 4 * ten.beside["epsilon"]
    assert fifty.value < 2 * ten.value
    assert narrow.beside["left of (19)"] > narrow.beside["right of (19)"]  # so that step of the proof does not hold


def test_the_script_prints_and_keeps_json(
    leaks: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MORETTA_DATA", raising=False)
    arguments = ["--only", "leaked-iterate", "--quick"]
    assert leaks.main([*arguments, "--json", "--out", str(tmp_path / "leaks.json")]) == 0
    said = capsys.readouterr()
    printed = json.loads(said.out)
    assert printed == json.loads((tmp_path / "leaks.json").read_text())
    assert set(printed["leaked-iterate"]) == {"attacker", "scores", "seconds"}
    assert "leaked-iterate (1 of 1)" in said.err


def test_a_folder_without_mnist_is_one_sentence(
    leaks: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leaks.main(["--only", "d-alone", "--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_the_run_files_on_the_page_load(tmp_path: Path) -> None:
    page = (SCRIPT.parents[2] / "docs" / "cgd-settings.md").read_text()
    blocks = [
        block for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", page, flags=re.MULTILINE) if "[run]" in block
    ]
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        file = tmp_path / f"{number}.toml"
        file.write_text(re.sub(r"^    ", "", block, flags=re.MULTILINE))
        assert run_files.load(file).protocol.name == "cgd"
