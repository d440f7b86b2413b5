"""The reference has every key of every section, every command and every public name, as it is made from the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import reference
import typer
from test_readme import leaves
from typer.main import get_command
from typer.testing import CliRunner

import moretta
from moretta.commands import main as cli
from moretta.config import run_files, silo_file
from moretta.contract.settings import kebab
from moretta.deployment import site_policy
from moretta.protocols.common.training import Training
from moretta.protocols.registry import ENTRIES

PROTOCOLS = {name: entry.settings_class() for name, entry in ENTRIES.items()}


def test_its_sections_are_those_that_the_files_have() -> None:
    known = {*run_files._KNOWN, "columns"} - {*PROTOCOLS, "protocol"}
    assert {name.partition(".NAME")[0] for name in reference.RUN_FILE} >= known - {"columns"}
    assert set(reference.SILO_FILE) == set(silo_file.SiloFile.model_fields) - {"base"} | {"mapping.units.NAME"}
    assert set(reference.SILO_FILE.values()) - {silo_file.Conversion} == {
        field.annotation for name, field in silo_file.SiloFile.model_fields.items() if name != "base"
    }


def test_every_key_of_a_run_file_is_on_its_page() -> None:
    page = reference.run_file()
    for section, kind in reference.RUN_FILE.items():
        for name in kind.model_fields:
            assert page.count(f'<a id="{reference.anchor(section, name)}">') == 1, (section, name)
    for section, keys in run_files._KNOWN.items():
        for name in keys if section in reference.RUN_FILE else ():
            assert f'<a id="{reference.anchor(section, name)}">' in page, (section, name)
    for protocol, kind in PROTOCOLS.items():
        for name in kind.model_fields:
            own = name in reference._own(kind) and name not in (*Training.model_fields, "name")
            place = f"protocol.{protocol}" if own else "protocol"
            assert page.count(f'<a id="{reference.anchor(place, name)}">') == 1, (protocol, name)


def test_every_key_of_silo_toml_is_on_its_page() -> None:
    page = reference.silo_toml()
    for section, kind in reference.SILO_FILE.items():
        for name in kind.model_fields:
            assert f'<a id="silo-toml-{reference.anchor(section, name)}">' in page, (section, name)


def test_every_rule_of_a_site_is_on_the_page_of_its_file() -> None:
    page = reference.policy()
    for rule in site_policy.RULES:
        assert f"- **{rule.__name__.replace('_', ' ')}**: {rule.__doc__}" in page
    assert "`learning-rate`" in page


@pytest.mark.parametrize("kind", [*reference.RUN_FILE.values(), *reference.SILO_FILE.values(), *PROTOCOLS.values()])
def test_every_key_says_what_it_changes_and_what_it_takes(kind: type) -> None:
    said = reference.descriptions(kind)
    for name, field in kind.model_fields.items():  # type: ignore[attr-defined]
        if not (issubclass(kind, Training) and name == "name"):
            assert len(said.get(name, "").split()) >= 2, f"{kind.__name__}: its docstring says nothing of {name}"
            assert "any value" not in reference.values(field.annotation, field.metadata) or name == "arguments", name


def test_values_and_defaults_are_those_of_the_classes() -> None:
    page = reference.run_file()
    assert '- <a id="run-rounds"></a>`rounds`: whole number, 1 or more · must be given\n' in page
    assert '<a id="engine-deadline"></a>`deadline`: number, above 0, in seconds · default: left out' in page
    assert ': `"pairwise"`, `"additive-shares"`, `"none"` · default: `"pairwise"`' in page
    assert '<a id="protocol-learning-rate"></a>`learning-rate`: number, above 0 · default: `0.1`' in page
    assert "Other defaults: `cgd` `0.5`, `baffle` `0.003`." in page
    assert "(rows) (rows)" not in page
    assert "`moretta." not in page.partition("## [protocol]")[0].partition("## [data]")[0]


def test_which_protocols_take_a_key_is_tried_on_them() -> None:
    assert set(reference.TRIALS) == set(Training.model_fields)
    assert all(reference.users(name) for name in reference.TRIALS)
    assert "cgd" not in reference.users("momentum")
    assert "cgd" in reference.users("loss")
    assert reference.users("optimizer") == [name for name in PROTOCOLS if name not in ("cgd", "fedavg", "fedprox")]
    for section, name in reference.SOME:
        assert name in reference.RUN_FILE[section].model_fields


def test_every_command_option_and_public_name_is_on_its_page() -> None:
    page = reference.part("commands")
    for command in leaves(get_command(cli.app)):
        for parameter in command.params:
            if parameter.name != "help":
                context = command.make_context("moretta", [], resilient_parsing=True)
                assert parameter.get_help_record(context)[0] in page, (command.name, parameter.name)
    api = reference.part("api")
    assert all(f"### {name}\n" in api for name in moretta.__all__)


def test_keys_have_dashes() -> None:
    assert kebab("early_stopping") in reference.run_file()


def test_the_pages_of_a_checkout_are_what_the_code_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--check"]) == 0, capsys.readouterr().out
    for page in reference.PAGES:
        text = (reference.ROOT / page).read_text()
        assert len(reference.ITEM.findall(text)) > 20
        assert len(text.splitlines()) > 100


def test_a_page_that_is_not_what_the_code_gives_is_named() -> None:
    page = "A\n<!-- reference:begin site-policy -->\n\nold\n\n<!-- reference:end -->\nB\n"
    assert "old" not in reference.filled(page)
    assert reference.filled(reference.filled(page)) == reference.filled(page) != page


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command and each group, with its words."""
    yield path, command
    for name, one in getattr(command, "commands", {}).items():
        yield from commands(one, (*path, name))


def lost(app: typer.Typer) -> Iterator[str]:
    """What stands in brackets in a text of help, and not in the help as a terminal shows it."""
    for path, command in commands(get_command(app)):
        shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "240", "TERM": "dumb"}).output
        for text in (command.help, *(getattr(one, "help", "") for one in command.params)):
            for word in re.findall(r"\[[^\]]*\]", (text or "").replace("\\[", "[")):
                if word not in shown:
                    yield f"moretta {' '.join(path)}: {word}"


def test_no_help_loses_what_stands_in_brackets() -> None:
    assert not list(lost(cli.app))
    assert "[data] schema" in CliRunner().invoke(cli.app, ["schema", "--help"], env={"COLUMNS": "240"}).output
    eaten = typer.Typer()

    @eaten.command()
    def look(out: str = typer.Option("x", help="As [run] out.")) -> None:
        """Look at [data]."""

    assert len(list(lost(eaten))) == 2


def test_a_docstring_is_split_by_names() -> None:
    text = "Do it.\n\none: the first,\n    `two` too. two, three: both\n    of them. Raises `Error` here.\n\nMore."
    rest, said = reference.split(text, ["one", "two", "three"])
    assert said == {"one": "the first, `two` too.", "two": "both of them.", "three": "both of them."}
    assert rest == "Do it.\n\nRaises `Error` here.\n\nMore."
