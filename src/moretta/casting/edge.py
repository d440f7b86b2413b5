"""BAFFLE's silos that are edge clients, each in a process of its own, and the graphs that they run."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from moretta.casting.parts import credentials_of, schema_of
from moretta.edge.settings import Settings
from moretta.engines.child import ChildClient
from moretta.errors import MissingExtra, ParameterError
from moretta.protocol import Array, State
from moretta.protocols.accountant import Privacy
from moretta.protocols.baffle.forward import Layout
from moretta.protocols.baffle.messages import MESSAGES, RUNS_TORCH
from moretta.protocols.baffle.recipe import Recipe
from moretta.protocols.scoring import HeldOut
from moretta.roles import Setting

# A process that has imported numpy and ONNX Runtime, and nothing else, has 62 MiB resident (x86-64 Linux, Python 3.11):
# what is well below that has room for no model, on any machine or version.
FLOOR_MIB = 48.0
PACKAGES = {"onnxruntime": "edge", "onnx": "onnx", "onnxscript": "onnx"}  # and the extra that each comes with


def check_packages(edge: Sequence[str]) -> None:
    """Raise `moretta.errors.MissingExtra` where what edge clients, if any, run or are sent cannot be had."""
    for package, extra in PACKAGES.items() if edge else ():
        try:
            there = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:
            there = False
        if not there:
            raise MissingExtra(f"edge clients need {package}, which is not there; run: pip install 'moretta[{extra}]'")


_CHECKED = set[tuple[object, ...]]()


def check(setting: Setting, layout: Layout, graph_of: Callable[[str], bytes]) -> None:
    """Raise ParameterError for settings of edge clients with which none could ever take part.

    graph_of: what `exporter` returned. The graph is exported and loaded once for each model, so that one that ONNX or
    ONNX Runtime cannot express in this precision is found before the run.
    """
    engine = setting.engine
    limit, precision = engine.memory_limit_mib, engine.edge_precision
    if not engine.edge:
        return
    if limit is not None and limit < FLOOR_MIB:
        raise ParameterError(
            f"[engine] memory-limit-mib = {limit:g}: no edge client fits, as ONNX Runtime alone takes some "
            "60 MiB; give 80 or more, or remove it"
        )
    # A run may be cast several times. What is kept is that it worked, not the graph: at worst that is found later.
    model = (str(setting.model), layout.digest, setting.row_shape, str(setting.silos[0].x.dtype), precision)
    if model in _CHECKED:
        return
    from moretta.edge.onnx_forward import OnnxForward  # onnxruntime may be absent where nobody asks

    try:
        OnnxForward(graph_of(precision))
    except ParameterError as error:
        raise ParameterError(f'edge clients with edge-precision = "{precision}": {error}') from None
    _CHECKED.add(model)


def in_a_process(
    state: State,
    rows: tuple[Array, Array],
    name: str,
    recipe: Recipe,
    privacy: Privacy | None,
    schema: str,
    sharers: int,
    setting: Setting,
    held_out: HeldOut | None = None,
) -> ChildClient:
    """Return the role of a silo that runs ONNX in a process, which is not started yet.

    state: of the role, at first; rows: inputs, and targets as the loss wants them. Rows held back travel as their last.
    """
    secure, engine, scheme = setting.secure_aggregation, setting.engine, setting.secure_aggregation.scheme
    proves = credentials_of(setting, name, scheme) is not None  # the files are read here too, to check them first
    identity = (secure.identity or "").replace("{silo}", name)
    if held_out is not None:
        rows = np.concatenate([rows[0], held_out.x]), np.concatenate([rows[1], held_out.y])
    settings = Settings(
        name=name,
        recipe=recipe,
        scheme=scheme,
        ring_bits=secure.ring_bits,
        rules=setting.rules(scheme),
        session=setting.session,
        schema=schema,
        batch_size=setting.batch_size,
        seed=setting.seed,
        precision=engine.edge_precision,
        memory_limit_mib=engine.memory_limit_mib,
        micro_batch=engine.micro_batch,
        privacy=privacy,
        sharers=sharers,
        roster="" if secure.roster is None else str(secure.roster.absolute()),
        identity=str(Path(identity).absolute()) if proves else "",
        held_out=0 if held_out is None else len(held_out.x),
        figures=tuple(setting.figures),
        rounds=setting.rounds,
    )
    root = setting.insecure_root(name)
    insecure = b"" if root is None else root.reveal()
    return ChildClient(name, settings.dump(), state, rows, schema_of(MESSAGES), insecure=insecure)


def exporter(setting: Setting, layout: Layout) -> Callable[[str], bytes]:
    """Return what gives silos that run ONNX their graph in a precision, exported when it is first asked for."""

    @functools.cache
    def graph_of(precision: str) -> bytes:
        if precision == RUNS_TORCH:
            return b""
        from moretta.protocols.baffle.onnx_export import graph_of as export  # onnx may be absent where nobody asks

        x = setting.silos[0].x
        dtype = torch.tensor(x[:0]).dtype if x.dtype.kind in "iu" else setting.dtype
        return export(setting.model, layout, setting.row_shape, dtype, precision)

    return graph_of
