"""A run file: one training run as TOML, read into typed, validated, frozen data.

    [run]                 rounds, seeds, the folder for results
    [data]                the source of rows, and their distribution to silos
    [data.files]          a table for each silo, under source = "files"
    [model]               a built-in name or module:function, and its constructor's arguments
    [protocol]            the settings of one protocol, chosen by its name
    [secure-aggregation]  the method of summing uploads (optional)
    [engine]              the place of the silos (optional)
    [engine.faults]       faults to inject (optional)
    [columns.NAME]        the meaning of a table's columns, instead of [data] schema (optional)

Keys have dashes in a file and underscores in Python. `load` reads a file, `dump` writes one with every default, and
`digest` is the value that a checkpoint compares. Any mistake in a file is one `ParameterError` of one sentence. Rules
between sections are in `moretta.config.rules`. Each section's class is beside its subject: in `settings.py` of `data/`,
`engines/` and `secure_aggregation/`, in `moretta.models.catalogue`, and in each protocol's `params.py`.

`specification_of` turns a run file into a run's specification. A mark on each key names its owner: the server
(`SERVER`) or each site (`SITE`); a key without a mark is shared with all sites (`shared`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import re
import tomllib
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, TypeVar

import tomli_w
from pydantic import BaseModel, Field, InstanceOf, ValidationError, model_validator

from moretta.config import rules
from moretta.contract.settings import HOME, SERVER, SITE, Section, in_file, kebab, mark_of, section_within
from moretta.contract.wording import either, first_error, shown, unfit, unknown_key, unknown_section, wrong_choice
from moretta.data.references import OWN_CODE
from moretta.data.settings import Data, FileOfRows
from moretta.data.tables import schema
from moretta.data.tables.schema import Schema
from moretta.engines.files import read_text
from moretta.engines.settings import Delay, Engine, Faults, Run
from moretta.errors import ParameterError
from moretta.models import catalogue
from moretta.models.catalogue import Model
from moretta.protocols.common.own_loss import imported
from moretta.protocols.common.specification import Specification
from moretta.protocols.common.training import Training
from moretta.protocols.registry import ENTRIES
from moretta.secure_aggregation.settings import SecureAggregation

PROTOCOLS: Mapping[str, type[Training]] = {name: entry.settings_class() for name, entry in ENTRIES.items()}
if TYPE_CHECKING:
    Protocol = Training
else:
    Protocol = Annotated[functools.reduce(operator.or_, PROTOCOLS.values()), Field(discriminator="name")]


class MaskTargets(NamedTuple):
    """The masks that are a run's targets at sites: their shape, and the number of classes of a position."""

    shape: tuple[int, ...]
    classes: int


class RunFile(Section):
    """A whole run file.

    Args:
        table: the meaning of its tables' columns.
        base: the folder from which relative paths and modules resolve: ``[run] base``, by default the file's folder.
        agreed: the code that it may name (`moretta.data.references.resolve`).

    Raises:
        ParameterError: sections contradict each other.
    """

    run: Run
    data: Data
    model: Model
    protocol: Protocol
    secure_aggregation: SecureAggregation = SecureAggregation()
    engine: Engine = Engine()
    table: Schema | None = None
    base: Path = Path()
    agreed: InstanceOf[Container[str]] = Field(default=(), repr=False)

    @property
    def folder(self) -> Path:
        """The run folder, unless a caller names another."""
        return self.run.out or Path("runs") / self.run.name

    @property
    def model_source(self) -> str:
        """A digest of the model's name, arguments and code."""
        return catalogue.source_digest(self.model.source, self.model.arguments, self.base, self.agreed)

    @property
    def masks(self) -> MaskTargets | None:
        """The masks of rows at sites, from the schema's images or [data] mask; None for other targets."""
        data, target = self.data, None if self.table is None else self.table.target
        if target is not None and target.mask_values is not None and data.shape:
            return MaskTargets(data.shape[1:], len(target.mask_values))
        return None if data.mask is None or data.classes is None else MaskTargets(data.mask, data.classes)

    def resolve(self, path: str | Path) -> Path:
        """Return a path of this run file relative to the working directory."""
        return self.base / path

    @model_validator(mode="after")
    def _fits(self) -> Self:
        rules.check(self, in_file)
        rules.check_playing(self, in_file)
        return self


AnySection = TypeVar("AnySection", bound=BaseModel)


def keys_of(section: type[BaseModel]) -> list[str]:
    """Return the keys of a section in a file's form."""
    return [kebab(name) for name in section.model_fields]


_SECTIONS: Mapping[str, Sequence[str]] = {
    "run": [*keys_of(Run), "base"],
    "data": [*keys_of(Data), "schema"],
    "model": ["source"],
    "protocol": ["name"],
    "secure-aggregation": keys_of(SecureAggregation),
    "engine": keys_of(Engine),
}
_KNOWN: Mapping[str, Sequence[str]] = {
    **_SECTIONS,
    "engine.faults": keys_of(Faults),
    **{name: keys_of(params) for name, params in PROTOCOLS.items()},
}


def load(
    path: str | Path, overrides: Sequence[str] = (), change: Callable[[dict[str, Any]], object] | None = None
) -> RunFile:
    """Read a run file.

    Args:
        path: Of the file.
        overrides: "section.key=value", each of which replaces the file's value. A value is TOML, or else a string.
        change: Called with the tables before they are validated.

    Raises:
        ParameterError: The file or an override has a mistake; one sentence names it.
    """
    path = Path(path)
    tables = read_toml(path, "the run file")
    for text in overrides:
        override(tables, text)
    if change is not None:
        change(tables)
    return _checked(tables, path, OWN_CODE)


def of_folder(folder: Path) -> RunFile:
    """Read the run file of a run folder, perhaps another's: a plain file. Raises as `load`."""
    path = folder / "run.toml"
    tables = parse_toml(read_text(folder, path.name), path)
    if isinstance(data := tables.get("data"), dict) and "schema" in data:  # `dump` writes sections [columns]
        raise ParameterError(
            f"{path}: [data] schema names a file; expected the schema's own sections [columns], as in every run "
            "folder; restore run.toml"
        )
    return _checked(tables, path, OWN_CODE)


def loads(text: str, path: Path, agreed: Container[str] = ()) -> RunFile:
    """Return the run file of a text that `dumps` wrote, perhaps on another machine. No file is opened.

    Args:
        text: The TOML.
        path: Of the run file here; errors name it, and its folder is the base.
        agreed: The code that the text may name (`moretta.data.references.resolve`).

    Raises:
        ParameterError: As `load` does, and for a text with a base or a schema's file: paths of another machine.
    """
    tables = parse_toml(text, path)
    for name, key in (("run", "base"), ("data", "schema")):
        if isinstance(table := tables.get(name), dict) and key in table:
            raise ParameterError(f"{path}: [{name}] {key} is a path on the machine that sent this run file; remove it")
    return _checked(tables, path, agreed)


def _checked(tables: Mapping[str, Any], path: Path, agreed: Container[str]) -> RunFile:
    try:
        return _run_file(tables, path, agreed)
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from None
    except RecursionError:
        raise ParameterError(f"{path} is nested too deeply for a run file; write flat lists") from None


def dump(run_file: RunFile) -> str:
    """Return a run file as TOML with every default; `load` reads the same from it in any folder."""
    sections = as_sections(run_file)
    sections["run"]["base"] = str(run_file.base.absolute())
    return tomli_w.dumps(sections)


def dumps(run_file: RunFile) -> str:
    """Return the same without its folder on this machine, for another one."""
    return tomli_w.dumps(as_sections(run_file))


def digest(run_file: RunFile) -> str:
    """Return the SHA-256, in hex, of the settings that must not change when a checkpoint is resumed.

    It omits settings that may change: the number of rounds, the folder for results, recorded views, how often a
    checkpoint is written and the model tested, and memory limits. It also omits the number of processes, and how the
    engine passes messages, waits for them or injects faults. So a run that failed by faults can be resumed without
    them. It includes the names of edge clients, because ONNX Runtime rounds differently from PyTorch. Under early
    stopping it includes how often the model is tested, because that decides where the run stops. The order of keys does
    not matter.
    """
    sections = as_sections(run_file)
    for section, key in (
        *(("run", key) for key in ("rounds", "out", "metrics", "trackers", "record-views")),
        *(("run", key) for key in ("checkpoint-every", "evaluate-every")),
        *(("engine", key) for key in ("workers", "strict", "deadline", "message-mib", "faults")),
        *(("engine", key) for key in ("memory-limit-mib", "micro-batch", "recompute")),
        *(("engine", key) for key in ("edge", "edge-precision") if not run_file.engine.edge),
    ):
        sections[section].pop(key, None)
    if run_file.engine.edge:
        sections["engine"]["edge"] = sorted(set(run_file.engine.edge))
    if run_file.run.early_stopping is not None and run_file.run.evaluate_every is not None:
        sections["run"]["evaluate-every"] = run_file.run.evaluate_every
    if run_file.protocol.rate_depends_on_rounds:
        sections["run"]["rounds"] = run_file.run.rounds  # the rate of every round depends on it
    if run_file.table is not None:
        sections["columns"] = {"digest": run_file.table.digest}  # a digest that depends on the order of columns
    sections["secure-aggregation"]["limit"] = run_file.secure_aggregation.largest
    text = json.dumps(["moretta run file 1", sections], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def as_sections(run_file: RunFile) -> dict[str, dict[str, Any]]:
    """Return a run file as plain values: its sections by name, with keys in a file's form and without unset ones."""
    sections = run_file.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"base", "agreed"})
    arguments = sections["model"].pop("arguments")
    sections["model"] |= {kebab(name): value for name, value in arguments.items()}
    sections |= sections.pop("table", {})  # its one key is `columns`
    return sections


def _run_file(tables: Mapping[str, Any], path: Path, agreed: Container[str]) -> RunFile:
    for name, value in tables.items():
        if name not in (*_SECTIONS, "columns"):
            raise ParameterError(unknown_section(name, value, _SECTIONS))
        if name != "columns":
            check_table(name, value)
    for name, key in (("run", "rounds"), ("data", "source"), ("model", "source"), ("protocol", "name")):
        if name not in tables:
            raise ParameterError(f"the section [{name}] is missing; add it, with its key {key}")
    tables, table = _table(tables, path)
    run = {"name": path.stem, "base": "", **tables["run"]}
    base = run.pop("base")
    if not isinstance(base, str):
        raise ParameterError(f"[run] base: expected a string in quotes, got {shown(base)}")
    protocol = tables["protocol"].get("name")
    if protocol is None:
        raise ParameterError(f"[protocol] name is missing; choose {either(PROTOCOLS)}")
    if not isinstance(protocol, str) or protocol not in PROTOCOLS:
        raise ParameterError(wrong_choice("protocol", "name", protocol, PROTOCOLS))
    data, sites = tables["data"], tables.get("engine", {}).get("sites")
    files = _files(data)
    data, named = {**data, **({"files": files} if files else {})}, files or sites
    if named and "silos" not in data:
        data = {"silos": len(named), **data}
    return RunFile(
        run=section("run", Run, run),
        data=section("data", Data, data),
        model=section("model", Model, _model(tables["model"], table)),
        protocol=section("protocol", PROTOCOLS[protocol], tables["protocol"], protocol),
        secure_aggregation=section("secure-aggregation", SecureAggregation, tables.get("secure-aggregation", {})),
        engine=section("engine", Engine, tables.get("engine", {})),
        table=table,
        base=path.absolute().parent / base,
        agreed=agreed,
    )


def _table(tables: Mapping[str, Any], path: Path) -> tuple[Mapping[str, Any], Schema | None]:
    """Return the tables without the rows' schema, and that schema: [columns], or the file of [data] schema."""
    rest = {name: dict(table) for name, table in tables.items() if name != "columns"}
    named = rest["data"].pop("schema", None)
    if named is None:
        return rest, schema.of({"columns": tables["columns"]}, "[columns]") if "columns" in tables else None
    if "columns" in tables:
        raise ParameterError(
            "[data] schema names a file, but sections [columns] declare a schema too; remove one of them"
        )
    if not isinstance(named, str):
        raise ParameterError(f"[data] schema: expected a path in quotes, got {shown(named)}")
    base = rest["run"].get("base", "")
    return rest, schema.load(path.absolute().parent / (base if isinstance(base, str) else "") / named)


_NEARLY_TOML = re.compile(
    r"""(?i)([\[{"'].*|true|false|none|nan|[+-]?(?=\d*[.e])(?=\.?\d)\d*\.?\d*(e[+-]?\d*)?)$""", re.DOTALL
)
WRITTEN = ("separator", "decimal", "file-encoding", "absent")  # the form of a silo's file that has only its path


def _files(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section [data.files], with each of its own sections validated alone.

    If any silo has a section, all get one, because `dump` would list sections after plain paths. The order of silos
    decides who holds which columns and labels, and which rows an audit belongs to.
    """
    files = data.get("files", {})
    if not isinstance(files, dict):
        raise ParameterError(
            f'[data.files]: expected a table for each silo, as north = "north.csv"; got {shown(files)}'
        )
    for name, entry in files.items():
        if isinstance(entry, dict):
            section(f"data.files.{name}", FileOfRows, entry)
        elif not isinstance(entry, str) or not entry:
            raise ParameterError(f"[data.files] {name}: expected a path in quotes, got {shown(entry)}")
    if not any(isinstance(entry, dict) for entry in files.values()):
        return files
    written = {key: data[key] for key in WRITTEN if key in data}
    return {name: {"source": entry, **written} if isinstance(entry, str) else entry for name, entry in files.items()}


def check_table(name: str, table: object) -> None:
    """Raise ParameterError unless this is a section whose values a key accepts."""
    if not isinstance(table, dict):
        raise ParameterError(f"[{name}]: expected a section, got {shown(table)}")
    for key, entry in table.items():
        if f"{name}.{key}" in _KNOWN:
            check_table(f"{name}.{key}", entry)
        elif expected := unfit(entry):
            raise ParameterError(f"[{name}] {key}: expected {expected}, got {shown(entry)}")


def _model(table: Mapping[str, Any], columns: Schema | None) -> dict[str, Any]:
    """Return the section [model] with its further keys collected under `arguments`. columns: the rows' schema."""
    arguments: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in arguments:
            raise ParameterError(f"[model] {kebab(key)} is set twice, with a dash and with an underscore; remove one")
        if key != "source":
            arguments[name] = value
    arguments = catalogue.of_schema(str(table.get("source")), arguments, columns)
    return {"arguments": arguments} | {key: value for key, value in table.items() if key == "source"}


def section(name: str, kind: type[AnySection], table: Mapping[str, Any], protocol: str = "") -> AnySection:
    """Validate one section strictly, so that "3" is not a number and 1 is not true."""
    _check_keys(name, kind, table, protocol)
    try:
        # JSON's strict mode accepts lists for tuples and strings for paths, which are all that TOML has.
        return kind.model_validate_json(json.dumps(table), strict=True, context={HOME: name})
    except ValidationError as error:
        within: type[BaseModel] = kind
        place, skip = error.errors()[0]["loc"], 0  # of an inner section, whose name begins the sentence
        while skip < len(place) - 1 and (inner := section_within(within, place[skip])):
            name, within = f"{name}.{place[skip]}", inner
            skip += 2 if isinstance(place[skip + 1], int) else 1
        raise ParameterError(first_error(name, error, within, skip)) from None


def _check_keys(name: str, kind: type[BaseModel], table: Mapping[str, Any], protocol: str = "") -> None:
    """Raise ParameterError for a key that a section, or one within it, lacks."""
    known = keys_of(kind)
    for key, value in table.items():
        if key not in known:
            sections = {**_KNOWN, name: known} if name in _KNOWN else {name: known}
            raise ParameterError(unknown_key(name, key, sections, PROTOCOLS, protocol))
        if (inner := section_within(kind, key)) is None:
            continue
        rows = [value] if inner is Faults else value
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            seconds = ", seconds = 30" if inner is Delay else ""
            example = f'[{{round = 3, silo = "silo-1"{seconds}}}]'
            raise ParameterError(f"[{name}] {key}: expected a list such as {example}, got {shown(value)}")
        for row in rows:
            _check_keys(f"{name}.{key}", inner, row)  # TOML's name for a table of an array


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the tables of a TOML file. what: its name in errors. Raises ParameterError for an unreadable one."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ParameterError(f"{what} {path} does not exist; name an existing TOML file") from None
    except OSError as error:
        raise ParameterError(f"{what} {path} cannot be read ({error.strerror}); name a readable TOML file") from None
    except UnicodeDecodeError:
        raise ParameterError(f"{path} is not text in UTF-8; save {what} as UTF-8") from None
    return parse_toml(text, path)


def parse_toml(text: str, path: Path) -> dict[str, Any]:
    """Return the tables of TOML text. path: its file, for errors."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ParameterError(f"{path} is nested too deeply for a run file; write flat lists") from None
    except ValueError as error:  # TOMLDecodeError, or a number with more digits than Python reads
        reason = re.sub(r" \(at .*\)$", "", str(error))
        line = re.search(r"\(at (line \d+|end of document)", str(error))
        where = f", {line[1].replace('end of document', 'at its end')}" if line else ""
        raise ParameterError(f"{path}{where}: this is not TOML: {reason[:1].lower()}{reason[1:]}") from None


def override(tables: dict[str, Any], text: str, option: str = "--set") -> None:
    """Set a value in tables.

    Args:
        tables: By section; changed in place.
        text: "section.key=value", whose value is TOML, or else a string.
        option: The option with this text, for errors.

    Raises:
        ParameterError: The text has another form.
    """
    place, equals, value = text.partition("=")
    parts = [part.strip() for part in place.split(".")]
    if not equals or len(parts) < 2 or not all(parts):
        raise ParameterError(f"{option}: expected section.key=value, got {shown(text)}")
    table = tables
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ParameterError(f"{option} {place}: {part} is a value, not a section; write section.key=value")
    table[parts[-1]] = text = value.strip()
    with suppress(ValueError, RecursionError):
        match tomllib.loads(f"value = {text}"):
            # A date becomes text, because no key accepts a date; so does text that only resembles more TOML.
            case {"value": bool() | int() | float() | str() | list() | dict() as parsed, **more} if not more:
                table[parts[-1]] = parsed
                return
    if _NEARLY_TOML.match(text) and text != "none":  # else a user's own model would receive it as text
        raise ParameterError(
            f"{option} {place.strip()}: expected TOML, such as false, 0.5 or [0.5, 1], got {shown(text)}; write it so, "
            """or with quotes for text ('"False"')"""
        )


def specification_of(
    run_file: RunFile,
    run: Run,
    *,
    task: str,
    standardise: bool,
    table: Schema | None = None,
    aggregation: SecureAggregation | None = None,
    imports: bool = True,
) -> Specification:
    """Return the specification of a run file, with its files found beside it.

    Args:
        run_file: The run file.
        run: Its section [run] with this machine's own values: a site uses only its own seed of secrets, because all its
            secrets follow from it.
        task: "classification" or "regression", if the run file does not set it.
        standardise: Whether inputs are standardised, if the run file does not set it.
        table: The schema of the rows.
        aggregation: A site's own, which replaces the run file's.
        imports: Whether to import the code that the run file names; an edge site imports none.
    """
    data, text = run_file.data, dump(run_file)
    return Specification(
        run,
        data if data.standardise is not None else data.model_copy(update={"standardise": standardise}),
        _start_beside(run_file) if imports else run_file.protocol,
        _keys_beside(run_file) if aggregation is None else aggregation,
        run_file.engine,
        task=task,
        table=table,
        metrics=tuple(imported(name, run_file.base, run_file.agreed) for name in run.metrics) if imports else (),
        model_source=run_file.model_source if imports else "",
        text=text,
        digest=digest(run_file),
        shared=digest(shared(run_file)),
        sections=tomllib.loads(text),
    )


def _start_beside(run_file: RunFile) -> Training:
    """Return the protocol's settings, with its warm start and its own code found beside the run file."""
    protocol = run_file.protocol
    if protocol.own_code:
        protocol = protocol.with_own_code(run_file.base, run_file.agreed)
    if protocol.warm_start is not None:
        protocol = protocol.model_copy(update={"warm_start": run_file.resolve(protocol.warm_start)})
    return protocol


def _keys_beside(run_file: RunFile) -> SecureAggregation:
    """Return [secure-aggregation] with its roster and identities found beside the run file."""
    secure = run_file.secure_aggregation
    if secure.roster is None:
        return secure
    identity = None if secure.identity is None else str(run_file.resolve(secure.identity))
    return secure.model_copy(update={"roster": run_file.resolve(secure.roster), "identity": identity})


def shared(run_file: RunFile) -> RunFile:
    """Return the run file for sites: each key of the server's or of a site's own has its default."""
    sections = dict[str, Section]()
    for name in type(run_file).model_fields:
        if isinstance(part := getattr(run_file, name), Section):
            own = (field for field in type(part).model_fields.items() if mark_of(field[1]) in (SERVER, SITE))
            sections[name] = part.model_copy(update={key: known.get_default() for key, known in own})
    return run_file.model_copy(update=sections)
