"""Lightning's and Hugging Face's Trainer train silos here and at sites; needs lightning, transformers and accelerate.

pip install lightning transformers accelerate
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import trainers
from blocks import blocks
from torch import Tensor, nn

from moretta import FedAvg, Federation, FedProx, Silo
from moretta.errors import ParameterError, PolicyError, RunFailed

if TYPE_CHECKING:
    from loopback import Machines

LOOPS = {"lightning": trainers.with_lightning, "transformers": trainers.with_hugging_face}
pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # theirs, of their own insides


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) for name in LOOPS])
def loop(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip(request.param)
    return LOOPS[request.param]


def rows(number: int, seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (number,), generator=drawn)
    return torch.eye(3, 4)[y] * 2 + torch.randn(number, 4, generator=drawn), y


def trained(fit: Any, protocol: Any = FedAvg, rounds: int = 3, **given: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    held = [Silo(name, *rows(size, seed)) for seed, (name, size) in enumerate({"north": 40, "south": 56}.items())]
    federation = Federation(model, held, protocol(loss="cross-entropy", fit=fit, **given), test=rows(200, 9))
    return federation.train(rounds, 7, progress=False)


def test_a_trainer_comes_to_what_its_steps_come_to(loop: Any) -> None:
    theirs, by_hand = trained(loop), trained(trainers.by_hand)
    torch.testing.assert_close(theirs.model.state_dict(), by_hand.model.state_dict(), rtol=0, atol=1e-5)
    assert theirs.test["accuracy"] > 0.7
    assert [line["rows"] for line in theirs.history] == [96.0] * 3


def test_fedprox_pulls_a_trainer(loop: Any) -> None:
    theirs, by_hand, free = trained(loop, FedProx, mu=2.0), trained(trainers.by_hand, FedProx, mu=2.0), trained(loop)
    torch.testing.assert_close(theirs.model.state_dict(), by_hand.model.state_dict(), rtol=0, atol=1e-5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(theirs.model.state_dict(), free.model.state_dict(), rtol=0, atol=1e-3)


def test_a_trainer_whose_loss_is_nan_is_named(loop: Any) -> None:
    def fit(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Any:
        return loop(model, x * float("nan"), y, number)

    with pytest.raises(ParameterError, match="has NaN or infinity"):
        trained(fit)


PAGES = Path(__file__).parents[2] / "docs"


def of_page(name: str) -> dict[str, Any]:
    """Return what the first block of a page defines."""
    found: dict[str, Any] = {}
    code = next(one for one in blocks((PAGES / name).read_text(encoding="utf-8")) if one.word == "python")
    exec(code.text, found)  # noqa: S102
    return found


@pytest.mark.slow
def test_the_loop_of_the_page_on_lightning_learns() -> None:
    pytest.importorskip("lightning")
    losses = [line["loss"] for line in trained(of_page("lightning.md")["fit"]).history]
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.slow
def test_the_loop_of_the_page_on_hugging_face_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    small = transformers.BertConfig(
        vocab_size=12, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    auto = transformers.AutoModelForSequenceClassification
    monkeypatch.setattr(auto, "from_pretrained", lambda name, num_labels: auto.from_config(small))
    page = of_page("hugging-face.md")
    held = []
    for seed, name in enumerate(["north", "south"]):
        drawn = np.random.default_rng(seed)
        y = drawn.integers(0, 2, 64)
        ids = drawn.integers(1, 6, (64, 5)) + 6 * y[:, None]
        mask = np.ones_like(ids)
        ids[:, 4], mask[:, 4] = 0, 0
        held.append(Silo(name, {"input_ids": ids, "attention_mask": mask}, y))
    torch.manual_seed(0)
    protocol = FedAvg(loss="cross-entropy", fit=page["fit"])
    result = Federation(page["Classifier"](), held, protocol, task="classification").train(3, 7, progress=False)
    losses = [line["loss"] for line in result.history]
    assert losses[2] < losses[1] < losses[0]


@pytest.fixture(autouse=True)
def _no_module_is_left() -> Iterator[None]:
    yield
    sys.modules.pop("loops_at_sites", None)


def at_sites(many: Machines, loop: str, *agreed: str) -> None:
    """Put the loops beside the run file and each silo.toml; the sites named agree to run this one."""
    for path in (many.folder / "here.toml", many.folder / "many.toml"):
        path.write_text(path.read_text().replace('name = "fedavg"', f'name = "fedavg"\nfit = "{loop}"'))
    for folder in (many.folder, *(many.folder / name for name in many.names)):
        shutil.copy(trainers.__file__, folder / "loops_at_sites.py")
    for name in agreed:
        path = many.folder / name / "silo.toml"
        path.write_text(path.read_text().replace("[data]", f'models = ["{loop}"]\n[data]', 1))
    many.reread()


def train_at_sites(many: Machines, out: Path) -> Any:
    many.start()
    return many.serve(out)


FEDAVG = 'name = "fedavg"\nloss = "cross-entropy"'


@pytest.mark.parametrize("name", ["by_hand", *(pytest.param(name, marks=pytest.mark.slow) for name in LOOPS)])
def test_sites_train_by_a_loop_what_one_machine_trains(
    name: str, machines: Callable[..., Machines], tmp_path: Path
) -> None:
    if name in LOOPS:
        pytest.importorskip(name)
    loop = LOOPS.get(name, trainers.by_hand)
    many = machines(FEDAVG, rounds=2)
    at_sites(many, f"loops_at_sites:{loop.__name__}", *many.names)
    one, out = tmp_path / "one", tmp_path / "many"
    many.on_one_machine(one).train(many.rounds, 7, progress=False)
    result = train_at_sites(many, out)
    assert result.record["dropped"] == []
    assert result.record["settings"]["protocol"]["fit"] == f"loops_at_sites:{loop.__name__}"
    assert (out / "released.safetensors").read_bytes() == (one / "released.safetensors").read_bytes()


def test_a_site_that_has_not_agreed_to_a_loop_runs_none_of_it(
    machines: Callable[..., Machines], tmp_path: Path
) -> None:
    many = machines(FEDAVG, rounds=2)
    at_sites(many, "loops_at_sites:by_hand", "silo-1", "silo-2")
    with pytest.raises(PolicyError, match="is code that this site has not agreed to run"):
        many._site("silo-3", many.folder / "silo-3" / "silo.toml")
    with pytest.raises(RunFailed, match=r"silo-3: .protocol. fit = 'loops_at_sites:by_hand' of the run is code that"):
        train_at_sites(many, tmp_path / "many")
