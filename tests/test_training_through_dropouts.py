"""PBPFL trains on while a fifth of the silos vanish in every round, and every sum is exactly the survivors'."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moretta.config import run_files
from moretta.contract.messages import Stamp, Tensors
from moretta.contract.roles import Aborted
from moretta.run.assembly import federation_of
from moretta.secure_aggregation.encoding import Ring, encode
from moretta.secure_aggregation.keyed_sums import KeyedAggregator, KeyedContributor
from moretta.secure_aggregation.sums import Sum, Wanted, stamp_of

RING = Ring(64)
# A threshold counts from the silos of a round, whoever is there: with 10, of whom 7 are needed, one round in eight ends
# the run, as it must. Of 30 silos more than 14 vanish in 2 of 10,000 rounds.
SILOS = ("data.silos=30", "secure-aggregation.threshold=16")


class Ledger:
    """What every silo put into every sum, in the clear, beside what the server made of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.put: dict[tuple[Stamp, frozenset[str]], dict[str, tuple[int, dict[str, Any]]]] = {}
        self.sums, self.short = 0, 0
        upload, add_up = KeyedContributor.upload, KeyedAggregator.sum

        def watched_upload(
            silo: Any, stamp: Stamp, tensors: Tensors, weight: int, encoding: Mapping[str, int], **about: Any
        ) -> Any:
            _, words = encode(RING, tensors, weight, encoding, len(silo._keys.agreed[0].cohort.names))
            self.put.setdefault((stamp, frozenset(words)), {})[silo._name] = weight, words
            return upload(silo, stamp, tensors, weight, encoding, **about)

        def watched_sum(
            server: Any, ask: Any, wanted: Wanted, expected: bytes | None = None, *, whole: bool = False
        ) -> Any:
            stamp = stamp_of(ask)
            found = yield from add_up(server, ask, wanted, expected, whole=whole)
            if not isinstance(found, Aborted):
                self.verify(self.put[stamp, frozenset(wanted.shapes)], found, wanted)
                self.short += len(found.silos) < len(server.cohort)
            return found

        monkeypatch.setattr(KeyedContributor, "upload", watched_upload)
        monkeypatch.setattr(KeyedAggregator, "sum", watched_sum)

    def verify(self, put: Mapping[str, tuple[int, Mapping[str, Any]]], found: Sum, wanted: Wanted) -> None:
        """The plain sum of the survivors' integers, read and divided as the server does, is the sum bit for bit."""
        self.sums += 1
        assert found.weight == sum(put[silo][0] for silo in found.silos)
        for name, mean in found.means.items():
            plain = np.array(np.sum([put[silo][1][name] for silo in found.silos], axis=0, dtype=np.uint64))
            exact = RING.decode(plain, wanted.fraction_bits[name]) / found.weight
            np.testing.assert_array_equal(mean, exact, strict=True)


def accuracy(path: Path, *changes: str) -> tuple[float, list[dict[str, Any]]]:
    run_file = run_files.load(path, ["engine.workers=1", *changes])  # a worker's uploads would not be seen here
    result = federation_of(run_file, None).train(run_file.run.rounds, run_file.run.seed)
    return float(result.record["test"]["accuracy"]), result.record["dropped"]


@pytest.mark.slow
def test_wdbc_within_a_point(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[1] / "examples" / "wdbc.toml"
    common = [*SILOS, "data.batch-size=8", "run.rounds=100", "run.record-views=false"]
    undisturbed, dropped = accuracy(path, *common)
    assert not dropped
    ledger = Ledger(monkeypatch)
    disturbed, dropped = accuracy(path, *common, "engine.faults={drop-probability = 0.2, seed = 1}")
    assert len(dropped) == pytest.approx(0.2 * 30 * 101, abs=110)  # binomial, five deviations of 22
    assert ledger.sums >= 100
    assert ledger.short > 90  # that nobody vanishes has a chance of 0.1 % in a round
    assert abs(disturbed - undisturbed) <= 0.01


@pytest.mark.slow
@pytest.mark.skipif("MORETTA_DATA" not in os.environ, reason="needs MORETTA_DATA, a folder with bank_marketing/")
def test_bank_marketing_within_a_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "bank.toml"
    path.write_text(
        f"""
        [run]
        rounds = 600
        seed = 1
        [data]
        source = "bank-marketing"
        path = '{os.environ["MORETTA_DATA"]}/bank_marketing'
        batch-size = 32
        [model]
        source = "mlp"
        hidden = [32, 32]
        [protocol]
        name = "pbpfl"
        loss = "mse"
        learning-rate = 0.1
        """
    )
    undisturbed, _ = accuracy(path, *SILOS)
    ledger = Ledger(monkeypatch)
    disturbed, dropped = accuracy(path, *SILOS, "engine.faults={drop-probability = 0.2, seed = 1}")
    assert len(dropped) > 3000
    assert ledger.short > 500
    assert abs(disturbed - undisturbed) <= 0.01
