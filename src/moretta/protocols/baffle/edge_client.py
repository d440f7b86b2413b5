"""An edge client from its parent process: checks of its packages and graph, and the silo's own process.

Needs no torch, and is not imported in that process, whose imports count in its memory.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from moretta.contract.messages import Message
from moretta.contract.roles import State
from moretta.data.layout import SampleLayout
from moretta.engines.child import ChildClient
from moretta.engines.settings import Engine
from moretta.errors import MissingExtra, ParameterError
from moretta.protocols.baffle.params import BAFFLE
from moretta.protocols.baffle.silo.blocks import LayerBlock
from moretta.protocols.baffle.silo.client import Client, noise_of
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.silo.messages import MESSAGES, RUNS_TORCH
from moretta.protocols.baffle.silo.recipe import EdgeSettings, Recipe
from moretta.protocols.common.overlap import AskApart, compared
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.silo_rows import schema_of
from moretta.protocols.common.silo_setup import SiloSetup
from moretta.secure_aggregation.keystream import SecretRoot

COMMAND = (sys.executable, "-P", "-m", "moretta.protocols.baffle.edge")
PACKAGES = {"onnxruntime": "edge", "onnx": "onnx", "onnxscript": "onnx"}  # each with its extra
RUNS = ("onnxruntime",)  # needed by an edge client itself; the others export its graph


def check_packages(needed: Iterable[str]) -> None:
    """Raise `moretta.errors.MissingExtra` if one of `PACKAGES` is needed and missing."""
    for package in needed:
        there = None
        with suppress(ModuleNotFoundError):
            there = importlib.util.find_spec(package)
        if there is None:
            extra = PACKAGES[package]
            raise MissingExtra(
                f"edge clients need {package}, which is not installed; run: pip install 'moretta[{extra}]'"
            )


def check_tokens(layout: SampleLayout | None, precision: str) -> None:
    """Raise ParameterError if token ids beside numbers would be rounded like those."""
    if layout is not None and layout.has_integers and precision == "float16":
        tokens = ", ".join(array.name for array in layout.arrays if array.integers)
        raise ParameterError(
            f'edge-precision = "float16" would round the token ids of {tokens}, which lie beside numbers in a row; use '
            '"float32" or "int8-activations"'
        )


def privacy_of(setup: SiloSetup, state: State, left_out: str) -> Mapping[str, float | str]:
    """Return the privacy of a silo's own rows, from its process's state. left_out: uses beside its uploads."""
    own = noise_of(setup, SecretRoot(state["private/secret_root"])) if setup.privacy else None
    if own is None:
        return {}
    own.releases.restore({"releases": state["private/releases"]})
    try:
        return own.facts(left_out)
    except MissingExtra as error:
        return {"releases": float(own.releases.count), "epsilon_is_not_stated": str(error)}


def edge_client(protocol: BAFFLE, setup: SiloSetup, engine: Engine, insecure: SecretRoot | None) -> ChildClient:
    """Return the role of a silo that runs ONNX in a process, which is not started yet.

    Args:
        setup: the silo's input.
        engine: its memory limit and precision.
        insecure: for tests, the root of all secrets.

    Raises:
        moretta.errors.ParameterError: an identity that does not fit the roster.
    """
    recipe = protocol.recipe(setup.rounds, setup.augment)
    lends = Client(
        replace(setup, held_out=None, validation=None, helped=None), recipe, insecure=insecure
    )  # its secrets: the first state
    settings = EdgeSettings(setup, recipe, engine.edge_precision, engine.memory_limit_mib, engine.micro_batch)

    def answer_locally(message: Message) -> Message | None:
        return compared(message, setup.subjects, setup.answers) if isinstance(message, AskApart) else None

    secret = b"" if insecure is None else insecure.reveal()
    return ChildClient(
        setup.name, settings.dump(), lends.state(), setup.sent(), schema_of(MESSAGES), COMMAND, secret, answer_locally
    )


_CHECKED = set[tuple[object, ...]]()


def check_graph(
    setting: Setting, layout: Layout, graph_of: Callable[[str], bytes], recipe: Recipe | None = None
) -> None:
    """Raise ParameterError for settings under which an edge client could never take part.

    The graph is exported and loaded once for each model, so that one that ONNX or ONNX Runtime cannot express in this
    precision fails before the run.

    Args:
        graph_of: Exports the model in a precision, as `exporter` returns it.
        recipe: The silos' settings, if they move blocks.
    """
    engine = setting.spec.engine
    precision = engine.edge_precision
    if not engine.edge:
        return
    # Roles may be built several times. Only success is cached, not the graph; at worst a failure appears later.
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
    # onnxruntime may be absent if unused
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
    """Return a function that returns the ONNX graph in a precision, exported at its first call."""

    @functools.cache
    def graph_of(precision: str) -> bytes:
        if precision == RUNS_TORCH:
            return b""
        from moretta.protocols.baffle.onnx_export import graph_of as export  # onnx may be absent if unused

        return export(setting.model, layout, setting.row_shape, setting.row_dtype, precision, blocks)

    return graph_of
