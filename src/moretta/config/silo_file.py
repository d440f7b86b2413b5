"""silo.toml: the settings of a site, as ``docs/silo-file.md`` shows them key by key.

The file stays at the site, and nothing of it but the name is ever sent. `[limits]`, `[runs]` and `[privacy]` are what a
run may take here; all else that touches rows is pinned by the first run (`moretta.deployment.agreed_settings`).
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from moretta.config import run_files
from moretta.config.run_files import read_toml
from moretta.contract.settings import Device, Fraction, Positive, Section, Seed, Unit, Words
from moretta.contract.wording import unknown_section
from moretta.data.settings import FileOfRows
from moretta.data.tables.mapping import ColumnMapping, Conversion
from moretta.engines.journal import HelpedFile
from moretta.engines.settings import Engine, Precision
from moretta.errors import ParameterError
from moretta.secure_aggregation.identity import Roster, parse_server_keys
from moretta.secure_aggregation.settings import SecureAggregation


class SiloSection(Section):
    """Who the site is.

    `name`: in the run, and in the certificate of its startup kit. `out`: the folder of what it keeps. `identity`,
    `roster`: its own key, and its own list of everybody's. `server_key`: the server's public key, one line or two; by
    default the roster's or the kit's. `models`: the "module:function" sources of models that runs may have built here,
    from modules beside silo.toml or installed: a run file names code, and only what is listed is called.
    `record_views`: keep what its role saw. `edge`: take part in baffle as an edge client, a process with ONNX Runtime
    and without PyTorch. `insecure_secret_seed`: for tests only.
    """

    name: Words
    out: Path = Path("moretta")
    identity: Path | None = None
    roster: Path | None = None
    server_key: tuple[Words, ...] = ()
    models: tuple[Words, ...] = ()
    record_views: bool = False
    edge: bool = False
    insecure_secret_seed: Annotated[Seed | None, Field(repr=False)] = None

    @field_validator("server_key", mode="before")
    @classmethod
    def _one_or_two(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.server_key:
            try:
                parse_server_keys(self.server_key)
            except ParameterError as error:
                raise ParameterError(f"[silo] server-key: {error}") from None
        if (self.roster is None) != (self.identity is None):
            raise ParameterError("[silo] roster and identity belong together; give both or none")
        return self


class RowsSection(FileOfRows):
    """Where its rows are, and how a .csv file is written: see `moretta.data.reading.Source`.

    source: a table (.csv, .parquet, .arrow), an .npz file, "module:function" or "image-folder".
    `path`, `labels`: of "image-folder", the folder and the table that names its files.
    `test_fraction`: of them, to be held back, the same in every run, which may have models scored on them. `test`: a
    source of such rows in its place, written alike; of "image-folder" a table that names further files in `path`.
    `alignment`: a file of `moretta align`, by which rows that partners share are put in their order. `rows_in_order`:
    the site's word that its rows are in the order of those who hold other columns of them, without ids to compare.
    """

    path: Path | None = None
    labels: Path | None = None
    test_fraction: Fraction = 0.0
    rows_in_order: bool = False

    @model_validator(mode="after")
    def _in_one_order(self) -> Self:
        if self.alignment is not None and self.rows_in_order:
            raise ParameterError("[data] alignment puts rows in order, and rows-in-order says that they are; give one")
        if self.test is not None and self.test_fraction:
            raise ParameterError("[data] test names rows held back, and test-fraction would hold others back; give one")
        return self


class Limits(Section):
    """What a run may take of this machine.

    `message_mib`: the most MiB of a message that the site takes from the server; a longer one is refused unread.
    `parameters`: the most numbers of a model that the site builds; a larger one is refused before it is built.
    `memory_limit_mib`: the most memory of an edge client's process, or without edge of a job's process, by what it
    reserves (`moretta.engines.usage.cap`), PyTorch included; None: no limit.
    `micro_batch`: how many rows of a batch run through the model at a time; None: the run's number, or for an edge
    client as many as the limit allows, or without one 4.
    `edge_precision`: what an edge client computes in; "float16" and "int8-activations" round to what such hardware has.
    `threads`: the most that PyTorch may use; None: its own choice.
    `device`: on which a job of this site computes.
    """

    message_mib: Annotated[PositiveInt, Unit("MiB")] = 1024
    parameters: Annotated[PositiveInt, Unit("numbers")] = 100_000_000
    memory_limit_mib: Annotated[Positive | None, Unit("MiB")] = None
    micro_batch: Annotated[PositiveInt | None, Unit("rows")] = None
    edge_precision: Precision = "float32"
    threads: PositiveInt | None = None
    device: Device = "cpu"


class Runs(Section):
    """What a run may ask of the site, beside the settings that it has agreed to (`moretta accept`).

    `protocols`: names of those that it takes part in; empty: any.
    `rounds`: the most rounds of a run. `local_epochs`: the most passes over its rows in a round.
    `look`: whether its rows and classes are counted, in a secure sum, before training.
    `scores`: whether models are scored on the rows that it holds back.
    """

    protocols: tuple[Words, ...] = ()
    rounds: Annotated[PositiveInt, Unit("rounds")] = 100_000
    local_epochs: PositiveInt = 1000
    look: bool = True
    scores: bool = True


class Floors(Section):
    """What the site insists on in every run, whatever the run's file says: floors that a run may exceed.

    `fewest_silos`: in any sum that it helps to open. `threshold`: of the masks' shares. `scheme`: of the sums;
    "pairwise" is above "additive-shares". `blind`: under cgd, that the server reads no sum. `roster`: that there is
    one. `dp_noise`: the least noise multiplier. `unit`: what noise hides at least. `max_epsilon`: the largest epsilon
    that a run may have. `delta`: the most at which that is stated; left out, 1e-5 beside max_epsilon. `per`: whether
    max_epsilon is of each run, or of all runs together, each of which counts with its dp-epsilon. `apart`: the fewest
    silos that the sums which it helps may isolate together (`moretta.secure_aggregation.one_sum`); 1: any.
    `repeat_whole_rows`: whether a round that uses all rows may be summed over other silos too. `repeat_statistics`: the
    same of its rows' statistics from run to run.
    """

    fewest_silos: Annotated[PositiveInt, Unit("silos")] = 2
    threshold: PositiveInt | None = None
    scheme: Literal["pairwise", "additive-shares"] | None = None
    blind: bool = False
    roster: bool = False
    dp_noise: Positive | None = None
    unit: Literal["row", "group", "silo"] | None = None
    max_epsilon: Positive | None = None
    delta: Positive | None = None
    per: Literal["run", "data set"] = "run"
    apart: Annotated[PositiveInt, Unit("silos")] = 1
    repeat_whole_rows: bool = False
    repeat_statistics: bool = False


class SiloFile(Section):
    """All of silo.toml. base: its folder, beside which relative paths resolve.

    data: of a site whose rows another framework's app reads, it stands at its default.
    """

    silo: SiloSection
    data: RowsSection = RowsSection(source="elsewhere")
    mapping: ColumnMapping = ColumnMapping()
    limits: Limits = Limits()
    runs: Runs = Runs()
    privacy: Floors = Floors()
    base: Path = Path()

    @property
    def helped(self) -> HelpedFile:
        """Where the site keeps which sums it has helped to open, of all runs together."""
        privacy = self.privacy
        return HelpedFile(
            str(self.out.absolute() / "helped.jsonl"),
            forces=True,
            over_runs=not privacy.repeat_statistics,
            apart=privacy.apart,
            repeats=privacy.repeat_whole_rows,
            fewest=privacy.fewest_silos,
        )

    def load_roster(self) -> Roster | None:
        """Return the site's own list of everybody's keys. Raises `moretta.errors.ParameterError` for a bad file."""
        return None if self.silo.roster is None else Roster.load(self.base / self.silo.roster)

    @property
    def engine_name(self) -> str:
        """The site's name in the framework that carries its messages. Raises as `load_roster`."""
        roster = self.load_roster()
        return self.silo.name if roster is None else roster.engine_name(self.silo.name)

    def with_keys(self, secure: SecureAggregation) -> SecureAggregation:
        """Return settings of sums with the site's own roster and identity, or none, in the place of any others."""
        roster, identity = self.silo.roster, self.silo.identity
        own = {} if roster is None else {"roster": self.base / roster, "identity": str(self.base / (identity or ""))}
        return secure.model_copy(update={"roster": None, "identity": None, **own})

    def edge_engine(self, engine: Engine) -> Engine:
        """Return [engine] of a run as this site has it where it takes part as an edge client."""
        limits = self.limits
        own = {"edge_precision": limits.edge_precision, "memory_limit_mib": limits.memory_limit_mib}
        return engine.model_copy(update={"edge": (self.silo.name,), "micro_batch": limits.micro_batch, **own})

    @property
    def out(self) -> Path:
        """The folder of what the site keeps."""
        return self.base / self.silo.out


def load(path: str | Path, *, rows: bool = True) -> SiloFile:
    """Read a silo.toml. Raises `moretta.errors.ParameterError`, in one sentence, for whatever is wrong with it.

    rows: whether it must say where the site's rows are; they may be another framework's app's to read.
    """
    path = Path(path)
    tables = read_toml(path, "the silo file")
    kinds: dict[str, Any] = {name: known.annotation for name, known in SiloFile.model_fields.items() if name != "base"}
    try:
        for name, table in tables.items():
            if name not in kinds:
                known = {name: run_files.keys_of(kind) for name, kind in kinds.items()}
                raise ParameterError(unknown_section(name, table, known))
            run_files.check_table(name, table)
        if "engine-name" in tables.get("silo", {}):
            raise ParameterError("[silo] engine-name belongs in the roster, beside the silo's key; move it there")
        for name, key in (("silo", "name"), ("data", "source")):
            if name not in tables and (rows or name == "silo"):
                raise ParameterError(f"the section [{name}] is missing; add it, with its key {key}")
        units = tables.get("mapping", {}).get("units", {})
        for name, conversion in units.items() if isinstance(units, dict) else ():
            run_files.check_table(f"mapping.units.{name}", conversion)
            run_files.section(f"mapping.units.{name}", Conversion, conversion)
        there = {name: kind for name, kind in kinds.items() if rows or name in tables}
        sections = {name: run_files.section(name, kind, tables.get(name, {})) for name, kind in there.items()}
        return SiloFile(**sections, base=path.absolute().parent)
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from None
