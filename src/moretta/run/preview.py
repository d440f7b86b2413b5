"""A look at the rows of a run file, of a local federation, or of one file, without a model or torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moretta.config.run_files import RunFile
from moretta.contract.wording import LEAST_SHOWN
from moretta.data import datasets, domains
from moretta.data.images.sets import read_npz
from moretta.data.look import Look, Spread, lines_of, look_at
from moretta.data.partition import Distributed, by_owner, distribute
from moretta.data.rows import as_features, as_targets
from moretta.data.settings import GRIDS
from moretta.data.silo import Silo
from moretta.data.tables import inference
from moretta.data.tables import schema as schemas
from moretta.data.tables.doubts import Hints
from moretta.data.tables.files import ENDINGS, Format, is_table, read_columns
from moretta.data.tables.preparation import MARK, ONE_OF, PLAIN
from moretta.data.tables.rows import encode, expansion_of, rules_of
from moretta.data.tables.schema import Category, Number, Ordered, Schema
from moretta.errors import ParameterError
from moretta.protocols.registry import entry_of

if TYPE_CHECKING:  # a look must not need torch
    from moretta.audit.evidence.truth import Trained
    from moretta.protocols.common.statistics import Counted
    from moretta.run.inputs import Trainable


def look_of_run(run_file: RunFile, least: int = LEAST_SHOWN) -> Look:
    """Return a look at the rows of a run file on one machine. Raises `moretta.errors.ParameterError`."""
    if run_file.data.source == "sites":
        raise ParameterError(
            "the rows of this run are at its sites; look at each one's own file there, or set [data] look = true, by "
            "which the run counts rows, absent values and classes of all sites together"
        )
    data = run_file.data
    if data.missing == "error" and run_file.table is None and (is_table(data.source) or data.source.endswith(".npz")):
        data = data.model_copy(update={"missing": "mean"})  # a look counts absent values; training refuses them
    rows = load(run_file.model_copy(update={"data": data}))
    if not _in_one_order(rows.silos):
        raise ParameterError(
            "the silos' rows are not in one order, so nobody can look at whole rows; look at each file alone, as in: "
            "moretta look FILE --schema schema.toml"
        )
    held = {"testing": rows.test, "validation": rows.validation}
    return look_at(
        _owners(rows.silos),
        rows.feature_names,
        table=rows.table,
        rules=rows.column_rules,
        classes=rows.classes,
        class_names=rows.class_names,
        held={name: 0 if rows is None else len(rows) for name, rows in held.items()},
        least=least,
    )


def opening_of(federation: Trainable) -> list[str]:
    """Return the lines before round one: rows at each silo, absent values, classes, and columns by kind."""
    if _in_one_order(federation.silos):
        parts = {"testing": federation.test, "validation": federation.validation}
        look = look_at(
            _owners(federation.silos),
            federation.feature_names,
            table=federation.spec.table,
            rules=federation.column_rules,
            classes=max(2, federation.outputs) if federation.spec.task == "classification" else None,
            class_names=federation.class_names,
            held={name: 0 if rows is None else len(rows[1]) for name, rows in parts.items()},
        )
        lines = lines_of(look.plain(by_silo=True))
    else:  # the set-up orders them, and there are no whole rows before that
        lines = [f"{silo.name}: {len(silo.x)} rows, to be put in order" for silo in federation.silos]
    if federation.spec.table is not None:
        lines += inference.lines_of(federation.spec.table)
    elif columns := len(federation.feature_names):
        lines = [*lines, f"numbers: {columns} columns"]
    return [*lines, *losable_of(federation)]


def losable_of(federation: Trainable) -> list[str]:
    """Return the lines about silos that no round can lose, and the remedies in a run of three.

    Empty if silos hold columns, because their groups differ in size, or without masks.
    """
    spec, silos = federation.spec, federation.silos
    secure, names = spec.summing(len(silos)), [silo.name for silo in silos]
    count = spec.playing(names, spec.run.seed).count
    masked = entry_of(spec.protocol).summed and secure.scheme == "pairwise" and not spec.engine.simulates
    if not masked or count < 3 or any(silo.columns for silo in silos):
        return []
    if (spare := count - secure.fewest(count)) > 0:
        return [f"a round can do without {spare} of its 3 silos"] if count == 3 else []
    needs = f"a round needs all of its {count} silos"
    if count > 3:
        return [f"{needs}; with a lower threshold in [secure-aggregation] it can do without some"]
    roster = "" if secure.roster is not None else "a roster (moretta keys new) and "
    return [
        f"{needs}; with {roster}threshold = 2 in [secure-aggregation] it can do without one. The price: the server "
        "and one silo together can then read another silo’s upload"
    ]


def missing_in_audit(federation: Trained) -> list[str]:
    """Return a sentence for each setting that prevents attacks of an audit; none if no views are recorded."""
    spec, silos = federation.spec, federation.silos
    recorded = spec.run.record_views
    if not recorded or any(silo.remote for silo in silos):
        return []
    from moretta.audit.auditor import switched_off
    from moretta.audit.evidence.truth import public_run
    from moretta.report import audit

    summing = spec.summing(len(silos))
    planned = {
        "run": "",
        "protocol": getattr(spec.protocol, "name", ""),
        "task": spec.task,
        "settings": dict(spec.settings),
        "silo_names": [silo.name for silo in silos],
        "secure_aggregation": {"scheme": summing.scheme, "ring_bits": summing.ring_bits},
        "rounds": spec.run.rounds,
    }
    rounds = recorded if isinstance(recorded, tuple) else tuple(range(1, spec.run.rounds + 1))
    return audit.switched_off(switched_off(public_run(planned, federation, rounds)))


def look_of_file(path: Path, schema: Path | None, form: Format, hints: Hints, least: int = LEAST_SHOWN) -> Look:
    """Return a look at a table, by a given or an inferred schema, or at an .npz file. Raises ParameterError."""
    if not is_table(path.name):
        if schema is not None:
            raise ParameterError(
                f"a schema is for tables; expected a name that ends in {', '.join(ENDINGS)}, "
                f"got {path.name}; leave it out"
            )
        arrays = read_npz(path)
        parts = [[arrays[f"{name}{suffix}"] for name in "xy"] for suffix in ("", "_train") if f"x{suffix}" in arrays]
        if not parts:
            raise ParameterError(f"{path.name}: expected arrays x and y, or x_train and y_train")
        x = as_features(parts[0][0], path.name)
        y, _, count = as_targets(parts[0][1], path.name)
        names = [f"x{place}" for place in range(x.shape[1])] if x.ndim == 2 and x.dtype.kind == "f" else []
        return look_at([Silo(path.name, x, y)], names, classes=count, least=least)
    columns = read_columns(path, form)
    table = inference.infer(columns, hints, path.name, form) if schema is None else schemas.load(schema)
    rows = encode(columns, table, path.name, form, labelled=table.target is not None)
    classes, rules = len(table.classes) or None, rules_of(table)
    owner = Silo(path.name, rows.x, rows.y)
    return look_at([owner], (), table=table, rules=rules, classes=classes, class_names=table.classes, least=least)


def _in_one_order(silos: Iterable[Silo]) -> bool:
    """Return whether silos with different columns of the same rows have the same number, with equal ids if any."""
    first = dict[str, Silo]()
    for silo in silos:
        other = first.setdefault(silo.row, silo) if silo.columns else silo
        ids, theirs = silo.subject_ids, other.subject_ids
        if len(silo.x) != len(other.x):
            return False
        if ids is not None and theirs is not None and not np.array_equal(ids, theirs):
            return False
    return True


def _owners(silos: Iterable[Silo]) -> list[Silo]:
    """Return each silo's rows; the partners of a grid's row are one owner of whole rows."""
    rows: dict[str, list[Silo]] = {}
    for silo in silos:
        rows.setdefault(silo.row or silo.name, []).append(silo)
    owners = []
    for name, partners in rows.items():
        first = partners[0]
        labelled = next((silo.y for silo in partners if len(silo.y)), first.y)
        if first.columns:
            whole = np.empty((len(first.x), sum(len(silo.columns) for silo in partners)), first.x.dtype)
            for silo in partners:
                whole[:, list(silo.columns)] = silo.x
            first = Silo(name, whole, labelled)
        owners.append(first)
    return owners


def look_of_sums(
    counted: Counted, silos: int, names: Sequence[str], class_names: Sequence[str], table: Schema | None
) -> dict[str, Any]:
    """Return the look that sums may show (`moretta.data.look.Look.plain`).

    Args:
        silos: The number of silos.
        names: The names of inputs; empty numbers them.
    """
    if not len(counted.present):
        columns = []
    elif table is not None:
        columns = _by_schema(counted, table)
    else:
        labels = names or [f"x{place}" for place in range(len(counted.present))]
        may_lack = bool((counted.present < counted.rows).any())
        columns = [_number(name, counted, place, may_lack=may_lack) for place, name in enumerate(labels)]
    target = _target(counted, class_names, table)
    look = Look(("all silos",), np.array([counted.rows]), tuple(columns), target, {}, (len(counted.present),))
    return look.plain() | {"silos": silos}


def _by_schema(counted: Counted, table: Schema) -> list[Spread]:
    """Return each column of a schema; the mean of a category's zeros and ones gives its number of rows."""
    expansion, spreads = expansion_of(table), list[Spread]()
    rows = np.rint(counted.mean * counted.present).astype(np.int64)
    for place, (name, feature) in enumerate(table.features.items()):
        mine = expansion.source == place
        marks = rows[mine & (expansion.kinds == MARK)]
        if isinstance(feature, Category):
            counts = rows[mine & (expansion.kinds == ONE_OF)][None, :]
            spreads.append(Spread(name, "category", feature.categories, counts, marks if len(marks) else None))
            continue
        (column,) = np.flatnonzero(mine & (expansion.kinds == PLAIN))
        number = _number(name, counted, int(column), may_lack=feature.blanks != "refuse")
        kind: Any = "ordered" if isinstance(feature, Ordered) else feature.kind
        limits = None if isinstance(feature, Ordered) else feature.range
        unit = feature.unit if isinstance(feature, Number) else ""
        limits_shown = number.range if kind == "number" else ()
        if limits is not None:
            limits_shown = str(limits[0]), str(limits[1])
        spreads.append(
            Spread(name, kind, number.cells, number.counts, number.absent, unit, limits_shown, limits is not None)
        )
    return spreads


def _number(name: str, counted: Counted, place: int, *, may_lack: bool) -> Spread:
    """Return a column of numbers: their count and their approximate range, two deviations around the mean."""
    present, mean, spread = int(counted.present[place]), float(counted.mean[place]), float(counted.deviation[place])
    absent = np.array([counted.rows - present]) if may_lack else None
    about = f"{mean - 2 * spread:.2g}", f"{mean + 2 * spread:.2g}"
    return Spread(name, "number", ("any value",), np.array([[present]]), absent, "", about)


def _target(counted: Counted, names: Sequence[str], table: Schema | None) -> Spread:
    named = (table and table.name_of("target")) or "target"
    if len(counted.classes) == 1:
        return Spread(named, "number", ("any value",), counted.classes[None, :])
    words = tuple(names) or tuple(f"class {number}" for number in range(len(counted.classes)))
    return Spread(named, "classes", words, counted.classes[None, :])


def load(run_file: RunFile) -> Distributed:
    """Return the rows of a run file by silo: distributed, or from a file each.

    Files of silos with different columns may have their rows in any order.

    Raises:
        ParameterError: The data are unusable, or at sites.
    """
    seed, data, base = run_file.run.seed, run_file.data, run_file.base
    if data.source == "sites":
        raise ParameterError(
            "the rows of this run are at its sites, and none are here; train over many machines by moretta serve and "
            "join, or set [data] source to one on this machine"
        )
    if data.in_files and data.partition in GRIDS:
        table, joint = table_of(run_file), getattr(run_file.protocol, "vertical", "joint") == "joint"
        silos, test = datasets.load_columns(data, table, joint=joint, base=base)
        names, classes = expansion_of(table).names, len(table.classes) or None
        return Distributed(silos, test, None, names, table.classes, rules_of(table), table, classes, classes or 1)
    if data.in_files:
        rows = datasets.load_files(data, table_of(run_file), seed=seed, base=base)
        return by_owner(rows, list(data.files))
    rows = datasets.load(data, run_file.table, seed=seed, base=base)
    rows = rows if data.domains is None else domains.into_domains(rows, data.domains, seed)
    return distribute(rows, data, seed)


def table_of(run_file: RunFile) -> Schema:
    """Return the schema of a run file that has one."""
    if run_file.table is None:
        raise ParameterError("[data] schema is missing; name the file that describes the columns")
    return run_file.table
