"""What docs/errata.md says of PBPFL's lemmas, formulas and tables, each by numbers."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_exactness import means_of, mlp, relative_error, silo_rows
from torch import Tensor

from moretta.config import run_files
from moretta.data.datasets import load
from moretta.data.settings import Data
from moretta.models import catalogue
from moretta.protocols.common import modules
from moretta.protocols.common.losses import Loss
from moretta.protocols.pbpfl.ideal import gradient
from moretta.protocols.pbpfl.perturbation import Perturbation
from moretta.protocols.pbpfl.scales import ScalePlan
from moretta.secure_aggregation.keystream import SecretRoot

ROOT = SecretRoot.insecure(2, "server")
EXPERIMENTS = Path(__file__).parents[3] / "experiments"
INPUTS, HIDDEN, OUTPUTS, ROWS = 5, 7, 6, 12


def perturbation_of(model: torch.nn.Module, partitions: int, form: str) -> Perturbation:
    return Perturbation(ScalePlan.of(model, (torch.zeros(2, INPUTS, dtype=torch.float64),)), partitions, form)


def test_one_sign_wins_the_game_of_lemma_6() -> None:
    """W_0 has no negative weight below the head, W_1 has one: keys are positive, so W^ tells which of them it is of."""
    random, positive = np.random.default_rng(1), mlp([INPUTS, HIDDEN, OUTPUTS], False, torch.float64)
    with torch.no_grad():
        next(positive.parameters()).abs_()
    other = mlp([INPUTS, HIDDEN, OUTPUTS], False, torch.float64)
    other.load_state_dict(positive.state_dict())
    with torch.no_grad():
        next(other.parameters())[3, 2] *= -1.0
    perturbation = perturbation_of(positive, 2, "squared-error")
    for game in range(50):
        b = int(random.integers(2))
        key = perturbation.draw_key(ROOT.stream("lemma six", game), offset_size=0.7)
        noisy = perturbation.perturb((positive, other)[b].state_dict(), key)
        assert int((noisy["0.weight"] < 0).any()) == b


@pytest.mark.parametrize("partitions", [2, 5, 10])
def test_labels_of_one_batch_give_far_more_than_one_in_m_of_lemma_7(partitions: int) -> None:
    """y^_i = y_i + alpha gamma_s r_a,i: m unknowns, a hundred rows. Labels stand in for y in a fit by least squares."""
    random, hits = np.random.default_rng(partitions), []
    perturbation = perturbation_of(mlp([INPUTS, HIDDEN, 10], False, torch.float64), partitions, "squared-error")
    for number in range(20):
        key = perturbation.draw_key(ROOT.stream("seven", number), 3.0)
        labels, alpha = random.integers(0, 10, 100), random.normal(1.0, 0.4, (100, 1))
        true = np.eye(10)[labels] + random.normal(0, 0.2, (100, 10))  # of a model that has learnt something
        seen = true + alpha * key.offset
        along = alpha * key.direction  # public
        fitted = [
            ((seen - np.eye(10)[labels]) * along)[:, key.parts == s].sum() / np.square(along[:, key.parts == s]).sum()
            for s in range(partitions)
        ]
        found = seen - along * np.array(fitted)[key.parts]
        hits.append(np.mean(found.argmax(axis=1) == true.argmax(axis=1)))
    assert np.mean(hits) > 0.85 > 1 / partitions


def test_answering_the_most_frequent_class_beats_one_half_of_lemma_7() -> None:
    """m = 2, two classes, nine no in ten: who looks at nothing is right nine times in ten, whatever the keys are."""
    predicted = np.random.default_rng(3).random(1000) < 0.1
    assert max(np.mean(predicted), np.mean(~predicted)) > 0.85 > 1 / 2


def test_a_channel_of_the_noisy_model_is_r_times_the_true_one_and_not_times_itself() -> None:
    """Eq. 16 of the first version: its text has a hat on both sides, its appendix on the left side alone."""
    random = np.random.default_rng(16)
    weight, image, r = (torch.from_numpy(random.normal(size=size)) for size in ((3, 2, 3, 3), (1, 2, 8, 8), (3,)))
    r = r.abs() + 0.5
    true = torch.relu(torch.nn.functional.conv2d(image, weight))
    noisy = torch.relu(torch.nn.functional.conv2d(image, r[:, None, None, None] * weight))
    torch.testing.assert_close(noisy, r[:, None, None] * true)
    assert not torch.allclose(noisy, r[:, None, None] * noisy)


@pytest.mark.parametrize("partitions", [1, 2, 5])
def test_a_client_adds_m_plus_1_terms_of_the_models_size_under_squared_error(partitions: int) -> None:
    """Section V-E has 2m |W|. The two agree at m = 1 alone, which is what was measured: 2.55 MB for 0.85."""
    model = mlp([INPUTS, HIDDEN, OUTPUTS], False, torch.float64)
    perturbation = perturbation_of(model, partitions, "squared-error")
    key = perturbation.draw_key(ROOT.stream("terms"), offset_size=0.7)
    own = silo_rows(INPUTS, OUTPUTS, ROWS, torch.float64)
    sent = means_of(model, perturbation.plan, key, perturbation.perturb(model.state_dict(), key), own)
    terms = {name.rpartition("/")[0] for name in sent if name.startswith(("sigma", "beta"))}
    assert len(terms) == partitions + 1
    assert (len(terms) == 2 * partitions) == (partitions == 1)


# -- the recovery under cross-entropy ----------------------------------------------------------------------------------


def recovered(*, reciprocal: bool = False, sign: float = 1.0) -> float:
    """How far from the gradient the recovery of Lemma 5 comes, all of its terms by autograd.

    reciprocal: of the factor (1 - exp(delta)) / xi that the client is sent. sign: of the terms with beta and psi.
    """
    random, model = np.random.default_rng(4), mlp([INPUTS, HIDDEN, OUTPUTS], False, torch.float64, seed=1)
    perturbation = perturbation_of(model, 3, "paper")
    key = perturbation.draw_key(ROOT.stream("five"), offset_size=0.7)
    # Without its order of channels, so that R is a matrix beside W, as in the paper.
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    scale = np.exp(random.uniform(-0.7, 0.7, (HIDDEN, 1)))
    r = {"0.weight": scale * np.ones((1, INPUTS)), "2.weight": np.ones((OUTPUTS, 1)) / scale.T}
    offsets = {"0.weight": 0.0, "2.weight": key.offset[:, None]}
    noisy = [torch.tensor(r[name] * weights[name] + offsets[name], requires_grad=True) for name in weights]
    x, labels = (
        torch.from_numpy(random.normal(size=(ROWS, INPUTS))),
        torch.from_numpy(random.integers(0, OUTPUTS, ROWS)),
    )
    target = torch.eye(OUTPUTS, dtype=torch.float64)[labels]
    hidden = torch.relu(x @ noisy[0].T)
    outputs, alpha = hidden @ noisy[1].T, hidden.sum(1, keepdim=True)
    delta = torch.from_numpy(random.uniform(-1, 1, (ROWS, 3)))[:, key.parts]
    xi, offset = torch.from_numpy(key.xi[key.parts]), torch.from_numpy(key.offset)
    star = model(x).detach().softmax(1) * torch.exp(-delta)  # Eq. 24
    factor = (1 - torch.exp(delta)) / xi
    tilde = star * (1 / factor if reciprocal else factor)
    terms: list[tuple[float, Tensor]] = [  # r' sigma, (r o xi)' beta and xi' psi of Eq. 26
        (1.0, ((star - target) * outputs).sum()),
        (-1.0, (((star - target) * offset).sum(1, keepdim=True) * alpha).sum()),
        (sign, ((tilde * xi * offset).sum(1, keepdim=True) * alpha).sum()),
        (-sign, (tilde * xi * outputs).sum()),
    ]
    total = [torch.zeros_like(one) for one in noisy]
    for times, term in terms:
        parts = torch.autograd.grad(term / ROWS, noisy, retain_graph=True, allow_unused=True)
        total = [one if part is None else one + times * part for one, part in zip(total, parts, strict=True)]
    found = {name: r[name] * one.numpy() for name, one in zip(weights, total, strict=True)}
    return relative_error(found, gradient(model, x, labels, Loss("cross-entropy")))


def test_the_answers_factor_is_one_minus_exp_delta_over_xi_and_not_its_reciprocal() -> None:
    assert recovered() < 1e-12
    assert recovered(reciprocal=True) > 0.1


def test_of_the_two_lines_of_the_recovery_the_second_has_the_right_signs() -> None:
    assert recovered(sign=1.0) < 1e-12
    assert recovered(sign=-1.0) > 0.1


def test_equation_29_gives_the_true_models_gradient_and_not_the_noisy_ones() -> None:
    model = mlp([INPUTS, HIDDEN, OUTPUTS], False, torch.float64)
    perturbation = perturbation_of(model, 2, "squared-error")
    key = perturbation.draw_key(ROOT.stream("29"), offset_size=0.7)
    own = silo_rows(INPUTS, OUTPUTS, ROWS, torch.float64)
    means = means_of(model, perturbation.plan, key, perturbation.perturb(model.state_dict(), key), own)
    true = gradient(model, *own.batch(1), Loss("mse"))
    assert relative_error(perturbation.recover(means, key), true) < 1e-12
    assert relative_error({name: means[f"noisy/{name}"] for name in true}, true) > 0.1


# -- masks -------------------------------------------------------------------------------------------------------------


def test_masks_that_cancel_in_a_plain_sum_do_not_in_the_weighted_mean() -> None:
    random = np.random.default_rng(5)
    rows, sent = np.array([100.0, 300.0, 50.0]), random.normal(size=(3, 40))
    mean = rows @ sent / rows.sum()
    plain = random.normal(size=(3, 40))
    plain -= plain.mean(axis=0)  # sum of lambda_k = 0, section 4 (3) of the first version
    weighted = plain / rows[:, None]  # sum of N_k lambda_k = 0, its appendix C and Eq. 27 of the later one

    def wrong(masks: NDArray[np.float64]) -> float:
        return float(np.abs(rows @ (sent + masks) / rows.sum() - mean).max())

    assert wrong(weighted) < 1e-12
    assert wrong(plain) > 0.1


def test_a_mask_of_real_numbers_has_an_end_beyond_which_the_upload_is_seen() -> None:
    """No distribution is uniform on the real numbers. The ends of one on [-10, 10] say the sign of what lies under."""
    random = np.random.default_rng(6)
    gradient = random.normal(size=10_000)
    upload = gradient + random.uniform(-10, 10, 10_000)
    beyond = np.abs(upload) > 10
    assert beyond.sum() > 100
    assert (np.sign(upload) == np.sign(gradient))[beyond].all()


# -- figures -----------------------------------------------------------------------------------------------------------

LESIONS = {"nv": 6705, "mel": 1113, "bkl": 1099, "bcc": 514, "akiec": 327, "vasc": 142, "df": 115}  # HAM10000's images
FIRST_TABLE_2 = (66.90, 64.93, 63.38, 66.24, 61.68, 61.44, 66.23, 61.74, 61.27)
PRINTED = tomllib.loads((EXPERIMENTS / "printed" / "papers.toml").read_text(encoding="utf-8"))


def test_table_4s_accuracy_of_five_clients_is_table_3s_of_one() -> None:
    ours = dict(zip((1, 5, 10), PRINTED["Feng et al., Table III"]["Ours"], strict=True))
    five_clients = PRINTED["Feng et al., Table IV"]["Accuracy"][-1]
    assert five_clients == ours[1] == 72.22
    assert ours[5] == 71.77


def test_the_clients_time_is_two_and_a_half_times_and_not_doubled() -> None:
    table = PRINTED["Feng et al., Table V"]
    assert table["Ours, client"][-1] / table["FedAvg, client"][-1] == pytest.approx(2.5, abs=0.01)
    both = [table[f"{method}, client"][-1] + table[f"{method}, server"][-1] for method in ("Ours", "FedAvg")]
    assert both[0] / both[1] == pytest.approx(1.8, abs=0.01)


def test_the_table_of_regression_has_abd_and_not_ldc() -> None:
    sets = {name.rpartition(", ")[2] for name in PRINTED if name.startswith("Feng et al., Table I, ")}
    assert sets == {"UBMD", "ABD"}


def test_no_figure_of_the_first_table_2_is_above_the_share_of_the_largest_class() -> None:
    share = 100 * max(LESIONS.values()) / sum(LESIONS.values())
    assert share == pytest.approx(66.95, abs=0.005)
    assert max(FIRST_TABLE_2) < share
    deviation = 100 * np.sqrt(share / 100 * (1 - share / 100) / 2000)  # of that share among 2000 test rows
    assert share - max(FIRST_TABLE_2) < deviation / 10


def test_what_the_traffic_counts_is_numbers_and_not_megabytes() -> None:
    arguments: dict[str, Any] = {**run_files.load(EXPERIMENTS / "pbpfl" / "authors-ldc.toml").model.arguments}
    model = catalogue.build("resnet", inputs=(3, 64, 64), outputs=7, **arguments | {"depth": 56})
    assert round(modules.size(model) / 1e6, 2) == 0.85
    assert round(4 * modules.size(model) / 1e6, 1) == 3.4  # float32


# The publisher's two files: how many words each column of words has, and how many columns of numbers there are.
FULL = ({"job": 12, "marital": 3, "education": 4, "contact": 3, "month": 12, "poutcome": 4}, 7, 3)
ADDITIONAL = (
    {"job": 12, "marital": 4, "education": 8, "default": 3, "housing": 3, "loan": 3, "contact": 2, "month": 10}
    | {"day_of_week": 5, "poutcome": 3},
    10,
    0,
)


@pytest.mark.parametrize(("file", "columns", "inputs"), [(FULL, 17, 48), (ADDITIONAL, 21, 63)])
def test_seventeen_columns_are_the_16_inputs_and_y_of_one_file(
    file: tuple[dict[str, int], int, int], columns: int, inputs: int, tmp_path: Path
) -> None:
    """The released code takes 48 numbers, which the file of 45211 rows gives; the other one has 41188 rows."""
    words, numbers, yes_no = file
    kinds = [*words.values(), *[0] * numbers, *[2] * yes_no]
    names = [*words, *(f"number-{at}" for at in range(numbers)), *(f"asked-{at}" for at in range(yes_no)), "y"]
    said = ("no", "yes")
    lines = [
        [*(f"{row * 7 % 23}.5" if not kind else said[row % 2] if kind == 2 and at >= len(words) else f"w{row % kind}"
           for at, kind in enumerate(kinds)), said[row % 3 == 0]]
        for row in range(120)
    ]  # fmt: skip
    assert len(names) == columns
    (tmp_path / "bank.csv").write_text("\n".join(";".join(line) for line in [names, *lines]) + "\n")
    data = load(Data(source="bank-marketing", path="bank.csv", encoding="yes-no"), base=tmp_path)
    assert data.inputs == (inputs,)
