"""Labels from Delta, and not from Delta of other rows."""

import numpy as np
import pytest
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.labels_from_delta import ATTACK
from moretta.errors import ParameterError

GRID = {"silos": 4, "partition": "grid", "grid": [2, 2], "batch-size": 0}


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_delta_sorts_rows_by_label(tmp_path, loss):
    protocol = {"name": "cgd", "delta": 0.1, "loss": loss}
    truth = recorded(tmp_path, protocol=protocol, data=GRID, run={"rounds": 2}, model={"hidden": [32]})
    found = attacked(ATTACK, truth)
    assert found.succeeded
    assert found.score > 0.5
    rows = claimed(ATTACK, truth)["rows"]
    blind = {"rows": np.sort(rows), "cluster": np.arange(len(rows)) % 10}  # rows come in no order of labels
    assert not ATTACK.score(blind, truth).succeeded


def test_one_output_and_batches(tmp_path):
    data = {**GRID, "source": "wdbc", "batch-size": 64}
    truth = recorded(tmp_path, protocol={"name": "cgd", "loss": "mse"}, data=data, run={"rounds": 4})
    assert attacked(ATTACK, truth).succeeded


def test_without_split_columns_there_is_no_delta(tmp_path):
    truth = recorded(tmp_path, protocol={"name": "cgd"}, run={"rounds": 1})
    with pytest.raises(ParameterError, match="no columns are split"):
        ATTACK.given(truth)
