"""silo.toml: the settings of a site; ``docs/silo-file.md`` lists them key by key.

The file stays at the site, and only its name is ever sent. `[limits]`, `[runs]` and `[privacy]` bound what a run may do
here; the first run pins all other settings that concern rows (`moretta.deployment.agreed_settings`).
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
    """The identity of the site, and what it keeps and allows.

    Args:
        name: in the run, and in the certificate of its startup kit.
        out: the folder for its records.
        identity, roster: its own key, and its own list of all keys.
        server_key: the server's public key, one line or two; by default the roster's or the kit's.
        models: the "module:function" sources of models that runs may build here, from modules beside silo.toml or
            installed. A run file names code, and the site calls only listed code.
        record_views: keep what its role sees.
        edge: take part in baffle as an edge client, a process with ONNX Runtime and without PyTorch.
        insecure_secret_seed: for tests only.
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
            raise ParameterError("[silo] roster and identity belong together; set both, or neither")
        return self


class RowsSection(FileOfRows):
    """The place of its rows, and the form of a .csv file: see `moretta.data.reading.Source`.

    Args:
        source: a table (.csv, .parquet, .arrow), an .npz file, "module:function" or "image-folder".
        path, labels: for "image-folder", the folder and the table that names its files.
        test_fraction: the fraction of rows to hold back, the same in every run; a run may have models scored on them.
        test: a source of such rows instead, in the same form; for "image-folder" a table that names further files in
            `path`.
        alignment: a file of `moretta align`, which orders the rows that partners share.
        rows_in_order: the site's assurance that its rows are in the order of the partners' rows, without ids to
            compare.
    """

    path: Path | None = None
    labels: Path | None = None
    test_fraction: Fraction = 0.0
    rows_in_order: bool = False

    @model_validator(mode="after")
    def _in_one_order(self) -> Self:
        if self.alignment is not None and self.rows_in_order:
            raise ParameterError(
                "[data] alignment and rows-in-order exclude each other: the first orders the rows, the second "
                "declares them in order; remove one"
            )
        if self.test is not None and self.test_fraction:
            raise ParameterError(
                "[data] test and test-fraction exclude each other, because both hold rows back; remove one"
            )
        return self


class Limits(Section):
    """The machine's limits for a run.

    Args:
        message_mib: the largest message, in MiB, that the site accepts from the server; a longer one is refused unread.
        parameters: the most numbers of a model that the site builds; a larger one is refused before it is built.
        memory_limit_mib: the most memory, in MiB, of an edge client's process, or else of a job's process, by what it
            reserves (`moretta.engines.usage.cap`), PyTorch included; None: no limit.
        micro_batch: the number of a batch's rows that pass through the model at a time; None: the run's number, or for
            an edge client as many as the limit allows, or without one 4.
        edge_precision: the precision of an edge client; "float16" and "int8-activations" round as such hardware does.
        threads: the most threads of PyTorch; None: its own choice.
        device: the device on which a job of this site computes.
    """

    message_mib: Annotated[PositiveInt, Unit("MiB")] = 1024
    parameters: Annotated[PositiveInt, Unit("numbers")] = 100_000_000
    memory_limit_mib: Annotated[Positive | None, Unit("MiB")] = None
    micro_batch: Annotated[PositiveInt | None, Unit("rows")] = None
    edge_precision: Precision = "float32"
    threads: PositiveInt | None = None
    device: Device = "cpu"


class Runs(Section):
    """The uses of the site that a run may request, beside the settings that it has agreed to (`moretta accept`).

    Args:
        protocols: names of the protocols that it takes part in; empty: any.
        rounds: the most rounds of a run.
        local_epochs: the most passes over its rows in a round.
        look: whether its rows and classes may be counted, in a secure sum, before training.
        scores: whether models may be scored on the rows that it holds back.
    """

    protocols: tuple[Words, ...] = ()
    rounds: Annotated[PositiveInt, Unit("rounds")] = 100_000
    local_epochs: PositiveInt = 1000
    look: bool = True
    scores: bool = True


class Floors(Section):
    """The site's minimum requirements for every run, whatever the run's file sets; a run may exceed them.

    Args:
        fewest_silos: the fewest silos in any sum that it helps to open.
        threshold: the least threshold of the masks' shares.
        scheme: the weakest scheme of sums; "pairwise" is above "additive-shares".
        blind: under cgd, whether the server must not read any sum.
        roster: whether a roster is required.
        dp_noise: the least noise multiplier.
        unit: the smallest unit that noise must hide.
        max_epsilon: the largest epsilon of a run.
        delta: the largest delta of that epsilon; left out, 1e-5 beside max_epsilon.
        per: whether max_epsilon applies to each run, or to all runs together, each of which counts with its dp-epsilon.
        apart: the fewest silos that the sums which it helps may isolate together
            (`moretta.secure_aggregation.one_sum`); 1: any.
        repeat_whole_rows: whether a round that uses all rows may be summed over other silos too.
        repeat_statistics: whether its rows' statistics may be summed over other silos from run to run.
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
    """A whole silo.toml. base: the root of relative paths. data: the default if another framework reads the rows."""

    silo: SiloSection
    data: RowsSection = RowsSection(source="elsewhere")
    mapping: ColumnMapping = ColumnMapping()
    limits: Limits = Limits()
    runs: Runs = Runs()
    privacy: Floors = Floors()
    base: Path = Path()

    @property
    def helped(self) -> HelpedFile:
        """The site's file of sums that it has helped to open, in all runs together."""
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
        """Return the site's own list of all keys. Raises `moretta.errors.ParameterError` for a bad file."""
        return None if self.silo.roster is None else Roster.load(self.base / self.silo.roster)

    @property
    def engine_name(self) -> str:
        """The site's name in the framework that carries its messages. Raises as `load_roster`."""
        roster = self.load_roster()
        return self.silo.name if roster is None else roster.engine_name(self.silo.name)

    def with_keys(self, secure: SecureAggregation) -> SecureAggregation:
        """Return settings of sums whose roster and identity are the site's own, or absent."""
        roster, identity = self.silo.roster, self.silo.identity
        own = {} if roster is None else {"roster": self.base / roster, "identity": str(self.base / (identity or ""))}
        return secure.model_copy(update={"roster": None, "identity": None, **own})

    def edge_engine(self, engine: Engine) -> Engine:
        """Return [engine] of a run with this site's own values as an edge client."""
        limits = self.limits
        own = {"edge_precision": limits.edge_precision, "memory_limit_mib": limits.memory_limit_mib}
        return engine.model_copy(update={"edge": (self.silo.name,), "micro_batch": limits.micro_batch, **own})

    @property
    def out(self) -> Path:
        """The folder for the site's records."""
        return self.base / self.silo.out


def load(path: str | Path, *, rows: bool = True) -> SiloFile:
    """Read a silo.toml.

    Args:
        rows: Whether it must name the site's rows; another framework's app may read them instead.

    Raises:
        ParameterError: The file has a mistake; one sentence names it.
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
        present = {name: kind for name, kind in kinds.items() if rows or name in tables}
        sections = {name: run_files.section(name, kind, tables.get(name, {})) for name, kind in present.items()}
        return SiloFile(**sections, base=path.absolute().parent)
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from None
