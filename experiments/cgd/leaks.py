"""What CGD does not hide, measured: python experiments/cgd/leaks.py [--data DIR] [--only NAME] [--out FILE].

Each measurement is an attack by honest but curious participants, with what they themselves held and were sent
(`Participant`) and what is public; the victims' own records are read only to score it. docs/cgd-leaks.md has figures.

Secrets follow from a fixed seed (`insecure`), so that the figures come out the same each time; no attack uses that.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moretta.contract.codec import Codec
from moretta.contract.messages import Message, Stamp, Tensors
from moretta.contract.roles import Phase, no_phase
from moretta.data import datasets, partition
from moretta.data.rows import Split
from moretta.data.settings import Data
from moretta.data.silo import Silo, row_shape
from moretta.data.tables.preparation import ColumnRules
from moretta.engines.driver import Driver
from moretta.engines.in_process import InProcess
from moretta.engines.settings import Engine, Run
from moretta.errors import MorettaError
from moretta.models.catalogue import build as build_model
from moretta.protocols.cgd.client import ROW_RING, Client
from moretta.protocols.cgd.group_keys import group_of
from moretta.protocols.cgd.messages import Backward, Contribute, Descend, Join, StepAlone
from moretta.protocols.cgd.params import CGD
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.specification import Specification
from moretta.protocols.registry import build
from moretta.run.federation import Federation
from moretta.secure_aggregation.encoding import MOST_WEIGHT
from moretta.secure_aggregation.masks import add_masks
from moretta.secure_aggregation.settings import SecureAggregation

sys.path.append(str(Path(__file__).resolve().parents[1]))
from provenance import provenance
from reproduction import as_json

Matrix = NDArray[np.float64]
SEED = 0
F32, F64 = torch.float32, torch.float64


@dataclass(frozen=True)
class Score:
    """What an attack came to in one case. beside: chance, no attack, controls that must fail, by what they are."""

    case: str
    what: str
    value: float
    beside: Mapping[str, float]


class Participant:
    """A participant that follows the protocol and keeps what it is sent and holds, round by round from 1.

    moved: D of the tensors that it holds, before each round. models, gradients: its own w_l(k) and g_l. rows: n_l, N.
    own_z, deltas: in a row, its part of z and Delta. others_z: as the row's head, the others' parts of z in sum.
    """

    def __init__(self, client: Client) -> None:
        self.phase: Phase = no_phase
        self.client = client
        self.moved: dict[int, Tensors] = {1: dict(client.displacement)}
        self.models, self.gradients = dict[int, Tensors](), dict[int, Tensors]()
        self.own_z, self.others_z, self.deltas = (dict[int, Matrix]() for _ in range(3))
        self.rows = (0, 0)

    def answer(self, message: Message) -> Message:
        """Answer as the protocol has it, and look."""
        reply, me, now = self.client.answer(message), self.client, message.stamp
        match message:
            case Join():
                words = np.array(message.words, order="C")
                add_masks(words, me._group_keys.row_masks(now, me._others(), words.shape, message.fraction_bits))
                self.others_z[now.round] = self._in_order(ROW_RING.decode(words, message.fraction_bits), now.round)
                self._keep_delta(reply.sealed, now)
            case Backward():
                self._keep_delta(message.sealed, now)
            case Contribute() if me._local is not None:
                self.models[now.round], self.gradients[now.round] = me.model(), me._local[1].gradients
                self.rows = (me._local[1].rows, message.encoding[MOST_WEIGHT])
            case Descend() | StepAlone():
                self.moved[now.round + 1] = dict(me.displacement)
        if me._own_z is not None and group_of(now).startswith("row="):
            self.own_z[now.round] = self._in_order(me._own_z[2], now.round)
        return reply

    def _keep_delta(self, sealed: NDArray[np.uint8], now: Stamp) -> None:
        me = self.client
        content = me._group_keys.open(now, "delta", str(me._position.head), sealed)
        delta = np.frombuffer(content, me._rows.x.numpy().dtype).reshape(len(me._rows.x), -1)
        self.deltas[now.round] = self._in_order(delta, now.round)

    def _in_order(self, rows: NDArray[np.generic], number: int) -> Matrix:
        """Undo the order of a round's batch, which all of a row know."""
        found = np.empty(rows.shape)
        found[self.client._rows.batches.of_round(number)] = rows
        return found

    def summed(self, name: str, rate: float) -> list[Matrix]:
        """Return sum n_l g_l / N of one tensor by round, which every member of its group is handed."""
        steps = sorted(self.moved)
        return [(self.moved[k][name] - self.moved[k + 1][name]) / rate for k in steps[:-1]]


def play(
    protocol: CGD, silos: Sequence[Silo], model: nn.Module, rounds: int, dtype: torch.dtype = F32, secrets: int = SEED
) -> dict[str, Participant]:
    """Train by messages, full batch and blind, and return the participants with what they saw."""
    whole, outputs = copy.deepcopy(model).to(dtype), next(reversed(list(model.parameters()))).shape[0]
    columns = ColumnRules.alike(row_shape(silos)[-1])
    secure = SecureAggregation()
    run = Run(rounds=rounds, seed=SEED, dtype=str(dtype).removeprefix("torch."), insecure_secret_seed=secrets)
    spec = Specification(run, Data(source="python", batch_size=0), protocol, secure)
    players = build(Setting(spec, whole, outputs, silos, columns))
    looking = {name: Participant(client) for name, client in players.clients.items()}
    engine = InProcess(looking, Codec(players.messages))
    for _ in Driver(players.server, list(looking), "leaks", engine, players.least).rounds(1, rounds):
        pass
    return looking


def digits(rows: int, columns: int = 1) -> list[Silo]:
    """Return the digits (1,437 rows to train on, 64 pixels from 0 to 1) dealt to silos; a joint row's first is head."""
    return dealt(datasets.load(Data(source="digits"), seed=SEED), rows, columns)[0]


def dealt(dataset: Split, rows: int, columns: int = 1) -> tuple[list[Silo], tuple[NDArray, NDArray]]:
    """Return silos named silo-1 ..., or in a grid silo-1-1 ..., and the test rows, all samples flat."""
    how: dict[str, Any] = {} if columns == 1 else {"partition": "grid", "grid": (rows, columns)}
    parts = partition.distribute(dataset, Data(source=dataset.name, silos=rows * columns, **how), SEED)
    silos = [
        Silo(
            one.name,
            one.x.reshape(len(one.x), -1),
            one.y if one.labelled else one.y[:0],
            one.row,
            one.columns,
            aligned=bool(one.columns),  # dealt from one table
        )
        for one in parts.silos
    ]
    return silos, (parts.test.x.reshape(len(parts.test.x), -1), parts.test.y)


def linear(name: str, parties: int) -> tuple[list[Silo], Matrix, Matrix]:
    """Return a data set of scikit-learn dealt to parties, X, standardised, and y, [n, outputs], centred."""
    from sklearn import datasets

    load = {"diabetes": datasets.load_diabetes, "wdbc": datasets.load_breast_cancer, "digits": datasets.load_digits}
    x, y = load[name](return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(x))
    x, y = x[order][:, x.std(0) > 0].astype(np.float64), y[order]
    x, y = (x - x.mean(0)) / x.std(0), np.eye(10)[y] if name == "digits" else y[:, None] / y.std()
    y = y - y.mean(0)
    parts = np.array_split(np.arange(len(x)), parties)
    return [Silo(f"silo-{i}", x[part], y[part]) for i, part in enumerate(parts, 1)], x, y


def mlp(width: int, inputs: int = 64) -> nn.Module:
    """Return the paper's network with one hidden layer."""
    return build_model("mlp", inputs=(inputs,), outputs=10, hidden=[width], seed=SEED)


def flat(tensors: Mapping[int, Tensors]) -> Matrix:
    """Return tensors by round as one matrix, a line a round."""
    return np.stack([np.concatenate([value.ravel() for value in of.values()]) for of in tensors.values()])


def error(found: NDArray, truth: NDArray) -> float:
    """Return |found - truth| / |truth|, Frobenius norms: 1 is what the answer 0 scores."""
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def d_alone(folder: Path | None, quick: bool) -> list[Score]:
    """Any one participant of a horizontal split takes D, which it knows, as a model of its own."""
    parties, rounds, scores = (10, 30, list[Score]()) if quick else (20, 400, list[Score]())
    cases = [("digits", datasets.load(Data(source="digits"), seed=SEED), parties, rounds, 32)]
    if folder is not None and not quick:
        cases.append(
            ("mnist", datasets.load(Data(source="mnist", path=str(folder / "mnist")), seed=SEED), 1000, 200, 256)
        )
    for source, images, parties, rounds, width in cases:
        silos, test = dealt(images, parties)
        model, engine = mlp(width, silos[0].x.shape[1]), Engine(name="fused")
        for delta in (0.1,) if quick else (0.1, 0.06, 0.01):
            federation = Federation(model, silos, CGD(delta=delta), test, engine=engine, batch_size=0,
                                    evaluate_every=rounds, insecure_secret_seed=SEED)  # fmt: skip
            found = federation.train(rounds, SEED, progress=_progress(f"{source}, delta {delta:g}")).test
            confined = np.array([one["accuracy"] for one in found["per_silo"].values()])
            alone = found["displacement"]["accuracy"]
            beside = {f"{name} of confined models": getattr(confined, name)().item() for name in ("mean", "min", "max")}
            beside |= {"share of them that D beats": float((confined < alone).mean()), "chance": 0.1}
            case = f"{source}, {parties} x 1, delta {delta:g}, {rounds} iterations"
            scores.append(Score(case, "accuracy of D alone", alone, beside))
    return scores


def leaked_iterate(folder: Path | None, quick: bool) -> list[Score]:
    """A participant of a horizontal split who once sees another's w_l(k), at k = 10: all the others by D(j) - D(k)."""
    seen = play(CGD(delta=0.1), digits(4), mlp(32), 30)
    me, victim = seen["silo-1"], flat(seen["silo-2"].models)
    moved = flat({k: {name: me.moved[k][name] for name in me.models[k]} for k in me.models})  # D(1), D(2), ...
    found, own = victim[9] + moved - moved[9], flat(me.models)
    beside = {"one's own models instead": error(own, victim)}
    return [Score("digits, 4 x 1, 30 iterations", "relative error of all w_l(j)", error(found, victim), beside)]


def two_parties(folder: Path | None, quick: bool) -> list[Score]:
    """One of two participants takes its own part off what both came to; of three, the control, that is not enough."""
    scores = []
    for parties in (2, 3):
        seen = play(CGD(delta=0.1), digits(parties), mlp(32), 5, F64)
        me, other = seen["silo-1"], seen["silo-2"]
        (rows, total), names = me.rows, list(me.gradients[1])
        both = flat({k: {name: total * me.summed(name, 0.5)[k - 1] for name in names} for k in me.gradients})
        own, truth = rows * flat(me.gradients), other.rows[0] * flat(other.gradients)
        case, beside = f"digits, {parties} x 1", {"one's own instead": error(own, truth)}
        scores.append(Score(case, "relative error of another's n_l g_l", error(both - own, truth), beside))
    for parties in (2, 3):
        seen = play(CGD(delta=0.1), digits(2, parties), mlp(32), 5, F64)
        head, other = seen["silo-1-1"], seen["silo-1-2"]
        found, own, truth = (np.stack(list(one.values())) for one in (head.others_z, head.own_z, other.own_z))
        case, beside = f"digits, joint row of {parties}", {"one's own instead": error(own, truth)}
        scores.append(Score(case, "relative error of another's X_ij W_ij", error(found, truth), beside))
    return scores


def features_from(differences: Sequence[Matrix], moved: Sequence[Matrix]) -> Matrix:
    """Solve z(k) - z(1) = X (D1(k) - D1(1))' for X by least squares. differences: [n, H1]; moved: [H1, columns]."""
    left, right = np.concatenate(moved), np.concatenate(differences, axis=1)  # [K H1, columns], [n, K H1]
    return np.linalg.lstsq(left, right.T, rcond=1e-12)[0].T


def raw_features(folder: Path | None, quick: bool) -> list[Score]:
    """The head of row 1 and a member of the other column group in row 2 (2 of 4, so m - 2) look for silo-1-2's X.

    The head has z of silo-1-2, its helper D1 of the same columns. Control: D1 of a federation with other starts.
    """
    silos, scores, last = digits(2, 2), list[Score](), 5 if quick else 100
    protocol, model, truth = CGD(delta=0.1), mlp(16), silos[1].x.astype("f8")
    other = play(protocol, silos, model, last, secrets=SEED + 1)["silo-2-2"].moved
    (name,) = other[1]
    for dtype in (F32, F64):
        seen = play(protocol, silos, model, last, dtype)
        z, moved = seen["silo-1-1"].others_z, seen["silo-2-2"].moved
        for number in (one for one in (2, 3, 5, 20, 100) if one <= last):
            later = range(2, number + 1)
            differences = [z[k] - z[1] for k in later]
            found, wrong = (features_from(differences, [of[k][name] for k in later]) for of in (moved, other))
            mean = np.broadcast_to(silos[3].x.mean(0), truth.shape)
            beside = {"other starts' D1": error(wrong, truth), "the helper's mean row": error(mean, truth)}
            case = f"digits, 2 x 2, 32 columns, H1 16, {str(dtype)[6:]}, {number} iterations"
            scores.append(Score(case, "relative error of silo-1-2's features", error(found, truth), beside))
    return scores


def one_row(folder: Path | None, quick: bool) -> list[Score]:
    """The head of the only row, alone: D1 of the other columns is -sum alpha X' Delta / n, of its own Delta.

    So z(k) - z(1) = -X X' S(k), where it knows S(k) = sum alpha Delta / n: it finds X X', all inner products of the
    others' rows, which of one other is X up to a rotation of its columns. Control: the same in a grid of two rows.
    """
    scores, last = list[Score](), 10 if quick else 20
    for rows, columns in ((1, 2), (1, 3), (2, 2)):
        silos = digits(rows, columns)
        own, *others = (silo.x.astype("f8") @ silo.x.astype("f8").T for silo in silos[:columns])
        truth = np.sum(others, axis=0)
        head = play(CGD(delta=0.1), silos, mlp(16), last, F64)["silo-1-1"]
        total = head.rows[1] or len(head.others_z[1])  # N; in a single row nobody else has any
        stepped = np.cumsum([0.5 * head.deltas[k] / total for k in range(1, last)], axis=0)
        right = np.concatenate(list(stepped), axis=1)  # S
        left = np.concatenate([head.others_z[1] - head.others_z[k] for k in range(2, last + 1)], axis=1)  # X X' S
        found = left @ np.linalg.pinv(right.T @ left, rcond=1e-11) @ left.T
        case, beside = f"digits, {rows} x {columns}, H1 16, float64, {last} iterations", {"its own": error(own, truth)}
        scores.append(Score(case, "relative error of the others' X X'", error(found, truth), beside))
    return scores


def labels(folder: Path | None, quick: bool) -> list[Score]:
    """A member of a row without labels clusters the rows of Delta, which it is sent (k-means, ten clusters)."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import adjusted_rand_score

    def clusters(rows: NDArray) -> NDArray:
        return KMeans(10, n_init=10, random_state=SEED).fit_predict(rows)

    silos, scores = digits(2, 2), list[Score]()
    truth, own = silos[0].y, clusters(silos[1].x)  # the head's; of what it holds anyway
    for delta in (0.1,) if quick else (0.1, 0.01):
        seen = play(CGD(delta=delta), silos, mlp(32), 5 if quick else 20)["silo-1-2"].deltas
        for number in (one for one in (1, 5, 20) if one in seen):
            found = clusters(seen[number] / np.maximum(np.linalg.norm(seen[number], axis=1, keepdims=True), 1e-30))
            beside = {
                "from its own columns": float(adjusted_rand_score(truth, own)),
                "in a wrong order": float(adjusted_rand_score(truth, np.random.default_rng(SEED).permutation(found))),
                "chance": 0.0,
            }
            case = f"digits, 2 x 2, H1 32, delta {delta:g}, iteration {number}"
            scores.append(Score(case, "adjusted Rand index", float(adjusted_rand_score(truth, found)), beside))
    return scores


def curvature_from(steps: Sequence[Matrix], gradients: Sequence[Matrix], tolerance: float) -> Matrix:
    """Solve g(k+1) - g(k) = (D(k+1) - D(k)) A for symmetric A, as far as the steps reach. All are [outputs, d]."""
    s, y = np.concatenate(steps[:-1]), np.diff(np.stack(gradients), axis=0).reshape(-1, steps[0].shape[1])
    _, sizes, rows = np.linalg.svd(s, full_matrices=False)
    basis = rows[sizes > tolerance * sizes[0]].T  # [d, directions reached]
    onto = basis @ np.linalg.lstsq(s @ basis, y, rcond=None)[0]  # P A
    return onto + onto.T - onto @ basis @ basis.T


def linear_regression(folder: Path | None, quick: bool) -> list[Score]:
    """Any one participant of five that fit a linear model takes X'X / N of all rows from how the sums change.

    g(k) = sum X_l' (X_l w_l(k) - y_l) / N, and all w_l move alike: g(k+1) - g(k) = (X'X / N) (D(k+1) - D(k)), whatever
    the starts. And -g(1) = X'y / N - sum X_l' X_l w_l(1) / N, which is X'y up to the starts.
    """
    scores = []
    cases = [("digits", 0.2, (8, 30, 100)), ("diabetes", 0.2, (10, 30, 300)), ("wdbc", 0.1, (30, 300))]
    for source, rate, rounds in [("digits", 0.2, (8, 30))] if quick else cases:
        silos, x, y = linear(source, 5)
        model = nn.Sequential(nn.Linear(x.shape[1], y.shape[1], bias=False))
        truth, cross, best = x.T @ x / len(x), y.T @ x / len(x), np.linalg.lstsq(x, y, rcond=None)[0]
        me = play(CGD(loss="mse", learning_rate=rate), silos, model, rounds[-1], F64)["silo-1"]
        sums = me.summed("0.weight", rate)
        for number in rounds:
            steps = [-rate * one for one in sums[:number]]
            mixed = [sums[k] for k in np.random.default_rng(SEED).permutation(number)]
            beside = {
                "from one's own rows": error(silos[0].x.T @ silos[0].x / len(silos[0].x), truth),
                "from sums in a wrong order": error(curvature_from(steps, mixed, 1e-9), truth),
                "X'y": error(-sums[0], cross),
                "predictions of D": error(x @ me.moved[number + 1]["0.weight"].T, x @ best),
            }
            found = curvature_from(steps, sums[:number], 1e-9)
            case = f"{source}, {x.shape[1]} columns, {y.shape[1]} outputs, 5 x 1, delta 0.01, {number} sums"
            scores.append(Score(case, "relative error of X'X", error(found, truth), beside))
    return scores


def theorem_1(folder: Path | None, quick: bool) -> list[Score]:
    """Nobody attacks: Theorem 1's bound, up to its unnamed constant, beside the regret of linear regression on digits.

    R: mean over k of F(w_l(k)) - F(w*), of the worst l. Rate: the theorem's, mu = 0.5, but for the last case.
    """
    scores, rounds, mu = [_distance(20 if quick else 100)], 60 if quick else 300, 0.5
    cases = [(0.01, 10, True), (0.1, 10, True), (0.1, 50, True), (0.1, 2, True), (1.0, 10, True), (0.1, 10, False)]
    for delta, parties, decays in cases[: 3 if quick else 6]:
        schedule = {"schedule": "inverse-square", "mu": mu} if decays else {}
        protocol = CGD(loss="mse", learning_rate=0.2, delta=delta, **schedule)
        silos, x, y = linear("digits", parties)
        path, starts = _path(protocol, silos, nn.Sequential(nn.Linear(x.shape[1], 10, bias=False)), rounds)
        curvature, best = x.T @ x / len(x), np.linalg.lstsq(x, y, rcond=None)[0].T
        away = starts + path[:, None] - best  # [T + 1, m, 10, d]
        gaps = 0.5 * ((away @ curvature) * away).sum((2, 3))  # F is quadratic
        worst = int(gaps[:-1].mean(0).argmax())
        rates = np.array([protocol.rate(k, rounds) for k in range(1, rounds + 1)])
        nearer = -np.diff(0.5 * np.square(away[:, worst]).sum((1, 2)))  # S_k - S_{k+1}
        stepped = 0.5 * np.square(np.diff(path, axis=0)).sum((1, 2))
        beside = {
            "epsilon": parties * float(np.linalg.norm(starts[worst] - starts.mean(0))),
            "1 / (mu T + 1)": 1 / (mu * rounds + 1),
            "ln(mu T + 1) / T": float(np.log(mu * rounds + 1)) / rounds,
            "F(w_l) - F(w*) at the end": float(gaps[-1, worst]),
            "F(0) - F(w*)": 0.5 * float(((best @ curvature) * best).sum()),
            "left of (19)": float((nearer / rates).sum()),
            "right of (19)": float((stepped / rates).sum()),
        }
        case = f"digits, {parties} x 1, delta {delta:g}, {protocol.schedule}, {rounds} iterations"
        scores.append(Score(case, "regret R", float(gaps[:-1, worst].mean()), beside))
    return scores


def _path(protocol: CGD, silos: Sequence[Silo], model: nn.Module, rounds: int) -> tuple[Matrix, Matrix]:
    """Return D of a linear model before each round and after the last, [T + 1, outputs, d], and all starts."""
    columns = ColumnRules.alike(row_shape(silos)[-1])
    run = Run(rounds=rounds, seed=SEED, dtype="float64", insecure_secret_seed=SEED)
    data, fused = Data(source="python", batch_size=0), Engine(name="fused")
    spec = Specification(run, data, protocol, SecureAggregation(), fused)
    players = build(Setting(spec, model.double(), 10, silos, columns))
    starts = np.stack([one["0.weight"] for one in players.models().values()])
    path = [players.displacement()["0.weight"]]
    for _ in Driver(players.server, [], "leaks", InProcess({}, Codec(())), 0).rounds(1, rounds):
        path.append(players.displacement()["0.weight"])
    return np.stack(path), starts


def _distance(rounds: int) -> Score:
    seen = play(CGD(delta=0.1), digits(4), mlp(32), rounds, F64)
    one, other = flat(seen["silo-1"].models), flat(seen["silo-2"].models)
    apart = np.linalg.norm(one - other, axis=1)
    beside = {"distance": float(apart[0]), "way that each has gone": float(np.linalg.norm(one[-1] - one[0]))}
    case = f"digits, 4 x 1, delta 0.1, {rounds} iterations"
    return Score(case, "change of |w_l - w_j|", float(np.ptp(apart)), beside)


FUNCTIONS = (d_alone, leaked_iterate, two_parties, raw_features, one_row, labels, linear_regression, theorem_1)
MEASUREMENTS: Mapping[str, Callable[[Path | None, bool], list[Score]]] = {
    one.__name__.replace("_", "-"): one for one in FUNCTIONS
}


def say(line: str) -> None:
    """Report progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def _progress(what: str) -> Callable[[int, int, Mapping[str, object]], None]:
    return lambda number, rounds, _: say(f"  {what}: {number} of {rounds}") if number % (rounds // 10) == 0 else None


def measure(names: Sequence[str], folder: Path | None, quick: bool) -> dict[str, object]:
    """Run measurements, and return what they came to, by name."""
    found: dict[str, object] = {}
    for number, name in enumerate(names, 1):
        say(f"{name} ({number} of {len(names)})")
        began = time.perf_counter()
        scores = [asdict(score) for score in MEASUREMENTS[name](folder, quick)]
        seconds, attacker = round(time.perf_counter() - began, 1), " ".join((MEASUREMENTS[name].__doc__ or "").split())
        found[name] = {"attacker": attacker, "scores": scores, "seconds": seconds}
    return found


def printed(found: Mapping[str, object]) -> str:
    """Return the scores as text for people."""
    lines = list[str]()
    for name, one in found.items():
        lines.append(f"{name} ({one['seconds']} s): {one['attacker']}")
        for score in one["scores"]:
            beside = "; ".join(f"{what} {value:.3g}" for what, value in score["beside"].items())
            lines.append(f"  {score['case']}: {score['what']} {score['value']:.3g} ({beside})")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("MORETTA_DATA"), help="folder of data sets")
    parser.add_argument("--only", choices=MEASUREMENTS, action="append", help="this measurement; may be given again")
    parser.add_argument("--quick", action="store_true", help="smaller runs, on digits alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not text")
    parser.add_argument("--out", type=Path, help="a file for the JSON object")
    given = parser.parse_args(arguments)
    try:
        found = measure(given.only or list(MEASUREMENTS), given.data, given.quick)
    except MorettaError as error:
        say(f"error: {error}")
        return 2
    record = as_json(found | provenance())
    if given.out is not None:
        given.out.write_text(record)
    print(record.rstrip("\n") if given.json else printed(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
