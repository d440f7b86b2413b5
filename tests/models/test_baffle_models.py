"""BAFFLE's models: lenet, wrn and mobilenet, their normalisations and activations."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from refused_rows import Row, refused

torch = pytest.importorskip("torch", reason="models need torch")
from torch import nn  # noqa: E402

from moretta.models.catalogue import build  # noqa: E402
from moretta.models.layers import FrozenBatchNorm  # noqa: E402

GREY, COLOUR = (1, 28, 28), (3, 32, 32)
NORMS = {"group": nn.GroupNorm, "batch": nn.BatchNorm2d, "frozen-batch": FrozenBatchNorm}
ACTIVATIONS = {"hardswish": nn.Hardswish, "relu": nn.ReLU, "selu": nn.SELU}
# the smallest of each, where the size does not matter
SMALL: dict[str, dict[str, Any]] = {"lenet": {}, "wrn": {"width": 1}, "mobilenet": {"width": 0.25}}


AUTHORS_LENET: dict[str, Any] = {
    "norm": "none", "channels": [16, 64], "padding": True, "pool": "max", "hidden": 0, "bias": True
}  # fmt: skip
AUTHORS_WRN: dict[str, Any] = {"group_size": 16, "affine": False, "stem_bias": True, "start": "he-uniform"}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Many small layers: on busy cores PyTorch's threads wait for one another, twenty times as long as one computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def images(inputs: tuple[int, ...], rows: int = 4) -> Any:
    return torch.randn(rows, *inputs, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("source", "inputs", "outputs", "arguments", "count"),
    [
        # convolutions 150 + 2400, their affines 12 + 32, layers 256 x 84 + 84 and 84 x 10 + 10
        ("lenet", GREY, 10, {}, 25_032),
        ("lenet", COLOUR, 10, {}, 37_428),
        # first 432, stages 14,432 + 57,536 + 229,760, last affine 256, layer 1290
        ("wrn", COLOUR, 10, {}, 303_706),
        ("wrn", GREY, 10, {}, 303_418),
        # Zagoruyko and Komodakis 2016, table 4: WRN-40-4 8.9M, WRN-16-8 11.0M
        ("wrn", COLOUR, 10, {"depth": 40, "width": 4}, 8_949_210),
        ("wrn", COLOUR, 10, {"depth": 16, "width": 8}, 10_961_370),
        # torchvision 0.28's mobilenet_v2(num_classes=10), width_mult 1 and 0.5
        ("mobilenet", COLOUR, 10, {}, 2_236_682),
        ("mobilenet", COLOUR, 100, {}, 2_351_972),
        ("mobilenet", COLOUR, 10, {"width": 0.5}, 700_490),
        # BAFFLE's released code, counted from model/lenet.py and model/wideresnet.py
        ("lenet", (1, 32, 32), 10, AUTHORS_LENET, 26_730),
        ("lenet", COLOUR, 10, AUTHORS_LENET, 27_530),
        ("lenet", COLOUR, 10, AUTHORS_LENET | {"norm": "group", "group_size": 16, "affine": False}, 27_530),
        ("lenet", COLOUR, 100, AUTHORS_LENET | {"channels": [32, 128]}, 117_860),
        ("wrn", (1, 32, 32), 10, AUTHORS_WRN, 302_506),
        ("wrn", COLOUR, 10, AUTHORS_WRN, 302_794),
        ("wrn", COLOUR, 100, AUTHORS_WRN, 314_404),
    ],
)
def test_parameter_counts(
    source: str, inputs: tuple[int, ...], outputs: int, arguments: dict[str, Any], count: int
) -> None:
    model = build(source, inputs=inputs, outputs=outputs, **arguments)
    assert sum(p.numel() for p in model.parameters()) == count


def test_lenet_is_flat() -> None:
    norm, act = nn.GroupNorm, nn.Hardswish
    found = [type(layer) for layer in build("lenet", inputs=GREY, outputs=10)]
    block = [nn.Conv2d, norm, act, nn.AvgPool2d]
    assert found == [*block, *block, nn.Flatten, nn.Linear, act, nn.Linear]


def test_the_authors_lenet_is_theirs() -> None:
    arguments = AUTHORS_LENET | {"norm": "group", "group_size": 16, "affine": False}
    layers = list(build("lenet", inputs=COLOUR, outputs=10, **arguments))
    block = [nn.Conv2d, nn.GroupNorm, nn.Hardswish]
    assert [type(layer) for layer in layers] == [
        *block, nn.MaxPool2d, *block, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear
    ]  # fmt: skip
    assert [layers[place].num_groups for place in (1, 5)] == [2, 4]  # max(2, channels / 16)
    assert not list(layers[1].parameters())
    assert nn.Sequential(*layers[:7])(images(COLOUR)).shape == (4, 64, 16, 16)


def test_a_wrn_with_the_authors_start() -> None:
    model = build("wrn", inputs=COLOUR, outputs=10, **AUTHORS_WRN)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            fans = (layer.weight[0].numel(), 0) if isinstance(layer, nn.Conv2d) else layer.weight.shape
            most = (6 / sum(fans)) ** 0.5  # the bound of both, He's for a ReLU and Xavier's
            assert 0.9 * most < layer.weight.abs().max() <= most
            assert layer.bias is None or not layer.bias.any()
        if isinstance(layer, nn.GroupNorm):
            assert layer.num_groups == max(2, layer.num_channels // 16)
            assert layer.weight is None


@pytest.mark.parametrize(
    ("inputs", "norm", "activation"),
    [(GREY, "group", "hardswish"), (COLOUR, "group", "hardswish")]
    + [((2, 17, 20), norm, activation) for norm in NORMS for activation in ACTIVATIONS],
)
@pytest.mark.parametrize("source", SMALL)
def test_traced_and_trained(source: str, norm: str, activation: str, inputs: tuple[int, ...]) -> None:
    model = build(source, inputs=inputs, outputs=5, norm=norm, activation=activation, **SMALL[source])
    kinds = {type(layer) for layer in model.modules()}
    assert kinds & {*NORMS.values()} == {NORMS[norm]}
    assert kinds & {*ACTIVATIONS.values()} == {ACTIVATIONS[activation]}
    x = images(inputs)
    y = model(x)
    assert y.shape == (4, 5)
    y.square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    model.eval()
    assert torch.equal(model(x), y) == (norm != "batch")  # no other layer differs between training and evaluation
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(x), model(x))
    last = list(traced.graph.nodes)[-1].args[0]
    assert isinstance(traced.get_submodule(last.target), nn.Linear)
    assert list(model.modules())[-1] is model.get_submodule(last.target)


@pytest.mark.parametrize("source", SMALL)
def test_no_bias_before_a_normalisation(source: str) -> None:
    layers = list(build(source, inputs=COLOUR, outputs=2, **SMALL[source]).modules())
    assert all(layer.bias is None for layer in layers if isinstance(layer, nn.Conv2d))
    assert any(isinstance(a, nn.Conv2d) and isinstance(b, nn.GroupNorm) for a, b in pairwise(layers))


@pytest.mark.parametrize("source", [*SMALL, "resnet", "densenet"])
def test_frozen_statistics_stay(source: str) -> None:
    arguments = SMALL.get(source, {"depth": 8 if source == "resnet" else 10})
    loaded = build(source, inputs=COLOUR, outputs=2, norm="batch", **arguments)
    loaded(images(COLOUR))  # statistics other than the initial ones
    model = build(source, inputs=COLOUR, outputs=2, norm="frozen-batch", **arguments)
    model.load_state_dict(loaded.state_dict())
    model.eval().train()
    assert model.training
    frozen = [layer for layer in model.modules() if isinstance(layer, FrozenBatchNorm)]
    assert frozen
    assert not any(layer.training for layer in frozen)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x = images(COLOUR)
    assert torch.equal(model(x), loaded.eval()(x))
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("source", "some"),
    [
        ("lenet", ["0.weight", "1.weight", "1.bias", "4.weight", "9.weight", "11.weight", "11.bias"]),
        ("wrn", ["0.weight", "1.before.0.weight", "1.body.0.weight", "1.body.1.bias", "1.body.3.weight",
                 "2.shortcut.weight", "4.weight", "8.weight", "8.bias"]),
        # torchvision's, so that its weights load
        ("mobilenet", ["features.0.0.weight", "features.0.1.bias", "features.1.conv.0.0.weight",
                       "features.1.conv.1.weight", "features.2.conv.3.bias", "features.17.conv.2.weight",
                       "features.18.1.weight", "classifier.1.weight", "classifier.1.bias"]),
    ],
)  # fmt: skip
def test_names_are_stable(source: str, some: list[str]) -> None:
    model = build(source, inputs=COLOUR, outputs=7)
    state = model.state_dict()
    assert [name for name in state if name in some] == some
    assert list(state)[-2:] == some[-2:]
    assert len(state) == {"lenet": 10, "wrn": 26, "mobilenet": 158}[source]
    assert state[some[-1]].shape == (7,)


@pytest.mark.parametrize(("side", "positions"), [(28, 4), (32, 4), (63, 8), (64, 2)])
def test_mobilenet_strides_fit_the_image(side: int, positions: int) -> None:
    model = build("mobilenet", inputs=(3, side, side), outputs=2, width=0.25).eval()
    assert model.features(images((3, side, side), 1)).shape[-2:] == (positions, positions)


@pytest.mark.parametrize("source", SMALL)
def test_weights_depend_on_the_seed_alone(source: str) -> None:
    first, same, other = (build(source, inputs=COLOUR, outputs=2, seed=s, **SMALL[source]) for s in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@refused("baffle_models.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def test_the_least_image_of_a_lenet() -> None:
    assert build("lenet", inputs=(1, 16, 16), outputs=3)(images((1, 16, 16))).shape == (4, 3)
