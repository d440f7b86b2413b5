"""What ordinary training needs, for every protocol: schedules, clipping, early stopping, participation, and so on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from refused_rows import Row, refused
from safetensors.torch import save_file
from torch import nn

from moretta import CGD, PBPFL, Centralised, FedAvg, Federation, FedSGD, Local, Result, SecureAggregation, Silo
from moretta.errors import ParameterError
from moretta.protocols.common.augmentation import CROPS, PADDING, crop_and_flip, cropped, turned
from moretta.protocols.common.modules import first_weights
from moretta.protocols.common.training import Training

FEDERATED = [FedSGD, FedAvg, PBPFL, Centralised, Local]
PLAIN = SecureAggregation(scheme="none")
random = np.random.default_rng(0)
TRUTH = random.normal(size=(5, 1))


def rows_of(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, 5))
    return x, (x @ TRUTH + 0.3 * generator.normal(size=(count, 1)) > 0).astype(np.int64)[:, 0]


SILOS = [Silo(name, *rows_of(40 + 7 * number, number)) for number, name in enumerate("abcd")]


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))


def run(protocol: Training, rounds: int = 6, **settings: object) -> Result:
    given = {"aggregation": PLAIN, "dtype": "float64", "batch_size": 16} | settings
    return Federation(model(), SILOS, protocol, test=rows_of(50, 9), **given).train(rounds, seed=5)  # type: ignore[arg-type]


def weights(result: Result) -> np.ndarray:
    modules = [result.model] if result.model is not None else list(result.models.values())
    return np.concatenate([value.detach().numpy().ravel() for m in modules for value in m.parameters()])


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.2] * 8),
        ("step", [0.2] * 4 + [0.02] * 2 + [0.002] * 2),
        ("cosine", [0.1 * (1 + np.cos(np.pi * k / 8)) for k in range(8)]),
    ],
)
def test_rates_follow_their_schedule(schedule: str, rates: list[float]) -> None:
    training = Training(learning_rate=0.2, lr_schedule=schedule)  # type: ignore[arg-type]
    assert [training.rate(number, 8) for number in range(1, 9)] == pytest.approx(rates)


@pytest.mark.parametrize("decay_from", [0, 3])
@pytest.mark.parametrize("mu", [0.0, 0.25, 0.9])
def test_cgds_rate_begins_at_alpha_and_decays_as_stated(mu: float, decay_from: int) -> None:
    """alpha until `decay_from`, and at the first decaying round; then alpha ((1 + mu T) / (k + mu T))^2."""
    alpha, rounds = 0.2, 13
    cgd = CGD(learning_rate=alpha, schedule="inverse-square", mu=mu, decay_from=decay_from)
    rates = [cgd.rate(number, rounds) for number in range(1, rounds + 1)]
    assert rates[: decay_from + 1] == [alpha] * (decay_from + 1)
    left = rounds - decay_from
    decaying = [alpha * ((1 + mu * left) / (k + mu * left)) ** 2 for k in range(1, left + 1)]
    assert rates[decay_from:] == pytest.approx(decaying, rel=1e-15)
    assert rates[decay_from:] == sorted(rates[decay_from:], reverse=True)
    assert len(set(rates[decay_from:])) == left
    if mu == 0:
        assert rates[decay_from:] == pytest.approx([alpha / k**2 for k in range(1, left + 1)])


def test_cgds_rate_is_constant_unless_it_is_to_decay() -> None:
    assert [CGD(learning_rate=0.2).rate(number, 9) for number in range(1, 10)] == [0.2] * 9
    assert {CGD().rate(number, 9) for number in range(1, 10)} == {0.5}


def test_a_round_of_cgd_steps_by_its_rate() -> None:
    """Two rounds at the full rate are the same; of the third round's step, the decayed one is its part."""
    decaying = CGD(loss="mse", learning_rate=0.3, schedule="inverse-square", mu=0.5, decay_from=1)
    constant = CGD(loss="mse", learning_rate=0.3)
    begun, decayed, full = run_of_cgd(constant, 2), run_of_cgd(decaying, 3), run_of_cgd(constant, 3)
    assert list(begun) == [silo.name for silo in SILOS]
    part = decaying.rate(3, 3) / 0.3
    assert part == pytest.approx((2 / 3) ** 2)
    for name, before in begun.items():
        np.testing.assert_array_equal(before, run_of_cgd(decaying, 2)[name])
        step = full[name] - before
        assert np.abs(step).max() > 1e-5
        # Weights of about 0.02, each rounded to 2^-53 of itself.
        np.testing.assert_allclose(decayed[name] - before, part * step, rtol=0, atol=1e-16)


def run_of_cgd(params: CGD, rounds: int) -> dict[str, np.ndarray]:
    """Return what participants' first layers are after some rounds of three."""
    federation = Federation(model(), SILOS, params, dtype="float64", batch_size=0, insecure_secret_seed=3)
    from moretta.contract.codec import Codec
    from moretta.engines.driver import Driver
    from moretta.engines.in_process import InProcess
    from moretta.protocols.registry import build

    players = build(federation._setting(5, 3))
    engine = InProcess(players.clients, Codec(players.messages))
    driver = Driver(players.server, list(players.clients), "run", engine, 2)
    list(driver.rounds(1, rounds))
    return {name: tensors["0.weight"] for name, tensors in players.models().items()}


@pytest.mark.parametrize("aggregation", [SecureAggregation(), PLAIN])
def test_a_delta_for_each_participant_leaves_nobody_out(tmp_path: Path, aggregation: SecureAggregation) -> None:
    deltas = {"a": 0.1, "b": 0.2, "c": 0.3}
    lacking = Federation(model(), SILOS, CGD(loss="mse", delta=deltas), aggregation=aggregation, out=tmp_path / "run")
    for begin in (lambda: lacking.train(2), lambda: lacking.rehearse(2)):
        with pytest.raises(ParameterError, match="delta: expected a number for participant `d`"):
            begin()
    assert not (tmp_path / "run").exists()
    Federation(model(), SILOS, CGD(loss="mse", delta={**deltas, "d": 0.4}), aggregation=aggregation).rehearse(2)


@refused("ordinary_training.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def test_fedsgd_with_a_schedule_equals_pytorchs_own() -> None:
    """One silo, in the clear: torch's CosineAnnealingLR over the same batches, bit for bit."""
    silo, rounds = SILOS[:1], 10
    federation = Federation(
        model(), silo, FedSGD(learning_rate=0.3, lr_schedule="cosine"), aggregation=PLAIN, dtype="float64", batch_size=0
    )
    found = federation.train(rounds, seed=5)
    ours = first_weights(model())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rounds)
    from moretta.protocols.common.batches import Batches

    batches = Batches(len(silo[0].x), 0, 5, silo[0].name)
    for number in range(1, rounds + 1):
        index = batches.of_round(number)
        optimizer.zero_grad()
        outputs = ours(torch.from_numpy(silo[0].x[index]))
        ((outputs - torch.from_numpy(silo[0].y[index])[:, None]).square().sum(1).mean() / 2).backward()
        optimizer.step()
        schedule.step()
    for one, other in zip(found.model.parameters(), ours.parameters(), strict=True):
        # torch's schedule multiplies from step to step, ours is the closed form: equal to a few roundings of the rate.
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("protocol", FEDERATED)
def test_a_tiny_clip_norm_bounds_every_step(protocol: type[Training]) -> None:
    """SGD moves by at most rate times norm a step; without clipping these runs move a hundred times as far."""
    rounds, rate, clip = 6, 0.1, 1e-3
    steps = rounds * (5 if protocol is FedAvg else 1)  # the largest silo has 61 rows, 4 batches
    moved = np.abs(weights(run(protocol(learning_rate=rate, clip_norm=clip), rounds)) - start(protocol)).max()
    assert 0 < moved <= steps * rate * clip * (1 + 1e-9)
    free = np.abs(weights(run(protocol(learning_rate=rate), rounds)) - start(protocol)).max()
    assert free > 10 * moved


def start(protocol: type[Training]) -> np.ndarray:
    one = np.concatenate([value.detach().numpy().ravel() for value in first_weights(model()).parameters()])
    return np.tile(one, len(SILOS)) if protocol is Local else one


def test_the_model_is_tested_as_often_as_asked_and_after_the_last_round() -> None:
    def tested(rounds: int, **settings: object) -> list[int]:
        return [line["round"] for line in run(FedSGD(), rounds, **settings).history if "test_loss" in line]

    assert tested(7, evaluate_every=3) == [3, 6, 7]
    assert tested(7, evaluate_every=100) == [7]
    assert tested(100) == list(range(2, 101, 2))  # about 50


@pytest.mark.parametrize("protocol", FEDERATED)
def test_early_stopping_returns_to_the_best_round(protocol: type[Training]) -> None:
    """With a rate that climbs out of its minimum, the run stops and its weights are those of the best round."""
    settings: dict[str, object] = {"validation": rows_of(60, 8), "early_stopping": 5}
    fierce = protocol(learning_rate=0.9)
    result = run(fierce, 60, **settings)
    best, last = int(result.record["facts"]["best_round"]), result.record["rounds"]
    losses = {line["round"]: line["validation_loss"] for line in result.history if "validation_loss" in line}
    assert losses[best] == min(losses.values())
    if last < 60:
        assert last - best >= 5
    again = run(fierce, best)
    # PBPFL draws another key each time, so its roundings differ; all others repeat bit for bit.
    np.testing.assert_allclose(weights(result), weights(again), rtol=0, atol=1e-9 if protocol is PBPFL else 0)


def test_patience_is_counted_in_rounds_and_judged_at_evaluations() -> None:
    settings: dict[str, object] = {"validation": rows_of(60, 8), "early_stopping": 5}
    for every in (1, 3, 7):
        result = run(FedSGD(learning_rate=0.9), 100, evaluate_every=every, **settings)
        losses = {line["round"]: line["validation_loss"] for line in result.history if "validation_loss" in line}
        assert list(losses) == list(range(every, result.record["rounds"] + 1, every))
        best = min(losses, key=lambda number: losses[number])
        assert result.record["facts"]["best_round"] == best
        assert result.record["rounds"] == min(number for number in range(best, 101, every) if number >= best + 5) < 100


def test_early_stopping_survives_a_restart(tmp_path: Path) -> None:
    settings: dict[str, object] = {"validation": rows_of(60, 8), "early_stopping": 5, "checkpoint_every": 3}
    whole = run(FedSGD(learning_rate=0.9), 60, **settings)
    stop = int(whole.record["facts"]["best_round"]) + 2

    class Stop(Exception):
        pass

    def progress(number: int, rounds: int, line: object) -> None:
        if number == stop:
            raise Stop

    federation = Federation(
        model(), SILOS, FedSGD(learning_rate=0.9), test=rows_of(50, 9), aggregation=PLAIN, dtype="float64",
        batch_size=16, out=tmp_path / "run", **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    with pytest.raises(Stop):
        federation.train(60, seed=5, progress=progress)
    resumed = federation.train(60, seed=5, resume=True)
    assert resumed.record["facts"]["best_round"] == whole.record["facts"]["best_round"]
    assert np.array_equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("protocol", [FedSGD, PBPFL])
@pytest.mark.parametrize("scheme", ["none", "pairwise"])
def test_part_of_the_silos_takes_part(protocol: type[Training], scheme: str) -> None:
    settings = {"participation": 0.5, "aggregation": SecureAggregation(scheme=scheme), "batch_size": 8}
    result = run(protocol(learning_rate=0.1), 12, **settings)
    assert all(line["rows"] <= 2 * 8 for line in result.history)
    assert not result.record["dropped"], "who was not chosen was not dropped"
    assert (
        np.array_equal(weights(result), weights(run(protocol(learning_rate=0.1), 12, **settings))) or protocol is PBPFL
    )


def test_part_of_the_silos_costs_each_of_them_what_all_would() -> None:
    whole, part = (run(FedSGD(), 8, participation=share, batch_size=8) for share in (1.0, 0.5))
    assert part.bytes["up_per_silo_per_round"] == pytest.approx(whole.bytes["up_per_silo_per_round"], rel=0.02)


def test_statistics_are_of_all_silos_whoever_is_chosen_first() -> None:
    silos = [Silo(silo.name, silo.x + 10 * number, silo.y) for number, silo in enumerate(SILOS)]
    for share in (1.0, 0.5):
        federation = Federation(
            model(), silos, FedSGD(), aggregation=PLAIN, dtype="float64", standardise=True, participation=share
        )
        result = federation.train(1, seed=5)
        assert result.model is not None
    from moretta.protocols.registry import build  # what the enrolment agreed on, from the roles themselves

    players = build(federation._setting(5, 1))
    from moretta.contract.codec import Codec
    from moretta.engines.driver import Driver
    from moretta.engines.in_process import InProcess

    engine = InProcess(players.clients, Codec(players.messages))
    driver = Driver(players.server, list(players.clients), "run", engine, 1, lambda number: ["a"])
    list(driver.rounds(1, 1))
    pooled = np.concatenate([silo.x for silo in silos])
    np.testing.assert_allclose(players.preparation().mean, pooled.mean(0), rtol=1e-12)
    np.testing.assert_allclose(players.preparation().deviation, pooled.std(0), rtol=1e-12)
    assert players.scheme == "none"


def test_all_silos_have_their_turn() -> None:
    seen: set[str] = set()
    result = run(FedSGD(learning_rate=0.1), 30, participation=0.25)
    for line in result.history:
        seen.add(str(line["rows"]))
    assert all(line["rows"] <= 16 for line in result.history)
    assert result.record["test"]["accuracy"] > 0.6


def test_a_crop_moves_an_image_by_at_most_four_pixels_and_may_mirror_it() -> None:
    images = torch.arange(2 * 3 * 9 * 9, dtype=torch.float32).reshape(2, 3, 9, 9) + 1
    torch.manual_seed(0)
    padded = nn.functional.pad(images, [PADDING] * 4)
    mirrored = 0
    for _ in range(40):
        varied = crop_and_flip(images)
        assert varied.shape == images.shape
        for image, whole in zip(varied, padded, strict=True):
            crops = [
                (whole[:, i : i + 9, j : j + 9], flip)
                for i in range(2 * PADDING + 1)
                for j in range(2 * PADDING + 1)
                for flip in (False, True)
            ]
            match = [flip for crop, flip in crops if torch.equal(image, crop.flip(2) if flip else crop)]
            assert match
            mirrored += match[0]
    assert 20 < mirrored < 60  # of 80, each with chance 1/2: seven deviations are 31


@pytest.mark.parametrize("how", CROPS)
def test_crops_without_torch_are_as_those_with_it(how: str) -> None:
    """Each is one of the 162 crops of the padded image; padding by zeros, or mirrored about the edge's pixels."""
    images = np.arange(2 * 3 * 9 * 9, dtype=np.float32).reshape(2, 3, 9, 9) + 1
    mode = "reflect" if how == "reflect-crop-flip" else "constant"
    padded = nn.functional.pad(torch.tensor(images), [PADDING] * 4, mode=mode).numpy()
    rng, seen = np.random.default_rng(0), set[int]()
    for _ in range(20):
        by_numpy = cropped(images, how, rng)
        by_torch = crop_and_flip(torch.tensor(images), reflect=how == "reflect-crop-flip").numpy()
        for found in (by_numpy, by_torch):
            assert found.dtype == np.float32
            for image, whole in zip(found, padded, strict=True):
                crops = [
                    np.flip(whole[:, i : i + 9, j : j + 9], 2) if flip else whole[:, i : i + 9, j : j + 9]
                    for i in range(2 * PADDING + 1)
                    for j in range(2 * PADDING + 1)
                    for flip in (False, True)
                ]
                match = [place for place, crop in enumerate(crops) if np.array_equal(image, crop)]
                assert match
                seen.update(match)
    assert len(seen) > 40  # of 80 draws out of 162


def test_a_turn_moves_pixels_and_changes_light_within_its_bounds() -> None:
    torch.manual_seed(0)
    still = turned(torch.full((200, 1, 8, 8), 0.5))
    assert float(still.std(dim=(1, 2, 3)).max()) < 1e-6  # whatever lies beyond an edge is mirrored into it
    light = still.mean(dim=(1, 2, 3))
    assert 0.2 - 1e-6 <= float(light.min()) < 0.3  # 0.5 times 0.8 to 1.2, and 0.2 more or less
    assert 0.7 < float(light.max()) <= 0.8 + 1e-6
    spot = torch.zeros(400, 1, 21, 21)
    spot[:, :, 10, 14] = 1.0  # four pixels right of the middle
    found = turned(spot).clamp(min=0)
    found = (found - found.flatten(1).median(dim=1).values[:, None, None, None]).clamp(min=0)[:, 0]
    weight = found.sum(dim=(1, 2))
    places = torch.arange(21.0) - 10
    x = (found.sum(dim=1) * places).sum(dim=1) / weight
    y = (found.sum(dim=2) * places).sum(dim=1) / weight
    assert float(torch.hypot(x, y).max()) < 1.1 * 4 + 1.5 * 21 * 0.1  # scaled by a tenth, shifted by a tenth each way
    quarters = {(bool(a > 0), bool(b > 0)) for a, b in zip(x, y, strict=True)}
    assert len(quarters) == 4


def test_images_are_varied_alike_in_every_protocol() -> None:
    """PBPFL on varied images is still FedSGD on varied images: both draw from seed, silo and round."""
    generator = np.random.default_rng(2)
    silos = [Silo(name, generator.random(size=(12, 1, 6, 6)), generator.integers(0, 3, 12)) for name in "ab"]
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

    def trained(protocol: Training, augment: bool | str) -> np.ndarray:
        federation = Federation(net, silos, protocol, aggregation=PLAIN, dtype="float64", batch_size=4, augment=augment)
        return weights(federation.train(8, seed=5))

    plain, varied = trained(FedSGD(), False), trained(FedSGD(), True)
    assert np.abs(plain - varied).max() > 1e-3
    np.testing.assert_allclose(trained(PBPFL(), True), varied, rtol=0, atol=1e-10)
    for how in ("reflect-crop-flip", "turn"):
        other = trained(FedSGD(), how)
        assert np.abs(other - varied).max() > 1e-3
        np.testing.assert_allclose(trained(PBPFL(), how), other, rtol=0, atol=1e-10)
    with pytest.raises(ParameterError, match=r'augment: expected "none", "crop-flip", .* got "flip"'):
        trained(FedSGD(), "flip")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_warm_start_begins_with_a_state_dict(tmp_path: Path, suffix: str) -> None:
    first = run(FedSGD(learning_rate=0.1), 4)
    path = tmp_path / f"start{suffix}"
    if suffix == ".pt":
        torch.save(first.model.state_dict(), path)
    else:
        save_file(first.model.state_dict(), path)
    federation = Federation(model(), SILOS, FedSGD(warm_start=path), dtype="float64")
    for name, value in first.model.state_dict().items():
        assert torch.equal(federation.model.state_dict()[name], value)


def test_a_warm_start_that_does_not_fit_is_named(tmp_path: Path) -> None:
    (tmp_path / "junk.pt").write_bytes(b"junk")
    with pytest.raises(ParameterError, match=r"junk\.pt: expected a state_dict"):
        Federation(model(), SILOS, FedSGD(warm_start=tmp_path / "junk.pt"))
    save_file({"0.weight": torch.zeros(8, 5)}, tmp_path / "part.safetensors")
    with pytest.raises(ParameterError, match=r"2\.weight"):
        Federation(model(), SILOS, FedSGD(warm_start=tmp_path / "part.safetensors"))


def test_silos_may_have_uneven_shares(tmp_path: Path) -> None:
    from moretta.config import run_files
    from moretta.run.assembly import federation_of

    (tmp_path / "run.toml").write_text(
        '[run]\nrounds = 1\n[data]\nsource = "digits"\nsizes = [5, 3, 2]\n[model]\nsource = "mlp"\n'
        '[protocol]\nname = "fedsgd"\nloss = "cross-entropy"\n'
    )
    rows = [len(silo.x) for silo in federation_of(run_files.load(tmp_path / "run.toml"), None).silos]
    assert [round(10 * count / sum(rows)) for count in rows] == [5, 3, 2]
