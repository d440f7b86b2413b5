"""Builds the roles of FedSGD, federated averaging, FedProx, silos that train alone, and one pool of all rows."""

from __future__ import annotations

import hashlib

from moretta.contract.roles import Client as Role
from moretta.protocols.common.accountant import Accountant
from moretta.protocols.common.releases import Releases
from moretta.protocols.common.role_parts import (
    POOL,
    bound_to,
    contributor_of,
    enrolment_of,
    highest_rate,
    pooled_rows,
    roles_of,
    rows_of,
    without_noise,
)
from moretta.protocols.common.roles import Left, Roles
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.stacked import Stacked
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.client import Client, LoneClient
from moretta.protocols.fedsgd.messages import MESSAGES
from moretta.protocols.fedsgd.params import FedSGD
from moretta.protocols.fedsgd.private import PrivateGradient
from moretta.protocols.fedsgd.server import LoneServer, Server


def build_fedsgd(protocol: Training, setting: Setting) -> Roles:
    """Build FedSGD's server and silos."""
    return _build(protocol, setting, setting.secure_aggregation.scheme, setting.batch_size)


def build_fedavg(protocol: Training, setting: Setting) -> Roles:
    """Build the same for federated averaging and FedProx, where an epoch uses all of a silo's rows."""
    return _build(protocol, setting, setting.secure_aggregation.scheme, 0)


def build_centralised(protocol: Training, setting: Setting) -> Roles:
    """Build a server and one party that has all rows."""
    return _build(protocol, setting, "none", setting.batch_size * len(setting.silos), pooled=True)


def _build(protocol: Training, setting: Setting, scheme: str, batch_size: int, *, pooled: bool = False) -> Roles:
    agreed = enrolment_of(setting, scheme, None, setting.columns, batch_size)
    statistics = agreed.statistics
    rows = {POOL: pooled_rows(protocol, setting, statistics)} if pooled else rows_of(protocol, setting, statistics)
    privacy = protocol.privacy if isinstance(protocol, FedSGD) else None
    # Where no sum of fewer than K silos is opened, each adds a K-th of the noise's variance. An upload in the clear has
    # all of it.
    sharers = 1 if scheme == "none" else setting.least(scheme)
    private, accountant, releases = dict[str, PrivateGradient](), None, None
    if privacy is not None:
        bound = hashlib.sha256(bound_to(protocol, setting) + setting.model_source.encode()).digest()
        for name, own in rows.items():
            root = setting.root(name)
            private[name] = PrivateGradient(privacy, own, batch_size, protocol.loss_function, root, bound, sharers)
        accountant = Accountant(privacy, highest_rate(setting, batch_size), sharers, without_noise(setting, statistics))
        releases = Releases()
    largest, rounds = setting.secure_aggregation.largest, setting.rounds
    server = Server(protocol, setting.model, agreed, largest, rounds, accountant, releases)
    model = setting.silo_model().train()
    stacked = Stacked(model, protocol.loss_function)
    clients = {
        name: Client(protocol, model, own, contributor_of(setting, scheme, name), rounds, private.get(name), stacked)
        for name, own in rows.items()
    }
    return roles_of(server, clients, agreed, MESSAGES, setting.least(scheme), releases, accountant)


def build_local(protocol: Training, setting: Setting) -> Roles:
    """Build silos that train alone."""
    scheme = setting.secure_aggregation.scheme if len(setting.silos) > 1 else "none"
    agreed = enrolment_of(setting, scheme, None, setting.columns)
    clients = {
        name: LoneClient(protocol, setting.silo_model(), own, contributor_of(setting, scheme, name), setting.rounds)
        for name, own in rows_of(protocol, setting, agreed.statistics).items()
    }
    server = LoneServer(agreed, setting.model)
    return roles_of(server, clients, agreed, MESSAGES, setting.least(scheme))


def left(client: Role) -> Left:
    """Return what a silo's role leaves at its site: where it added noise, the privacy of its own rows."""
    return Left(privacy=client.privacy()) if isinstance(client, Client) else Left()
