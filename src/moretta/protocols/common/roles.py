"""The roles of one run, and the parts that all protocols build them from: rows, sums, the enrolment of a cohort."""

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moretta.contract.lazy_rows import joined
from moretta.contract.messages import Array, Message, Tensors
from moretta.contract.roles import Client, Server, State, under
from moretta.data.holders import check_ids, check_order, grid_of
from moretta.data.tables.preparation import ColumnRules, Preparation
from moretta.errors import ParameterError
from moretta.protocols.common import modules
from moretta.protocols.common.accountant import Accountant, noise_for
from moretta.protocols.common.batches import Batches, Lots, UnionBatches
from moretta.protocols.common.enrolment import Enrolment, SiloRows
from moretta.protocols.common.frozen import Frozen
from moretta.protocols.common.overlap import COMPARISON
from moretta.protocols.common.setting import LEAST_ROWS_MISSING, Setting
from moretta.protocols.common.silo_rows import schema_of
from moretta.protocols.common.silo_setup import SiloSetup
from moretta.protocols.common.statistics import Counted, Statistics, without_noise
from moretta.secure_aggregation.keystream import digest_of, encode_purpose
from moretta.secure_aggregation.schemes import aggregator


@dataclass(frozen=True)
class Roles:
    """The roles of one run.

    Args:
        preparation: Returns the preparation of inputs, once agreed.
        least: The fewest silos of a round.
        models: Returns the common model under the empty name, or each silo's own under its name.
        displacement: Returns D of confined models, as a model of its own.
        warnings: Sentences for the user about participation.
        scores: Returns the scores that local participants have read, if the server does not read them.
        accountant: If silos add noise.
        counted: Returns counts of a look before training at all silos.
        gather, spread: Bring local clients to the states of those in other processes, and back.
    """

    server: Server
    clients: Mapping[str, Client]
    preparation: Callable[[], Preparation]
    scheme: str
    messages: Sequence[type[Message]]
    least: int
    models: Callable[[], Mapping[str, Tensors]]
    displacement: Callable[[], Tensors] | None = None
    warnings: Sequence[str] = ()
    scores: Callable[[], Mapping[str, float]] = dict
    accountant: Accountant | None = None
    counted: Callable[[], Counted | None] = lambda: None
    gather: Callable[[], None] = lambda: None
    spread: Callable[[Mapping[str, State]], None] = lambda states: None


@dataclass(frozen=True)
class Left:
    """All that a silo's role leaves at its site alone.

    Args:
        privacy: By its own count of releases, if it added noise.
        model: Its own, which no other party has.
        scores: On all held-out rows, if it has read them.
    """

    privacy: Mapping[str, float | str] = field(default_factory=dict)
    model: Tensors = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)


POOL = "everybody"  # the one silo of centralised training


def roles_of(
    server: Server,
    clients: Mapping[str, Client],
    agreed: Enrolment,
    messages: Sequence[type[Message]],
    least: int,
    accountant: Accountant | None = None,
) -> Roles:
    """Return the roles of a protocol whose server, or each silo, has a model."""

    def models() -> Mapping[str, Tensors]:
        common = under("model/", server.state())
        return {"": common} if common else {name: under("model/", c.state()) for name, c in clients.items()}

    return Roles(
        server,
        clients,
        lambda: agreed.preparation,
        agreed.aggregation.scheme,
        schema_of(messages),
        least,
        models,
        accountant=accountant,
        counted=lambda: agreed.counted,
    )


def enrolment_of(
    setting: Setting,
    scheme: str,
    members: Sequence[str] | None,
    columns: ColumnRules,
    batch_size: int | None = None,
    *,
    ask_scales: bool = False,
    labelled: bool = True,
    sends_model: bool = False,
) -> Enrolment:
    """Return the server's half of the enrolment of some silos.

    Args:
        members: None for all silos.
        columns, sends_model: As of `Enrolment`.
        batch_size: 0 for all of a silo's rows; None is the setting's.
        ask_scales: Also ask for mean and deviation of all inputs together and of the targets.
        labelled: Whether these silos have the targets.
    """
    rules = setting.rules(scheme, members)
    if scheme == "pairwise":
        rules.check(len(setting.silos if members is None else members))
    summing = aggregator(scheme, setting.secure_aggregation.ring_bits, rules)
    size = setting.spec.data.batch_size if batch_size is None else batch_size
    statistics = setting.statistics(columns, size, scales=ask_scales, labelled=labelled)
    # Where silos sum in groups, their server compares all of them by itself.
    comparison = setting.comparison if members is None else None
    return Enrolment(setting, summing, columns, size, statistics, comparison, sends_model=sends_model)


def setups_of(setting: Setting, statistics: Statistics, scheme: str | None = None) -> dict[str, SiloSetup]:
    """Return the set-up of each local silo by its name. statistics, scheme: as of `Setting.setup`."""
    schema = modules.schema(setting.model)
    bound = setting.bound(schema)
    return {silo.name: setting.setup(silo, schema, statistics, bound, scheme) for silo in setting.local}


def rows_of(
    setting: Setting, setup: SiloSetup, batches: Batches | UnionBatches | None = None, *, sent_model: bool = False
) -> SiloRows:
    """Return a silo's rows as tensors. batches: replace its own. sent_model: whether rounds send it the model."""
    device, passes = setting.spec.run.device, setting.passes
    frozen = Frozen(modules.shapes(modules.frozen(setting.model)) if sent_model else {})
    return SiloRows(setup.rows(batches), setting.dtype, device, augment=setup.augment, passes=passes, frozen=frozen)


def pool_of(setting: Setting, statistics: Statistics) -> tuple[SiloSetup, SiloRows]:
    """Return one party with all silos' rows, in the silos' batches: its set-up and its rows."""
    x, y, counts = whole_rows(setting)
    run, size = setting.spec.run, setting.spec.data.batch_size
    setup = SiloSetup(
        POOL,
        x,
        y,
        modules.schema(setting.model),
        size,
        run.seed,
        run.rounds,
        rules=setting.rules("none"),
        table=setting.spec.table_digest,
        statistics=statistics,
        augment=setting.spec.data.varied,
    )
    batches = UnionBatches([Batches(count, size, run.seed, row) for row, count in counts.items()])
    return setup, rows_of(setting, setup, batches, sent_model=True)


def whole_rows(setting: Setting) -> tuple[NDArray[np.generic], Array, dict[str, int]]:
    """Return all silos' rows, whole, by row of the grid: inputs, targets, and the number of each row's rows."""
    check_order(setting.silos)
    check_ids(setting.silos)
    grid, silos = grid_of(setting.silos), {silo.name: silo for silo in setting.silos}
    blocks, labels, counts = list[NDArray[np.generic]](), list[NDArray[np.generic]](), dict[str, int]()
    for row, names in grid.rows.items():
        head = silos[grid.heads[row]]
        counts[row] = len(head.x)
        labels.append(head.y)
        if not head.columns:
            blocks.append(head.x)
            continue
        whole = np.empty((len(head.x), sum(len(silos[name].columns) for name in names)), dtype=head.x.dtype)
        for name in names:
            if len(silos[name].x) != len(head.x):
                raise ParameterError(
                    f"row `{row}`: expected as many rows of `{name}` as of `{head.name}`, {len(head.x)}, in the same "
                    f"order; got {len(silos[name].x)}"
                )
            whole[:, list(silos[name].columns)] = silos[name].x
        blocks.append(whole)
    return joined(blocks), setting.targets(np.concatenate(labels), POOL), counts


def highest_rate(setting: Setting, batch_size: int) -> float:
    """Return the highest chance, over all silos, of a row or a group to be in a round's lot (`batches.Lots`)."""
    rows = [setting.units_of(silo) for silo in setting.local]
    if len(rows) < len(setting.silos):
        if setting.spec.data.least_rows is None:
            raise ParameterError(LEAST_ROWS_MISSING)
        rows.append(setting.spec.data.least_rows)
    return max(Lots(count, batch_size).rate for count in rows)


def accountant_of(setting: Setting, scheme: str, batch_size: int, statistics: Statistics) -> Accountant | None:
    """Return the accountant; None without noise. scheme, batch_size, statistics: of the silos' uploads."""
    privacy = setting.noise(scheme)
    if privacy is None:
        return None
    left_out = without_noise([*statistics.names, *([] if setting.tested is None else [COMPARISON])])
    rate = 1.0 if privacy.unit == "silo" else highest_rate(setting, batch_size)
    made, rounds = Accountant(privacy, rate, left_out), setting.spec.run.rounds
    if not made.allows(1):
        enough = noise_for(float(privacy.most or 0.0), privacy.delta, rate, rounds)
        raise ParameterError(
            f"dp-epsilon = {privacy.most:g} is less than the {made.spent(1):.3g} of one round; for {rounds} rounds "
            f"set dp-noise = {math.ceil(1000 * enough) / 1000:g} or more, or a larger dp-epsilon"
        )
    return made


def model_bound_to(setting: Setting, trained: Collection[str] = ()) -> bytes:
    """Return a digest of the model without its trained parameters: of its source and its fixed tensors."""
    fixed = {name: value for name, value in modules.arrays(setting.model).items() if name not in trained}
    return hashlib.sha256(encode_purpose("model", setting.spec.model_source, digest_of(fixed))).digest()
