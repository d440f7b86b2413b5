"""What CGD does not hide, measured: python experiments/cgd/leaks.py [--data DIR] [--only NAME] [--out FILE].

Each measurement is an attack by honest but curious participants, with what they themselves held and were sent
(`Participant`) and what is public; the victims' own records are read only to score it. docs/cgd.md has the figures.

Secrets follow from a fixed seed (`insecure`), so that the figures come out the same each time; no attack uses that.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moretta import data
from moretta.casting import cast
from moretta.codec import Codec
from moretta.config_sections import Engine, SecureAggregation
from moretta.engines.driver import Driver
from moretta.engines.in_process import InProcess
from moretta.errors import MorettaError
from moretta.federation import Federation
from moretta.models import build
from moretta.protocol import Message, Phase, Stamp, Tensors, no_phase
from moretta.protocols.cgd.circle import group_of
from moretta.protocols.cgd.client import ROW_RING, Client
from moretta.protocols.cgd.messages import Backward, Contribute, Descend, Join, StepAlone
from moretta.protocols.cgd.params import CGD
from moretta.roles import Setting, Silo
from moretta.secure_aggregation.encoding import MOST_WEIGHT
from moretta.secure_aggregation.masks import add_masks

Matrix = NDArray[np.float64]
SEED = 1


@dataclass(frozen=True)
class Score:
    """What an attack came to in one case. beside: chance, no attack, controls that must fail, by what they are."""

    case: str
    what: str
    value: float
    beside: Mapping[str, float] = field(default_factory=dict)


# Who looks


class Participant:
    """A participant that follows the protocol and keeps what it is sent and holds, round by round from 1.

    moved: D of the tensors that it holds, before each round. models, gradients: its own w_l(k) and g_l. rows: n_l, N.
    own_z, deltas: in a row, its part of z and Delta. others_z: as the row's head, the others' parts of z in sum.
    """

    def __init__(self, client: Client) -> None:
        self.phase: Phase = no_phase
        self.client = client
        self.moved: dict[int, Tensors] = {1: dict(client.displacement)}
        self.models: dict[int, Tensors] = {}
        self.gradients: dict[int, Tensors] = {}
        self.own_z: dict[int, Matrix] = {}
        self.others_z: dict[int, Matrix] = {}
        self.deltas: dict[int, Matrix] = {}
        self.rows = (0, 0)

    def answer(self, message: Message) -> Message:
        """Answer as the protocol has it, and look."""
        reply, me, now = self.client.answer(message), self.client, message.stamp
        match message:
            case Join():
                words = np.array(message.words, order="C")
                add_masks([words], me._circle.row_masks(now, me._others(), words.shape, message.fraction_bits))
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
        content = me._circle.open(now, "delta", str(me._place.head), sealed)
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
    protocol: CGD,
    silos: Sequence[Silo],
    model: nn.Module,
    rounds: int,
    dtype: torch.dtype = torch.float32,
    secrets: int = SEED,
) -> dict[str, Participant]:
    """Train by messages, full batch and blind, and return the participants with what they saw."""
    whole, outputs = copy.deepcopy(model).to(dtype), next(reversed(list(model.parameters()))).shape[0]
    setting = Setting(whole, outputs, silos, SecureAggregation(), 0, 0, dtype, "cpu", SEED, rounds, insecure=secrets)
    players = cast(protocol, setting)
    looking = {name: Participant(client) for name, client in players.clients.items()}  # type: ignore[arg-type]
    engine = InProcess(looking, Codec(players.messages))
    for _ in Driver(players.server, list(looking), "leaks", engine.deliver, players.least).rounds(1, rounds):
        pass
    return looking


def digits(grid: tuple[int, int]) -> list[Silo]:
    """Return the digits (1,437 rows of 64 pixels from 0 to 1) dealt to a grid; one column part deals rows alone."""
    return _dealt(data.load("digits", seed=SEED), grid)[0]


def _dealt(dataset: data.Dataset, grid: tuple[int, int]) -> tuple[list[Silo], tuple[NDArray, NDArray]]:
    split = grid[1] > 1
    dealt = data.distribute(dataset, grid[0] * grid[1], "grid", SEED, grid=grid)
    silos = [
        Silo(one.name, one.x, one.y if one.holds_labels or not split else one.y[:0], one.row, one.columns)
        if split
        else Silo(one.name, one.x, one.y)
        for one in dealt.silos
    ]
    return silos, (dealt.test.x.reshape(len(dealt.test.x), -1), dealt.test.y)


def table(name: str) -> tuple[Matrix, Matrix]:
    """Return a data set of scikit-learn as X, standardised, and y, [n, outputs], centred; of digits a class each."""
    from sklearn import datasets

    bunch = {"diabetes": datasets.load_diabetes, "wdbc": datasets.load_breast_cancer, "digits": datasets.load_digits}
    x, y = bunch[name](return_X_y=True)
    x = x[:, x.std(0) > 0].astype(np.float64)
    y = np.eye(10)[y] if name == "digits" else y[:, None] / y.std()
    return (x - x.mean(0)) / x.std(0), y - y.mean(0)


def linear(name: str, parties: int) -> tuple[list[Silo], Matrix, Matrix]:
    """Return a table's rows, shuffled and dealt to parties, with X and y in the same order."""
    x, y = table(name)
    order = np.random.default_rng(SEED).permutation(len(x))
    parts = np.array_split(order, parties)
    return [Silo(f"silo-{i}", x[part], y[part]) for i, part in enumerate(parts, 1)], x[order], y[order]


def mlp(width: int, inputs: int = 64) -> nn.Module:
    """Return the paper's network with one hidden layer."""
    return build("mlp", inputs=(inputs,), outputs=10, hidden=[width], seed=SEED)


def error(found: NDArray, truth: NDArray) -> float:
    """Return |found - truth| / |truth|, Frobenius norms: 1 is what the answer 0 scores."""
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


# The measurements


def d_alone(folder: Path | None, quick: bool) -> list[Score]:
    """Any one participant of a horizontal split takes D, which it knows, as a model of its own."""
    cases = [("digits", 20, 30 if quick else 400, 32, None)]
    if folder is not None and not quick:
        cases.append(("mnist", 1000, 200, 256, folder / "mnist"))
    scores = []
    for source, parties, rounds, width, path in cases:
        silos, test = _dealt(data.load(source, path=path, seed=SEED), (parties, 1))
        silos = [Silo(silo.name, silo.x.reshape(len(silo.x), -1), silo.y) for silo in silos]
        for delta in (0.01, 0.06, 0.1):
            federation = Federation(
                model=mlp(width, silos[0].x.shape[1]),
                silos=silos,
                protocol=CGD(delta=delta),
                test=test,
                engine=Engine(name="fused"),
                batch_size=0,
                evaluate_every=rounds,
                insecure_secret_seed=SEED,
            )
            found = federation.train(rounds, SEED, progress=_progress(f"{source}, delta {delta:g}")).test
            all_of = np.array([one["accuracy"] for one in found["per_silo"].values()])
            alone = found["displacement"]["accuracy"]
            beside = {
                "mean confined model": float(all_of.mean()),
                "worst": float(all_of.min()),
                "best": float(all_of.max()),
                "share of confined models that D beats": float((all_of < alone).mean()),
                "chance": 0.1,
            }
            case = f"{source}, {parties} x 1, delta {delta:g}, {rounds} iterations"
            scores.append(Score(case, "accuracy of D alone", alone, beside))
    return scores


def leaked_iterate(folder: Path | None, quick: bool) -> list[Score]:
    """A participant of a horizontal split who once sees another's w_l(k), at k = 10: all the others by D(j) - D(k)."""
    seen = play(CGD(delta=0.1), digits((4, 1)), mlp(32), 30)
    me, victim = seen["silo-1-1"], seen["silo-2-1"]
    leaked, worst, apart = victim.models[10], 0.0, 0.0
    for number, truth in victim.models.items():
        for name in truth:
            mine = leaked[name] + (me.moved[number][name] - me.moved[10][name])
            worst = max(worst, error(mine, truth[name]))
            apart = max(apart, error(me.models[number][name], truth[name]))
    return [Score("digits, 4 x 1, 30 iterations", "worst relative error of w_l(j)", worst, {"own model instead": apart})]


def two_parties(folder: Path | None, quick: bool) -> list[Score]:
    """One of two participants takes its own part off what both came to; of three, the control, that is not enough."""
    scores = []
    for parties in (2, 3):
        seen = play(CGD(delta=0.1), digits((parties, 1)), mlp(32), 5, torch.float64)
        me, other = seen["silo-1-1"], seen["silo-2-1"]
        (mine, total), names = me.rows, list(me.gradients[1])
        sums = {name: me.summed(name, 0.5) for name in names}
        found = np.concatenate(
            [(total * sums[name][k - 1] - mine * me.gradients[k][name]).ravel() for k in me.gradients for name in names]
        )
        truth = np.concatenate(
            [other.rows[0] * other.gradients[k][name].ravel() for k in other.gradients for name in names]
        )
        own = np.concatenate([mine * me.gradients[k][name].ravel() for k in me.gradients for name in names])
        what, beside = "relative error of another's n_l g_l", {"one's own n_l g_l instead": error(own, truth)}
        scores.append(Score(f"digits, {parties} x 1", what, error(found, truth), beside))
    for parties in (2, 3):
        seen = play(CGD(delta=0.1), digits((2, parties)), mlp(32), 5, torch.float64)
        head, other = seen["silo-1-1"], seen["silo-1-2"]
        found = np.stack([head.others_z[k] for k in head.others_z])
        truth = np.stack([other.own_z[k] for k in other.own_z])
        own = np.stack([head.own_z[k] for k in head.own_z])
        what, beside = "relative error of another's X_ij W_ij", {"one's own X_ij W_ij instead": error(own, truth)}
        scores.append(Score(f"digits, joint row of {parties}", what, error(found, truth), beside))
    return scores


def features_from(differences: Sequence[Matrix], moved: Sequence[Matrix]) -> Matrix:
    """Solve z(k) - z(1) = X (D1(k) - D1(1))' for X by least squares. differences: [n, H1]; moved: [H1, columns]."""
    left, right = np.concatenate(moved), np.concatenate(differences, axis=1)  # [K H1, columns], [n, K H1]
    return np.linalg.lstsq(left, right.T, rcond=1e-12)[0].T


def raw_features(folder: Path | None, quick: bool) -> list[Score]:
    """The head of row 1 and a member of the other column group in row 2 (2 of 4, so m - 2) look for silo-1-2's X.

    The head has z of silo-1-2, its helper D1 of the same columns. Control: D1 of a federation with other starts.
    """
    silos, scores, last = digits((2, 2)), list[Score](), 20 if quick else 100
    protocol, model, truth = CGD(delta=0.1), mlp(16), silos[1].x.astype("f8")
    other = play(protocol, silos, model, last, secrets=SEED + 1)["silo-2-2"].moved
    (name,) = other[1]
    for dtype in (torch.float32, torch.float64):
        seen = play(protocol, silos, model, last, dtype)
        z, moved = seen["silo-1-1"].others_z, seen["silo-2-2"].moved
        for number in (one for one in (2, 3, 5, 20, 100) if one <= last):
            differences = [z[k] - z[1] for k in range(2, number + 1)]
            found, wrong = (
                features_from(differences, [of[k][name] for k in range(2, number + 1)]) for of in (moved, other)
            )
            mean = np.broadcast_to(silos[3].x.mean(0), truth.shape)
            beside = {"other starts' D1": error(wrong, truth), "the helper's mean row": error(mean, truth)}
            case = f"digits, 2 x 2, 32 columns, H1 16, {str(dtype)[6:]}, {number} iterations"
            scores.append(Score(case, "relative error of silo-1-2's features", error(found, truth), beside))
    return scores


def one_row(folder: Path | None, quick: bool) -> list[Score]:
    """The head of the only row, alone: D1 of the other columns is -sum alpha X' Delta / n, of its own Delta.

    So z(k) - z(1) = -X X' S(k), where it knows S(k) = sum alpha Delta / n: it finds X X', all inner products of the
    other holder's rows, which is X up to a rotation of its columns. Control: the same in a grid of two rows.
    """
    scores, last = list[Score](), 20
    for rows in (1, 2):
        silos = digits((rows, 2))
        truth = silos[1].x.astype("f8") @ silos[1].x.astype("f8").T
        own = silos[0].x.astype("f8") @ silos[0].x.astype("f8").T
        head = play(CGD(delta=0.1), silos, mlp(16), last, torch.float64)["silo-1-1"]
        z, deltas, total = head.others_z, head.deltas, head.rows[1]
        stepped = np.cumsum([0.5 * deltas[k] / total for k in range(1, last)], axis=0)
        left = np.concatenate([z[1] - z[k] for k in range(2, last + 1)], axis=1)  # X X' S
        right = np.concatenate(list(stepped), axis=1)
        found = left @ np.linalg.pinv(right.T @ left, rcond=1e-11, hermitian=rows == 1) @ left.T
        case = f"digits, {rows} x 2, 32 columns, H1 16, float64, {last} iterations"
        beside = {"its own columns' instead": error(own, truth)}
        scores.append(Score(case, "relative error of silo-1-2's X X'", error(found, truth), beside))
    return scores


def labels(folder: Path | None, quick: bool) -> list[Score]:
    """A member of a row without labels clusters the rows of Delta, which it is sent (k-means, ten clusters)."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import adjusted_rand_score

    silos = digits((2, 2))
    truth = silos[0].y  # the head's
    scores = []
    for delta in (0.01, 0.1):
        seen = play(CGD(delta=delta), silos, mlp(32), 20)["silo-1-2"].deltas
        for number in (1, 5, 20):
            rows = seen[number] / np.maximum(np.linalg.norm(seen[number], axis=1, keepdims=True), 1e-30)
            found = KMeans(10, n_init=10, random_state=SEED).fit_predict(rows)
            own = KMeans(10, n_init=10, random_state=SEED).fit_predict(silos[1].x)
            beside = {
                "purity": purity(found, truth),
                "index of its own columns": adjusted_rand_score(truth, own),
                "purity of its own columns": purity(own, truth),
                "chance": 0.0,
                "purity of chance": purity(np.random.default_rng(SEED).permutation(found), truth),
            }
            case = f"digits, 2 x 2, delta {delta:g}, iteration {number}"
            scores.append(Score(case, "adjusted Rand index with labels", adjusted_rand_score(truth, found), beside))
    return scores


def purity(found: NDArray, truth: NDArray) -> float:
    """Return the share of rows whose label is the commonest of their cluster."""
    return float(sum(np.bincount(truth[found == one]).max() for one in np.unique(found)) / len(truth))


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
    cases = [("diabetes", 0.2, (10, 30, 300)), ("wdbc", 0.1, (30, 300)), ("digits", 0.2, (8, 30, 100))]
    for source, rate, rounds in cases[: 1 if quick else 3]:
        silos, x, y = linear(source, 5)
        model = nn.Sequential(nn.Linear(x.shape[1], y.shape[1], bias=False))
        truth, cross, best = x.T @ x / len(x), y.T @ x / len(x), np.linalg.lstsq(x, y, rcond=None)[0]
        protocol = CGD(loss="mse", learning_rate=rate, delta=0.1)
        me = play(protocol, silos, model, rounds[-1], torch.float64)["silo-1"]
        sums = me.summed("0.weight", rate)
        for number in rounds:
            steps = [-rate * one for one in sums[:number]]
            found = curvature_from(steps, sums[:number], 1e-9)
            shuffled = curvature_from(steps, [sums[k] for k in np.random.default_rng(SEED).permutation(number)], 1e-9)
            predicted = x @ np.linalg.lstsq(found, -sums[0].T, rcond=1e-9)[0]
            own = silos[0].x.T @ silos[0].x / len(silos[0].x)
            beside = {
                "from its own rows": error(own, truth),
                "sums in a wrong order": error(shuffled, truth),
                "X'y, relative error": error(-sums[0], cross),
                "predictions, relative error": error(predicted, x @ best),
            }
            case = f"{source}, {x.shape[1]} columns, {y.shape[1]} outputs, 5 x 1, delta 0.1, {number} sums"
            scores.append(Score(case, "relative error of X'X", error(found, truth), beside))
    return scores


def theorem(folder: Path | None, quick: bool) -> list[Score]:
    """Nobody attacks: Theorem 1's bound, up to its unnamed constant, beside the regret of linear regression on digits.

    R: mean over k of F(w_l(k)) - F(w*), of the worst l. Rate: the theorem's, mu = 0.5, T = 300; and constant.
    """
    scores = [_distance()]
    rounds, mu, rate = 60 if quick else 300, 0.5, 0.2
    for schedule, delta, parties in (
        ("inverse-square", 0.01, 10),
        ("inverse-square", 0.1, 2),
        ("inverse-square", 0.1, 10),
        ("inverse-square", 0.1, 50),
        ("inverse-square", 1.0, 10),
        ("constant", 0.1, 10),
    ):
        protocol = CGD(
            loss="mse", learning_rate=rate, delta=delta, schedule=schedule, mu=mu if schedule != "constant" else 0.0
        )
        silos, x, y = linear("digits", parties)
        model = nn.Sequential(nn.Linear(x.shape[1], 10, bias=False)).double()
        setting = Setting(model, 10, silos, SecureAggregation(), 0, 0, torch.float64, "cpu", SEED, rounds,
                          insecure=SEED, engine="fused")  # fmt: skip
        players = cast(protocol, setting)
        starts = np.stack([one["0.weight"] for one in players.models().values()])
        path = [np.zeros_like(starts[0])]
        engine = InProcess({}, Codec(()))
        for _ in Driver(players.server, [], "leaks", engine.deliver, 0).rounds(1, rounds):
            path.append(players.displacement()["0.weight"])  # type: ignore[misc]
        curvature, best = x.T @ x / len(x), np.linalg.lstsq(x, y, rcond=None)[0].T
        gaps = np.array([[_gap(start + moved - best, curvature) for start in starts] for moved in path])
        away = np.linalg.norm(starts - starts.mean(0), axis=(1, 2))
        worst = gaps[:-1].mean(0).argmax()
        rates = [protocol.rate(k, rounds) for k in range(1, rounds + 1)]
        halves = [0.5 * np.linalg.norm(starts[worst] + moved - best) ** 2 for moved in path]
        beside = {
            "epsilon = m |E_j (w_l(1) - w_j(1))|": parties * float(away[worst]),
            "1 / (mu T + 1)": 1 / (mu * rounds + 1),
            "ln(mu T + 1) / T": float(np.log(mu * rounds + 1)) / rounds,
            "F(w_l) - F(w*) after T": float(gaps[-1, worst]),
            "F(0) - F(w*)": _gap(best, curvature),
            "left of (19)": sum((halves[k] - halves[k + 1]) / rates[k] for k in range(rounds)),
            "right of (19)": sum(
                0.5 * float(np.linalg.norm(path[k + 1] - path[k])) ** 2 / rates[k] for k in range(rounds)
            ),
        }
        case = f"digits, {parties} x 1, delta {delta:g}, {schedule}, {rounds} iterations"
        scores.append(Score(case, "regret R", float(gaps[:-1].mean(0)[worst]), beside))
    return scores


def _distance() -> Score:
    seen = play(CGD(delta=0.1), digits((4, 1)), mlp(32), 100, torch.float64)
    one, other = seen["silo-1-1"].models, seen["silo-2-1"].models
    apart = [
        np.sqrt(sum(float(np.square(one[k][name] - other[k][name]).sum()) for name in one[k])) for k in sorted(one)
    ]
    away = np.sqrt(sum(float(np.square(one[100][name] - one[1][name]).sum()) for name in one[1]))
    beside = {"distance": apart[0], "way that each has gone": away}
    return Score("digits, 4 x 1, delta 0.1, 100 iterations", "change of |w_l(k) - w_j(k)|", max(apart) - min(apart), beside)


def _gap(away: Matrix, curvature: Matrix) -> float:
    return 0.5 * float(np.einsum("od,de,oe->", away, curvature, away))
