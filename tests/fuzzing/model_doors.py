"""Models: graphs at an edge client, and folders that were handed over."""

from __future__ import annotations

import math
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import torch
from door import BETWEEN, Door, folder, parts
from safetensors import safe_open
from safetensors.torch import save
from torch import nn

from moretta.errors import ParameterError
from moretta.protocols.baffle.cut import blocks_of, cut_of
from moretta.protocols.baffle.edge import metadata
from moretta.protocols.baffle.edge.onnx_blocks import OnnxBlocks
from moretta.protocols.baffle.edge.onnx_forward import OnnxForward
from moretta.protocols.baffle.onnx_export import graph_of
from moretta.protocols.baffle.silo.blocks import Rule
from moretta.protocols.baffle.silo.forward import Layout
from moretta.run import trained_model
from moretta.run.python_arguments import Made
from moretta.run.trained_model import load


def open_onnx(data: bytes) -> None:
    """A graph at an edge client: loaded, and run at two vectors of weights."""
    forward = OnnxForward(data)
    if max(forward.layout.size, math.prod(forward.row_shape)) < 1 << 16:
        flat = np.full(forward.layout.size, 0.01, forward.layout.dtype)
        forward.outputs(np.stack([flat, flat + 1]), np.ones((2, *forward.row_shape), np.float32))


def open_onnx_blocks(data: bytes) -> None:
    """A cut model at an edge client; each of its files is a part."""
    forward = OnnxBlocks(metadata.packed(data.split(BETWEEN)), Rule((("*", 2),), "scalars"))
    if max(forward.layout.size, math.prod(forward.row_shape)) < 1 << 16:
        flat = np.full(forward.layout.size, 0.01, forward.layout.dtype)
        forward.start(flat, np.ones((2, *forward.row_shape), np.float32))


INPUTS = {
    "shape": [3],
    "outputs": 2,
    "columns": ["a", "b", "c"],
    "fill": [0.0, 0.0, 0.0],
    "mean": [0.0, 0.0, 0.0],
    "deviation": [1.0, 1.0, 1.0],
    "table": None,
    "fills_absent": False,
    "may_lack": [False],
    "task": "classification",
    "loss": "cross-entropy",
    "classes": ["no", "yes"],
    "dtype": "float32",
    "integers": False,
}


def small_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2)).eval()


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)).eval()


def onnx_graphs() -> list[bytes]:
    found = list[bytes]()
    for model, shape in ((small_model(), (3,)), (convolution(), (1, 4, 4))):
        found.append(graph_of(model, layout_of(model), shape, torch.float32, "float32"))
    return found


def onnx_blocks() -> list[bytes]:
    model, rule = small_model(), Rule((("*", 2),), "scalars")
    layout = layout_of(model)
    blocks = blocks_of(cut_of(model, layout, (3,), torch.float32), layout, rule)
    return [BETWEEN.join(metadata.unpacked(graph_of(model, layout, (3,), torch.float32, blocks=blocks)))]


def layout_of(model: nn.Module) -> Layout:
    return Layout.of({name: one.detach().numpy() for name, one in model.named_parameters()}, {})


def open_model_folder(data: bytes) -> None:
    """A folder that `Result.save` wrote: the graph, model.json and inputs.json are the parts; then it predicts."""
    graph, made, inputs = parts(data, 3)
    place = model_folder()
    text = graph.decode("utf-8", "replace")
    (place / "graph.safetensors").write_bytes(save({}, {"graph": text}))
    (place / "model.json").write_bytes(made)
    (place / "inputs.json").write_bytes(inputs)
    load(place).predict(np.ones((2, 3), np.float32))


@cache
def model_folder() -> Path:
    """Return a folder with the weights alone, as the graph, model.json and inputs.json come."""
    place = folder() / "model"
    place.mkdir()
    (place / "released.safetensors").write_bytes(save(small_model().state_dict()))
    return place


def model_folders() -> list[bytes]:
    place, model = folder() / "saved", small_model()
    shutil.rmtree(place, ignore_errors=True)
    tensors = {name: one.numpy() for name, one in model.state_dict().items()}
    trained_model.save(place, model, {"released": tensors}, INPUTS, Made(), torch.float32)
    with safe_open(place / "graph.safetensors", "pt") as file:
        graph = file.metadata()["graph"].encode()
    return [BETWEEN.join([graph, (place / "model.json").read_bytes(), (place / "inputs.json").read_bytes()])]


def operations() -> list[str]:
    """Return PyTorch's core operations, as a graph names them."""
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    whole = {name if "." in name else f"{name}.default" for name in names}
    found = {name: getattr(getattr(torch.ops.aten, name.split(".")[0]), name.split(".")[1], None) for name in whole}
    return sorted(f"aten.{name}" for name, one in found.items() if one is not None and torch.Tag.core in one.tags)


DOORS = {
    "onnx": Door(open_onnx, ParameterError, onnx_graphs, share=1),
    "onnx-blocks": Door(open_onnx_blocks, ParameterError, onnx_blocks, share=1),
    "model-folder": Door(open_model_folder, ParameterError, model_folders, operations, 1),
}
