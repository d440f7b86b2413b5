"""The canonical form: one for all networks that differ by scales and permutations."""

import numpy as np
import pytest
import torch
from torch import nn

from moretta.audit.attacks.pbpfl import canonical as form
from moretta.audit.attacks.pbpfl import lemma_six
from moretta.audit.attacks.pbpfl.canonical_form import likeness, step_of
from moretta.models import catalogue
from moretta.protocols.pbpfl.scales import ScalePlan
from moretta.secure_aggregation.keystream import SecretRoot

SMALL = {
    "mlp": ((12,), {"hidden": [9, 7]}),
    "resnet": ((3, 8, 8), {}),
}


def network(source, seed):
    shape, arguments = SMALL[source]
    model = catalogue.build(source, inputs=shape, outputs=4, seed=seed, **arguments)
    plan = ScalePlan.of(model, (torch.zeros(2, *shape),))
    return plan, {name: one.detach().numpy() for name, one in model.named_parameters()}


def key(plan, number):
    return plan.draw(SecretRoot(bytes(32)).stream("key", number))


@pytest.mark.parametrize("source", ["mlp", "resnet"])
@pytest.mark.parametrize("part", [form.whole, form.trunk])
def test_one_form_of_all_keys(source, part):
    plan, weights = network(source, 3)
    true = form.canonical(plan, part(plan, weights))
    for number in range(2):
        noisy = form.canonical(plan, part(plan, plan.perturb(weights, key(plan, number))))
        found = form.matched(plan, noisy, true)
        for name in true:
            # W^ is rounded to float32 once, 2^-24 relative in every entry, and the form moves as much.
            np.testing.assert_allclose(found[name], true[name], rtol=1e-5, atol=1e-6 * np.abs(true[name]).max())


class Recurrent(nn.Module):
    """Two layers, whose hidden channels have signs."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.layer = nn.Linear(3, 6), kind(6, 7, num_layers=2, batch_first=True)
        self.last, self.head = nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.last(self.layer(self.first(x).relu())[0].mean(1)).relu())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("part", [form.whole, form.trunk])
def test_one_form_of_all_keys_where_channels_have_signs(kind, part):
    torch.manual_seed(3)
    model = Recurrent(kind)
    plan = ScalePlan.of(model, (torch.randn(2, 5, 3),))
    weights = {name: one.detach().double().numpy() for name, one in model.named_parameters()}
    true = form.canonical(plan, part(plan, weights))
    for number in range(2):
        drawn = key(plan, number)
        assert {*drawn.scales[list(plan.signs)]} == {1.0, -1.0}
        found = form.matched(plan, form.canonical(plan, part(plan, plan.perturb(weights, drawn))), true)
        for name in true:
            np.testing.assert_allclose(found[name], true[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_step_is_followed_where_channels_have_signs(kind):
    torch.manual_seed(3)
    model = Recurrent(kind)
    plan = ScalePlan.of(model, (torch.randn(2, 5, 3),))
    before = {name: one.detach().double().numpy() for name, one in model.named_parameters()}
    generator = np.random.Generator(np.random.PCG64(1))
    after = {name: value + 0.01 * generator.normal(size=value.shape) for name, value in before.items()}
    noisy = [plan.perturb(tensors, key(plan, number)) for number, tensors in enumerate((before, after))]
    followed, shuffled = likeness(plan, step_of(plan, *noisy), step_of(plan, before, after))
    assert followed > 0.999 > 0.5 > shuffled


def test_signs_count_in_tensors_that_follow_none():
    torch.manual_seed(3)
    model = Recurrent(nn.LSTM)
    plan = ScalePlan.of(model, (torch.randn(2, 5, 3),))
    true = {name: one.detach().double().numpy() for name, one in model.named_parameters()}
    noisy = lemma_six._seen(plan, plan.perturb(true, key(plan, 0)))

    def signs(**turned):
        return lemma_six._distances(plan, noisy, lemma_six._seen(plan, {**true, **turned}))[0]

    assert signs() == 0.0
    assert signs(**{"first.weight": np.abs(true["first.weight"])}) > 0.0
    assert signs(**{"layer.weight_hh_l0": np.abs(true["layer.weight_hh_l0"])}) == 0.0


def test_another_network_has_another_form():
    plan, weights = network("mlp", 3)
    other = network("mlp", 4)[1]
    one, two = (form.canonical(plan, form.whole(plan, tensors)) for tensors in (weights, other))
    assert form.cosine(form.matched(plan, two, one), one) < 0.8


def test_form_is_in_balance():
    plan, weights = network("mlp", 3)
    found = form.canonical(plan, form.whole(plan, weights))
    into = (found["0.weight"] ** 2).sum(1) + found["0.bias"] ** 2
    np.testing.assert_allclose(into, (found["2.weight"] ** 2).sum(0), rtol=1e-8)


def test_without_the_head_what_feeds_it_has_norm_one():
    plan, weights = network("mlp", 3)
    found = form.canonical(plan, form.trunk(plan, weights))
    np.testing.assert_allclose((found["2.weight"] ** 2).sum(1) + found["2.bias"] ** 2, 1.0, rtol=1e-8)


def test_scales_alone_leave_the_function():
    plan, weights = network("mlp", 3)
    shape, arguments = SMALL["mlp"]
    model = catalogue.build("mlp", inputs=shape, outputs=4, **arguments).double()
    x = torch.randn(5, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outputs = []
    for tensors in (form.whole(plan, weights), form.canonical(plan, form.whole(plan, weights))):
        model.load_state_dict({name: torch.tensor(value) for name, value in tensors.items()})
        outputs.append(model(x))
    torch.testing.assert_close(*outputs)


def test_channels_that_are_cut_off_do_no_harm():
    plan, weights = network("mlp", 3)
    weights = {name: value.copy() for name, value in weights.items()}
    weights["0.weight"][0], weights["0.bias"][0] = 0.0, 0.0  # nothing comes in
    weights["2.weight"][:, 1] = 0.0  # nothing goes out
    weights["0.weight"][2], weights["0.bias"][2], weights["2.weight"][:, 2] = 0.0, 0.0, 0.0
    found = form.canonical(plan, form.whole(plan, weights))
    assert all(np.isfinite(value).all() for value in found.values())


def test_structure_travels_as_arrays():
    plan, weights = network("resnet", 3)
    again = form.plan_from(form.structure(plan))
    noisy = plan.perturb(weights, key(plan, 0))
    assert again.head == plan.head
    for name, value in again.perturb(weights, key(plan, 0)).items():
        np.testing.assert_array_equal(value, noisy[name])
