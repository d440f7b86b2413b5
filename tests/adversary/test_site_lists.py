"""Whatever a server writes to a site, nothing of the site's files, rows or secrets comes back, and no code runs there.

The oracle, after each list of jobs that a seed draws:

- Twins that differ in rows and files answer alike, tickets aside, until training begins. What they may differ in is one
  bit for each settings that their operators took, which here are those of one run: ready, or one word.
- No reply holds bytes of a row or of a file.
- No code ran that the site has not agreed to: from beside its silo.toml, or installed.
- No file was opened but silo.toml, the rows and what the site keeps; and none was changed.
- No secret follows from the text: twins advertise other keys, and keep other roots.
- No statistic is answered that the text says the run does not need.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from site_twins import Edit, Job, Opened, Told, Twin

from moretta.engines.flare.site_worker import UNFIT
from moretta.secure_aggregation.plain import PlainUpload

IN_ALL, QUICK = 10_000, 300  # lists, in `make test-all` and in `make test`

CODE = ('"nightly_cleanup:mark"', '"installed_canary:mark"', '"json:dumps"')
FILES = ('"secret.txt"', '"only.txt"', '"HERE/only.txt"', '"weights.safetensors"', '"absent.txt"', '"../installed"')
VALUES: dict[tuple[str, str], tuple[str, ...]] = {
    ("run", "metrics"): (*(f"[{each}]" for each in CODE), '["accuracy"]'),
    ("run", "trackers"): (*(f"[{each}]" for each in CODE), '["tensorboard"]', '["mlflow"]'),
    ("run", "insecure-secret-seed"): ("3", "0"),
    ("run", "out"): FILES,
    ("run", "record-views"): ("true",),
    ("run", "seed"): ("8",),
    ("run", "rounds"): ("5", "1000000"),
    ("run", "participation"): ("0.5",),
    ("run", "dtype"): ('"float64"', '"float16"'),
    ("run", "device"): ('"cuda"',),
    ("run", "resume"): ("true",),
    ("data", "source"): (*CODE, *FILES, '"wdbc"'),
    ("data", "schema"): FILES,
    ("data", "test"): (*FILES, '"rows.npz"'),
    ("data", "path"): FILES,
    ("data", "labels"): FILES,
    ("data", "standardise"): ("true", "false"),
    ("data", "batch-size"): ("0", "8", "27"),
    ("data", "least-rows"): ("9", "27", "40"),
    ("data", "inputs"): ("[5]", "[2, 2]"),
    ("data", "classes"): ("2", "4"),
    ("data", "outputs"): ("1",),
    ("data", "tokens"): ("true",),
    ("data", "missing"): ('"mean"', '"error"'),
    ("data", "look"): ("true",),
    ("data", "score-at-silos"): ("true",),
    ("data", "alignment"): FILES,
    ("data", "partition"): ('"by-feature"', '"grid"'),
    ("data", "columns"): ("[[0, 1], [2, 3]]",),
    ("model", "source"): (*CODE, *FILES),
    ("model", "hidden"): ("[4]", "[1000000, 1000000]"),
    ("protocol", "name"): ('"fedavg"', '"pbpfl"', '"cgd"', '"baffle"'),
    ("protocol", "learning-rate"): ("0.2",),
    ("protocol", "momentum"): ("0.5",),
    ("protocol", "loss"): ('"mse"', '"cross-entropy"'),
    ("protocol", "own-loss"): CODE,
    ("protocol", "warm-start"): FILES,
    ("protocol", "dp-noise"): ("1.0",),
    ("protocol", "dp-clip"): ("1.0", "1e-9"),
    ("secure-aggregation", "scheme"): ('"none"', '"additive-shares"'),
    ("secure-aggregation", "roster"): FILES,
    ("secure-aggregation", "identity"): FILES,
    ("secure-aggregation", "threshold"): ("1", "3"),
    ("engine", "sites"): ('["north", "south"]', '["north"]', '["south", "west"]'),
    ("engine", "message-mib"): ("1",),
    ("engine", "deadline"): ("5.0",),
    ("engine", "edge"): ('["north"]',),
    ("engine", "workers"): ("2",),
    ("silo", "models"): (f"[{CODE[0]}]",),  # a section of silo.toml, by whose words a site agrees to code
    ("privacy", "fewest-silos"): ("1",),
}
WITH: tuple[tuple[Edit, ...], ...] = (  # keys that say something together alone
    (),
    (
        Edit("protocol", "dp-noise", "1.0"),
        Edit("protocol", "dp-clip", "1.0"),
        Edit("data", "batch-size", "0"),
        Edit("data", "least-rows", "9"),
    ),
    (Edit("data", "standardise", "false"), Edit("secure-aggregation", "scheme", '"none"')),
    (Edit("data", "partition", '"grid"'), Edit("data", "grid", "[1, 3]")),
)
NEEDING_MOMENTS = {Edit("data", "standardise", "true"), Edit("data", "missing", '"mean"')}
ITS_OWN = {"silo.toml", "rows.npz"}


def drawn(seed: int) -> tuple[Job, ...]:
    """Draw a list: up to three jobs, most of which change one to three keys of an honest text."""
    draw = random.Random(seed)

    def job() -> Job:
        keys = draw.sample(sorted(VALUES), draw.choice([0, 0, 1, 1, 2, 3]))
        edits = (*draw.choice([(), (), *WITH]), *(Edit(*key, draw.choice(VALUES[key])) for key in keys))
        odd = draw.random() < 0.1
        return Job(
            edits,
            moments=Edit("data", "standardise", "false") in edits and not {*edits} & NEEDING_MOMENTS,
            model=draw.choice(["", "another"]) if odd else "",
            version=draw.choice(["", "0.0.1"]) if odd else "",
            round=draw.choice([0, 5]) if odd else 0,
        )

    return tuple(job() for _ in range(draw.choice([1, 1, 2, 3])))


class Adversary:
    """Twins, and what watches them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.twins = folder, [Twin(folder, which) for which in "ab"]
        self._opened = Opened(folder)

    def found(self, jobs: tuple[Job, ...]) -> list[str]:
        """Play a list against both; return what the server has of it that it may not have."""
        told, kept, wrong = list[Told](), list[set[str]](), list[str]()
        for twin in self.twins:
            with self._opened.watched():
                told.append(twin.play(jobs))
            inside = {path.removeprefix(f"{twin.which}/") for path in self._opened.paths} - ITS_OWN - {twin.which}
            if odd := {path for path in inside if path.partition("/")[0] not in ("kept", "__pycache__", "installed")}:
                wrong.append(f"opened {sorted(odd)}")
            kept.append((leaves := twin.leave())[0])
            if leaves[1]:
                wrong.append("changed a file")
            if any(canary in data for canary in twin.canaries for data in told[-1].data):
                wrong.append("sent bytes of a row or a file")
        if (mark := self.folder / "marked").exists():
            mark.unlink()
            wrong.append("ran code")
        for name in ("nightly_cleanup", "installed_canary"):
            sys.modules.pop(name, None)
        played = zip(jobs, *(one.jobs for one in told), strict=True)
        apart = [(job, *each) for job, *each in played if each[0] != each[1]]
        plain = [[replies for job, replies in zip(jobs, one.jobs, strict=True) if not job.round] for one in told]
        if len(_who_is_ready(*plain)) > 1 or not all(_ready_or_not(*each) for _, *each in apart):
            wrong.append(f"told twins apart: {apart}")
        if any(("message", PlainUpload.TAG) in replies for replies in told[0].jobs):
            wrong.append("answered a statistic that the run does not need")
        self.advertised = bool(told[0].keys)
        if set(told[0].keys) & set(told[1].keys) or kept[0] & kept[1]:
            wrong.append("has a secret that follows from the text")
        return wrong


def _who_is_ready(*twins: list[list[tuple[str, str]]]) -> set[tuple[bool, ...]]:
    """Return which twins were ready, over all jobs that some twin read rows for: one bit a list, whatever changes.

    Nobody accepts anything in a list, so a twin that was ready once is ready for all of them, or for none.
    """
    read = [each for each in zip(*twins, strict=True) if any(_read_rows(replies) for replies in each)]
    return {tuple(any(kind == "here" for kind, _ in replies) for replies in each) for each in read}


def _read_rows(replies: list[tuple[str, str]]) -> bool:
    return any(kind == "here" or sentence.startswith(UNFIT) for kind, sentence in replies)


def _ready_or_not(*twins: list[tuple[str, str]]) -> bool:
    """Whether one twin says in one word that it is not ready; the other is past its rows, and may name its software."""
    return twins.count([("no", f"{UNFIT}TICKET")]) == 1


@pytest.fixture(scope="module")
def adversary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adversary]:
    folder = tmp_path_factory.mktemp("twins")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder / "installed")
        patch.setattr(os, "fsync", lambda _: None)  # no power cut is played here, and a disk takes 10 ms for each
        yield Adversary(folder)


def edited(*keys: tuple[str, str, str], noise: bool = False, moments: bool = False) -> Job:
    edits = (*(WITH[1] if noise else ()), *(WITH[2] if moments else ()), *(Edit(*each) for each in keys))
    return Job(edits, moments=moments)


ATTACKS: dict[str, tuple[Job, ...]] = {
    "code beside silo.toml": (edited(("run", "metrics", '["nightly_cleanup:mark"]')),),
    "code that is installed": (edited(("run", "metrics", '["installed_canary:mark"]')),),
    "code that tracks": (edited(("run", "trackers", '["nightly_cleanup:mark"]')),),
    "the site's secrets": (edited(("run", "insecure-secret-seed", "3")),),
    "a file of the site": (edited(("protocol", "warm-start", '"secret.txt"')),),
    "a file that may be there": (edited(("protocol", "warm-start", '"HERE/only.txt"')),),
    "the number of rows": tuple(edited(("data", "least-rows", most), noise=True) for most in ("27", "25")),
    "the number of rows from below": tuple(
        edited(("data", "least-rows", most), noise=True) for most in ("1", "25", "27")
    ),
    "a statistic": (edited(moments=True),),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_known_attack_tells_nothing(adversary: Adversary, attack: str) -> None:
    """Each succeeded once."""
    assert adversary.found(ATTACKS[attack]) == []


def test_an_honest_run_is_taken(adversary: Adversary) -> None:
    assert adversary.found((Job(()),)) == []
    assert adversary.advertised


def search(adversary: Adversary, seeds: range) -> None:
    """Play these lists; a fifth of them must come to a key."""
    advertised = 0
    for seed in seeds:
        jobs = drawn(seed)
        assert not (wrong := adversary.found(jobs)), f"list {seed}, {jobs}: {'; '.join(wrong)}"
        advertised += adversary.advertised
    assert advertised > len(seeds) / 5


def test_no_list_of_jobs_tells_anything_of_a_site(adversary: Adversary) -> None:
    search(adversary, range(QUICK))


@pytest.mark.slow
def test_none_of_many_lists_of_jobs_tells_anything_of_a_site(adversary: Adversary) -> None:
    search(adversary, range(QUICK, IN_ALL))
