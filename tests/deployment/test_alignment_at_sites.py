"""Partners on machines of their own whose rows are not in one order: by [protocol] align, by a file, by their word."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from loopback import Machines
from safetensors.numpy import load

from moretta import align
from moretta.config import silo_file
from moretta.deployment import shared_settings as told
from moretta.errors import ParameterError

pytestmark = pytest.mark.usefixtures("one_process")
CGD = 'name = "cgd"\nlearning-rate = 0.3\ndelta = 0.1'
GRID = 'partition = "grid"\ngrid = [2, 2]\nbatch-size = 0'
WORD = "rows-in-order = true\n"


def machines(folder: Path, protocol: str = CGD) -> Machines:
    folder.mkdir()
    return Machines(folder, protocol, data=GRID)


def settings(many: Machines, name: str) -> Path:
    return many.folder / name / "silo.toml"


def shuffled(many: Machines) -> dict[str, np.ndarray]:
    """Put each site's rows in an order of its own, with ids by which they were in order; return the ids by site."""
    found = {}
    for number, name in enumerate(many.names):
        with np.load(many.folder / name / "rows.npz") as file:
            arrays = dict(file)
        order = np.random.default_rng(number).permutation(len(arrays["x"]))
        row = number // 2
        ids = np.array([f"{'P' if number % 2 else 'p'}-{row}-{at:03d}" for at in range(len(order))])[order]
        np.savez(many.folder / name / "rows.npz", id=ids, **{key: array[order] for key, array in arrays.items()})
        settings(many, name).write_text(settings(many, name).read_text().replace(WORD, ""))
        found[name] = ids
    return found


def models(many: Machines, out: Path) -> dict[str, dict[str, np.ndarray]]:
    many.start()
    result = many.serve(out)
    many.stop()
    assert not result.history[-1]["dropped"]
    return {name: load((many.kept(name) / "confined.safetensors").read_bytes()) for name in many.names}


@pytest.fixture(scope="module")
def in_order(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("in-order")
    return models(machines(folder / "sites"), folder / "out")


def same(found: dict[str, dict[str, np.ndarray]], expected: dict[str, dict[str, np.ndarray]]) -> bool:
    return all(
        array.tobytes() == expected[name][tensor].tobytes()
        for name, tensors in found.items()
        for tensor, array in tensors.items()
    )


def test_sites_align_in_the_set_up(tmp_path: Path, in_order: dict[str, dict[str, np.ndarray]]) -> None:
    many = machines(tmp_path / "sites", f"{CGD}\nalign = true\nalign-pad-to = 50")
    shuffled(many)
    assert same(models(many, tmp_path / "out"), in_order)
    for path in (tmp_path / "out").rglob("*"):
        assert not path.is_file() or b"p-0-0" not in path.read_bytes().lower()


def test_sites_take_the_files_of_moretta_align(tmp_path: Path, in_order: dict[str, dict[str, np.ndarray]]) -> None:
    many = machines(tmp_path / "sites")
    ids = shuffled(many)
    for pair in (many.names[:2], many.names[2:]):
        for name, found in align({one: ids[one] for one in pair}).items():
            found.save(many.folder / name / "alignment.json")
            settings(many, name).write_text(settings(many, name).read_text() + 'alignment = "alignment.json"\n')
    assert same(models(many, tmp_path / "out"), in_order)


def test_a_site_says_nothing_of_its_order_and_plays_no_part(tmp_path: Path) -> None:
    many = machines(tmp_path / "sites")
    name = many.names[1]
    settings(many, name).write_text(settings(many, name).read_text().replace(WORD, ""))
    federation = told.site_side(many.run_file, silo_file.load(settings(many, name)))
    with pytest.raises(
        ParameterError, match=f"silo `{name}` holds columns of row `row-1`, but nothing confirms the order of its rows"
    ):
        federation.rehearse(1)


def test_rows_that_are_not_those_of_the_file_are_refused(tmp_path: Path) -> None:
    many = machines(tmp_path / "sites")
    ids, name = shuffled(many), many.names[0]
    align({one: ids[one] for one in many.names[:2]})[many.names[1]].save(many.folder / name / "alignment.json")
    path = settings(many, name)
    path.write_text(path.read_text() + 'alignment = "alignment.json"\n')
    with pytest.raises(ParameterError, match=f"silo `{name}`: the ids have changed since the alignment"):
        told.silos_at(many.run_file, silo_file.load(path))
    path.write_text(path.read_text() + WORD)
    with pytest.raises(ParameterError, match="exclude each other"):
        silo_file.load(path)
