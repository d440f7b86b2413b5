"""Identities and rosters: what signs, what verifies, what a file may say, and what nobody gets to see."""

from __future__ import annotations

import base64
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moretta.errors import ParameterError
from moretta.secure_aggregation.identity import (
    Identity,
    Roster,
    fingerprint,
    parse_public_line,
    public_line,
    read_public_key,
    verify,
)
from moretta.secure_aggregation.keystream import encode_purpose

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "identity.json").read_text(encoding="utf-8"))
STATEMENTS, ROSTER, BAD_KEYS = VECTORS["statements"], VECTORS["roster"], VECTORS["bad_keys"]
PRIVATE = bytes.fromhex(STATEMENTS["private_key"])
KEYS = {name: bytes.fromhex(key) for name, key in ROSTER["keys"].items()}
SECRET_TEXT = base64.b64encode(PRIVATE).decode()


def spoken(statement: list[Any]) -> list[int | str | bytes]:
    return [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in statement]


def checks(case: Mapping[str, Any]) -> bool:
    key, signature = bytes.fromhex(case["public_key"]), bytes.fromhex(case["signature"])
    return verify(key, signature, *spoken(case["statement"]))


# What signs, and what verifies.


@pytest.mark.parametrize("case", VECTORS["rfc8032"]["cases"])
def test_rfc8032(case: dict[str, str]) -> None:
    vector = {name: bytes.fromhex(text) for name, text in case.items()}
    private = Ed25519PrivateKey.from_private_bytes(vector["private_key"])
    assert private.sign(vector["message"]) == vector["signature"]
    Ed25519PublicKey.from_public_bytes(vector["public_key"]).verify(vector["signature"], vector["message"])
    assert Identity(vector["private_key"]).public_key == vector["public_key"]


@pytest.mark.parametrize("case", STATEMENTS["cases"])
def test_statement_vectors(case: dict[str, Any]) -> None:
    identity, statement = Identity(PRIVATE), spoken(case["statement"])
    assert identity.public_key.hex() == STATEMENTS["public_key"]
    assert encode_purpose("signed", *statement).hex() == case["signed"]
    assert identity.sign(*statement).hex() == case["signature"]
    assert checks({**case, "public_key": STATEMENTS["public_key"]})


@pytest.mark.parametrize("case", VECTORS["tampered"], ids=lambda case: case["why"])
def test_tampered_signatures(case: dict[str, Any]) -> None:
    assert not checks(case)


@pytest.mark.parametrize("case", BAD_KEYS["low_order"], ids=lambda case: case["public_key"])
def test_keys_under_which_anyone_can_sign(case: dict[str, Any]) -> None:
    assert not checks(case)
    key = bytes.fromhex(case["public_key"])
    # A few of these points are also written as RFC 8032 forbids.
    with pytest.raises(ParameterError, match=r"low order|no point"):
        parse_public_line(public_line(key))
    with pytest.raises(ParameterError, match=r"\[\[silo\]\] 'anna': key: .*(low order|no point)"):
        Roster({"anna": key})


@pytest.mark.parametrize("key", BAD_KEYS["no_point"])
def test_keys_that_are_no_points(key: str) -> None:
    assert not verify(bytes.fromhex(key), bytes(64))
    with pytest.raises(ParameterError, match="no point of the curve"):
        parse_public_line(public_line(bytes.fromhex(key)))


@given(st.binary(min_size=32, max_size=32))
def test_a_key_of_any_private_key_is_good(private: bytes) -> None:
    identity = Identity(private)
    assert parse_public_line(public_line(identity.public_key)) == identity.public_key
    assert verify(identity.public_key, identity.sign("a", 1, b"b"), "a", 1, b"b")


@given(st.binary(max_size=40), st.binary(max_size=70))
def test_any_bytes_verify_as_false(key: bytes, signature: bytes) -> None:
    assert not verify(key, signature, "statement")
    assert not verify(KEYS["hospital-a"], signature, "statement")


def test_identities_are_fresh() -> None:
    assert len({Identity.fresh().public_key for _ in range(4)}) == 4


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_private_key_has_32_bytes(length: int) -> None:
    with pytest.raises(ParameterError, match=f"expected a private key of 32 bytes, got {length}; use"):
        Identity(bytes(length))


def test_a_representation_shows_no_secret() -> None:
    identity = Identity(PRIVATE)
    assert repr(identity) == str(identity) == f"Identity({fingerprint(identity.public_key)}, <redacted>)"
    assert re.fullmatch(r"([0-9a-f]{4} ){7}[0-9a-f]{4}", fingerprint(identity.public_key))  # 128 bits


# The two files of an identity.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Identity(PRIVATE).save(tmp_path / "keys")
    return tmp_path / "keys"


def refused(path: Path) -> str:
    """The one sentence with which both readers refuse a key file; it shows nothing of a key."""
    with pytest.raises(ParameterError) as caught:
        Identity.load(path)
    with pytest.raises(ParameterError) as other:
        read_public_key(path)
    for sentence in map(str, (caught.value, other.value)):
        assert "\n" not in sentence
        assert SECRET_TEXT[:20] not in sentence
    return str(caught.value)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_what_is_saved_is_loaded(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        identity = Identity.fresh()
        identity.save(tmp_path / "new" / "keys")
    finally:
        os.umask(before)
    folder = tmp_path / "new" / "keys"
    assert sorted(os.listdir(folder)) == ["identity.key", "identity.pub"]
    assert stat.S_IMODE((folder / "identity.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in (folder, folder / "identity.key"):
        assert Identity.load(path).sign("a") == identity.sign("a")
    for path in (folder, folder / "identity.key", folder / "identity.pub"):
        assert read_public_key(path) == identity.public_key
    assert (folder / "identity.pub").read_text() == public_line(identity.public_key) + "\n"


def test_the_permissions_hold_from_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, tuple[int, int]] = {}
    create = os.open

    def watch(path: Path, flags: int, mode: int = 0o777) -> int:
        made[Path(path).name] = flags, mode
        return create(path, flags, mode)

    monkeypatch.setattr(os, "open", watch)
    Identity(PRIVATE).save(tmp_path)
    monkeypatch.undo()
    assert {name: mode for name, (_, mode) in made.items()} == {"identity.key": 0o600, "identity.pub": 0o644}
    assert all(flags & os.O_EXCL and flags & os.O_CREAT for flags, _ in made.values())


@pytest.mark.parametrize("there", ["identity.key", "identity.pub"])
@pytest.mark.parametrize("link", [False, True])
def test_nothing_is_overwritten(tmp_path: Path, there: str, link: bool) -> None:
    if link:
        (tmp_path / there).symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / there).write_text("mine")
    with pytest.raises(ParameterError, match=rf"{there} exists already, and a key is never overwritten; choose"):
        Identity.fresh().save(tmp_path)
    assert os.listdir(tmp_path) == [there]
    assert link or (tmp_path / there).read_text() == "mine"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601, 0o644])
def test_a_key_that_is_open_to_others(folder: Path, mode: int) -> None:
    path = folder / "identity.key"
    path.chmod(mode)
    assert refused(path) == f"{path} is open to others (mode {mode:04o}); run: chmod 600 {path}"
    path.chmod(0o400)
    assert Identity.load(path).public_key == KEYS["hospital-a"]


GOOD_LINE = f"moretta-identity-1 {SECRET_TEXT}\n"
DAMAGED = {
    "empty": "",
    "cut": GOOD_LINE[:40],
    "two lines": GOOD_LINE * 2,
    "a blank line": GOOD_LINE + "\n",
    "a blank before": " " + GOOD_LINE,
    "two blanks": GOOD_LINE.replace(" ", "  "),
    "no first word": SECRET_TEXT,
    "of the future": GOOD_LINE.replace("-1", "-2"),
    "a carriage return": GOOD_LINE.replace("\n", "\r\n"),
    "31 bytes": f"moretta-identity-1 {base64.b64encode(PRIVATE[1:]).decode()}\n",
    "33 bytes": f"moretta-identity-1 {base64.b64encode(PRIVATE + PRIVATE[:1]).decode()}\n",
    "no padding": GOOD_LINE.replace("=", ""),
    "a newline within": GOOD_LINE[:30] + "\n" + GOOD_LINE[30:],
    "another letter": GOOD_LINE[:30] + "é" + GOOD_LINE[31:],
    "a public key": public_line(KEYS["hospital-a"]) + "\n",
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_key(folder: Path, text: str) -> None:
    path = folder / "identity.key"
    path.write_bytes(text.encode())
    with pytest.raises(ParameterError, match=f"expected one line, .* got {len(text)} other characters; bring"):
        Identity.load(path)
    if "public" not in text:
        refused(path)


def test_base64_is_written_in_one_way_only() -> None:
    line = public_line(KEYS["hospital-a"])
    assert line[-1] == "="
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    twin = line[:-2] + alphabet[alphabet.index(line[-2]) ^ 1] + "="  # another spelling of the same bytes
    assert base64.b64decode(twin.split()[1]) == base64.b64decode(line.split()[1])
    with pytest.raises(ParameterError, match="got 61 other characters"):
        parse_public_line(twin)


def test_keys_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert (
        refused(nowhere)
        == f"the key file {nowhere} cannot be read (No such file or directory); name one that can be read"
    )
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "binary").chmod(0o600)
    assert "it is not text in UTF-8" in refused(tmp_path / "binary")
    assert "cannot be read" in refused(tmp_path / "a\0b")
    (tmp_path / "empty").mkdir()
    assert "identity.key cannot be read" in refused(tmp_path / "empty")
    with pytest.raises(ParameterError, match=r"expected identity\.key or identity\.pub, got neither; name the one"):
        read_public_key(tmp_path / "empty")
    (folder / "identity.pub").write_text(public_line(Identity.fresh().public_key) + "\n")
    with pytest.raises(ParameterError, match="got two that do not belong together"):
        read_public_key(folder)
    (folder / "identity.key").unlink()
    assert read_public_key(folder) != KEYS["hospital-a"]
    (folder / "identity.pub").write_text("mine")
    with pytest.raises(ParameterError, match=r"identity\.pub: expected `moretta-public-1` and 32 bytes .* got 4 other"):
        read_public_key(folder)


def told(read: Callable[[Path], object], path: Path) -> str:
    """What a reader says of a file that it refuses; nothing else than `ParameterError` may be raised."""
    try:
        read(path)
    except ParameterError as error:
        return str(error)
    return ""


SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
LINES = st.one_of(
    st.binary(max_size=80),
    st.tuples(st.sampled_from([b"moretta-identity-1 ", b"moretta-public-1 "]), st.binary(max_size=34)).map(
        lambda parts: parts[0] + base64.b64encode(parts[1]) + b"\n"
    ),
)


@SHARED
@given(LINES)
def test_any_bytes_are_a_key_or_a_parameter_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    path.chmod(0o600)
    for read in (Identity.load, read_public_key):
        assert "\n" not in told(read, path)


# The roster.


def entry(name: str, key: bytes | str, engine_name: str | None = None) -> str:
    line = key if isinstance(key, str) else public_line(key)
    more = "" if engine_name is None else f'engine-name = "{engine_name}"\n'
    return f'[[silo]]\nname = "{name}"\nkey = "{line}"\n{more}'


def write(folder: Path, text: str) -> Path:
    (folder / "roster.toml").write_bytes(text.encode())
    return folder / "roster.toml"


A, B = KEYS["hospital-a"], KEYS["hospital-b"]


def test_a_roster(tmp_path: Path) -> None:
    engine_names = {name: None if name == given else given for name, given in ROSTER["engine_names"].items()}
    text = "# of 2026\n" + "\n".join(entry(name, KEYS[name], engine_names[name]) for name in reversed(KEYS))
    roster = Roster.load(write(tmp_path, text))
    assert roster.keys == KEYS
    assert roster.digest == ROSTER["digest"]
    assert {name: roster.engine_name(name) for name in KEYS} == ROSTER["engine_names"]
    assert Roster(KEYS, ROSTER["engine_names"]).digest == roster.digest
    roster.check(["hospital-c", "hospital-a"])
    with pytest.raises(ParameterError, match=r"in the roster, but it lacks anna, bea; add a \[\[silo\]\] each"):
        roster.check(["hospital-a", "bea", "anna"])


def test_one_silo_is_a_roster() -> None:
    assert Roster({"hospital-a": A}).engine_name("hospital-a") == "hospital-a"


def test_a_digest_tells_rosters_apart() -> None:
    rosters = [
        Roster({"a": A, "b": B}),
        Roster({"a": B, "b": A}),
        Roster({"a": A}),
        Roster({"a": A, "b": B}, {"a": "site-1"}),
        Roster({"a": A, "b": B}, {"b": "site-1"}),
        Roster({"a": A, "bc": B}),
    ]
    assert len({roster.digest for roster in rosters}) == len(rosters)
    assert Roster({"b": B, "a": A}, {"a": "a"}).digest == rosters[0].digest


def server(*keys: bytes) -> str:
    lines = [public_line(key) for key in keys]
    return f"[server]\nkey = {lines if len(lines) != 1 else repr(lines[0])}\n"


def test_a_roster_may_name_the_server(tmp_path: Path) -> None:
    text, C = "\n".join(entry(name, key) for name, key in {"a": A, "b": B}.items()), KEYS["hospital-c"]
    plain, named = Roster.load(write(tmp_path, text)), Roster.load(write(tmp_path, text + server(C)))
    assert (plain.server, named.server) == ((), (C,))
    both = Roster.load(write(tmp_path, text + server(C, Identity(b"n" * 32).public_key)))
    assert len({one.digest for one in (plain, named, both)}) == 3
    assert plain.digest == Roster({"a": A, "b": B}).digest  # which rosters had before they could
    turned = Roster({"a": A, "b": B}, server=both.server[::-1])
    assert turned.digest == both.digest


BAD: Mapping[str, tuple[str, str]] = {
    "a server without a key": (entry("a", A) + "[server]\n", r"\[server\] key: expected a string .* got nothing"),
    "a server's name": (entry("a", A) + '[server]\nname = "x"\n', r"\[server\] 'name' is not known; .* are key"),
    "two tables of the server": (entry("a", A) + "[[server]]\n", r"below a line \[server\], got other than that"),
    "three keys of the server": (
        entry("a", A) + server(A, B, KEYS["hospital-c"]),
        r"\[server\] key: expected one public key of the server, or two different ones .* got 3; use",
    ),
    "no key of the server": (entry("a", A) + "[server]\nkey = []\n", r"\[server\] key: expected one .* got 0"),
    "a number as the server's key": (entry("a", A) + "[server]\nkey = 3\n", r"\[server\] key: expected .* in quotes"),
    "a private key of the server": (entry("a", A) + f'[server]\nkey = "{GOOD_LINE[:-1]}"\n', "has a private key in it"),
    "a silo that could play the server": (
        entry("a", A) + server(A),
        r"\[server\] has the key of \[\[silo\]\] a, which could then pose as the server; set each one's own",
    ),
    "empty": ("", r"expected a \[\[silo\]\] for each silo, got none; add one"),
    "a list of none": ("silo = []", r"expected a \[\[silo\]\] for each silo, got none"),
    "no TOML": ("[[silo]\n", r"expected a roster in TOML, got an error: .*line 1.*; fix it there"),
    "half a file": (entry("a", A)[:-3], r"expected a roster in TOML, got an error"),
    "a long number": (f"silo = {'1' * 5000}", r"expected a roster in TOML, got an error"),
    "deep": ("silo = " + "[" * 20000, r"expected a roster in TOML, got an error"),
    "an unknown section": ("[[silos]]\n", r"'silos' is not known; did you mean silo\?"),
    "a strange section": ("[zzz]\n", r"'zzz' is not known; the keys here are silo"),
    "single brackets": ('[silo]\nname = "a"\n', r"below a line \[\[silo\]\], got other than that; write both brackets"),
    "a list of numbers": ("silo = [1]", r"below a line \[\[silo\]\], got other than that"),
    "an unknown key": (
        entry("a", A) + 'enginename = "x"',
        r"\[\[silo\]\] 'a': 'enginename' is not known; did you mean engine-name\?",
    ),
    "a key with a newline": (entry("a", A) + '"x\\ny" = 1', r"'a': 'x\\ny' is not known; the keys here are name, key"),
    "no name": (f'[[silo]]\nkey = "{public_line(A)}"', r"\[\[silo\]\] number 1: name: expected a string .* nothing"),
    "no key": (entry("a", A) + '[[silo]]\nname = "b"', r"\[\[silo\]\] 'b': key: expected a string .* got nothing; add"),
    "a number for a name": ("[[silo]]\nname = 3\n", r"number 1: name: expected a string .* got something else"),
    "a number for a key": ('[[silo]]\nname = "a"\nkey = 3\n', r"'a': key: expected a string .* got something else"),
    "a list for an engine name": (entry("a", A) + "engine-name = []", r"'a': engine-name: expected a string"),
    "a name twice": (entry("a", A) + entry("a", B), r"\[\[silo\]\] 'a': expected each name once, got it twice; rename"),
    "a key twice": (entry("a", A) + entry("b", A), r"\[\[silo\]\] a and b have the same key; set each one's own"),
    "an engine name twice": (
        entry("a", A, "site") + entry("b", B, "site"),
        r"\[\[silo\]\] a and b have the same engine-name; set each one's own",
    ),
    "another's name in the engine": (entry("a", A, "b") + entry("b", B), r"a and b have the same engine-name"),
    "an empty name": (entry("", A), r"'': name: expected 1 to 64 letters, .* got ''; choose another"),
    "a long name": (entry("a" * 65, A), r"'aaa.*: name: expected 1 to 64 letters"),
    "the server's name": (entry("server", A), r"'server': name: .* not `server`, got 'server'"),
    "a slash": (entry("a/b", A), r"'a/b': name: expected 1 to 64 letters"),
    "a newline": (entry("a\\n", A), r"'a\\n': name: expected 1 to 64 letters"),
    "a dot first": (entry(".a", A), r"'\.a': name: .* not a dot first"),
    "a long engine name": (entry("a", A, "x" * 65), r"'a': engine-name: expected 1 to 64 letters"),
    "no base64": (entry("a", "moretta-public-1 ???"), r"'a': key: expected `moretta-public-1` .* got 20 other"),
    "31 bytes": (entry("a", A[1:]), r"'a': key: expected `moretta-public-1` and 32 bytes .* got 61 other characters"),
    "low order": (entry("a", bytes(32)), r"'a': key: expected .* got a point of low order; take what `moretta"),
    "no point": (entry("a", bytes.fromhex(BAD_KEYS["no_point"][0])), r"'a': key: .* got bytes that are no point"),
    "a private key": (entry("a", GOOD_LINE[:-1]), r"has a private key in it; put `moretta-public-1 \.\.\.` there and"),
    "a private key's bytes": (entry("a", SECRET_TEXT), r"'a': key: .* got 44 other characters"),
    "latin": ("\udcff", r"cannot be read \(it is not text in UTF-8\); name"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), BAD.values(), ids=BAD)
def test_a_bad_roster(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "roster.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ParameterError, match=sentence) as caught:
        Roster.load(path)
    said = str(caught.value)
    assert str(path) in said
    assert "\n" not in said
    assert len(said) < 400 + len(str(path))
    assert SECRET_TEXT[:20] not in said


def test_a_roster_that_is_not_there(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.toml", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(
            ParameterError, match=f"the roster {path} cannot be read .{why}.; name one that can be read"
        ):
            Roster.load(path)


def test_an_engine_name_of_nobody() -> None:
    with pytest.raises(ParameterError, match=r"'b': key: expected one of Ed25519, got 0 bytes"):
        Roster({"a": A}, {"b": "site"})


PIECES = st.sampled_from(
    [
        *(
            "[[silo]]\n",
            "[silo]\n",
            "name = ",
            "key = ",
            "engine-name = ",
            '"a"\n',
            '"b"\n',
            "3\n",
            "[]\n",
            "\0",
            "= ",
            '"',
        ),
        *(f'"{public_line(key)}"\n' for key in (A, B, bytes(32))),
        *(entry("a", A), entry("b", B)),
    ]
)


@SHARED
@given(st.one_of(st.binary(max_size=60), st.lists(PIECES, max_size=9).map(lambda pieces: "".join(pieces).encode())))
def test_any_bytes_are_a_roster_or_a_parameter_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "roster.toml"
    path.write_bytes(data)
    assert "\n" not in told(Roster.load, path)


def test_a_roster_is_read_up_to_a_bound(tmp_path: Path) -> None:
    """A run folder names it, and it may be any file: this one has 100 GiB, and takes no disk."""
    with (tmp_path / "roster.toml").open("wb") as stream:
        stream.truncate(100 << 30)
    with pytest.raises(ParameterError, match="is larger than 4 MiB"):
        Roster.load(tmp_path / "roster.toml")
