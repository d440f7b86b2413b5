"""`moretta keys`: what a shell user makes, sees and is refused."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from test_cli import call

from moretta.secure_aggregation.identity import Identity, Roster, fingerprint, public_line


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_new_writes_both_files_and_says_the_public_line(here: Path) -> None:
    done = call("keys", "new", "--out", "my/keys")
    key = Identity.load(here / "my" / "keys").public_key
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [public_line(key), f"fingerprint: {fingerprint(key)}", "out: my/keys"]
    assert stat.S_IMODE((here / "my" / "keys" / "identity.key").stat().st_mode) == 0o600
    assert (here / "my" / "keys" / "identity.pub").read_text() == public_line(key) + "\n"


def test_json_is_one_object(here: Path) -> None:
    made = call("keys", "new", "--out", "keys", "--json")
    assert made.out.count("\n") == 1
    key = Identity.load(here / "keys").public_key
    assert made.told == {"format": 1, "key": public_line(key), "fingerprint": fingerprint(key), "out": "keys"}
    for path in ("keys", "keys/identity.key", "keys/identity.pub"):
        shown = call("keys", "show", path, "--json")
        assert shown.told == {"format": 1, "key": public_line(key), "fingerprint": fingerprint(key)}
        plain = call("keys", "show", path)
        assert (plain.code, plain.err) == (0, "")
        assert plain.out.splitlines() == [public_line(key), f"fingerprint: {fingerprint(key)}"]


def test_no_command_says_the_private_key(here: Path) -> None:
    said = [call("keys", "new", "--out", "plain"), call("keys", "new", "--out", "json", "--json")]
    said += [call("keys", "show", path) for path in ("plain", "plain/identity.key", "json")]
    for folder in ("plain", "json"):
        secret = (here / folder / "identity.key").read_text().split()[1]
        assert not any(secret in done.out + done.err for done in said)


def test_what_show_prints_makes_a_roster(here: Path) -> None:
    entries = []
    for name in ("hospital-a", "hospital-b"):
        call("keys", "new", "--out", name)
        entries.append(f'[[silo]]\nname = "{name}"\nkey = "{call("keys", "show", name).out.splitlines()[0]}"\n')
    (here / "roster.toml").write_text("".join(entries))
    assert Roster.load("roster.toml").keys == {
        name: Identity.load(name).public_key for name in ("hospital-a", "hospital-b")
    }


def test_an_identity_is_not_overwritten(here: Path) -> None:
    call("keys", "new", "--out", "keys")
    before = {path.name: path.read_bytes() for path in (here / "keys").iterdir()}
    again = call("keys", "new", "--out", "keys", "--json")
    assert again.code == 2
    assert again.sentence == ("keys/identity.key exists already, and a key is never overwritten; choose another folder")
    assert {path.name: path.read_bytes() for path in (here / "keys").iterdir()} == before


def test_a_key_is_made_in_a_folder_of_its_own(here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "result.json").write_text("{}")
    done = call("keys", "new", "--out", "run")
    assert (done.code, done.sentence) == (
        2, "run is not empty, and a key lies in a folder of its own; name a new one"
    )  # fmt: skip
    assert [path.name for path in (here / "run").iterdir()] == ["result.json"]
    (here / "none").mkdir()
    assert call("keys", "new", "--out", "none").code == 0


def test_bad_input_is_a_sentence_and_exit_code_2(here: Path) -> None:
    call("keys", "new", "--out", "keys")
    (here / "file").write_text("hello")
    (here / "empty").mkdir()
    (here / "keys" / "identity.key").chmod(0o644)
    for words, sentence in {
        ("show", "none"): "the key none cannot be read (No such file or directory); name one that can be read",
        (
            "show",
            "file",
        ): "file: expected `moretta-public-1` and 32 bytes of Ed25519 in base64, got 5 other characters; "
        "take what `moretta keys show` prints",
        ("show", "empty"): "empty: expected identity.key or identity.pub, got neither; name the one that is meant",
        ("show", "keys"): "keys/identity.key is open to others (mode 0644); run: chmod 600 keys/identity.key",
        ("new", "--out", "file"): "file: exists already; name another, or remove it",
        ("new", "--out", "file/keys"): "file/keys: expected a directory, got a file or a path below one; name another",
    }.items():
        for more in ([], ["--json"]):
            done = call("keys", *words, *more)
            assert (done.code, done.sentence) == (2, sentence)


@pytest.mark.parametrize("words", [["bogus"], ["new"], ["show"], ["new", "--out"], ["show", "a", "b"]])
def test_bad_usage_is_exit_code_2(here: Path, words: list[str]) -> None:
    done = call("keys", *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith(" --help\n")
    assert len(done.err.splitlines()) == 1
    assert not list(here.iterdir())


def test_help() -> None:
    for words in (("keys", "--help"), ("keys", "new", "--help"), ("keys", "show", "--help")):
        done = call(*words)
        assert (done.code, done.err) == (0, "")
        assert "--json" in done.out
    assert "keys" in call("--help").out
