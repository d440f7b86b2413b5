from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splits import distribute, load, split_of

from moretta.config import run_files
from moretta.data.domains import DOMAINS, into_domains
from moretta.data.rows import Split
from moretta.errors import ParameterError
from moretta.run import assembly

NAMES = ("plain", "rotated", "blurred", "recoloured")
RNG = np.random.default_rng(11)
ROWS = {"training": 200, "test": 80, "validation": 40}


def images(*shape: int) -> np.ndarray:
    return RNG.random(shape, np.float32)


def dataset(channels: int = 3, size: int = 9, **changes: Any) -> Split:
    x, y = images(320, channels, size, size), np.arange(320) % 10
    parts: dict[str, Any] = {
        "x_train": x[:200], "y_train": y[:200], "x_test": x[200:280], "y_test": y[200:280],
        "x_validation": x[280:], "y_validation": y[280:],
    }  # fmt: skip
    return split_of(name="toy", task="classification", classes=10, standardise=False, **(parts | changes))


def test_every_class_is_dealt_to_the_domains_in_equal_parts() -> None:
    made = into_domains(dataset(), NAMES, 3)
    for domain, y in ((made.train.domain, made.train.y), (made.test.domain, made.test.y)):
        assert domain is not None
        for label in range(10):
            _, counts = np.unique(domain[y == label], return_counts=True)
            assert set(counts.tolist()) == {len(y) // 40}
    uneven = into_domains(dataset(y_train=np.zeros(200, np.int64)), NAMES[:3], 3)
    assert sorted(np.unique(uneven.train.domain, return_counts=True)[1].tolist()) == [66, 67, 67]


def test_each_row_is_changed_as_its_domain_says_and_nothing_else_is() -> None:
    before = dataset()
    kept = before.train.x.copy()
    made = into_domains(before, NAMES, 3)
    np.testing.assert_array_equal(before.train.x, kept)
    np.testing.assert_array_equal(made.train.y, before.train.y)
    for x, was, domain in (
        (made.train.x, before.train.x, made.train.domain),
        (made.test.x, before.test.x, made.test.domain),
    ):
        assert domain is not None
        assert x.dtype == np.float32
        for row in range(len(x)):
            np.testing.assert_array_equal(x[row], DOMAINS[str(domain[row])](was[row : row + 1])[0])
    changed = [not np.array_equal(a, b) for a, b in zip(made.validation.x, before.validation.x, strict=True)]
    assert sum(changed) == 30  # a quarter stays plain


def test_the_seed_decides_who_is_dealt_where() -> None:
    made, again, other = (into_domains(dataset(), NAMES, seed) for seed in (3, 3, 4))
    assert made.train.domain is not None
    assert other.train.domain is not None
    np.testing.assert_array_equal(made.train.domain, again.train.domain)
    assert (made.train.domain != other.train.domain).any()
    # fixed, because a run file should mean the same silos on every machine and in every release
    assert made.train.domain[:6].tolist() == ["rotated", "recoloured", "recoloured", "blurred", "blurred", "recoloured"]
    # numbers instead of classes: equal parts all the same
    y = np.linspace(0, 1, 320, dtype=np.float32)
    numbers = split_of("toy", "regression", images(200, 1, 5, 5), y[:200], images(120, 1, 5, 5), y[200:])
    assert np.unique(into_domains(numbers, NAMES, 0).train.domain, return_counts=True)[1].tolist() == [50] * 4


def test_silos_from_different_domains() -> None:
    made = into_domains(dataset(), NAMES, 3)
    assert made.train.domain is not None
    for silos in (4, 8, 6):
        dealt = distribute(made, silos, "by-domain", 3)
        for number, silo in enumerate(dealt.silos):
            own = made.train.x[made.train.domain == sorted(NAMES)[number % 4]]
            assert {image.tobytes() for image in silo.x} <= {image.tobytes() for image in own}
        assert sum(len(silo.x) for silo in dealt.silos) == 200
    assert [len(silo.x) for silo in distribute(made, 6, "by-domain", 3).silos] == [25, 25, 50, 50, 25, 25]
    mixed = distribute(made, 4, "iid", 3).silos  # a mixture: no silo is a whole domain
    for silo in mixed:
        held = {image.tobytes() for image in silo.x}
        shares = [sum(x.tobytes() in held for x in made.train.x[made.train.domain == name]) for name in NAMES]
        assert min(shares) > 3  # 12.5 of 50 rows expected, standard deviation 2.7 (hypergeometric)


def test_the_test_rows_of_each_domain() -> None:
    before = dataset()
    made = into_domains(before, NAMES, 3)
    by_domain = made.test_rows_by_domain()
    assert list(by_domain) == sorted(NAMES)
    assert sorted(np.concatenate(list(by_domain.values())).tolist()) == list(range(80))
    test = distribute(made, 4, "by-domain", 3).test
    assert test is not None
    for name, rows in by_domain.items():
        np.testing.assert_array_equal(test.x[rows], DOMAINS[name](before.test.x[rows]))
    assert before.test_rows_by_domain() == {}


@pytest.mark.parametrize("shape", [(5, 3, 32, 32), (4, 1, 28, 28), (3, 2, 7, 12), (2, 1, 1, 3)])
def test_rotation_and_blur_are_what_scipy_makes(shape: tuple[int, ...]) -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    x = images(*shape)
    # scipy turns the plane of its two axes the other way round than the one drawn with rows downwards
    turned = ndimage.rotate(x.astype(np.float64), 30, axes=(3, 2), reshape=False, order=1, mode="nearest")
    np.testing.assert_allclose(DOMAINS["rotated"](x), turned, atol=1e-6)
    blurred = ndimage.gaussian_filter(x.astype(np.float64), (0, 0, 1, 1), mode="nearest", truncate=4)
    np.testing.assert_allclose(DOMAINS["blurred"](x), blurred, atol=1e-6)


def test_rotation_is_counter_clockwise() -> None:
    x = np.zeros((1, 1, 31, 31), np.float32)
    x[0, 0, 15, 25] = 1  # 10 pixels to the right of the centre: lands 5 pixels up and 8.66 to the right
    i, j = np.unravel_index(int(DOMAINS["rotated"](x)[0, 0].argmax()), (31, 31))
    assert (i, j) == (10, 24)


def test_recoloured_moves_channels_and_inverts() -> None:
    x = np.zeros((2, 3, 2, 2), np.float32)
    x[0, 0] = 1  # a red image: red gets green's 0, inverted 1; blue gets red's 1, inverted 0
    x[1, :, 0, 0] = (0.25, 0.5, 0.75)
    made = DOMAINS["recoloured"](x)
    assert made[0, :, 0, 0].tolist() == [1, 1, 0]
    assert made[1, :, 0, 0].tolist() == [0.25, 0, 0.5]
    grey = np.array([[[[0, 200, 255]]]], np.float32)
    assert DOMAINS["recoloured"](grey)[0, 0, 0].tolist() == [255, 55, 0]


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        ((), {}, "domains is empty; name at least one of plain, rotated, blurred, recoloured"),
        (("plain", "blured"), {}, 'domains: "blured" is unknown; did you mean "blurred"'),
        (("plain", "plain"), {}, 'domains names "plain" twice'),
        (NAMES, {"domain": np.zeros(200)}, "would replace the domains of toy"),
        (NAMES, {"domain_test": np.zeros(80)}, "would replace the domains of toy"),
    ],
)
def test_bad_domains(names: tuple[str, ...], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        into_domains(dataset(**changes), names, 0)


def test_only_images_have_domains(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n" + "".join(f"{3 * (i % 15)},{i % 2}\n" for i in range(20)))
    with pytest.raises(
        ParameterError, match=r"for images \[rows, channels, height, width\], but samples of t.csv have"
    ):
        into_domains(load("t.csv", base=tmp_path), NAMES, 0)
    tokens = np.zeros((20, 1, 2, 2), np.int64)
    numbers = split_of("t", "classification", tokens, tokens[:, 0, 0, 0], tokens, tokens[:, 0, 0, 0], classes=2)
    with pytest.raises(ParameterError, match="type int64"):
        into_domains(numbers, NAMES, 0)


def test_the_run_file_makes_the_same_silos(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    made = dataset(1, 6)
    np.savez(
        tmp_path / "images.npz", x_train=made.train.x, y_train=made.train.y, x_test=made.test.x, y_test=made.test.y
    )
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nrounds = 1\nseed = 5\n[data]\nsource = "images.npz"\nsilos = 8\npartition = "by-domain"\n'
        'domains = ["plain", "rotated", "blurred", "recoloured"]\n[model]\nsource = "mlp"\n'
        '[protocol]\nname = "fedsgd"\n'
    )
    run_file = run_files.load(path)
    assert run_files.load(path, ["run.rounds=2"]).data.domains == NAMES
    federation = assembly.federation_of(run_file, None)
    wanted = distribute(into_domains(load("images.npz", base=tmp_path, seed=5), NAMES, 5), 8, "by-domain", 5)
    for silo, expected in zip(federation.silos, wanted.silos, strict=True):
        np.testing.assert_array_equal(silo.x, expected.x)
    assert federation.test is not None
    assert wanted.test is not None
    np.testing.assert_array_equal(federation.test[0], wanted.test.x)
    assert not np.array_equal(wanted.test.x, made.test.x)
    without = tmp_path / "without.toml"
    without.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("domains")))
    with pytest.raises(ParameterError, match=r"needs the domain of each row.*set domains for images, for example "):
        assembly.federation_of(run_files.load(without), None)
