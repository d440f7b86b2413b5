"""Moving one block of layers after the other: theory, models of all kinds, and what is refused."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from baffle_runs import learning, make, same_bytes, weights
from networks import seeded
from numpy.typing import NDArray
from refused_rows import Row, refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from moretta.data.layout import InputArray, SampleLayout
from moretta.errors import ParameterError
from moretta.models.architectures import lenet, wrn
from moretta.models.hooks import gives_one_tensor, takes_packed
from moretta.protocols.baffle.cut import Cut, blocks_of, cut_of, graph_of
from moretta.protocols.baffle.silo.blocks import LayerBlock, Rule, gradient
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.silo.recipe import Recipe
from moretta.protocols.baffle.silo.work import differences
from moretta.protocols.baffle.torch_blocks import TorchBlocks
from moretta.protocols.baffle.torch_forward import layout_of
from moretta.protocols.common import modules
from moretta.protocols.common.targets import RowLosses

OUTPUTS, ROWS = 3, 5
SEED = b"seed of a test".ljust(32)
IMAGE = (2, 16, 16)


class Residual(nn.Module):
    """Channels that go two ways and are added, scaled by a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.deep = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.norm, self.scale = nn.GroupNorm(2, 4), nn.Parameter(torch.full((4, 1, 1), 0.7))
        self.head = nn.Linear(4, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = x + F.gelu(self.norm(self.body(x))) * self.scale
        x = F.max_pool2d(torch.sigmoid(self.deep(x)) + x, 2)
        head: Tensor = self.head(x.mean((2, 3)))
        return head


class Dense(nn.Module):
    """Channels that are laid beside those before them, and BatchNorm that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.Conv2d(5, 4, 3, stride=2, bias=False)
        self.norm, self.other = nn.BatchNorm2d(3), nn.BatchNorm2d(4, affine=False)
        self.head = nn.Linear(4 * 3 * 3, OUTPUTS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, F.relu6(self.norm(self.first(x)))], dim=1)
        head: Tensor = self.head(F.hardtanh(self.other(self.second(x))).flatten(1))
        return head


class Attends(nn.Module):
    """Tokens, an embedding whose table is also the head of a second layer, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(7, 8), nn.Parameter(torch.randn(6, 8) / 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.table(x) + self.place)
        head: Tensor = self.head(x.mean(1) + F.linear(x[:, 0], self.table.weight)[:, :1])
        return head


class Inside(nn.Module):
    """Changes in place, and a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(6, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, OUTPUTS)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = 2.0 * F.relu(self.first(x))
        x += 1.0
        last: Tensor = self.last(self.norm(torch.tanh(self.twice(torch.tanh(self.twice(x))))))
        return last


class Recurrent(nn.Module):
    """A layer that runs token after token, between two that do not."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Linear(3, 4), kind(4, 5, batch_first=True), nn.Linear(5, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.again(torch.tanh(self.first(x)))
        head: Tensor = self.head(states[:, -1])
        return head


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet": (lambda: lenet(IMAGE, OUTPUTS), IMAGE),
    "wrn": (lambda: wrn((2, 8, 8), OUTPUTS, width=1), (2, 8, 8)),
    "dense": (Dense, (2, 8, 8)),
    "residual": (Residual, (2, 8, 8)),
    "attends": (Attends, (6,)),
    "inside": (Inside, (6,)),
}
RECURRENT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lstm": (lambda: Recurrent(nn.LSTM), (6, 3)),
    "gru": (lambda: Recurrent(nn.GRU), (6, 3)),
    "weight norm": (lambda: nn.Sequential(weight_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, OUTPUTS)), (6,)),
}


@functools.cache
def cut_model(kind: str) -> tuple[nn.Module, Layout, Cut]:
    build, shape = (MODELS | RECURRENT)[kind]
    with seeded():
        model = build().double().eval()
    layout = layout_of(model)
    return model, layout, cut_of(model, layout, shape, torch.int64 if kind == "attends" else torch.float64)


class Made:
    """A model in float64, its cut and its blocks, and rows."""

    def __init__(self, kind: str, linear: str = "scalars", k: int = 4) -> None:
        self.model, self.layout, cut = cut_model(kind)
        generator, shape = np.random.default_rng(1), (MODELS | RECURRENT)[kind][1]
        whole = kind == "attends"
        self.x = generator.integers(0, 7, (ROWS, *shape)) if whole else generator.normal(0, 1, (ROWS, *shape))
        self.y = generator.integers(0, OUTPUTS, ROWS)
        self.at = self.layout.flat(modules.arrays(self.model))
        rule = Rule((("*", k),), linear)
        self.recipe = Recipe("central", 1e-5, RowLosses("cross-entropy"), 2, rule=rule)
        self.recipe = self.recipe.by(blocks_of(cut, self.layout, rule), self.layout.shapes)
        self.forward = TorchBlocks(self.model, self.layout, cut, self.recipe.blocks)
        self.keys = self.recipe.keys(SEED, "test")

    def gradients(self) -> dict[str, NDArray[np.float64]]:
        """What autograd gives, by tensor."""
        named = dict(self.model.named_parameters())
        loss = F.cross_entropy(self.model(torch.tensor(self.x)), torch.tensor(self.y))
        found = torch.autograd.grad(loss, [named[name] for name in self.layout.shapes])
        return {name: each.double().numpy() for name, each in zip(self.layout.shapes, found, strict=True)}


def along(block: LayerBlock, shapes: Any, key: bytes, of: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """The exact derivatives along a block's moves, written down move by move."""
    signs = block.signs(shapes, key)
    if block.kind == "rank-one":
        matrix = of[block.tensors[0]].reshape(shapes[block.tensors[0]])
        if len(block.tensors) > 1:
            matrix = np.concatenate([matrix, of[block.tensors[1]][:, None]], axis=1)
        return np.array([u @ matrix @ v for u, v in zip(*block.sides(shapes, signs), strict=True)])
    found = list[float]()
    for repeat in range(block.repeats):
        moved = {name: each[repeat] for name, each in block.by_tensor(shapes, signs).items()}
        pieces = block.channels_of(shapes[block.tensors[0]][0]) if block.kind == "channels" else [slice(None)]
        found += [sum(float((moved[name][piece] * of[name][piece]).sum()) for name in moved) for piece in pieces]
    return np.array(found)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("linear", ["scalars", "activations"])
def test_scalars_are_derivatives_along_the_moves(kind: str, linear: str) -> None:
    made = Made(kind, linear)
    assert sorted(name for block in made.recipe.blocks for name in block.tensors) == sorted(made.layout.shapes)
    np.testing.assert_allclose(made.forward.start(made.at, made.x), made.forward.outputs(made.at[None], made.x)[0])
    (found,) = differences(made.recipe, made.forward, made.at, [(made.x, made.y)], made.keys)
    exact, start = made.gradients(), 0
    for block, key in zip(made.recipe.blocks, made.keys, strict=True):
        if block.kind == "units":
            assert found.estimate is not None
            for name in block.tensors:
                np.testing.assert_allclose(made.layout.split(found.estimate)[name], exact[name], atol=1e-7)
            continue
        wanted = along(block, made.layout.shapes, key, exact)
        got = found.derivatives[start : start + block.scalars].mean(axis=1)
        np.testing.assert_allclose(got, wanted, atol=2e-7, err_msg=f"{block.name}: {block.kind}")
        start += block.scalars
    assert start == len(found.derivatives)


@pytest.mark.parametrize("kind", RECURRENT)
def test_so_are_those_of_layers_that_vmap_cannot_run(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    test_scalars_are_derivatives_along_the_moves(kind, "activations")
    assert "batching rule" not in capfd.readouterr().err


def test_each_model_has_the_blocks_that_its_layers_are() -> None:
    def kinds(kind: str, linear: str = "scalars") -> dict[str, str]:
        return {block.name: block.kind for block in Made(kind, linear).recipe.blocks}

    assert kinds("residual", "activations") == {
        "scale": "anew", "stem": "channels", "body": "channels", "norm": "channels", "deep": "channels", "head": "units"
    }  # fmt: skip
    inside = kinds("inside")
    assert inside == {"twice.weight": "anew", "first": "rank-one", "norm": "joint", "last": "rank-one"}
    attends = kinds("attends", "activations")
    assert (attends["table.weight"], attends["head"], attends["layer.norm1"]) == ("anew", "units", "joint")
    assert attends["layer.linear1"] == "rank-one"  # it has six outputs a unit and row


# -- theory ------------------------------------------------------------------------------------------------------------

SHAPES = {"w": (4, 3, 2, 2), "b": (4,), "m": (5, 6), "c": (5,), "n": (7, 2)}
THEORY = {  # E|estimate|^2 / |G|^2, as the opening of `moretta.protocols.baffle.silo.blocks` has it
    "channels": (LayerBlock("conv", "channels", ("w", "b"), 3, 4), 1 + (13 - 1) / 3),
    "pairs of channels": (LayerBlock("conv", "channels", ("w", "b"), 2, 2), 1 + (26 - 1) / 2),
    "rank-one": (LayerBlock("linear", "rank-one", ("m", "c"), 6), 1 + (5 * 7 - 1) / 6),
    "joint": (LayerBlock("norm", "joint", ("n",), 4), 1 + (14 - 1) / 4),
}


DEVIATIONS = 3  # of a mean over draws; the seed is what it is, and was not chosen


@pytest.mark.parametrize("kind", THEORY)
def test_estimates_are_unbiased_and_as_noisy_as_derived(kind: str) -> None:
    block, moment = THEORY[kind]
    layout = Layout({name: SHAPES[name] for name in block.tensors}, "float64", b"")
    generator = np.random.default_rng(5)
    exact = {name: generator.normal(0, 1, SHAPES[name]) for name in block.tensors}
    flat, draws = layout.flat(exact), 4000
    slopes, squares, size = np.zeros(draws), np.zeros(draws), float(flat @ flat)
    for draw in range(draws):
        key = Recipe("base", 1.0, RowLosses("mse"), 2, blocks=(block,)).keys(SEED, draw)
        found = gradient((block,), layout, along(block, SHAPES, key[0], exact), None, key)
        slopes[draw], squares[draw] = found @ flat / size, found @ found / size
    for values, wanted in ((slopes, 1.0), (squares, moment)):
        assert abs(values.mean() - wanted) < DEVIATIONS * values.std() / np.sqrt(draws)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors take many times as long where threads wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["inside", "residual"])
def test_the_gradient_of_a_network_is_found_block_by_block(kind: str) -> None:
    made = Made(kind, "activations")
    exact, draws = made.gradients(), 100
    slopes = {name: np.zeros(draws) for name in exact}
    for draw in range(draws):
        keys = made.recipe.keys(SEED, draw)
        (found,) = differences(made.recipe, made.forward, made.at, [(made.x, made.y)], keys)
        whole = gradient(made.recipe.blocks, made.layout, found.derivatives.mean(axis=1), found.estimate, keys)
        for name, part in made.layout.split(whole).items():
            slopes[name][draw] = float((part * exact[name]).sum() / np.square(exact[name]).sum())
    for name, values in slopes.items():
        assert abs(values.mean() - 1) < DEVIATIONS * values.std() / np.sqrt(draws) + 1e-6, name


# -- silos and rows ----------------------------------------------------------------------------------------------------


def test_silos_together_have_what_each_has_alone() -> None:
    made = Made("residual", "activations")
    batches = [(made.x[:2], made.y[:2]), (made.x[2:], made.y[2:])]
    together = differences(made.recipe, made.forward, made.at, batches, made.keys)
    for batch, found in zip(batches, together, strict=True):
        (alone,) = differences(made.recipe, made.forward, made.at, [batch], made.keys)
        np.testing.assert_allclose(found.derivatives, alone.derivatives, atol=1e-7)
        np.testing.assert_allclose(found.losses, alone.losses)
        assert found.estimate is not None
        assert alone.estimate is not None
        np.testing.assert_allclose(found.estimate, alone.estimate, atol=1e-7)


def test_rows_that_go_through_in_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made("residual", "activations")
    batches = [(made.x[:2], made.y[:2]), (made.x[2:], made.y[2:])]
    whole = differences(made.recipe, made.forward, made.at, batches, made.keys)
    monkeypatch.setattr("moretta.protocols.baffle.torch_blocks.ROWS", 3)  # across both silos
    for one, other in zip(whole, differences(made.recipe, made.forward, made.at, batches, made.keys), strict=True):
        np.testing.assert_allclose(one.derivatives, other.derivatives, atol=1e-7)
        np.testing.assert_allclose(one.estimate, other.estimate, atol=1e-7)  # type: ignore[arg-type]


def test_one_sided_differences_are_the_derivatives_up_to_sigma() -> None:
    made = Made("lenet")
    for sigma in (1e-3, 1e-4):
        recipe = replace(made.recipe, form="base", sigma=sigma)
        (found,) = differences(recipe, made.forward, made.at, [(made.x, made.y)], made.keys)
        (exact,) = differences(made.recipe, made.forward, made.at, [(made.x, made.y)], made.keys)
        apart = np.abs(found.derivatives.mean(axis=1) - exact.derivatives.mean(axis=1)).max()
        assert 0 < apart < 2e4 * sigma * sigma + 50 * sigma


# -- how many moves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 7, 11, 12, 13, 24, 100])
def test_a_block_has_about_k_moves_and_every_channel_its_own(k: int) -> None:
    block = Rule((("*", k),)).block("conv", "channels", ("w", "b"), {"w": (11, 2, 3, 3), "b": (11,)})
    assert k <= block.scalars <= k + 11
    pieces = block.channels_of(11)
    assert len(pieces) == block.pieces
    assert [channel for piece in pieces for channel in range(11)[piece]] == list(range(11))


def test_blocks_have_usual_numbers_of_moves_where_nobody_says() -> None:
    shapes = {"w": (16, 6, 5, 5), "g": (16,), "m": (84, 400), "c": (84,), "e": (9, 4, 2)}
    made = [
        Rule().block("conv", "channels", ("w",), shapes), Rule().block("norm", "channels", ("g",), shapes),
        Rule().block("linear", "rank-one", ("m", "c"), shapes), Rule().block("other", "anew", ("e",), shapes),
    ]  # fmt: skip
    assert [block.scalars for block in made] == [64, 32, 485, 16]


# -- what is refused ---------------------------------------------------------------------------------------------------


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, OUTPUTS)


class Branches(Head):
    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self.head(x if x.sum() > 0 else -x)
        return head


class Leaves(Head):
    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self.head(torch.from_numpy(x.numpy()))
        return head


class Counts(Head):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.head(row) for row in x])


class Idle(Head):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self.head(x)
        return head


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        (Branches, "head: Tensor = self.head(x if x.sum() > 0 else -x)", "depends on the values that it reads"),
        (Leaves, "head: Tensor = self.head(torch.from_numpy(x.numpy()))", ""),
        (Counts, "", "it runs for one number of rows alone"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_and_says_where(kind: type[Head], source: str, words: str) -> None:
    model = nn.Sequential(nn.ReLU(), kind()) if source else kind()
    with pytest.raises(ParameterError, match="cannot be cut into blocks") as caught:
        cut_of(model, layout_of(model), (6,), torch.float32)
    said = str(caught.value)
    assert words in said
    assert "\n" not in said
    assert str(Path(__file__).parent) not in said
    if source:
        lines, start = inspect.getsourcelines(kind)
        number = start + next(at for at, line in enumerate(lines) if line.strip() == source)
        assert f"{Path(__file__).name}, line {number}, `{source}`" in said


class Makes(Head):
    """Makes a tensor while it runs, asks for len(x), and makes another on its own device."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first.expand(len(x), -1) * torch.arange(6.0, device=x.device)
        head: Tensor = self.head(x) + torch.tensor([1.0, 2.0, 3.0])
        return head


class Object(Head):
    """Takes arrays by keyword and returns an object, of which one tensor is trained."""

    def forward(self, ids: Tensor, mask: Tensor, hint: Tensor | None = None) -> dict[str, Any]:
        return {"logits": self.head(ids * mask.float()), "hidden": ids}


def test_what_a_model_makes_is_a_constant_and_len_is_followed() -> None:
    model = Makes()
    layout = layout_of(model)
    cut = cut_of(model, layout, (6,), torch.float32)
    forward = TorchBlocks(model, layout, cut, blocks_of(cut, layout, Rule()))
    x = torch.randn(5, 6)
    np.testing.assert_allclose(
        forward.start(layout.flat(modules.arrays(model)), x.numpy()), model(x).detach(), rtol=1e-6
    )


def test_devices_in_a_graph_are_those_that_it_runs_on() -> None:
    graph = graph_of(Makes(), (6,), torch.float32, "meta")
    told = [one for node in graph.nodes for one in node.kwargs.values() if isinstance(one, torch.device)]
    assert told
    assert {str(one) for one in [*told, *(one.device for one in graph.constants.values())]} == {"meta"}


def test_arrays_by_keyword_and_an_object_are_cut_as_they_come() -> None:
    layout = SampleLayout((InputArray("ids", (6,)), InputArray("mask", (6,))))
    model = gives_one_tensor(takes_packed(Object(), layout))
    flat = layout_of(model)
    cut = cut_of(model, flat, (12,), torch.float32)
    forward = TorchBlocks(model, flat, cut, blocks_of(cut, flat, Rule()))
    x = torch.randn(5, 12)
    np.testing.assert_allclose(forward.start(flat.flat(modules.arrays(model)), x.numpy()), model(x).detach(), rtol=1e-6)


def test_what_forward_passes_alone_leave_out_is_said() -> None:
    """Dropout, batches' own statistics, and parameters that nothing depends on; the run is that of the rest."""
    idle = Idle()
    idle.head = nn.Linear(6, 4)
    norm = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), idle)
    plain = copy.deepcopy(norm).eval()
    plain[3].spare.requires_grad_(False)
    blocks = learning(perturb="blocks", k={"*": 4})
    found = make(blocks, model=norm).train(2, 3)
    said = " ".join(found.record["warnings"])
    for words in ("draws at random", "1 normalisation layers use the statistics", "do not depend on `3.spare.weight`"):
        assert words in said
    other = make(blocks, model=plain).train(2, 3)
    assert not any("draws at random" in sentence for sentence in other.record["warnings"])
    assert same_bytes(weights(found), weights(other))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"first": 4, "norm": 2}, r"`twice.weight` is left out"),
        ({"*": 4, "frist": 2}, "no block `frist`; did you mean `first`"),
    ],
)
def test_a_table_that_does_not_fit_the_model_is_refused(table: dict[str, int], words: str) -> None:
    model = Inside()
    layout = layout_of(model)
    with pytest.raises(ParameterError, match=words):
        blocks_of(cut_of(model, layout, (6,), torch.float32), layout, Rule(tuple(table.items())))


@refused("blocks_of_layers.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


@pytest.mark.parametrize("wrong", ["left out", "twice", "more", "units", "sizes"])
def test_blocks_that_a_server_made_otherwise_are_refused(wrong: str) -> None:
    rule, shapes = Rule(), {"w": (4, 3), "b": (4,), "v": (2, 4)}
    first, last = rule.block("first", "rank-one", ("w", "b"), shapes), rule.block("last", "rank-one", ("v",), shapes)
    rule.check((first, last), shapes)
    blocks = {
        "left out": (first,),
        "twice": (first, first, last),
        "more": (first, replace(last, repeats=900)),
        "units": (first, LayerBlock("last", "units", ("v",))),
        "sizes": (replace(first, kind="channels", tensors=("w", "v")), replace(last, tensors=("b",))),
    }[wrong]
    with pytest.raises(ParameterError):
        rule.check(blocks, shapes)
