"""A run file: one training run as TOML, read into typed, validated, frozen data.

    [run]                 rounds, seeds, where the results go
    [data]                where rows come from and how they are dealt out to silos
    [model]               a built-in name or module:function, and its constructor's arguments
    [protocol]            the settings of one protocol, chosen by its name
    [secure-aggregation]  how uploads are summed (may be left out)
    [engine]              where the silos live (may be left out)

Keys have dashes in a file and underscores in Python. `load` reads a file, `dump` writes one that says everything a
default had left open, `digest` is what a checkpoint compares. Whatever is wrong with a file is one `ParameterError`
of one sentence, worded in `moretta.config_errors`. A class built directly from Python raises pydantic's own
ValidationError for one bad value, and `ParameterError` where values do not fit each other.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from moretta import config_errors
from moretta.errors import ParameterError
from moretta.protocols.fedsgd.params import Centralised, FedAvg, FedSGD, Local
from moretta.protocols.pbpfl.params import PBPFL
from moretta.protocols.training import Positive, kebab

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
    record_views: keep what each role saw: never, always, or in these rounds (the first is 1).
    early_stopping: stop when so many rounds have not lowered the validation loss, and go back to the best; None: never.
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


class Data(Section):
    """Where the rows come from, and who holds which.

    source: a built-in name, a file ending in .csv or .npz, or "module:function".
    silos: how many silos the rows are dealt out to.
    sizes: how the rows are shared out, a positive part for each silo, for "iid" and "by-label"; None: evenly.
    partition: "iid"; "dirichlet" over classes with concentration `alpha`; "by-label"; "by-domain".
    batch_size: rows of a batch; 0 is a silo's whole data.
    path: where a built-in source finds its files.
    target: the column to predict; None is the last one.
    task: None lets the type of the targets decide.
    test_fraction, validation_fraction: of the rows, where the source does not split them itself; None is 0.2 and 0,
        or the source's own custom (bank-marketing: 0.1 and 0.1).
    encoding: of text columns; None is "one-hot".
    missing: values are an error, or the silos' median, or that with one more column that says so.
    standardise: None is true for tables and false for images and for module:function.
    augment: vary training images each time they are used: "none", or random crops and mirror images, "crop-flip".
    """

    source: Words
    silos: PositiveInt = 3
    partition: Literal["iid", "dirichlet", "by-label", "by-domain"] = "iid"
    alpha: Positive | None = None
    sizes: tuple[Positive, ...] | None = None
    batch_size: Annotated[int, Field(ge=0)] = 32
    path: Path | None = None
    target: Words | None = None
    task: Literal["classification", "regression"] | None = None
    test_fraction: Fraction | None = None
    validation_fraction: Fraction | None = None
    encoding: Literal["one-hot", "ordinal"] | None = None
    missing: Literal["error", "median", "indicator"] = "error"
    standardise: bool | None = None
    augment: Literal["none", "crop-flip"] = "none"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.partition == "dirichlet" and self.alpha is None:
            raise ParameterError('[data] alpha is missing; partition = "dirichlet" needs it, for example alpha = 0.5')
        if self.partition != "dirichlet" and self.alpha is not None:
            raise ParameterError(
                f'[data] alpha belongs to partition = "dirichlet", not to "{self.partition}"; remove it'
            )
        test, validation = self.test_fraction or 0.0, self.validation_fraction or 0.0
        if test + validation >= 1:
            raise ParameterError(
                f"[data] test-fraction {test:g} and validation-fraction {validation:g} "
                "leave no rows to train on; their sum must be less than 1"
            )
        return self


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


class SecureAggregation(Section):
    """How the silos' uploads are summed.

    scheme: "pairwise" masks, or "none": whoever sums sees each upload.
    ring_bits: sums are exact integers of this many bits.
    limit: the largest absolute value that an entry of an upload may have; None is 2^16 in 64 bits, 2^4 in 32.
        A larger limit leaves fewer bits behind the point. See `largest`.
    """

    scheme: Literal["pairwise", "none"] = "pairwise"
    ring_bits: Literal[64, 32] = 64
    limit: Positive | None = None

    @property
    def largest(self) -> float:
        """The limit, with its default filled in."""
        if self.limit is not None:
            return self.limit
        return 2.0**16 if self.ring_bits == 64 else 2.0**4


class Engine(Section):
    """Where the silos live.

    strict: pass every message through the codec, as a network would.
    deadline: seconds that an answer may take; None waits.
    """

    name: Literal["in-process"] = "in-process"
    strict: bool = False
    deadline: Positive | None = None


Protocol = Annotated[FedSGD | FedAvg | Local | Centralised | PBPFL, Field(discriminator="name")]
PROTOCOLS: Mapping[str, type[FedSGD | FedAvg | Local | Centralised | PBPFL]] = {
    "fedsgd": FedSGD,
    "fedavg": FedAvg,
    "local": Local,
    "centralised": Centralised,
    "pbpfl": PBPFL,
}


class RunFile(Section):
    """All of a run file.

    base: the folder beside which relative paths and modules resolve; in a file ``[run] base``, by default its folder.
    Raises ParameterError if sections do not fit each other.
    """

    run: Run
    data: Data
    model: Model
    protocol: Protocol
    secure_aggregation: SecureAggregation = SecureAggregation()
    engine: Engine = Engine()
    base: Path = Path()

    def resolve(self, path: str | Path) -> Path:
        """Return a path of this run file as seen from the working directory."""
        return self.base / path

    @model_validator(mode="after")
    def _fits(self) -> Self:
        protocol, secure = self.protocol, self.secure_aggregation
        if _lacks_validation(self):
            raise ParameterError(
                "[run] early-stopping needs rows to validate on; give [data] validation-fraction, for example 0.1"
            )
        if isinstance(protocol, Local | Centralised) or secure.scheme == "none":
            return self  # nothing is summed in secret, so nothing below can go wrong
        if self.data.silos == 1:
            raise ParameterError(
                f'[secure-aggregation] scheme = "{secure.scheme}" needs two silos or more, and [data] silos is 1; '
                'one silo needs scheme = "none"'
            )
        if isinstance(protocol, PBPFL) and secure.ring_bits == 32:
            raise ParameterError(
                "[secure-aggregation] ring-bits = 32 is too coarse for pbpfl, whose corrections multiply the "
                "rounding; use ring-bits = 64"
            )
        return self


def _lacks_validation(run_file: RunFile) -> bool:
    """Return whether early stopping is asked for without rows to judge by; bank-marketing brings its own."""
    data = run_file.data
    brings = data.source == "bank-marketing" and data.validation_fraction is None
    return run_file.run.early_stopping is not None and not data.validation_fraction and not brings


AnySection = TypeVar("AnySection", bound=BaseModel)


def _keys(section: type[BaseModel]) -> list[str]:
    return [kebab(name) for name in section.model_fields]


_SECTIONS: Mapping[str, Sequence[str]] = {
    "run": [*_keys(Run), "base"],
    "data": _keys(Data),
    "model": ["source"],
    "protocol": ["name"],
    "secure-aggregation": _keys(SecureAggregation),
    "engine": _keys(Engine),
}
_KNOWN: Mapping[str, Sequence[str]] = {**_SECTIONS, **{name: _keys(params) for name, params in PROTOCOLS.items()}}


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read a run file.

    overrides: "section.key=value", each in the place of what the file says. The value is TOML, else a string.
    Raises ParameterError, in one sentence, for whatever is wrong with the file or an override.
    """
    path = Path(path)
    tables = _read(path)
    for text in overrides:
        _override(tables, text)
    try:
        return _run_file(tables, path)
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from None
    except RecursionError:
        raise ParameterError(f"{path} is nested too deeply for a run file; write flat lists") from None


def dump(run_file: RunFile) -> str:
    """Return a run file as TOML, with every default written out; wherever it is kept, `load` reads the same from it."""
    sections = _sections(run_file)
    sections["run"]["base"] = str(run_file.base.absolute())
    return tomli_w.dumps(sections)


def digest(run_file: RunFile) -> str:
    """Return the SHA-256, in hex, of what a checkpoint must agree on to be resumed under this run file.

    Left out is what may change on the way: how many rounds, where results go, what is recorded, how often a
    checkpoint is kept, and how the engine passes messages or waits for them. The order of keys does not matter.
    """
    sections = _sections(run_file)
    for section, key in (
        *(("run", key) for key in ("rounds", "out", "record-views", "checkpoint-every")),
        *(("engine", key) for key in ("strict", "deadline")),
    ):
        sections[section].pop(key, None)
    if run_file.protocol.lr_schedule != "constant":
        sections["run"]["rounds"] = run_file.run.rounds  # the rate of every round depends on it
    sections["secure-aggregation"]["limit"] = run_file.secure_aggregation.largest
    text = json.dumps(["moretta run file 1", sections], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _sections(run_file: RunFile) -> dict[str, dict[str, Any]]:
    sections = run_file.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"base"})
    arguments = sections["model"].pop("arguments")
    sections["model"] |= {kebab(name): value for name, value in arguments.items()}
    return sections


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ParameterError(f"the run file {path} does not exist; give the path of a TOML file") from None
    except OSError as error:
        raise ParameterError(f"the run file {path} cannot be read ({error.strerror}); give a TOML file") from None
    except UnicodeDecodeError:
        raise ParameterError(f"{path} is not text in UTF-8; save the run file as UTF-8") from None
    except RecursionError:
        raise ParameterError(f"{path} is nested too deeply for a run file; write flat lists") from None
    except ValueError as error:  # TOMLDecodeError, or a number of more digits than Python reads
        said = re.sub(r" \(at .*\)$", "", str(error))
        line = re.search(r"\(at (line \d+|end of document)", str(error))
        where = f", {line[1].replace('end of document', 'at its end')}" if line else ""
        raise ParameterError(f"{path}{where}: this is not TOML: {said[:1].lower()}{said[1:]}") from None


def _override(tables: dict[str, Any], text: str) -> None:
    place, equals, value = text.partition("=")
    parts = [part.strip() for part in place.split(".")]
    if not equals or len(parts) < 2 or not all(parts):
        raise ParameterError(f"--set: expected section.key=value, got {config_errors.shown(text)}")
    table = tables
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ParameterError(f"--set {place}: {part} is a value and not a section; give section.key=value")
    table[parts[-1]] = _value(value.strip())


def _value(text: str) -> object:
    try:
        tables = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = tables["value"]
    # A date is taken as text, since no key takes a date; so is text that only looks like more TOML.
    return value if len(tables) == 1 and isinstance(value, bool | int | float | str | list | dict) else text


def _has_table(value: object) -> bool:
    return isinstance(value, dict) or value is None or (isinstance(value, list) and any(map(_has_table, value)))


def _run_file(tables: Mapping[str, Any], path: Path) -> RunFile:
    for name, value in tables.items():
        if name not in _SECTIONS:
            raise ParameterError(config_errors.unknown_section(name, value, _SECTIONS))
        if not isinstance(value, dict):
            raise ParameterError(f"[{name}]: expected a section, got {config_errors.shown(value)}")
        for key, entry in value.items():
            if expected := config_errors.unfit(entry):
                raise ParameterError(f"[{name}] {key}: expected {expected}, got {config_errors.shown(entry)}")
    for name, key in (("run", "rounds"), ("data", "source"), ("model", "source"), ("protocol", "name")):
        if name not in tables:
            raise ParameterError(f"the section [{name}] is missing; add it, with its key {key}")
    run = {"name": path.stem, "base": "", **tables["run"]}
    base = run.pop("base")
    if not isinstance(base, str):
        raise ParameterError(f"[run] base: expected a string in quotes, got {config_errors.shown(base)}")
    protocol = tables["protocol"].get("name")
    if protocol is None:
        raise ParameterError(f"[protocol] name is missing; choose {config_errors.either(PROTOCOLS)}")
    if not isinstance(protocol, str) or protocol not in PROTOCOLS:
        raise ParameterError(config_errors.wrong_choice("protocol", "name", protocol, PROTOCOLS))
    return RunFile(
        run=_section("run", Run, run),
        data=_section("data", Data, tables["data"]),
        model=_section("model", Model, _model(tables["model"])),
        protocol=_section("protocol", PROTOCOLS[protocol], tables["protocol"], protocol),
        secure_aggregation=_section("secure-aggregation", SecureAggregation, tables.get("secure-aggregation", {})),
        engine=_section("engine", Engine, tables.get("engine", {})),
        base=path.absolute().parent / base,
    )


def _model(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section [model] with its further keys gathered under `arguments`."""
    arguments: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in arguments:
            raise ParameterError(f"[model] {kebab(key)} is given twice, with a dash and with an underscore; remove one")
        if key != "source":
            arguments[name] = value
    return {"arguments": arguments} | {key: value for key, value in table.items() if key == "source"}


def _section(name: str, section: type[AnySection], table: Mapping[str, Any], protocol: str = "") -> AnySection:
    """Validate one section strictly, so that "3" is no number and 1 is not true."""
    known = _keys(section)
    for key in table:
        if key not in known:
            raise ParameterError(config_errors.unknown_key(name, key, _KNOWN, protocol))
    try:
        # By way of JSON, whose strict reading takes lists for tuples and strings for paths, as a file has to.
        return section.model_validate_json(json.dumps(table), strict=True)
    except ValidationError as error:
        raise ParameterError(config_errors.first_error(name, error, protocol)) from None
