"""Builds the roles of FedSGD, federated averaging, FedProx, silos that train alone, and one pool of all rows."""

import hashlib

from moretta.contract.roles import Client as Role
from moretta.protocols.common import roles as common
from moretta.protocols.common.batches import most_rows
from moretta.protocols.common.noise import SiloNoise
from moretta.protocols.common.roles import Left, Roles
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.stacked import Stacked
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.client import Client, LoneClient
from moretta.protocols.fedsgd.messages import MESSAGES
from moretta.protocols.fedsgd.own_loop import loops
from moretta.protocols.fedsgd.private import PrivateGradient, PrivateUpdate
from moretta.protocols.fedsgd.server import LoneServer, Server


def build(protocol: Training, setting: Setting) -> Roles:
    """Build the server and silos of FedSGD, federated averaging or FedProx."""
    return _build(protocol, setting, setting.secure_aggregation.scheme, protocol.lot(setting.spec.data.batch_size))


def build_centralised(protocol: Training, setting: Setting) -> Roles:
    """Build a server and one party that has all rows."""
    size = most_rows(setting.spec.data.batch_size) * len(setting.silos)
    return _build(protocol, setting, "none", size, pooled=True)


def _build(protocol: Training, setting: Setting, scheme: str, batch_size: int, *, pooled: bool = False) -> Roles:
    agreed = common.enrolment_of(setting, scheme, None, setting.columns, batch_size, sends_model=True)
    if pooled:
        played = {common.POOL: common.pool_of(setting, agreed.statistics)}
    else:
        setups = common.setups_of(setting, agreed.statistics, scheme)
        played = {name: (setup, common.rows_of(setting, setup, sent_model=True)) for name, setup in setups.items()}
    loss, private = protocol.loss_function, dict[str, PrivateGradient | PrivateUpdate]()
    accountant = common.accountant_of(setting, scheme, batch_size, agreed.statistics)
    if accountant is not None:
        for name, (setup, own) in played.items():
            bound = hashlib.sha256(setup.bound + setting.spec.model_source.encode()).digest()
            whole = accountant.privacy.unit == "silo"
            noise = SiloNoise(accountant.privacy, own.batches.rows, batch_size, setting.root(name), bound, setup.groups)
            private[name] = PrivateUpdate(noise) if whole else PrivateGradient(noise, own, loss)
    server = Server(protocol, setting, agreed, accountant)
    model, rounds = setting.silo_model().train(), setting.spec.run.rounds
    stacked, fits = Stacked(model, loss), loops(protocol, setting.silos, rounds)
    clients = {
        name: Client(
            protocol,
            model,
            own,
            setup.contributor(setting.insecure_root(name)),
            rounds,
            private.get(name),
            stacked,
            setup.half_done(getattr(protocol, "checkpoint_minutes", None)),
            fits.get(name),
        )
        for name, (setup, own) in played.items()
    }
    return common.roles_of(server, clients, agreed, MESSAGES, setting.least(scheme), accountant)


def build_local(protocol: Training, setting: Setting) -> Roles:
    """Build silos that train alone."""
    scheme = setting.secure_aggregation.scheme if len(setting.silos) > 1 else "none"
    agreed = common.enrolment_of(setting, scheme, None, setting.columns)
    rounds, clients = setting.spec.run.rounds, dict[str, Role]()
    for name, setup in common.setups_of(setting, agreed.statistics, scheme).items():
        sums = setup.contributor(setting.insecure_root(name))
        clients[name] = LoneClient(protocol, setting.silo_model(), common.rows_of(setting, setup), sums, rounds)
    return common.roles_of(LoneServer(setting, agreed), clients, agreed, MESSAGES, setting.least(scheme))


def left(client: Role) -> Left:
    """Return what a silo's role leaves at its site: the privacy of its own rows, if it added noise."""
    return Left(privacy=client.privacy()) if isinstance(client, Client) else Left()
