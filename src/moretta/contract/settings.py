"""The base of a settings section: frozen, validated once, its keys with dashes in a file and underscores in Python.

Needs pydantic, so no role of an inference-only process imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Seed = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Words = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Momentum = Annotated[float, Field(ge=0, lt=1)]


def kebab(name: str) -> str:
    """Return a field's name as it stands in a run file."""
    return name.replace("_", "-")


@dataclass(frozen=True)
class Mark:
    """Who sets a key where silos are on machines of their own; a key without a mark is a shared setting."""

    owner: str


SERVER = Mark("server")
SITE = Mark("site")


def mark_of(known: FieldInfo) -> Mark | None:
    """Return the mark of a field, or None for one that is shared."""
    return next((one for one in known.metadata if isinstance(one, Mark)), None)


class Section(BaseModel):
    """A section of a run file."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=kebab, populate_by_name=True)
