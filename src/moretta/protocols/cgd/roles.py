"""Builds CGD's roles: an aggregator and its participants, or a simulation of all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from moretta.contract.lazy_rows import loaded
from moretta.contract.messages import Array, Tensors
from moretta.contract.roles import Client as Role
from moretta.data.alignment.exchange import Aligner, align
from moretta.data.holders import Grid, check_order, grid_of
from moretta.data.silo import Silo, in_order
from moretta.data.tables.preparation import Preparation
from moretta.errors import ParameterError, RowsError
from moretta.protocols.cgd.client import Client, GridPosition
from moretta.protocols.cgd.group_keys import NAME as EVERYBODY
from moretta.protocols.cgd.group_keys import GroupKeys, Membership, row_group, run_of
from moretta.protocols.cgd.layers import Group, Layers, groups_of, joined
from moretta.protocols.cgd.local import shared_biases
from moretta.protocols.cgd.messages import MESSAGES
from moretta.protocols.cgd.params import CGD
from moretta.protocols.cgd.row_order import RowOrder
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
from moretta.protocols.common.statistics import NOTHING
from moretta.secure_aggregation.agreement import SetUp
from moretta.secure_aggregation.cohort import Origin, complete


def build(protocol: CGD, setting: Setting) -> Roles:
    """Build CGD's roles, or their simulation where the engine is one."""
    if protocol.hidden_bias == "shared" and not shared_biases(protocol, setting.model):
        raise ParameterError(
            'hidden-bias = "shared" needs hidden layers with biases that train, which the model lacks; remove it'
        )
    return _simulation(protocol, setting) if setting.spec.engine.simulates else _participants(protocol, setting)


def left(client: Role) -> Left:
    """Return what a participant leaves at its own site: its model, which no other party has, and its scores."""
    return Left(model=client.model(), scores=client.scores) if isinstance(client, Client) else Left()


def _participants(protocol: CGD, setting: Setting) -> Roles:
    grid, secure, model = grid_of(setting.silos), setting.secure_aggregation, setting.model
    blind = secure.scheme != "none" if protocol.blind is None else protocol.blind
    joint = grid.is_split and protocol.vertical == "joint"
    _check_loss(protocol, joint=joint)
    shapes = {name: tuple(value.shape) for name, value in modules.trainable(model).items()}
    layers = Layers.of(model) if grid.is_split else None
    groups = groups_of(grid, shapes, "" if layers is None else layers.weight, joint=joint)
    enrolments = dict[str, Enrolment]()
    for name, group in groups.items():
        columns = setting.columns  # a group prepares its part's columns together, or all if no column is split
        if layers is not None:
            columns = columns.of(grid.parts[group.members[0]].columns if layers.weight in group.shapes else ())
        if len(group.members) > 1:
            enrolments[name] = common.enrolment_of(
                setting, secure.scheme, group.members, columns, labelled=group.tells_loss
            )
    one_labelled = bool(setting.scaled_targets) and not any(
        enrolment.statistics.targets for enrolment in enrolments.values()
    )
    if one_labelled and not grid.is_split:
        raise ParameterError(
            "[data] standardise-targets: participants of cgd scale by a sum, but here one has all rows; remove it"
        )
    if joint and not protocol.align:
        check_order(setting.silos)
    membership = Membership.of(grid, groups, joint=joint)
    of = _Participants(protocol, setting, grid, groups, enrolments, membership, joint, blind, one_labelled)
    schema = modules.schema(model)
    clients = {silo.name: of.client(silo, schema) for silo in setting.local}
    server = Server(protocol, setting, grid, groups, enrolments, joint=joint, blind=blind)
    whole = WholeModels(grid, clients, list(modules.arrays(model)), layers, joint, enrolments, of.alone)
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


@dataclass(frozen=True)
class _Participants:
    """The inputs of a run's participants.

    joint: whether a row of the grid has one model. one_labelled: whether only one has targets, which it scales itself.
    alone: receives the preparation of columns that only one participant has, by its name.
    """

    protocol: CGD
    setting: Setting
    grid: Grid
    groups: Mapping[str, Group]
    enrolments: Mapping[str, Enrolment]
    membership: Membership
    joint: bool
    blind: bool
    one_labelled: bool
    alone: dict[str, Preparation] = field(default_factory=dict)

    def client(self, silo: Silo, schema: str) -> Client:
        """Build the participant of a silo. Raises `moretta.errors.ParameterError` where it lacks labels or ids."""
        protocol, setting, name, row = self.protocol, self.setting, silo.name, self.grid.parts[silo.name].row
        holds = not self.joint or name == self.grid.heads[row]
        if holds and not len(silo.y):
            raise RowsError(
                f'silo `{name}` has no labels, and with vertical = "independent" each participant needs those of its '
                "rows"
            )
        setup = setting.setup(silo if holds else replace(silo, y=silo.y[:0]), schema, NOTHING, b"")
        mine = {group: shared for group, shared in self.groups.items() if name in shared.members}
        holders, head = (tuple(self.grid.rows[row]), self.grid.heads[row]) if self.joint else ((name,), None)
        position = GridPosition(name, holders, head, silo.columns, mine)
        statistics = {group: enrolment.statistics for group, enrolment in self.enrolments.items() if group in mine}
        runs = {group: run_of(group, setup.run) if setup.run else "" for group in (EVERYBODY, *mine)}
        insecure = setting.insecure_root(name)
        contributors = {
            group: setup.contributor(insecure, setting.rules(setup.scheme, shared.members), runs[group])
            for group, shared in mine.items()
            if len(shared.members) > 1
        }
        origin = Origin(setup.credentials, insecure, setup.session)
        keys = GroupKeys(name, SetUp(name, complete(setup.rules), origin, runs[EVERYBODY]), self.membership)
        ids, aligner = silo.ids, None
        if protocol.align and len(holders) > 1:
            ids, where = silo.subject_ids, f"silo `{name}`"
            if ids is None:
                raise RowsError(_no_ids(name))
            aligner = Aligner(name, ids, protocol.id_rules, protocol.align_pad_to, where, keys, insecure, setup.answers)
        order = RowOrder(name, partial(self._rows, setup, silo, row), ids, aligner, keys, row_group(row))
        model, root = setting.silo_model(), setting.root(name)
        return Client(protocol, position, model, order, root, contributors, keys, statistics, setup, blind=self.blind)

    def _rows(self, setup: SiloSetup, silo: Silo, row: str, order: NDArray[np.int64] | None) -> SiloRows:
        own, y = in_order(silo, order), setup.y if order is None or not len(setup.y) else setup.y[order]
        in_given_order = self.protocol.batches == "in-order"
        # All holders of a row have the same batches.
        batches = Batches(len(own.x), setup.batch_size, setup.seed, row, setup.run, in_order=in_given_order)
        rows = common.rows_of(self.setting, replace(setup, x=own.x, y=y, subjects=own.subjects), batches)
        if self.grid.is_split and (silo.name,) in self.grid.column_groups.values():
            columns = self.setting.columns.of(silo.columns)
            self.alone[silo.name] = rows.prepare_alone(columns, targets=self.one_labelled and len(y) > 0)
        return rows


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


def _check_loss(protocol: CGD, *, joint: bool) -> None:
    if joint and protocol.own_loss is not None:
        raise ParameterError(
            "own-loss is for silos that hold whole rows, and here the holders of a row's columns train one model "
            'together; remove it, or use vertical = "independent"'
        )


def _simulation(protocol: CGD, setting: Setting) -> Roles:
    """Build all participants of a grid as one server that asks nobody."""
    grid = grid_of(setting.silos)
    _check_loss(protocol, joint=grid.is_split and protocol.vertical == "joint")
    if protocol.align:
        setting = replace(setting, silos=_aligned(protocol, setting.silos, grid))
    x, y, counts = common.whole_rows(setting)
    x = loaded(x)
    preparation = fitted_alone(x, setting.columns, y if setting.scaled_targets else None)
    rows = prepared(x, preparation, setting.dtype).flatten(1), torch.from_numpy(preparation.scaled(y)), counts
    simulation = Simulation(protocol, setting.spec, setting.model, grid, *rows)
    return Roles(simulation, {}, lambda: preparation, "none", (), 0, simulation.models, simulation.displaced)


def _aligned(protocol: CGD, silos: Sequence[Silo], grid: Grid) -> list[Silo]:
    """Return the silos with their rows aligned, as the participants of a row would align them."""
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


@dataclass(frozen=True)
class WholeModels:
    """Confined models joined from their holders' parts, which only a simulation on one machine can do.

    A row of a joint grid has one model, whose first layer's parts never leave their holders in a real federation. They
    are joined for measurement, and the run folder states that it was a simulation.

    Args:
        names: Of the architecture's tensors.
        layers: Of a network with split columns; None without.
        joint: Whether a row of the grid has one model.
        alone: The preparation of columns that only one participant has, by its name.
    """

    grid: Grid
    clients: Mapping[str, Client]
    names: Sequence[str]
    layers: Layers | None
    joint: bool
    enrolments: Mapping[str, Enrolment]
    alone: Mapping[str, Preparation]

    def models(self) -> Mapping[str, Tensors]:
        """Return all confined models, by joint row or else participant; weights of unread columns are 0."""
        owners = self.grid.rows if self.joint and self.clients else {name: (name,) for name in self.clients}
        return {owner: self._joined(names, Client.model) for owner, names in owners.items()}

    def displaced(self) -> Tensors:
        """Return D as a model of its own, added to the centre of the starts."""
        first = next(iter(self.clients if self.layers is None else self.grid.rows))
        return self._joined((first,) if self.layers is None else self.grid.rows[first], Client.displaced)

    def _joined(self, names: Sequence[str], make: Callable[[Client], Tensors]) -> dict[str, Array]:
        """Return one model of its holders' parts, each returned by `make`."""
        parts = [make(self.clients[name]) for name in names]
        whole = {name: value for part in parts for name, value in part.items()}
        if (layers := self.layers) is None:
            return whole
        columns = [self.grid.parts[name].columns for name in names]
        whole[layers.weight] = joined([part[layers.weight] for part in parts], columns, layers.columns)
        return {name: whole[name] for name in self.names}

    def preparation(self) -> Preparation:
        """Return how each input column is prepared."""
        if self.layers is None:
            agreed = next(iter(self.enrolments.values()), None)
            return Preparation.nothing() if agreed is None else agreed.preparation
        preparation = Preparation.nothing(self.layers.columns)
        for group, members in self.grid.column_groups.items():
            own = self.enrolments[group].preparation if group in self.enrolments else self.alone.get(members[0])
            if own is not None:
                preparation = preparation.joined(self.grid.parts[members[0]].columns, own)
        # The group of the layers above has the targets.
        agreed_on = (enrolment.preparation for enrolment in self.enrolments.values())
        sharing = next((preparation for preparation in agreed_on if preparation.scales_targets), None)
        return preparation if sharing is None else preparation.joined((), sharing)
