"""The ONNX graphs that BAFFLE's edge clients run: exported for them, and checked before the run."""

from __future__ import annotations

import functools
from collections.abc import Callable

from moretta.errors import ParameterError
from moretta.protocols.baffle.edge_client import check_memory
from moretta.protocols.baffle.silo.blocks import LayerBlock
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.silo.messages import RUNS_TORCH
from moretta.protocols.baffle.silo.recipe import Recipe
from moretta.protocols.common.setting import Setting

_CHECKED = set[tuple[object, ...]]()


def check(setting: Setting, layout: Layout, graph_of: Callable[[str], bytes], recipe: Recipe | None = None) -> None:
    """Raise ParameterError for settings under which an edge client could never take part.

    graph_of: what `exporter` returned. recipe: the silos' settings, where they move blocks. The graph is exported and
    loaded once for each model, so that one that ONNX or ONNX Runtime cannot express in this precision is found before
    the run.
    """
    engine = setting.engine
    precision = engine.edge_precision
    if not engine.edge:
        return
    check_memory(engine.memory_limit_mib, "engine")
    # Roles may be built several times. Only the success is cached, not the graph; at worst a failure is found later.
    model = (
        str(setting.model),
        layout.digest,
        setting.row_shape,
        str(setting.silos[0].x.dtype),
        precision,
        () if recipe is None else recipe.blocks,
    )
    if model in _CHECKED:
        return
    # onnxruntime may be absent where nobody asks
    from moretta.protocols.baffle.edge.onnx_blocks import OnnxBlocks
    from moretta.protocols.baffle.edge.onnx_forward import OnnxForward

    try:
        graph = graph_of(precision)
        if recipe is not None and recipe.rule is not None:
            OnnxBlocks(graph, recipe.rule)
        else:
            OnnxForward(graph)
    except ParameterError as error:
        raise ParameterError(f'edge clients with edge-precision = "{precision}": {error}') from None
    _CHECKED.add(model)


def exporter(setting: Setting, layout: Layout, blocks: tuple[LayerBlock, ...] = ()) -> Callable[[str], bytes]:
    """Return a function that gives the ONNX graph in a precision, exported when it is first asked for."""

    @functools.cache
    def graph_of(precision: str) -> bytes:
        if precision == RUNS_TORCH:
            return b""
        from moretta.protocols.baffle.onnx_export import graph_of as export  # onnx may be absent where nobody asks

        return export(setting.model, layout, setting.row_shape, setting.row_dtype, precision, blocks)

    return graph_of
