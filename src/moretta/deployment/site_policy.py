"""The limits of a server's power over this site's machine. Read it from top to bottom: nothing else refuses a run.

A run arrives as the server's text (`admit`). A rule is a function of that run and of the site's silo.toml. It raises
`moretta.errors.PolicyError`, whose sentence the server receives in full, because it follows from the text alone. No
rule reads a row. Code that reads rows runs later, and sends the server one word (`moretta.engines.flare.site_worker`).

A run's further demands are in its hello (`greet`) and its model (`fitting_model`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from moretta import __version__
from moretta.config import rules, run_files
from moretta.config.run_files import RunFile, shared
from moretta.config.silo_file import SiloFile
from moretta.contract.settings import Section, kebab
from moretta.data.settings import GRIDS, shape_of_grid
from moretta.deployment.agreed_settings import SiteAgreement, pinned_settings
from moretta.engines.flare.envelope import Hello, digest_of
from moretta.engines.journal import Journal
from moretta.errors import ParameterError, PolicyError
from moretta.models.catalogue import BUILT_IN
from moretta.protocols.common.lattice import Privacy
from moretta.protocols.common.own_loss import named
from moretta.protocols.common.setting import LEAST_ROWS_MISSING
from moretta.protocols.common.specification import playing
from moretta.protocols.registry import OWN, edge_of
from moretta.secure_aggregation.cohort import Participation
from moretta.secure_aggregation.one_sum import Answers
from moretta.secure_aggregation.settings import SecureAggregation

if TYPE_CHECKING:
    from torch import nn

LEDGER = "epsilon.txt"  # beside the folders of runs
UNITS = ("row", "group", "silo")  # units that noise hides, from the smallest
DELTA = 1e-5  # the most where silo.toml has max-epsilon alone: with a delta near 1 any epsilon is kept without noise
SCHEMES = ("none", "additive-shares", "pairwise")  # from the least protection


def admit(text: str, site: SiloFile) -> RunFile:
    """Return the run of a server's text, if this site takes part in it, and pin the settings of a first run.

    The schema, and all settings that touch rows, are those of the first run, or `moretta accept` took them
    (`moretta.deployment.agreed_settings`).

    Args:
        text: shared settings, as TOML (`moretta.deployment.shared_settings.shared_text`).
        site: its silo.toml.

    Raises:
        PolicyError: as `permitted` does, or the settings wait for the operator.
    """
    agreement = SiteAgreement(site.out)
    try:
        run = permitted(text, site)
    except PolicyError as error:
        agreement.refuse(str(error))
        raise
    agreement.check(pinned_settings(run))
    return run


def permitted(text: str, site: SiloFile) -> RunFile:
    """Return the run of a server's text, if silo.toml permits it. It changes nothing.

    Raises:
        PolicyError: the text is no run file, or a rule refuses it.
    """
    path = site.base / "run.toml"
    with _refusing(path):
        run = run_files.loads(text, path, agreed=site.silo.models)
    for rule in RULES:
        rule(run, site)
    return run


def own_keys(run: RunFile, site: SiloFile) -> None:
    """A key that is the server's or a site's own stands at its default: seeds of secrets, code of metrics, paths."""
    plain = shared(run)
    for name in type(run).model_fields:
        section, allowed = getattr(run, name), getattr(plain, name)
        if isinstance(section, Section) and section != allowed:
            key = next(key for key in type(section).model_fields if getattr(section, key) != getattr(allowed, key))
            raise PolicyError(
                f"[{kebab(name)}] {kebab(key)} is set in the server's run, expected only in a machine's own files; "
                "remove it there"
            )


def named_silo(run: RunFile, site: SiloFile) -> None:
    """The site is one of the run's silos; so the run's rows are at sites, where each silo.toml places them."""
    if site.silo.name not in run.engine.sites:
        raise PolicyError(
            f"[engine] sites lists {', '.join(run.engine.sites):.200}, but not {site.silo.name!r}; expected this site "
            "among them"
        )


def known_code(run: RunFile, site: SiloFile) -> None:
    """Models, losses, training loops are built in, or code that `[silo] models` lists; an edge client runs none."""
    sources = {} if site.silo.edge else {"[model] source": run.model.source}
    sources |= {f"[protocol] {kebab(name)}": named(own) for name, own in run.protocol.own_code.items()}
    for key, source in sources.items():
        if source not in BUILT_IN and source not in site.silo.models:
            raise PolicyError(
                f"{key} = {source!r} of the run is code that this site has not agreed to run; read it, put it "
                f'beside silo.toml, and list it there: [silo] models = ["{source}"]'
            )


def allowed_protocol(run: RunFile, site: SiloFile) -> None:
    """The protocol is in `[runs] protocols` or, where that is empty, built in; an edge site must support it."""
    allowed, name = site.runs.protocols or tuple(OWN), run.protocol.name
    if name not in allowed:
        raise PolicyError(f'[protocol] name = "{name}": [runs] protocols in this site\'s silo.toml does not list it')
    if not site.silo.edge:
        return
    with _refusing():
        rules.check(run.model_copy(update={"engine": site.edge_engine(run.engine)}), rules.at_edge_site)
        edge = edge_of(run.protocol)
        edge.check_packages(edge.RUNS)
        edge.check_tokens(run.data.layout, site.limits.edge_precision)


def length(run: RunFile, site: SiloFile) -> None:
    """A run has at most `[runs] rounds` rounds, each of at most `[runs] local-epochs` passes over the rows."""
    epochs = getattr(run.protocol, "local_epochs", None) or 0
    for key, number, most in (
        ("[run] rounds", run.run.rounds, site.runs.rounds),
        ("[protocol] local-epochs", epochs, site.runs.local_epochs),
    ):
        if number > most:
            raise PolicyError(f"{key} = {number}: this site's silo.toml allows {most} ([runs])")


def looks(run: RunFile, site: SiloFile) -> None:
    """Rows are counted before training, or scored, only where `[runs] look` and `[runs] scores` allow it."""
    if run.data.look and not site.runs.look:
        raise PolicyError("[data] look = true: this site's silo.toml does not allow it ([runs] look = false)")
    if run.data.score_at_silos and not site.runs.scores:
        raise PolicyError("[data] score-at-silos: this site's silo.toml does not allow it ([runs] scores = false)")
    if run.data.validation_fraction and not site.runs.scores:
        raise PolicyError("[data] validation-fraction: this site's silo.toml does not allow it ([runs] scores = false)")


def floors(run: RunFile, site: SiloFile) -> None:
    """A run hides at least as much as the floors of `[privacy]` ask for."""
    secure, protocol = run.secure_aggregation, run.protocol
    sites, (rows, columns) = run.engine.sites, shape_of_grid(run.data) if run.data.partition in GRIDS else (1, 1)
    if rows > 1 and columns > 1:  # a part of the columns has one holder in each row, and a sum of its own
        sites = sites[::columns]
    players = playing(secure, run.run.participation, sites, run.run.seed)
    blind = secure.scheme != "none" and getattr(protocol, "blind", True) is not False
    above_floors(site, secure, players, getattr(protocol, "dp_noise", None) or 0.0, blind=blind)


def above_floors(
    site: SiloFile, secure: SecureAggregation, players: Participation | None, noise: float = 0.0, *, blind: bool = True
) -> None:
    """Sums of these players hide at least as much as the floors of `[privacy]` ask for."""
    floor, masked = site.privacy, secure.scheme == "pairwise"
    least = secure.rules(None, players).least(secure.scheme)
    floors: Mapping[str, tuple[bool, object, object]] = {
        "fewest-silos": (secure.scheme == "none" or least >= floor.fewest_silos, floor.fewest_silos, least),
        "threshold": (
            floor.threshold is None or (masked and least >= floor.threshold),
            floor.threshold,
            least if masked else f'none under scheme = "{secure.scheme}"',
        ),
        "scheme": (
            SCHEMES.index(secure.scheme) >= SCHEMES.index(floor.scheme or "none"),
            floor.scheme or "none",
            secure.scheme,
        ),
        "blind": (blind or not floor.blind, "true", "false"),
        "roster": (site.silo.roster is not None or not floor.roster, "true", "none: [silo] roster is not set"),
        "dp-noise": (noise >= (floor.dp_noise or 0.0), floor.dp_noise, noise or "none"),
    }
    for key, (good, limit, got) in floors.items():
        if not good:
            raise PolicyError(
                f"[privacy] {key} = {limit} in this site's silo.toml, but the run has less, {got}; raise it in the "
                "run, or lower the floor"
            )


@lru_cache(maxsize=4)
def _sums_of(text: str) -> SecureAggregation:
    """Return [secure-aggregation] from TOML; cached, as another framework's site reads a run's for each message."""
    return run_files.section("secure-aggregation", SecureAggregation, run_files.parse_toml(text, Path("run.toml")))


def permitted_sums(text: str, players: Participation, site: SiloFile) -> SecureAggregation:
    """Return the settings of sums in another framework's run, with this site's own keys, if it takes part.

    Args:
        text: [secure-aggregation] of the run, as TOML.
        players: the run's silos, and the number of them in a round.
        site: its silo.toml.

    Raises:
        PolicyError: the text is no such section, or its sums hide less than silo.toml requires.
        ParameterError: silo.toml names a roster that cannot be read.
    """
    with _refusing():
        secure = _sums_of(text)
    if secure.roster is not None or secure.identity is not None:
        raise PolicyError(
            "[secure-aggregation] names a roster or an identity; only a machine's own files may name them"
        )
    if secure.scheme != "pairwise":
        raise PolicyError(f'[secure-aggregation] scheme = "{secure.scheme}": expected "pairwise", in which masks hide')
    if site.silo.name not in players.silos or len(set(players.silos)) < len(players.silos):
        raise PolicyError(f"expected each silo of the run once, and {site.silo.name!r} among them")
    roster = site.load_roster()
    if roster is not None and set(players.silos) != roster.keys.keys():
        raise PolicyError("the run's silos differ from those of this site's roster; bring the same roster to both")
    if not 2 <= players.count <= len(players.silos):
        raise PolicyError(f"expected 2 to {len(players.silos)} silos in a round, got {players.count}")
    above_floors(site, secure, players)
    within_budget(None, site)
    return site.with_keys(secure)


def budget(run: RunFile, site: SiloFile) -> None:
    """Where `[privacy]` has unit, max-epsilon or delta, a run has noise and dp-epsilon within them."""
    within_budget(run.protocol.privacy, site)


def within_budget(noise: Privacy | None, site: SiloFile) -> None:
    """Check a run's noise, None for none, against the budget of `[privacy]`. Raises `moretta.errors.PolicyError`."""
    noise = noise if noise and noise.noise else None  # a multiplier of 0 hides nothing
    floor, most = site.privacy, None if noise is None else noise.most
    delta = DELTA if floor.delta is None and floor.max_epsilon is not None else floor.delta
    bounds: Mapping[str, tuple[bool, object, str, object]] = {
        "unit": (
            floor.unit is None or (noise is not None and UNITS.index(noise.unit) >= UNITS.index(floor.unit)),
            *(floor.unit, "the run's noise hides", "nothing" if noise is None else f"one {noise.unit}"),
        ),
        "max-epsilon": (
            floor.max_epsilon is None or (most is not None and most <= floor.max_epsilon),
            *(floor.max_epsilon, "the run has dp-epsilon =", "none" if most is None else f"{most:g}"),
        ),
        "delta": (
            delta is None or (noise is not None and noise.delta <= delta),
            *(delta, "the run has dp-delta =", "none" if noise is None else f"{noise.delta:g}"),
        ),
    }
    for key, (good, limit, what, got) in bounds.items():
        if not good:
            raise PolicyError(
                f"[privacy] {key} = {limit} in this site's silo.toml, but {what} {got}; change the run, or the limit "
                "here"
            )


def one_run(run_id: str, run: RunFile, answers: Answers) -> None:
    """Refuse settings other than those at the run's start here.

    Otherwise a server that resumes with another `[run] seed`, for example, receives a second sum of a take, of other
    rows.

    Args:
        answers: The record of what the site answers once.

    Raises:
        PolicyError: The settings differ.
    """
    if not answers.hold(run_id, "settings", run_files.digest(run)):
        raise PolicyError(
            f"expected the settings that this site began run {run_id} with, got others, under which a round could be "
            "subtracted; begin another run for them"
        )


def charge(run_id: str, run: RunFile, site: SiloFile) -> None:
    """Write a run's dp-epsilon to the site's ledger before anything is sent, whole and once.

    Raises:
        PolicyError: all runs together would pass max-epsilon, and `per` is "data set".
    """
    noise, floor = run.protocol.privacy, site.privacy
    if noise is None or noise.most is None:
        return
    # A server may reuse an id: with other settings, whose releases are not counted together, it is another run.
    settings = json.dumps(pinned_settings(run), sort_keys=True, default=str)
    before, key = spent_by(site), f"{run_id}-{hashlib.sha256(settings.encode()).hexdigest()[:16]}"
    total = sum(before.values())
    if key in before:
        return
    if floor.per == "data set" and floor.max_epsilon is not None and total + noise.most > floor.max_epsilon:
        raise PolicyError(
            f"[privacy] max-epsilon = {floor.max_epsilon:g} of this site's data set: {len(before)} earlier runs may "
            f"have spent {total:g}, and this one asks for dp-epsilon = {noise.most:g}; lower that"
        )
    Journal(site.out / LEDGER).append(f"{key} {noise.most!r}")


def spent_by(site: SiloFile) -> Mapping[str, float]:
    """Return the dp-epsilon of each run that the site took part in. Raises `moretta.errors.PolicyError`."""
    lines = Journal(site.out / LEDGER).lines()
    try:
        return {run: float(most) for run, most in (line.split() for line in lines)}
    except ValueError:
        raise PolicyError(
            f"this site's record of its epsilon is damaged: expected a run and its dp-epsilon in each line of "
            f"{LEDGER}; its operator restores it"
        ) from None


def masked_under_a_roster(run: RunFile, site: SiloFile) -> None:
    """A site with a roster does not trust the server with uploads, so sums are masked."""
    if site.silo.roster is not None and run.secure_aggregation.scheme == "none":
        raise PolicyError(
            '[secure-aggregation] scheme = "none" of the run shows each upload to the server, which this site does '
            "not trust, as it has a roster; have the run use another scheme"
        )


def noise_of_known_lots(run: RunFile, site: SiloFile) -> None:
    """Under dp-noise the fewest rows of any silo are public, so that no refusal reveals a site's number of rows."""
    noise = run.protocol.privacy
    if noise is not None and noise.unit != "silo" and run.data.least_rows is None:
        raise PolicyError(LEAST_ROWS_MISSING)


RULES: tuple[Callable[[RunFile, SiloFile], None], ...] = (
    own_keys,
    named_silo,
    known_code,
    allowed_protocol,
    length,
    looks,
    floors,
    budget,
    masked_under_a_roster,
    noise_of_known_lots,
)


def fitting_model(site: SiloFile, build: Callable[[], nn.Module]) -> nn.Module:
    """Build the model of a run, of at most `[limits] parameters` numbers."""
    from moretta.models.checks import build_within

    with _refusing():
        return build_within(site.limits.parameters, build)


def greet(hello: Hello, text: str, run: RunFile, torch: str | None = None, model: str | None = None) -> None:
    """Check a server's hello: software, settings and model are the same here as there.

    Args:
        hello: the server's.
        text: the run's, as it was sent here.
        run: the same, as `admit` read it.
        torch: the version of PyTorch; None at an edge client, which has none.
        model: the digest of the model as it is built here; None at an edge client.

    Raises:
        PolicyError: something differs.
    """
    theirs = hello.versions.get("moretta", "another")
    if theirs != __version__:
        raise PolicyError(f"runs Moretta {__version__}, but the server {theirs}; install the same")
    check_job(text, hello.job)
    allowed = sorted({_minor(version) for version in (hello.versions.get("torch", ""), *hello.torch)})
    if torch is not None and _minor(torch) not in allowed:
        raise PolicyError(
            f"runs PyTorch {torch}, expected {', '.join(allowed)}; install one of these, or have the server name this "
            "one in [engine] torch-versions"
        )
    if model is not None and model != hello.model:
        raise PolicyError(
            f"builds another model than the server from [model] source (digests {model[:12]} and "
            f"{hello.model[:12]}); bring the same code to both"
        )
    if model is None and not _fit_targets(hello.outputs, run):
        raise PolicyError(
            f"the server's model has {hello.outputs} outputs, which do not fit the run's targets; correct the run"
        )


def check_job(text: str, digest: str) -> None:
    """Refuse a run whose text does not have this digest."""
    ours = digest_of(text)
    if ours != digest:
        raise PolicyError(
            f"this site's run settings differ from the server's (digests {ours[:12]} and {digest[:12]}): the job was "
            "edited by hand; make it again by moretta job or serve"
        )


def _fit_targets(outputs: int, run: RunFile) -> bool:
    """Return whether a model's outputs fit all targets that a run allows; else a refusal is a bit about rows."""
    if run.masks is not None:
        return outputs == run.masks.classes * math.prod(run.masks.shape)
    classes = run.data.classes if run.table is None else len(run.table.classes)
    if not classes:
        return outputs == (run.data.outputs or 1)
    return outputs >= classes or (outputs == 1 and classes == 2 and run.protocol.loss == "mse")


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


@contextmanager
def _refusing(path: Path = Path("run.toml")) -> Iterator[None]:
    """Refuse a run for a mistake in its text. path: of this site, which is not sent to the server."""
    try:
        yield
    except ParameterError as error:
        raise PolicyError(str(error).replace(str(path), path.name)) from None
