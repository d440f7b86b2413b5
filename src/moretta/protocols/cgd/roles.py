"""Builds CGD's roles: an aggregator and its participants, or a simulation of all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moretta.contract.lazy_rows import loaded
from moretta.contract.messages import Array, Tensors
from moretta.contract.roles import Client as Role
from moretta.data.alignment.exchange import Aligner, align
from moretta.data.holders import Grid, check_order, grid_of
from moretta.data.silo import Silo, in_order
from moretta.data.tables.preparation import ColumnRules, Preparation
from moretta.errors import ParameterError, RowsError
from moretta.protocols.cgd.client import Client, GridPosition
from moretta.protocols.cgd.group_keys import NAME as EVERYBODY
from moretta.protocols.cgd.group_keys import GroupKeys, Membership, row_group, run_of
from moretta.protocols.cgd.layers import Group, Layers, groups_of, joined
from moretta.protocols.cgd.local import shared_biases
from moretta.protocols.cgd.messages import MESSAGES
from moretta.protocols.cgd.params import CGD
from moretta.protocols.cgd.row_order import RowOrder, RowsIn
from moretta.protocols.cgd.server import Server
from moretta.protocols.cgd.simulation import Simulation
from moretta.protocols.common import modules
from moretta.protocols.common import roles as common
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.enrolment import Enrolment, SiloRows, fitted_alone, prepared
from moretta.protocols.common.roles import Left, Roles
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.silo_rows import schema_of
from moretta.protocols.common.silo_setup import SiloSetup
from moretta.protocols.common.statistics import NOTHING, Statistics
from moretta.secure_aggregation.agreement import SetUp
from moretta.secure_aggregation.cohort import Origin, complete
from moretta.secure_aggregation.one_sum import Answers


def build(protocol: CGD, setting: Setting) -> Roles:
    """Build CGD's roles, or their simulation where the engine is one."""
    if protocol.hidden_bias == "shared" and not shared_biases(protocol, setting.model):
        raise ParameterError(
            'hidden-bias = "shared" is for hidden layers with biases that train, and the model has none; remove it'
        )
    return _simulation(protocol, setting) if setting.spec.engine.simulates else _participants(protocol, setting)


def left(client: Role) -> Left:
    """Return what a participant leaves at its own site: its model, which nobody else has, and its scores."""
    return Left(model=client.model(), scores=client.scores) if isinstance(client, Client) else Left()


def _participants(protocol: CGD, setting: Setting) -> Roles:
    grid, secure, model = grid_of(setting.silos), setting.secure_aggregation, setting.model
    blind = secure.scheme != "none" if protocol.blind is None else protocol.blind
    split = any(silo.columns for silo in setting.silos)
    joint = split and protocol.vertical == "joint"
    _check_loss(protocol, joint=joint)
    shapes = {name: tuple(value.shape) for name, value in modules.trainable(model).items()}
    layers = Layers.of(model) if split else None
    first = "" if layers is None else layers.weight
    groups = groups_of(grid, shapes, first, joint=joint)
    enrolments = {
        name: common.enrolment_of(
            setting,
            secure.scheme,
            group.members,
            _columns_of(setting, grid, group, first),
            labelled=group.tells_loss,
        )
        for name, group in groups.items()
        if len(group.members) > 1
    }
    clients, alone = dict[str, Client](), dict[str, Preparation]()
    one_labelled = bool(setting.scaled_targets) and not any(
        enrolment.statistics.targets for enrolment in enrolments.values()
    )
    if one_labelled and not split:
        raise ParameterError(
            "[data] standardise-targets: participants of cgd scale by a sum, and here one has all rows; remove it"
        )
    if joint and not protocol.align:
        check_order(setting.silos)
    schema, membership = modules.schema(model), Membership.of(grid, groups, joint=joint)
    for silo in setting.local:
        name, row = silo.name, grid.parts[silo.name].row
        holds = not joint or name == grid.heads[row]
        if holds and not len(silo.y):
            raise RowsError(
                f'silo `{name}` has no labels, and with vertical = "independent" each participant needs those of its '
                "rows"
            )
        setup = setting.setup(silo if holds else replace(silo, y=silo.y[:0]), schema, NOTHING, b"")
        by_itself = split and any(list(members) == [name] for members in grid.column_groups.values())
        rows_in = partial(
            _rows_in, protocol, setting, setup, silo, row, alone if by_itself else None, targets=one_labelled
        )
        mine = {group: group_of_name for group, group_of_name in groups.items() if name in group_of_name.members}
        holders, head = (tuple(grid.rows[row]), grid.heads[row]) if joint else ((name,), None)
        position = GridPosition(name, holders, head, silo.columns, mine)
        statistics = {group: enrolment.statistics for group, enrolment in enrolments.items() if group in mine}
        clients[name] = _participant(
            protocol, setting, setup, silo, rows_in, position, row, membership, statistics, blind=blind
        )
    server = Server(protocol, setting, grid, groups, enrolments, joint=joint, blind=blind)
    whole = WholeModels(grid, clients, model, layers, enrolments, alone)
    return Roles(
        server,
        clients,
        whole.preparation,
        secure.scheme,
        schema_of(MESSAGES),
        setting.least(secure.scheme),
        whole.models,
        whole.displaced if len(clients) == len(setting.silos) else None,
        _too_small(grid, groups, joint=joint),
        lambda: next((client.scores for client in clients.values() if client.scores), {}),
        counted=lambda: next((enrolment.counted for enrolment in enrolments.values()), None),
    )


def _too_small(grid: Grid, groups: Mapping[str, Group], *, joint: bool) -> list[str]:
    """Return a sentence for each group and row that is too small to hide its members from each other."""
    sentences = [
        f"{' and '.join(group.members)} share layers with nobody else (group `{name}`), so the sum less one's own part "
        "is the other's gradient; three or more hide it"
        for name, group in groups.items()
        if len(group.members) == 2
    ]
    sentences += [
        f"row `{row}` has two participants, so the one with the labels sees the other's part of its first layer's "
        "values; of three or more it sees their sum"
        for row, names in grid.rows.items()
        if joint and len(names) == 2
    ]
    if joint and len(grid.rows) == 1 and len(grid.parts) > 1:
        sentences.append(
            "the grid has one row, so the participant with the labels works out the others' X X', the inner products "
            "of their rows, by itself; more rows hide it"
        )
    return sentences


def _columns_of(setting: Setting, grid: Grid, group: Group, first: str) -> ColumnRules:
    """Return the input columns that a group prepares together: its part's, or all if no column is split."""
    if not first:
        return setting.columns
    return setting.columns.of(grid.parts[group.members[0]].columns if first in group.shapes else ())


def _rows_in(
    protocol: CGD,
    setting: Setting,
    setup: SiloSetup,
    silo: Silo,
    row: str,
    alone: dict[str, Preparation] | None,
    order: NDArray[np.int64] | None,
    *,
    targets: bool,
) -> SiloRows:
    """Return a participant's rows in an order. row: of the grid. alone: receives the preparation of unshared columns.

    targets: whether it scales targets itself, if it has them.
    """
    own, y = in_order(silo, order), setup.y if order is None or not len(setup.y) else setup.y[order]
    in_given_order = protocol.batches == "in-order"
    # Of a row's holders the same, as are all batches.
    batches = Batches(len(own.x), setup.batch_size, setup.seed, row, setup.run, in_order=in_given_order)
    rows = common.rows_of(setting, replace(setup, x=own.x, y=y, subjects=own.subjects), batches)
    if alone is not None:
        alone[silo.name] = rows.prepare_alone(setting.columns.of(silo.columns), targets=targets and len(y) > 0)
    return rows


def _participant(
    protocol: CGD,
    setting: Setting,
    setup: SiloSetup,
    silo: Silo,
    rows_in: RowsIn,
    position: GridPosition,
    row: str,
    membership: Membership,
    statistics: Mapping[str, Statistics],
    *,
    blind: bool,
) -> Client:
    runs = {name: run_of(name, setup.run) if setup.run else "" for name in (EVERYBODY, *position.groups)}
    insecure, aligner = setting.insecure_root(silo.name), None
    contributors = {
        name: setup.contributor(insecure, setting.rules(setup.scheme, group.members), runs[name])
        for name, group in position.groups.items()
        if len(group.members) > 1
    }
    origin = Origin(setup.credentials, insecure, setup.session)
    keys = GroupKeys(silo.name, SetUp(silo.name, complete(setup.rules), origin, runs[EVERYBODY]), membership)
    if protocol.align and len(position.row) > 1:
        aligner = _aligner(protocol, setting, silo, keys, setup.answers)
    ids = silo.ids if aligner is None else silo.subject_ids
    order = RowOrder(silo.name, rows_in, ids, aligner, keys, row_group(row))
    root = setting.root(silo.name)
    return Client(
        protocol, position, setting.silo_model(), order, root, contributors, keys, statistics, setup, blind=blind
    )


def _aligner(protocol: CGD, setting: Setting, silo: Silo, keys: GroupKeys, answers: Answers) -> Aligner:
    """Return a participant's half of the alignment. Raises `moretta.errors.ParameterError` for rows without ids."""
    ids = silo.subject_ids
    if ids is None:
        raise RowsError(_no_ids(silo.name))
    insecure = setting.insecure_root(silo.name)
    where = f"silo `{silo.name}`"
    return Aligner(silo.name, ids, protocol.id_rules, protocol.align_pad_to, where, keys, insecure, answers)


def _check_loss(protocol: CGD, *, joint: bool) -> None:
    if joint and protocol.own_loss is not None:
        raise ParameterError(
            "own-loss is for silos that hold whole rows, and here the holders of a row's columns train one model "
            'together; remove it, or use vertical = "independent"'
        )


def _simulation(protocol: CGD, setting: Setting) -> Roles:
    """Build all participants of a grid as one server that asks nobody."""
    grid = grid_of(setting.silos)
    _check_loss(protocol, joint=any(silo.columns for silo in setting.silos) and protocol.vertical == "joint")
    if protocol.align:
        setting = replace(setting, silos=_aligned(protocol, setting.silos, grid))
    x, y, counts = common.whole_rows(setting)
    x = loaded(x).reshape(len(x), -1)
    preparation = fitted_alone(x, setting.columns, y if setting.scaled_targets else None)
    rows = prepared(x, preparation, setting.dtype), torch.from_numpy(preparation.scaled(y)), counts
    simulation = Simulation(protocol, setting.spec, setting.model, grid, *rows)
    return Roles(simulation, {}, lambda: preparation, "none", (), 0, simulation.models, simulation.displaced)


def _aligned(protocol: CGD, silos: Sequence[Silo], grid: Grid) -> list[Silo]:
    """Return the silos with their rows aligned, as the participants of a row would do it between them."""
    aligned = {silo.name: silo for silo in silos}
    for row, names in grid.rows.items():
        if len(names) < 2:
            continue
        ids = {name: aligned[name].subject_ids for name in (grid.heads[row], *names)}
        if missing := [name for name, own in ids.items() if own is None]:
            raise RowsError(_no_ids(missing[0]))
        ids_known = {name: own for name, own in ids.items() if own is not None}
        for name, alignment in align(ids_known, protocol.id_rules, protocol.align_pad_to).items():
            own = alignment.normalised(ids[name], f"silo `{name}`")
            aligned[name] = replace(in_order(aligned[name], alignment.order), ids=own)
    return list(aligned.values())


def _no_ids(name: str) -> str:
    return (
        f"silo `{name}`: [protocol] align = true puts rows in order by their ids, and these have none; name the id "
        "column (id-column; from Python: Silo ids)"
    )


class WholeModels:
    """Confined models joined from their holders' parts, which only a simulation on one machine can do.

    A row of a joint grid has one model, whose first layer's parts never leave their holders in a real federation. They
    are joined for measurement, and the run folder states that it was a simulation.

    model: the whole architecture. layers: of a network with split columns; None without. alone: the preparation of
    columns that only one participant has, by its name.
    """

    def __init__(
        self,
        grid: Grid,
        clients: Mapping[str, Client],
        model: nn.Module,
        layers: Layers | None,
        enrolments: Mapping[str, Enrolment],
        alone: Mapping[str, Preparation],
    ) -> None:
        self._grid, self._clients, self._layers = grid, clients, layers
        self._names = list(modules.arrays(model))
        self._enrolments, self._alone = enrolments, alone

    def models(self) -> Mapping[str, Tensors]:
        """Return all confined models: by row if a row has one together, else by participant.

        Columns that a model does not read have weight 0.
        """
        joint = any(client.runs_jointly for client in self._clients.values())
        owners = self._grid.rows if joint else {name: (name,) for name in self._clients}
        return {owner: self._joined(names, lambda client: client.model()) for owner, names in owners.items()}

    def displaced(self) -> Tensors:
        """Return D as a model of its own, added to the centre of the starts."""
        owners = [(name,) for name in self._clients] if self._layers is None else self._grid.rows.values()
        return self._joined(next(iter(owners)), lambda client: client.displaced())

    def _joined(self, names: Sequence[str], make: Callable[[Client], Tensors]) -> dict[str, Array]:
        """Return one model of its holders' parts, each returned by `make`."""
        parts = [make(self._clients[name]) for name in names]
        whole = {name: value for part in parts for name, value in part.items()}
        if (layers := self._layers) is None:
            return whole
        columns = [self._grid.parts[name].columns for name in names]
        whole[layers.weight] = joined([part[layers.weight] for part in parts], columns, layers.columns)
        return {name: whole[name] for name in self._names}

    def preparation(self) -> Preparation:
        """Return how each input column is prepared."""
        if self._layers is None:
            agreed = next(iter(self._enrolments.values()), None)
            return Preparation.nothing() if agreed is None else agreed.preparation
        columns = self._layers.columns
        preparation = Preparation(np.zeros(columns), np.zeros(columns), np.ones(columns))
        for group, members in self._grid.column_groups.items():
            own = self._alone.get(members[0])
            if group in self._enrolments:
                own = self._enrolments[group].preparation
            if own is not None:
                preparation = preparation.joined(self._grid.parts[members[0]].columns, own)
        # The group of the layers above has the targets.
        sharing = next(
            (enrolment.preparation for enrolment in self._enrolments.values() if enrolment.preparation.scales_targets),
            None,
        )
        return preparation if sharing is None else preparation.joined((), sharing)
