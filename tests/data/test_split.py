"""Splits and partitions: every row once, no group on two sides, classes in proportion, the same by the same seed."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import distribute, split_of

from moretta.data.partition import partition
from moretta.data.split import split, split_rows, units_of
from moretta.errors import ParameterError

ROWS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=4, max_size=60
)  # of each its group and class
SEEDS = st.integers(0, 99)


def together(parts: list[np.ndarray] | tuple[np.ndarray, ...], groups: np.ndarray) -> bool:
    """Whether the parts have every row once, and no group in two."""
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(groups)))
    return sum(len(np.unique(groups[part])) for part in parts) == len(np.unique(groups))


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.integers(0, 3), min_size=4, max_size=60), st.floats(0.05, 0.5), st.floats(0, 0.4), SEEDS)
def test_a_split_is_stratified_and_complete(labels: list[int], test: float, validation: float, seed: int) -> None:
    y = np.array(labels, np.int64)
    sizes = [round(test * len(y)), round(validation * len(y))]
    try:
        parts = split(y, (test, validation), seed, "set")
    except ParameterError:
        assert 0 in sizes or sum(sizes) == len(y)
        return
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(y)))
    assert [len(parts[0]), len(parts[1])] == sizes
    counts = np.bincount(y)[np.unique(y)]
    small = int((counts * min(test, 1 - test - validation) < 2).sum())  # these may be given a row, or keep their last
    for label in np.unique(y):
        assert abs((y[parts[0]] == label).sum() - len(parts[0]) * (y == label).mean()) < 1 + small + 1e-6


def test_without_rare_classes_shares_are_within_a_row() -> None:
    y = np.repeat(np.arange(4), (40, 25, 17, 10))
    for seed in range(20):
        test, validation, _ = split(y, (0.2, 0.15), seed, "set")
        assert (len(test), len(validation)) == (18, 14)
        for part, fraction in ((test, 0.2), (validation, 0.15)):
            assert (np.abs(np.bincount(y[part]) - np.bincount(y) * fraction) < 1).all()


@settings(deadline=None)
@given(ROWS, st.floats(0.1, 0.5), st.floats(0, 0.4), SEEDS)
def test_no_group_is_in_two_parts(rows: list[tuple[int, int]], test: float, validation: float, seed: int) -> None:
    groups, y = np.array(rows, np.int64).T
    try:
        parts = split(y, (test, validation), seed, "set", groups)
    except ParameterError:
        wanted = [round(fraction * len(y)) for fraction in (test, validation)]
        most = np.bincount(units_of(len(y), groups, "set").labels(y)).max()
        largest = int(np.unique(groups, return_counts=True)[1].max())
        # No class has a group for each part, or test and validation rows would leave none to train on.
        assert 0 in wanted or most < 3 or sum(wanted) + largest > len(y)
        return
    assert together(parts, groups)
    assert len(parts[2])
    renamed = split(y, (test, validation), seed, "set", np.array([f"patient {group}" for group in groups]))
    assert all((a == b).all() for a, b in zip(parts, renamed, strict=True))  # by pattern, not by name


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 1)), min_size=30, max_size=60), SEEDS)
def test_sizes_and_shares_are_within_a_group(patients: list[tuple[int, int]], seed: int) -> None:
    visits, labels = np.array(patients).T
    labels[:8] = 0, 1, 0, 1, 0, 1, 0, 1  # neither class is rare
    groups, y = np.repeat(np.arange(len(visits)), visits), np.repeat(labels, visits)
    test, validation, train = split(y, (0.3, 0.2), seed, "set", groups)
    assert together((test, validation, train), groups)
    assert abs(len(test) - 0.3 * len(y)) <= 5
    assert abs(len(validation) - 0.2 * len(y)) <= 5
    for label in (0, 1):  # the commoner class also makes up for what the other one misses
        assert abs((y[test] == label).sum() - 0.3 * (y == label).sum()) <= 5 + 1


def test_unique_groups_split_like_rows() -> None:
    y = np.arange(60) % 3
    for a, b in zip(split(y, (0.2, 0.1), 5, "s"), split(y, (0.2, 0.1), 5, "s", np.arange(60)[::-1]), strict=True):
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_a_rare_class_is_in_every_part_that_can_have_it(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    y = np.repeat(np.arange(4), (200, 3, 2, 1))
    with caplog.at_level(logging.WARNING, "moretta"):
        test, validation, train = split(y, (0.1, 0.1), seed, "clinic.csv")
    assert np.bincount(y[test], minlength=4)[1:].tolist() == [1, 1, 0]
    assert np.bincount(y[validation], minlength=4)[1:].tolist() == [1, 0, 0]
    assert np.bincount(y[train], minlength=4)[1:].tolist() == [1, 1, 1]
    assert caplog.messages == [
        "clinic.csv: 1 class has rows of one row alone, which stays in training: no other part has any"
    ]


def test_a_class_of_one_patient_stays_in_training(caplog: pytest.LogCaptureFixture) -> None:
    groups = np.repeat(np.arange(30), 4)
    y = (groups == 7).astype(np.int64) * (np.arange(120) % 2)  # the outcome of one patient, at some visits
    for seed in range(10):
        test, train = split(y, (0.25,), seed, "clinic.csv", groups)
        assert not y[test].any()
        assert together((test, train), groups)
    assert "1 class has rows of one group alone" in caplog.text
    caplog.clear()
    y[groups == 9] = 1  # of two patients one is in each part, although they are a twentieth
    for seed in range(10):
        test, train = split(y, (0.25,), seed, "clinic.csv", groups)
        assert y[test].any() and y[train].any()  # noqa: PT018
    assert not caplog.text


def test_groups_that_fit_no_part() -> None:
    with pytest.raises(ParameterError, match=r"9 rows of 1 groups cannot be split by fractions 0.5; .*needs a group"):
        split(np.zeros(9, np.int64), (0.5,), 0, "clinic.csv", np.zeros(9, np.int64))
    with pytest.raises(ParameterError, match=r"clinic.csv: expected one group per row \(9\), integers or strings"):
        split(np.zeros(9, np.int64), (0.5,), 0, "clinic.csv", np.zeros(8, np.int64))
    with pytest.raises(ParameterError, match="type float64"):
        split(np.zeros(9, np.int64), (0.5,), 0, "clinic.csv", np.zeros(9))


@settings(deadline=None)
@given(ROWS, st.integers(1, 5), st.sampled_from(["iid", "dirichlet", "by-label", "by-domain"]), SEEDS, st.booleans())
def test_no_group_is_at_two_silos(rows: list[tuple[int, int]], silos: int, how: str, seed: int, numbers: bool) -> None:
    groups, labels = np.array(rows, np.int64).T
    y = labels.astype(np.float32) if numbers and how != "dirichlet" else labels
    arguments: dict[str, Any] = {"alpha": 1.0} if how == "dirichlet" else {}
    arguments |= {"domain": labels} if how == "by-domain" else {}
    if silos > len(np.unique(groups)):
        with pytest.raises(ParameterError, match="groups cannot be dealt to"):
            partition(y, silos, how, seed, groups=groups, **arguments)
        return
    try:
        parts = partition(y, silos, how, seed, groups=groups, **arguments)
    except ParameterError:
        assert how in ("dirichlet", "by-domain")  # the other two leave no silo empty
        return
    assert together(parts, groups)
    again = partition(y, silos, how, seed, groups=groups, **arguments)
    assert all(a.tolist() == b.tolist() for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("sizes", [None, (0.5, 0.3, 0.2)])
def test_silos_are_equal_to_within_a_group(sizes: tuple[float, ...] | None) -> None:
    visits = np.random.default_rng(0).integers(1, 8, 60)
    groups = np.repeat(np.arange(60), visits)
    for seed in range(10):
        parts = partition(groups % 2, 3, "iid", seed, sizes=sizes, groups=groups)
        wanted = np.array(sizes or (1 / 3,) * 3) * len(groups)
        assert (np.abs([len(part) for part in parts] - wanted) <= 7).all()


def test_rows_are_split_for_python_by_class_and_whole_patients() -> None:
    random = np.random.default_rng(1)
    patients, x = random.integers(60, size=200), random.normal(size=(200, 2))
    words = np.where(patients % 4 == 0, "ill", "well")
    train, validation, test = split_rows(words, (0.2, 0.3), groups=patients, seed=3)
    parts = [train, validation, test]
    assert sorted(np.concatenate(parts).tolist()) == list(range(200))
    assert not any(set(patients[one]) & set(patients[other]) for one, other in itertools.combinations(parts, 2))
    assert [round(len(one) / 200, 1) for one in parts] == [0.5, 0.2, 0.3]
    shares = [(words[one] == "ill").mean() for one in parts]
    assert max(shares) - min(shares) < 0.1
    again = split_rows(words.tolist(), (0.2, 0.3), groups=[f"P{one}" for one in patients], seed=3)
    assert all((one == other).all() for one, other in zip(parts, again, strict=True))
    assert len(x[split_rows(x[:, 0])[1]]) == 40  # a fifth, of numbers too
    rare = np.arange(100) < 5
    assert [rare[split_rows(rare, seed=seed)[1]].sum() for seed in range(8)] == [1] * 8  # truths are classes too


@pytest.mark.parametrize("absent", ["", None, float("nan"), np.datetime64("NaT")])
def test_rows_without_a_group_are_not_one_group(absent: Any) -> None:
    with pytest.raises(ParameterError, match="split_rows: groups: "):
        split_rows(np.arange(40) % 2, 0.3, groups=[absent, "a", "b", "c"] * 10)


def test_a_name_is_one_group_however_its_accents_are_written() -> None:
    names = ["Zo\u00eb", "Zoe\u0308", "Ann", "Bob"] * 10
    for seed in range(9):
        train, test = (
            {names[row][:2] for row in part} for part in split_rows(np.arange(40) % 2, 0.3, groups=names, seed=seed)
        )
        assert not train & test


def test_a_patient_of_two_hospitals_is_dealt_with_the_one_of_most_visits(caplog: pytest.LogCaptureFixture) -> None:
    groups = np.array([1, 1, 1, 2, 2, 3, 3])
    domain = np.array(["rome", "rome", "pisa", "pisa", "pisa", "rome", "pisa"])
    parts = partition(np.zeros(7, np.int64), 2, "by-domain", 0, domain=domain, groups=groups)
    assert [part.tolist() for part in parts] == [[3, 4, 5, 6], [0, 1, 2]]
    assert "2 rows go to another domain's silo" in caplog.text


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 12), min_size=4, max_size=60), st.integers(1, 4), SEEDS)
def test_a_group_is_in_one_row_part_of_a_grid(numbers: list[int], parts: int, seed: int) -> None:
    groups = np.array([f"patient {number}" for number in numbers])
    x = np.arange(len(groups) * 2, dtype=np.float32).reshape(-1, 2)
    y = np.arange(len(x)) % 2
    dataset = split_of("t", "classification", x, y, x[:2], y[:2], classes=2, groups=groups)
    if parts > len(np.unique(groups)):
        with pytest.raises(ParameterError, match="groups cannot be cut into"):
            distribute(dataset, 2 * parts, "grid", seed, grid=[parts, 2])
        return
    silos = distribute(dataset, 2 * parts, "grid", seed, grid=[parts, 2]).silos
    for one, other in zip(silos[::2], silos[1::2], strict=True):
        assert one.groups is not None
        assert one.groups.tolist() == np.asarray(other.groups).tolist()  # partners hold the same rows
        assert groups[(np.asarray(one.x)[:, 0] / 2).astype(int)].tolist() == one.groups.tolist()
    rows = [(np.asarray(silo.x)[:, 0] / 2).astype(int) for silo in silos[::2]]
    assert together(rows, groups)
