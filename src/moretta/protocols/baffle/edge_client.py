"""An edge client seen by its parent process: checks that it can work, and the process that plays a silo.

Needs no torch, and is no part of that process, whose imports count in its memory.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from moretta.contract.lazy_rows import loaded
from moretta.contract.messages import Array, Message
from moretta.contract.roles import State
from moretta.data.layout import SampleLayout
from moretta.data.rows import Subjects
from moretta.engines.child import ChildClient
from moretta.engines.journal import HelpedFile
from moretta.engines.settings import Engine
from moretta.errors import MissingExtra, ParameterError
from moretta.protocols.baffle.edge.settings import Settings
from moretta.protocols.baffle.params import BAFFLE
from moretta.protocols.baffle.silo.client import Client
from moretta.protocols.baffle.silo.messages import MESSAGES
from moretta.protocols.baffle.silo.private import PrivateScalars
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.overlap import AskApart, compared
from moretta.protocols.common.scoring import HeldOut
from moretta.protocols.common.silo_rows import Rows, schema_of
from moretta.protocols.common.statistics import NOTHING, Statistics
from moretta.secure_aggregation.cohort import Rules
from moretta.secure_aggregation.identity import Roster
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.one_sum import Answers
from moretta.secure_aggregation.schemes import contributor
from moretta.secure_aggregation.settings import SecureAggregation

# A process that has imported what it needs has 64 MiB resident at its peak (x86-64 Linux, Python 3.11). A limit well
# below that has room for no model, on any machine or version.
FLOOR_MIB = 48.0
# At these the loss differences of the edge client correlate with exact ones to 0.95 or more (docs/baffle.md).
LEAST_SIGMA = {"float32": 0.0, "float16": 1e-4, "int8-activations": 1e-3}
COMMAND = (sys.executable, "-P", "-m", "moretta.protocols.baffle.edge")
PACKAGES = {"onnxruntime": "edge", "onnx": "onnx", "onnxscript": "onnx"}  # each with its extra
RUNS = ("onnxruntime",)  # those that an edge client itself needs; the others export its graph


def check_packages(needed: Iterable[str]) -> None:
    """Raise `moretta.errors.MissingExtra` where one of `PACKAGES` is needed and missing."""
    for package in needed:
        try:
            there = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:
            there = False
        if not there:
            extra = PACKAGES[package]
            raise MissingExtra(f"edge clients need {package}, which is not there; run: pip install 'moretta[{extra}]'")


def check_sigma(sigma: float, precision: str) -> None:
    """Raise ParameterError where sigma is so small that losses do not differ in this precision."""
    least = LEAST_SIGMA[precision]
    if sigma < least:
        raise ParameterError(
            f'sigma = {sigma:g} is lost in what edge-precision = "{precision}" rounds to, where sigma = {least:g} '
            "works; raise it"
        )


def check_tokens(layout: SampleLayout | None, precision: str) -> None:
    """Raise ParameterError where token ids lie beside numbers and would be rounded as those are."""
    if layout is not None and layout.has_integers and precision == "float16":
        tokens = ", ".join(one.name for one in layout.arrays if one.integers)
        raise ParameterError(
            f'edge-precision = "float16" would round the token ids of {tokens}, which lie beside numbers in a row; use '
            '"float32" or "int8-activations"'
        )


def check_memory(limit: float | None, where: str) -> None:
    """Raise ParameterError where no edge client has room. limit: MiB; where: the section of its key."""
    if limit is not None and limit < FLOOR_MIB:
        raise ParameterError(
            f"[{where}] memory-limit-mib = {limit:g}: no edge client fits, as ONNX Runtime alone takes some 60 MiB; "
            "give 80 or more, or remove it"
        )


def check_site(
    protocol: BAFFLE, secure: SecureAggregation, limit: float | None, precision: str, layout: SampleLayout | None
) -> None:
    """Raise an error where a site cannot play a silo.

    limit: of memory, MiB. precision: of the graph that it runs. layout: of samples of several arrays.
    """
    if secure.scheme != "none":
        protocol.check_limit(secure.largest)
    if protocol.own_loss is not None:
        raise ParameterError(
            "an edge client computes the built-in losses alone, without PyTorch; have the run leave out own-loss, or "
            "join without --edge"
        )
    if protocol.batch_statistics:
        raise ParameterError(
            "an edge client runs a few rows at a time, and so has no statistics of a batch; remove batch-statistics, "
            "or join without --edge"
        )
    check_packages(RUNS)
    check_memory(limit, "limits")
    check_sigma(protocol.sigma, precision)
    check_tokens(layout, precision)


def privacy_of(
    protocol: BAFFLE, rows: int, size: int, sharers: int, state: State, left_out: str
) -> Mapping[str, float | str]:
    """Return the privacy of a silo's own rows, from the state of its process, which needs no accountant.

    rows: how many it has. size: of a lot. sharers: how many silos share the noise. left_out: where its rows were used
    beside its uploads.
    """
    if protocol.privacy is None:
        return {}
    root = SecretRoot(state["private/secret_root"])
    own = PrivateScalars(protocol.privacy, rows, size, root, b"", sharers)
    own.releases.restore({"releases": state["private/releases"]})
    try:
        return own.facts(left_out)
    except MissingExtra as error:
        return {"releases": float(own.releases.count), "epsilon_is_not_stated": str(error)}


def edge_client(
    protocol: BAFFLE,
    name: str,
    rows: tuple[Array, Array],
    held_out: HeldOut | None,
    *,
    secure: SecureAggregation,
    roster: Roster | None,
    engine: Engine,
    schema: str,
    table: str,
    batch_size: int,
    seed: int,
    rounds: int,
    session: int,
    insecure: int | None,
    bound: bytes,
    rules: Rules,
    run: str = "",
    helped: HelpedFile | None = None,
    subjects: Subjects | None = None,
    statistics: Statistics = NOTHING,
    augment: str = "",
) -> ChildClient:
    """Return the role of a silo that runs ONNX in a process, which is not started yet.

    rows: inputs, and targets as the loss wants them. held_out: rows held back, where models are scored on them. secure:
    with the paths of roster and identity. roster: as read. engine: its memory limit and precision. schema: the digest
    of the model's tensors. table: that of the schema of tables. insecure: the seed from which all secrets follow, for
    tests. rules: of the secure sum. run: of batches and sums. helped: where the silo keeps what it has helped to open.
    bound: the digest of settings that noise is bound to (`moretta.protocols.common.setting.settings_digest`).
    statistics: those that the silo gives. augment: how images of a batch are varied. subjects: whom rows are about,
    which the process is not told. Raises `moretta.errors.ParameterError` for an identity that does not fit the roster.
    """

    def root() -> SecretRoot:
        return SecretRoot.fresh() if insecure is None else SecretRoot.insecure(insecure, name)

    recipe, privacy, x, y = protocol.recipe(rounds, augment), protocol.privacy, loaded(rows[0]), rows[1]
    sharers = 1 if secure.scheme == "none" else rules.least(secure.scheme)
    credentials = secure.credentials(name, roster)
    keys = None if insecure is None else root()
    lends = Client(  # gives its secrets as the first state
        recipe,
        name,
        None,
        Rows(x, y, Batches(len(x), batch_size, seed, name, run), schema),
        contributor(
            secure.scheme,
            name,
            secure.ring_bits,
            rules,
            credentials=credentials,
            insecure=keys,
            session=session,
            run=run,
        ),
        root(),
        None if privacy is None else PrivateScalars(privacy, len(x), batch_size, root(), bound, sharers),
    )
    settings = Settings(
        name=name,
        recipe=recipe,
        scheme=secure.scheme,
        ring_bits=secure.ring_bits,
        rules=rules,
        session=session,
        schema=schema,
        table=table,
        batch_size=batch_size,
        seed=seed,
        precision=engine.edge_precision,
        memory_limit_mib=engine.memory_limit_mib,
        micro_batch=engine.micro_batch,
        privacy=privacy,
        sharers=sharers,
        bound=bound.hex(),
        roster="" if secure.roster is None else str(secure.roster.absolute()),
        identity=str(Path((secure.identity or "").replace("{silo}", name)).absolute()) if credentials else "",
        held_out=0 if held_out is None else len(held_out.x),
        figures=() if held_out is None else tuple(held_out.figures),
        rounds=rounds,
        statistics=statistics,
        run=run,
        helped=None if helped is None else replace(helped, path=str(Path(helped.path).absolute())),
    )
    if held_out is not None:  # rows held back travel as the last ones
        x, y = np.concatenate([x, held_out.x]), np.concatenate([y, held_out.y])
    secret = b"" if keys is None else keys.reveal()
    alone = Answers()

    def here(message: Message) -> Message | None:
        if not isinstance(message, AskApart):
            return None
        return compared(message, subjects or Subjects(), alone if helped is None else helped.opened.answers)

    return ChildClient(name, settings.dump(), lends.state(), (x, y), schema_of(MESSAGES), COMMAND, secret, here)
