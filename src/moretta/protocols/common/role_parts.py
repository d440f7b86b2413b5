"""What roles are built from, whatever the protocol: halves of the secure sum, rows, the enrolment of a cohort."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moretta.contract.lazy_rows import joined
from moretta.contract.messages import Message, Tensors
from moretta.contract.roles import Client, Server
from moretta.data.holders import check_ids, check_order, grid_of
from moretta.data.silo import Silo
from moretta.data.tables.preparation import ColumnRules
from moretta.errors import ParameterError
from moretta.protocols.common import enrolment, modules
from moretta.protocols.common.accountant import Accountant
from moretta.protocols.common.batches import Batches, Lots, UnionBatches
from moretta.protocols.common.enrolment import Enrolment, SiloRows
from moretta.protocols.common.overlap import COMPARISON, Comparison
from moretta.protocols.common.releases import Releases
from moretta.protocols.common.roles import Roles
from moretta.protocols.common.scoring import HeldOut
from moretta.protocols.common.setting import LEAST_ROWS_MISSING, Setting, settings_digest
from moretta.protocols.common.silo_rows import schema_of
from moretta.protocols.common.statistics import Statistics
from moretta.protocols.common.statistics import without_noise as in_words
from moretta.protocols.common.training import Training
from moretta.secure_aggregation.cohort import Credentials
from moretta.secure_aggregation.keystream import digest_of, encode_purpose
from moretta.secure_aggregation.one_sum import Answers
from moretta.secure_aggregation.schemes import aggregator, contributor
from moretta.secure_aggregation.sums import Contributor

POOL = "everybody"  # the one silo of centralised training


def roles_of(
    server: Server,
    clients: Mapping[str, Client],
    agreed: Enrolment,
    messages: Sequence[type[Message]],
    least: int,
    releases: Releases | None = None,
    accountant: Accountant | None = None,
) -> Roles:
    """Return the roles of a protocol in which the server holds the model, or each silo has one.

    releases, accountant: where silos add noise.
    """

    def models() -> Mapping[str, Tensors]:
        common = modules.under("model/", server.state())
        return {"": common} if common else {name: modules.under("model/", c.state()) for name, c in clients.items()}

    scheme = agreed.aggregation.scheme
    return Roles(
        server,
        clients,
        agreed,
        scheme,
        schema_of(messages),
        least,
        models,
        releases=releases,
        counted=lambda: agreed.counted,
        epsilon=None if releases is None or accountant is None else lambda: accountant.spent(releases.count),
    )


def enrolment_of(
    setting: Setting,
    scheme: str,
    members: Sequence[str] | None,
    columns: ColumnRules,
    batch_size: int | None = None,
    *,
    ask_scales: bool = False,
) -> Enrolment:
    """Return the server's half of the enrolment of some silos. columns, batch_size, ask_scales: see `Enrolment`.

    members: None for all silos. batch_size: None is the setting's.
    """
    rules = setting.rules(scheme, members)
    if scheme == "pairwise":
        rules.check(len(setting.silos if members is None else members))
    summing = aggregator(scheme, setting.secure_aggregation.ring_bits, rules)
    size = setting.batch_size if batch_size is None else batch_size
    # Where silos sum in groups, their server compares all of them by itself.
    comparison = comparison_of(setting) if members is None else None
    schema, figures, table = modules.schema(setting.model), setting.figures, setting.table
    return Enrolment(
        summing,
        schema,
        columns,
        size,
        ask_scales,
        figures,
        table,
        comparison,
        setting.layout,
        setting.classes,
        setting.outputs,
    )


def comparison_of(setting: Setting) -> Comparison | None:
    """Return what compares silos' rows with the server's test rows; None where nobody knows whom those are about."""
    return None if setting.tested is None else Comparison(setting.tested)


def contributor_of(
    setting: Setting, scheme: str, name: str, members: Sequence[str] | None = None, run: str | None = None
) -> Contributor:
    """Return a silo's half of the secure sum of some silos, None for all. run: as stamps have it; None for the run's.

    A simulation has no run id when its roles are built, and takes any.
    """
    secure = setting.secure_aggregation
    credentials = credentials_of(setting, name, scheme)
    return contributor(
        scheme,
        name,
        secure.ring_bits,
        setting.rules(scheme, members),
        credentials=credentials,
        insecure=setting.insecure_root(name),
        session=setting.session,
        helped=setting.helped(name).opened if setting.helped and scheme != "none" else None,
        run=setting.run if run is None else run,
    )


def credentials_of(setting: Setting, name: str, scheme: str) -> Credentials | None:
    """Return how a silo proves who it is, where there is a roster and something to protect."""
    return None if scheme == "none" else setting.secure_aggregation.credentials(name, setting.roster)


def answers_of(setting: Setting, name: str) -> Answers:
    """Return what a silo has answered that it answers once, kept with the sums that it has helped to open."""
    return setting.helped(name).opened.answers if setting.helped else Answers()


def rows_of(protocol: Training, setting: Setting, statistics: Statistics) -> dict[str, SiloRows]:
    """Return the rows and batches of each silo that is not remote, by its name. statistics: those that it gives."""
    return {
        silo.name: SiloRows(
            silo.x,
            enrolment.targets(silo.y, setting.outputs, protocol.loss, silo.name, setting.dtype),
            Batches(len(silo.x), setting.batch_size, setting.seed, silo.name, setting.run),
            setting.dtype,
            setting.device,
            augment=setting.augment,
            held_out=held_out_of(protocol, setting, silo),
            table=setting.table,
            subjects=silo.subjects,
            statistics=statistics,
            answers=answers_of(setting, silo.name),
        )
        for silo in setting.here
    }


def held_out_of(protocol: Training, setting: Setting, silo: Silo) -> HeldOut | None:
    """Return the rows that a silo holds back, where models are scored on them."""
    if not setting.figures or silo.held_out is None:
        return None
    x, y = silo.held_out
    wanted = enrolment.targets(y, setting.outputs, protocol.loss, silo.name, setting.dtype).numpy()
    return HeldOut(x, wanted, protocol.loss, setting.figures, setting.rounds, answers_of(setting, silo.name))


def pooled_rows(protocol: Training, setting: Setting, statistics: Statistics) -> SiloRows:
    """Return everybody's rows as one party's, in the batches that the silos would take. statistics: as of `rows_of`."""
    x, y, counts = whole_rows(protocol, setting)
    parts = [Batches(count, setting.batch_size, setting.seed, row) for row, count in counts.items()]
    batches, table = UnionBatches(parts), setting.table
    return SiloRows(
        x, y, batches, setting.dtype, setting.device, augment=setting.augment, table=table, statistics=statistics
    )


def whole_rows(protocol: Training, setting: Setting) -> tuple[NDArray[np.generic], torch.Tensor, dict[str, int]]:
    """Return all silos' rows with all their columns, one row of the grid after the other.

    Returned are inputs, targets, and how many rows each row of the grid has.
    """
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
    y = enrolment.targets(np.concatenate(labels), setting.outputs, protocol.loss, POOL, setting.dtype)
    return joined(blocks), y, counts


def highest_rate(setting: Setting, batch_size: int) -> float:
    """Return the highest chance, over all silos, of a row to be in a round's lot (`batches.Lots`)."""
    rows = [len(silo.x) for silo in setting.here]
    if len(rows) < len(setting.silos):
        if setting.least_rows is None:
            raise ParameterError(LEAST_ROWS_MISSING)
        rows.append(setting.least_rows)
    return max(Lots(count, batch_size).rate for count in rows)


def bound_to(protocol: Training, setting: Setting) -> bytes:
    """Return the digest that silos' noise is bound to beside their rows and the model: `setting.settings_digest`."""
    return settings_digest(
        protocol,
        setting.secure_aggregation,
        setting.roster,
        [silo.name for silo in setting.silos],
        schema=modules.schema(setting.model),
        batch_size=setting.batch_size,
        augment=setting.augment,
        seed=setting.seed,
        layout=setting.layout,
    )


def model_bound_to(setting: Setting, trained: Collection[str] = ()) -> bytes:
    """Return a digest of the model apart from its trained parameters: what built it, and its fixed tensors."""
    fixed = {name: value for name, value in modules.arrays(setting.model).items() if name not in trained}
    return hashlib.sha256(encode_purpose("model", setting.model_source, digest_of(fixed))).digest()


def without_noise(setting: Setting, statistics: Statistics) -> str:
    """Return where silos' rows are used beside the uploads that epsilon is about; empty for nowhere."""
    return in_words([*statistics.names, *([] if setting.tested is None else [COMPARISON])])
