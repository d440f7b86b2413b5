"""The run files with the settings of the authors' released code: they load without data, and say what the code says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from reproduction import choose, find

pytest.importorskip("torch", reason="models need torch")

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.models import catalogue
from moretta.protocols.common import modules

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
FILES = sorted(path.relative_to(EXPERIMENTS).as_posix() for path in EXPERIMENTS.glob("*/authors-*.toml"))
NAMES = sorted(name for name in find(EXPERIMENTS) if name.endswith("-authors"))
# the shape of a sample and the outputs that a source has, and the numbers that the facts of the code come to
SHAPES = {
    "authors-bank.toml": ((48,), 1, 7_450),
    "authors-abd.toml": ((3, 64, 64), 1, 270_320),
    "authors-ldc.toml": ((3, 64, 64), 7, 270_704),
    "authors-lenet.toml": ((1, 32, 32), 10, 26_730),
    "authors-lenet-backprop.toml": ((1, 32, 32), 10, 26_730),
    "authors-wrn.toml": ((1, 32, 32), 10, 302_506),
    "authors-wrn-backprop.toml": ((1, 32, 32), 10, 302_506),
    "authors-mnist.toml": ((784,), 10, 256 * 785 + 2560),
    "authors-cifar10.toml": ((64,), 10, 1024 * 65 + 10_240),
}
CELLS = {
    ("baffle-table-1-cifar10-authors", "lenet"): ((3, 32, 32), 10, 27_530),
    ("baffle-table-1-cifar100-authors", "lenet"): ((3, 32, 32), 100, 117_860),
    ("baffle-table-1-wrn-cifar10-authors", "wrn"): ((3, 32, 32), 10, 302_794),
    ("baffle-table-1-wrn-cifar100-authors", "wrn"): ((3, 32, 32), 100, 314_404),
}


def size(run_file: RunFile, inputs: tuple[int, ...], outputs: int) -> int:
    model = catalogue.build(run_file.model.source, inputs=inputs, outputs=outputs, **run_file.model.arguments)  # type: ignore[arg-type]
    return modules.size(model)


@pytest.mark.parametrize("name", FILES)
def test_a_run_file_loads_and_its_network_is_as_large_as_theirs(name: str) -> None:
    run_file = run_files.load(EXPERIMENTS / name)
    inputs, outputs, numbers = SHAPES[Path(name).name]
    assert size(run_file, inputs, outputs) == numbers
    head = (EXPERIMENTS / name).read_text(encoding="utf-8").split("[run]")[0]
    assert "released code" in head  # each file says whose settings it has


@pytest.mark.parametrize(("name", "source"), CELLS)
def test_networks_of_other_data_are_as_large_as_theirs(name: str, source: str, tmp_path: Path) -> None:
    for folder in ("cifar10", "cifar100_subset"):
        (tmp_path / folder).mkdir()
    chosen = choose(name, EXPERIMENTS, tmp_path)
    inputs, outputs, numbers = CELLS[name, source]
    for cell in chosen.cells():
        run_file = chosen.run_file(cell)
        assert run_file.model.source == source
        assert size(run_file, inputs, outputs) == numbers


def test_networks_of_mlp_n_have_the_codes_sizes(tmp_path: Path) -> None:
    (tmp_path / "bank_marketing").mkdir()
    (tmp_path / "bank_marketing" / "bank-full.csv.gz").touch()
    chosen = choose("pbpfl-table-1-authors", EXPERIMENTS, tmp_path)
    found = {cell.levels[1]: size(chosen.run_file(cell), (48,), 1) for cell in chosen.cells()}
    assert found == {"MLP-3": 7_450, "MLP-5": 12_450, "MLP-7": 17_450}


@pytest.mark.parametrize(
    ("name", "rows", "test"),
    [
        ("pbpfl-table-1-authors", 45_211, 0.2),  # a tenth for tests, a tenth for validation
        ("pbpfl-table-2-authors", 5_984, 0.2),
        ("baffle-table-1-mnist-authors", 60_000, 1 / 12),
        ("baffle-table-1-cifar10-authors", 50_000, 0.1),
        ("baffle-table-1-cifar100-authors", 10_000, 0.1),
        ("baffle-table-2-authors", 50_000, 0.1),
    ],
)
def test_an_epochs_rounds_are_those_of_its_rows(name: str, rows: int, test: float, tmp_path: Path) -> None:
    for folder in ("bank_marketing", "ham10000_subset", "cifar10", "cifar100_subset", "mnist"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bank_marketing" / "bank-full.csv.gz").touch()
    chosen = choose(name, EXPERIMENTS, tmp_path)
    for cell in chosen.cells():
        run_file = chosen.run_file(cell)
        own = rows * (1 - test) / run_file.data.silos
        per_epoch = 1 if run_file.protocol.steps_at_silos else math.ceil(own / run_file.data.batch_size)
        assert run_file.protocol.epoch_rounds == per_epoch


def test_every_table_with_their_settings_has_one_with_ours() -> None:
    """But for the data set that is not at hand, and the one that stands for two of CGD's tables."""
    others = set(find(EXPERIMENTS))
    alone = [name for name in NAMES if name.removesuffix("-authors") not in others]
    assert alone == ["cgd-authors", "pbpfl-table-1-abd-authors"]
