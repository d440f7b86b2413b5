"""A schema in words: what a run prints before its first round, and what `moretta schema init` writes down."""

from __future__ import annotations

from collections.abc import Mapping

import tomli_w

from moretta.data.tables.inference import Guess
from moretta.data.tables.schema import Category, Date, Number, Ordered, Schema

MOST = 6  # words that are listed


def lines_of(schema: Schema) -> list[str]:
    """Return a line for each kind of column: which they are, their categories, what is left out, and the target."""
    by_kind: dict[str, list[str]] = {}
    for name, column in schema.columns.items():
        match column:
            case Number(unit=unit):
                by_kind.setdefault("numbers", []).append(f"{name} ({unit})" if unit else name)
            case Date():
                by_kind.setdefault("dates", []).append(name)
            case Category(categories=words):
                by_kind.setdefault("categories", []).append(f"{name} ({_listed(words)})")
            case Ordered(categories=words):
                by_kind.setdefault("ordered categories", []).append(f"{name} ({_listed(words, ' < ')})")
    kinds = {"images (file)": "file", "not trained on (id)": "id", "kept together (group)": "group"}
    kinds |= {"not read (drop)": "drop"}
    for said, kind in kinds.items():
        if found := [name for name, column in schema.columns.items() if column.kind == kind]:
            by_kind[said] = found
    lines = [f"{said}: {', '.join(names)}" for said, names in by_kind.items()]
    target = schema.name_of("target")
    if target is not None:
        lines.append(f"target: {target}, " + (f"classes {_listed(schema.classes)}" if schema.classes else "a number"))
    return lines


def as_toml(guesses: Mapping[str, Guess]) -> str:
    """Return guesses as schema.toml, each doubt as a comment above its column."""
    parts = []
    for name, guess in guesses.items():
        plain = {"kind": guess.column.kind} | guess.column.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        text = tomli_w.dumps({"columns": {name: plain}})
        if guess.doubt:  # and nothing loads it before somebody has
            text = f"# decide: it {guess.doubt}\n" + text.replace(
                f'kind = "{guess.column.kind}"', f'kind = "decide"  # perhaps "{guess.column.kind}"', 1
            )
        parts.append(text)
    return "\n".join(parts)


def _listed(words: tuple[str, ...], between: str = ", ") -> str:
    more = f" and {len(words) - MOST} more" if len(words) > MOST else ""
    return between.join(words[:MOST]) + more
