"""The sections of a run file as classes, each validated by itself: `moretta.config` reads a file into them.

Keys have dashes in a file and underscores in Python. A class built directly from Python raises pydantic's own
ValidationError for one bad value, and `ParameterError` where values do not fit each other.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, PositiveInt, field_validator, model_validator

from moretta import config_errors
from moretta.data.domains import check_domains
from moretta.data.grid import check_grid
from moretta.errors import ParameterError
from moretta.protocols.training import Positive, kebab
from moretta.secure_aggregation import Credentials, Rules
from moretta.secure_aggregation.cohort import Participation
from moretta.secure_aggregation.graph import CORRUPT_RATE, DROPOUT_RATE
from moretta.secure_aggregation.identity import Identity, Roster

Seed = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Words = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A section of a run file."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=kebab, populate_by_name=True)


class Run(Section):
    """How long, how exact, and where the results go.

    name: of the run, 1 to 100 characters without slashes; a file that leaves it out is named by its stem.
    seed: of everything that is training and no secret: initial weights, splits, batches.
    out: the run folder; None leaves the choice to the caller.
    dtype: of the model and of the silos' arithmetic.
    device: "cpu", "cuda" or "cuda:1".
    checkpoint_every: rounds from one checkpoint to the next.
    evaluate_every: rounds from one evaluation on the test rows to the next, and always after the last round; with
        early stopping also that on the validation rows. None: about 50 in a run.
    record_views: keep what each role saw: never, always, or in these rounds (the first is 1).
    early_stopping: stop when so many rounds have not lowered the validation loss, and go back to the best; None: never.
        The patience is counted in rounds and judged at evaluations, so the run goes on to the next one.
    participation: the part of the silos that takes part in a round, drawn from the seed.
    insecure_secret_seed: for tests only: every secret of the run follows from it.
    """

    name: str = "run"
    rounds: PositiveInt
    seed: Seed = 0
    out: Path | None = None
    dtype: Literal["float32", "float64"] = "float32"
    device: str = "cpu"
    checkpoint_every: PositiveInt = 10
    evaluate_every: PositiveInt | None = None
    record_views: bool | tuple[int, ...] = False
    early_stopping: PositiveInt | None = None
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    insecure_secret_seed: Annotated[Seed | None, Field(repr=False)] = None

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not re.fullmatch(r"[^/\\\x00-\x1f\x7f]{1,100}", name) or name in (".", ".."):
            raise ValueError("a name of 1 to 100 characters without slashes")  # it may name a folder
        return name

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, device: str) -> str:
        if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", device):
            raise ValueError('"cpu", "cuda" or "cuda:" and a number')
        return device

    @field_validator("record_views", mode="before")
    @classmethod
    def _are_rounds(cls, value: object) -> bool | tuple[int, ...]:
        if isinstance(value, bool):
            return value
        if isinstance(value, list | tuple) and all(type(number) is int and number >= 1 for number in value):
            return tuple(sorted(set(value)))
        raise ValueError("true, false or a list of round numbers from 1 on")


# Keys of [data] that say where rows are and how they are read and dealt out, and those of rows at sites.
OF_ROWS_HERE = (
    "alpha", "sizes", "domains", "id_column", "path", "target", "task", "test_fraction", "validation_fraction",
    "encoding", "missing", "image_size",
)  # fmt: skip
OF_SITES = ("inputs", "tokens", "classes", "outputs", "least_rows", "test", "score_at_silos")
LEAST_ROWS_MISSING = (
    "[data] least-rows is missing: silos on machines of their own do not tell how many rows they have, and what "
    "dp-noise comes to depends on the fewest that any has; give it, for example least-rows = 500"
)


class Data(Section):
    """Where the rows come from, and who holds which.

    source: a built-in name, a file ending in .csv or .npz, or "module:function"; or "sites": each silo's rows are on a
        machine of its own, which alone knows where (`moretta.deployment.silo_file`), and of the keys below only
        `silos`, `partition`, `grid`, `columns`, `label_holder`, `batch_size`, `standardise`, `augment` and these last
        ones say what they are like.
    silos: how many silos the rows are dealt out to; 3 unless given, or with `grid` and `columns` what those say.
    partition: "iid"; "dirichlet" over classes with concentration `alpha`; "by-label"; "by-domain", whole domains to
        silos in turn, or with more silos than domains an equal part of one domain to each, in turn; or "grid" and
        "by-feature", where each pair of a row part and a column part is a silo: see `moretta.data.grid`.
    sizes: how the rows are shared out, a positive part for each silo, for "iid" and "by-label", and for each row part
        in a grid; None: evenly.
    grid: how many row parts and column parts, for "grid" and "by-feature".
    columns: for "by-feature", the columns of each part, by name or by index from 0.
    label_holder: in a grid, the column part, from 1, that holds a row part's labels: one number for all, or one for
        each; None is 1.
    domains: of images, to make several domains out of one source: every row, of the test part too, is dealt to one of
        these and its image changed so; see `moretta.data.domains`. None leaves the images and the source's domains.
    id_column: the column of a .csv file that says whose a row is; it is no feature.
    batch_size: rows of a batch; 0 is a silo's whole data.
    path: where a built-in source finds its files.
    target: the column to predict; None is the last one.
    task: None lets the type of the targets decide.
    test_fraction, validation_fraction: of the rows, where the source does not split them itself; None is 0.2 and 0,
        or the source's own custom (bank-marketing: 0.1 and 0.1).
    encoding: of text columns; None is "one-hot".
    missing: values are an error, or the silos' median, or that with one more column that says so.
    image_size: of "office-home", whose images become squares of so many pixels a side; None is 64.
    standardise: None is true for tables and false for images and for module:function.
    augment: vary training images each time they are used: "none", or random crops and mirror images, "crop-flip".
    inputs: of rows at sites, the shape of a sample. tokens: whether samples are token ids.
    classes: of rows at sites, how many classes there are; None: targets are numbers, `outputs` of them a row.
    least_rows: the fewest rows that any site has, which dp-noise needs to know; a site with fewer refuses.
    test: of rows at sites, the server's own test rows: a .csv or .npz file or "module:function"; None: it has none.
    score_at_silos: of rows at sites, have the sites score the outcome on the rows that each holds back (test-fraction
        of its silo.toml), and sum their scores in secret; see `moretta.protocols.scoring`.
    """

    source: Words
    silos: PositiveInt = 3
    partition: Literal["iid", "dirichlet", "by-label", "by-domain", "by-feature", "grid"] = "iid"
    alpha: Positive | None = None
    sizes: tuple[Positive, ...] | None = None
    grid: tuple[int, int] | None = None
    columns: tuple[tuple[str | int, ...], ...] | None = None
    label_holder: int | tuple[int, ...] | None = None
    domains: tuple[str, ...] | None = None
    id_column: Words | None = None
    batch_size: Annotated[int, Field(ge=0)] = 32
    path: Path | None = None
    target: Words | None = None
    task: Literal["classification", "regression"] | None = None
    test_fraction: Fraction | None = None
    validation_fraction: Fraction | None = None
    encoding: Literal["one-hot", "ordinal"] | None = None
    missing: Literal["error", "median", "indicator"] = "error"
    image_size: PositiveInt | None = None
    standardise: bool | None = None
    augment: Literal["none", "crop-flip"] = "none"
    inputs: tuple[PositiveInt, ...] | None = None
    tokens: bool = False
    classes: Annotated[int, Field(ge=2)] | None = None
    outputs: PositiveInt | None = None
    least_rows: PositiveInt | None = None
    test: Words | None = None
    score_at_silos: bool = False

    @property
    def at_sites(self) -> bool:
        """Whether rows are on machines of their own."""
        return self.source == "sites"

    @field_validator("grid", mode="before")
    @classmethod
    def _is_a_shape(cls, value: object) -> tuple[int, ...] | None:
        if value is None:
            return None
        if isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and n >= 1 for n in value):
            return tuple(value)
        raise ValueError("how many row parts and column parts, for example [2, 2]")

    @field_validator("columns", mode="before")
    @classmethod
    def _are_parts(cls, value: object) -> tuple[tuple[str | int, ...], ...] | None:
        if value is None:
            return None
        if isinstance(value, list | tuple) and value and all(isinstance(part, list | tuple) for part in value):
            parts = tuple(map(tuple, value))
            if all(type(column) in (str, int) for part in parts for column in part):
                return parts
        raise ValueError('a list of columns for each part, for example [["age", "job"], ["balance"]]')

    @field_validator("label_holder", mode="before")
    @classmethod
    def _is_a_holder(cls, value: object) -> int | tuple[int, ...] | None:
        if value is None or type(value) is int:
            return value
        if isinstance(value, list | tuple) and all(type(number) is int for number in value):
            return tuple(value)
        raise ValueError("the number of a column part, or a list of them")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if "silos" not in self.model_fields_set and (self.grid or self.columns):  # frozen, but for its own default
            object.__setattr__(self, "silos", math.prod(self.grid) if self.grid else len(self.columns or ()))
        try:
            check_grid(self.partition, self.silos, self.grid, self.columns, self.label_holder)
            if self.domains is not None:
                check_domains(self.domains)
        except ParameterError as error:
            raise ParameterError(f"[data] {error}") from None
        if self.partition == "dirichlet" and self.alpha is None:
            raise ParameterError('[data] alpha is missing; partition = "dirichlet" needs it, for example alpha = 0.5')
        if self.partition != "dirichlet" and self.alpha is not None:
            raise ParameterError(
                f'[data] alpha belongs to partition = "dirichlet", not to "{self.partition}"; remove it'
            )
        self._check_place()
        test, validation = self.test_fraction or 0.0, self.validation_fraction or 0.0
        if test + validation >= 1:
            raise ParameterError(
                f"[data] test-fraction {test:g} and validation-fraction {validation:g} "
                "leave no rows to train on; their sum must be less than 1"
            )
        return self

    def _check_place(self) -> None:
        """Raise ParameterError for keys of rows that are here where they are at sites, or the other way round."""
        given = [name for name in type(self).model_fields if name in self.model_fields_set]
        changed = [name for name in given if getattr(self, name) != type(self).model_fields[name].default]
        if not self.at_sites:
            for name in changed:
                if name in OF_SITES:
                    raise ParameterError(
                        f'[data] {kebab(name)} is for source = "sites", not "{self.source}"; remove it'
                    )
            return
        for name in changed:
            if name in OF_ROWS_HERE:
                raise ParameterError(
                    f'[data] {kebab(name)} is about rows, and with source = "sites" each site\'s own silo.toml says '
                    "where its rows are and how to read them; remove it here"
                )
        if self.partition not in ("iid", "grid", "by-feature"):
            raise ParameterError(
                f'[data] partition = "{self.partition}" deals rows out, and sites have theirs already; remove it'
            )
        if self.inputs is None or (self.classes is None) == (self.outputs is None):
            raise ParameterError(
                '[data] source = "sites" needs inputs, the shape of a sample, and either classes or outputs, for '
                "example inputs = [30] and classes = 2"
            )


class Model(Section):
    """The model: a built-in name or "module:function", and the keyword arguments of its constructor.

    arguments: in a file these are the section's further keys, their dashes made underscores.
    """

    source: Words
    arguments: dict[str, JsonValue] = {}

    @field_validator("arguments")
    @classmethod
    def _are_arguments(cls, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name, value in arguments.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name == "source":
                raise ParameterError(f"[model] {name} cannot be the name of a constructor's argument; rename it")
            expected = "a number, a string, true, false or a list" if _has_table(value) else config_errors.unfit(value)
            if expected:
                raise ParameterError(f"[model] {kebab(name)}: expected {expected}, got {config_errors.shown(value)}")
        return arguments


ROSTER_AND_IDENTITY = (
    "[secure-aggregation] roster and identity belong together: who the silos are, and where each one's own key is, for "
    'example identity = "keys/{silo}"; give both or none'
)


class SecureAggregation(Section):
    """How the silos' uploads are summed.

    scheme: "pairwise" masks; "additive-shares", which cost more and bear no dropouts; or "none": whoever sums sees
        each upload.
    ring_bits: sums are exact integers of this many bits.
    limit: the largest absolute value that an entry of an upload may have; None is 2^16 in 64 bits, 2^4 in 32.
        A larger limit leaves fewer bits behind the point. See `largest`.
    threshold, degree, corrupt_rate, dropout_rate: see `moretta.secure_aggregation.cohort.Rules`.
    min_survivors: the fewest silos that a round may end with; None is 2, or 1 under "none", and under dp-noise more:
        see `sharing_noise`.
    weights: "hidden": only the sum of the silos' weights is seen; "public": each silo's is.
    roster: the file of the silos' public keys; None trusts the keys that the server relays.
    identity: where each silo's own key is, a folder or file, with "{silo}" in the place of the silo's name. Sites name
        theirs themselves, so over "flare" a run file has a roster alone.
    """

    scheme: Literal["pairwise", "additive-shares", "none"] = "pairwise"
    ring_bits: Literal[64, 32] = 64
    limit: Positive | None = None
    threshold: PositiveInt | None = None
    degree: PositiveInt | None = None
    corrupt_rate: Fraction = CORRUPT_RATE
    dropout_rate: Fraction = DROPOUT_RATE
    min_survivors: PositiveInt | None = None
    weights: Literal["hidden", "public"] = "hidden"
    roster: Path | None = None
    identity: Words | None = None

    @property
    def largest(self) -> float:
        """The limit, with its default filled in."""
        if self.limit is not None:
            return self.limit
        return 2.0**16 if self.ring_bits == 64 else 2.0**4

    @property
    def least(self) -> int:
        """The fewest silos that a round may end with, with its default filled in."""
        return self.min_survivors or (1 if self.scheme == "none" else 2)

    def sharing_noise(self, silos: int, participation: float = 1.0) -> SecureAggregation:
        """Return the same with the fewest silos that a round may end with where these add noise to their sum together.

        Each is to add as little as is enough. So the fewest are those that the scheme opens no sum without: with masks
        the threshold of a round's silos, which then does not shrink with the cohort, or `min_survivors` if that is
        more; with additive shares `min_survivors`, or two thirds of a round's silos, rounded down, and one more.
        silos: all. participation: the part of them that is in a round. Of one silo or without masks nothing changes.
        """
        if self.scheme == "none" or silos < 2:
            return self
        chosen = max(self.least, round(participation * silos))
        if self.scheme == "pairwise":
            fewest = max(self.least, self.rules(None).plan(chosen).threshold)
        else:
            fewest = self.min_survivors or chosen * 2 // 3 + 1
        return self.model_copy(update={"min_survivors": fewest})

    def rules(self, roster: Roster | None, participation: Participation | None = None) -> Rules:
        """Return what all roles of a sum have set alike. roster: the file's content, if there is one.

        participation: who plays a round.
        """
        return Rules(
            participation=participation,
            degree=self.degree,
            threshold=self.threshold,
            corrupt_rate=self.corrupt_rate,
            dropout_rate=self.dropout_rate,
            min_survivors=self.least,
            public_weights=self.weights == "public",
            roster=roster,
        )

    def credentials(self, name: str, roster: Roster | None) -> Credentials | None:
        """Return how a silo proves who it is, where there is a roster and it has an identity.

        Raises `moretta.errors.ParameterError` for an identity that cannot be read, or is another than the roster's.
        """
        if roster is None or self.identity is None:
            return None
        identity = Identity.load(self.identity.replace("{silo}", name))
        roster.check_identity(name, identity.public_key)
        return Credentials(identity, roster)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for key, value in (("threshold", self.threshold), ("degree", self.degree)):
            if value is not None and self.scheme != "pairwise":
                raise ParameterError(
                    f'[secure-aggregation] {key} belongs to scheme = "pairwise", not to "{self.scheme}"; remove it'
                )
        if self.roster is None and self.identity is not None:
            raise ParameterError(ROSTER_AND_IDENTITY)
        if self.roster is not None and self.scheme == "none":
            raise ParameterError(
                '[secure-aggregation] roster has nothing to protect under scheme = "none"; remove it and identity'
            )
        if self.scheme != "none" and self.min_survivors == 1:
            raise ParameterError(
                f'[secure-aggregation] min-survivors = 1 with scheme = "{self.scheme}": the sum of one silo is its own '
                "data; give at least 2"
            )
        return self


FaultPhase = Literal["set-up", "upload", "unmasking"]


class Fault(Section):
    """One silo's mishap in one round.

    round: counted from 1; the release after the last round is one more. silo: its name.
    phase: "set-up", where keys and common statistics are agreed on; "upload", the silo's answers of the round itself;
        "unmasking", after it has uploaded, where the secure sum of those who did is completed.
    """

    round: PositiveInt
    silo: Words
    phase: FaultPhase = "upload"


class Delay(Fault):
    """A silo's answers of one phase come so many seconds later.

    seconds: by a clock that only the deadline knows. Nobody waits for them, and without a deadline they are logged
        and change nothing.
    """

    seconds: Positive


class Faults(Section):
    """Mishaps to inject, so that one sees a federation bear them.

    drop: the silo cannot be reached from that phase on to the end of that round. In "upload" it vanishes before it
        uploads, in "unmasking" after. "set-up" takes hold in a round without one too; a round whose sum is not masked
        has no unmasking to vanish in.
    drop_probability: of each silo in each round, to vanish in its upload or, where the round has one, in its unmasking,
        either equally likely.
    delay: answers that come later.
    corrupt: answers that arrive without their last byte, as when a connection breaks.
    seed: of what is drawn. It depends on seed, round and silo alone, so a resumed run meets the same faults.
    """

    drop: tuple[Fault, ...] = ()
    drop_probability: Fraction = 0.0
    delay: tuple[Delay, ...] = ()
    corrupt: tuple[Fault, ...] = ()
    seed: Seed = 0


EngineName = Literal["in-process", "flare", "fused", "exact-ring"]
Precision = Literal["float32", "float16", "int8-activations"]


class Engine(Section):
    """Where the silos live.

    name: "in-process": silos on this machine that pass messages. "fused" and "exact-ring" are for cgd alone, on an
        N-layer network: one process plays all participants without messages, at the paper's scale
        (`moretta.protocols.cgd.simulation`). "flare": silos on machines of their own, over NVIDIA FLARE
        (`moretta.deployment`).
    sites: with "flare", the silos' names; of a grid row by row.
    torch_versions: with "flare", further versions of PyTorch that sites may run beside the server's own, by their
        first two numbers, for example "2.12".
    strict: pass every message through the codec, as a network would.
    deadline: seconds that an answer may take; None waits, for the process of an edge client and over "flare" ten
        minutes at most.
    message_mib: with "flare", the most MiB of a message that the server takes from a site; a longer one counts as
        malformed. A site's own limit is in its silo.toml.
    edge: of baffle, the names of silos that take part as edge clients: each is a process of its own with ONNX Runtime
        and without PyTorch (`moretta.edge`). The others run PyTorch in this process.
    edge_precision: what edge clients compute in; "float16" and "int8-activations" round to what such hardware has
        (`moretta.protocols.baffle.onnx_export`).
    memory_limit_mib: the most memory, resident, that the process of an edge client may take; None: no limit.
    micro_batch: how many rows an edge client runs at a time; None: as many as the limit allows, or without one 4.
    faults: mishaps to inject; None: none. They befall silos, so centralised training has none.
    """

    name: EngineName = "in-process"
    sites: tuple[Words, ...] = ()
    torch_versions: tuple[Words, ...] = ()
    strict: bool = False
    deadline: Positive | None = None
    message_mib: PositiveInt = 1024
    edge: tuple[Words, ...] = ()
    edge_precision: Precision = "float32"
    memory_limit_mib: Positive | None = None
    micro_batch: PositiveInt | None = None
    faults: Faults | None = None

    @property
    def simulates(self) -> bool:
        """Whether one process plays all silos without messages."""
        return self.name in ("fused", "exact-ring")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self._check_sites()
        for key in ("edge_precision", "memory_limit_mib", "micro_batch"):
            if not self.edge and getattr(self, key) != type(self).model_fields[key].default:
                raise ParameterError(
                    f"[engine] {kebab(key)} is for edge clients, and there are none; name some, for example "
                    'edge = ["silo-1"], or remove it'
                )
        return self

    def _check_sites(self) -> None:
        if self.name != "flare":
            for key in ("sites", "torch_versions", "message_mib"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ParameterError(f'[engine] {kebab(key)} is for name = "flare", not "{self.name}"; remove it')
            return
        if not self.sites:
            raise ParameterError(
                '[engine] sites is missing; name = "flare" needs the names of the silos, for example '
                'sites = ["north", "south"]'
            )
        for site in self.sites:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", site) or site in ("server", "admin"):
                raise ParameterError(
                    f"[engine] sites: {config_errors.shown(site)} cannot be the name of a site; expected 1 to 63 "
                    'letters, digits, dashes and underscores, and not "server" or "admin"'
                )
        if len(set(self.sites)) < len(self.sites):
            raise ParameterError("[engine] sites has a name twice; give each site its own")
        if self.faults is not None:
            raise ParameterError('[engine.faults] are injected in-process; with name = "flare" remove them')
        if self.edge:
            raise ParameterError('[engine] edge: with name = "flare" a site says so itself, by moretta join --edge')


def _has_table(value: object) -> bool:
    return isinstance(value, dict) or value is None or (isinstance(value, list) and any(map(_has_table, value)))
