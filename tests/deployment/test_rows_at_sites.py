"""Over many machines: no patient of the server's test rows is trained on, and no patient's visits are split."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopback import COLUMNS, Machines

from moretta.config import silo_file
from moretta.deployment import shared_settings as told
from moretta.engines.flare.site_worker import UNFIT
from moretta.errors import ParameterError, RowsError, RunFailed

pytestmark = pytest.mark.usefixtures("one_process")
PROTOCOLS = {
    "fedsgd": 'name = "fedsgd"\nlearning-rate = 0.1',
    "pbpfl": 'name = "pbpfl"\nlearning-rate = 0.1',
    "cgd": 'name = "cgd"\nlearning-rate = 0.3\ndelta = 0.1',
    "baffle": 'name = "baffle"\nk = 4',
}
GRID = 'partition = "grid"\ngrid = [1, 2]\nbatch-size = 8'


def give(path: Path, **more: Any) -> None:
    """Add arrays to an .npz file."""
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **arrays | more)


def rows_of(path: Path) -> int:
    with np.load(path) as file:
        return len(file["x"])


def machines(folder: Path, protocol: str, tested: str, **settings: Any) -> Machines:
    """Three sites with visits of their patients, and the server's test rows of `tested`-1, `tested`-2, ..."""
    many = Machines(folder, PROTOCOLS[protocol], rounds=1, **settings)
    give(folder / "test.npz", group=[f"{tested}-{row}" for row in range(rows_of(folder / "test.npz"))])
    for name in many.names:
        path = folder / name / "rows.npz"
        owner = "row" if settings.get("data") == GRID else name
        count = rows_of(path)
        give(path, group=[f"{owner}-{row // 2}" for row in range(count)], id=[f"{owner}/{row}" for row in range(count)])
    many.start()
    return many


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_site_that_trains_on_a_test_patient_is_refused(
    protocol: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many = machines(tmp_path, protocol, "silo-2")
    with caplog.at_level(logging.INFO, "moretta"), pytest.raises((ParameterError, RunFailed)) as caught:
        many.serve(tmp_path / "out")
    many.stop()
    # How many they are is in the site's own log, which here is of the same process.
    heard = [record.getMessage() for record in caplog.records if record.module != "overlap"]
    said = " ".join([str(caught.value), *heard])
    assert "some of its training rows are about groups that the server's test rows ([data] test) are about too" in said
    assert " training rows have groups that" not in said
    assert "silo-2-" not in said


def test_partners_with_the_labels_in_one_row_are_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    many = machines(tmp_path, "cgd", "row", data=GRID)
    with pytest.raises((ParameterError, RunFailed), match=UNFIT):
        many.serve(tmp_path / "out")
    many.stop()
    assert "training rows are about groups that the server's test rows" in caplog.text


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_other_patients_train(protocol: str, tmp_path: Path) -> None:
    many = machines(tmp_path, protocol, "nobody", extra='[secure-aggregation]\nscheme = "none"' * (protocol == "pbpfl"))
    result = many.serve(tmp_path / "out")
    many.stop()
    assert not result.history[-1]["dropped"]
    assert not any("nobody" in path.read_text(errors="replace") for path in (tmp_path / "out").glob("*.json"))
    assert json.loads((tmp_path / "out" / "result.json").read_text())


@pytest.mark.parametrize("protocol", ["pbpfl", "baffle"])
def test_rows_and_classes_of_all_sites_are_counted_where_the_run_says_so(protocol: str, tmp_path: Path) -> None:
    many = Machines(tmp_path, PROTOCOLS[protocol], rounds=1, data="silos = 3\nbatch-size = 8\nlook = true")
    many.start()
    many.serve(tmp_path / "out")
    many.stop()
    told = json.loads((tmp_path / "out" / "result.json").read_text())["data"]
    labels = [np.load(tmp_path / name / "rows.npz")["y"] for name in many.names]
    assert told["rows"] == {"training": sum(map(len, labels))}
    assert [cell["rows"] for cell in told["target"]["cells"]] == np.bincount(np.concatenate(labels)).tolist()
    assert "rows to train on at all silos together, by class" in (tmp_path / "out" / "log.txt").read_text()


@pytest.mark.parametrize("key", ["group", "id"])
def test_a_site_may_have_test_rows_of_its_own(key: str, tmp_path: Path) -> None:
    many = Machines(tmp_path)
    rows, held = tmp_path / "silo-1" / "rows.npz", tmp_path / "silo-1" / "held.npz"
    held.write_bytes(rows.read_bytes())
    give(rows, **{key: [f"patient {row}" for row in range(rows_of(rows))]})
    settings = tmp_path / "silo-1" / "silo.toml"
    settings.write_text(settings.read_text() + 'test = "held.npz"\n')
    give(held, **{key: [f"other {row}" for row in range(rows_of(rows))]})
    (mine,) = (silo for silo in told.silos_at(many.run_file, silo_file.load(settings))[0] if not silo.remote)
    assert mine.held_out is not None
    assert len(mine.x) == rows_of(rows) == len(mine.held_out[0]) == len(mine.held_out[1])
    give(held, **{key: [f"patient {row - 3}" for row in range(rows_of(rows))]})
    with pytest.raises(RowsError, match=f"test: {key}: {rows_of(rows) - 3} of {rows_of(rows)} test rows"):
        told.silos_at(many.run_file, silo_file.load(settings))
    settings.write_text(settings.read_text() + "test-fraction = 0.3\n")
    with pytest.raises(ParameterError, match="test and test-fraction exclude each other"):
        silo_file.load(settings)


@pytest.mark.parametrize("key", ["group", "id"])
def test_a_site_holds_back_whole_patients(key: str, tmp_path: Path) -> None:
    many = Machines(tmp_path)
    path = tmp_path / "silo-1" / "rows.npz"
    patients = [f"patient {row // 3}" for row in range(rows_of(path))]
    give(path, **{key: patients})
    settings = tmp_path / "silo-1" / "silo.toml"
    settings.write_text(settings.read_text() + "test-fraction = 0.3\n")
    silos, _ = told.silos_at(many.run_file, silo_file.load(settings))
    (mine,) = (silo for silo in silos if not silo.remote)
    kept = mine.groups if key == "group" else mine.ids
    assert kept is not None and mine.held_out is not None  # noqa: PT018
    assert mine.x.shape == (len(kept), COLUMNS)
    assert len(kept) + len(mine.held_out[0]) == len(patients)
    assert all(patients.count(one) == kept.tolist().count(one) for one in kept)
    assert abs(len(mine.held_out[0]) - 0.3 * len(patients)) <= 3
