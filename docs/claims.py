"""Write who learns what into the marked blocks of the pages below, from the claims.

python docs/claims.py            rewrites the blocks between <!-- claims:begin NAME --> and <!-- claims:end -->
python docs/claims.py --check    exits 1, and names the files, where a block is not what the claims give
"""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import made_blocks

from moretta.audit.auditor import all_attacks
from moretta.config import run_files
from moretta.protocols.cgd.claims import ALIGNMENT
from moretta.protocols.common.claims import NAMES, SHARED, Claim, Role
from moretta.protocols.common.severity import SEVERITIES, TRIES
from moretta.protocols.registry import claims_of

ROOT = Path(__file__).parents[1]
OF_PROTOCOLS = tuple(f"docs/threats-{name}.md" for name in ("pbpfl", "fedsgd", "cgd", "baffle"))
PAGES = ("docs/threat-models.md", *OF_PROTOCOLS, "docs/alignment.md", "docs/choose.md", "docs/privacy.md")
DEFENCES = ROOT / "experiments" / "audit"

TABLES = {"pbpfl": ("pbpfl",), "fedsgd": ("fedsgd", "fedavg", "fedprox", "local", "centralised"), "cgd": ("cgd",)}
TABLES |= {"baffle": ("baffle",)}
"""The protocols of each page threats-NAME.md."""

LABELS = {
    "pbpfl": "PBPFL",
    "fedsgd": "FedSGD",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "cgd": "CGD",
    "baffle": "BAFFLE",
}
LABELS |= {"local": "Local training", "centralised": "Centralised training"}

WIDTH = 118


# -- tables of the threat models --------------------------------------------------------------------------------------


def table(claims: Sequence[Claim], names: Sequence[str]) -> str:
    """Return a table, a row a claim. names: the protocols that it is about."""
    head = ["| role | what is claimed | where, and what is assumed | attacks that test it |", "|---|---|---|---|"]
    return "\n".join([*head, *(row(claim, names) for claim in claims)])


def row(claim: Claim, names: Sequence[str]) -> str:
    """Return one claim's row."""
    some = claim.protocols if set(claim.protocols) < set(names) else ()
    role = ", ".join([claim.role, *(f"`{name}`" for name in some)])
    assumed = [f"assumed: {claim.assumes}"] if claim.assumes else []
    where = "; ".join([*(one.says for one in claim.where), *assumed]) or "every run"
    return f"| {role} | {claim.phrase} | {where} | {tests(claim, claim.protocols or names)} |"


def tests(claim: Claim, names: Sequence[str]) -> str:
    """Return the attacks that test a claim under these protocols, or that there are none."""
    known = {attack.name: attack.protocols for attack in all_attacks()}
    found = [f"`{name}`" for name in claim.attacks if known[name] & set(names)]
    rests = [f"tests hold it: {claim.rests_on}"] if claim.rests_on else []
    return "; ".join([", ".join(found) or "untested by an attack", *rests])


def is_shared(claim: Claim) -> bool:
    """Return whether lists about all protocols have the claim."""
    return replace(claim, protocols=()) in SHARED


def package(names: Sequence[str]) -> list[Claim]:
    """Return the claims of some protocols, each once; of shared ones those that attacks test, each by its own."""
    claims = [claim for name in names for claim in claims_of(name) if claim.attacks or not is_shared(claim)]
    return [claim for claim in dict.fromkeys(claims) if claim.role != "reader"]


# -- lists of privacy.md -----------------------------------------------------------------------------------------------


def phrase(claim: Claim, defaults: bool = True) -> str:
    """Return what a claim is about, and under which conditions. defaults: also those that hold by default."""
    words = (one.says for one in claim.where)
    where = " and ".join(one for one in words if defaults or not one.endswith("(the default)"))
    return f"{claim.phrase}, where {where}" if where else claim.phrase


def cell(claims: Iterable[Claim], role: str) -> str:
    """Return what is claimed of one role, for the first table of privacy.md."""
    found = [claim for claim in claims if claim.role == role and claim.place == "front"]
    return "; ".join(phrase(claim, defaults=False) for claim in found)


def front() -> str:
    """Return the first table of privacy.md, of runs with default settings."""
    lines = ["| protocol | a silo | the server |", "|---|---|---|"]
    for names in TABLES.values():
        for name in names:
            lines.append(f"| `{name}` | {cell(claims_of(name), 'silo')} | {cell(claims_of(name), 'server')} |")
    return "\n".join(lines)


def brief() -> str:
    """Return the list of privacy.md: what each role learns or is not given that the first table has not."""
    listed = [(f"Under {LABELS[name]}", claims_of(name)) for names in TABLES.values() for name in names]
    return "\n".join(
        line
        for under, claims in [*listed, ("Under every protocol with sums", SHARED)]
        for role, some in groupby(
            sorted((one for one in claims if one.place == "brief"), key=rank), lambda one: one.role
        )
        for line in items(f"{under} {NAMES[role]}:", some)
    )


def rank(claim: Claim) -> tuple[int, bool]:
    """Return by what claims are in order: roles, and what is learned before what is not."""
    return list(NAMES).index(claim.role), claim.kind == "not given"


def items(head: str, claims: Iterable[Claim]) -> list[str]:
    """Return a list's item, and below it one for each claim."""
    return [f"- {head}", *(bullet(phrase(claim), "  ") for claim in claims)]


def bullet(text: str, indent: str, mark: str = "- ") -> str:
    """Return a wrapped item of a list."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"{indent}{mark}",
        subsequent_indent=indent + " " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )


# -- the table of choose.md --------------------------------------------------------------------------------------------


def prices() -> str:
    """Return what each run of `defences.json` cost, beside the worst that its claims say of two roles."""
    kept = json.loads((DEFENCES / "results" / "defences.json").read_text(encoding="utf-8"))
    words = shlex.split(kept["commands"][0])
    variants = [words[at + 1] for at, word in enumerate(words) if word == "--variant"]
    lines = ["| run | accuracy | seconds | kB a silo and round | worst leak to the server | worst leak to a silo |"]
    lines.append("|---|---|---|---|---|---|")
    listed: dict[str, int] = {}  # each leak by its number, which cells refer to

    def numbers(record: Mapping[str, Any], role: Role) -> str:
        leaks = [str(listed.setdefault(leak, len(listed) + 1)) for leak in worst(record, role)]
        return ", ".join(leaks) or "no attack tests any"

    for variant, one in zip(variants, kept["leaks"], strict=True):
        record = record_of(variant)
        costs = f"{one['accuracy']:.3f} | {one['seconds']:.1f} | {one['bytes_per_silo_per_round'] / 1000:.1f}"
        lines.append(f"| `{variant}` | {costs} | {numbers(record, 'server')} | {numbers(record, 'silo')} |")
    return "\n".join([*lines, "", *(bullet(leak, "", f"{number}. ") for leak, number in listed.items())])


def record_of(variant: str) -> Mapping[str, Any]:
    """Return of a run of defences.toml what conditions of claims ask: all of its silos were in every sum."""
    name, *keys = variant.split()
    overrides = [f"protocol.name={name}", *(f"protocol.{key}".replace("=all", "=10") for key in keys)]
    run_file = run_files.load(DEFENCES / "defences.toml", overrides)
    silos, noised = [f"silo-{number}" for number in range(run_file.data.silos)], "dp-noise" in variant
    sums = [{"of": of, "rounds": [1], "silos": silos, "take": 0} for of in ("set-up", "round")]
    return {
        "protocol": name,
        "settings": run_files.as_sections(run_file),
        "silos": len(silos),
        "rounds": run_file.run.rounds,
        "sums": sums,
        "secure_aggregation": {"scheme": run_file.secure_aggregation.scheme},
        "facts": {"free_scales": 1, "outputs": 10} | ({"epsilon": 1.0, "delta": 1e-5} if noised else {}),
    }


def worst(record: Mapping[str, Any], role: Role) -> list[str]:
    """Return what a role can do by the gravest of its claims that hold of a run, by the severity of their attacks.

    Claims about single rows stand there too, whatever their attacks' severity.
    """
    severities = {
        one.name: SEVERITIES.index(one.severity) for one in all_attacks() if record["protocol"] in one.protocols
    }
    found = list[tuple[int, Claim]]()
    for claim in claims_of(record["protocol"]):
        tried = [severities[name] for name in claim.attacks if name in severities]
        is_a_leak = claim.kind != "not given" and not claim.rests_on  # what rests on tests is a promise
        if claim.role == role and tried and is_a_leak and claim.holds(record):
            found.append((min(tried), claim))
    found.sort(key=lambda one: one[0])
    shown = [one for at, one in enumerate(found) if at == 0 or one[1].about == "rows"]
    return [f"Attacks try **{TRIES[SEVERITIES[rank]]}**: {NAMES[role]} {claim.phrase}." for rank, claim in shown]


# -- blocks ------------------------------------------------------------------------------------------------------------


def block(name: str) -> str:
    """Return the text of a block by its name."""
    if name in TABLES:
        return table(package(TABLES[name]), TABLES[name])
    every = [one for names in TABLES.values() for one in names]
    if name == "alignment":
        return table(ALIGNMENT, ("cgd",))
    if name == "shared":
        return table([claim for claim in SHARED if not claim.attacks], every)
    return {"front": front, "brief": brief, "prices": prices}[name]()


def filled(page: str) -> str:
    """Return a page with each block as the claims have it."""
    return made_blocks.filled(page, "claims", block)


def main(words: Sequence[str] | None = None) -> int:
    """Write the blocks, or check them."""
    return made_blocks.write(ROOT, PAGES, "claims", filled, words)


if __name__ == "__main__":
    raise SystemExit(main())
