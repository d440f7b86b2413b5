"""DP-FL: what one example can do to an upload, the noise, the secret lots, and a run of it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import perceptron, seeded
from refused_rows import Row, refused
from torch import Tensor, nn

from moretta import Engine, Faults, Federation, FedSGD, SecureAggregation, Silo
from moretta.config import run_files
from moretta.contract.messages import Stamp
from moretta.data.tables.preparation import Preparation
from moretta.errors import MissingExtra, ParameterError
from moretta.protocols.common import modules
from moretta.protocols.common.accountant import epsilon
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.clipping import clipped_sum
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.lattice import Privacy
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.noise import SiloNoise
from moretta.protocols.common.silo_rows import TrainingRows
from moretta.protocols.fedsgd.private import PrivateGradient
from moretta.run.result import Result
from moretta.secure_aggregation.keystream import SecretRoot

NOW = Stamp("run", 1, 0)
ROWS, CLIP = 40, 0.5


class Tied(nn.Module):
    """Two layers with one weight, one parameter that is frozen, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight
        self.last.bias.requires_grad_(False)
        self.idle = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Images(nn.Module):
    """A convolution and a normalisation that keeps rows apart, with a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(16, 3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.reshape(len(x), 1, 2, 2)) / self.scale)


def network(kind: str = "mlp", dtype: torch.dtype = torch.float64) -> nn.Module:
    with seeded():
        mlp = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        return {"mlp": mlp, "tied": Tied(), "images": Images()}[kind].to(dtype)


def inputs(scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(1).normal(0, scale, (ROWS, 4))


def rows(x: np.ndarray, dtype: torch.dtype = torch.float64, seed: int = 0, size: int = 8) -> SiloRows:
    return SiloRows(TrainingRows(x, np.arange(len(x)) % 3, Batches(len(x), size, seed, "north")), dtype)


def private(
    noise: float = 0.0,
    root: int = 0,
    size: int = 8,
    sharers: int = 1,
    own: SiloRows | None = None,
    settings: bytes = b"",
) -> PrivateGradient:
    own, secret = own or rows(inputs()), SecretRoot.insecure(root, "north")
    drawn = SiloNoise(Privacy(noise, CLIP, 1e-5, sharers), own.batches.rows, size, secret, settings)
    return PrivateGradient(drawn, own, Loss("cross-entropy"))


def norm(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(first[name] - second[name]).sum() for name in first)))


# -- one example's influence -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mlp", "tied", "images"])
def test_the_sum_is_that_of_the_rows_gradients_one_at_a_time(kind: str) -> None:
    own, model = private(own=rows(inputs(3.0))), network(kind)
    index = np.array([0, 3, 17, 39])
    trained, norms = modules.trainable(model), []
    total = {name: np.zeros(tuple(value.shape)) for name, value in trained.items()}
    for row in index:
        x, y = torch.tensor(inputs(3.0)[row : row + 1]), torch.tensor([row % 3])
        loss = nn.functional.cross_entropy(model(x), y)
        found = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
        norms.append(float(torch.sqrt(sum(value.square().sum() for value in found))))
        for name, value in zip(trained, found, strict=True):
            total[name] += value.numpy() / max(1.0, norms[-1] / CLIP)
    assert max(norms) > CLIP  # or nothing was clipped
    ours = own.clipped_sum(model, index)
    assert ours.keys() == total.keys()
    assert norm(ours, total) < 1e-14


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("scale", [0.01, 1.0, 1e30])
@pytest.mark.parametrize("kind", ["mlp", "tied", "images"])
def test_no_example_changes_the_upload_by_more_than_the_clip_norm_over_the_lot(
    kind: str, scale: float, dtype: torch.dtype, rounding: float
) -> None:
    own, model = private(own=rows(inputs(scale), dtype)), network(kind, dtype)
    everybody = np.arange(12)
    whole = own.clipped_sum(model, everybody)
    moved = [norm(whole, own.clipped_sum(model, np.delete(everybody, row))) for row in everybody]
    # Other rows' gradients may be rounded otherwise in a batch of another size, by some ulps of the clip norm.
    assert max(moved) / own.noise.lot <= CLIP / own.noise.lot * (1 + rounding)
    assert np.isfinite(max(moved))


@given(
    st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=5),
    st.floats(1e-6, 1e6),
)
def test_a_clipped_sum_of_anything_is_bounded_by_its_rows(gradients: list[list[float]], most: float) -> None:
    values = torch.tensor(gradients, dtype=torch.float32)  # NaN and infinities too
    found = clipped_sum({"a": values[:, :2], "b": values[:, 2]}, most)
    assert found["b"].shape == ()
    size = float(torch.sqrt(found["a"].square().sum() + found["b"].square().sum()))
    assert size <= most * len(gradients) * (1 + 1e-12)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = private().clipped_sum(network(), np.arange(ROWS))
    monkeypatch.setattr("moretta.protocols.fedsgd.private.MOST_ENTRIES", 7 * 51)  # 7 rows of 51 parameters
    assert norm(whole, private().clipped_sum(network(), np.arange(ROWS))) < 1e-13
    monkeypatch.setattr("moretta.protocols.fedsgd.private.MOST_ENTRIES", 1)  # one row at least
    assert norm(whole, private().clipped_sum(network(), np.arange(ROWS))) < 1e-13


# -- lots --------------------------------------------------------------------------------------------------------------


def test_lots_are_drawn_by_row_in_secret_and_differ_by_round() -> None:
    one, lots = private(), [private().noise.rows_of_lot("run", number, b"") for number in range(1, 501)]
    assert len({lot.tobytes() for lot in lots[:20]}) == 20
    assert all((np.diff(lot) > 0).all() for lot in lots)
    # 500 lots of 40 rows at rate 0.2: a binomial mean of 4000 and deviation of 57; five deviations.
    assert abs(sum(map(len, lots)) - 4000) < 5 * np.sqrt(500 * ROWS * 0.2 * 0.8)
    # By row: 100 of 500 and deviation 9; five deviations bear the largest of 40.
    assert np.abs(np.bincount(np.concatenate(lots), minlength=ROWS) - 100).max() < 5 * np.sqrt(500 * 0.2 * 0.8)
    assert (one.noise.lot, one.noise.rate) == (8, 0.2)
    assert len({len(lot) for lot in lots}) > 5  # Poisson, not of fixed size


def test_lots_follow_from_the_secret_root_and_not_from_the_training_seed() -> None:
    purpose = ("run", 1, b"")
    first = private(own=rows(inputs(), seed=1)).noise.rows_of_lot(*purpose)
    assert (first == private(own=rows(inputs(), seed=2)).noise.rows_of_lot(*purpose)).all()
    other = private(root=1)
    assert first.tobytes() != other.noise.rows_of_lot(*purpose).tobytes()
    other.noise.restore(private(root=0).noise.state())
    assert first.tobytes() == other.noise.rows_of_lot(*purpose).tobytes()


@pytest.mark.parametrize("size", [0, ROWS, 100])
def test_with_a_batch_of_all_rows_the_lot_is_all_rows(size: int) -> None:
    one = private(size=size, own=rows(inputs(), size=size))
    assert (one.noise.lot, one.noise.rate) == (ROWS, 1.0)
    assert (one.noise.rows_of_lot("run", 1) == np.arange(ROWS)).all()


def test_an_empty_lot_uploads_noise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, one, silent = network(), private(noise=1.0), private()
    parameters = modules.arrays(model)
    for own in (one, silent):
        monkeypatch.setattr(own.noise, "lot_of", lambda *purpose: (np.arange(0), []))
    assert all((value == 0).all() for value in silent.upload(model, parameters, NOW, {}).values())
    assert all((value != 0).all() for value in one.upload(model, parameters, NOW, {}).values())


# -- noise -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharers", [1, 4])
def test_a_silos_noise_has_its_share_of_the_variance(sharers: int) -> None:
    model, noise = network(), 2.0
    parameters, drawn = modules.arrays(model), []
    for number in range(1, 201):
        now = Stamp("run", number, 0)
        noised = private(noise, sharers=sharers).upload(model, parameters, now, {})
        bare = private(0.0, sharers=sharers).upload(model, parameters, now, {})
        drawn += [np.ravel(noised[name] - bare[name]) * 8 for name in noised]
    values = np.concatenate(drawn) / (noise * CLIP / np.sqrt(sharers))
    # The sum of n squares is chi-square: mean n, deviation sqrt(2 n). n = 200 * 51; five deviations.
    assert abs(np.square(values).sum() - values.size) < 5 * np.sqrt(2 * values.size)
    assert abs(values.sum()) < 5 * np.sqrt(values.size)


def test_a_take_has_the_same_upload_in_all_attempts_and_whatever_differs_has_other_noise() -> None:
    model, one = network(), private(noise=1.0)
    parameters = modules.arrays(model)
    first = one.upload(model, parameters, NOW, {})
    assert norm(first, one.upload(model, parameters, Stamp("run", 1, 1), {})) == 0
    for now in (Stamp("run", 2, 0), Stamp("other", 1, 0), Stamp("run", 1, 0, 1), Stamp("run", 1, 1, 1)):
        assert norm(first, one.upload(model, parameters, now, {})) > 0.1
    assert norm(first, private(noise=1.0, settings=b"others").upload(model, parameters, NOW, {})) > 0.1
    changed = inputs()
    changed[-1] += 1e-6  # a row that need not even be in the lot
    assert norm(first, private(noise=1.0, own=rows(changed)).upload(model, parameters, NOW, {})) > 0.1
    scaled = rows(inputs())
    scaled.of.prepared = Preparation(np.zeros(1), np.full(1, 1e-9), np.ones(1))
    assert norm(first, private(noise=1.0, own=scaled).upload(model, parameters, NOW, {})) > 0.1
    moved = {name: value + (name == "0.bias") * 1e-9 for name, value in parameters.items()}
    # The gradients are all but the same: what differs is lot and noise.
    assert norm(first, one.upload(model, moved, NOW, {})) > 0.1


@pytest.mark.parametrize(
    ("secure", "variance"),
    [
        (SecureAggregation(), 1.0),  # three silos, a third each: the threshold of three is three
        (SecureAggregation(threshold=2), 1.0),  # two may be left; what only that would need is taken off again
        (SecureAggregation(threshold=2, min_survivors=3), 1.0),
        (SecureAggregation(scheme="additive-shares"), 1.0),
        (SecureAggregation(scheme="additive-shares", min_survivors=2), 1.0),
        (SecureAggregation(scheme="none"), 3.0),  # each upload is seen
    ],
)
def test_the_noise_of_a_revealed_sum_is_what_was_asked_for(secure: SecureAggregation, variance: float) -> None:
    silos = [Silo(name, inputs(), np.arange(ROWS) % 3) for name in ("north", "south", "east")]
    assert noise_in_the_sum(silos, secure) == pytest.approx(variance, rel=5 * np.sqrt(2 / 4803))


def noise_in_the_sum(silos: list[Silo], secure: SecureAggregation) -> float:
    """The variance of the noise in a round's sum, in that of the mechanism: a mean of 4803 squares (chi-square)."""
    wide = nn.Sequential(nn.Linear(4, 600), nn.Tanh(), nn.Linear(600, 3))

    def moved(noise: float) -> Mapping[str, np.ndarray]:
        settings = FedSGD(loss="cross-entropy", learning_rate=1.0, dp_noise=noise, dp_clip=CLIP)
        made = Federation(
            wide, silos, settings, batch_size=0, dtype="float64", aggregation=secure, insecure_secret_seed=3
        )
        result = made.train(1)
        assert result.model is not None
        return modules.arrays(result.model)

    noised, bare = moved(2.0), moved(0.0)  # of all rows both
    values = np.concatenate([np.ravel(noised[name] - bare[name]) for name in bare]) * ROWS * len(silos) / (2.0 * CLIP)
    assert values.size == 4803
    return float(np.square(values).mean())  # what the ring rounds is far below


@pytest.mark.parametrize("secure", [SecureAggregation(threshold=8), SecureAggregation()])
def test_ten_silos_add_no_more_noise_than_is_needed(secure: SecureAggregation) -> None:
    """It was 2.24 times the deviation, as if two of the ten might be left, and later 1.12 and 1.20 for those lost."""
    silos = [Silo(f"silo-{part}", inputs(), np.arange(ROWS) % 3) for part in range(10)]
    assert noise_in_the_sum(silos, secure) == pytest.approx(1.0, rel=5 * np.sqrt(2 / 4803))


def test_a_silo_adds_no_noise_that_a_servers_encoding_would_round_away() -> None:
    model, one = network(), private(noise=1.0, sharers=4)  # a share of the deviation CLIP / 2 = 2^-2
    parameters = modules.arrays(model)
    one.upload(model, parameters, NOW, dict.fromkeys(parameters, 11))  # 51 numbers: steps of 2^-11
    with pytest.raises(
        ParameterError, match=r"has steps of 0\.000488, but sums are rounded to 0\.000977, which would round it away"
    ):
        one.upload(model, parameters, Stamp("run", 2, 0), dict.fromkeys(parameters, 11) | {"0.bias": 10})


def test_a_run_whose_ring_rounds_the_noise_away_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ParameterError, match=r"rounded to .*, which would round it away; .*a lower \[secure-aggregation\] limit"
    ):
        federation(aggregation=SecureAggregation(limit=1e18), out=tmp_path / "run").train(2)
    assert not (tmp_path / "run").exists()
    federation(aggregation=SecureAggregation(limit=1e9)).train(2)


def test_dropout_is_drawn_in_secret_and_leaves_torchs_generator() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    parameters = modules.arrays(model)
    before = torch.get_rng_state()
    first, again = (private(size=0).upload(model, parameters, NOW, {}) for _ in range(2))
    other = private(size=0, root=1).upload(model, parameters, NOW, {})
    assert (torch.get_rng_state() == before).all()
    assert norm(first, again) == 0 < norm(first, other)


# -- runs --------------------------------------------------------------------------------------------------------------


def federation(silos: list[Silo] | None = None, **settings: Any) -> Federation:
    x = inputs().astype(np.float32)
    silos = silos or [Silo(name, x[start::2], np.arange(ROWS)[start::2] % 3) for start, name in enumerate("ab")]
    chosen: dict[str, Any] = {
        "model": network(dtype=torch.float32),
        "protocol": FedSGD(loss="cross-entropy", learning_rate=0.5, dp_noise=1.0, dp_clip=1.0),
        "batch_size": 5,
    } | settings
    return Federation(silos=silos, **chosen)


def test_a_run_on_digits_learns_and_states_its_epsilon(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int64)
    silos = [Silo(f"silo-{part}", x[part:1400:4], y[part:1400:4]) for part in range(4)]  # 350 rows each
    model = perceptron(64, 16, 10)
    result = Federation(
        model,
        silos,
        FedSGD(loss="cross-entropy", learning_rate=1.0, dp_noise=0.8, dp_clip=1.0),
        test=(x[1400:], y[1400:]),
        batch_size=35,
        aggregation=SecureAggregation(min_survivors=4),
        engine=Engine(strict=True),
        insecure_secret_seed=1,
        out=tmp_path / "run",
    ).train(40)
    assert result.test["accuracy"] > 0.7  # chance is 0.1
    facts = result.record["facts"]
    assert (facts["noise_multiplier"], facts["delta"], facts["sampling_rate"]) == (0.8, 1e-5, 0.1)
    assert facts["epsilon"] == epsilon(0.8, 1e-5, 0.1, 40)
    assert facts["epsilon_to_silos"] == epsilon(0.8 * np.sqrt(0.75), 1e-5, 0.1, 40)
    assert "epsilon_leaves_out" not in facts
    assert all("loss" not in line for line in result.history)
    assert {line["rows"] for line in result.history} == {140.0}  # as expected, whatever was drawn
    result.report(tmp_path / "report.html")


def test_epsilon_counts_all_rounds_of_a_run_that_goes_back_to_its_best() -> None:
    validation = (inputs().astype(np.float32), np.arange(ROWS) % 3)
    settings = FedSGD(loss="cross-entropy", learning_rate=1e-9, dp_noise=1.0, dp_clip=1.0)
    made = federation(protocol=settings, validation=validation, early_stopping=3, evaluate_every=1)
    result = made.train(50, seed=1)
    played, best = len(result.history), result.record["facts"]["best_round"]
    assert best < played < 50
    assert result.record["facts"]["epsilon"] == epsilon(1.0, 1e-5, 0.25, played)


@pytest.mark.parametrize("scheme", ["none", "pairwise"])
def test_a_run_goes_on_without_silos_that_drop_out(scheme: Any) -> None:
    silos = [Silo(f"silo-{part}", inputs().astype(np.float32), np.arange(ROWS) % 3) for part in range(5)]
    made = federation(
        silos,
        aggregation=SecureAggregation(scheme=scheme, threshold=3 if scheme == "pairwise" else None),
        engine=Engine(faults=Faults(drop_probability=0.2, seed=1)),
    )
    result = made.train(6)
    assert result.record["dropped"]
    assert {line["rows"] for line in result.history} <= {10.0, 15.0, 20.0, 25.0}
    facts = result.record["facts"]
    assert facts["noise_silos"] == (5 if scheme == "pairwise" else 1)
    assert facts["releases"] >= 6
    assert facts["epsilon"] == epsilon(1.0, 1e-5, 5 / ROWS, int(facts["releases"]))


def test_standardised_inputs_are_named_as_left_out() -> None:
    facts = federation(standardise=True).train(1).record["facts"]
    assert "means and deviations" in facts["epsilon_leaves_out"]


@pytest.mark.parametrize("scheme", ["none", "pairwise"])
def test_a_resumed_run_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: Any) -> None:
    monkeypatch.setattr("moretta.run.persistence.secrets.token_hex", lambda count: "5" * 2 * count)
    secure = SecureAggregation(scheme=scheme)

    def begin() -> None:
        """Let silos draw the same roots from here on, and others whenever they draw again."""
        roots = itertools.count()
        fresh = classmethod(lambda cls: SecretRoot.insecure(next(roots), "root"))
        monkeypatch.setattr(SecretRoot, "fresh", fresh)

    def ends(result: Result) -> dict[str, bytes]:
        assert result.model is not None
        return {name: value.tobytes() for name, value in modules.arrays(result.model).items()}

    def run(folder: str) -> Federation:
        return federation(out=tmp_path / folder, aggregation=secure, checkpoint_every=1)

    begin()
    whole = run("whole").train(6)
    begin()
    run("halves").train(3)
    halves = run("halves").train(6, resume=True)  # casts silos with other roots, which their checkpoints replace
    assert ends(whole) == ends(halves)
    assert whole.record["facts"] == halves.record["facts"]
    assert ends(run("other").train(6)) != ends(whole)


def test_the_secret_root_is_in_its_silos_checkpoint_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots: list[bytes] = []

    def fresh(cls: type[SecretRoot]) -> SecretRoot:
        roots.append(SecretRoot.insecure(len(roots), "root").reveal())
        return cls(roots[-1])

    monkeypatch.setattr(SecretRoot, "fresh", classmethod(fresh))
    federation(out=tmp_path / "run", record_views=True).train(2)
    assert len(roots) == 2
    found = [
        path
        for path in (tmp_path / "run").rglob("*")
        if path.is_file()
        and any(root in path.read_bytes() or root.hex().encode() in path.read_bytes() for root in roots)
    ]
    assert {path.name for path in found} == {"silo-a.safetensors", "silo-b.safetensors"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in found)


def test_without_the_extra_a_run_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingExtra, match="stating epsilon needs dp_accounting"):
        federation(out=tmp_path / "run").train(1)
    assert not (tmp_path / "run").exists()


# -- refusals ----------------------------------------------------------------------------------------------------------


@refused("private.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


class Branches(nn.Module):
    """Decides by a number, which torch.func cannot follow for many rows at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found if float(found.detach().sum()) > 0 else -found


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("dp-noise = 1.0", "dp-noise is set, but dp-clip is not; they belong together"),
        ("dp-clip = 1.0", "dp-clip is set, but dp-noise is not; they belong together"),
        ("dp-noise = -1.0\ndp-clip = 1.0", r"\[protocol\] dp-noise: expected 0 or more, got -1.0"),
        ("dp-noise = 1.0\ndp-clip = 0.0", r"\[protocol\] dp-clip: expected more than 0, got 0.0"),
        ("dp-noise = 1.0\ndp-clip = 1.0\ndp-delta = 1.0", r"\[protocol\] dp-delta: expected less than 1, got 1.0"),
        ("dp-delta = 0.0", r"\[protocol\] dp-delta: expected more than 0, got 0.0"),
        (
            'dp-noise = 1.0\ndp-clip = 1.0\nloss = "cross-entropy"\nclass-weights = [1.0, 2.0]',
            "class-weights do not go with dp-noise",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, lines: str, said: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE + lines)
    with pytest.raises(ParameterError, match=said):
        run_files.load(path)


RUN_FILE = """
[run]
rounds = 1
[data]
source = "wdbc"
[model]
source = "mlp"
[protocol]
name = "fedsgd"
"""


def test_a_run_file_takes_the_settings_and_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE + "dp-noise = 1.5\ndp-clip = 2.0\ndp-delta = 1e-6")
    found = run_files.load(path).protocol
    assert isinstance(found, FedSGD)
    assert found.privacy == Privacy(1.5, 2.0, 1e-6)
    path.write_text(run_files.dump(run_files.load(path)))
    assert run_files.load(path).protocol == found
    path.write_text(RUN_FILE)
    plain = run_files.load(path).protocol
    assert isinstance(plain, FedSGD)
    assert plain.privacy is None


def test_other_protocols_do_not_know_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE.replace("fedsgd", "pbpfl") + "dp-noise = 1.0")
    with pytest.raises(ParameterError, match=r"dp-noise is a key of .*fedsgd.*, not of pbpfl; remove it"):
        run_files.load(path)
