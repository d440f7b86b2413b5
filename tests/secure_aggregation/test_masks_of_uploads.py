"""Masks of recorded uploads: elements of the ring, and never one mask twice.

`practical.md`, section III-B, prints one mask phi for all tensors of a layer, and papers draw masks of real numbers. A
tensor less another under the same mask is bare; a mask of real numbers is told from one with a gradient under it by its
bounds and its size. Neither is possible here, and a mask that was used twice is seen by the same test.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from torch import nn

from moretta import PBPFL, Federation, FedSGD, Silo
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array
from moretta.protocols.common.training import Training
from moretta.secure_aggregation import keyed_sums, pairwise
from moretta.secure_aggregation.encoding import MOST_WEIGHT, Ring
from moretta.secure_aggregation.pairwise import MaskedUpload

NARROW = 1 / 8  # of the ring, around 0
UNLIKELY = 1e-9  # that so many entries of a uniform difference lie there
FEWEST = 16  # entries: fewer could not be as unlikely
ROWS = 20
Words = Mapping[tuple[int, str, str], Array]

PROTOCOLS = {
    "fedsgd": FedSGD(),
    "pbpfl, mse": PBPFL(loss="mse", rho=3.0),
    "pbpfl, cross-entropy": PBPFL(loss="cross-entropy", rho=3.0),
}


def played(folder: Path, protocol: Training) -> Truth:
    """Train two rounds of three silos with pairwise masks, all rows in each."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(4 * ROWS, 6)).astype(np.float32)
    y = generator.integers(0, 3, 4 * ROWS)
    parts = [slice(ROWS * at, ROWS * (at + 1)) for at in range(4)]
    silos = [Silo(f"silo-{at}", x[part], y[part]) for at, part in enumerate(parts[:3])]
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    test = (x[parts[3]], y[parts[3]])
    federation = Federation(model, silos, protocol, test=test, batch_size=0, record_views=True, out=folder / "out")
    federation.train(rounds=2, seed=5)
    return Truth(folder / "out", federation, 2, 5)


def words_of(truth: Truth) -> Words:
    """Return what the server received, by round, silo and tensor."""
    heard = [one for number in (1, 2) for one in truth.heard("server", number)]
    uploads = [(one.round, one.peer, one.message) for one in heard if isinstance(one.message, MaskedUpload)]
    found = {(at, silo, name): words for at, silo, upload in uploads for name, words in upload.tensors.items()}
    assert {(at, silo) for at, silo, _ in found} == set(itertools.product((1, 2), truth.run.silos))
    assert len(found) == sum(len(upload.tensors) for _, _, upload in uploads)
    return found


def narrow(words: Array) -> int:
    """Return how many ring elements are near 0."""
    bits = 8 * words.dtype.itemsize
    bound = int(NARROW * 2 ** (bits - 1))
    signed = np.ascontiguousarray(words).view(f"int{bits}")
    return int(((signed > -bound) & (signed < bound)).sum())


def under_one_mask(words: Words) -> list[tuple[tuple[int, str, str], tuple[int, str, str]]]:
    """Return the pairs of tensors, of whatever round, silo and name, whose difference cannot be uniform in the ring."""
    found = []
    for (one, first), (other, second) in itertools.combinations(words.items(), 2):
        if first.shape == second.shape and first.size >= FEWEST:
            near = narrow(first - second)
            if stats.binom.sf(near - 1, first.size, NARROW) < UNLIKELY:
                found.append((one, other))
    return found


@pytest.mark.parametrize("name", PROTOCOLS)
def test_no_tensor_silo_or_round_shares_a_mask_with_another(tmp_path: Path, name: str) -> None:
    words = words_of(played(tmp_path, PROTOCOLS[name]))
    assert {array.dtype.name for array in words.values()} == {"uint64"}
    assert not under_one_mask(words)


def test_one_mask_for_all_tensors_of_an_upload_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apart, parts = pairwise.add_masks, list[Array]()

    def noted(make: Any) -> Any:
        def room(*given: Any) -> tuple[Array, dict[str, Array]]:
            whole, words = make(*given)
            parts[:] = whole[:1], *words.values()
            return whole, words

        return room

    def add_masks(words: Array, masks: list[tuple[bool, bytes]]) -> None:
        for array in parts:  # each begins the keystreams anew, as one phi would do for tensors of one shape
            apart(array, masks)

    monkeypatch.setattr(keyed_sums, "encode", noted(keyed_sums.encode))
    monkeypatch.setattr(pairwise, "room_for", noted(pairwise.room_for))
    monkeypatch.setattr(pairwise, "add_masks", add_masks)
    found = under_one_mask(words_of(played(tmp_path, PROTOCOLS["pbpfl, mse"])))
    assert found
    assert all(one[:2] == other[:2] for one, other in found)


def test_one_mask_for_all_rounds_is_seen(tmp_path: Path) -> None:
    words = words_of(played(tmp_path, PROTOCOLS["fedsgd"]))
    again = {(2, silo, name): words[1, silo, name] + np.uint64(3) for at, silo, name in words if at == 1}
    found = under_one_mask({**words, **again})
    assert {(one[1:], other[1:]) for one, other in found} == {((s, n), (s, n)) for _, s, n in words if "weight" in n}


def test_what_is_left_of_an_upload_without_its_gradient_is_uniform_in_the_ring(tmp_path: Path) -> None:
    """So a server that is told two gradients cannot name the one that was uploaded: either leaves a uniform rest."""
    truth, ring = played(tmp_path, PROTOCOLS["fedsgd"]), Ring(64)
    words, signed, near, size = words_of(truth), [], {"own": 0, "another": 0}, 0
    silos = truth.run.silos
    for number in (1, 2):
        asks = [one.message for one in truth.heard("server", number) if hasattr(one.message, "parameters")]
        encoding = asks[-1].encoding  # type: ignore[attr-defined]
        gradients = {silo: truth.gradient(silo, number) for silo in silos}
        for place, silo in enumerate(silos):
            for kind, whose in (("own", silo), ("another", silos[place - 1])):
                for name, value in gradients[whose].items():
                    key = f"gradient/{name}"
                    plain = ring.encode(key, value, ROWS, encoding[key], encoding[MOST_WEIGHT], len(silos))
                    rest = words[number, silo, key] - plain
                    near[kind] += narrow(rest)
                    if kind == "own":
                        size += rest.size
                        signed.append(np.ldexp(rest.view(np.int64).astype(np.float64), -63).ravel())
    # Five deviations of a binomial count, and of the mean and mean square of uniform numbers from -1 to 1.
    for count in near.values():
        assert abs(count / size - NARROW) < 5 * np.sqrt(NARROW * (1 - NARROW) / size)
    uniform = np.concatenate(signed)
    assert abs(uniform.mean()) < 5 * np.sqrt(1 / 3 / size)
    assert abs(np.square(uniform).mean() - 1 / 3) < 5 * np.sqrt(4 / 45 / size)
    assert np.abs(uniform).max() > 0.9  # no bound but the ring's
