"""The harm of a successful attack to the people whose rows were trained on: four degrees, the gravest first.

Attacks declare one (`moretta.audit.evidence.attack.Attack`), audits record it, and pages sort by it. Whether an attack
succeeded is a separate question, which its result answers.
"""

from collections.abc import Mapping
from typing import Literal, get_args

Severity = Literal["rows", "labels", "members", "protocol"]

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""All severities, the gravest first."""

EFFECTS: Mapping[Severity, str] = {
    "rows": "recovers rows",
    "labels": "recovers labels or properties",
    "members": "finds out who is in the data",
    "protocol": "reveals what the protocol gives anyway",
}
"""What an attack of each severity does, in words for people."""

TRIES: Mapping[Severity, str] = {name: f"to {text.replace('s ', ' ', 1)}" for name, text in EFFECTS.items()}
"""The same, as the aim of an attack."""

_WHERE = "If such an attack succeeds,"

MEANING: Mapping[Severity, str] = {
    "rows": f"{_WHERE} it recovers values of single rows, each of which may be data about one person.",
    "labels": f"{_WHERE} it recovers labels of rows, or what the rows of one silo have in common.",
    "members": f"{_WHERE} it shows whether a given row, or a person’s id, is among those of a silo.",
    "protocol": f"{_WHERE} it recovers a model, a key or an update, and by itself nothing of a single row.",
}
"""What that means for the people behind the rows, in a sentence."""


def is_whole(low: float | None, high: float | None) -> bool:
    """Whether the interval of a score is its whole range, from 0 or less to 1, and so no evidence."""
    return low is not None and high is not None and low <= 0.0 and high >= 1.0
