"""Members of an overfitted model are found, and of one that was hardly trained they are not."""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recorded import KEPT, attacked, claimed, recorded
from torch import nn

from moretta.audit.attacks.cgd.exposure import displaced
from moretta.audit.attacks.common import membership_inference
from moretta.audit.attacks.common.membership_inference import (
    ATTACK,
    OF_LOCAL_MODELS,
    candidates,
    hits_at,
    likelihood_ratio,
    robust_ratio,
)
from moretta.audit.evidence import network, shadows
from moretta.audit.evidence.intervals import auc, flat
from moretta.audit.evidence.truth import gradient
from moretta.data.rows import Rows
from moretta.engines.run_folder import read_json
from moretta.errors import ParameterError
from moretta.protocols.common import modules
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.noise import SiloNoise
from moretta.protocols.common.training import Training


@cache
def random_labels():
    """Write rows whose labels can only be learnt by heart, once for all tests."""
    folder = Path(tempfile.mkdtemp(dir=KEPT.name))
    generator = np.random.Generator(np.random.PCG64(2))
    rows = np.column_stack([generator.standard_normal((320, 12)), generator.integers(0, 2, 320)])
    names = ",".join([*"abcdefghijkl", "label"])
    np.savetxt(folder / "rows.csv", rows, delimiter=",", header=names, comments="", fmt="%.6g")
    return {"source": str(folder / "rows.csv"), "batch-size": 0, "test-fraction": 0.5}


def trained(folder, rounds, rate, **protocol):
    return recorded(
        folder,
        run={"rounds": rounds, "insecure-secret-seed": 0},  # or one interval in forty lies above chance by luck
        data=random_labels(),
        model={"hidden": [128]},
        protocol={"name": "fedsgd", "loss": "cross-entropy", "learning-rate": rate, **protocol},
    )


@pytest.mark.parametrize("name", ["fedsgd", "pbpfl"])
def test_members_of_an_overfitted_model_are_found(tmp_path, name):
    found = attacked(ATTACK, trained(tmp_path, 60, 0.5, name=name))
    assert found.score > 0.6
    assert found.succeeded
    assert found.figures["candidates"] > 80


def test_members_of_an_untrained_model_are_not(tmp_path):
    found = attacked(ATTACK, trained(tmp_path, 1, 1e-6))
    assert not found.succeeded
    assert found.interval[0] < 0.5 < found.interval[1]


def test_displacement_is_attacked_too(tmp_path):
    found = attacked(ATTACK, trained(tmp_path, 5, 0.1, name="cgd", delta=0.05))
    assert 0 <= found.interval[0] < found.interval[1] <= 1


@pytest.mark.parametrize("starts", [{"around": "model"}, {"hidden_bias": "shared"}])
def test_a_displacement_stands_on_the_point_that_starts_lie_around(tmp_path, starts):
    """Without that point membership inference failed where starts lie around a model, at an AUC of 0.52."""
    truth = trained(tmp_path, 60, 0.5, name="cgd", delta=0.01, **starts)
    held, whole = displaced(truth, "silo-1", 61), truth.final("model.safetensors")
    assert held.keys() == whole.keys()
    assert all(np.array_equal(held[name], whole[name]) for name in whole)
    if "around" in starts:
        found = attacked(ATTACK, truth)
        assert found.succeeded
        assert found.score > 0.7


@pytest.mark.parametrize(("noise", "known"), [(0.0, True), (200.0, False)])
def test_noise_bounds_membership(tmp_path, monkeypatch, noise, known):
    """Without noise, and rows clipped less than they are long, dp-clip alone leaves members to be found."""
    if not known:  # as much noise as hides members from shadow models of any length
        monkeypatch.setattr(membership_inference, "SECONDS", 0.5)
    truth = trained(tmp_path, 60, 0.5, **{"dp-noise": noise, "dp-clip": 10.0})
    found = attacked(ATTACK, truth)
    assert found.succeeded == known
    claimed_epsilon = read_json(truth.folder / "result.json")["facts"]["epsilon_to_silos"]
    bound = found.figures["epsilon_at_least"]
    assert bound > 0.1 if known else bound <= claimed_epsilon
    assert ("any size is claimed" in found.sentence) == known
    assert shadows.plan_of(truth.run).row_clip == 10.0


def of_one_run(folder, seed):
    """Train on 300 of 600 rows of random labels, dealt by the seed; return that run's bound, and what it claims.

    Rows have 900 numbers, so that a model without noise learns each label by heart.
    """
    source = Path(KEPT.name) / "dealt.csv"
    if not source.exists():
        generator = np.random.Generator(np.random.PCG64(3))
        rows = np.column_stack([generator.standard_normal((600, 900)), generator.integers(0, 2, 600)])
        names = ",".join([*(f"x{column}" for column in range(900)), "label"])
        np.savetxt(source, rows, delimiter=",", header=names, comments="", fmt="%.6g")
    truth = recorded(
        folder,
        anew=True,
        run={"rounds": 10, "seed": seed, "insecure-secret-seed": seed},
        data={"source": str(source), "batch-size": 0, "test-fraction": 0.5},
        model={"hidden": []},
        protocol={"loss": "cross-entropy", "learning-rate": 0.5, "dp-noise": 20.0, "dp-clip": 10.0},
    )
    found = attacked(ATTACK, truth)
    assert found.figures["pairs_guessed"] >= 40
    return found.figures["epsilon_at_least"], read_json(truth.folder / "result.json")["facts"]["epsilon_to_silos"]


@pytest.mark.slow
def test_the_bound_of_one_run_is_at_most_what_is_claimed_in_twenty_of_twenty_runs(tmp_path, monkeypatch):
    """A right bound of 95 % fails rarely where epsilon is reached, and here noise leaves little to guess by."""
    monkeypatch.setattr(membership_inference, "SECONDS", 0.5)
    for seed in range(1, 21):
        (folder := tmp_path / str(seed)).mkdir()
        bound, told = of_one_run(folder, seed)
        assert bound <= told < 1.0, seed


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_bound_of_one_run_finds_silos_that_add_no_noise(tmp_path, monkeypatch, seed):
    """The same runs, whose noise is cut out of every upload.

    A row adds its own clipped gradient along itself, and the 300 others add numbers whose deviation there is
    sqrt(300 / 900) of that. So a sum has the two rows of a pair 1 / (0.58 sqrt(2)) = 1.2 deviations apart. Of such
    normal numbers the half that is largest has the right sign in 99 % of cases. 46 right of 50 give a bound of 0.78.
    """
    monkeypatch.setattr(membership_inference, "SECONDS", 0.5)
    drawn = SiloNoise._drawn

    def silent(noise, *purpose, **of):
        values = drawn(noise, *purpose, **of)
        noise.removable = None
        return {name: np.zeros_like(value) for name, value in values.items()}

    monkeypatch.setattr(SiloNoise, "_drawn", silent)
    bound, told = of_one_run(tmp_path, seed)
    assert bound > told > 0.5


def test_local_models_tell_members(tmp_path):
    truth = trained(tmp_path, 60, 0.5, name="local")
    found = attacked(OF_LOCAL_MODELS, truth)
    assert found.score > 0.6
    assert found.figures["auc_of_robust_ratio"] > 0.6
    assert found.succeeded
    claim = claimed(OF_LOCAL_MODELS, truth)
    draw, tries = np.random.Generator(np.random.PCG64(1)), 100
    others = [{**claim, "score": draw.permutation(claim["score"])} for _ in range(tries)]
    seen = sum(OF_LOCAL_MODELS.score(other, truth).succeeded for other in others)
    assert seen <= 7  # 2.5 by chance, and three deviations of 1.6 more


def test_clipped_gradients_of_rows_are_those_of_the_run(tmp_path):
    truth = trained(tmp_path, 1, 0.5, **{"dp-noise": 0.0, "dp-clip": 0.5})
    model, rows, plan = truth.case({}, {}, thorough=False).model(), truth.rows("silo-1"), shadows.plan_of(truth.run)
    by_row = [flat(gradient(model, truth.parameters(1), rows.of(np.array([row])), truth.loss)) for row in range(4)]
    wanted = np.mean([one / max(1.0, np.linalg.norm(one) / 0.5) for one in by_row], axis=0)
    modules.load(model, truth.parameters(1))
    x, y = torch.tensor(rows.x[:4]), torch.tensor(rows.y[:4])
    for program in (False, True):  # one by one, as of an exported program, comes to the same
        found = shadows.Steps(model, plan, Loss("cross-entropy"), program=program)._clipped(x, y)
        names = [name for name, _ in model.named_parameters()]
        got = flat({name: one.numpy() for name, one in zip(names, found, strict=True)})
        np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_clip_and_noise_are_of_what_moves_a_tensor():
    torch.manual_seed(0)
    model, x, y = nn.Linear(40, 30), torch.randn(5, 40), torch.arange(5)
    plan = shadows.TrainingPlan(1, 1.0, lambda step: 0.5, Training(), row_clip=0.5, moves={"weight": 9, "bias": 4})

    def found(plan):
        return shadows.Steps(model, plan, nn.functional.cross_entropy, program=False)._clipped(x, y)

    gradients = [
        torch.autograd.grad(nn.functional.cross_entropy(model(x[[i]]), y[[i]]), [*model.parameters()]) for i in range(5)
    ]
    sizes = [float((9 * weight.square().sum() + 4 * bias.square().sum()).sqrt()) for weight, bias in gradients]
    for place, clipped in enumerate(found(plan)):
        wanted = sum(one[place] / max(1.0, size / 0.5) for one, size in zip(gradients, sizes, strict=True)) / 5
        torch.testing.assert_close(clipped, wanted, rtol=1e-5, atol=1e-7)
    noise = [noised - clipped for noised, clipped in zip(found(replace(plan, noise=10.0)), found(plan), strict=True)]
    for part, k in zip(noise, (9, 4), strict=True):  # within five deviations of a deviation
        assert float(part.std()) == pytest.approx(10.0 / 5 / k**0.5, rel=5 / (2 * part.numel()) ** 0.5)


def test_steps_follow_from_the_model_alone(tmp_path):
    truth = trained(tmp_path, 60, 0.5)
    model, plan = truth.case({}, {}, thorough=False).model(), shadows.plan_of(truth.run)
    assert network.cost_of_row(model, (12,)) == 12 * 128 + 2 * 128 + 128  # two layers' products, and entries of ReLU
    assert network.times(1.0, 1e6, 10, 10_000) == 3000
    x = truth.background.x
    assert shadows.steps_of(model, plan, x, 100, 8, 5.0) == 60
    assert shadows.steps_of(model, plan, x, 100, 8, 0.0) == shadows.LEAST_STEPS


def test_likelihood_ratio():
    inside = np.array([[True, False], [False, True]] * 500)
    generator = np.random.Generator(np.random.PCG64(0))
    shadows = generator.standard_normal(inside.shape) + 2.0 * inside
    # log N(x; 2, 1) - log N(x; 0, 1) = 2 x - 2; means of 500 are known to 0.045, three of which times x are 0.3
    found = likelihood_ratio(np.array([2.0, 0.0]), shadows, inside)
    assert found == pytest.approx([2.0, -2.0], abs=0.5)


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_robust_ratio(loss):
    """Of a row that is three times as likely as under shadow models, beside rows of ratios 1, 2 and 1/2."""
    target, mean = np.array([0.6, 0.3, 0.4, 0.1]), np.array([0.2, 0.3, 0.2, 0.2])
    shadows = np.array([1.5 * mean, 0.5 * mean])  # whose mean it is
    phi = np.log if loss == "mse" else lambda p: np.log(p / (1 - p))
    assert robust_ratio(phi(target), phi(shadows), 1, loss) == pytest.approx([2 / 3])  # 3 / 1 and 3 / 0.5, not 3 / 2


def test_hits_are_above_nearly_all_others():
    assert hits_at(np.array([0.5, 2.0]), np.linspace(0, 1, 100)) == 0.5


def test_split_columns_are_refused_in_words(tmp_path):
    data = {"source": "wdbc", "silos": 4, "partition": "grid", "grid": [2, 2], "batch-size": 0}
    truth = recorded(tmp_path, protocol={"name": "cgd"}, data=data, run={"rounds": 1})
    with pytest.raises(ParameterError, match="columns are split"):
        ATTACK.given(truth)


def test_shadows_begin_with_drawn_weights_where_running_statistics_are_not_zero():
    from torch import nn

    from moretta.audit.evidence import shadows

    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    for parameter in model.parameters():  # as an attacker's model comes, beside statistics that are 1
        nn.init.zeros_(parameter)
    begun = shadows.start_of(model, 0)
    assert begun["0.weight"].std() > 0
    assert begun["1.weight"].tolist() == [1.0] * 4


@pytest.mark.parametrize(("protocol", "attack"), [("fedsgd", ATTACK), ("local", OF_LOCAL_MODELS)])
def test_labels_alone_tell_no_members(tmp_path, protocol, attack):
    data = {"partition": "dirichlet", "alpha": 0.1}
    truth = recorded(tmp_path, protocol={"name": protocol}, data=data, run={"rounds": 1})
    silo = truth.run.silos[0 if protocol == "local" else 1]
    y, member = candidates(truth, silo)[1].argmax(axis=1), candidates(truth, silo)[2]
    theirs = np.bincount(truth.rows(silo).y.argmax(axis=1), minlength=10)
    claim = {"score": theirs[y].astype(float), "loss": theirs[y], "robust": theirs[y], "models": np.array([1, 2, 10])}
    found = attack.score(claim, truth)
    assert np.ptp(theirs[y]) > 0  # labels differ, and in how many rows have them
    assert not found.succeeded
    assert found.score == 0.5
    assert sorted(y[member]) == sorted(y[~member])


def parties(theirs, nobodys, task):
    """A truth that has a silo's targets and those of rows that nobody trained on, of which x is the row's number."""
    both = [Rows(np.arange(len(y), dtype=float)[:, None], np.asarray(y)) for y in (theirs, nobodys)]
    return SimpleNamespace(rows=lambda silo: both[0], others=both[1], run=SimpleNamespace(task=task))


@pytest.mark.parametrize("columns", [1, 2])
def test_numbers_alone_tell_no_members(columns):
    draw = np.random.Generator(np.random.PCG64(6))
    # A silo of high numbers, of which the others have few.
    theirs, nobodys = draw.normal(1.0, 0.5, (400, columns)), draw.normal(0.0, 1.0, (400, columns))
    _, y, member, _ = candidates(parties(theirs, nobodys, "regression"), "silo-2")
    _, interval = auc(y[member, 0], y[~member, 0])
    assert auc(theirs[:, 0], nobodys[:, 0])[0] > 0.75
    assert interval[0] < 0.5 < interval[1]
    assert member.sum() == (~member).sum() > 50
    assert y[~member].min() >= theirs.min()


@pytest.mark.parametrize(
    ("theirs", "nobodys", "task"),
    [([0, 0, 1], [2, 2, 3], "classification"), ([[0.1], [0.2]], [[0.5], [0.6]], "regression")],
)
def test_no_label_in_common_is_refused_in_words(theirs, nobodys, task):
    with pytest.raises(ParameterError, match=r"have the labels of silo-2; .*; bring test rows"):
        candidates(parties(theirs, nobodys, task), "silo-2")


@pytest.mark.parametrize("keep", [[0.5], [0.97], [0.5, 0.97], [0.96, 0.99]])
def test_few_steps_too_have_a_model_for_each_of_the_seen_ones(keep: list[float]) -> None:
    """If the last rounds alone were recorded, the attack ended with an IndexError."""
    model, plan = nn.Linear(3, 2), shadows.TrainingPlan(100, 0.5, lambda step: 0.1, Training())
    begin, rows = shadows.start_of(model, 0), np.random.default_rng(0)
    x, y = (rows.normal(size=(20, size)).astype(np.float32) for size in (3, 2))
    made = shadows.train(model, begin, plan, nn.functional.mse_loss, x, y, keep, 10, 0, program=False)
    assert len(made) == len(keep) + 1
    assert [bool((at["weight"] == made[-1]["weight"]).all()) for at in made[:-1]] == [part > 0.9 for part in keep]


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_shadow_models_of_noised_updates_are_clipped_and_noised_once_a_round(noise: float) -> None:
    """As silos are under local epochs: three steps, then what they moved the model by is shortened, and noise added."""
    model = nn.Linear(40, 20)
    plan = shadows.TrainingPlan(9, 1.0, lambda step: 0.5, Training(), noise=noise, update_clip=0.05, each=3)
    taker, generator = shadows.Steps(model, plan, nn.functional.cross_entropy, program=False), np.random.default_rng(0)
    x, y = torch.tensor(generator.normal(size=(60, 40)), dtype=torch.float32), torch.tensor(np.arange(60) % 20)
    for round_ in range(3):
        before = torch.cat([one.detach().flatten() for one in model.parameters()])
        for step in range(3):
            taker.take(3 * round_ + step + 1, 0.5, x, y)
        moved = torch.cat([one.detach().flatten() for one in model.parameters()]) - before
        # 820 numbers: five deviations of their squares' sum, beside what the update itself has.
        wanted = 0.05**2 + len(moved) * noise**2
        assert abs(float(moved.square().sum()) - wanted) < 5 * noise**2 * (2 * len(moved)) ** 0.5 + 0.01 * noise + 1e-6
