"""`moretta check`: the numbers it prints, the models it passes, and the ones it refuses by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import pytest
import torch
from test_cli import call
from torch import nn

from moretta import PBPFL
from moretta.protocols.common.losses import Loss
from moretta.protocols.pbpfl import exactness

MODELS = """
import torch
from torch import nn
from torch.nn import functional as F

class Convolutions(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(x + self.second(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.hidden = nn.Linear(30, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens):
        assert not tokens.is_floating_point()
        return self.head(F.relu(self.hidden(self.embedding(tokens).flatten(1))))

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.row, self.head = nn.Linear(12, 5), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, image, row):
        return self.head(F.relu(self.image(image.flatten(1)) + self.row(row)))

class Sines(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.sin(self.body(x)))

class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x) if x.sum() > 0 else self.head(-x)

def convolutions(): return Convolutions()
def dropout(): return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 3))
def words(): return Words()
def both(): return Both()
def sines(): return Sines()
def branch(): return Branch()
def squashed(): return nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())
def linear(): return nn.Linear(4, 3)
def frozen(): return nn.Sequential(nn.Linear(4, 6).requires_grad_(False), nn.ReLU(), nn.Linear(6, 3))
"""
KEYS = {
    "format",
    "relative_error_float64",
    "relative_error_float32",
    "buffers_error_float64",
    "free_scales",
    "forced_to_one",
    "passes",
    "passes_continuous",
    "scales",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "exactness_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(model: str, *inputs: str, classes: int = 3) -> list[str]:
    words = ["check", "--model", model if model == "mlp" else f"exactness_models:{model}", "--classes", str(classes)]
    return words + [word for shape in inputs for word in ("--input", shape)]


@pytest.mark.parametrize(
    "settings",
    [
        ("--loss", "mse"),
        ("--loss", "mse", "--partitions", "3"),
        ("--loss", "cross-entropy"),
        ("--loss", "cross-entropy", "--variant", "paper", "--partitions", "2"),
    ],
)
@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        ("mlp", ["4"]),
        ("convolutions", ["2,5,5"]),
        ("dropout", ["4"]),
        ("words", ["5:int20"]),
        ("both", ["3,2,2", "4"]),
        ("linear", ["4"]),
        ("frozen", ["4"]),
    ],
)
def test_models_that_are_trained_exactly(model: str, inputs: list[str], settings: tuple[str, ...]) -> None:
    done = call(*command(model, *inputs), *settings, "--json")
    assert done.code == 0, done
    assert done.err == ""
    assert done.told.keys() == KEYS
    assert done.told["passes"] is done.told["passes_continuous"] is True
    assert done.told["relative_error_float64"] <= 1e-10
    assert done.told["relative_error_float32"] <= 1e-4
    assert done.told["buffers_error_float64"] <= 1e-6
    assert (done.told["free_scales"] > 0) == (model not in ("linear", "frozen"))


def test_what_stays_unperturbed_is_listed_with_its_reason() -> None:
    found = call(*command("sines", "4"), "--json").told
    assert found["passes"] is True
    assert all(entry.keys() == {"tensor", "because"} for entry in found["forced_to_one"])
    assert {entry["tensor"] for entry in found["forced_to_one"]} >= {"body.weight"}
    assert "sin" in found["forced_to_one"][0]["because"]
    plain = call(*command("sines", "4"))
    assert plain.code == 0
    assert "passes: PBPFL trains this model exactly" in plain.out
    assert "no free scale on one side or both: body.weight" in plain.out


def test_the_randomness_is_fixed() -> None:
    assert call(*command("mlp", "4"), "--json").told == call(*command("mlp", "4"), "--json").told


def test_packing_inputs_does_not_rename_tensors() -> None:
    found = call(*command("both", "3,2,2", "4"), "--json").told
    assert not [entry for entry in found["forced_to_one"] if entry["tensor"].startswith("model.")]


def test_without_json_the_numbers_are_lines() -> None:
    done = call(*command("convolutions", "2,5,5"))
    assert (done.code, done.err) == (0, "")
    assert re.match(r"passes: PBPFL trains this model exactly \(\d+ free scales, continuous\)\n", done.out)
    for name in ("relative error float64", "relative error float32", "relative error of running statistics float64"):
        assert re.search(rf"{name}: \d\.\de[+-]\d\d", done.out)


@dataclass
class Measured:
    """Stand-ins for what `check` measures: errors of float64 and float32 by scales, and the plain model's draws."""

    continuous: tuple[float, float] = (1e-12, 3e-3)
    powers: tuple[float, float] = (1e-12, 1e-12)
    draws: Sequence[float] = (2e-3,) * 16
    buffers: float = 0.0
    asked: set[str] = field(default_factory=set)
    drawn: int = 0

    def put(self, monkeypatch: pytest.MonkeyPatch) -> Measured:
        def errors(model: object, plan: object, rows: torch.Tensor, classes: object, by: PBPFL) -> tuple[float, float]:
            self.asked.add(by.scales)
            found = self.continuous if by.scales == "continuous" else self.powers
            return found[rows.dtype == torch.float32], self.buffers

        def draws(*given: object) -> Iterator[float]:
            for draw in self.draws:
                self.drawn += 1
                yield draw

        monkeypatch.setattr(exactness, "_errors", errors)
        monkeypatch.setattr(exactness, "plain_errors", draws)
        return self


def test_a_model_too_coarse_for_float32_passes_with_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    Measured().put(monkeypatch)
    done = call(*command("mlp", "4"), "--json")
    assert done.code == 0
    assert done.told.keys() == KEYS | {"relative_error_float32_continuous", "plain_error_float32"}
    told = {"passes": True, "passes_continuous": False, "scales": "powers-of-two", "relative_error_float32": 1e-12}
    told |= {"relative_error_float32_continuous": 3e-3, "plain_error_float32": 2e-3}
    assert done.told.items() >= told.items()
    plain = call(*command("mlp", "4"))
    assert plain.code == 0
    assert plain.out.startswith(
        'passes only with scales = "powers-of-two" in float32 (the default, continuous, misses: 3.0e-03)\n'
    )
    assert "free scales: 64" in plain.out
    assert (
        "with continuous scales this model is as exact as its own float32 rounding (3.0e-03, the plain model's own "
        '2.0e-03). To reach the bar set dtype = "float64" (exact, and hides more), or scales = "powers-of-two" at the '
        "price of most of what scales hide, see docs/pbpfl.md"
    ) in plain.out


def test_scales_that_are_asked_for_are_the_only_ones_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured().put(monkeypatch)
    for scales, passes, continuous in (("continuous", False, False), ("powers-of-two", True, None)):
        measured.asked.clear()
        asked = call(*command("mlp", "4"), "--json", "--scales", scales)
        assert asked.code == (0 if passes else 1)
        assert asked.told.keys() == KEYS
        found = asked.told["passes"], asked.told["passes_continuous"], asked.told["scales"]
        assert found == (passes, continuous, scales)
        assert measured.asked == {scales}
    assert measured.drawn == 0


def test_the_fall_back_is_asked_for_and_not_read_off_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    Measured().put(monkeypatch)
    model, given = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), [exactness.Input((4,))]
    for protocol in (PBPFL(), PBPFL(scales="continuous"), PBPFL.model_validate(PBPFL().model_dump())):
        assert not exactness.check(model, given, 3, protocol)["passes"]
        assert exactness.check(model, given, 3, protocol, fall_back=True)["passes"]


@pytest.mark.parametrize(
    ("measured", "powers_measured"),
    [
        (Measured(powers=(1e-12, 2e-3)), True),
        (Measured(powers=(1e-7, 1e-12)), True),
        (Measured(continuous=(1e-7, 3e-3)), False),
        (Measured(buffers=1e-5), False),
        (Measured(continuous=(1e-7, 1e-12)), False),
        (Measured(continuous=(1e-12, 0.9)), False),
        (Measured(continuous=(1e-12, 1.001e-2)), False),
        (Measured(draws=[1e-6] * 16), False),
        (Measured(draws=[9e-5] * 16, continuous=(1e-12, 2e-4)), False),
        (Measured(draws=[1e-6] * 16 + [2e-3]), False),
        (Measured(draws=[0.2] * 16), False),
        (Measured(draws=[1e-6, 0.11, 2e-3]), False),
        (Measured(draws=[float("nan"), *[2e-3] * 15]), False),
        (Measured(continuous=(1e-12, float("nan"))), False),
    ],
    ids=[
        "powers of two miss too", "powers of two miss in float64", "float64 misses too", "statistics miss too",
        "float64 alone misses", "90 % wrong", "more than 5 times the rounding", "the plain model never misses",
        "nor by 5 times", "only the 17th draw misses", "another model in float32", "another model in one draw",
        "a rounding that is no number", "an error that is no number",
    ],
)  # fmt: skip
def test_what_is_not_excused_does_not_pass(
    measured: Measured, powers_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured.put(monkeypatch)
    done = call(*command("mlp", "4"), "--json")
    assert done.code == 1
    assert done.told.keys() == KEYS
    found = done.told["passes"], done.told["passes_continuous"], done.told["scales"]
    assert found == (False, False, "continuous")
    assert (measured.asked == {"continuous", "powers-of-two"}) == powers_measured  # no work that cannot matter
    assert "rounding" not in call(*command("mlp", "4")).out


@pytest.mark.parametrize(
    ("draws", "largest", "drawn"),
    [
        ([1e-6] * 15 + [6.01e-4], 6.01e-4, 16),
        ([6.01e-4, 9e-3], 6.01e-4, 1),
        ([1e-6, 2e-4, 5e-4, 6.1e-4, 9e-3], 6.1e-4, 4),
        ([0.1], 0.1, 1),
    ],
)
def test_the_rounding_that_excuses_is_the_largest_of_as_many_draws_as_it_takes(
    draws: list[float], largest: float, drawn: int
) -> None:
    left = iter(draws)
    assert exactness.excuse(3e-3, left) == largest
    assert len(list(left)) == len(draws) - drawn


def test_the_plain_models_own_error_is_that_of_float32() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 3)).double()
    rows, classes = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found = list(islice(exactness.plain_errors(model, rows, classes, Loss("cross-entropy")), 4))
    assert all(1e-9 < error < 1e-6 for error in found)  # and not 1: dropout drew the same in both
    assert max(found) < 4 * found[0], "weights are moved by about their last bit, by which they are rounded anyway"
    assert len(set(found)) == 4
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("as_json", [True, False])
def test_a_model_that_does_not_pass_is_exit_code_1(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(exactness.BARS, "relative_error_float32", 0.0)  # no rounding is that good
    done = call(*command("mlp", "4"), *["--json"] * as_json)
    assert (done.code, done.err) == (1, "")
    if as_json:
        assert done.told["passes"] is False
    else:
        assert done.out.startswith("does not pass (")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (command("squashed", "4"), r"sigmoid in 1 \(Sigmoid\).*end the model with an nn\.Linear"),
        (command("branch", "4"), r"depends on the other rows of its batch \(sum in the model \(Branch\)\)"),
        (command("linear", "4", classes=2), r"expected a model with 2 outputs, got 3"),
        ([*command("linear", "4"), "--partitions", "4"], r"partitions = 4: expected 1 to 3, the outputs"),
        ([*command("linear", "4"), "--loss", "hinge"], r'--loss "hinge": expected mse or cross-entropy'),
        ([*command("linear", "4"), "--variant", "mine"], r'--variant "mine": expected probabilities or paper'),
        ([*command("linear", "4"), "--scales", "mine"], r'--scales "mine": expected continuous or powers-of-two'),
        ([*command("linear", "4"), "--scales", ""], r'--scales "": expected continuous or powers-of-two'),
        (command("linear", "four"), r"--input four: expected the shape of a row"),
        (command("linear", "0"), r"--input 0: expected the shape of a row"),
        (command("words", "5:int0"), r"--input 5:int0: expected the shape of a row"),
        (command("lineer", "4"), r'no function "lineer"; did you mean "linear"\?'),
        (["check", "--model", "mpl", "--input", "4", "--classes", "2"], r'"mpl" is neither .*; did you mean "mlp"\?'),
        (command("linear", "5"), r"does not run on the example inputs: RuntimeError: .* shapes cannot be multiplied"),
        (command("words", "5"), r"does not run on the example inputs: AssertionError at exactness_models\.py:\d+"),
        (command("linear", "4", "4"), r"does not run on the example inputs: TypeError.* takes 2 positional"),
    ],
)
def test_what_cannot_be_checked_is_one_sentence(arguments: list[str], sentence: str) -> None:
    done = call(*arguments, "--json")
    assert done.code == 2, done
    assert re.search(sentence, done.sentence)
