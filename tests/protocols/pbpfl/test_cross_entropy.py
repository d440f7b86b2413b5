"""Cross-entropy through client and server: the identities of both forms, the exchange before them, and whole runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_exactness import mlp, relative_error
from torch import Tensor, nn

from moretta import PBPFL, Federation, FedSGD, SecureAggregation, Silo
from moretta.contract.messages import Stamp
from moretta.errors import MisuseError, PeerError
from moretta.protocols.common import enrolment, modules
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.silo_rows import TrainingRows
from moretta.protocols.pbpfl import softmax
from moretta.protocols.pbpfl.client import Client
from moretta.protocols.pbpfl.ideal import gradient
from moretta.protocols.pbpfl.messages import Predictions, Softmax, TrainOn
from moretta.protocols.pbpfl.perturbation import Key, Perturbation
from moretta.protocols.pbpfl.scales import ScalePlan
from moretta.protocols.pbpfl.softmax import TrueSoftmax
from moretta.run.evaluation import largest_relative_difference
from moretta.run.result import Result
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.schemes import contributor

ROOT = SecretRoot.insecure(1, "server")
NOW = Stamp("run", 1, 0)
FORMS = ("probabilities", "paper")
BARS = {torch.float64: 1e-10, torch.float32: 1e-4}
RHO = 3.0


@dataclass(frozen=True)
class Round:
    """One silo's exchange with the server: what the server saw, sent and was sent, and what it should have found."""

    model: nn.Module
    perturbation: Perturbation
    key: Key
    ask: TrainOn
    seen: TrueSoftmax
    told: Softmax
    means: Mapping[str, NDArray[np.float64]]
    inputs: Tensor
    targets: Tensor
    loss: Loss

    @property
    def density(self) -> float:
        return float(self.means.get("density", np.ones(())))

    def gradient_error(self) -> float:
        found = {name: value / self.density for name, value in self.perturbation.recover(self.means, self.key).items()}
        return relative_error(found, gradient(self.model, self.inputs, self.targets, self.loss))

    def losses(self) -> tuple[float, float]:
        """The loss that the server finds, and the true one."""
        normaliser = float(self.seen.log_normaliser.mean())
        found = self.perturbation.true_loss(self.means, self.key, normaliser) / self.density
        return found, float(self.loss(self.model(self.inputs), self.targets).detach())


def play(
    model: nn.Module, form: str, partitions: int, loss: Loss, *, rows: int = 8, soft: bool = False, seed: int = 0,
    rho: float = RHO,
) -> Round:  # fmt: skip
    """Play one round with one silo; the offset is `rho` times the true outputs."""
    random = np.random.default_rng(seed)
    dtype, widths = next(model.parameters()).dtype, (model[0].in_features, model[-1].out_features)
    x = random.normal(size=(rows, widths[0]))
    y = random.dirichlet(np.ones(widths[1]), rows) if soft else random.integers(0, widths[1], rows)
    wanted = enrolment.targets(y, widths[1], "cross-entropy", "silo", dtype).numpy()
    own = SiloRows(TrainingRows(x, wanted, Batches(rows, 0, 0, "silo")), dtype)
    inputs, targets = own.batch(1)
    plan = ScalePlan.of(model, (torch.zeros(2, widths[0], dtype=dtype),))
    perturbation = Perturbation(plan, partitions, form)
    outputs = model(inputs).detach().double()
    alpha = model[:-1](inputs).detach().double().sum(1) + float(plan.head.bias is not None)
    size = rho * float(outputs.square().mean().sqrt()) / (float(alpha.square().mean().sqrt()) or 1.0)
    key = perturbation.draw_key(ROOT.stream("cross-entropy", seed), size or 1.0)
    client = Client(loss, model, plan.head, own, contributor("none", "silo"), form)
    noisy = perturbation.perturb(model.state_dict(), key)
    ask = TrainOn(stamp=NOW, parameters=noisy, parts=key.parts, direction=key.direction, encoding={})
    predictions = client.answer(ask)
    assert isinstance(predictions, Predictions)
    seen = softmax.true_softmax(predictions, key.offset)
    told = softmax.answer(seen, key, form, ROOT.stream("delta", seed), NOW, {})
    upload: Any = client.answer(told)
    means = {name: np.asarray(value, dtype=np.float64) for name, value in upload.tensors.items()}
    return Round(model, perturbation, key, ask, seen, told, means, inputs, targets, loss)


def weights_of(outputs: int, weighted: bool) -> tuple[float, ...]:
    return tuple(0.5 + k for k in range(outputs)) if weighted else ()


@given(
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    outputs=st.integers(2, 6),
    bias=st.booleans(),
    form=st.sampled_from(FORMS),
    rows=st.integers(1, 12),
    soft=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    weighted=st.booleans(),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_the_recovered_gradient_is_the_true_one(
    widths, outputs, bias, form, rows, soft, smoothing, weighted, seed, data
) -> None:
    partitions = data.draw(st.integers(1, outputs), label="partitions")
    loss = Loss("cross-entropy", smoothing, weights_of(outputs, weighted))
    model = mlp([*widths, outputs], bias, torch.float64, seed)
    done = play(model, form, partitions, loss, rows=rows, soft=soft, seed=seed)
    true = gradient(model, done.inputs, done.targets, loss)
    # A dead network has no gradient to compare; one that barely lives has alpha near 0, hence an offset of any size.
    assume(max(float(value.abs().max()) for value in true.values()) > 1e-3)
    assert done.gradient_error() <= 1e-10
    if form == "probabilities" or not weighted:
        found, wanted = done.losses()
        assert found == pytest.approx(wanted, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("partitions", [1, 3, 10])
@pytest.mark.parametrize("form", FORMS)
def test_at_rho_3_float64_and_float32_stay_within_their_bars(form, partitions, bias, dtype) -> None:
    for soft, smoothing, weighted in [(False, 0.0, False), (True, 0.0, True), (False, 0.1, True), (True, 0.1, False)]:
        loss = Loss("cross-entropy", smoothing, weights_of(10, weighted))
        done = play(mlp([12, 32, 16, 10], bias, dtype, 3), form, partitions, loss, rows=16, soft=soft)
        assert done.gradient_error() <= BARS[dtype]
        if form == "probabilities" or not weighted:
            found, wanted = done.losses()
            assert found == pytest.approx(wanted, rel=BARS[dtype])


def test_the_paper_form_hides_the_softmax_behind_delta_of_at_most_1_a_row_and_part() -> None:
    done = play(mlp([5, 16, 6], True, torch.float64), "paper", 3, Loss("cross-entropy"), rows=200)
    delta = np.log(done.seen.p / done.told.y)
    assert np.abs(delta).max() <= 1.0 + 1e-12
    for part in range(3):
        of_part = delta[:, done.key.parts == part]
        np.testing.assert_allclose(of_part, of_part[:, [0] * of_part.shape[1]], atol=1e-12)  # one delta a part ..
    assert len(np.unique(delta[:, 0].round(12))) == 200  # .. and a fresh one a row
    assert delta.min() < -0.9 < 0.9 < delta.max()
    # k is (1 - exp(delta)) / xi: y* - xi y* k is p again.
    factor = (1.0 - done.key.xi * done.told.k)[:, done.key.parts]
    np.testing.assert_allclose(done.told.y * factor, done.seen.p, rtol=1e-12)


def test_probabilities_come_with_nothing_else() -> None:
    done = play(mlp([5, 16, 6], True, torch.float64), "probabilities", 3, Loss("cross-entropy"))
    np.testing.assert_array_equal(done.told.y, done.seen.p)
    assert done.told.k.shape == (8, 0)
    np.testing.assert_allclose(done.seen.p, done.model(done.inputs).detach().softmax(1).numpy(), rtol=1e-10)


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("form", FORMS)
def test_huge_offsets_do_not_overflow(form, dtype) -> None:
    """The paper's exp(y^_i - y^_j) overflows float32 at a gap of 88.8 and float64 at 709.8; z and alpha do not."""
    assert torch.tensor({torch.float32: 88.8, torch.float64: 709.8}[dtype], dtype=dtype).exp().isinf()
    model = mlp([5, 16, 6], True, dtype)
    with torch.no_grad():
        model[-1].weight *= 5.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = play(model, form, 2, Loss("cross-entropy"), rho=300.0)
    offsets = np.abs(np.outer(done.seen.alpha, done.key.offset)).max()
    assert offsets > 800
    assert all(np.isfinite(value).all() for value in done.means.values())
    # z is rounded at the size of alpha r, so p is off by about the unit roundoff times it.
    assert done.gradient_error() <= 30 * offsets * torch.finfo(dtype).eps


@pytest.mark.parametrize("form", FORMS)
def test_a_certain_and_wrong_model_has_a_finite_gradient_and_loss(form) -> None:
    """True outputs hundreds apart: the softmax is 0 in every precision somewhere."""
    model = mlp([5, 16, 6], True, torch.float64)
    with torch.no_grad():
        model[-1].weight *= 3000.0
    done = play(model, form, 2, Loss("cross-entropy"), rows=12, rho=0.1)
    assert (done.seen.p == 0).any()
    assert done.gradient_error() <= 1e-10
    found, wanted = done.losses()
    assert wanted > 100
    if form == "paper":
        assert found == pytest.approx(wanted, rel=1e-10)
    else:
        assert 0 < found <= wanted * (1 + 1e-12)  # -log p is cut off at the smallest float: 708 in float64


def ready_client() -> tuple[Client, Round]:
    """A silo that has answered nothing yet, and a round it could take part in."""
    done = play(mlp([5, 16, 6], True, torch.float64), "probabilities", 2, Loss("cross-entropy"))
    y = done.targets
    own = SiloRows(TrainingRows(done.inputs.numpy(), y.numpy(), Batches(len(y), 0, 0, "silo")), torch.float64)
    return Client(done.loss, done.model, done.perturbation.plan.head, own, contributor("none", "silo")), done


def test_a_softmax_without_predictions_is_refused() -> None:
    client, done = ready_client()
    with pytest.raises(MisuseError, match="the softmax came without the predictions it answers"):
        client.answer(done.told)


def test_a_softmax_answers_once_and_only_its_own_round() -> None:
    client, done = ready_client()
    client.answer(done.ask)
    other = Softmax(stamp=Stamp("run", 2, 0), y=done.told.y, k=done.told.k, encoding={})
    with pytest.raises(MisuseError, match="the softmax came without the predictions it answers"):
        client.answer(other)
    with pytest.raises(MisuseError, match="without the predictions"):
        client.answer(done.told)  # the round is over for this silo: it forgot its batch
    predictions = client.answer(done.ask)
    assert isinstance(predictions, Predictions)
    seen, stream = softmax.true_softmax(predictions, done.key.offset), ROOT.stream("delta")
    told = softmax.answer(seen, done.key, "probabilities", stream, NOW, {})
    client.answer(told)
    with pytest.raises(MisuseError, match="without the predictions"):
        client.answer(told)


@pytest.mark.parametrize(("rows", "outputs", "m"), [(7, 6, 0), (8, 5, 0), (8, 6, 1)])
def test_a_softmax_of_another_shape_is_the_servers_fault(rows, outputs, m) -> None:
    client, done = ready_client()
    client.answer(done.ask)
    with pytest.raises(PeerError, match=r"expected a softmax for \[8, 6\], got"):
        client.answer(Softmax(stamp=NOW, y=np.zeros((rows, outputs)), k=np.zeros((rows, m)), encoding={}))


def test_under_mse_there_is_no_softmax_to_answer() -> None:
    _, done = ready_client()
    rows = SiloRows(TrainingRows(done.inputs.numpy(), np.zeros((8, 6)), Batches(8, 0, 0, "silo")), torch.float64)
    client = Client(Loss("mse"), done.model, done.perturbation.plan.head, rows, contributor("none", "silo"))
    client.answer(done.ask)
    with pytest.raises(MisuseError, match="without the predictions"):
        client.answer(done.told)


# -- whole runs --------------------------------------------------------------------------------------------------------

ROUNDS, SEED = 20, 7
WEIGHTS = (1.0, 3.0, 0.5)
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what FedSGD is given too, and what is PBPFL's own
    "mse": ({"loss": "mse"}, {"partitions": 2}),
    "probabilities": ({"loss": "cross-entropy"}, {"partitions": 2}),
    "paper": ({"loss": "cross-entropy"}, {"partitions": 2, "variant": "paper"}),
    "weighted probabilities": (
        {"loss": "cross-entropy", "class_weights": WEIGHTS, "label_smoothing": 0.1},
        {"partitions": 2},
    ),
    "weighted paper": (
        {"loss": "cross-entropy", "class_weights": WEIGHTS, "label_smoothing": 0.1},
        {"partitions": 3, "variant": "paper"},
    ),
}


def silos(soft: bool = False) -> list[Silo]:
    """Two silos of 21 and 40 rows, so batches of 8 are uneven at the end of an epoch, with unlike classes."""
    made = []
    for number, (name, rows) in enumerate({"north": 21, "south": 40}.items()):
        random = np.random.default_rng(number)
        x = random.normal(number, 1, (rows, 4))
        classes = (x[:, 0] > 0.5).astype(np.int64) + (x[:, 1] > 0.7)
        y = random.dirichlet(np.ones(3), rows) if soft else classes
        made.append(Silo(name, x, y))
    return made


def run(protocol: FedSGD | PBPFL, scheme: str, rounds: int = ROUNDS, **chosen: Any) -> Result:
    settings: dict[str, Any] = {"silos": silos(), "batch_size": 8, "dtype": "float64"} | chosen
    model = mlp([4, 8, 8, 3], True, torch.float64)
    secure = SecureAggregation(scheme=scheme)
    return Federation(model, protocol=protocol, aggregation=secure, insecure_secret_seed=3, **settings).train(
        rounds, SEED
    )


def arrays(model: nn.Module | None) -> dict[str, np.ndarray]:
    assert model is not None
    return modules.arrays(model)


@pytest.mark.parametrize("scheme", ["none", "pairwise"])
@pytest.mark.parametrize("name", RUNS)
def test_training_is_fedsgds(name: str, scheme: str) -> None:
    shared, own = RUNS[name]
    ours = run(PBPFL(learning_rate=0.1, momentum=0.5, **shared, **own), scheme)
    theirs = run(FedSGD(learning_rate=0.1, momentum=0.5, **shared), "none")
    assert largest_relative_difference(arrays(ours.model), arrays(theirs.model)) <= 1e-9
    x = np.concatenate([silo.x for silo in silos()])
    released, true = (model(torch.from_numpy(x)).detach() for model in (ours.released, ours.model))
    torch.testing.assert_close(released, true, rtol=1e-9, atol=1e-9)
    wanted = [line["loss"] for line in theirs.history]
    if name == "weighted paper":
        # The loss would need each row's class weight beside its log normaliser, hence its label: better none.
        assert not any("loss" in line for line in ours.history)
    else:
        assert [line["loss"] for line in ours.history] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_training_on_probability_rows_is_fedsgds(form: Any) -> None:
    shared: dict[str, Any] = {"loss": "cross-entropy", "learning_rate": 0.1, "class_weights": WEIGHTS}
    ours = run(PBPFL(**shared, variant=form), "pairwise", silos=silos(soft=True))
    theirs = run(FedSGD(**shared), "none", silos=silos(soft=True))
    assert largest_relative_difference(arrays(ours.model), arrays(theirs.model)) <= 1e-9


@pytest.mark.parametrize("form", FORMS)
def test_in_float32_rho_is_at_most_10_from_the_first_round_on(form: Any) -> None:
    """Above that, the recovered gradient is off by more than 1e-4; with class weights the paper's form has no loss."""
    protocol = PBPFL(loss="cross-entropy", rho=40.0, variant=form, class_weights=WEIGHTS)
    assert [line["rho"] for line in run(protocol, "none", 3, dtype="float32").history] == [10.0] * 3
    assert [line["rho"] for line in run(protocol, "none", 3).history] == [40.0] * 3
