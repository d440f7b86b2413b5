"""silo.toml: what it says, and one sentence for whatever is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moretta.config import silo_file
from moretta.data.tables.files import Format
from moretta.deployment import kits
from moretta.deployment.kits import check_listed, pinned, trust_of
from moretta.engines.flare.signing import Trust
from moretta.errors import ParameterError, PeerError
from moretta.secure_aggregation.identity import Identity, Roster, public_line

WHOLE = """
[silo]
name = "north"
out = "kept"
identity = "keys/north"
roster = "roster.toml"
models = ["nets:build"]
record-views = true
edge = true

[data]
source = "rows.csv"
separator = ";"
decimal = ","
file-encoding = "latin-1"
absent = ["n/a"]

[limits]
memory-limit-mib = 80
micro-batch = 4
edge-precision = "float16"
threads = 2
device = "cuda:1"
"""
LEAST = '[silo]\nname = "north"\n[data]\nsource = "rows.csv"\n'


def load(folder: Path, text: str) -> silo_file.SiloFile:
    (folder / "silo.toml").write_text(text)
    return silo_file.load(folder / "silo.toml")


def test_all_that_a_site_may_say(tmp_path: Path) -> None:
    file = load(tmp_path, WHOLE)
    assert file.silo.name == "north"
    assert file.out == tmp_path / "kept"
    assert (file.silo.identity, file.silo.roster) == (Path("keys/north"), Path("roster.toml"))
    assert file.silo.models == ("nets:build",)
    assert file.silo.record_views
    assert file.silo.edge
    assert file.data.source == "rows.csv"
    assert file.data.form == Format(";", ",", "latin-1", ("n/a",))
    assert (file.limits.memory_limit_mib, file.limits.micro_batch, file.limits.threads) == (80.0, 4, 2)
    assert (file.limits.edge_precision, file.limits.device) == ("float16", "cuda:1")


def test_what_the_engine_calls_a_silo_is_for_the_roster(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="engine-name belongs in the roster, beside the silo's key; move it there"):
        load(tmp_path, LEAST.replace("[data]", 'engine-name = "site-1"\n[data]'))


def test_the_least_it_has_to_say(tmp_path: Path) -> None:
    file = load(tmp_path, LEAST)
    assert file.out == tmp_path / "moretta"
    assert file.base == tmp_path
    assert not file.silo.record_views
    assert file.silo.models == ()
    assert file.limits == silo_file.Limits()


def test_paths_start_at_its_folder_wherever_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "silo.toml").write_text(LEAST)
    monkeypatch.chdir(tmp_path)
    assert silo_file.load("silo.toml").base == tmp_path


def test_a_secret_seed_is_not_shown(tmp_path: Path) -> None:
    file = load(tmp_path, LEAST.replace("[data]", "insecure-secret-seed = 424242\n[data]"))
    assert file.silo.insecure_secret_seed == 424242
    assert "424242" not in repr(file)


def test_a_server_key_is_a_line_or_two(tmp_path: Path) -> None:
    lines = [public_line(Identity.fresh().public_key) for _ in range(2)]
    assert load(tmp_path, LEAST).silo.server_key == ()
    assert load(tmp_path, LEAST.replace("[data]", f'server-key = "{lines[0]}"\n[data]')).silo.server_key == (lines[0],)
    both = load(tmp_path, LEAST.replace("[data]", f"server-key = {lines}\n[data]"))
    assert both.silo.server_key == tuple(lines)


def test_which_of_three_places_says_whom_a_site_takes_for_the_server(tmp_path: Path) -> None:
    kit, roster, own = (Identity.fresh() for _ in range(3))
    (tmp_path / "local").mkdir()
    file = load(tmp_path, LEAST)
    assert pinned(file, tmp_path / "local") == ((), kits.SERVER_KEY)
    with pytest.raises(PeerError, match="no key of the server is pinned here"):
        trust_of(file, tmp_path / "local")
    (tmp_path / "local" / kits.SERVER_KEY).write_text(public_line(kit.public_key))
    assert trust_of(file, tmp_path / "local") == Trust("north", (kit.public_key,), None, file.out)
    silo = f'[[silo]]\nname = "north"\nkey = "{public_line(own.public_key)}"\n'
    own.save(tmp_path / "key")
    (tmp_path / "roster.toml").write_text(silo)
    listed = LEAST.replace("[data]", 'roster = "roster.toml"\nidentity = "key"\n[data]')
    assert pinned(load(tmp_path, listed), tmp_path / "local") == ((kit.public_key,), kits.SERVER_KEY)
    (tmp_path / "roster.toml").write_text(f'{silo}[server]\nkey = "{public_line(roster.public_key)}"\n')
    trust = trust_of(load(tmp_path, listed), tmp_path / "local")
    assert trust.keys == (roster.public_key,)
    assert trust.identity is not None
    assert trust.identity.public_key == own.public_key
    said = listed.replace("[data]", f'server-key = "{public_line(kit.public_key)}"\n[data]')
    assert pinned(load(tmp_path, said), tmp_path / "local") == ((kit.public_key,), "silo.toml")


def test_a_roster_that_names_another_server_is_refused_at_the_server() -> None:
    own, other, silo = (Identity.fresh() for _ in range(3))
    check_listed(own, None)
    check_listed(own, Roster({"a": silo.public_key}))
    check_listed(own, Roster({"a": silo.public_key}, server=(other.public_key, own.public_key)))
    with pytest.raises(ParameterError, match="as the server's key, and this server's is"):
        check_listed(own, Roster({"a": silo.public_key}, server=(other.public_key,)))


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"the silo file .*none\.toml does not exist"):
        silo_file.load(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes("[silo]\nname = 'köln'".encode("latin-1"))
    with pytest.raises(ParameterError, match="is not text in UTF-8; save the silo file as UTF-8"):
        silo_file.load(tmp_path / "latin.toml")
    with pytest.raises(ParameterError, match="cannot be read"):
        silo_file.load(tmp_path)
