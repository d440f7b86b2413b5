"""The line of a round in ``history.jsonl``, and what the lines of a run add up to; what a callback is given after
each round, and how it ends a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from moretta.contract.messages import Message
from moretta.engines.driver import DroppedSilo, RoundEnd
from moretta.engines.takes import OpenedSum
from moretta.protocols.common import silo_rows
from moretta.protocols.registry import ENTRIES
from moretta.secure_aggregation import agreement, statistics, unmasking

PHASES = ("perturbation", "preparation", "local_forward", "local_backward", "aggregation", "update", "delivery")

SCALED = "scaled_loss"  # in the place of "loss" where it is of targets brought to scale

Line = dict[str, Any]
"""What is kept of one round: a line of ``history.jsonl``."""


def _tags(*groups: Iterable[type[Message]]) -> frozenset[str]:
    return frozenset(kind.TAG for kinds in groups for kind in kinds)


KEY_TAGS = _tags(agreement.MESSAGES, *(entry.own_messages("KEYS") for entry in ENTRIES.values()))
UNMASKING_TAGS = _tags(unmasking.MESSAGES)
SET_UP_TAGS = _tags(
    statistics.MESSAGES, silo_rows.MESSAGES, *(entry.own_messages("SET_UP") for entry in ENTRIES.values())
)


def line_of(
    end: RoundEnd,
    traffic: Mapping[tuple[str, str], int],
    phases: Mapping[str, float],
    peak_mib: float | None,
    seconds: float,
) -> Line:
    """Return the line of a finished round.

    traffic: bytes as `moretta.engines.delivery.Delivery.take_traffic` has them. phases: seconds by phase, none where
    noise hides rows. peak_mib: the most memory of a silo's own process, None without such. seconds: of the whole round.
    """
    # Bytes went to, and partly came from, those too who then were missing.
    asked = set(end.cohort)
    for gone in end.dropped:
        asked |= {gone.silo} if gone.round == end.number else set()
    return {
        "round": end.number,
        "attempt": end.attempt,
        **({"take": end.take} if end.take else {}),
        **({"lost": end.lost} if end.lost else {}),
        **end.report.figures,
        **({} if peak_mib is None else {"edge_peak_mib": peak_mib}),
        "seconds": dict(phases),
        "bytes": bytes_of(traffic, len(asked)),
        "dropped": list(map(asdict, end.dropped)),
        "sums": sums_of(end),
        "seconds_total": seconds,
    }


def sums_of(end: RoundEnd) -> list[dict[str, Any]]:
    """Return the sums that were opened in a round; where no result is made of one, the silos that took part instead."""
    lines, used = list[dict[str, Any]](), False
    for opened in end.sums:
        lines.append(sum_line(opened, "round"))
        used |= opened.used and not opened.set_up
    return lines if used or end.lost else [*lines, {"of": "no sum", "round": end.number, "silos": list(end.cohort)}]


def sum_line(opened: OpenedSum, of: str) -> dict[str, Any]:
    """Return what is kept of one sum. of: what it belongs to where it is not of a set-up, "round" or "release"."""
    return {
        "of": "set-up" if opened.set_up else of,
        "round": opened.round,
        **({"take": opened.take} if opened.take else {}),
        **({"group": opened.group} if opened.group else {}),
        **({} if opened.used else {"used": False}),
        "silos": list(opened.silos),
    }


def all_sums(history: Sequence[Mapping[str, Any]], release: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the opened sums of a run with the rounds of each; None where some of its rounds did not record them.

    Sums over the same silos that differ in their round alone are one. release: those after the last round.
    """
    if not all("sums" in line for line in history):
        return None  # an earlier version played these rounds
    rounds = dict[tuple[Any, ...], list[int]]()
    for entry in [*(entry for line in history for entry in line["sums"]), *release]:
        key = entry["of"], entry.get("take", 0), entry.get("group", ""), entry.get("used", True), tuple(entry["silos"])
        rounds.setdefault(key, []).append(entry["round"])
    return [
        {"of": of, "take": take, "group": group, "used": used, "silos": list(silos), "rounds": numbers}
        for (of, take, group, used, silos), numbers in rounds.items()
    ]


def bytes_of(traffic: Mapping[tuple[str, str], int], silos: int) -> dict[str, float]:
    """Return a round's bytes by purpose: up and down per silo, keys and set-up in all."""
    sums = {"up": 0.0, "down": 0.0, "secure_aggregation": 0.0, "set_up": 0.0}
    for (way, tag), size in traffic.items():  # relayed additive shares are the upload itself: up and down
        if way == "shares" or tag in KEY_TAGS | UNMASKING_TAGS:
            sums["secure_aggregation"] += size
        elif tag in SET_UP_TAGS:
            sums["set_up"] += size
        else:
            sums[way] += size / silos
    return sums


def total_bytes(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the bytes of a run: up and down as means over silos and rounds; the rest in all.

    secure_aggregation: keys, confirmations of survivors and shares given to unmask. set_up: statistics and agreement on
    the model.
    """
    means = {
        f"{way}_per_silo_per_round": float(np.mean([line["bytes"][way] for line in history])) for way in ("up", "down")
    }
    return means | {what: sum(line["bytes"][what] for line in history) for what in ("secure_aggregation", "set_up")}


def total_seconds(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of a run: in all, and by phase, where silos' phases are summed over silos.

    Without phases where noise hides rows: how long a silo computes depends on how many rows its secret lot had.
    """
    known = PHASES if any(line["seconds"] for line in history) else ()
    phases = {name: sum(line["seconds"].get(name, 0.0) for line in history) for name in known}
    return {"total": sum(line["seconds_total"] for line in history), **phases}


TESTED = ("test_", "validation_")


class StopTraining(Exception):  # no error: a callback raises it to end a run
    """End the run after the current round: raise it in a callback of `moretta.Federation.train`.

    The run then ends as early stopping ends it: the model is released, scored and written, and a checkpoint is kept.
    """


@dataclass(frozen=True)
class FinishedRound:
    """Describe a finished round as the server knows it; immutable.

    Args:
        number: From 1 to `rounds`.
        rounds: Of the whole run.
        loss: The mean over rows before the round's step, in the units of standardised targets where they are
            standardised. None where nobody learns it.
        metrics: Scores on test and validation rows by their names in the history, such as ``test_accuracy``. Empty in
            rounds without an evaluation.
        missing: Silos that missed an answer, each with the reason.
        bytes: Bytes up and down per silo; keys and shares in total.
        seconds: Of the whole round.
        epsilon: Spent up to this round where silos add noise, infinity if unbounded; else None.
        lost: Why the round was abandoned without a step; empty for a complete round.
    """

    number: int
    rounds: int
    loss: float | None
    metrics: Mapping[str, float]
    missing: tuple[DroppedSilo, ...]
    bytes: Mapping[str, float]
    seconds: float
    epsilon: float | None
    lost: str = ""


OnRound = Callable[[FinishedRound], object]
"""Called after each round; what it returns is ignored."""


def round_of(line: Mapping[str, Any], rounds: int) -> FinishedRound:
    """Return what a callback is given, of a line of the history. rounds: of the whole run."""
    return FinishedRound(
        number=line["round"],
        rounds=rounds,
        loss=line.get("loss", line.get(SCALED)),
        metrics=MappingProxyType({name: value for name, value in line.items() if name.startswith(TESTED)}),
        missing=tuple(DroppedSilo(**gone) for gone in line["dropped"]),
        bytes=MappingProxyType(dict(line["bytes"])),
        seconds=line["seconds_total"],
        epsilon=float(str(line["epsilon"]).replace("unbounded", "inf")) if "epsilon" in line else None,
        lost=line.get("lost", ""),
    )
