"""Write the pages of keys, commands and public names from the code, into the marked blocks of the pages below.

python docs/reference.py            rewrites the blocks between <!-- reference:begin NAME --> and <!-- reference:end -->
python docs/reference.py --check    exits 1, and names the files, where a block is not what the code gives
"""

from __future__ import annotations

import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal, Union, get_args, get_origin

import made_blocks
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from moretta.config import silo_file
from moretta.contract.settings import SERVER, SITE, Spelled, Unit, kebab, mark_of
from moretta.data.settings import Data, FileOfRows
from moretta.deployment import site_policy
from moretta.deployment.agreed_settings import MOVES
from moretta.engines.settings import Delay, Engine, Fault, Faults, Run
from moretta.errors import ParameterError
from moretta.models.catalogue import Model
from moretta.protocols.common.entry import Entry
from moretta.protocols.common.training import Training
from moretta.protocols.registry import ENTRIES
from moretta.secure_aggregation.settings import SecureAggregation

ROOT = Path(__file__).parents[1]
PAGES = ("docs/run-file.md", "docs/silo-file.md", "docs/commands.md", "docs/api.md")
ITEM = re.compile(r'^- <a id="([\w-]+)"></a>(`[^`\n]+`): ', re.MULTILINE)
"""How an item begins, so that a checkout reads well too; `docs/conf.py` makes entries of definition lists of them."""

RUN_FILE: Mapping[str, type[BaseModel]] = {
    "run": Run,
    "data": Data,
    "data.files.NAME": FileOfRows,
    "model": Model,
    "secure-aggregation": SecureAggregation,
    "engine": Engine,
    "engine.faults": Faults,
    "engine.faults.drop": Fault,
    "engine.faults.delay": Delay,
}
SILO_FILE: Mapping[str, type[BaseModel]] = {
    "silo": silo_file.SiloSection,
    "data": silo_file.RowsSection,
    "mapping": silo_file.ColumnMapping,
    "mapping.units.NAME": silo_file.Conversion,
    "limits": silo_file.Limits,
    "runs": silo_file.Runs,
    "privacy": silo_file.Floors,
}

# Keys that a file has beside those of its classes.
BESIDE = {
    "run": {"base": "the folder from which relative paths and modules resolve; left out, that of the run file"},
    "data": {"schema": "a file that says what a table's columns mean ([schema.toml](schema.md))"},
}


# -- keys --------------------------------------------------------------------------------------------------------------


def descriptions(kind: type[BaseModel]) -> dict[str, str]:
    """Return what the docstrings of a class and of those it stands on say of each field."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if issubclass(one, BaseModel) and one is not BaseModel:
            text = re.sub(r"(?m)^Args:\n((?:    .*\n?)+)", lambda args: dedent(args[1]), cleandoc(one.__doc__ or ""))
            found |= split(text, kind.model_fields)[1]
    return found


def split(text: str, names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Return a docstring without what it says of single names, and that by name.

    A line `name: text` or `name, name: text`, with names in backticks or not, begins what is said of names. So does a
    sentence that begins so after another name's; it ends with the paragraph.
    """
    known = "|".join(sorted({*names, "schema"}, key=len, reverse=True))
    start = re.compile(rf"(?:^|(?<=\. ))((?:{known})(?:, (?:{known}))*): ", re.MULTILINE)
    ticked = re.compile(rf"`(?:{known})`(?:,\s+`(?:{known})`)*:\s")
    text = ticked.sub(lambda said: " ".join(said[0].replace("`", "").split()) + " ", text)
    found: dict[str, str] = {}
    rest = []
    for paragraph in re.split(r"\n\s*\n", text):
        flat = re.sub(rf"\n\s*(?!\s|(?:{known})(?:, (?:{known}))*: )", " ", paragraph)
        first = re.search(rf"^(?:{known})(?:, (?:{known}))*: ", flat, re.MULTILINE)
        if first is None or ">>>" in paragraph:
            rest.append(paragraph)
            continue
        rest += [flat[: first.start()].strip()] if first.start() else []
        marks = [mark for mark in start.finditer(flat) if mark.start() >= first.start()]
        for mark, after in zip(marks, [*marks[1:], None], strict=True):
            said = flat[mark.end() : after.start() if after else len(flat)]
            said, raises, what = " ".join(said.split()).partition(" Raises ")
            found |= dict.fromkeys(mark[1].split(", "), said)
            rest += [f"Raises {what}"] if raises else []
    return "\n\n".join(rest), found


def told(text: str, kind: type[BaseModel]) -> str:
    """Return a description as a page has it: keys with dashes, and without the names of modules."""
    for name in kind.model_fields:
        if "_" in name:
            text = re.sub(rf"(?<![\w.:]){name}(?!\w)", kebab(name), text)
    text = re.sub(r" ?\((?:see )?`(?:moretta\.[\w.]+|\w+\.(?:md|txt))`[^)]*\)", "", text)
    return re.sub(r"\*\*|(?<!`)\*(?!`)", lambda mark: "\\*" * len(mark[0]), text)


def values(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return which values a key takes, in words: its type, its range and its unit."""
    metadata = [*_flat(metadata)]
    said = next((one.values for one in metadata if isinstance(one, Spelled)), None)
    unit = next((f", in {one.name}" for one in metadata if isinstance(one, Unit)), "")
    return (said or _values(annotation, [one for one in metadata if not isinstance(one, Unit)])) + unit


def _flat(metadata: Sequence[Any]) -> Iterator[Any]:
    for one in metadata:
        yield from one.metadata if isinstance(one, FieldInfo) else (one,)


def _values(annotation: Any, metadata: Sequence[Any]) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return values(inner[0], [*metadata, *inner[1:]])
    if origin in (Union, types.UnionType):
        return ", or ".join(values(one, metadata) for one in inner if one is not type(None))
    if origin is Literal:
        return ", ".join(f"`{json.dumps(one)}`" for one in inner)
    if origin is tuple:
        return _many(inner)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"table of {_plural(values(inner[1]))}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a section as [\\[{_place(annotation)}\\]](#{_place(annotation).replace('.', '').lower()})"
    return _plain(annotation) + _range(annotation, metadata)


def _place(kind: type[BaseModel]) -> str:
    return next(name for name, one in (*RUN_FILE.items(), *SILO_FILE.items()) if one is kind)


def _many(inner: Sequence[Any]) -> str:
    if inner[-1] is Ellipsis:
        return f"list of {_plural(values(inner[0]))}"
    return f"list of {len(inner)} {_plural(values(inner[0]))}"


def _plural(words: str) -> str:
    return re.sub(r"^(whole number|number|path)\b", r"\1s", words.replace("text", "words", 1))


def _plain(annotation: Any) -> str:
    names = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}
    return names.get(annotation, "any value")


def _range(annotation: Any, metadata: Sequence[Any]) -> str:
    words = []
    for one in metadata:
        match one:
            case Gt(gt=int(bound)) if annotation is int:
                words.append(f"{bound + 1} or more")
            case Gt(gt=bound):
                words.append(f"above {bound:g}")
            case Ge(ge=bound):
                words.append(f"{bound:g} or more")
            case Lt(lt=bound):
                words.append("below 2^63" if bound == 2**63 else f"below {bound:g}")
            case Le(le=bound):
                words.append(f"at most {bound:g}")
    return f", {' and '.join(words)}" if words else ""


def default_of(field: FieldInfo) -> str:
    """Return a key's default in words."""
    return "must be given" if field.is_required() else f"default: {default(field)}"


def default(field: FieldInfo) -> str:
    """Return a key's default as a file has it."""
    given = field.default
    if given is PydanticUndefined or given is None or given in ((), {}) or isinstance(given, BaseModel):
        return "left out"
    if isinstance(given, float) and not given.is_integer():
        return f"`{given:g}`"
    return (
        f"`{json.dumps(list(given) if isinstance(given, tuple) else str(given) if isinstance(given, Path) else given)}`"
    )


# Keys that only some protocols can use, by what their entries in the registry say.
SOME: Mapping[tuple[str, str], Callable[[Entry], bool]] = {
    ("run", "participation"): lambda entry: not entry.takes_all,
    ("data", "grid"): lambda entry: entry.grids,
    ("data", "columns"): lambda entry: entry.grids,
    ("data", "label_holder"): lambda entry: entry.grids,
    ("data", "look"): lambda entry: not entry.pooled,
    ("data", "score_at_silos"): lambda entry: not entry.pooled,
    ("engine", "sites"): lambda entry: entry.many_machines,
    ("engine", "torch_versions"): lambda entry: entry.many_machines,
    ("engine", "message_mib"): lambda entry: entry.many_machines,
    ("engine", "edge"): lambda entry: bool(entry.edge),
    ("engine", "edge_precision"): lambda entry: bool(entry.edge),
    ("engine", "memory_limit_mib"): lambda entry: bool(entry.edge),
    ("engine", "recompute"): lambda entry: not entry.edge,
    **{("secure-aggregation", name): lambda entry: entry.summed for name in SecureAggregation.model_fields},
}


def key(section: str, name: str, field: FieldInfo, text: str, protocols: str = "", place: str = "") -> str:
    """Return one key as an entry of a list of definitions. place: what its link begins with, if not the section."""
    facts = [values(field.annotation, field.metadata), default_of(field)]
    which = SOME.get((section, name))
    if which is not None:
        protocols = protocols or _names(entry.name for entry in ENTRIES.values() if which(entry))
    if protocols:
        facts.append(f"protocols: {protocols}")
    owner = {SERVER: "the server's alone", SITE: "each site's own"}.get(mark_of(field))  # type: ignore[arg-type]
    if owner and section in (*RUN_FILE, "protocol"):
        facts.append(f"over many machines: {owner}")
    text = re.sub(r"^[a-z]{2,}(?=[ ,:;])", lambda word: word[0].capitalize(), text)
    return item(anchor(place or section, name), kebab(name), " · ".join(facts), text)


def item(mark: str, name: str, facts: str, text: str = "") -> str:
    """Return an entry of a page, which can be linked to by its mark."""
    return f'- <a id="{mark}"></a>`{name}`: {facts}\n' + (f"\n  {text}\n" if text else "")


def anchor(section: str, name: str) -> str:
    """Return the name by which a page is linked to at a key."""
    return f"{section.replace('.', '-')}-{kebab(name)}".lower()


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def section(name: str, kind: type[BaseModel]) -> str:
    """Return a section with all its keys."""
    said = descriptions(kind)
    keys = [key(name, field, known, told(said[field], kind)) for field, known in kind.model_fields.items()]
    keys += [item(anchor(name, one), one, "path", text) for one, text in BESIDE.get(name, {}).items()]
    return f"## [{name}]\n\n{told(opening(kind), kind)}\n\n" + "\n".join(keys)


def opening(kind: type[BaseModel]) -> str:
    """Return the first paragraph of a class's docstring."""
    return " ".join(cleandoc(kind.__doc__ or "").split("\n\n")[0].split())


# Settings that use a key which all protocols have: a protocol that refuses them has no use for it.
TRIALS: Mapping[str, Mapping[str, Any]] = {
    "loss": {"loss": "cross-entropy"},
    "own_loss": {"own_loss": "losses:huber"},
    "label_smoothing": {"loss": "cross-entropy", "label_smoothing": 0.1},
    "class_weights": {"loss": "cross-entropy", "class_weights": (1.0, 2.0)},
    "learning_rate": {"learning_rate": 0.2},
    "lr_schedule": {"lr_schedule": "cosine"},
    "milestones": {"lr_schedule": "milestones", "milestones": (2,)},
    "milestone_factor": {"lr_schedule": "milestones", "milestones": (2,), "milestone_factor": 0.5},
    "first_rate": {"first_rate": 0.2},
    "epoch_rounds": {"epoch_rounds": 2},
    "optimizer": {"optimizer": "adam"},
    "momentum": {"optimizer": "sgd", "momentum": 0.9},
    "betas": {"optimizer": "adam", "betas": (0.8, 0.9)},
    "weight_decay": {"weight_decay": 0.1},
    "clip_norm": {"clip_norm": 1.0},
    "warm_start": {"warm_start": "start.safetensors", "around": "model"},
    "autocast": {"autocast": True},
}


def users(name: str) -> list[str]:
    """Return the protocols that take a key which all have."""
    return [one for one, entry in ENTRIES.items() if _takes(entry.settings_class(), TRIALS[name])]


def _takes(kind: type[Training], trial: Mapping[str, Any]) -> bool:
    try:
        kind.model_validate({name: value for name, value in trial.items() if name in kind.model_fields})
    except (ParameterError, ValidationError):
        return False
    return True


def protocol_section() -> str:
    """Return [protocol]: the keys that all share, those of some, and each one's own."""
    kinds = {name: entry.settings_class() for name, entry in ENTRIES.items()}
    names = _names(kinds)
    lines = [
        "## [protocol]\n\nWhich protocol, and how it trains.\n",
        item("protocol-name", "name", f"{names} · must be given", "The [protocols compared](choose.md)."),
        "### Keys of every protocol\n",
    ]
    lines += [_shared_key(name, kinds) for name in Training.model_fields]
    for parent in dict.fromkeys(one for kind in kinds.values() for one in kind.__mro__[1:]):
        own = _own(parent) if parent is not Training and issubclass(parent, Training) else []
        if own:
            holders = _names(name for name, kind in kinds.items() if issubclass(kind, parent))
            lines += [f"### Keys of {holders}\n", *_keys_of(parent, own, "protocol", holders)]
    for name, kind in kinds.items():
        own = [one for one in _own(kind) if one not in (*Training.model_fields, "name")]
        if own:
            lines += [
                f"### Keys of `{name}`\n",
                f"{told(opening(kind), kind)}\n",
                *_keys_of(kind, own, f"protocol.{name}"),
            ]
    return "\n".join(lines)


def _own(kind: type[BaseModel]) -> list[str]:
    above = {name for one in kind.__mro__[1:] if issubclass(one, BaseModel) for name in one.model_fields}
    return [name for name in kind.model_fields if name not in above]


def _keys_of(kind: type[BaseModel], names: Iterable[str], place: str, protocols: str = "") -> list[str]:
    said, known = descriptions(kind), kind.model_fields
    return [key("protocol", one, known[one], told(said[one], kind), protocols, place) for one in names]


def _shared_key(name: str, kinds: Mapping[str, type[Training]]) -> str:
    field, said = Training.model_fields[name], told(descriptions(Training)[name], Training)
    own = {one: kind.model_fields[name] for one, kind in kinds.items()}
    others = [f"`{one}` {default(found)}" for one, found in own.items() if default(found) != default(field)]
    if others:
        said += f" Other defaults: {', '.join(others)}."
    taken = users(name)
    return key("protocol", name, field, said, "" if len(taken) == len(kinds) else _names(taken))


def run_file() -> str:
    """Return the reference of run files."""
    parts = {name: section(name, kind) for name, kind in RUN_FILE.items()}
    before, after = list(parts)[:4], list(parts)[4:]
    return "\n\n".join([*(parts[name] for name in before), protocol_section(), *(parts[name] for name in after)])


def silo_toml() -> str:
    """Return the reference of silo.toml."""
    return "\n\n".join(section(name, kind).replace('<a id="', '<a id="silo-toml-') for name, kind in SILO_FILE.items())


def policy() -> str:
    """Return what a site refuses, a line a rule of `moretta.deployment.site_policy`, and which keys may differ."""
    rules = [f"- **{rule.__name__.replace('_', ' ')}**: {cleandoc(rule.__doc__ or '')}" for rule in site_policy.RULES]
    moves = [f"- `[{name}]` {', '.join(f'`{key}`' for key in sorted(keys))}" for name, keys in MOVES.items()]
    return "\n".join([*rules, "", "What may differ from run to run without the operator:", "", *moves, "- `[model]`"])


PARTS: Mapping[str, Callable[[], str]] = {"run-file": run_file, "silo-toml": silo_toml, "site-policy": policy}


def part(name: str) -> str:
    """Return one part of the reference."""
    import surface

    return {**PARTS, "commands": surface.commands, "api": surface.api}[name]()


def filled(page: str) -> str:
    """Return a page with each block as the code has it."""
    return made_blocks.filled(page, "reference", lambda name: re.sub(r"\n{3,}", "\n\n", part(name)).strip())


def main(words: Sequence[str] | None = None) -> int:
    """Write the blocks, or check them."""
    return made_blocks.write(ROOT, PAGES, "reference", filled, words)


if __name__ == "__main__":
    sys.modules["reference"] = sys.modules["__main__"]
    raise SystemExit(main())
