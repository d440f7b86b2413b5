"""`moretta align`: what a shell user makes, sees and is refused."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from test_cli import call

A = "patient,age\nPerson-3,1\nPerson-1,2\nPerson-2,3\nPerson-2,4\n"
B = "score,customer\n5,person2\n6,person1\n7,person2\n8,person9\n"
RULES = ("--ids", "fold-case", "--ids", "drop-punctuation")
OF_A = ("--rows", "a.csv", "--id-column", "patient", "--secret", "a.secret")
OF_B = ("--rows", "b.csv", "--id-column", "customer", "--secret", "b.secret")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text(A)
    (tmp_path / "b.csv").write_text(B)
    return tmp_path


def test_two_partners_between_files(here: Path) -> None:
    assert call("align", "begin", *OF_A, *RULES, "--pad-to", "6", "--json").told == {
        "format": 1,
        "step": 1,
        "out": "step1.bin",
        "secret": "a.secret",
    }
    assert call("align", "answer", "step1.bin", *OF_B, *RULES).code == 0
    assert stat.S_IMODE((here / "a.secret").stat().st_mode) == stat.S_IMODE((here / "b.secret").stat().st_mode) == 0o600
    done = call("align", "finish", "step2.bin", *OF_A, "--alignment", "a.json", "--json")
    assert (done.code, done.told["rows"], done.told["listed"], done.told["out"]) == (0, 3, 6, ["step3.bin"])
    plain = call("align", "finish", "step3.bin", *OF_B, "--alignment", "b.json")
    assert (plain.code, plain.out.partition(":")[0]) == (0, "3 rows in common, of 4 listed here and 6 there")
    a, b = (json.loads((here / name).read_text()) for name in ("a.json", "b.json"))
    assert (a["order"], b["order"]) == ([1, 2, 3], [1, 0, 2])
    assert a["digest"] == b["digest"] == done.told["digest"]
    assert not list(here.glob("*.secret"))
    for path in here.glob("*.bin"):
        assert b"person" not in path.read_bytes().lower()


def test_a_third_partner(here: Path) -> None:

    np.savez(here / "c.npz", id=np.array(["person2", "person3"]))
    call("align", "begin", *OF_A, *RULES)
    call("align", "answer", "step1.bin", *OF_B, *RULES)
    call("align", "finish", "step2.bin", *OF_A, "--alignment", "a.json")
    call("align", "finish", "step3.bin", *OF_B, "--alignment", "b.json")
    assert call("align", "begin", *OF_A, "--earlier", "a.json", "--out", "4.bin").code == 0
    of_c = ("--rows", "c.npz", "--id-column", "id", "--secret", "c.secret")
    assert call("align", "answer", "4.bin", *of_c, *RULES, "--out", "5.bin").code == 0
    went = call("align", "finish", "5.bin", *OF_A, "--earlier", "a.json", "--alignment", "abc.json", "--out", "6.bin")
    assert (went.code, went.err) == (0, "")
    assert call("align", "finish", "6.bin", *of_c, "--alignment", "c.json").code == 0
    told = call("align", "narrow", "left.bin", "--alignment", "b.json", "--out", "narrower.json", "--json").told
    assert told["rows"] == 1
    found = [json.loads((here / name).read_text()) for name in ("abc.json", "narrower.json", "c.json")]
    assert [one["order"] for one in found] == [[2], [0], [0]]
    assert len({one["digest"] for one in found}) == 1


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ('customer\n"a\nb"\n', "b.csv: some ids have line breaks"),
        ("customer,x\n,1\n", "b.csv: 1 of 1 rows have no id"),
        ("customr\na\n", 'did you mean "customr"?'),
    ],
)
def test_ids_that_cannot_be_compared_are_one_sentence_and_nothing_is_written(here: Path, ids: str, said: str) -> None:
    (here / "b.csv").write_text(ids)
    done = call("align", "begin", *OF_B)
    assert done.code == 2
    assert said in done.err
    assert done.err.count("\n") == 1
    assert {path.name for path in here.iterdir()} == {"a.csv", "b.csv"}


def test_nothing_in_common_is_refused_and_nothing_written(here: Path) -> None:
    call("align", "begin", *OF_A)
    call("align", "answer", "step1.bin", *OF_B)
    done = call("align", "finish", "step2.bin", *OF_A)
    assert (done.code, "no id in common" in done.err, done.err.count("\n")) == (2, True, 1)
    assert not (here / "alignment.json").exists()
    assert not (here / "step3.bin").exists()
    assert not (here / "a.secret").exists()


def test_files_that_are_there_stay(here: Path) -> None:
    (here / "step1.bin").write_text("mine")
    done = call("align", "begin", *OF_A)
    assert (done.code, "step1.bin exists already" in done.err) == (2, True)
    assert (here / "step1.bin").read_text() == "mine"
    assert not (here / "a.secret").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--out", "a.secret"), "a.secret is named for two files"),
        (("--out", "./a.csv"), "a.csv is named for two files"),
        (("--out", "none/step1.bin"), "there is no folder none"),
    ],
)
def test_files_to_be_written_are_looked_at_before_any_work(here: Path, more: tuple[str, ...], said: str) -> None:
    done = call("align", "begin", *OF_A, *more)
    assert (done.code, said in done.err, done.err.count("\n")) == (2, True, 1)
    assert {path.name for path in here.iterdir()} == {"a.csv", "b.csv"}


def test_finish_keeps_its_secret_where_a_file_cannot_be_written(here: Path) -> None:
    call("align", "begin", *OF_A, *RULES)
    call("align", "answer", "step1.bin", *OF_B, *RULES)
    done = call("align", "finish", "step2.bin", *OF_A, "--alignment", "same.bin", "--out", "same.bin")
    assert (done.code, "same.bin is named for two files" in done.err) == (2, True)
    assert (here / "a.secret").exists()
    assert call("align", "finish", "step2.bin", *OF_A).code == 0


def test_a_finish_that_was_killed_goes_on_with_that_list_alone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its secret was still there, and put on a second list of the partner's choice."""
    from moretta.commands import align

    call("align", "begin", *OF_A, *RULES)
    for number, secret in (("2", "b.secret"), ("second", "b2.secret")):
        of_b = (*OF_B[:-1], secret)
        assert call("align", "answer", "step1.bin", *of_b, *RULES, "--out", f"step{number}.bin").code == 0
    write = align._write

    def killed(files: Mapping[Path, bytes]) -> None:
        write(files)
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(align, "_write", killed)
        assert call("align", "finish", "step2.bin", *OF_A).code != 0
    assert (here / "a.secret").exists()
    elsewhere = ("--alignment", "again.json", "--out", "again.bin")
    done = call("align", "finish", "stepsecond.bin", *OF_A, *elsewhere)
    assert (done.code, "expected the list that was answered before" in done.err) == (1, True)
    assert call("align", "finish", "step2.bin", *OF_A, *elsewhere).code == 0
    assert (here / "again.bin").read_bytes() == (here / "step3.bin").read_bytes()


def test_other_bytes_and_rules_are_refused(here: Path) -> None:
    (here / "step1.bin").write_bytes(b"no step")
    assert (done := call("align", "answer", "step1.bin", *OF_B)).code == 1
    assert "expected a file of the alignment step 1" in done.err
    assert "unknown rule for ids" in call("align", "begin", *OF_A, "--ids", "lower", "--out", "1.bin").err
