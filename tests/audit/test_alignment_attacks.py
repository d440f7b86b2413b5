"""Lists of ids under a secret tell their relay nothing, unkeyed ones all; a partner learns who is shared."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
from recorded import attacked, recorded
from torch import nn

from moretta import CGD, Federation, Silo
from moretta.audit.attacks.cgd import alignment
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.truth import Truth
from moretta.data.alignment.curve import encode

ROWS = 80


def silos() -> list[Silo]:
    """Two pairs of partners: of each row 60 of 80 patients are shared, in other orders."""
    found = []
    for row in range(2):
        generator = np.random.default_rng(row)
        x, y = generator.normal(size=(2 * ROWS, 4)).astype("f4"), generator.integers(0, 2, 2 * ROWS)
        for part, columns in enumerate([(0, 1), (2, 3)]):
            people = generator.permutation(np.arange(ROWS) + (20 * part))
            ids = np.array([f"patient-{row}-{one:04d}" for one in people])
            labels = y[people] if part == 0 else y[:0]
            found.append(Silo(f"silo-{row}-{part}", x[people][:, columns], labels, f"row-{row}", columns, ids))
    return found


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    out: Path = tmp_path_factory.mktemp("aligned") / "run"
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x, y = np.zeros((8, 4), "f4"), np.zeros(8, np.int64)
    made = Federation(model, silos(), CGD(align=True), test=(x, y), out=out, batch_size=0, record_views=True)
    made.train(2, 1)
    return Truth(out, made, 2, 1)


def test_a_dictionary_finds_nothing_in_lists_under_a_secret(truth: Truth) -> None:
    found = attacked(alignment.DICTIONARY, truth)
    # The area's deviation is 0.046 where nothing is told apart, and each run draws secrets of its own: five of them.
    assert abs(found.score - 0.5) < 0.23
    assert found.figures["closest_bits"] < 200


@pytest.mark.parametrize(
    "mark",
    [
        lambda ids: b"".join(hashlib.sha256(one.encode()).digest() for one in ids),
        lambda ids: b"".join(hashlib.sha512(one.encode() + bytes(5)).digest()[:32] for one in ids),
        lambda ids: encode([one.encode() + bytes(5) for one in ids]).tobytes(),
    ],
    ids=["hashes", "numbered hashes", "points without a secret"],
)
def test_the_same_attack_finds_every_id_in_lists_without_one(truth: Truth, mark) -> None:
    given = alignment.DICTIONARY.given(truth)
    own = [str(one) for one in np.asarray(truth.federation.silos[0].ids)]
    unkeyed = np.frombuffer(mark(own), np.uint8).reshape(-1, 32)
    arrays = {**given.arrays, "points": np.random.default_rng(0).permutation(unkeyed)}
    case = Case.unpack(truth.case(given.views, arrays, thorough=False).pack())
    found = alignment.DICTIONARY.score(alignment.DICTIONARY.attack(case), truth)
    assert found.succeeded
    assert found.score == pytest.approx(1.0, abs=1e-12)  # a sum of many parts, rounded
    assert found.figures["closest_bits"] == 256


def test_the_relay_has_seen_lists_and_no_point_of_them(truth: Truth) -> None:
    """Its attack is on something: two lists of each of four partners, sealed."""
    given = alignment.DICTIONARY.given(truth)
    case = Case.unpack(truth.case(given.views, given.arrays, thorough=False).pack())
    kinds = (alignment.Blinded, alignment.BlindedAgain)
    heard = [one.message for kind in kinds for one in case.heard("server", kind, "received")]
    seen = [one.points for one in heard if isinstance(one, kinds)]
    assert len(seen) == 8
    assert {len(one) for one in seen} == {ROWS * 32 + 28}


def test_a_partner_knows_which_of_its_rows_are_shared(truth: Truth) -> None:
    found = attacked(alignment.MEMBERSHIP, truth)
    assert found.succeeded
    assert found.score == 1.0
    assert found.figures == {"rows": 80.0, "shared": 60.0}
    assert found.chance == 0.75


def test_runs_that_did_not_align_do_not_fit(tmp_path: Path) -> None:
    grid = {"silos": 4, "partition": "grid", "grid": [2, 2], "batch-size": 0}
    plain = recorded(tmp_path, protocol={"name": "cgd"}, data=grid, run={"rounds": 1})
    for one in (alignment.DICTIONARY, alignment.MEMBERSHIP):
        assert "did not align" in one.fits(plain.run)
        assert "round 1" in one.fits(
            dataclasses.replace(plain.run, recorded=(2,), settings={"protocol": {"align": True}})
        )
