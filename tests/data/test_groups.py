"""Sources whose rows have groups: repeat visits load and train, and a patient of test rows is not trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splits import load

from moretta.config import run_files
from moretta.data.rows import Split
from moretta.errors import ParameterError
from moretta.run.assembly import federation_of

X = np.random.default_rng(0).normal(size=(90, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
VISITS = np.array([f"patient {row // 3}" for row in range(90)])
RUN = """[run]
name = "visits"
rounds = 2
[data]
source = "visits.npz"
silos = 3
{data}
[model]
source = "mlp"
hidden = [4]
[protocol]
name = "{protocol}"
learning-rate = 0.1
"""


def of_rows(dataset: Split, rows: np.ndarray) -> set[str]:
    """The patients of some samples of a data set made of `X`."""
    return {str(VISITS[np.flatnonzero((row == X).all(axis=1))[0]]) for row in rows}


def test_a_patient_is_in_one_part_and_the_silos_know_whose_rows_are_whose(tmp_path: Path) -> None:
    np.savez(tmp_path / "visits.npz", x=X, y=Y, group=VISITS, id=np.arange(90))
    dataset = load("visits.npz", base=tmp_path, validation_fraction=0.2)
    train, test, validation = (of_rows(dataset, rows.x) for rows in dataset.parts().values())
    assert not train & test
    assert not (train | test) & validation
    assert dataset.train.groups is not None
    assert dataset.train.groups.tolist() == [VISITS[int(row)] for row in np.asarray(dataset.train.ids)]
    np.savez(tmp_path / "t.npz", x_train=X, y_train=Y, x_test=X[:2] + 1, y_test=Y[:2], group_train=VISITS)
    given = load("t.npz", base=tmp_path, validation_fraction=0.2)
    assert given.train.groups is not None
    assert not set(given.train.groups) & of_rows(given, given.validation.x)


def test_a_patient_is_one_however_the_accents_of_the_name_are_written(tmp_path: Path) -> None:
    names = np.array([f"Zo\u00eb {row // 2 % 20}" if row % 2 else f"Zoe\u0308 {row // 2 % 20}" for row in range(90)])
    np.savez(tmp_path / "visits.npz", x=X, y=Y, group=names)
    dataset = load("visits.npz", base=tmp_path, validation_fraction=0.2)
    parts = [{str(name) for name in rows.groups} for rows in dataset.parts().values() if rows.groups is not None]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 20
    np.savez(
        tmp_path / "t.npz", x_train=X, y_train=Y, x_test=X[:1] + 1, y_test=Y[:1], id_train=np.arange(90).astype(str)
    )
    with np.load(tmp_path / "t.npz") as arrays:
        held = dict(arrays) | {
            "id_train": np.array(["Zo\u00eb", *map(str, range(89))]),
            "id_test": np.array(["Zoe\u0308"]),
        }
    np.savez(tmp_path / "t.npz", **held)
    with pytest.raises(ParameterError, match="id: 1 of 1 test rows share one with training rows"):
        load("t.npz", base=tmp_path)


@pytest.mark.parametrize(
    ("protocol", "data"),
    [
        ("pbpfl", ""),
        ("cgd", 'partition = "grid"\ngrid = [3, 2]\n'),
        ("fedsgd", 'partition = "dirichlet"\nalpha = 5.0'),
    ],
)
def test_repeat_visits_train(protocol: str, data: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "visits.npz", x=X, y=Y, group=np.arange(90) // 3, id=np.arange(90))
    text = RUN.format(protocol=protocol, data=data)
    (tmp_path / "run.toml").write_text(text.replace("silos = 3", "silos = 6") if "grid" in data else text)
    made = federation_of(run_files.load(tmp_path / "run.toml"), None)
    result = made.train(2, 1)
    assert not result.history[-1]["dropped"]
    assert (result.test["rows"], result.test["units"]) == (18, 6)  # intervals are over patients
    at = [(silo.row or silo.name, set(np.asarray(silo.groups).tolist())) for silo in made.silos]
    whose = dict(at)
    assert all(whose[place] == patients for place, patients in at)  # partners of a grid have the same
    assert sum(map(len, whose.values())) == len(set().union(*whose.values()))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"group_test": VISITS[:12:2]}, "t.npz: group: 6 of 6 test rows share one with training rows"),
        (
            {"id_train": np.arange(90), "id_test": np.arange(85, 91)},
            "id: 5 of 6 test rows share one with training rows",
        ),
        ({"group_test": VISITS[:5]}, r"group_test: expected one per test row \(6\)"),
        ({"group_train": VISITS[:5]}, r"t.npz: expected one group per row \(90\)"),
        ({"id_train": np.zeros(90, int)}, "90 rows have 1 different ids; .*where one person or thing has several rows"),
    ],
)
def test_test_rows_of_a_training_patient_are_refused(
    arrays: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    whole: dict[str, Any] = {
        "x_train": X,
        "y_train": Y,
        "x_test": X[:6] + 1,
        "y_test": Y[:6],
        "group_train": VISITS,
    } | arrays
    np.savez(tmp_path / "t.npz", **whole)
    with pytest.raises(ParameterError, match=message) as caught:
        load("t.npz", base=tmp_path)
    assert "patient" not in str(caught.value).replace("a patient", "")


def test_whole_numbers_and_words_may_be_objects_and_texts_of_numpys_own_kind() -> None:
    from moretta import Silo

    x, y = np.zeros((2, 1)), np.array([0, 1])
    texts = np.array(["Rossi", "Bianchi"], dtype=np.dtypes.StringDType())
    given: Any
    for given in (np.array([7, np.int64(12)], dtype=object), texts, [7, "Bianchi"]):
        found = Silo("north", x, y, groups=given).groups
        assert found is not None
        assert found.tolist() == list(map(str, given))
    for given in ([7.0, 12.0], [True, False], np.array([7, None], dtype=object)):
        with pytest.raises(ParameterError, match="groups: expected 2 words or whole numbers, one a row; got 2 values"):
            Silo("north", x, y, groups=given)


def test_a_silo_shows_no_row_and_no_id_of_its_own() -> None:
    from moretta import Silo

    names = np.array(["Rossi-1", "Rossi-2"])
    shown = repr(Silo("north", np.full((2, 1), 7.25), np.array([3, 4]), ids=names, groups=names))
    assert not any(cell in shown for cell in ("Rossi", "7.25", "array"))
