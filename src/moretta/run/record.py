"""The record of a run, ``result.json``: a pure function of its settings and of its events.

The module also makes the line of a round in ``history.jsonl``, the totals of a run's lines, and the values and the
exception of callbacks.
"""

import math
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

import moretta
from moretta.contract.messages import Message, Tensors
from moretta.contract.roles import Outcome
from moretta.engines.driver import DroppedSilo, RoundEnd
from moretta.engines.takes import OpenedSum
from moretta.protocols.common import silo_rows
from moretta.protocols.common.claims import Claim
from moretta.protocols.common.specification import Specification
from moretta.protocols.common.training import Training
from moretta.protocols.registry import ENTRIES, claims_of, entry_of
from moretta.secure_aggregation import agreement, statistics, unmasking


@dataclass(frozen=True)
class PlayedRun:
    """The settings of a run, and the events of all its sessions.

    Args:
        spec: The settings.
        rounds: Their requested number.
        silos: Their names.
        parameters: The model's number of parameters.
        scheme: Of the roles' secure sums.
        has_test_rows: Whether the server has rows to score on.
        doubts: Sentences on possible mistakes in arguments (`moretta.run.inputs.doubts`).
        run: Its id.
        history: A line a round.
        dropped: Silos that missed the release.
        scores: Of the last models.
        has_scores_of_silos: Whether the silos' summed scores are known here.
        best_round: The round that the run returned to, None without early stopping.
        views: The digest of the recorded views.
        warnings: Of the roles.
        data: The content that a requested look before training may show.
        stopped: Whether a callback ended the run.
        sums: Those opened for the release.
    """

    spec: Specification
    rounds: int
    silos: Sequence[str]
    parameters: int
    scheme: str
    has_test_rows: bool
    doubts: Sequence[str]
    run: str
    sessions: int
    history: Sequence[Mapping[str, Any]]
    outcome: Outcome
    dropped: Sequence[DroppedSilo]
    scores: Mapping[str, Any]
    has_scores_of_silos: bool
    best_round: int | None
    views: str
    warnings: Sequence[str]
    data: Mapping[str, Any] | None = None
    stopped: bool = False
    sums: Sequence[OpenedSum] = ()


def record_of(played: PlayedRun, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of ``result.json``. versions: as from `versions`."""
    history = played.history
    sums = all_sums(history, [sum_line(opened, "release") for opened in played.sums])
    record: dict[str, Any] = {
        "name": played.spec.run.name,
        "run": played.run,
        "protocol": getattr(played.spec.protocol, "name", ""),
        "rounds": history[-1]["round"] if history else 0,
        "silos": len(played.silos),
        "silo_names": list(played.silos),
        "parameters": played.parameters,
        "task": played.spec.task,
        "test": played.scores,
        **({} if played.data is None else {"data": dict(played.data)}),
        "bytes": total_bytes(history),
        "seconds": total_seconds(history),
        **({"lost": lost} if (lost := lost_rounds(history)) else {}),
        "dropped": [gone for line in history for gone in line["dropped"]] + [asdict(gone) for gone in played.dropped],
        **({} if sums is None else {"sums": sums}),
        "sessions": played.sessions,
        "secure_aggregation": {
            "scheme": played.scheme,
            "ring_bits": None if played.scheme == "none" else played.spec.secure_aggregation.ring_bits,
        },
        "facts": facts_of(played),
        "forced_to_one": [{"tensor": name, "because": why} for name, why in played.outcome.unperturbed.items()],
        "warnings": warnings_of(played),
        "settings": dict(played.spec.settings),
        "insecure_secret_seed": played.spec.run.insecure_secret_seed is not None,
        "views": played.views,
        "versions": dict(versions),
    }
    for claim in _holding(record):
        if claim.warns:
            sentence = claim.sentence(record).removesuffix(".")
            record["warnings"].append(f"a {claim.role}: {sentence[:1].lower()}{sentence[1:]}")
    return record


def lost_rounds(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the lost rounds, and why they were lost."""
    return [{"round": line["round"], "reason": line["lost"]} for line in history if "lost" in line]


def spent(record: Mapping[str, Any]) -> list[str]:
    """Return what noise bounds in a run, by its protocol's claims: epsilon and delta, and their unit and observer."""
    return [claim.sentence(record) for claim in _holding(record) if claim.kind == "bounded"]


def _holding(record: Mapping[str, Any]) -> list[Claim]:
    return [claim for claim in claims_of(record["protocol"]) if claim.holds(record)]


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {
        "moretta": moretta.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }


def facts_of(played: PlayedRun) -> dict[str, float | str]:
    """Return the protocol's facts of the run, the ring's error, the best round, and the largest memory of a silo."""
    ring = ring_facts(played.history, played.spec.protocol, played.outcome.parameters, played.rounds)
    best = {} if played.best_round is None else {"best_round": float(played.best_round)}
    peaks = [line["edge_peak_mib"] for line in played.history if "edge_peak_mib" in line]
    lost = len(lost_rounds(played.history))
    best |= {"lost_rounds": float(lost)} if lost else {}
    return {**played.outcome.facts, **ring, **best, **({"edge_peak_mib": max(peaks)} if peaks else {})}


MOST_MOVED = 0.1  # the largest move by fixed point without a warning, of the root mean square of all weights


def ring_facts(
    history: Sequence[Mapping[str, Any]], protocol: Training, parameters: Tensors, rounds: int
) -> dict[str, float]:
    """Return how far fixed point can have moved the weights: the sum over rounds of rate times gradient error.

    It assumes that steps do not drive two nearby models apart, which holds near a minimum and not everywhere. Adam
    divides by the gradient's own size, so for Adam only the gradient's error is stated.
    """
    steps = [line["ring_step"] for line in history if "ring_step" in line]
    if not steps or not max(steps):
        return {}
    facts = {"ring_gradient_error": max(steps)}
    if protocol.optimizer == "sgd" and parameters:
        at_silos, slowed = protocol.steps_at_silos, 1.0 - protocol.momentum  # how far a unit of gradient moves a weight
        rates = {line["round"]: 1.0 if at_silos else protocol.rate(line["round"], rounds) / slowed for line in history}
        moved = [rates[line["round"]] * line["ring_step"] for line in history if "ring_step" in line]
        facts["ring_weight_error"] = sum(moved)
        weights = [array for array in parameters.values() if array.dtype.kind == "f"]
        squares = sum(float(np.square(array, dtype=np.float64).sum()) for array in weights)
        if squares > 0:
            size = math.sqrt(squares / sum(array.size for array in weights))
            facts["ring_relative_weight_error"] = facts["ring_weight_error"] / size
    return facts


SAME = 1e-5  # between losses, relative, that differ by fixed point alone
MOST_DELTA, MOST_EPSILON = 1e-3, 50.0  # above these a warning states that a bound promises next to nothing


def warnings_of(played: PlayedRun) -> list[str]:
    """Return sentences that a reader of the result should know."""
    parts = (_warnings_of_secrets, _warnings_of_rounds, _warnings_of_scores)
    return [*played.doubts, *played.warnings, *(sentence for part in parts for sentence in part(played))]


def _warnings_of_secrets(played: PlayedRun) -> Iterator[str]:
    if played.outcome.facts.get("free_scales") == 0.0:
        yield (
            "no scale of this model is free, so silos see its true parameter values but for the head's offset; "
            "moretta check shows why"
        )
    if played.spec.run.insecure_secret_seed is not None:
        yield "every secret of this run follows from insecure-secret-seed; it hides nothing"
    summed = entry_of(played.spec.protocol).summed and len(played.silos) > 1 and not played.spec.engine.simulates
    if summed and played.scheme == "none":
        yield 'scheme = "none": sums are in the clear, so the server reads what each silo uploads'
    delta, epsilon = (played.outcome.facts.get(name) for name in ("delta", "epsilon"))
    if isinstance(delta, float) and delta > MOST_DELTA:
        yield f"delta = {delta:.3g}: with that chance the bound does not hold for a row; set less than 1 in all rows"
    if isinstance(epsilon, float) and epsilon > MOST_EPSILON:
        yield f"epsilon = {epsilon:.3g} bounds nothing that matters: more noise or fewer rounds make it smaller"


def _warnings_of_rounds(played: PlayedRun) -> Iterator[str]:
    if played.spec.engine.faults is not None:
        yield "faults were injected into this run ([engine.faults]); the silos it dropped may be well"
    if played.stopped:
        yield f"the run was stopped after round {played.history[-1]['round']} of {played.rounds}, by its user"
    if lost := [str(line["round"]) for line in lost_rounds(played.history)]:
        yield (
            f"rounds that were lost, as too few silos were there to complete them: {_listed(lost)}; the model took no "
            "step in them"
        )
    missed = Counter(name for line in played.history for name in {gone["silo"] for gone in line["dropped"]})
    for name, count in sorted(missed.items()):
        if 2 * count > len(played.history):
            yield (
                f"silo `{name}` was missing in {count} of {len(played.history)} rounds, so the model knows little or "
                "nothing of its rows; history.jsonl has the reasons"
            )
    losses = [loss for line in played.history if (loss := line.get("loss", line.get(SCALED))) is not None]
    if len(losses) > 1 and all(abs(loss - losses[0]) < SAME * abs(losses[0]) for loss in losses):
        yield (
            f"the loss is the same after each of {len(losses)} rounds, so the model learned nothing; look at its "
            "learning rate, and whether a fit returns the model that it trained"
        )
    clipped = [str(line["round"]) for line in played.history if {"clipped", "clipped_buffers"} & line.keys()]
    if clipped:
        yield (
            f"the silos' sum was clipped in rounds {_listed(clipped)}, being "
            "out of proportion to the rounds before: some silo diverged or did not follow the protocol"
        )
    facts = ring_facts(played.history, played.spec.protocol, played.outcome.parameters, played.rounds)
    moved = facts.get("ring_relative_weight_error", 0.0)
    if moved > MOST_MOVED:
        yield (
            f"fixed point has errors of up to {facts['ring_gradient_error']:.3g} in gradients, which may have moved "
            f"weights by {moved:.3g} of their size; give a lower [secure-aggregation] limit, or ring-bits = 64"
        )
    configured = getattr(played.spec.protocol, "rho", 0.0)
    lowered = [line["rho"] for line in played.history if line.get("rho", configured) < configured]
    if lowered:
        yield (
            f"rho was lowered in {len(lowered)} rounds, to {min(lowered):.3g} at the lowest: more would cost "
            f'accuracy in {played.spec.run.dtype}; with dtype = "float64" it stays as set'
        )


def _listed(rounds: Sequence[str]) -> str:
    return ", ".join(rounds[:20]) + " .." * (len(rounds) > 20)


def _warnings_of_scores(played: PlayedRun) -> Iterator[str]:
    if played.spec.data.score_at_silos and not played.has_scores_of_silos:
        yield (
            "the participants alone know what their models score together on the rows they hold back (blind), each "
            "has it in its scores.json"
        )
    elif not played.has_test_rows and not played.spec.data.score_at_silos:
        yield "no test rows were given, so nothing says how good the model is"


PHASES = ("perturbation", "preparation", "local_forward", "local_backward", "aggregation", "update", "delivery")

SCALED = "scaled_loss"  # replaces "loss" if targets are scaled

Line = dict[str, Any]
"""The record of one round: a line of ``history.jsonl``."""


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

    Args:
        end: The round.
        traffic: Bytes, from `moretta.engines.delivery.Delivery.take_traffic`.
        phases: Seconds by phase, none if noise hides rows.
        peak_mib: The largest memory of a silo's own process, None without one.
        seconds: Of the whole round.
    """
    # Missing silos count too, because bytes went to them, and some came from them.
    addressees = set(end.cohort)
    for gone in end.dropped:
        addressees |= {gone.silo} if gone.round == end.number else set()
    return {
        "round": end.number,
        "attempt": end.attempt,
        **({"take": end.take} if end.take else {}),
        **({"lost": end.lost} if end.lost else {}),
        **end.report.figures,
        **({} if peak_mib is None else {"edge_peak_mib": peak_mib}),
        "seconds": dict(phases),
        "bytes": bytes_of(traffic, len(addressees)),
        "dropped": list(map(asdict, end.dropped)),
        "sums": sums_of(end),
        "seconds_total": seconds,
    }


def sums_of(end: RoundEnd) -> list[dict[str, Any]]:
    """Return the sums that a round opened; if none gave its result, also the silos that took part."""
    lines, used = list[dict[str, Any]](), False
    for opened in end.sums:
        lines.append(sum_line(opened, "round"))
        used |= opened.used and not opened.set_up
    return lines if used or end.lost else [*lines, {"of": "no sum", "round": end.number, "silos": list(end.cohort)}]


def sum_line(opened: OpenedSum, of: str) -> dict[str, Any]:
    """Return the line of one sum. of: the purpose outside set-ups, "round" or "release"."""
    return {
        "of": "set-up" if opened.set_up else of,
        "round": opened.round,
        **({"take": opened.take} if opened.take else {}),
        **({"group": opened.group} if opened.group else {}),
        **({} if opened.used else {"used": False}),
        "silos": list(opened.silos),
    }


def all_sums(history: Sequence[Mapping[str, Any]], release: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the opened sums of a run with the rounds of each; None if some rounds did not record them.

    Sums over the same silos that differ in their round alone are merged.

    Args:
        release: The sums after the last round.
    """
    if not all("sums" in line for line in history):
        return None  # an earlier version ran these rounds
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
    for (way, tag), size in traffic.items():  # relayed additive shares are the upload itself, up and down
        if way == "shares" or tag in KEY_TAGS | UNMASKING_TAGS:
            sums["secure_aggregation"] += size
        elif tag in SET_UP_TAGS:
            sums["set_up"] += size
        else:
            sums[way] += size / silos
    return sums


def total_bytes(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the bytes of a run.

    Returns:
        up_per_silo_per_round, down_per_silo_per_round: Means over silos and rounds.
        secure_aggregation: Keys, confirmations of survivors and shares for unmasking, in total.
        set_up: Statistics and agreement on the model, in total.
    """
    means = {
        f"{way}_per_silo_per_round": float(np.mean([line["bytes"][way] for line in history])) for way in ("up", "down")
    }
    return means | {what: sum(line["bytes"][what] for line in history) for what in ("secure_aggregation", "set_up")}


def total_seconds(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of a run, in total and by phase, with silos' phases summed over silos.

    Phases are omitted if noise hides rows, because a silo's seconds reveal the size of its secret lot.
    """
    known = PHASES if any(line["seconds"] for line in history) else ()
    phases = {name: sum(line["seconds"].get(name, 0.0) for line in history) for name in known}
    return {"total": sum(line["seconds_total"] for line in history), **phases}


TESTED = ("test_", "validation_")


class StopTraining(Exception):  # not an error: a callback raises it to end a run
    """End the run after the current round: raise it in a callback of `moretta.Federation.train`.

    The run then ends as by early stopping. The model is released, scored and written, and a checkpoint is kept.
    """


@dataclass(frozen=True)
class FinishedRound:
    """Describe a finished round as the server knows it; immutable.

    Args:
        number: From 1 to `rounds`.
        rounds: Of the whole run.
        loss: The mean over rows before the round's step, in the units of standardised targets where they are
            standardised. None if no role learns it.
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
    """Return a callback's argument for a line of the history. rounds: the number of rounds in the run."""
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
