"""A run from Python and the same from a run file are tried by the same attacks, and left alone for the same reasons."""

from __future__ import annotations

from recorded import recorded

from moretta import Federation, FedSGD, Silo
from moretta.audit.auditor import all_attacks
from moretta.audit.evidence.truth import Truth


def test_from_python_and_from_a_file(tmp_path):
    filed = recorded(tmp_path, run={"rounds": 2})
    silos = [Silo(one.name, one.x, one.y) for one in filed.federation.silos]
    made = Federation(
        filed.federation.model,
        silos,
        FedSGD(learning_rate=0.1),
        test=filed.federation.test,
        out=tmp_path / "made",
        record_views=True,
    )
    made.train(2, 5)
    truth = Truth(tmp_path / "made", made, 2, 5)
    whys = [
        [attack.fits(one.run) for attack in all_attacks() if "fedsgd" in attack.protocols] for one in (filed, truth)
    ]
    assert whys[0] == whys[1]
