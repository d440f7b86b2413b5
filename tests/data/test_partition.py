from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import distribute, split_of

from moretta.data.partition import partition
from moretta.data.tables.preparation import ColumnRules
from moretta.errors import ParameterError

LABELS = np.arange(200, dtype=np.int64) % 10


@settings(deadline=None)  # a busy machine is no failure
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=80),
    st.integers(1, 8),
    st.sampled_from(["iid", "dirichlet", "by-label", "by-domain"]),
    st.integers(0, 2**40),
    st.floats(1e-300, 1e3),
)
def test_every_row_goes_to_exactly_one_silo(labels: list[int], silos: int, how: str, seed: int, alpha: float) -> None:
    y = np.array(labels, np.int64)
    arguments: dict[str, Any] = {"alpha": alpha} if how == "dirichlet" else {"domain": y} if how == "by-domain" else {}
    if silos > len(y):
        with pytest.raises(ParameterError, match="cannot be dealt"):
            partition(y, silos, how, seed, **arguments)
        return
    try:
        parts = partition(y, silos, how, seed, **arguments)
    except ParameterError:
        assert how in ("dirichlet", "by-domain")  # the other two leave no silo empty
        return
    assert len(parts) == silos
    assert all(len(rows) and rows.dtype == np.int64 and (np.diff(rows) > 0).all() for rows in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(y)))
    again = partition(y, silos, how, seed, **arguments)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


def test_iid_is_seeded_and_near_equal() -> None:
    parts = partition(LABELS, 3, "iid", 7)
    assert [len(rows) for rows in parts] == [67, 67, 66]
    assert parts[0].tolist() != partition(LABELS, 3, "iid", 8)[0].tolist()
    # fixed, because a run file should mean the same silos on every machine and in every release
    assert parts[0][:6].tolist() == [0, 2, 4, 5, 6, 7]


def test_sizes_are_relative() -> None:
    assert [len(rows) for rows in partition(LABELS, 3, "iid", 0, sizes=[0.5, 0.3, 0.2])] == [100, 60, 40]
    assert [len(rows) for rows in partition(LABELS, 2, "by-label", 0, sizes=[3, 1])] == [150, 50]


def test_silos_may_all_have_the_same_first_rows() -> None:
    assert [rows.tolist() for rows in partition(LABELS, 5, "same-rows", 3)] == [list(range(40))] * 5
    assert [rows.tolist() for rows in partition(LABELS, 1, "same-rows", 3)] == [list(range(200))]
    arrays = {"x": np.arange(200), "y": LABELS}
    for k in (1, 5, 10):  # the authors' loader begins client i at (2 // k) i: it takes a dict's length for the rows'
        begins = [len(arrays) // k * client for client in range(k)]
        assert begins == [0] * k
        theirs = [arrays["x"][begin : begin + 200 // k].tolist() for begin in begins]
        assert [rows.tolist() for rows in partition(LABELS, k, "same-rows", 3)] == theirs
    with pytest.raises(ParameterError, match='sizes are for partition = "iid" and "by-label", not for "same-rows"'):
        partition(LABELS, 2, "same-rows", 0, sizes=[1, 2])


def test_by_label_gives_each_silo_few_classes() -> None:
    for rows in partition(LABELS, 5, "by-label", 0):
        assert len(np.unique(LABELS[rows])) == 2
    one_hot = np.eye(10, dtype=np.float32)[LABELS]
    assert partition(one_hot, 5, "by-label", 0)[0].tolist() == partition(LABELS, 5, "by-label", 0)[0].tolist()
    numbers = np.linspace(0, 1, 20, dtype=np.float32)
    assert partition(numbers, 2, "by-label", 0)[0].tolist() == list(range(10))


def test_dirichlet_is_less_alike_for_small_alpha() -> None:
    def spread(alpha: float) -> float:
        y = np.arange(4000, dtype=np.int64) % 10
        parts = partition(y, 4, "dirichlet", 3, alpha)
        return float(np.std([np.bincount(y[rows], minlength=10) for rows in parts]))

    assert spread(0.1) > 2 * spread(100.0)


def test_domains_stay_whole() -> None:
    domain = np.array(["rome", "pisa", "bari", "rome", "bari", "pisa"])
    parts = partition(LABELS[:6], 2, "by-domain", 0, domain=domain)
    assert [set(domain[rows].tolist()) for rows in parts] == [{"bari", "rome"}, {"pisa"}]


def test_more_silos_than_domains_share_each_in_equal_parts() -> None:
    domain = np.array(["rome", "pisa"])[(np.arange(200) % 5 == 0).astype(int)]  # 160 of rome, 40 of pisa
    parts = partition(LABELS, 5, "by-domain", 4, domain=domain)
    assert [len(rows) for rows in parts] == [14, 80, 13, 80, 13]
    assert [set(domain[rows].tolist()) for rows in parts] == [{"pisa"}, {"rome"}, {"pisa"}, {"rome"}, {"pisa"}]
    assert sorted(np.concatenate(parts).tolist()) == list(range(200))
    other = partition(LABELS, 5, "by-domain", 5, domain=domain)
    assert parts[1].tolist() != other[1].tolist()
    assert len(np.unique(LABELS[parts[1]])) == 8  # shuffled before it is cut: every class of rome


@pytest.mark.parametrize(("rows", "classes"), [(10_000, 10), (50_000, 10), (10_000, 100)])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_a_hundred_silos_by_dirichlet(rows: int, classes: int, alpha: float) -> None:
    y = np.arange(rows, dtype=np.int64) % classes
    for seed in range(5):
        parts = partition(y, 100, "dirichlet", seed, alpha)
        assert sum(map(len, parts)) == rows
        # The share of a class that a silo gets has variance 0.01 * 0.99 / (100 alpha + 1), and sizes are means over
        # classes; of 100 silos the sample deviation is known to about 7 %, so half is far out.
        spread = np.std([len(part) for part in parts]) / rows
        assert spread == pytest.approx(np.sqrt(0.01 * 0.99 / (classes * (100 * alpha + 1))), rel=0.5)


@pytest.mark.parametrize(
    ("silos", "how", "arguments", "message"),
    [
        (3, "idd", {}, 'partition = "idd" is unknown; did you mean "iid"'),
        (201, "iid", {}, "200 rows cannot be dealt to 201 silos; use at most 200"),
        (60, "dirichlet", {"alpha": 0.001}, r"silo-\d+.* would have no rows .*; use fewer silos, an alpha above 0.001"),
        (3, "by-domain", {}, "needs the domain of each row"),
        (3, "by-domain", {"domain": np.arange(200) > 0}, "silo-3 would have no rows .*bring more rows of a domain"),
        (3, "by-domain", {"domain": LABELS[:5]}, r"one domain per row \(200\)"),
        (3, "iid", {"sizes": [1, 1]}, "a positive size for each of 3 silos"),
        (2, "iid", {"sizes": [1, 1e-9]}, "silo-2 would have no rows .*less unequal sizes"),
        (2, "dirichlet", {"alpha": 1.0, "sizes": [1, 1]}, "sizes are for"),
    ],
)
def test_bad_partitions(silos: int, how: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        partition(LABELS, silos, how, 0, **arguments)


def test_what_needs_classes_says_so() -> None:
    with pytest.raises(ParameterError, match="needs classes, but this is a regression"):
        partition(np.linspace(0, 1, 9, dtype=np.float32), 2, "dirichlet", 0, 1.0)
    with pytest.raises(ParameterError, match="needs one target per row, got 2"):
        partition(np.ones((9, 2), np.float32), 2, "by-label", 0)
    with pytest.raises(ParameterError, match="seed of 0 or more"):
        partition(LABELS, 2, "iid", -1)


def test_distribute_leaves_absent_values_to_be_filled_in_by_training() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    x[5:20, 1] = np.nan
    y = (np.arange(60) % 2).astype(np.int64)
    dataset = split_of(
        "t", "classification", x[:50], y[:50], x[50:], y[50:], classes=2,
        feature_names=("a", "b", "c"), column_rules=ColumnRules.alike(3, fill="mean"),
    )  # fmt: skip
    dealt = distribute(dataset, 3, "iid", 1)
    assert [silo.name for silo in dealt.silos] == ["silo-1", "silo-2", "silo-3"]
    assert dealt.feature_names == ("a", "b", "c")
    assert dealt.validation is None
    for silo, rows in zip(dealt.silos, partition(y[:50], 3, "iid", 1), strict=True):
        np.testing.assert_array_equal(silo.x, x[rows])
