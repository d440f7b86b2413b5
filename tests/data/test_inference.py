"""What is asked about columns: each kind of doubt, that halves are asked about too, and that answers read the file."""

from __future__ import annotations

import csv
import io
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moretta.data.tables import schema as schemas
from moretta.data.tables.doubts import Hints
from moretta.data.tables.files import Format, read_columns
from moretta.data.tables.inference import Guess, as_toml, infer, propose
from moretta.data.tables.rows import read_table
from moretta.data.tables.schema import Drop
from moretta.errors import ParameterError

Random = np.random.Generator
Cells = Callable[[Random, int], Sequence[object]]
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def picked(*words: str) -> Cells:
    return lambda random, rows: random.choice(words, rows).tolist()


def whole(low: int, high: int) -> Cells:
    return lambda random, rows: random.integers(low, high, rows).tolist()


def written(template: str, low: int, high: int) -> Cells:
    return lambda random, rows: [template.format(int(one)) for one in random.integers(low, high, rows)]


def apart(low: int, high: int, *others: str) -> Cells:
    """Numbers, of which a third are others."""

    def cells(random: Random, rows: int) -> list[str]:
        found = [str(one) for one in random.integers(low, high, rows)]
        return [others[k % len(others)] if k % 3 == 0 else one for k, one in enumerate(found)]

    return cells


def different(template: str, *, ordered: bool = False) -> Cells:
    def cells(random: Random, rows: int) -> list[str]:
        numbers = random.choice(4 * rows, rows, replace=False)
        return [template.format(one) for one in (np.sort(numbers) if ordered else numbers)]

    return cells


def apart_by_blanks(random: Random, rows: int) -> list[str]:
    return [f"{one:,}".replace(",", " ") for one in random.integers(1_000, 99_999, rows)]


def in_italian(random: Random, rows: int) -> list[str]:
    return [one.replace(MONTHS[0], "gennaio") for one in days(random, rows)]


def days(random: Random, rows: int) -> list[str]:
    drawn = random.integers([[1], [0], [10]], [[28], [12], [25]], (3, rows))
    return [f"{day} {MONTHS[month]} 20{year}" for day, month, year in drawn.T]


OF_ALL_CELLS: dict[str, tuple[str, Cells]] = {  # a name, and cells of which every part is asked about
    "row numbers with gaps": ("x", different("{}", ordered=True)),
    "row numbers in disorder": ("x", different("{}")),
    "index": ("index", whole(0, 500)),
    "Unnamed": ("Unnamed: 0", whole(0, 500)),
    "words that differ": ("x", different("zq{}k")),
    "patient": ("patient_id", whole(0, 40)),
    "paziente": ("codice_paziente", whole(0, 40)),
    "Fallnummer": ("Fallnummer", whole(0, 40)),
    "numéro de dossier": ("numéro_dossier", whole(0, 40)),
    "expediente": ("Expediente No", whole(0, 40)),
    "病历号": ("病历号", whole(0, 40)),
    "sample": ("Sample code number", whole(0, 40)),
    "index of pandas": ("__index_level_0__", whole(0, 40)),
    "leading zeros": ("x", written("{:05}", 100, 9999)),
    "post codes": ("PLZ", whole(10_000, 99_999)),
    "codes of diagnoses": ("icd9", whole(100, 140)),
    "thousands": ("x", written("{:,}", 1_000, 900_000)),
    "thousands apart": ("x", apart_by_blanks),
    "percent": ("x", written("{}%", 0, 101)),
    "a unit": ("x", written("{} mg", 1, 90)),
    "a unit before": ("x", written("€ {}", 1, 90)),
    "money": ("x", written("${:,}.50", 1_000, 90_000)),
    "thousands and a unit": ("x", written("{:,} kcal", 1_000, 90_000)),
    "days in words": ("x", days),
    "days of SAS": ("x", lambda random, rows: [one.replace(" ", "").upper() for one in days(random, rows)]),
    "days of another language": ("x", in_italian),
    "months": ("x", lambda random, rows: [f"20{a}-{b:02}" for a, b in random.integers([10, 1], [25, 13], (rows, 2))]),
    "below": ("x", written("<{}", 1, 9)),
    "free text": ("x", lambda random, rows: [f"said zq{k % (rows * 2 // 3)}" for k in range(rows)]),
}  # fmt: skip
OF_SOME_CELLS: dict[str, tuple[str, Cells]] = {  # asked about wherever the cells in question are
    "999": ("x", apart(20, 90, "999")),
    "-9": ("x", apart(0, 5, "-9")),
    "-1 below 1": ("x", apart(1, 4, "-1")),
    "-1 below fractions": (
        "x",
        lambda random, rows: [f"{one:.2f}" if k % 3 else "-1" for k, one in enumerate(random.random(rows))],
    ),
    "-200": ("x", apart(-3, 40, "-200")),
    "-999 below -3": ("x", apart(-3, 40, "-999")),
    "77 and 99": ("x", apart(1, 30, "77", "99")),
    "zero": ("x", apart(80, 190, "0")),
    "words among numbers": ("x", apart(20, 90, "N/A")),
    "thousands and less": ("x", apart(100, 999, "1.250", "12.400")),
    "capitals": ("x", picked("YES", "yes", "no")),
    "short": ("x", picked("Y", "yes", "N", "no")),
    "male": ("x", picked("M", "Male", "female", "F")),
    "dots": ("x", picked("heart failure", "heart-failure", "none")),
}
TARGETS: dict[str, Cells] = {
    "ages": whole(20, 90),
    "costs": whole(1_000, 60_000),
    "ids": different("{}"),
    "notes": different("case zq{}"),
    "days": days,
    "codes": picked("01", "02", "03"),
    "capitals": picked("YES", "yes", "no"),
    "short": picked("Y", "yes", "N", "no"),
    "unknown": picked("dead", "alive", "unknown"),
    "numbers and words": apart(0, 3, "neg"),
    "percent": written("{}%", 0, 101),
    "one value": picked("no"),
}
PLAIN: dict[str, Cells] = {
    "age": whole(20, 80),
    "crp": lambda random, rows: [f"{one:.1f}" for one in random.gamma(2.0, 8.0, rows)],
    "breaths": whole(8, 60),
    "ratio": lambda random, rows: [f"{one:.3f}" for one in random.normal(size=rows)],
    "ward": picked("A", "AB", "B", "O"),
    "stage": picked("I", "II", "III", "IV"),
    "job": picked("admin.", "blue-collar", "services", "unknown"),
    "month": picked("may", "jun", "jul"),
    "income": picked("<=50K", ">50K"),
    "pregnancies": whole(0, 9),
    "gain": lambda random, rows: (random.integers(1, 60_000, rows) * (random.random(rows) < 0.2)).tolist(),
    "change": picked("-1", "0", "1"),
    "case": picked("0", "1"),
    "body_mass_index": whole(17, 40),
    "months": lambda random, rows: ["60.667", *random.integers(40, 95, rows - 2).tolist(), "41.125"],
    "ab0": picked("+", "-"),
    "grade": picked("1", "2", "3"),
}


def write(path: Path, columns: dict[str, Sequence[object]]) -> Path:
    stream = io.StringIO()
    lines = csv.writer(stream, delimiter=";")
    lines.writerow(columns)
    lines.writerows(zip(*columns.values(), strict=True))
    path.write_text(stream.getvalue())
    return path


def guesses(path: Path, columns: dict[str, Sequence[object]]) -> dict[str, Guess]:
    return propose(read_columns(write(path, columns)), Hints(missing="mean"), path.name, Format())


def asked(path: Path, columns: dict[str, Sequence[object]]) -> list[str]:
    return [name for name, guess in guesses(path, columns).items() if guess.doubt is not None]


def table(kinds: dict[str, tuple[str, Cells]], random: Random, rows: int) -> dict[str, Sequence[object]]:
    """A column of each kind, each with a name of its own, and a plain target."""
    columns = {
        name if name != "x" else f"x{kind}".replace(" ", "-"): cells(random, rows)
        for kind, (name, cells) in kinds.items()
    }
    return {**columns, "ratio": PLAIN["ratio"](random, rows), "ill": ["no", "yes"] * (rows // 2) + ["no"] * (rows % 2)}


def part(columns: dict[str, Sequence[object]], places: Iterable[int]) -> dict[str, Sequence[object]]:
    kept = [int(place) for place in places]
    return {name: [cells[place] for place in kept] for name, cells in columns.items()}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables") / "t.csv"


@settings(deadline=None, max_examples=4)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(70, 130))
def test_what_is_asked_of_a_table_is_asked_of_any_half(path: Path, seed: int, rows: int) -> None:
    random = np.random.default_rng(seed)
    columns = table({**OF_ALL_CELLS, **OF_SOME_CELLS}, random, rows)
    every = [name for name in columns if name not in ("ratio", "ill")]
    assert asked(path, columns) == every
    mixed = random.permutation(rows)
    assert asked(path, part(columns, mixed)) == every
    assert asked(path, part(columns, mixed[: rows // 2])) == every
    sure = table(OF_ALL_CELLS, random, rows)
    name = random.choice(list(sure))
    order = sorted(range(rows), key=lambda place: str(sure[name][place]))
    ill = dict(sure) | {"ill": [("no", "yes")[place % 2] for place in range(rows)]}
    for half in (order[: rows // 2], order[rows // 2 :]):
        found = asked(path, part(ill, half) | {"ill": (["no", "yes"] * rows)[: len(half)]})
        assert found == [name for name in sure if name not in ("ratio", "ill")]


@pytest.mark.parametrize("kind", TARGETS)
def test_a_target_is_asked_about_whole_and_halved_and_not_quoted(path: Path, kind: str) -> None:
    random = np.random.default_rng(3)
    columns = {"crp": PLAIN["crp"](random, 80), "y": TARGETS[kind](random, 80)}
    for places in (range(80), random.permutation(80)[:40]):
        with pytest.raises(
            ParameterError, match=r"column 'y' is the target and .* of (80|40) rows|same value"
        ) as caught:
            infer(read_columns(write(path, part(columns, places))), Hints(), path.name, Format())
        assert "zq" not in str(caught.value)
    guess = guesses(path, columns)["y"]
    if kind in ("ages", "costs", "ids", "notes", "days"):  # a class would be a row's own cell
        assert not getattr(guess.column, "classes", ())
        assert not ({str(cell) for cell in columns["y"]} - {"0", "1"}) & set(
            re.findall(r'"([^"]*)"', as_toml({"y": guess}))
        )


@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(60, 300))
def test_plain_columns_are_not_asked_about(path: Path, seed: int, rows: int) -> None:
    random = np.random.default_rng(seed)
    columns = {name: cells(random, rows) for name, cells in PLAIN.items()}
    assert asked(path, columns) == []


def test_classes_that_are_signs_are_plain(path: Path) -> None:
    columns: dict[str, Sequence[object]] = {"crp": [1.5, 2.5, 0.5, 1.25] * 9, "y": ["+", "-", "-"] * 12}
    assert asked(path, columns) == []


@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(80, 200))
def test_a_column_that_tells_the_target_is_asked_about_whole_and_halved(path: Path, seed: int, rows: int) -> None:
    random = np.random.default_rng(seed)
    alive = random.random(rows) < 0.6
    columns: dict[str, Sequence[object]] = {
        "alive": ["ja" if one else "nein" for one in alive],
        "status": [random.choice([1, 2] if one else [3, 4]) for one in alive],
        "died on": ["" if one else f"2024-{random.integers(1, 13):02}-{random.integers(1, 28):02}" for one in alive],
        "bed": ["" if one else f"zq{random.integers(0, 90)}" for one in alive],
        "nearly": ["ja" if one else "nein" for one in (alive ^ (np.arange(rows) % 9 == 0))],
        "crp": PLAIN["crp"](random, rows),
        "weight": [random.uniform(2.5, 4.5) if one else random.uniform(0.9, 2.5) for one in alive],
        "height": [random.uniform(1.5, 4.5) if one else random.uniform(0.9, 3.5) for one in alive],
        "outcome": ["no" if one else "yes" for one in alive],
    }
    for places in (range(rows), random.permutation(rows)[: rows // 2]):
        found = guesses(path, part(columns, places))
        told = {name: str(one.doubt) for name, one in found.items() if one.doubt is not None}
        assert told.keys() == {"alive", "status", "died on", "bed", "weight"}
        assert all("tells the target" in said for name, said in told.items() if name != "bed")
        assert "zq" not in "".join(told.values())
        assert all(found[name].column.kind == "drop" for name in told)


def test_counts_of_which_most_are_rare_are_asked_about_as_a_target(path: Path) -> None:
    counts = [0] * 4000 + [1] * 800 + [2] * 180 + [k for k in range(3, 9) for _ in range(9 - k)]
    found = guesses(path, {"crp": [1.5 + k % 7 for k in range(len(counts))], "visits": counts})
    assert "only" in str(found["visits"].doubt)
    assert 'task = "regression"' in str(found["visits"].doubt)


def test_a_target_that_lacks_values_is_no_class_of_its_own(path: Path) -> None:
    columns: dict[str, Sequence[object]] = {
        "weight": [0.5 + k for k in range(60)],
        "low": ["", *["yes", "no"] * 29, ""],
    }
    assert asked(path, columns) == ["low"]
    columns["low"] = ["", *["yes"] * 29, *["no"] * 29, ""]
    assert asked(path, columns) == ["weight", "low"]


def test_names_of_people_are_asked_about_however_few(path: Path) -> None:
    names = [f"zq{k % 40}" for k in range(1200)]
    columns: dict[str, Sequence[object]] = {
        "Last_Name": names,
        "clinic name": names,
        "crp": list(range(1200)),
        "y": ["no", "yes", "no"] * 400,
    }
    found = guesses(path, columns)
    assert "names of people" in str(found["Last_Name"].doubt)
    assert found["clinic name"].doubt is None
    assert "zq" not in as_toml({"Last_Name": found["Last_Name"]})


def test_the_first_reading_is_the_likelier_one(path: Path) -> None:
    columns: dict[str, Sequence[object]] = {
        "children": ["0", "1", "2", "3+"] * 30,
        "refill": ["less", "more", "3", "less", "more"] * 24,
        "income": ["12", "13", "9", "."] * 30,
        "name": [f"zq{k}" for k in range(120)],
        "ticket": [f"PC {k}" if k % 2 else str(k) for k in range(120)],
        "y": ["no", "yes", "no"] * 40,
    }
    found = guesses(path, columns)
    kinds = {"children": "category", "refill": "category", "income": "number", "name": "drop", "ticket": "drop"}
    assert {name: found[name].column.kind for name in kinds} == kinds
    for guess in found.values():  # each reading stands once, and says what it does
        lines = [line for line in as_toml({"x": guess}).splitlines() if line.startswith("# - ")]
        assert len(set(lines)) == len(lines)
        assert not any(reading.column == Drop() and "leave" not in reading.what and "ids" not in reading.what
                       for reading in (guess.doubt.readings if guess.doubt else ()))  # fmt: skip


def test_what_says_id_column_is_an_id_column(path: Path) -> None:
    columns: dict[str, Sequence[object]] = {
        "store_id": [k % 7 for k in range(60)],
        "visit_id": ["", *range(59)],
        "y": ["no", "yes", "no"] * 20,
    }
    found = guesses(path, columns)
    assert [found[name].column.kind for name in ("store_id", "visit_id")] == ["group", "drop"]
    assert not any("id-column" in str(found[name].doubt) for name in ("store_id", "visit_id"))


def test_row_numbers_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for head in (",", '"",'):  # as pandas and R write them
        path.write_text(f"{head}age,ill\n" + "".join(f"{k},{k % 50},{'no' if k % 3 else 'yes'}\n" for k in range(90)))
        found = propose(read_columns(path), Hints(), path.name, Format())
        assert found["Unnamed: 0"].column.kind == "id"
        assert found["Unnamed: 0"].doubt is not None
    path.write_text("age ill\n" + "".join(f"{k} {k % 50} no\n" for k in range(9)))
    with pytest.raises(ParameterError, match="each line has 3 cells, but the first 2; name the first column"):
        read_columns(path, Format(separator=" "))
    path.write_text(",age,ill\nAlfa,61,no\nBeta,70,yes\n")
    with pytest.raises(ParameterError, match="the first line has no name for column 1"):
        read_columns(path)


def decided(text: str, choose: Callable[[int], int]) -> str:
    """A proposal answered as it asks: in each section in question the lines of one of its readings."""
    found = []
    for section in text.split("\n\n"):
        readings = [
            "\n".join(line.removeprefix("#     ") for line in one.splitlines() if line.startswith("#     "))
            for one in re.split(r"(?m)^# - ", section)[1:]
        ]
        readings = [one for one in readings if one]
        head = next(line for line in section.splitlines() if line.startswith("["))
        found.append(f"{head}\n{readings[choose(len(readings))]}\n" if readings else section)
    return "\n".join(found)


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.lists(st.sampled_from([*OF_ALL_CELLS, *OF_SOME_CELLS]), min_size=1, max_size=6, unique=True),
    target=st.sampled_from([*TARGETS, None]),
    blanks=st.booleans(),
)
def test_a_proposal_that_is_answered_as_it_asks_reads_its_file(
    path: Path, seed: int, kinds: list[str], target: str | None, blanks: bool
) -> None:
    random, every = np.random.default_rng(seed), {**OF_ALL_CELLS, **OF_SOME_CELLS}
    columns = table({kind: every[kind] for kind in kinds}, random, 60)
    if target is not None:
        columns["ill"] = TARGETS[target](random, 60)
    if blanks:
        columns = {name: [cell if random.random() < 0.9 else "" for cell in cells] for name, cells in columns.items()}
        columns["ill"] = [cell or "" for cell in columns["ill"]]
    text = as_toml(guesses(path, columns))
    there = [place for place in range(60) if columns["ill"][place] != ""]
    write(path, part(columns, there))  # rows without a target are removed, as it asks
    for one in (
        decided(text, lambda count: int(random.integers(count))),
        re.sub(r'kind = "decide"  # perhaps (".*")', r"kind = \1", text),
    ):
        schema = schemas.of(tomllib.loads(one))
        rows = read_table(path, schema, labelled=schema.target is not None)
        assert len(rows.x) == len(there)
        assert "decide" not in one.replace("# decide", "")


@pytest.mark.parametrize(
    "lines",
    [
        "Alfa,Uno,F,I10,no\nBeta,Due,M,E11,yes\nGamma,Uno,F,I10,no\n",
        "Alfa;Uno;F;I10;no\nBeta;Due;M;E11;yes\n",
        "republican,n,y,n\ndemocrat,y,y,n\n",
        "Alfa,n,ward\nBeta,n,ward\nGamma,y,other\n",
        "Alfa,2024-01-05,no\nBeta,2024-01-06,yes\n",
        "Alfa,61,no\nBeta,70,yes\n",
        "Alfa|Uno|F\nBeta|Due|M\n",
        "Alfa,,no\nBeta,x,yes\n",
    ],
)
def test_a_first_line_that_is_a_row_is_asked_about_and_never_quoted(tmp_path: Path, lines: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(lines)
    with pytest.raises(ParameterError, match=r"header line|names of columns") as caught:
        infer(read_columns(path), Hints(), path.name, Format())
    assert not any(cell in str(caught.value) for cell in ("Alfa", "Uno", "I10", "republican", "2024", "61"))


def test_words_above_numbers_are_names(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("age,case,male\n61,case,yes\n70,control,no\n61,control,no\n")
    assert infer(read_columns(path), Hints(), path.name, Format()).classes == ("no", "yes")
    path.write_text("ward,case,ill\nward,case,yes\nsouth,ill,no\n")
    with pytest.raises(ParameterError, match="header"):
        infer(read_columns(path), Hints(), path.name, Format())
    assert infer(read_columns(path), Hints(header=True), path.name, Format()).classes == ("no", "yes")


def test_what_the_keys_of_answers_mean(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(
        '[columns.a]\nkind = "number"\nunit = "%"\nabsent = [-9, "unknown"]\nblanks = "mean"\n'
        '[columns.b]\nkind = "number"\nthousands = ","\n'
        '[columns.c]\nkind = "category"\ncategories = ["no", "yes"]\nspellings = { N = "no", Y = "yes" }\n'
        '[columns.y]\nkind = "target"\nclasses = ["0", "1"]\nspellings = { one = "1" }\n'
    )
    path = tmp_path / "t.csv"
    path.write_text('a,b,c,y\n45 %,"1,250",N,0\n-9,"12,000.5",yes,one\nunknown,850,Y,1\n45%,-3.5,no,1\n')
    rows = read_table(path, schemas.load(tmp_path / "schema.toml"))
    nan = np.nan
    expected = [[45, 1250, 1, 0], [nan, 12000.5, 0, 1], [nan, 850, 0, 1], [45, -3.5, 1, 0]]
    np.testing.assert_array_equal(rows.x, np.array(expected, np.float32))
    assert rows.y.tolist() == [0, 1, 1, 1]
    path.write_text('a,b,c,y\n45,"1,25",N,0\n')
    with pytest.raises(ParameterError, match="column 'b' has something other than a number"):
        read_table(path, schemas.load(tmp_path / "schema.toml"))
    for wrong in ('spellings = { no = "yes" }', 'spellings = { N = "nein" }'):
        with pytest.raises(ParameterError, match="spellings: expected other words, each for one of the categories"):
            schemas.of(tomllib.loads(f'[columns.c]\nkind = "category"\ncategories = ["no", "yes"]\n{wrong}\n'))
