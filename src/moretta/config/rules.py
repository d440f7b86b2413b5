"""Rules between the sections of a run, whether from a run file, from Python or from a server's text at a site.

Each rule is stated once: here, or if it concerns one protocol, in that protocol's settings
(`moretta.protocols.common.training.Training.BETWEEN`). Rules within one section are in its class.
"""

from functools import partial
from typing import Any

from moretta.contract.settings import Reader, SettingKey, SettingRule, check_rules, in_file
from moretta.contract.wording import either
from moretta.data.settings import PYTHON, Data
from moretta.protocols.common.entry import Entry
from moretta.protocols.common.scoring import LEAST_SILOS
from moretta.protocols.common.setting import TABLES_TOO
from moretta.protocols.registry import ENTRIES, entry_of
from moretta.secure_aggregation.statistics import MOST_SILOS

Sections = Any
"""A run's sections: `run`, `data`, `protocol`, `secure_aggregation`, `engine`, and `table`, the meaning of columns."""


def check(sections: Sections, reader: Reader) -> None:
    """Raise `moretta.errors.ParameterError` for the first broken rule. reader: writes the sentence's keys."""
    check_rules(RULES, sections, reader)
    check_rules(sections.protocol.BETWEEN, sections, reader)


def check_playing(sections: Sections, reader: Reader) -> None:
    """Do the same for rules on the number of rounds and on the silos, which Python sets last."""
    check_rules(OF_PLAYING, sections, reader)


AT_SITE = {
    "edge": "[silo] edge (join --edge)",
    "edge_precision": "[limits] edge-precision",
    "memory_limit_mib": "[limits] memory-limit-mib",
}


def at_edge_site(key: SettingKey, value: str) -> str:
    """Write a key in the form of a site that takes part as an edge client, whose silo.toml sets it."""
    place = AT_SITE.get(key.name) if key.home == "engine" else None
    return in_file(key, value) if place is None else f"{place}{f' = {value}' if value else ''}"


def _entry(s: Sections) -> Entry:
    return entry_of(s.protocol)


def _in_one_place(s: Sections) -> bool:
    """Return whether one party has all rows, so that nothing is summed."""
    return bool(_entry(s).pooled or s.engine.simulates)


def _sums(s: Sections) -> bool:
    """Return whether uploads are summed in secret."""
    return _entry(s).summed and s.secure_aggregation.scheme != "none" and not s.engine.simulates


def _flare(s: Sections) -> bool:
    return bool(s.engine.name == "flare")


def has_validation(data: Data) -> bool:
    """Return whether early stopping has rows to judge by; bank-marketing has its own, and Python passes them."""
    own = data.source == "bank-marketing" and data.validation_fraction is None
    return bool(data.validation_fraction) or own or data.source == PYTHON


def _image(s: Sections) -> bool:
    """Return whether rows at sites are images, in a column of files in the schema."""
    return s.table is not None and s.table.name_of("file") is not None and s.data.at_sites


def _is_square(data: Data) -> bool:
    shape = () if data.inputs is None or isinstance(data.inputs, dict) else data.inputs
    return len(shape) == 3 and shape[0] in (1, 3) and shape[1] == shape[2]


def _sets_targets(data: Data) -> bool:
    """Return whether [data] has a key on targets or absent values that a table's schema also sets."""
    return bool(data.classes or data.outputs or data.mask or data.missing != "error")


def _late(s: Sections) -> object:
    """Return, as a field of the sentence, the number of a round that has a fault and never comes.

    Python sets the rounds in each call of `train`, always with the same faults, so it is not checked.
    """
    faults = None if s.data.source == PYTHON else s.engine.faults
    injected = () if faults is None else (*faults.drop, *faults.delay, *faults.corrupt)
    return next(({"late": fault.round} for fault in injected if fault.round > s.run.rounds + 1), None)


def _late_view(s: Sections) -> bool:
    recorded = s.run.record_views
    return not isinstance(recorded, bool) and min(recorded, default=1) > s.run.rounds


# From Python, silos may be remote, each with its own key (`moretta.run.federation`), so this is not among `RULES`.
KEYS_MISSING = SettingRule(
    lambda s: (
        s.secure_aggregation.roster is not None and s.secure_aggregation.identity is None and {"keys": '"keys/{silo}"'}
    ),
    "{secure_aggregation.roster} and {secure_aggregation.identity} belong together: who the silos are, and where each "
    "one's own key is, for example {secure_aggregation.identity} = {keys}; set both, or neither",
)
# On one machine only the rows show whether targets are classes (`moretta.run.inputs.check_training`).
SCALED_CLASSES = SettingRule(
    lambda s: (
        s.data.standardise_targets
        and (
            getattr(s, "task", "") == "classification"
            or s.protocol.loss == "cross-entropy"
            or s.data.classes
            or (s.table is not None and s.table.classes)
        )
    ),
    '{data.standardise_targets} is for targets that are numbers, with {protocol.loss:="mse"}, and not for classes; '
    "remove it",
)
RULES: tuple[SettingRule, ...] = (
    # The silos, and their place.
    SettingRule(
        lambda s: s.engine.simulates and s.engine.name not in _entry(s).simulations,
        '{engine.name:=} does not simulate {protocol.name:v}; choose {engine.name:="in-process"}',
    ),
    SettingRule(
        lambda s: s.engine.simulates and (s.engine.faults is not None or s.run.record_views),
        "{engine.name:=} passes no messages, so that none can be recorded or lost; remove {run.record_views} and "
        "{engine.faults}",
    ),
    SettingRule(
        lambda s: s.engine.edge and not _entry(s).edge,
        "{engine.edge}: edge clients require baffle; {protocol.name:=}; remove it",
    ),
    SettingRule(
        lambda s: s.engine.edge and s.protocol.own_loss is not None,
        "{engine.edge}: edge clients compute the built-in losses alone, without PyTorch; remove it, or "
        "{protocol.own_loss}",
    ),
    SettingRule(
        lambda s: s.run.participation < 1 and _entry(s).takes_all,
        "{run.participation:=}: under {protocol.name:v} every silo takes every step; leave it at 1",
    ),
    SettingRule(
        _late,
        "{engine.faults}: round = {late} never comes: {run.rounds} is {run.rounds:v}, and the release is one more",
    ),
    # Machines of their own.
    SettingRule(
        lambda s: _flare(s) and s.data.source == PYTHON,
        "{engine.name:=} is for a run file that moretta serve runs with sites on machines of their own; from Python "
        "silos run in this process; remove it",
    ),
    SettingRule(
        lambda s: _flare(s) != s.data.at_sites,
        '{engine.name:="flare"} and {data.source:="sites"} belong together, because each site names its rows in its '
        "own silo.toml; got {engine.name:=} and {data.source:=}: set both, or neither",
    ),
    SettingRule(
        lambda s: _flare(s) and s.secure_aggregation.identity is not None,
        "{secure_aggregation.identity} is each site's own, in its silo.toml; remove it here",
    ),
    SettingRule(lambda s: not _flare(s) and s.data.source != PYTHON and KEYS_MISSING.broken(s), KEYS_MISSING.sentence),
    SettingRule(
        lambda s: (
            _flare(s)
            and not _entry(s).many_machines
            and {"others": either(name for name, entry in ENTRIES.items() if entry.many_machines)}
        ),
        "{protocol.name:=} is a baseline for one machine; over many, choose {others}",
    ),
    SettingRule(
        lambda s: _flare(s) and len(s.engine.sites) != s.data.silos and {"count": len(s.engine.sites)},
        "{engine.sites} names {count} silos and {data.silos} is {data.silos:v}; make them alike",
    ),
    # The form of rows is stated once: by a schema, or by shapes.
    SettingRule(
        lambda s: _image(s) and not _is_square(s.data),
        "{data.inputs}: expected the shape that images become, [1 or 3, size, size], as the schema names files of "
        "images; for example {data.inputs:=[1, 224, 224]}",
    ),
    SettingRule(
        lambda s: _image(s) and (_sets_targets(s.data) or s.data.tokens or s.data.partition != "iid"),
        "{data.classes}, {data.outputs}, {data.mask}, {data.tokens}, {data.missing} and {data.partition} are not for "
        "images whose classes the schema lists; remove them",
    ),
    *(
        SettingRule(
            partial(lambda key, s: s.data.at_sites and not _image(s) and getattr(s.data, key) is not None, key),
            f"{{data.{key}}} is for images, which a schema names in a column of files; remove it",
        )
        for key in ("window", "spacing", "plane", "channel_mean")
    ),
    SettingRule(
        lambda s: (
            s.table is not None
            and not _image(s)
            and s.data.source != PYTHON
            and (s.data.inputs or _sets_targets(s.data))
        ),
        "{data.inputs}, {data.classes}, {data.outputs}, {data.mask} and {data.missing} follow from the schema of the "
        "table; remove them",
    ),
    SettingRule(
        lambda s: s.table is None and s.data.in_files,
        "{data.source:=} needs schema, which describes the columns of all files (moretta schema init FILE proposes "
        "one)",
    ),
    SettingRule(
        lambda s: (
            s.table is None
            and s.data.at_sites
            and (s.data.inputs is None or (s.data.classes is None) == (s.data.outputs is None))
        ),
        "{data.source:=} needs schema, which says what a table's columns mean, or for arrays {data.inputs}, the "
        "shape of a sample, and either {data.classes} or {data.outputs}, for example {data.inputs:=[30]} and "
        "{data.classes:=2}",
    ),
    SettingRule(
        lambda s: s.data.mask is not None and (s.data.classes is None or s.data.partition != "iid"),
        "{data.mask} is the shape of masks with a class at each position, so {data.classes} says how many, and no "
        "{data.partition} splits columns; for example {data.mask:=[64, 64]} and {data.classes:=2}",
    ),
    SettingRule(
        lambda s: (
            s.table is None and (s.data.at_sites or s.data.source == PYTHON) and s.data.missing not in ("error", "mean")
        ),
        '{data.missing:=} needs a schema here, which names the columns; add one, or set {data.missing:="mean"}',
    ),
    SCALED_CLASSES,
    # The sums, and the number of their silos.
    SettingRule(
        lambda s: s.data.partition == "same-rows" and s.protocol.privacy is not None,
        "{data.partition:=} has the same rows at every silo, but epsilon is of rows that one silo has; remove it, or "
        "{protocol.dp_noise} and {protocol.dp_clip}",
    ),
    SettingRule(
        lambda s: (
            getattr(s.protocol, "dp_unit", None) == "group" and s.table is not None and s.table.name_of("group") is None
        ),
        'the schema has no column with kind = "group", and {protocol.dp_unit:=} hides all rows of one; add one, or '
        'set {protocol.dp_unit:="row"}',
    ),
    SettingRule(
        lambda s: _sums(s) and s.secure_aggregation.ring_bits < _entry(s).ring_bits and {"bits": _entry(s).ring_bits},
        "{secure_aggregation.ring_bits:=} is too coarse for {protocol.name:v}, whose corrections multiply the "
        "rounding; use ring-bits = {bits}",
    ),
    # Counts and scores of rows, beside training.
    SettingRule(
        lambda s: s.run.early_stopping is not None and not has_validation(s.data),
        "{run.early_stopping} needs rows to validate on; set {data.validation_fraction}, for example 0.1",
    ),
    SettingRule(
        lambda s: (
            s.data.silos_validate
            and not _entry(s).shows_model
            and {"others": either(name for name, entry in ENTRIES.items() if entry.shows_model)}
        ),
        "{data.validation_fraction} has silos score each round's model, and under {protocol.name:v} they hold none "
        "that is everybody's; remove it, or choose {others}",
    ),
    *(
        SettingRule(
            partial(lambda key, s: bool(getattr(s.data, key) and getattr(s.protocol, "dp_noise", None)), setting),
            f"{{data.{key}}}: {what} would be a release without noise; remove it, or {{protocol.dp_noise}}",
        )
        for setting, key, what in (
            ("silos_validate", "validation_fraction", "a score"),
            ("look", "look", "counts"),
            ("score_at_silos", "score_at_silos", "a score"),
        )
    ),
    SettingRule(
        lambda s: s.data.silos_validate and s.run.participation < 1,
        "{data.validation_fraction}: a model is validated at all silos or at none, and {run.participation:=} leaves "
        "some out of each round; remove one of the two",
    ),
    *(
        SettingRule(
            partial(lambda at, s: getattr(s.data, at) and s.data.silos > MOST_SILOS and {"most": MOST_SILOS}, setting),
            f"{{data.{key}}} sums the scores of {{most}} silos at most; {{data.silos}} is {{data.silos:v}}",
        )
        for setting, key in (("silos_validate", "validation_fraction"), ("score_at_silos", "score_at_silos"))
    ),
    SettingRule(
        lambda s: s.data.look and _in_one_place(s),
        "{data.look} counts by a secure sum, and nobody sums under {protocol.name:=} and {engine.name:=}, which have "
        "all rows in one place; remove it, and see moretta look",
    ),
    SettingRule(
        lambda s: s.data.score_at_silos and _in_one_place(s),
        "{data.score_at_silos} sums what silos score, and nobody sums under {protocol.name:=} and {engine.name:=}, "
        "which have all rows in one place; remove it, and give test rows",
    ),
    SettingRule(
        lambda s: s.data.score_at_silos == TABLES_TOO and not (_entry(s).common_model and _entry(s).summed),
        "{data.score_at_silos:=} is of one model that all silos score, and {protocol.name:v} has a model for each; "
        "set true",
    ),
    SettingRule(
        lambda s: (
            s.data.score_at_silos == TABLES_TOO
            and (s.secure_aggregation.scheme == "none" or s.secure_aggregation.least < LEAST_SILOS)
            and {"least": LEAST_SILOS}
        ),
        "{data.score_at_silos:=} shows how many rows of a class silos hold back, and of two silos each the other's; "
        "give {secure_aggregation.min_survivors} at least {least}, and a scheme that masks",
    ),
)

OF_PLAYING: tuple[SettingRule, ...] = (
    SettingRule(
        lambda s: s.secure_aggregation.least > s.data.silos > 1,
        "{secure_aggregation.min_survivors:=}, but {data.silos} is {data.silos:v}; set at most as many",
    ),
    SettingRule(
        lambda s: _sums(s) and s.data.silos == 1,
        "{secure_aggregation.scheme:=} needs two silos or more, and {data.silos} is 1; one silo needs "
        '{secure_aggregation.scheme:="none"}',
    ),
    SettingRule(
        _late_view,
        "{run.record_views:=} begins after the last round, and {run.rounds} is {run.rounds:v}; name rounds from 1 to "
        "{run.rounds:v}",
    ),
)
