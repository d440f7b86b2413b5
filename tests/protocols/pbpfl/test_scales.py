"""Perturbed models are the same functions, and R o (their gradients) are the true gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from moretta.errors import ParameterError
from moretta.protocols.pbpfl.perturbation import Perturbation
from moretta.protocols.pbpfl.scales import ScaleKey, ScalePlan
from moretta.secure_aggregation.keystream import SecretRoot


class Numbers:
    """A stand-in for a keystream."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def uniform(self, count: int) -> NDArray[np.float64]:
        return self.generator.random(count)

    def permutation(self, count: int) -> NDArray[np.int64]:
        return self.generator.permutation(count)


class Function(nn.Module):
    """A model from named layers and a function of (layers, inputs)."""

    def __init__(self, forward: Callable[..., Tensor], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def jitter(model: nn.Module) -> nn.Module:
    """Return the model in float64 with no parameter left at a round number."""
    model = model.double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def step(
    model: nn.Module, tensors: dict[str, Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return loss, gradients and buffers after one batch in train mode, with fixed randomness."""
    torch.manual_seed(3)
    names = [name for name, _ in model.named_parameters()]
    leaves = {name: tensors[name].detach().clone().requires_grad_() for name in names}
    buffers = {name: tensors[name].clone() for name, _ in model.named_buffers()}
    outputs = functional_call(model.train(), {**leaves, **buffers}, tuple(inputs))
    target = torch.linspace(-1, 1, outputs.numel(), dtype=torch.float64).reshape(outputs.shape)
    loss = 0.5 * (outputs - target).square().sum(1).mean()
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True, allow_unused=True)
    return loss.detach(), dict(zip(names, gradients, strict=True)), buffers


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).double() for tensor in tensors.values()])


def assert_exact(model: nn.Module, inputs: Sequence[Tensor], seed: int = 0) -> ScalePlan:
    """Check outputs, gradients and buffers under a random key, and the loss bit by bit under powers of two."""
    model = jitter(model)
    before = copy.deepcopy(model.state_dict())
    plan = ScalePlan.of(model, inputs)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    true, key = state(model), plan.draw(Numbers(seed))
    noisy = plan.perturb(true, key)
    with torch.no_grad():
        wanted = functional_call(model.eval(), true, tuple(inputs))
        torch.testing.assert_close(functional_call(model, noisy, tuple(inputs)), wanted, rtol=1e-10, atol=1e-10)
    loss, gradients, buffers = step(model, true, inputs)
    noisy_loss, noisy_gradients, noisy_buffers = step(model, noisy, inputs)
    assert abs(noisy_loss - loss) <= 1e-10 * abs(loss)
    found = plan.recover(noisy_gradients, key)
    assert (flat(found) - flat(gradients)).norm() <= 1e-10 * flat(gradients).norm()
    if buffers:
        torch.testing.assert_close(plan.recover_buffers(noisy_buffers, key), buffers, rtol=1e-10, atol=1e-12)
    powers = plan.draw_powers_of_two(Numbers(seed))
    assert torch.equal(step(model, plan.perturb(true, powers), inputs)[0], loss)
    exponents = np.concatenate([np.log2(plan.multiplier(name, powers)).ravel() for name in true])
    assert set(exponents) <= {-2.0, -1.0, 0.0, 1.0, 2.0}
    return plan


def images(*shape: int) -> tuple[Tensor, ...]:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)


def tokens() -> tuple[Tensor, ...]:
    return (torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(1)),)


def mlp(bias: bool) -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 8, bias=bias), nn.ReLU(), nn.Linear(8, 6, bias=bias), nn.ReLU(), nn.Linear(6, 3, bias=bias)
    )


def classify(features: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, 3)]


def residual(shortcut: str) -> nn.Module:
    def forward(m: Function, x: Tensor) -> Tensor:
        x = F.relu(m.n0(m.c0(x)))
        y = F.relu(m.n1(m.c1(x)), inplace=True)
        y = m.n2(m.c2(y))
        x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2)) if shortcut == "A" else m.shortcut(x)
        x += y
        return m.head(F.relu(x).mean((2, 3)))

    return Function(
        forward,
        c0=nn.Conv2d(3, 4, 3, padding=1, bias=False),
        n0=nn.BatchNorm2d(4),
        c1=nn.Conv2d(4, 8, 3, stride=2, padding=1),
        n1=nn.BatchNorm2d(8),
        c2=nn.Conv2d(8, 8, 3, padding=1),
        n2=nn.BatchNorm2d(8),
        shortcut=nn.Conv2d(4, 8, 1, stride=2),
        head=nn.Linear(8, 3),
    )


def dense() -> nn.Module:
    def forward(m: Function, x: Tensor) -> Tensor:
        features = [m.first(x)]
        for layer in (m.one, m.two):
            features.append(layer(torch.cat(features, 1)))
        return m.rest(torch.cat(features, 1))

    def layer(channels: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 4, 3, padding=1))

    rest = nn.Sequential(nn.BatchNorm2d(12), nn.ReLU(), *classify(12))
    return Function(forward, first=nn.Conv2d(3, 4, 3), one=layer(4), two=layer(8), rest=rest)


def shuffle() -> nn.Module:
    def forward(m: Function, x: Tensor) -> Tensor:
        x = m.stem(x)
        kept, worked = x.chunk(2, dim=1)
        x = torch.cat([kept, m.branch(worked)], 1)
        batch, channels, height, width = x.shape
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)
        return m.rest(m.grouped(x))

    branch = nn.Sequential(
        nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 4, 1)
    )
    grouped = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 12, 3, groups=4), nn.ReLU(), nn.ChannelShuffle(3))
    stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    return Function(forward, stem=stem, branch=branch, grouped=grouped, rest=nn.Sequential(*classify(12)))


def squeeze_excitation() -> nn.Module:
    def forward(m: Function, x: Tensor) -> Tensor:
        x = m.stem(x)
        gate = torch.sigmoid(m.up(F.relu(m.down(F.adaptive_avg_pool2d(x, 1)))))
        return m.rest(F.relu(m.after(x * gate)))

    stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    gates = {"down": nn.Conv2d(8, 2, 1), "up": nn.Conv2d(2, 8, 1)}
    return Function(forward, stem=stem, after=nn.Conv2d(8, 6, 1), rest=nn.Sequential(*classify(6)), **gates)


def layer_scale() -> nn.Module:
    def forward(m: Function, x: Tensor) -> Tensor:
        x = m.stem(x)
        y = m.up(m.norm(m.depthwise(x).permute(0, 2, 3, 1)))
        y = m.gamma * m.down(F.gelu(y)).permute(0, 3, 1, 2)
        return m.head(F.relu(x + y).mean((2, 3)))

    return Function(
        forward,
        stem=nn.Sequential(nn.Conv2d(3, 8, 2, 2), nn.GroupNorm(4, 8)),
        depthwise=nn.Conv2d(8, 8, 3, padding=1, groups=8),
        norm=nn.LayerNorm(8),
        up=nn.Linear(8, 16),
        down=nn.Linear(16, 8),
        gamma=nn.Parameter(1e-6 * torch.ones(8, 1, 1)),
        head=nn.Linear(8, 3),
    )


def transformer(**options: bool | str | float) -> nn.Module:
    def forward(m: Function, x: Tensor) -> Tensor:
        x = m.table(x)
        x = torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.position
        return m.head(m.encoder(x)[:, 0])

    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
    return Function(
        forward,
        table=nn.Embedding(11, 8, padding_idx=0),
        token=nn.Parameter(torch.zeros(1, 1, 8)),
        position=nn.Parameter(torch.zeros(1, 6, 8)),
        encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        head=nn.Linear(8, 3),
    )


def own_attention() -> nn.Module:
    def forward(m: Function, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in m.qkv(m.norm(x)).chunk(3, -1))
        weights = (q @ k.transpose(-2, -1) / 2 + m.bias).softmax(-1)
        return m.head((weights @ v).transpose(1, 2).flatten(2).mean(1))

    bias = nn.Parameter(torch.zeros(2, 5, 5))
    return Function(forward, norm=nn.RMSNorm(8), qkv=nn.Linear(8, 24), bias=bias, head=nn.Linear(8, 3))


def flash_attention() -> nn.Module:
    def forward(m: Function, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(len(x), 5, 2, 4).transpose(1, 2) for layer in (m.q, m.k, m.v))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return m.head(x.transpose(1, 2).reshape(len(x), 5, 8)[:, -1])

    return Function(forward, **{name: nn.Linear(8, 8) for name in "qkv"}, head=nn.Linear(8, 3))


def tied() -> nn.Module:
    def forward(m: Function, x: Tensor) -> Tensor:
        return m.head(F.relu(m.norm(m.body(m.table(x).mean(1)))))

    model = Function(
        forward,
        table=nn.Embedding(11, 8),
        body=nn.Linear(8, 8),
        norm=nn.LayerNorm(8),
        head=nn.Linear(8, 11, bias=False),
    )
    model.head.weight = model.table.weight  # type: ignore[union-attr]
    return model


def twice() -> nn.Module:
    def forward(m: Function, x: Tensor) -> Tensor:
        return m.head(F.relu(m.shared(F.relu(m.shared(F.relu(m.first(x)))))))

    return Function(forward, first=nn.Linear(5, 8), shared=nn.Linear(8, 8), head=nn.Linear(8, 3))


def two_inputs() -> nn.Module:
    def forward(m: Function, x: Tensor, y: Tensor) -> Tensor:
        return m.head(torch.cat([F.relu(m.left(x)), F.leaky_relu(m.right(y))], 1))

    return Function(forward, left=nn.Linear(5, 4), right=nn.Linear(3, 6), head=nn.Linear(10, 2))


def by_hand() -> nn.Module:
    def forward(m: Function, x: Tensor) -> Tensor:
        x = F.relu(x @ m.first + m.shift)
        x = (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-3)
        x = m.gain * x + m.offset
        return m.head(torch.where(x > 0, x, 0.1 * x))

    sizes = {"first": (5, 8), "shift": (8,), "gain": (8,), "offset": (8,)}
    parameters = {name: nn.Parameter(torch.ones(size)) for name, size in sizes.items()}
    return Function(forward, **parameters, head=nn.Linear(8, 3))


class Odd(nn.Module):
    """Vectors that cannot go end to end with the others: without entries, without an axis, of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("number", torch.tensor(2.5))
        self.register_buffer("counts", torch.arange(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.body(x))) * self.gain)


def conv_net(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 2), norm(6), nn.PReLU(6),
        nn.Flatten(), nn.Linear(24, 7), nn.Dropout(0.3), nn.ReLU(), nn.Linear(7, 3),
    )  # fmt: skip


X = images(4, 3, 8, 8)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "mlp": (lambda: mlp(True), images(4, 5)),
    "mlp without bias": (lambda: mlp(False), images(4, 5)),
    "convolutions": (lambda: conv_net(lambda _: nn.Identity()), X),
    "batch norm": (lambda: conv_net(nn.BatchNorm2d), X),
    "batch norm without affine": (lambda: conv_net(lambda c: nn.BatchNorm2d(c, affine=False)), X),
    "means of zero": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False), nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8),
            nn.ReLU(), *classify(8),
        ),
        X,
    ),
    "group norm": (lambda: conv_net(lambda c: nn.GroupNorm(2, c)), X),
    "instance norm": (lambda: conv_net(lambda c: nn.InstanceNorm2d(c, affine=True)), X),
    "residual A": (lambda: residual("A"), X),
    "residual B": (lambda: residual("B"), X),
    "dense": (dense, X),
    "shuffle": (shuffle, X),
    "squeeze and excitation": (squeeze_excitation, X),
    "layer scale": (layer_scale, X),
    "transformer": (lambda: transformer(norm_first=False, dropout=0.0), tokens()),
    "transformer, norm first": (lambda: transformer(norm_first=True, activation="gelu"), tokens()),
    "own attention": (own_attention, images(4, 5, 8)),
    "flash attention": (flash_attention, images(4, 5, 8)),
    "odd vectors": (Odd, images(4, 5)),
    "tied": (tied, tokens()),
    "twice": (twice, images(4, 5)),
    "two inputs": (two_inputs, (*images(4, 5), *images(4, 3))),
    "by hand": (by_hand, images(4, 5)),
    "transposed": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(3, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 8, 2, groups=2), nn.ReLU(), *classify(8)
        ),
        X,
    ),
    "one dimension": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 6, 3, padding=1, padding_mode="circular"), nn.LeakyReLU(), nn.AvgPool1d(2),
            nn.Conv1d(6, 6, 2), nn.SiLU(), nn.Flatten(), nn.Linear(12, 3),
        ),
        images(4, 3, 7),
    ),
    "three dimensions": (
        lambda: nn.Sequential(
            nn.Conv3d(2, 6, 2), nn.BatchNorm3d(6), nn.ReLU(), nn.Upsample(scale_factor=2), nn.MaxPool3d(2),
            nn.Conv3d(6, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3),
        ),
        images(4, 2, 3, 3, 3),
    ),
    "recurrent": (
        lambda: Function(
            lambda m, x: m.head(F.relu(m.body(m.lstm(x)[0][:, -1]))),
            lstm=nn.LSTM(5, 6, batch_first=True),
            body=nn.Linear(6, 7),
            head=nn.Linear(7, 3),
        ),
        images(4, 3, 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_perturbed_model_is_the_same_function_and_its_gradients_come_back(name: str) -> None:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    plan = assert_exact(build(), inputs)
    assert plan.free >= 4


def plan_of(name: str) -> ScalePlan:
    build, inputs = MODELS[name]
    return ScalePlan.of(build(), inputs)


def test_an_mlp_has_one_scale_per_hidden_unit_and_permutes_both_sides() -> None:
    plan = plan_of("mlp")
    assert (plan.free, plan.blocks, plan.forced) == (14, (8, 6), ())
    assert sum(len(pattern.shuffles) for pattern in (*plan.parameters.values(), *plan.buffers.values())) == 6
    assert (plan.head.module, plan.head.weight, plan.head.bias) == ("4", "4.weight", "4.bias")
    assert (plan.head.outputs, plan.head.inputs, plan.head.tied) == (3, 6, False)
    key = plan.draw(Numbers(0))
    first, second = key.scales[:8], key.scales[8:]
    np.testing.assert_allclose(plan.multiplier("2.weight", key), second[:, None] / first[None, :], rtol=1e-15)
    np.testing.assert_allclose(plan.multiplier("4.weight", key), 1 / second[None, :], rtol=1e-15)
    np.testing.assert_array_equal(plan.multiplier("4.bias", key).ravel(), [1.0])


def test_what_is_forced_is_told_with_the_layer() -> None:
    forced = {one.tensor: one.because for one in plan_of("batch norm").forced}
    assert forced == {
        "0.weight": "batch_norm in 1 (BatchNorm2d) needs scale 1",
        "0.bias": "batch_norm in 1 (BatchNorm2d) needs scale 1",
        "4.weight": "batch_norm in 5 (BatchNorm2d) needs scale 1",
        "4.bias": "batch_norm in 5 (BatchNorm2d) needs scale 1",
        "6.weight": "it stands between tensors of scale 1",
    }
    forced = {one.tensor: one.because for one in plan_of("recurrent").forced}
    weights = [f"lstm.{part}_l0" for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    assert forced == dict.fromkeys(weights, "it follows only signs, which hide no size")


def test_a_tied_head_is_told() -> None:
    plan = plan_of("tied")
    assert plan.head.tied
    assert plan.aliases == {"head.weight": "table.weight"}
    key = plan.draw(Numbers(0))
    weight = torch.randn(11, 8)
    both = plan.perturb({"table.weight": weight, "head.weight": weight}, key)
    assert torch.equal(both["table.weight"], both["head.weight"])


def test_queries_and_keys_have_inverse_scales_and_one_order() -> None:
    plan = plan_of("own attention")
    key = plan.draw(Numbers(0))
    scale = plan.multiplier("qkv.bias", key)
    np.testing.assert_allclose(scale[:8] * scale[8:16], 1.0)
    order = plan.perturb({"qkv.bias": torch.arange(24.0)}, plan_without_scales(plan, key))["qkv.bias"]
    assert torch.equal(order[:8] + 8, order[8:16])
    assert not torch.equal(order[:8], torch.arange(8.0))


@pytest.mark.parametrize("name", MODELS)
def test_vectors_that_go_together_follow_a_key_as_each_does_alone(name: str) -> None:
    build, inputs = MODELS[name]
    model = jitter(build())
    plan, true = ScalePlan.of(model, inputs), state(model)
    key = plan.draw(Numbers(4))
    together = plan.perturb(true, key)
    back = plan.recover(together, key)
    assert list(together) == list(back) == list(true)
    for one, value in true.items():
        assert torch.equal(plan.perturb({one: value}, key)[one], together[one])
        assert torch.equal(plan.recover({one: together[one]}, key)[one], back[one])


def plan_without_scales(plan: ScalePlan, key: ScaleKey) -> ScaleKey:
    return ScaleKey(plan.identity().scales, key.permutations)


def test_dropout_keeps_channels_in_their_places() -> None:
    def build(p: float) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(p), nn.Linear(8, 3))

    assert ScalePlan.of(build(0.5), images(4, 5)).blocks == ()
    assert ScalePlan.of(build(0.0), images(4, 5)).blocks == (8,)


def test_a_key_is_secret_bounded_and_reproducible() -> None:
    plan = plan_of("mlp")
    key, again = (plan.draw(SecretRoot.insecure(7, "server").stream("key", 1)) for _ in range(2))
    np.testing.assert_array_equal(key.scales, again.scales)
    assert key.scales.min() >= 0.5
    assert key.scales.max() <= 2.0
    assert repr(key) == "ScaleKey(<redacted>)"
    assert set(plan.draw_powers_of_two(Numbers(0)).scales) == {0.5, 1.0, 2.0}


def test_the_identity_changes_nothing_and_dtypes_are_kept() -> None:
    plan = plan_of("batch norm")
    model = conv_net(nn.BatchNorm2d)
    same = plan.perturb(model.state_dict(), plan.identity())
    assert all(torch.equal(same[name], tensor) for name, tensor in model.state_dict().items())
    noisy = plan.perturb(model.state_dict(), plan.draw(Numbers(0)))
    assert {name: tensor.dtype for name, tensor in noisy.items()} == {
        name: tensor.dtype for name, tensor in model.state_dict().items()
    }


def test_gradients_may_be_arrays() -> None:
    plan = plan_of("mlp")
    key = plan.draw(Numbers(0))
    gradient = np.ones((6, 8))
    found = plan.recover({"2.weight": gradient}, key)["2.weight"]
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, plan.multiplier("2.weight", key))


def test_vectors_of_another_length_are_refused_by_name() -> None:
    """Even where two wrong lengths add up to the right one, so that end to end they would seem to fit."""
    plan = plan_of("mlp")
    assert [plan.parameters[name].shape for name in ("0.bias", "2.bias")] == [(8,), (6,)]
    wrong = {"0.bias": torch.ones(7), "2.bias": torch.ones(7)}
    for call in (plan.perturb, plan.recover):
        with pytest.raises(ParameterError, match=r"`0\.bias`: expected the shape \(8,\), got \(7,\)"):
            call(wrong, plan.identity())


def test_scales_of_another_name_are_refused() -> None:
    with pytest.raises(ParameterError, match='scales = "powers_of_two": expected continuous or powers-of-two'):
        Perturbation(plan_of("mlp"), 1, "probabilities", "powers_of_two")  # type: ignore[arg-type]


def test_unknown_names_and_foreign_keys_are_errors() -> None:
    plan = plan_of("mlp")
    with pytest.raises(ParameterError, match="nowhere"):
        plan.perturb({"nowhere": torch.ones(1)}, plan.identity())
    with pytest.raises(ParameterError, match="another model"):
        plan.perturb({}, plan_of("tied").identity())


# Random graphs of images with 4 channels: every step takes earlier tensors and gives a new one.

STEPS: dict[str, Callable[[nn.ModuleList, list[Tensor], int], Tensor]] = {
    "conv": lambda layers, seen, i: layers[i % 4](seen[i % len(seen)]),
    "depthwise": lambda layers, seen, i: layers[4](seen[i % len(seen)]),
    "grouped": lambda layers, seen, i: layers[5](seen[i % len(seen)]),
    "batch norm": lambda layers, seen, i: layers[6](seen[i % len(seen)]),
    "group norm": lambda layers, seen, i: layers[7](seen[i % len(seen)]),
    "add": lambda layers, seen, i: seen[-1] + seen[i % len(seen)],
    "concatenate": lambda layers, seen, i: layers[8](torch.cat([seen[-1], seen[i % len(seen)]], 1)),
    "relu": lambda layers, seen, i: F.relu(seen[i % len(seen)]),
    "gelu": lambda layers, seen, i: F.gelu(seen[i % len(seen)]),
    "pool": lambda layers, seen, i: F.avg_pool2d(seen[-1], 3, stride=1, padding=1),
    "gate": lambda layers, seen, i: seen[-1] * torch.sigmoid(seen[i % len(seen)].mean((2, 3), keepdim=True)),
    "product": lambda layers, seen, i: seen[-1] * seen[i % len(seen)],
    "halves": lambda layers, seen, i: torch.cat(seen[i % len(seen)].chunk(2, 1)[::-1], 1),
    "shuffle": lambda layers, seen, i: seen[-1].unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2),
    "largest channel": lambda layers, seen, i: seen[-1] - seen[i % len(seen)].amax(1, keepdim=True),
    "unknown": lambda layers, seen, i: torch.cumsum(seen[i % len(seen)], 2),
    "prelu": lambda layers, seen, i: layers[9](seen[i % len(seen)]),
}  # fmt: skip


class RandomGraph(nn.Module):
    def __init__(self, steps: list[tuple[str, int]]) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(4, 4, 3, padding=1, bias=i % 2 == 0) for i in range(4)]
        special = [nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 4, 1, groups=2)]
        norms = [nn.BatchNorm2d(4), nn.GroupNorm(2, 4)]
        self.layers = nn.ModuleList([*convolutions, *special, *norms, nn.Conv2d(8, 4, 1), nn.PReLU(4)])
        self.stem, self.head, self.steps = nn.Conv2d(3, 4, 1), nn.Linear(16, 3), steps

    def forward(self, x: Tensor) -> Tensor:
        seen = [self.stem(x)]
        for name, index in self.steps:
            seen.append(STEPS[name](self.layers, seen, index))
        return self.head(F.adaptive_avg_pool2d(F.relu(seen[-1]), 2).flatten(1))


@settings(suppress_health_check=list(HealthCheck), derandomize=True)
@given(steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 7)), max_size=7), seed=st.integers(0, 9))
def test_gradients_come_back_in_random_graphs(steps: list[tuple[str, int]], seed: int) -> None:
    torch.manual_seed(seed)
    model, inputs = jitter(RandomGraph(steps)), images(4, 3, 4, 4)
    plan = ScalePlan.of(model, inputs)
    key, true = plan.draw(Numbers(seed)), state(model)
    _, gradients, _ = step(model, true, inputs)
    _, noisy, _ = step(model, plan.perturb(true, key), inputs)
    assert (flat(plan.recover(noisy, key)) - flat(gradients)).norm() <= 1e-9 * flat(gradients).norm()


@pytest.mark.parametrize("name", ["batch norm", "own attention", "tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_perturbed_tensor_is_the_exact_product_rounded_once(name, dtype) -> None:
    plan = plan_of(name)
    key = plan.draw(Numbers(0))
    true = {name: torch.randn(one.shape, dtype=torch.float64).to(dtype) for name, one in plan.parameters.items()}
    exact = {name: torch.from_numpy(plan.multiplier(name, key)) * tensor.double() for name, tensor in true.items()}
    wanted = plan.perturb({name: tensor.to(dtype) for name, tensor in exact.items()}, plan_without_scales(plan, key))
    noisy = plan.perturb(true, key)
    assert all(tensor.dtype == dtype and torch.equal(tensor, wanted[name]) for name, tensor in noisy.items())
    if dtype != torch.bfloat16:
        arrays = plan.perturb({name: tensor.numpy() for name, tensor in true.items()}, key)
        assert all(np.array_equal(array, noisy[name].numpy()) for name, array in arrays.items())


def test_channels_last_changes_no_bit() -> None:
    plan = plan_of("batch norm")
    key = plan.draw(Numbers(0))
    state = conv_net(nn.BatchNorm2d).state_dict()
    last = conv_net(nn.BatchNorm2d).to(memory_format=torch.channels_last)
    last.load_state_dict(state)
    for call in (plan.perturb, plan.recover, plan.recover_buffers):
        found = call(last.state_dict(), key)
        assert all(torch.equal(found[name], tensor) for name, tensor in call(state, key).items())


@pytest.mark.parametrize("name", ["batch norm", "own attention"])
def test_the_way_back_undoes_the_order(name) -> None:
    plan = plan_of(name)
    key = plan_without_scales(plan, plan.draw(Numbers(0)))
    true = {name: torch.randn(one.shape) for name, one in {**plan.parameters, **plan.buffers}.items()}
    moved = plan.perturb(true, key)
    assert any(not torch.equal(moved[name], tensor) for name, tensor in true.items())
    for found in (plan.recover_buffers(moved, key), plan.recover(moved, key)):
        assert all(torch.equal(found[name].float(), tensor) for name, tensor in true.items())


def test_perturbed_tensors_are_copies_and_inputs_are_left_as_they_are() -> None:
    plan = plan_of("batch norm")
    state = conv_net(nn.BatchNorm2d).double().state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    for key in (plan.draw(Numbers(0)), plan.identity()):
        for tensor in plan.perturb(state, key).values():
            tensor.zero_()
        plan.recover(state, key)
        for tensor in plan.recover_buffers(state, key).values():
            tensor.zero_()
        assert all(torch.equal(state[name], tensor) for name, tensor in before.items())


def test_tensors_with_the_same_channels_share_their_positions() -> None:
    """So that a key's orders are computed once for the weights, biases and statistics around one set of channels."""
    plan = plan_of("batch norm")
    patterns = {**plan.parameters, **plan.buffers}
    first = {name: pattern.shuffles[0].positions for name, pattern in patterns.items() if pattern.shuffles}
    assert first["0.weight"] is first["1.weight"] is first["1.running_mean"]
    assert len(set(first.values())) < len(first) / 2
