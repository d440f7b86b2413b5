"""Runs that move one block of layers after the other: what each attack makes of them, or why it cannot."""

import numpy as np
import pytest
import torch
from recorded import attacked, claimed, recorded

from moretta import BAFFLE, Federation, Silo
from moretta.audit import auditor
from moretta.audit.attacks.baffle import (
    estimates,
    exposure,
    gradient_estimates,
    loss_differences,
    seed_choosing_server,
)
from moretta.audit.attacks.common import gradient_inversion, labels_from_head, membership_inference
from moretta.audit.evidence import uploads
from moretta.audit.evidence.truth import Truth
from moretta.errors import ParameterError

FIXED = {"rounds": 3, "insecure-secret-seed": 3}  # the same moves each time, so that no test fails by chance
BLOCKS = {"name": "baffle", "perturb": "blocks", "loss": "cross-entropy", "optimizer": "sgd", "learning-rate": 0.01}
UNITS = {**BLOCKS, "linear": "activations"}
OF_SCALARS = (gradient_estimates.K_RANK, loss_differences.ATTACK, seed_choosing_server.ATTACK)
SMALL = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3), nn.GroupNorm(2, 6)
        self.scale, self.head = nn.Parameter(torch.ones(54)), nn.Linear(54, 10)

    def forward(self, x):
        x = nn.functional.avg_pool2d(torch.sigmoid(self.norm(self.first(x.reshape(-1, 1, 8, 8)))), 2)
        return self.head(x.flatten(1) * self.scale)

def made():
    torch.manual_seed(3)
    return Small()
"""


def of_images(folder, protocol, **sections):
    (folder / "small.py").write_text(SMALL)
    return recorded(folder, run=FIXED, protocol=protocol, model={"source": "small:made", "hidden": None}, **sections)


@pytest.fixture(autouse=True)
def _little_effort(monkeypatch):
    monkeypatch.setattr(gradient_estimates, "STARTS", 1)
    monkeypatch.setattr(gradient_estimates, "STEPS", 10)
    monkeypatch.setattr(loss_differences, "DRAWS", loss_differences.LEAST)
    monkeypatch.setattr(seed_choosing_server, "SEEDS", seed_choosing_server.LEAST)


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """A run of which all blocks have scalars, and channels of the convolution move together."""
    return of_images(tmp_path_factory.mktemp("moved"), {**BLOCKS, "k": {"first": 4, "head": 64, "*": 16}})


@pytest.fixture(scope="module")
def of_units(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("units"), run=FIXED, protocol=UNITS)


def rounds_of(truth):
    forward = estimates.forward_at(truth)
    return forward, estimates.seeded_rounds(
        truth.run, [one for number in truth.recorded for one in truth.heard("server", number)], forward
    )


def test_an_estimate_is_put_together_from_what_moves_tell(moved):
    forward, seen = rounds_of(moved)
    moves = seen[1].directions
    assert {block.kind for block in moves.recipe.blocks} == {"channels", "rank-one", "anew"}
    generator = np.random.Generator(np.random.PCG64(1))
    g, x = generator.standard_normal(moves.size), generator.standard_normal(moves.count)
    along = moves.along({name: torch.tensor(part) for name, part in forward.layout.split(g).items()}).numpy()
    shares = np.concatenate([np.full(block.scalars, 1 / block.repeats) for block in moves.recipe.blocks])
    assert g @ moves.estimate(x) == pytest.approx(along @ (shares * x))


def test_what_was_opened_is_what_messages_come_to(moved):
    found, heard = estimates.opened(moved, (1, 2)), [one for n in moved.recorded for one in moved.heard("server", n)]
    for number in (1, 2):
        sums = uploads.from_heard(moved.run, heard, number).total().means["scalars"]
        np.testing.assert_allclose(found[f"opened/{number}"], sums[:-1], rtol=1e-3, atol=1e-3)  # float32 over sigma


def test_the_cosine_is_that_of_the_blocks_theory(moved):
    found = attacked(gradient_estimates.K_RANK, moved)
    assert found.succeeded
    assert found.score == pytest.approx(found.figures["cosine_expected"], rel=0.25)
    assert found.figures["parameters"] == estimates.forward_at(moved).layout.size
    assert "row_error" in found.figures


def test_loss_differences_of_moves_are_told_from_noise(moved):
    assert attacked(loss_differences.ATTACK, moved).succeeded


def test_no_seed_of_moves_was_chosen(moved):
    found = attacked(seed_choosing_server.ATTACK, moved)
    assert not found.succeeded
    others = claimed(seed_choosing_server.ATTACK, moved)["others"]
    assert others.mean() == pytest.approx(1.0, abs=4 * others.std() / np.sqrt(len(others)))


def test_a_row_s_scalars_are_as_long_as_moves_say(moved):
    """Of the gradient of one tensor, the mean of |x|^2 over seeds is K |g|^2, and the estimate's noise is by K too."""
    forward, seen = rounds_of(moved)
    recipe, layout = seen[1].directions.recipe, forward.layout
    moves = exposure.moves(moved.case({}, {"x": moved.rows("silo-1").x}, thorough=False))
    assert len({*moves.values()}) > 2
    generator = np.random.Generator(np.random.PCG64(1))
    for name, shape in layout.shapes.items():
        gradient = {other: torch.zeros(size, dtype=torch.float64) for other, size in layout.shapes.items()}
        gradient[name] = torch.tensor(generator.standard_normal(shape))
        draws = [estimates.Moves.of(recipe, layout, bytes([seed]) * 32).along(gradient) for seed in range(60)]
        squares = np.array([float(x.square().sum()) for x in draws])
        wanted = moves[name] * float(gradient[name].square().sum())
        assert squares.mean() == pytest.approx(wanted, abs=5 * squares.std() / np.sqrt(60) + 1e-9)


@pytest.mark.parametrize(
    ("protocol", "k"), [({**BLOCKS, "k": {"*": 4}}, 4), ({"k": 8}, 8), ({"k": 8, "form": "twice-forward"}, 16)]
)
def test_shadow_models_are_noised_by_what_is_clipped(tmp_path, monkeypatch, protocol, k):
    noised = {"name": "baffle", "loss": "cross-entropy", "dp-noise": 1.0, "dp-clip": 2.0}
    truth = recorded(tmp_path, run=FIXED, protocol={**noised, **protocol}, secure_aggregation={"scheme": "none"})
    plans = []
    monkeypatch.setattr(membership_inference, "ratios", lambda case, plan, *others: plans.append(plan))
    claimed(membership_inference.ATTACK, truth)
    (plan,) = plans
    assert (plan.row_clip, {*plan.moves.values()}) == (2.0, {k})
    assert plan.noise == pytest.approx(2.0 * np.sqrt(3))


def test_the_server_opens_the_gradient_of_layers_that_move_by_unit(of_units):
    found = attacked(gradient_estimates.OWN, of_units)
    assert found.score > 0.99
    assert found.figures["cosine_expected"] == 1.0
    assert attacked(labels_from_head.ATTACK, of_units).figures["exact"] == 1.0


def test_layers_that_move_by_unit_beside_blocks_with_scalars(tmp_path):
    truth = of_images(tmp_path, UNITS)
    found = attacked(gradient_estimates.OWN, truth)
    assert found.score > 0.99
    assert found.figures["parameters"] == 550
    moves = next(iter(rounds_of(truth)[1].values())).directions
    assert int(moves.covered.sum()) == estimates.forward_at(truth).layout.size - 550
    assert attacked(labels_from_head.ATTACK, truth).figures["exact"] == 1.0


def test_a_row_is_read_off_the_estimate_of_a_layer(tmp_path):
    clear = {"scheme": "none"}
    truth = recorded(tmp_path, run=FIXED, protocol=UNITS, data={"batch-size": 1}, secure_aggregation=clear)
    found = attacked(gradient_inversion.ATTACK, truth)
    assert found.succeeded
    assert found.score > 0.9


def test_own_moves_make_an_estimate_of_all(tmp_path):
    truth = of_images(tmp_path, {**UNITS, "directions": "own"})
    found = attacked(gradient_estimates.OWN, truth)
    assert found.score == pytest.approx(found.figures["cosine_expected"], rel=0.2)
    assert attacked(labels_from_head.ATTACK, truth).figures["exact"] == 1.0


def test_a_model_whose_layers_all_move_by_unit_has_no_loss_differences(of_units):
    for attack in OF_SCALARS:
        with pytest.raises(ParameterError, match="silos upload no loss differences"):
            attack.given(of_units)


def test_a_model_without_linear_layers_by_unit_has_no_estimate(tmp_path):
    truth = of_images(tmp_path, {**UNITS, "trainable": ["first", "norm"]})
    for attack in (gradient_estimates.OWN, labels_from_head.ATTACK, gradient_inversion.OF_SUM):
        with pytest.raises(ParameterError, match="moves unit by unit"):
            attack.given(truth)


@pytest.mark.parametrize(("protocol", "scheme", "said"), [
    (BLOCKS, "pairwise", "no layer's gradient"),
    ({**UNITS, "local-epochs": 1}, "pairwise", "several steps"),
    (UNITS, "additive-shares", "from shares"),
])  # fmt: skip
def test_where_no_gradient_can_be_read(tmp_path, protocol, scheme, said):
    run = recorded(tmp_path, run={**FIXED, "rounds": 1}, protocol=protocol, secure_aggregation={"scheme": scheme}).run
    for attack in (gradient_inversion.OF_SUM, labels_from_head.ATTACK):
        assert said in attack.fits(run)
    assert said in exposure.why_not(run)
    assert gradient_estimates.fits_own(run)


def test_noised_scalars_of_blocks_are_opened_from_messages(tmp_path):
    truth = recorded(tmp_path, run={**FIXED, "rounds": 2}, protocol={**BLOCKS, "dp-noise": 1e-6, "dp-clip": 1e3})
    moves = rounds_of(truth)[1][2].directions
    assert estimates.opened(truth, (2,))["opened/2"].shape == (moves.count,)


def test_an_audit_in_processes_of_a_model_from_python(tmp_path):
    made = recorded(tmp_path, run={"rounds": 1})
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 8), torch.nn.Sigmoid(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 10)
    )
    silos = [Silo(one.name, one.x, one.y) for one in made.federation.silos]
    protocol = BAFFLE(perturb="blocks", linear="activations", loss="cross-entropy")
    federation = Federation(model, silos, protocol, test=made.federation.test, out=tmp_path / "own", record_views=True)
    federation.train(2, 5)
    truth = Truth(tmp_path / "own", federation, 2, 5)
    chosen = [seed_choosing_server.ATTACK, gradient_estimates.OWN, labels_from_head.ATTACK]
    found = auditor.audit(truth.folder, truth.federation, truth.planned, truth.seed, chosen=chosen)
    assert not found.record["not_run"]
    scores = {one["attack"]: one["score"] for one in found.record["attacks"]}
    assert min(scores["own-estimate"], scores["labels-from-head"]) > 0.95
