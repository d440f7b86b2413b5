"""Models of libraries by their names, and what they return and are called with; no library is needed.

The libraries' own are tried by benchmarks/architectures.py.
"""

from __future__ import annotations

import json
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from networks import seeded
from safetensors.torch import save_file
from torch import Tensor, nn

from moretta import BAFFLE, CGD, PBPFL, FedAvg, Federation, FedSGD, Silo
from moretta.data.layout import InputArray, SampleLayout
from moretta.data.references import OWN_CODE
from moretta.errors import MissingExtra, ParameterError
from moretta.models import catalogue
from moretta.models.hooks import OneTensor, argument_names
from moretta.secure_aggregation.settings import SecureAggregation

CLEAR = SecureAggregation(scheme="none")


class Config:
    """As a configuration of transformers."""

    attribute_map: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, hidden_size: int = 4, num_labels: int = 2, attn_implementation: str = "eager") -> None:
        self.hidden_size, self.num_labels, self.use_cache = hidden_size, num_labels, True

    @classmethod
    def from_pretrained(cls, folder: Path, *, local_files_only: bool, **changed: Any) -> Config:
        assert local_files_only
        return cls(**json.loads((folder / "config.json").read_text()) | changed)


class Classifier(nn.Module):
    """As a model of transformers: inputs by keyword, an object with logits."""

    config_class, main_input_name = Config, "input_ids"

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.words, self.score = nn.Embedding(30, config.hidden_size), nn.Linear(config.hidden_size, config.num_labels)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None, **rest: Any
    ) -> Any:
        h = torch.relu(self.words(input_ids))
        mask = torch.ones(h.shape[:2]) if attention_mask is None else attention_mask
        pooled = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return SimpleNamespace(logits=self.score(pooled), hidden_states=pooled, past=(h, h))

    @classmethod
    def from_pretrained(cls, folder: Path, *, config: Config, local_files_only: bool, use_safetensors: bool) -> Any:
        assert local_files_only
        assert use_safetensors
        model = cls(config)
        nn.init.constant_(model.score.bias, 7.0)
        return model


def pictured(pretrained: bool = False, weights: str | None = "FROM_THE_NET", outputs: int = 3) -> nn.Module:
    assert not pretrained
    assert weights is None
    return nn.Linear(4, outputs)


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of these names that have the classes above."""
    transformers, torchvision, models = (ModuleType(name) for name in ("transformers", "torchvision", "models"))
    transformers.Classifier, models.pictured = Classifier, pictured  # type: ignore[attr-defined]
    for name, module in {
        "transformers": transformers,
        "torchvision": torchvision,
        "torchvision.models": models,
        "torchvision.models.segmentation": ModuleType("segmentation"),
        "torchvision.models.video": ModuleType("video"),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)


def built(source: str, **arguments: Any) -> Any:
    return catalogue.build(source, inputs=(6,), outputs=3, agreed=OWN_CODE, **arguments)


def test_a_configuration_is_made_of_the_section_and_the_data_s_classes() -> None:
    model = built("transformers:Classifier", **{"hidden-size": 5})
    assert (model.score.in_features, model.score.out_features) == (5, 3)
    assert not model.config.use_cache
    assert model(torch.arange(6).reshape(1, 6)).shape == (1, 3)
    assert built("transformers:Classifier", **{"num-labels": 7}).score.out_features == 7
    assert built("torchvision:pictured").out_features == 3  # nothing of the net


def test_a_folder_has_configuration_and_perhaps_weights(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text('{"hidden_size": 6}')
    model = built("transformers:Classifier", folder="own", num_labels=3, base=tmp_path)
    assert model.words.embedding_dim == 6
    save_file({"a": torch.zeros(1)}, tmp_path / "own" / "model.safetensors")
    assert (built("transformers:Classifier", folder="own", base=tmp_path).score.bias == 7.0).all()
    with pytest.raises(ParameterError, match=r"\[model\] folder = .*expected one within the run's own folder"):
        catalogue.build(
            "transformers:Classifier", inputs=(6,), outputs=3, base=tmp_path / "own", folder="..",
            agreed=["transformers:Classifier"],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("source", "arguments", "said"),
    [
        (
            "transformers:Classifier",
            {"hiden_size": 3},
            'Config has no setting `hiden_size`; did you mean "hidden_size"?',
        ),
        ("transformers:Classifier", {"trust_remote_code": True}, "a folder's code is never run"),
        ("transformers:Classifier", {"folder": "nowhere"}, "expected a folder with config.json"),
        ("transformers:Clasifier", {}, 'module "transformers" has no function "Clasifier"'),
        ("torchvision:pictured", {"weights": "DEFAULT"}, r"\[model\] weights = \"DEFAULT\" loads weights from the net"),
        ("torchvision:pictured", {"pretrained": True}, r"\[model\] pretrained = true loads weights from the net"),
        (
            "transformers:Classifier",
            {"weights": "DEFAULT"},
            r"\[model\] weights = \"DEFAULT\" loads weights from the net",
        ),
        ("transformers:Classifier", {"attn-implementation": "a/kernel"}, "may load code or weights from elsewhere"),
        ("torchvision:pictured", {"kind": ["plain", "hf-hub:a"]}, "may load code or weights from elsewhere"),
    ],
)
def test_what_cannot_be_built_is_refused(source: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        built(source, **arguments)


def test_a_server_names_no_kernels_that_transformers_fetches() -> None:
    """By an allowed model's argument a site ran the code of any repository, where `kernels` is installed."""
    source = "transformers:Classifier"
    for kernel in ("owner/repository", "flash_attention_2", "deepgemm"):
        with pytest.raises(ParameterError, match="expected eager, sdpa"):
            catalogue.build(source, inputs=(6,), outputs=3, agreed=[source], attn_implementation=kernel)
    catalogue.build(source, inputs=(6,), outputs=3, agreed=[source], attn_implementation="sdpa")
    built(source, attn_implementation="flash_attention_2")


def test_a_library_that_is_not_installed_is_named_with_the_line_that_installs_it() -> None:
    with pytest.raises(MissingExtra, match="needs segmentation-models-pytorch; run: pip install segmentation-models"):
        built("segmentation_models_pytorch:Unet")
    with pytest.raises(ParameterError, match="has not agreed to run"):
        catalogue.build("segmentation_models_pytorch:Unet", inputs=(6,), outputs=3, agreed=())


Pair = namedtuple("Pair", ["outputs", "state"])
Y, LONG = torch.ones(2, 3), torch.ones(5, 2)


@pytest.mark.parametrize(
    ("output", "name", "shape"),
    [
        ({"logits": Y, "loss": torch.ones(()), "hidden": torch.ones(2, 4)}, "", (2, 3)),
        ({"out": torch.ones(2, 3, 4, 4), "aux": torch.ones(2, 3, 4, 4)}, "", (2, 48)),
        ({"out": Y, "aux": torch.ones(2, 5)}, "aux", (2, 5)),
        ((Y, LONG), "", (2, 3)),
        ([Y], "", (2, 3)),
        (Pair(Y, (LONG, LONG)), "", (2, 3)),
        (Pair(Y, torch.ones(2, 9)), "state", (2, 9)),
        (torch.ones(2), "", (2, 1)),
        (torch.ones(2, 7, 3), "", (2, 21)),
    ],
)
def test_one_tensor_is_taken(output: Any, name: str, shape: tuple[int, ...]) -> None:
    assert OneTensor(name).taken(output, 2).shape == shape


@pytest.mark.parametrize(
    ("output", "name", "said"),
    [
        ({"a": Y, "b": Y}, "", "returns 2 outputs that could be trained; it returns a or b: name one by"),
        ({"a": Y, "b": Y}, "c", "returns no output `c` of floats, one a row; it returns a or b: name one by"),
        ((Y, Y), "", "returns 2 outputs that could be trained; it returns 0 or 1"),
        ({"a": Y.long()}, "", "returns 0 outputs that could be trained; it returns a"),
        (Y, "logits", "returns no output `logits`"),
        (None, "", "returns 0 outputs that could be trained; it returns NoneType"),
    ],
)
def test_where_none_or_several_fit_the_names_are_told(output: Any, name: str, said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        OneTensor(name).taken(output, 2)


def layout(*names: str) -> SampleLayout:
    return SampleLayout(tuple(InputArray(name, (6,), integers=name.endswith("ids")) for name in names))


def test_arrays_find_their_arguments() -> None:
    model = Classifier(Config())
    wanted = {"ids": "input_ids", "mask": "attention_mask"}
    assert argument_names(model, layout("ids", "mask")) == wanted
    assert argument_names(model, layout("input_ids", "token_type_ids"))["input_ids"] == "input_ids"
    with pytest.raises(
        ParameterError, match="array `table`: Classifier has no argument of this name; rename it to input_ids, att"
    ):
        argument_names(model, layout("ids", "table"))


def padded(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"ids": random.integers(1, 30, size=(12, 6)), "mask": np.arange(6) < random.integers(1, 7, size=(12, 1))}


def silos() -> list[Silo]:
    return [Silo(name, padded(seed), np.arange(12) % 3) for seed, name in enumerate("ab")]


class ByHand(Classifier):
    def forward(self, ids: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        return super().forward(ids, mask).logits


def plain(kind: type[Classifier] = Classifier) -> Classifier:
    with seeded():
        return kind(Config(5, 3))


@pytest.mark.parametrize(
    "protocol",
    [
        lambda: FedSGD(loss="cross-entropy"),
        lambda: FedAvg(loss="cross-entropy"),
        lambda: PBPFL(loss="cross-entropy"),
        lambda: CGD(loss="cross-entropy"),
        lambda: BAFFLE(loss="cross-entropy", k=8),
        lambda: BAFFLE(loss="cross-entropy", perturb="blocks", k={"*": 4}),
    ],
)
def test_an_object_as_it_comes_trains_as_wrapped_by_hand(protocol: Callable[[], Any]) -> None:
    found = []
    for model in (plain(), plain(ByHand)):
        made = Federation(model, silos(), protocol(), dtype="float64", aggregation=CLEAR, insecure_secret_seed=1)
        found.append(made.train(2, progress=False))
    silo = "a" if found[0].model is None else None  # of CGD each has its own
    models = [run.raw_model(silo=silo).network for run in found]
    one, other = ([value.detach().numpy() for value in model.parameters()] for model in models)
    for ours, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert found[0].predict(padded(5), silo=silo).shape == (12,)


def test_a_run_s_model_is_saved_and_exported_with_its_one_tensor(tmp_path: Path) -> None:
    from moretta import load

    result = Federation(plain(), silos(), FedSGD(loss="cross-entropy"), aggregation=CLEAR).train(1, progress=False)
    x = padded(5)
    again = load(result.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict(x), result.predict(x))
