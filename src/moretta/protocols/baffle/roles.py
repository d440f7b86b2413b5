"""Builds BAFFLE's roles: a server that rebuilds gradients, and silos that only run forward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from moretta.contract.roles import Client as Role
from moretta.errors import ParameterError
from moretta.protocols.baffle import edge_client, torch_forward
from moretta.protocols.baffle.batch_statistics import moving
from moretta.protocols.baffle.params import BAFFLE
from moretta.protocols.baffle.server import Server
from moretta.protocols.baffle.silo.client import Client
from moretta.protocols.baffle.silo.directions import Directions, order_of
from moretta.protocols.baffle.silo.estimate import directions_of
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.silo.messages import MESSAGES
from moretta.protocols.baffle.silo.recipe import Recipe
from moretta.protocols.baffle.torch_forward import TorchForward, check_model, check_rows, layout_of
from moretta.protocols.common import modules
from moretta.protocols.common import roles as common
from moretta.protocols.common.roles import Left, Roles
from moretta.protocols.common.setting import Setting

if TYPE_CHECKING:
    from moretta.protocols.baffle.cut import Cut


def build(protocol: BAFFLE, setting: Setting) -> Roles:
    """Build BAFFLE's server and silos."""
    setting, graph, warnings = _forward_only(protocol, setting)
    scheme = setting.secure_aggregation.scheme
    lot = protocol.lot(setting.spec.data.batch_size)
    agreed = common.enrolment_of(setting, scheme, None, setting.columns, lot)
    layout = layout_of(setting.model, moving(setting.model) if protocol.batch_statistics else ())
    forward, recipe = _forward(protocol, setting, layout, graph)
    device = torch.device(setting.spec.run.device)
    accountant = common.accountant_of(setting, scheme, lot, agreed.statistics)
    computes = common.model_bound_to(setting, layout.shapes)
    _check_rows(setting, forward, several=not protocol.batch_statistics)
    most = directions_of(protocol.form, protocol.most_at_once)
    if protocol.orthogonal and order_of(most) > layout.size:
        raise ParameterError(
            f"orthogonal: {most} directions need {order_of(most)} parameters or more, and {layout.size} are trained; "
            "lower k or remove orthogonal"
        )
    combine = Directions.combine if device.type == "cpu" else partial(torch_forward.combine, device=device)
    if edge := setting.spec.engine.edge:
        edge_client.check_tokens(setting.layout, setting.spec.engine.edge_precision)
    edge_client.check_packages(edge_client.PACKAGES if edge else ())
    graph_of = edge_client.exporter(setting, layout, recipe.blocks)
    edge_client.check_graph(setting, layout, graph_of, recipe)
    clients = dict[str, Role]()
    for name, setup in common.setups_of(setting, agreed.statistics).items():
        if name in edge:
            clients[name] = edge_client.edge_client(protocol, setup, setting.spec.engine, setting.insecure_root(name))
        else:
            clients[name] = Client(setup, recipe, forward, setting.insecure_root(name), model=computes, combine=combine)
    server = Server(protocol, recipe, setting, layout, agreed, graph_of, accountant, combine)
    roles = common.roles_of(server, clients, agreed, MESSAGES, setting.least(scheme), accountant)
    return replace(roles, warnings=warnings)


def _forward_only(protocol: BAFFLE, setting: Setting) -> tuple[Setting, Cut | None, list[str]]:
    """Return the setting of a model as silos run it, its graph if blocks of layers move, and its warnings."""
    model = torch_forward.partly_trained(setting.built, protocol.trainable)
    x = torch.ones(2, *setting.row_shape, dtype=setting.row_dtype)
    blocks = protocol.recipe(setting.spec.run.rounds, setting.spec.data.varied).rule is not None
    model, warnings = torch_forward.forward_only(model, x, blocks=blocks, by_batch=protocol.batch_statistics)
    if not blocks:
        return replace(setting, built=model), None, warnings
    from moretta.protocols.baffle import cut  # torch.export, which takes as long to import as PyTorch

    check_model(model)
    graph = cut.graph_of(model.to(setting.dtype), setting.row_shape, setting.row_dtype, setting.spec.run.device)
    idle = cut.unused(graph, modules.trainable(model))
    for name in idle:
        model.get_parameter(name).requires_grad_(False)
    if idle:
        warnings.append(
            f"the outputs do not depend on {', '.join(f'`{name}`' for name in idle)!s:.300}; it is not trained"
        )
    if len(modules.trainable(model)) == 0:
        raise ParameterError("the outputs depend on no trained parameter; unfreeze one")
    return replace(setting, built=model), graph, warnings


def _forward(protocol: BAFFLE, setting: Setting, layout: Layout, graph: Cut | None) -> tuple[TorchForward, Recipe]:
    """Return the runner of the model for all local silos, as each call sets its parameters, and their settings."""
    recipe = protocol.recipe(setting.spec.run.rounds, setting.spec.data.varied)
    device, micro = setting.spec.run.device, setting.spec.engine.micro_batch
    if recipe.rule is None or graph is None:
        by_batch = protocol.batch_statistics
        return TorchForward(setting.model, layout, device, by_batch=by_batch, micro_batch=micro), recipe
    from moretta.protocols.baffle import cut, torch_blocks

    graph = cut.with_layers(graph, layout)
    blocks = cut.blocks_of(graph, layout, recipe.rule)
    return (
        torch_blocks.TorchBlocks(setting.model, layout, graph, blocks, device, micro),
        recipe.by(blocks, layout.shapes),
    )


def left(client: Role) -> Left:
    """Return what a silo's role leaves at its site: the privacy of its own rows, if it added noise."""
    return Left(privacy=client.privacy()) if isinstance(client, Client) else Left()


def _check_rows(setting: Setting, forward: TorchForward, *, several: bool) -> None:
    """Try a silo's rows, or ones; raise ParameterError if rows affect each other or outputs change between passes."""
    rows = next((silo.x[:8] for silo in setting.local), None)
    x = np.ones((2, *setting.row_shape), setting.silos[0].x.dtype) if rows is None else rows
    inputs = x if x.dtype.kind in "iu" else x.astype(forward.layout.dtype)
    at = forward.layout.flat(modules.arrays(setting.model))
    check_rows(forward, at, np.ascontiguousarray(inputs), several=several)
