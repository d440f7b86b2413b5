"""Adapters by the library `peft` itself on models of transformers, of random weights, against plain PyTorch."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import seeded
from test_cli import call
from torch import Tensor, nn

from moretta import BAFFLE, FedAvg, Federation, FedSGD, Silo
from moretta.secure_aggregation.settings import SecureAggregation

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the libraries' own
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

WORDS, LENGTH, CLASSES, ROWS = 11, 6, 3, 8
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": LENGTH,
}  # fmt: skip


def classifier() -> nn.Module:
    """Return BERT with adapters and a head that is trained whole."""
    config = transformers.BertConfig(
        **SIZES, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    wanted = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    with seeded():
        found: nn.Module = peft.get_peft_model(transformers.BertForSequenceClassification(config), wanted)
    return found


def language() -> nn.Module:
    """Return a Llama that says the next word, with adapters alone."""
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1)
    wanted = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
    with seeded():
        found: nn.Module = peft.get_peft_model(transformers.LlamaForCausalLM(config), wanted)
    return found


def rows(build: Callable[[], nn.Module], seed: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).integers(1, WORDS, (ROWS, LENGTH))
    if build is classifier:
        return x, x.sum(axis=1) % CLASSES
    return x, np.concatenate([x[:, 1:], np.full((ROWS, 1), -1)], axis=1)


def plain_loss(model: nn.Module, x: np.ndarray, y: np.ndarray) -> Tensor:
    outputs, targets = model(input_ids=torch.tensor(x)).logits, torch.tensor(y)
    if outputs.ndim == 3:
        outputs = outputs.movedim(-1, 1)
    total = nn.functional.cross_entropy(outputs, targets, ignore_index=-1, reduction="sum")
    return total / targets.numel()


def federation(build: Callable[[], nn.Module], protocol: Any, dtype: str) -> Federation:
    silos = [Silo(name, *rows(build, seed)) for seed, name in enumerate("ab")]
    return Federation(
        build(), silos, protocol, dtype=dtype, batch_size=0, aggregation=SecureAggregation(scheme="none"),
        insecure_secret_seed=1,
    )  # fmt: skip


@pytest.mark.parametrize("protocol", [FedSGD, FedAvg])
@pytest.mark.parametrize("build", [classifier, language])
def test_adapters_train_as_in_pytorch(build: Callable[[], nn.Module], protocol: Callable[..., Any]) -> None:
    own = {"local_epochs": 1} if protocol is FedAvg else {}
    made = federation(build, protocol(loss="cross-entropy", learning_rate=0.5, **own), "float64")
    ours = made.train(3, progress=False).raw_model(true_model=True).network
    plain = build().double()
    begin = copy.deepcopy(dict(plain.named_parameters()))
    trained = {name: one for name, one in plain.named_parameters() if one.requires_grad}
    for _ in range(3):
        loss = sum((plain_loss(plain, *rows(build, seed)) for seed in (0, 1)), torch.zeros(())) / 2
        for one, gradient in zip(trained.values(), torch.autograd.grad(loss, list(trained.values())), strict=True):
            one.data.sub_(0.5 * gradient)
    assert any("lora_B" in name for name in trained)
    for name, one in plain.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), one, rtol=0, atol=5e-7)  # of fixed point in the sum
        assert name in trained or torch.equal(one, begin[name])


@pytest.mark.parametrize("build", [classifier, language])
@pytest.mark.parametrize("perturb", ["weights", "blocks"])
def test_adapters_train_by_forward_passes(build: Callable[[], nn.Module], perturb: str) -> None:
    own: dict[str, Any] = {"perturb": "blocks", "k": {"*": 8}} if perturb == "blocks" else {"k": 16}
    made = federation(build, BAFFLE(loss="cross-entropy", learning_rate=0.02, **own), "float32")
    result = made.train(10, progress=False)
    with torch.no_grad():
        wanted = np.mean([float(plain_loss(build().eval(), *rows(build, seed))) for seed in (0, 1)])
    assert result.history[0]["loss"] == pytest.approx(wanted, rel=0.05)  # baffle's is at moved parameters
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    ours, first = result.raw_model(true_model=True).network, build()
    for name, one in first.named_parameters():
        assert one.requires_grad or torch.equal(ours.get_parameter(name), one)


@pytest.mark.parametrize("name", ["fedsgd", "fedavg", "baffle"])
def test_a_run_file_trains_adapters(name: str, tmp_path: Path) -> None:
    x, y = rows(classifier, 0)
    np.savez(tmp_path / "rows.npz", x=np.concatenate([x] * 3), y=np.concatenate([y] * 3))
    (tmp_path / "test_adapters_of_peft.py").write_text(Path(__file__).read_text())
    (tmp_path / "run.toml").write_text(
        '[run]\nrounds = 2\n[data]\nsource = "rows.npz"\nsilos = 3\n'
        '[model]\nsource = "test_adapters_of_peft:classifier"\n'
        f'[protocol]\nname = "{name}"\nloss = "cross-entropy"\n' + ("k = 4\n" if name == "baffle" else "")
    )
    done = call("train", tmp_path / "run.toml", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "out" / "result.json").read_text())["test"]["accuracy"] >= 0
