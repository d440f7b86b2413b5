"""Signatures below a dossier: who signed is named, and what was changed since is found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from test_cli import Called, call

from moretta.errors import ParameterError
from moretta.report.dossier import page
from moretta.report.dossier.document import digest
from moretta.report.dossier.page import write_dossier
from moretta.secure_aggregation.identity import Identity, Roster, fingerprint, public_line

NAMES = ("north", "south")
Keys = Mapping[str, Identity]


@pytest.fixture
def keys() -> Keys:
    return {name: Identity.fresh() for name in (*NAMES, "stranger")}


@pytest.fixture
def roster(keys: Keys) -> Roster:
    return Roster({name: keys[name].public_key for name in NAMES})


@pytest.fixture
def dossier(make_run) -> Path:
    return write_dossier(make_run("fedsgd")).files.data


def test_who_signed_and_who_did_not_is_named(dossier, keys, roster):
    page.sign(dossier, keys["south"])
    found = page.check(dossier, roster)
    assert (found.signers, found.missing, found.fault) == (["south"], ["north"], "")
    page.sign(dossier.with_suffix(".html"), keys["north"])  # by its page as well
    page.sign(dossier, keys["north"])
    found = page.check(dossier, roster)
    assert (sorted(found.signers), found.missing, found.fault) == (["north", "south"], [], "")
    assert len(json.loads(dossier.with_suffix(".signatures.json").read_text())["signatures"]) == 2


def test_the_rosters_server_may_sign_too(dossier, keys):
    page.sign(dossier, keys["stranger"])
    roster = Roster({"north": keys["north"].public_key}, server=(keys["stranger"].public_key,))
    assert page.check(dossier, roster).signers == ["server"]


def test_nobody_has_signed(dossier, roster):
    found = page.check(dossier, roster)
    assert (found.signers, found.missing) == ([], ["north", "south"])
    assert found.fault == "nobody has signed it"


def test_an_unknown_signer_is_named_by_the_fingerprint(dossier, keys, roster):
    page.sign(dossier, keys["north"])
    page.sign(dossier, keys["stranger"])
    found = page.check(dossier, roster)
    assert found.signers == ["north"]
    assert found.fault == (
        f"it is signed by the key {fingerprint(keys['stranger'].public_key)}, which the roster does not list"
    )


@pytest.mark.parametrize("suffix", [".html", ".json"])
def test_a_changed_file_is_found(dossier, keys, roster, suffix):
    page.sign(dossier, keys["north"])
    file = dossier.with_suffix(suffix)
    text = file.read_text()
    changed = text.replace("wdbc", "other")
    assert changed != text
    if suffix == ".json":
        told = json.loads(changed)
        changed = json.dumps({**told, "digest": digest(told)}, indent=1, ensure_ascii=False) + "\n"
    file.write_text(changed)
    assert (
        page.check(dossier, roster).fault == "it differs from the dossier that north signed: a file was changed since"
    )
    with pytest.raises(ParameterError, match=r"is not the page of|signatures of another dossier"):
        page.sign(dossier, keys["south"])


def test_a_content_without_its_digest_is_refused(dossier, keys, roster):
    dossier.write_text(dossier.read_text().replace("wdbc", "other"))
    for refused in (lambda: page.check(dossier, roster), lambda: page.sign(dossier, keys["north"])):
        with pytest.raises(ParameterError, match="was changed since it was written"):
            refused()


def test_a_signature_of_one_dossier_says_nothing_of_another(dossier, make_run, keys, roster):
    page.sign(dossier, keys["north"])
    other = write_dossier(make_run("local")).files
    other.signatures.write_bytes(dossier.with_suffix(".signatures.json").read_bytes())
    assert page.check(other.data, roster).broken == ["north"]


def test_anothers_key_beside_a_signature_is_found(dossier, keys, roster):
    file = page.sign(dossier, keys["stranger"]).signatures
    told = json.loads(file.read_text())
    told["signatures"][0]["key"] = public_line(keys["north"].public_key)
    file.write_text(json.dumps(told))
    assert page.check(dossier, roster).broken == ["north"]


@pytest.mark.parametrize("text", [
    "", "[]", '{"format": 2, "signatures": []}', '{"format": 1, "signatures": {}}', '{"format": 1, "signatures": [3]}',
    '{"format": 1, "signatures": [{"key": "moretta-public-1 AA==", "signature": ""}]}',
    '{"format": 1, "signatures": [{"key": "k", "signature": "", "more": ""}]}', "[" * 100_000,
])  # fmt: skip
def test_damaged_signatures_are_one_sentence(dossier, roster, text):
    dossier.with_suffix(".signatures.json").write_text(text)
    with pytest.raises(ParameterError, match="expected signatures of format 1; the file is damaged"):
        page.check(dossier, roster)


@pytest.mark.parametrize("signature", ["", "AAAA", "not base64", "A" * 88])
def test_what_is_no_signature_fits_nothing(dossier, keys, roster, signature):
    file = page.sign(dossier, keys["north"]).signatures
    told = json.loads(file.read_text())
    told["signatures"][0]["signature"] = signature
    file.write_text(json.dumps(told))
    assert page.check(dossier, roster).broken == ["north"]


@pytest.mark.parametrize("text", ["", "{}", '{"kind": "moretta dossier"}', '{"kind": "moretta dossier", "format": 1}'])
def test_what_is_no_dossier_is_neither_signed_nor_checked(dossier, keys, roster, text):
    dossier.write_text(text)
    for refused in (lambda: page.check(dossier, roster), lambda: page.sign(dossier, keys["north"])):
        with pytest.raises(ParameterError, match=r"dossier"):
            refused()


@pytest.mark.parametrize("change", [
    {"sections": 3}, {"sections": [3]}, {"sections": [{"number": "1"}]}, {"run": 3}, {"clauses": {}}, {"title": None},
    {"more": 1}, {"digest": [[]]}, {"clauses": {"a": {"document": {}}}},
])  # fmt: skip
def test_a_damaged_dossier_is_one_sentence(dossier, keys, roster, change):
    told = json.loads(dossier.read_text()) | change
    dossier.write_text(json.dumps({**told, **({} if "digest" in change else {"digest": digest(told)})}))
    for refused in (lambda: page.check(dossier, roster), lambda: page.sign(dossier, keys["north"])):
        with pytest.raises(ParameterError, match="this dossier is damaged; write it again"):
            refused()


def test_a_signed_dossier_is_not_written_over_by_another(make_run, keys, roster):
    folder = make_run("fedsgd")
    files = write_dossier(folder).files
    page.sign(files.data, keys["north"])
    write_dossier(folder)  # the same again
    assert page.check(files.data, roster).fault == ""
    (folder / "dossier.toml").write_text('purpose = "another"')
    with pytest.raises(ParameterError, match="signs the existing dossier, and this one differs"):
        write_dossier(folder)
    assert page.check(files.data, roster).fault == ""


def test_the_commands(make_run, tmp_path, keys, roster):
    folder = make_run("fedsgd")
    lines = "".join(f'[[silo]]\nname = "{name}"\nkey = "{public_line(roster.keys[name])}"\n' for name in NAMES)
    (tmp_path / "roster.toml").write_text(lines)
    for name, key in keys.items():
        key.save(tmp_path / name)
    file = folder / "dossier.html"

    def verified(*words: str) -> Called:
        return call("dossier", "verify", file, "--roster", tmp_path / "roster.toml", *words)

    assert call("dossier", folder).code == 0
    done = verified()
    assert (done.code, done.err) == (1, f"moretta: {file}: nobody has signed it\n")
    signed = call("dossier", "sign", file, "--key", tmp_path / "north")
    assert (signed.code, signed.err) == (0, "")
    assert fingerprint(keys["north"].public_key) in signed.out
    done = verified()
    assert (done.code, done.out, done.err) == (0, "signed by: north\nnot signed by: south\n", "")
    parts = {"signers": ["north"], "missing": ["south"], "unknown": [], "broken": []}
    assert verified("--json").told == {"format": 1, **parts}
    assert call("dossier", "sign", file, "--key", tmp_path / "stranger", "--json").told["signatures"].endswith(".json")
    assert verified().code == 1
    assert "which the roster does not list" in verified().err
    assert call("dossier", "sign", file, "--key", tmp_path / "nobody").code == 2
    secret = (tmp_path / "north" / "identity.key").read_text().split()[1]
    assert secret not in signed.out + (folder / "dossier.signatures.json").read_text()
