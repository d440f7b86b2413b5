"""Who plays: from a protocol's settings to its server, its clients and the messages they know, a file a protocol."""

from __future__ import annotations

from moretta.protocols.baffle.params import BAFFLE
from moretta.protocols.baffle.roles import cast_baffle
from moretta.protocols.cgd.params import CGD
from moretta.protocols.cgd.roles import cast_cgd, cast_simulation
from moretta.protocols.common.players import Cast
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.training import Training
from moretta.protocols.common.wiring import POOL, pooled_rows, rows_of
from moretta.protocols.fedsgd.params import Centralised, FedAvg, Local
from moretta.protocols.fedsgd.roles import cast_fedsgd, cast_local
from moretta.protocols.pbpfl.params import PBPFL
from moretta.protocols.pbpfl.roles import cast_pbpfl


def cast(protocol: Training, setting: Setting) -> Cast:
    """Cast the roles of a protocol. Raises `moretta.errors.ParameterError` where model, data and loss do not fit."""
    scheme = setting.secure_aggregation.scheme
    match protocol:
        case Centralised():
            pool, batch = {POOL: pooled_rows(protocol, setting)}, setting.batch_size * len(setting.silos)
            return cast_fedsgd(protocol, setting, pool, "none", batch)
        case FedAvg():  # an epoch uses all of a silo's rows
            return cast_fedsgd(protocol, setting, rows_of(protocol, setting), scheme, 0)
        case Local():
            return cast_local(protocol, setting)
        case PBPFL():
            return cast_pbpfl(protocol, setting)
        case CGD():
            return cast_simulation(protocol, setting) if setting.engine.simulates else cast_cgd(protocol, setting)
        case BAFFLE():
            return cast_baffle(protocol, setting)
        case _:
            return cast_fedsgd(protocol, setting, rows_of(protocol, setting), scheme, setting.batch_size)
