"""BAFFLE's run files and tables are valid, and the scripts beside them do on tiny cases what they say."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from networks import seeded
from reproduction import choose, find
from torch import nn

from moretta.config import run_files
from moretta.data.domains import DOMAINS
from moretta.data.rows import Rows, Split
from moretta.errors import ParameterError
from moretta.models import catalogue
from moretta.protocols.baffle.cut import blocks_of, cut_of
from moretta.protocols.baffle.params import BAFFLE
from moretta.protocols.baffle.silo.blocks import Rule, gradient
from moretta.protocols.baffle.silo.recipe import Recipe
from moretta.protocols.baffle.silo.work import differences
from moretta.protocols.baffle.torch_blocks import TorchBlocks
from moretta.protocols.baffle.torch_forward import TorchForward, layout_of, partly_trained
from moretta.protocols.common import modules
from moretta.protocols.common.targets import RowLosses
from moretta.protocols.fedsgd.params import FedSGD

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
FOLDER = EXPERIMENTS / "baffle"
NAMES = sorted(name for name, (home, _) in find(EXPERIMENTS).items() if home == FOLDER)
SCRIPTS = (
    "records", "theorem", "memory", "memory_child", "loss_differences", "equal_forwards", "domains", "slices",
    "surrogate", "multiply_adds",
)  # fmt: skip


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The scripts as modules, which find each other as they do when they are run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    found: dict[str, ModuleType] = {}
    for name in SCRIPTS:
        found[name] = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name, raising=False)
    return SimpleNamespace(**found)


@pytest.mark.parametrize("name", ["mnist", "lenet", "wrn", "domains", "backbone"])
def test_run_files_load(name: str) -> None:
    run_file = run_files.load(FOLDER / f"{name}.toml")
    assert run_file.run.seed == 1
    assert run_file.protocol.loss == "cross-entropy"
    assert isinstance(run_file.protocol, BAFFLE) == (name != "backbone")


def test_the_full_run_is_masked_on_ten_silos() -> None:
    run_file = run_files.load(FOLDER / "mnist.toml")
    assert (run_file.data.silos, run_file.data.partition) == (10, "iid")
    assert run_file.secure_aggregation.scheme == "pairwise"
    assert run_file.protocol.form == "mean"
    assert run_file.protocol.optimizer == "adam"


def test_tables_cover_the_paper() -> None:
    one = {f"baffle-table-1-{net}{source}" for net in ("", "wrn-") for source in ("mnist", "cifar10", "cifar100")}
    others = {"mnist", "table-2", "table-2-cifar100", "table-3", "sigma", "directions", "forms", "dp", "rate"}
    others |= {"growing-k", "norm", "own", "epoch-level", "secrets"}
    others |= {
        f"blocks-{name}"
        for name in ("cifar10", "mnist", "cifar100", "ablations", "wrn", "table-2", "domains", "table-3")
    }
    authors = {f"{name}-authors" for name in (*one, "baffle-table-2", "baffle-table-2-cifar100")}
    assert one | {f"baffle-{name}" for name in others} | authors == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_is_a_valid_run(name: str, tmp_path: Path) -> None:
    for folder in ("mnist", "cifar10", "cifar100_subset"):
        (tmp_path / folder).mkdir()
    for quick in (False, True):
        chosen = choose(name, EXPERIMENTS, tmp_path, quick)
        cells = chosen.cells()
        protocols = [chosen.run_file(cell).protocol for cell in cells]
        assert all(isinstance(protocol, BAFFLE | FedSGD) for protocol in protocols)
        assert len({json.dumps(chosen.settings(cell)) for cell in cells}) == len(cells)
        for cell, protocol in zip(cells, protocols, strict=True):
            if cell.levels[0] == "Central":  # as many forward passes as the row that it is compared with
                assert isinstance(protocol, BAFFLE)
                assert 2 * protocol.k == min(
                    one.k for one in protocols if one.name == "baffle" and one.form != "central"
                )


def batch(rows: int, side: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """So many grey images of noise, and classes."""
    random = np.random.default_rng(3)
    return random.random((rows, 1, side, side), dtype=np.float32), np.arange(rows) % 10


def test_exact_scalars_give_the_estimate_that_differences_give(scripts: SimpleNamespace) -> None:
    """The tool that settings are chosen by puts the server's estimate together, of derivatives instead of losses."""
    surrogate, rng = scripts.surrogate, np.random.default_rng(3)
    with seeded():
        model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 2))
    model = model.double().eval()
    layout, x, y = layout_of(model), rng.normal(0, 1, (5, 1, 4, 4)), rng.integers(0, 2, 5)
    for linear in ("scalars", "activations"):
        rule = Rule((("*", 5),), linear)
        graph = cut_of(model, layout, (1, 4, 4), torch.float64)
        blocks = blocks_of(graph, layout, rule)
        recipe = Recipe("central", 1e-5, RowLosses("cross-entropy"), 2, rule=rule).by(blocks, layout.shapes)
        forward, keys = TorchBlocks(model, layout, graph, blocks), recipe.keys(bytes(32), "surrogate", 7)
        at = layout.flat(modules.arrays(model))
        (found,) = differences(recipe, forward, at, [(x, y)], keys)
        wanted = gradient(blocks, layout, found.derivatives.mean(axis=1), found.estimate, keys)
        loss = nn.functional.cross_entropy(model(torch.tensor(x)), torch.tensor(y))
        named = dict(model.named_parameters())
        exact = {
            name: part.numpy() for name, part in zip(named, torch.autograd.grad(loss, named.values()), strict=True)
        }
        np.testing.assert_allclose(surrogate.estimated(recipe, layout, exact, 7), wanted, atol=1e-6)


def test_multiply_adds_are_those_of_the_products(scripts: SimpleNamespace, tmp_path: Path) -> None:
    counts = scripts.multiply_adds
    model, forward = nn.Sequential(nn.Linear(30, 20, bias=False), nn.Linear(20, 10, bias=False)), 30 * 20 + 20 * 10
    assert counts.counted(model, (30,), backward=False) == forward
    assert counts.counted(model, (30,), backward=True) == forward + 30 * 20 + 2 * 20 * 10  # none to the inputs
    found, moves = counts.by_blocks(model, (30,), counts.BY_BLOCKS["activations"])
    assert moves == 30
    assert found == forward + 20 * (20 * 10)  # each of 20 hidden units moves what the last layer reads
    record = counts.measure(Namespace(out=tmp_path, quick=True))
    shares = {row.row.removeprefix("LeNet, 3 x 32 x 32, "): row.ours[1] for row in record.rows}
    assert shares["by blocks, activations"] < 20
    assert shares["all at once, K = 100"] == 100


def test_the_estimate_is_as_far_from_the_gradient_as_the_theorem_says(scripts: SimpleNamespace) -> None:
    theorem = scripts.theorem
    model = catalogue.build("mlp", inputs=(1, 16, 16), outputs=10, seed=1, hidden=[4])
    x, y = batch(4)
    rows = list(theorem.rows_of(model, x, y, (64, 256), 768, "here"))
    assert [row.row for row in rows[::2]] == [f"here, {kind}, K = 64" for kind in theorem.KINDS]
    for row in rows:
        error, _, says, cosine, near = row.ours
        assert error == pytest.approx(says, rel=0.25)
        assert cosine == pytest.approx(near, rel=0.4)
    assert theorem.expected("rademacher", 101, 25, "base") == 2.0
    assert theorem.expected("rademacher", 200, 8) ** 2 == pytest.approx(199 / 7 + 2 / 56)
    assert theorem.expected("orthogonal", 64, 65) == 0.0


@pytest.mark.parametrize("form", ["base", "mean"])
def test_the_expected_error_is_that_of_a_loss_without_curvature(form: str, scripts: SimpleNamespace) -> None:
    """n = 200 and K = 8, where the forms are far apart: for Rademacher directions 24.9 (base) and 28.5 (mean)."""
    n, k, rounds, theorem = 200, 8, 1500, scripts.theorem
    truth = np.random.default_rng(2).normal(size=n)
    for kind in theorem.KINDS:
        found = []
        for draw in range(rounds):
            keys = theorem.keys_of(bytes(32), k, "expected", kind, draw, orthogonal=kind == "orthogonal")
            distribution = "rademacher" if kind == "orthogonal" else kind
            directions = theorem.Directions(keys, k, n, distribution, orthogonal=kind == "orthogonal")
            along = np.stack([directions.combine(one) for one in np.eye(k)]) @ truth
            along -= along.mean() if form == "mean" else 0
            found.append(np.square(theorem.gradient(form, along, directions) - truth).sum() / np.square(truth).sum())
        error = np.std(found, ddof=1) / np.sqrt(rounds)
        assert np.mean(found) == pytest.approx(theorem.expected(kind, n, k, form) ** 2, abs=4 * error)
        assert 4 * error < n / k / (k - 1)  # less than the two forms are apart


def test_uploads_of_silos_mean_the_upload_of_all_their_rows(scripts: SimpleNamespace) -> None:
    figure = scripts.loss_differences
    model = catalogue.build("lenet", inputs=(1, 16, 16), outputs=10, seed=1)
    x, y = batch(40)
    found = figure.uploads(model, x, y, rounds=2, batch=2, k=16)
    assert found.shape == (2, 10, 16)
    again = figure.uploads(model, x[::-1].copy(), y[::-1].copy(), rounds=2, batch=2, k=16)
    assert not np.allclose(found[0].mean(0), again[0].mean(0))  # other rows
    order = [*range(19, -1, -1), *range(20, 40)]
    same = figure.uploads(model, x[order], y[order], rounds=2, batch=2, k=16)
    np.testing.assert_allclose(found.mean(1), same.mean(1), atol=2e-3)  # the same rows, at other silos
    data_of = figure.kinds(*batch(400), 160)
    rows = figure.rows_of(model, data_of, "start", batch=4, k=16)
    assert len(rows) == 6
    assert all(len(row.ours) == len(figure.COLUMNS) for row in rows)


def test_the_classifier_tells_what_differs_and_nothing_else(scripts: SimpleNamespace) -> None:
    told_apart, random = scripts.loss_differences.told_apart, np.random.default_rng(6)
    ones, others = random.normal(size=(2, 20, 10, 3))
    accuracy, p = told_apart(ones, others + 4.0)
    assert accuracy > 0.95
    assert p < 1e-6
    accuracy, p = told_apart(ones, others)
    assert 0.35 < accuracy < 0.65
    assert p > 0.01


def test_memory_is_that_of_another_process(scripts: SimpleNamespace) -> None:
    memory = scripts.memory
    assert 20 < memory.peak("forward", "lenet", 2, 16) < 2000
    with pytest.raises(ParameterError, match="nonesuch"):
        memory.peak("nonesuch", "lenet", 2, 16)
    assert {(model, side) for model, side, _ in memory.CASES} == set(memory.PAPER)


def test_memory_rows_hold_ratios(scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"torch": 200.0, "backprop": 400.0, "forward": 300.0, "export": 0.0, "edge": 60.0}
    monkeypatch.setattr(scripts.memory, "peak", lambda mode, *_: peaks[mode])
    for there, edge in ((True, (60.0, 75.0, 15.0)), (False, (None, 75.0, None))):
        monkeypatch.setattr(scripts.memory, "has_edge", lambda there=there: there)
        row = scripts.memory.row_of("lenet", 32, 64)
        assert tuple(row.ours) == (200.0, 400.0, 300.0, *edge)
        assert row.paper == (None, 1680, 174, None, 10.35, None)


def test_equal_forward_passes_are_other_rounds(scripts: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(
        '[run]\nrounds = 1\n[data]\nsource = "digits"\nsilos = 2\n[model]\nsource = "mlp"\nhidden = []\n'
        '[protocol]\nname = "baffle"\nloss = "cross-entropy"\n'
    )
    few, many = (scripts.equal_forwards.row_of(path, k, 40, ()) for k in (4, 20))
    assert (few.ours[2], many.ours[2]) == (10.0, 2.0)
    assert few.ours[3] == pytest.approx(5 * many.ours[3], rel=0.05)
    assert few.facts["facts"]["forwards"] == many.facts["facts"]["forwards"] == 40


@pytest.fixture
def network() -> torch.nn.Sequential:
    """A network for small colour images whose BatchNorm has seen some."""
    model = catalogue.build("wrn", inputs=(3, 16, 16), outputs=4, seed=2, width=1, norm="batch")
    model.train()
    model(torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(1)))
    assert isinstance(model, torch.nn.Sequential)
    return model


def test_the_last_layer_on_features_is_the_whole_network_with_the_rest_frozen(
    scripts: SimpleNamespace, network: torch.nn.Sequential, tmp_path: Path
) -> None:
    domains = scripts.domains
    model = catalogue.build("wrn", inputs=(3, 16, 16), outputs=10, seed=1, width=1, norm="frozen-batch")
    domains.warm_start(network, model, tmp_path / "start.safetensors")
    modules.load(model, modules.read_state_dict(tmp_path / "start.safetensors"))
    np.testing.assert_array_equal(modules.arrays(model)["0.weight"], modules.arrays(network)["0.weight"])
    assert modules.arrays(model)["8.weight"].shape == (10, 64)

    x = np.random.default_rng(1).random((6, 3, 16, 16), dtype=np.float32)
    trunk, head = domains.split(model)
    whole, alone = partly_trained(model, ["8"]), torch.nn.Sequential(head)
    layouts = [layout_of(one) for one in (whole, alone)]
    assert list(layouts[0].shapes.values()) == list(layouts[1].shapes.values())
    at = np.random.default_rng(1).normal(size=(2, layouts[0].size)).astype(np.float32)
    theirs = TorchForward(whole, layouts[0]).outputs(at, x)
    ours = TorchForward(alone, layouts[1]).outputs(at, domains.features(trunk.eval(), x))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_each_domain_is_scored_by_itself(scripts: SimpleNamespace, network: torch.nn.Sequential) -> None:
    domains, random = scripts.domains, np.random.default_rng(5)
    x, y = random.random((48, 3, 16, 16), dtype=np.float32), np.arange(48) % 4
    parts = (Rows(x[:32], y[:32]), Rows(x[32:], y[32:]), Rows(x[:0], y[:0]))
    images = Split(*parts, "tiny", "classification", classes=4, standardise=False)
    run_file = run_files.load(FOLDER / "domains.toml", ["data.silos=4", "run.rounds=2", "data.batch-size=4"])
    trunk, head = domains.split(network)
    silos, tests = domains.dealt(run_file, images, trunk.eval())
    assert [silo.x.shape for silo in silos] == [(8, 64)] * 4
    assert {name: len(part[1]) for name, part in tests.items()} == dict.fromkeys(DOMAINS, 4)
    protocol = run_file.protocol.model_copy(update={"trainable": (), "warm_start": None, "k": 8})
    row = domains.row_of("K = 8", run_file, protocol, head, silos, tests)
    assert len(row.ours) == 5
    assert row.ours[4] == pytest.approx(np.mean(row.ours[:4]))


def test_results_are_kept_row_by_row_and_errors_are_sentences(
    scripts: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = scripts.records
    record = records.Record(tmp_path / "new" / "one.json", "A title", ("a", "b"), {"seed": 1})
    record.add(records.Row("first", (1.0, None), (2.0, None)))
    kept = json.loads(record.path.read_text())
    assert kept["rows"] == [{"row": "first", "ours": [1.0, None], "paper": [2.0, None], "facts": {}}]
    assert "first: 1 (2)  -" in record.printed()
    given = Namespace(data=tmp_path, out=tmp_path, quick=True)
    assert records.name_of(given, "x") == tmp_path / "x-quick.json"
    assert records.run(scripts.theorem.measure, given) == 2
    assert "mnist" in capsys.readouterr().err


def test_slices_of_a_model_give_its_losses(scripts: SimpleNamespace) -> None:
    """`row_of` compares them. A whole process is measured, so only that there is something is held here."""
    row = scripts.slices.row_of("wrn", 16, 2)  # with shortcuts, so that more than one tensor lies between slices
    assert row.ours[-1] > 5
    assert all(figure is not None and figure > 0 for figure in row.ours)
