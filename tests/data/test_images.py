import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splits import load

from moretta.data.images.sets import from_residuals, load_images
from moretta.errors import ParameterError

RNG = np.random.default_rng(5)


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, np.uint8)


def residuals(x: np.ndarray) -> np.ndarray:
    """uint8[N, H, W, 3] -> what `from_residuals` undoes, from its definition."""
    red, green, blue = (x[..., i].astype(int) for i in range(3))
    c = np.stack([green, red - green, blue - green])
    c = np.diff(c, axis=3, prepend=0)
    return (np.diff(c, axis=2, prepend=0) % 256).astype(np.uint8)


def idx(path: Path, array: np.ndarray, compress: bool) -> None:
    data = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path = path.with_name(path.name + ".gz") if compress else path
    path.write_bytes(gzip.compress(data) if compress else data)


@pytest.mark.parametrize("compress", [True, False])
def test_mnist(tmp_path: Path, compress: bool) -> None:
    x, y = pixels(12, 28, 28), np.arange(12, dtype=np.uint8) % 10
    for part, rows in (("train", slice(0, 10)), ("t10k", slice(10, 12))):
        idx(tmp_path / f"{part}-images-idx3-ubyte", x[rows], compress)
        idx(tmp_path / f"{part}-labels-idx1-ubyte", y[rows], compress)
    data = load("mnist", path=tmp_path)
    assert (data.train.x.shape, data.train.x.dtype, data.classes) == ((10, 1, 28, 28), np.float32, 10)
    np.testing.assert_array_equal(data.test.x[:, 0], x[10:].astype(np.float32) / np.float32(255))
    assert data.test.y.tolist() == [0, 1]
    assert not data.standardise


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """Twelve images, of which two are for tests."""
    x, y = pixels(12, 28, 28), np.arange(12, dtype=np.uint8) % 10
    for part, rows in (("train", slice(0, 10)), ("t10k", slice(10, 12))):
        idx(tmp_path / f"{part}-images-idx3-ubyte", x[rows], False)
        idx(tmp_path / f"{part}-labels-idx1-ubyte", y[rows], False)
    return tmp_path


def test_images_of_a_set_become_squares_of_another_size(mnist: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    plain, larger = load("mnist", path=mnist), load("mnist", path=mnist, image_size=32)
    assert larger.train.x.shape == (10, 1, 32, 32)
    assert larger.test.x.shape == (2, 1, 32, 32)
    one = image.fromarray((plain.test.x[1, 0] * 255).round().astype(np.uint8))  # as torchvision's Resize does it
    wanted = np.asarray(one.resize((32, 32), image.Resampling.BILINEAR))
    assert np.array_equal((larger.test.x[1, 0] * 255).round().astype(np.uint8), wanted)
    assert np.array_equal(load("mnist", path=mnist, image_size=28).train.x, plain.train.x)


def test_channels_are_standardised_by_constants_of_the_run(tmp_path: Path) -> None:
    for name, rows in (("train.bin", 5), ("test.bin", 3)):
        records = np.concatenate([pixels(rows, 2) % 20, pixels(rows, 3072)], axis=1)
        (tmp_path / name).write_bytes(records.tobytes())
    plain = load("cifar100", path=tmp_path)
    mean, deviation = (0.5, 0.25, 0.0), (0.25, 0.5, 1.0)
    scaled = load("cifar100", path=tmp_path, channel_mean=mean, channel_deviation=deviation)
    for raw, found in ((plain.train.x, scaled.train.x), (plain.test.x, scaled.test.x)):
        wanted = (raw - np.reshape(mean, (3, 1, 1))) / np.reshape(deviation, (3, 1, 1))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"channel_mean": (0.5,)}, "expected a number of each for every channel, deviations above 0; got .0.5. and"),
        ({"channel_mean": ()}, "expected a number of each for every channel"),
        ({"channel_mean": (0.5,), "channel_deviation": (0.0,)}, "channel_deviation.* more than 0"),
        ({"channel_mean": (float("nan"),), "channel_deviation": (1.0,)}, "expected a number of each"),
        (
            {"channel_mean": (0.5,) * 3, "channel_deviation": (1.0,) * 3},
            "has 3 numbers; expected 1, one for each channel",
        ),
        ({"image_size": 0}, "image_size: expected 1 or more"),
    ],
)
def test_forms_of_images_that_cannot_be(mnist: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        load("mnist", path=mnist, **settings)


def test_channels_are_for_images() -> None:
    with pytest.raises(ParameterError, match='channel-mean is for images, not for source = "digits"'):
        load("digits", channel_mean=(0.5,), channel_deviation=(1.0,))


def test_a_torn_idx_file_is_refused(tmp_path: Path) -> None:
    for part in ("train", "t10k"):
        idx(tmp_path / f"{part}-images-idx3-ubyte", pixels(2, 28, 28), False)
        idx(tmp_path / f"{part}-labels-idx1-ubyte", pixels(2), False)
    torn = tmp_path / "train-images-idx3-ubyte"
    torn.write_bytes(torn.read_bytes()[:-1])
    with pytest.raises(ParameterError, match=r"not an IDX file of bytes \(shape \(2, 28, 28\), 1567 bytes"):
        load("mnist", path=tmp_path)
    torn.write_bytes(b"\0\0")
    with pytest.raises(ParameterError, match="not an IDX file"):
        load("mnist", path=tmp_path)


def test_cifar10_binary_version(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    x, y = pixels(12, 3, 32, 32), np.arange(12, dtype=np.uint8) % 10
    records = np.concatenate([y[:, None], x.reshape(12, -1)], axis=1)
    for i in range(5):
        (folder / f"data_batch_{i + 1}.bin").write_bytes(records[2 * i : 2 * i + 2].tobytes())
    (folder / "test_batch.bin").write_bytes(records[10:].tobytes())
    for place in (tmp_path, folder):
        data = load("cifar10", path=place)
        np.testing.assert_array_equal(data.train.x, x[:10].astype(np.float32) / np.float32(255))
        assert data.train.y.tolist() == y[:10].tolist()
    assert data.class_names[9] == "truck"
    (folder / "test_batch.bin").write_bytes(b"12345")
    with pytest.raises(ParameterError, match="has 5 bytes, not whole records of 3073"):
        load("cifar10", path=folder)


def test_cifar100_takes_the_fine_label(tmp_path: Path) -> None:
    x, coarse, fine = pixels(6, 3, 32, 32), np.zeros((6, 1), np.uint8), np.arange(94, 100, dtype=np.uint8)[:, None]
    records = np.concatenate([coarse, fine, x.reshape(6, -1)], axis=1)
    (tmp_path / "train.bin").write_bytes(records[:4].tobytes())
    (tmp_path / "test.bin").write_bytes(records[4:].tobytes())
    data = load_images("cifar100", tmp_path)
    assert data.y.tolist() == [94, 95, 96, 97]
    np.testing.assert_array_equal(data.x_test, x[4:])


def test_residuals_give_the_pixels_back(tmp_path: Path) -> None:
    x = pixels(7, 32, 32, 3)
    np.testing.assert_array_equal(from_residuals(residuals(x)), x.transpose(0, 3, 1, 2))
    for name, rows in (("train_1", slice(0, 3)), ("train_2", slice(3, 5)), ("test", slice(5, 7))):
        np.savez(tmp_path / f"{name}.npz", r=residuals(x[rows]), y=np.arange(7)[rows])
    data = load("cifar10", path=tmp_path)
    np.testing.assert_array_equal(data.train.x, x[:5].transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255))
    assert data.test.y.tolist() == [5, 6]
    np.savez(tmp_path / "test.npz", r=x, y=np.arange(7))
    with pytest.raises(ParameterError, match=r"expected r as uint8\[3, N, H, W\]"):
        load("cifar10", path=tmp_path)


def kaggle(folder: Path, labels: np.ndarray, dx: list[str]) -> np.ndarray:
    x = pixels(len(labels), 28, 28, 3)
    cells = np.concatenate([x.reshape(len(labels), -1), labels[:, None]], axis=1)
    header = ",".join([*(f"pixel{i:04}" for i in range(2352)), "label"])
    np.savetxt(folder / "hmnist_28_28_RGB.csv", cells, "%d", ",", header=header, comments="")
    lines = [f"L{i // 2},I{i},{name}\n" for i, name in enumerate(dx)]
    (folder / "HAM10000_metadata.csv").write_text("lesion_id,image_id,dx\n" + "".join(lines))
    return x


def test_ham10000_splits_by_lesion(tmp_path: Path) -> None:
    labels = np.repeat(np.array([4, 6] * 10, np.uint8), 2)
    x = kaggle(tmp_path, labels, ["nv" if label == 4 else "mel" for label in labels])
    images = load_images("ham10000", tmp_path)
    np.testing.assert_array_equal(images.x, x.transpose(0, 3, 1, 2))
    assert images.y[:4].tolist() == [5, 5, 4, 4]  # nv, nv, mel, mel in our alphabetical order
    data = load("ham10000", path=tmp_path, test_fraction=0.2, validation_fraction=0.2)
    assert (data.class_names[4], data.class_names[5]) == ("mel", "nv")
    keys = [{image.tobytes() for image in part.x} for part in data.parts().values()]
    assert [len(key) for key in keys] == [24, 8, 8]
    for lesion in range(0, 40, 2):
        pair = [image.transpose(2, 0, 1).astype(np.float32) / np.float32(255) for image in x[lesion : lesion + 2]]
        assert sum({image.tobytes() for image in pair} <= key for key in keys) == 1
    (tmp_path / "HAM10000_metadata.csv").write_text("lesion_id,image_id,dx\nL0,I0,nv\n")
    with pytest.raises(ParameterError, match="does not list the rows of the image table in its order"):
        load("ham10000", path=tmp_path)


def test_ham10000_without_lesions_splits_by_image(tmp_path: Path) -> None:
    kaggle(tmp_path, np.array([4, 6] * 10, np.uint8), [])
    (tmp_path / "HAM10000_metadata.csv").unlink()
    assert len(load("ham10000", path=tmp_path).test.x) == 4
    (tmp_path / "hmnist_28_28_RGB.csv").write_text("a,b\n1,x\n")
    with pytest.raises(ParameterError, match="not a table of bytes"):
        load("ham10000", path=tmp_path)


@pytest.mark.parametrize("source", ["mnist", "cifar10", "cifar100", "ham10000"])
def test_absent_files_say_where_to_get_them(tmp_path: Path, source: str) -> None:
    with pytest.raises(
        ParameterError, match=f'source = "{source}" needs path, the folder with .*; get them at https://'
    ):
        load(source)
    with pytest.raises(ParameterError, match=r"the folder .* does not exist; it should hold .*from https://"):
        load(source, path="nowhere", base=tmp_path)
    with pytest.raises(ParameterError, match=r"lacks .*; get them at https://"):
        load(source, path=tmp_path)


def test_the_pickled_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(b"")
    with pytest.raises(ParameterError, match="python version is pickled, which is never loaded here"):
        load("cifar10", path=tmp_path)


def test_published_sets(public: Path) -> None:
    mnist = load_images("mnist", public / "mnist")
    assert np.bincount(mnist.y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert mnist.y_test is not None
    assert np.bincount(mnist.y_test).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    cifar = load_images("cifar100", public / "cifar100_subset")
    assert set(np.bincount(cifar.y).tolist()) == {100}
    assert cifar.x.shape == (10000, 3, 32, 32)
    ham = load("ham10000", path=public / "ham10000_subset")
    counts = np.bincount(np.concatenate([ham.train.y, ham.test.y])).tolist()
    assert counts == [183, 264, 583, 60, 491, 4323, 80]


def test_published_cifar10(public: Path) -> None:
    images = load_images("cifar10", public / "cifar10")
    assert images.y[:8].tolist() == [6, 9, 9, 4, 1, 1, 2, 7]
    means = images.x[:10000].mean((0, 2, 3)) / 255
    np.testing.assert_allclose(means, [0.4914, 0.4822, 0.4465], atol=5e-3)  # of one of five batches
