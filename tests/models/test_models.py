import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from refused_rows import Row, refused

torch = pytest.importorskip("torch", reason="models need torch")

from moretta.data.references import OWN_CODE  # noqa: E402
from moretta.errors import MissingExtra, ParameterError  # noqa: E402
from moretta.models.catalogue import build  # noqa: E402

IMAGE = (3, 32, 32)
AUTHORS_RESNET: dict[str, Any] = {"norm": "none", "shortcut": "B", "bias": False, "start": "he-normal"}


def parameters(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def test_importing_needs_no_torch() -> None:
    subprocess.run([sys.executable, "-c", "import sys, moretta.models; sys.exit('torch' in sys.modules)"], check=True)


def test_a_missing_torch_says_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r'run: pip install "moretta\[torch\]"'):
        build("mlp", inputs=(3,), outputs=2)


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ({}, [30, 32, 32, 2]),
        ({"hidden": [8]}, [30, 8, 2]),
        ({"hidden": []}, [30, 2]),
        ({"layers": 5}, [30, 64, 64, 64, 64, 2]),
        ({"layers": 3, "width": 7}, [30, 7, 7, 2]),
        ({"layers": 1}, [30, 2]),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_mlp(arguments: dict[str, Any], sizes: list[int], bias: bool) -> None:
    model = build("mlp", inputs=(30,), outputs=2, bias=bias, **arguments)
    linear = [layer for layer in model if isinstance(layer, torch.nn.Linear)]
    assert [linear[0].in_features, *(layer.out_features for layer in linear)] == sizes
    assert all((layer.bias is not None) == bias for layer in linear)
    assert [type(layer).__name__ for layer in model] == (["Linear", "ReLU"] * len(linear))[:-1]
    assert model(torch.zeros(4, 30)).shape == (4, 2)


def test_embeddings_look_up_a_vector_a_word() -> None:
    model = build("embeddings", inputs=(6,), outputs=2, categories=[[1, 3]], hidden=[4])
    embedded = model[0]
    (table,) = (part for part in embedded.parts if isinstance(part, torch.nn.Linear))
    assert table.weight.shape == (2, 3)
    x = torch.tensor([[0.5, 0.0, 1.0, 0.0, 7.0, 8.0], [0.1, 0.0, 0.0, 1.0, 9.0, 3.0]])
    assert torch.equal(embedded(x), torch.cat([x[:, :1], table.weight.T[[1, 2]], x[:, 4:]], dim=1))
    assert model(x).shape == (2, 2)
    many = build("embeddings", inputs=(60,), outputs=2, categories=[[0, 50], [50, 10]], most=8)
    assert many[0].joined == 8 + 6


def test_mlp_flattens_images_only() -> None:
    model = build("mlp", inputs=(1, 4, 4), outputs=3)
    assert isinstance(model[0], torch.nn.Flatten)
    assert model(torch.zeros(2, 1, 4, 4)).shape == (2, 3)


@pytest.mark.parametrize(
    ("source", "arguments", "count"),
    [
        # He et al. 2016, table 6: 0.27M, 0.46M, 0.85M parameters; to the unit by counting weights and affines
        ("resnet", {"depth": 20}, 269_722),
        ("resnet", {"depth": 32}, 464_154),
        ("resnet", {"depth": 56}, 853_018),
        ("resnet", {"depth": 20, "shortcut": "B"}, 272_474),
        # PBPFL's released code: LDC/resnet.py has 7 outputs, ABD/resnet.py one
        ("resnet", {"depth": 20, "outputs": 7, **AUTHORS_RESNET}, 270_704),
        ("resnet", {"depth": 56, "outputs": 7, **AUTHORS_RESNET}, 851_312),
        ("resnet", {"depth": 20, "outputs": 1, **AUTHORS_RESNET}, 270_320),
        # and UMBD/mlp.py: MLP-3, 5, 7 of 48 inputs and n + 1 weight layers
        ("mlp", {"inputs": (48,), "outputs": 1, "layers": 4, "width": 50, "bias": False}, 7_450),
        ("mlp", {"inputs": (48,), "outputs": 1, "layers": 6, "width": 50, "bias": False}, 12_450),
        ("mlp", {"inputs": (48,), "outputs": 1, "layers": 8, "width": 50, "bias": False}, 17_450),
        # Huang et al. 2017, table 2: DenseNet-BC (L = 100, k = 12) 0.8M
        ("densenet", {"depth": 100, "growth": 12}, 769_162),
        ("densenet", {"depth": 40, "growth": 12}, 176_122),
    ],
)
def test_parameter_counts_are_the_papers(source: str, arguments: dict[str, Any], count: int) -> None:
    assert parameters(build(source, **{"inputs": IMAGE, "outputs": 10, **arguments})) == count


def test_a_resnet_without_biases_starts_by_fan_in() -> None:
    model = build("resnet", inputs=IMAGE, outputs=7, depth=20, **AUTHORS_RESNET)
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear)]
    assert all(layer.bias is None for layer in layers)
    for layer in layers:
        deviation = (2 / layer.weight[0].numel()) ** 0.5
        slack = 5 / (2 * layer.weight.numel()) ** 0.5  # five standard errors of a normal sample's deviation
        assert abs(float(layer.weight.detach().std()) / deviation - 1) < slack


def test_concatenation_grows_by_each_blocks_channels() -> None:
    model = build("resnet", inputs=IMAGE, outputs=10, depth=20, shortcut="concat", width=4)
    assert model[-1].in_features == 4 * (1 + 7 * 3)


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("resnet", {"depth": 8, "width": 4, "shortcut": "A"}),
        ("resnet", {"depth": 8, "width": 4, "shortcut": "B"}),
        ("resnet", {"depth": 8, "width": 4, "shortcut": "concat"}),
        ("densenet", {"depth": 10, "growth": 4}),
    ],
)
@pytest.mark.parametrize("inputs", [(3, 32, 32), (1, 28, 28), (3, 9, 7)])
def test_images_traced_and_trained(source: str, arguments: dict[str, Any], norm: str, inputs: tuple[int, ...]) -> None:
    model = build(source, inputs=inputs, outputs=5, norm=norm, **arguments)
    x = torch.randn(4, *inputs, generator=torch.Generator().manual_seed(0))
    y = model(x)
    assert y.shape == (4, 5)
    y.square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    model.eval()
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(x), model(x))
    last = list(traced.graph.nodes)[-1].args[0]
    assert isinstance(traced.get_submodule(last.target), torch.nn.Linear)


def test_shortcut_a_pads_with_zeros() -> None:
    model = build("resnet", inputs=IMAGE, outputs=2, depth=8, width=4, shortcut="A")
    block = next(layer for layer in model if getattr(layer, "joined", 0) == 8)
    x = torch.randn(2, 4, 6, 6)
    out = block.shortcut(x)
    assert torch.equal(out[:, :4], x[:, :, ::2, ::2])
    assert out[:, 4:].abs().sum() == 0


@pytest.mark.parametrize("source", ["mlp", "resnet", "densenet"])
def test_weights_depend_on_the_seed_alone(source: str) -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = build(source, inputs=IMAGE, outputs=2, seed=3).state_dict()
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    same, other = (build(source, inputs=IMAGE, outputs=2, seed=seed).state_dict() for seed in (3, 4))
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


NETS = """
from torch import nn
def net(width, bias_too=True):
    return nn.Sequential(nn.Linear(2, width, bias=bias_too))
def number():
    return 3
"""


def test_module_function(tmp_path: Path) -> None:
    (tmp_path / "my_nets_here.py").write_text(NETS)

    def made(source: str, **arguments: Any) -> Any:
        return build(source, inputs=(2,), outputs=1, base=tmp_path, seed=5, agreed=OWN_CODE, **arguments)

    model = made("my_nets_here:net", width=3, **{"bias-too": False})
    assert model[0].weight.shape == (3, 2)
    assert model[0].bias is None
    assert torch.equal(model[0].weight, made("my_nets_here:net", width=3, bias_too=False)[0].weight)
    with pytest.raises(ParameterError, match=r'"my_nets_here:number" must return a torch.nn.Module, got int'):
        made("my_nets_here:number")
    with pytest.raises(ParameterError, match=r"called with \(widht=3\) failed with TypeError: .*'widht'"):
        made("my_nets_here:net", widht=3)
    with pytest.raises(ParameterError, match=r"failed with ModuleNotFoundError: No module named 'not_there_at_all'"):
        made("not_there_at_all:net")


@refused("models.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())
