import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from splits import distribute, load

from moretta.data.images.sets import load_office_home
from moretta.errors import MissingExtra, ParameterError

Image = pytest.importorskip("PIL.Image")

DOMAINS = ("Art", "Clipart", "Product", "Real World")
CATEGORIES = ("Bike", "Alarm_Clock", "Chair")


def picture(path: Path, red: int, size: tuple[int, int] = (8, 6)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (red, 20, 200)).save(path)


def office(folder: Path, real: str = "Real World", each: int = 5) -> Path:
    """Images of one colour, whose red says which domain, category and number it is."""
    for d, domain in enumerate((*DOMAINS[:3], real)):
        for c, category in enumerate(CATEGORIES):
            for n in range(each):
                picture(folder / domain / category / f"{n:05}.{'png' if n else 'PNG'}", 60 * d + 20 * c + n)
    (folder / "Art" / "Chair").mkdir(parents=True, exist_ok=True)
    (folder / "Art" / "imagelist.txt").write_text("")
    (folder / "Art" / "Chair" / "notes.txt").write_text("")
    (folder / "Art" / ".hidden").mkdir()
    return folder


def red(x: np.ndarray) -> list[int]:
    return [round(float(value) * 255) for value in x[:, 0, 0, 0]]


@pytest.mark.parametrize("real", ["Real World", "Real_World", "RealWorld"])
def test_the_published_layout(tmp_path: Path, real: str) -> None:
    data = load("office-home", path=office(tmp_path, real), seed=2)
    assert (data.inputs, data.train.x.dtype, data.classes, data.standardise) == ((3, 64, 64), np.float32, 3, False)
    assert data.class_names == ("Alarm_Clock", "Bike", "Chair")
    assert data.train.domain is not None
    assert data.test.domain is not None
    assert sorted(red(data.train.x) + red(data.test.x)) == sorted(
        60 * d + 20 * c + n for d in range(4) for c in range(3) for n in range(5)
    )
    for x, y, domain in ((data.train.x, data.train.y, data.train.domain), (data.test.x, data.test.y, data.test.domain)):
        for value, label, name in zip(red(x), y, domain, strict=True):
            assert name == DOMAINS[value // 60]
            assert data.class_names[label] == CATEGORIES[value % 60 // 20]
    np.testing.assert_allclose(data.train.x[:, 1:].mean((0, 2, 3)), [20 / 255, 200 / 255], rtol=1e-6)


def test_the_split_is_stratified_by_domain_and_category(tmp_path: Path) -> None:
    office(tmp_path)
    data = load("office-home", path=".", base=tmp_path, validation_fraction=0.2)
    assert Counter(zip(data.test.domain, data.test.y, strict=True)) == {(d, c): 1 for d in DOMAINS for c in range(3)}
    assert Counter(zip(data.train.domain, data.train.y, strict=True)) == {(d, c): 3 for d in DOMAINS for c in range(3)}
    assert np.bincount(data.validation.y).tolist() == [4, 4, 4]
    other = load("office-home", path=".", base=tmp_path, validation_fraction=0.2, seed=1)
    assert red(other.test.x) != red(data.test.x)
    assert red(load("office-home", path=tmp_path, validation_fraction=0.2).test.x) == red(data.test.x)


def test_each_domain_is_a_silo_or_several(tmp_path: Path) -> None:
    data = load("office-home", path=office(tmp_path), test_fraction=0.2)
    for silos in (4, 8):
        for number, silo in enumerate(distribute(data, silos, "by-domain").silos):
            assert {value // 60 for value in red(silo.x)} == {number % 4}
            assert len(silo.x) == 48 // silos
    assert {name: len(rows) for name, rows in data.test_rows_by_domain().items()} == dict.fromkeys(DOMAINS, 3)


def test_images_become_squares_of_the_wished_size(tmp_path: Path) -> None:
    inner = tmp_path / "OfficeHomeDataset_10072016"  # as unpacked from the archive
    office(inner)
    grey = np.zeros((2, 4), np.uint8)
    grey[:, 2:] = 240
    Image.fromarray(grey).save(inner / "Art" / "Bike" / "00000.jpeg", quality=100)
    data = load("office-home", path=tmp_path, image_size=2)
    assert data.inputs == (3, 2, 2)
    image = next(x for x in np.concatenate([data.train.x, data.test.x]) if abs(x[0, 0, 0] - x[2, 0, 0]) < 0.02)
    assert image[:, :, 0].max() < 0.2  # grey in all three channels, dark on the left and bright on the right
    assert image[:, :, 1].min() > 0.75


def test_rows_have_one_order_and_pixels_are_averaged(tmp_path: Path) -> None:
    office(tmp_path, each=0)
    for n in (7, 2, 9, 0, 4, 8, 1, 6, 3, 5):  # as a file system may list them
        for domain in DOMAINS:
            picture(tmp_path / domain / "Bike" / f"{n}.png", 10 * n)
    images = load_office_home(tmp_path, 1)
    assert images.x[:, 0, 0, 0].tolist() == [10 * n for n in range(10)] * 4
    chequered = (np.indices((8, 8)).sum(0) % 2 * 240).astype(np.uint8)
    Image.fromarray(chequered).save(tmp_path / "Art" / "Bike" / "0.png")
    np.testing.assert_allclose(load_office_home(tmp_path, 2).x[0], 120, atol=20)  # and not 0 or 240


def test_a_category_that_only_some_domains_have(tmp_path: Path) -> None:
    office(tmp_path)
    for n in range(5):
        picture(tmp_path / "Product" / "Desk" / f"{n}.png", 0)
    data = load("office-home", path=tmp_path)
    assert data.class_names == ("Alarm_Clock", "Bike", "Chair", "Desk")
    assert (np.bincount(data.train.y)[3], np.bincount(data.test.y)[3]) == (4, 1)


@pytest.mark.parametrize("alone", [0, 1])
def test_a_category_in_no_training_row_is_named(tmp_path: Path, alone: int) -> None:
    office(tmp_path, each=2)
    (tmp_path / "Art" / "Zebra").mkdir()
    for n in range(alone):
        picture(tmp_path / "Art" / "Zebra" / f"{n}.png", 9)
    said = "0 images" if alone == 0 else "1 image"
    with pytest.raises(
        ParameterError, match=rf'category "Zebra" is in no training row \({said} in all\); add images to it'
    ):
        load("office-home", path=tmp_path, test_fraction=0.6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs path, the folder with the folders Art, Clipart, Product and Real World.*get them at https://"),
        ({"path": "nowhere"}, r"the folder .*nowhere does not exist; it should hold .*from https://"),
        ({"path": "."}, "lacks the folder Clipart, Real World; expected"),
        ({"path": ".", "image_size": 0}, "image_size: expected 1 or more, got 0"),
        ({"path": ".", "target": "y"}, "target is for a table"),
    ],
)
def test_bad_folders(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    for name in ("Art", "Product"):
        (tmp_path / name).mkdir()
    with pytest.raises(ParameterError, match=message):
        load("office-home", base=tmp_path, **arguments)


def test_a_folder_without_images(tmp_path: Path) -> None:
    for name in DOMAINS:
        (tmp_path / name / "Bike").mkdir(parents=True)
    with pytest.raises(ParameterError, match=r"holds no images \(.jpg, .jpeg, .png\); expected"):
        load("office-home", path=tmp_path)


@pytest.mark.parametrize("content", ["text", "torn", "chunks"])
def test_an_unreadable_image_is_named(tmp_path: Path, content: str) -> None:
    bad = office(tmp_path) / "Product" / "Chair" / "00003.png"
    good = bad.read_bytes()
    bad.write_bytes({"text": b"no image", "torn": good[:45], "chunks": good[:8] + b"\xff" * 40}[content])
    with pytest.raises(ParameterError, match=r"Product.Chair.00003\.png is not a readable image \(.*; get it again"):
        load("office-home", path=tmp_path)


def test_image_size_is_for_images_alone() -> None:
    with pytest.raises(ParameterError, match='image-size is for images, not for source = "digits"'):
        load("digits", image_size=32)


def test_a_missing_pillow_says_which_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    office(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r'"office-home" needs Pillow; run: pip install "moretta\[torch\]"'):
        load("office-home", path=tmp_path)
