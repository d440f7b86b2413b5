"""What BAFFLE's sums open to, on recorded runs with a silo that is lost."""

import numpy as np
import pytest
from recorded import recorded

from moretta.audit.attacks.baffle.estimates import OPENED, forward_at, opened, seeded_rounds
from moretta.audit.evidence import uploads


@pytest.mark.parametrize("phase", ["upload", "unmasking"])
def test_a_lost_silo_is_not_in_what_was_opened(tmp_path, phase):
    # Where one is missing, survivors are asked once more, and who is gone by then is not in the sum.
    drops = [{"round": 1, "silo": "silo-1"}, {"round": 1, "silo": "silo-2", "phase": phase}]
    truth = recorded(
        tmp_path,
        run={"rounds": 2},
        data={"silos": 7},
        protocol={"name": "baffle", "k": 8},
        engine={"faults": {"drop": drops}},
    )
    heard = [one for number in truth.recorded for one in truth.heard("server", number)]
    seen = seeded_rounds(truth.run, heard, forward_at(truth))
    assert seen[1].silos == truth.run.silos[2:]
    assert seen[2].silos == truth.run.silos
    found = opened(truth, (1, 2))
    for number in (1, 2):
        # What the server's recorded messages come to, up to the ring's steps and float32's rounding.
        sums = uploads.from_heard(truth.run, heard, number).total().means["scalars"]
        np.testing.assert_allclose(found[f"{OPENED}{number}"], sums[:8], rtol=1e-4, atol=1e-5)


def test_the_scalars_of_additive_shares_are_all_there(tmp_path):
    truth = recorded(
        tmp_path,
        run={"rounds": 2},
        protocol={"name": "baffle", "k": 8},
        secure_aggregation={"scheme": "additive-shares"},
    )
    heard = [one for number in truth.recorded for one in truth.heard("server", number)]
    found = opened(truth, (1, 2))
    for number in (1, 2):
        sums = uploads.from_heard(truth.run, heard, number).total().means["scalars"]
        np.testing.assert_allclose(found[f"{OPENED}{number}"], sums[:8], rtol=1e-4, atol=1e-5)
