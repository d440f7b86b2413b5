"""Labels from Delta, and not from Delta of other rows."""

import numpy as np
import pytest
from recorded import attacked, claimed, recorded

from moretta.audit.attacks.cgd import confined
from moretta.audit.attacks.cgd.joint_rows import LABELS as ATTACK
from moretta.audit.evidence.heads import classes
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


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("grid"), protocol={"name": "cgd"}, data=GRID, run={"rounds": 1})


# The counts between the two say the same, of seconds each.
@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 4)), 5])
def test_clusters_of_very_few_rows_are_right_by_luck(grid, count):
    """Right clusters of up to five rows come about in one deal of fifteen or more often."""
    labels, generator = classes(confined.JointRow.first(grid).rows.y), np.random.default_rng(count)
    rows = generator.permutation(len(labels))[:count]
    assert not ATTACK.score({"rows": rows, "cluster": generator.integers(0, 3, count)}, grid).succeeded
    two = np.concatenate([np.flatnonzero(labels == label)[: (count + label) // 2] for label in (0, 1)])
    right = ATTACK.score({"rows": two, "cluster": labels[two]}, grid)
    assert right.score == 1.0
    assert not right.succeeded
    assert right.interval[0] <= right.score <= right.interval[1]


def test_rows_that_are_nearly_all_of_one_label(grid):
    """Halves of them mostly are of one label and one cluster, which counts as right: what is found of the odd row?"""
    labels = classes(confined.JointRow.first(grid).rows.y)
    rows = np.concatenate([np.flatnonzero(labels == 0)[:23], np.flatnonzero(labels == 1)[:1]])
    assert not ATTACK.score({"rows": rows, "cluster": np.arange(24) == 23}, grid).succeeded
    same = np.flatnonzero(labels == 0)[:24]
    assert not ATTACK.score({"rows": same, "cluster": np.zeros(24, dtype=np.int64)}, grid).succeeded


def test_clusters_of_a_few_more_rows_say_something(grid):
    labels = classes(confined.JointRow.first(grid).rows.y)
    rows = np.concatenate([np.flatnonzero(labels == label)[:6] for label in (0, 1)])
    assert ATTACK.score({"rows": rows, "cluster": labels[rows]}, grid).succeeded
