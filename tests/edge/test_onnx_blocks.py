"""Moving blocks of layers by ONNX Runtime: what PyTorch comes to, of every kind of layer, and files that do not fit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from moretta.errors import ParameterError
from moretta.protocols.baffle.cut import blocks_of, cut_of
from moretta.protocols.baffle.edge import metadata
from moretta.protocols.baffle.edge.host import fit
from moretta.protocols.baffle.edge.onnx_blocks import OnnxBlocks
from moretta.protocols.baffle.onnx_export import graph_of
from moretta.protocols.baffle.silo.blocks import Rule
from moretta.protocols.baffle.silo.recipe import Recipe
from moretta.protocols.baffle.silo.work import differences
from moretta.protocols.baffle.torch_blocks import TorchBlocks
from moretta.protocols.common.targets import RowLosses

ROWS = 7
MADE = dict[tuple[str, str], tuple[Recipe, TorchBlocks, bytes]]()


def cut(sample: Any, linear: str) -> tuple[Recipe, TorchBlocks, bytes]:
    """The settings, PyTorch's half, and the files that an edge client is sent; exported once for each."""
    key = sample.layout.digest, linear
    if key not in MADE:
        rule, shape = Rule((("*", 5),), linear), sample.x.shape[1:]
        dtype = torch.tensor(sample.x[:0]).dtype
        graph = cut_of(sample.model, sample.layout, shape, dtype)
        recipe = Recipe("central", 1e-2, RowLosses("cross-entropy"), 2, rule=rule)
        recipe = recipe.by(blocks_of(graph, sample.layout, rule), sample.layout.shapes)
        forward = TorchBlocks(sample.model, sample.layout, graph, recipe.blocks)
        MADE[key] = recipe, forward, graph_of(sample.model, sample.layout, shape, dtype, blocks=recipe.blocks)
    return MADE[key]


@pytest.mark.parametrize("linear", ["scalars", "activations"])
def test_each_move_gives_what_it_does_in_pytorch(sample: Any, linear: str) -> None:
    recipe, forward, files = cut(sample, linear)
    edge = OnnxBlocks(files, recipe.rule, micro_batch=3)  # type: ignore[arg-type]
    assert edge.blocks == recipe.blocks
    assert edge.layout.digest == sample.layout.digest
    batch, keys = (sample.x[:ROWS], sample.targets[:ROWS]), recipe.keys(b"seed".ljust(32), "test")
    (found,) = differences(recipe, edge, sample.flat, [batch], keys)
    (wanted,) = differences(recipe, forward, sample.flat, [batch], keys)
    scale = max(1.0, np.abs(wanted.losses).max()) * 2e-6 / recipe.sigma  # float32 losses, over sigma
    np.testing.assert_allclose(found.losses, wanted.losses, atol=scale * recipe.sigma)
    np.testing.assert_allclose(found.derivatives, wanted.derivatives, rtol=0, atol=scale)
    if wanted.estimate is not None:
        assert found.estimate is not None
        np.testing.assert_allclose(found.estimate, wanted.estimate, atol=scale * max(1.0, np.abs(sample.x).max()))
    outputs = edge.outputs(np.stack([sample.flat, sample.flat * 2]), sample.x[:ROWS])
    np.testing.assert_allclose(outputs[1], sample.torch_outputs(sample.flat * 2)[:ROWS], rtol=1e-4, atol=1e-5)


def test_rows_fit_the_memory_that_a_silo_has(lenet_sample: Any) -> None:
    recipe, _, files = cut(lenet_sample, "activations")
    edge = OnnxBlocks(files, recipe.rule)  # type: ignore[arg-type]
    seen = list[int]()

    def run(x: np.ndarray[Any, Any]) -> None:
        seen.append(len(x))
        differences(recipe, edge, lenet_sample.flat, [(x, lenet_sample.targets[: len(x)])], recipe.keys(bytes(32)))

    assert fit(edge, lenet_sample.x[:4], 1 << 16, lenet_sample.flat, run=run) == 4 == edge.micro_batch
    assert sorted(set(seen)) == [1, 2, 4]


def tampered(files: bytes, change: str) -> bytes:
    first, *others = metadata.unpacked(files)
    if change == "no cut":
        return first
    if change == "short":
        return files[:-1]
    if change == "a file less":
        return metadata.packed([first, *others[:-1]])
    if change == "a file more":
        return metadata.packed([first, *others, others[-1]])
    if change == "another order":
        return metadata.packed([first, *reversed(others)])
    proto = onnx.load_from_string(first)
    entries = {entry.key: entry.value for entry in proto.metadata_props}
    described = json.loads(entries[metadata.BLOCKS])
    if change == "more moves":
        described[0]["repeats"] *= 100
    elif change == "whole estimates":
        described[-1] |= {"kind": "units", "repeats": 0}
    elif change == "no list":
        described = {"blocks": described}
    else:
        described = described[1:]
    helper.set_model_props(proto, entries | {metadata.BLOCKS: json.dumps(described)})
    return metadata.packed([proto.SerializeToString(), *others])


@pytest.mark.parametrize(
    "change",
    [
        "no cut",
        "short",
        "a file less",
        "a file more",
        "another order",
        "more moves",
        "whole estimates",
        "no list",
        "a block less",
    ],
)
def test_files_that_a_silo_was_not_set_for_are_refused(mlp_sample: Any, change: str) -> None:
    recipe, _, files = cut(mlp_sample, "scalars")
    with pytest.raises(ParameterError) as caught:
        OnnxBlocks(tampered(files, change), recipe.rule)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_coarser_graphs_are_not_cut(mlp_sample: Any) -> None:
    recipe, _, _ = cut(mlp_sample, "scalars")
    with pytest.raises(ParameterError, match="which float16 rounds"):
        graph_of(mlp_sample.model, mlp_sample.layout, (5,), torch.float32, "float16", recipe.blocks)
