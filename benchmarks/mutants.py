"""How many small faults the tests miss: mutants of six modules, 50 of each, each against its module's tests.

A mutant is the package with one change that mutmut makes: another operator or number, an argument left out, None for
a value. It is killed if a test fails or the process dies, timed out if the tests do not end (that too is noticed), and
survives if they pass. Run it before and after a change of the tests or of the code; no more may survive after:

    pip install mutmut==3.8.1
    python benchmarks/mutants.py --log mutants.jsonl --out benchmarks/records/mutants.json
    python benchmarks/mutants.py --log after.jsonl --out after.json --against benchmarks/records/mutants.json

A run that was ended goes on where its log stops. `--show ring:Ring.encode:7` prints a mutant and runs nothing.

**Which mutants.** One is named by module, function and place among mutmut's mutants of that function's source. Names
are ranked by a hash of them and a seed, and the first of each module are drawn. So the same mutants are drawn after a
file has moved (its path below is all that changes) and after other functions of it have changed; `change` in the record
is a hash of what the mutant changes, and tells where a mutant of the same name is another.

**How it is fast.** Nothing is written to the checkout: a copy of src and tests gets one mutant at a time, and a fork of
this process, which has imported the slow packages, and nothing of moretta, runs the tests. Hypothesis keeps the number
of examples that tests ask for, and does not shrink them.

**Why it says the same twice.** Hypothesis draws the same examples in each run, and what is drawn from the system (keys,
shares) comes from a generator whose seed is the test's name.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import importlib
import json
import multiprocessing
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Any

import libcst
import pytest
from mutmut.mutation.file_mutation import create_mutations, deep_replace

SUMS, PBPFL = "tests/secure_aggregation", "tests/protocols/pbpfl"
MODULES = {
    "ring": ("src/moretta/secure_aggregation/encoding.py", f"{SUMS}/test_ring.py", f"{SUMS}/test_small_rings.py"),
    "encoding": (
        "src/moretta/secure_aggregation/encoding.py",
        *(f"{SUMS}/test_{name}.py" for name in ("small_rings", "active_server", "additive", "pairwise", "blind_sums")),
    ),
    "unmasking": (
        "src/moretta/secure_aggregation/unmasking.py",
        *(f"{SUMS}/test_{name}.py" for name in ("unmasking", "removable_noise")),
    ),
    "shamir": ("src/moretta/secure_aggregation/shamir.py", f"{SUMS}/test_shamir.py"),
    "driver": ("src/moretta/engines/driver.py", "tests/engines/test_driver.py"),
    "perturbation": (
        "src/moretta/protocols/pbpfl/perturbation.py",
        *(f"{PBPFL}/test_{name}.py" for name in ("bent_softmax", "exactness", "secrecy", "cross_entropy")),
    ),
}
"""By module: its file, and the files of its tests, the fast ones first."""
RINGS = ("Ring", "largest_magnitude", "check_fraction_bits", "_most", "_power_of_two")
"""Functions and classes of encoding.py that count as the module `ring`, a file of its own until it joined."""

ROOT = Path(__file__).parents[1]
SEED = "moretta"
SLOW_TO_IMPORT = (
    *("numpy", "torch", "torch.nn.utils.stateless", "torch.func", "scipy.stats", "sklearn.metrics", "pydantic"),
    *("hypothesis.strategies", "hypothesis.stateful", "hypothesis.extra.numpy", "safetensors.torch"),
    *("cryptography.hazmat.primitives.asymmetric.ed25519", "cryptography.hazmat.primitives.ciphers.aead"),
)
ALIKE = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
MEMORY = 16 << 30  # bytes of addresses: a number that has become huge fails, and does not take the machine with it


SYSTEM = random.Random(SEED)
"""Stands for the system's generator while tests run."""


@dataclass(frozen=True)
class Mutant:
    """One change of one module. change: the lines taken out and put in, as a diff has them."""

    module: str
    name: str
    line: int
    change: str
    source: str

    @property
    def digest(self) -> str:
        """Return a hash of the change, whichever the file and the line."""
        return hashlib.sha256(self.change.encode()).hexdigest()[:12]


def mutants(module: str) -> Iterator[Mutant]:
    """Yield all mutants of a module that compile, in the order of their rank."""
    source = (ROOT / MODULES[module][0]).read_text()
    tree, mutations, *_ = create_mutations(MODULES[module][0], source)
    functions = dict(functions_of(tree))
    names, seen = {}, Counter[str]()
    for mutation in mutations:
        function = functions.get(mutation.contained_by_top_level_function)
        if function and (module not in ("ring", "encoding") or (function.split(".")[0] in RINGS) == (module == "ring")):
            seen[function] += 1
            names[f"{module}:{function}:{seen[function]}"] = mutation
    for name in sorted(names, key=lambda name: hashlib.sha256(f"{SEED} {name}".encode()).digest()):
        changed = deep_replace(tree, names[name].original_node, names[name].mutated_node)
        assert isinstance(changed, libcst.Module)
        with contextlib.suppress(SyntaxError):
            compile(changed.code, name, "exec")
            yield Mutant(module, name, *difference(source, changed.code), changed.code)


def functions_of(tree: libcst.Module) -> Iterator[tuple[Any, str]]:
    """Yield the functions whose mutants mutmut tries, those of the module and of its classes, and their names."""
    for node in tree.body:
        if isinstance(node, libcst.FunctionDef):
            yield node, node.name.value
        if isinstance(node, libcst.ClassDef):
            inner = (child for child in node.body.body if isinstance(child, libcst.FunctionDef))
            yield from ((child, f"{node.name.value}.{child.name.value}") for child in inner)


def difference(source: str, changed: str) -> tuple[int, str]:
    """Return the first line that differs, from 1, and the lines taken out and put in."""
    before, after = source.splitlines(), changed.splitlines()
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    first = next((at for at, pair in enumerate(zip(before, after, strict=False), 1) if pair[0] != pair[1]), 0)
    return first, "\n".join(line for line in lines if not line.startswith("@@"))


def drawn(module: str, count: int) -> list[Mutant]:
    """Return the first `count` mutants of a module by rank, or all where there are fewer."""
    return [mutant for mutant, _ in zip(mutants(module), range(count), strict=False)]


class SameDraws:
    """A pytest plugin: the suite's own Hypothesis profile with the same examples in each run, and the same secrets."""

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        SYSTEM.seed(item.name)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        from hypothesis import HealthCheck, Phase, settings

        own = settings()
        settings.register_profile(
            "mutants",
            own,
            derandomize=True,
            database=None,
            deadline=None,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=[*own.suppress_health_check, HealthCheck.too_slow],
        )
        settings.load_profile("mutants")


class Copy:
    """The copy of the package and its tests, in which one mutant at a time is tested."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "output.txt"
        for name in ("src", "tests", "docs"):  # some tests compare tables of pages
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        shutil.copy(ROOT / "pyproject.toml", folder)

    def test(self, module: str, limit: float, *, compiled: bool = False) -> tuple[int | None, str, float]:
        """Run a module's tests; return pytest's exit code, None past the limit, the first failure, and seconds.

        compiled: whether what is compiled is kept for runs to come.
        """
        began = time.monotonic()
        process = multiprocessing.get_context("fork").Process(target=self._run, args=(MODULES[module][1:], compiled))
        process.start()
        process.join(limit)
        code = process.exitcode
        with contextlib.suppress(ProcessLookupError):  # also what the tests started and left
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        found = re.search(
            r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", self.log.read_text(errors="replace"), re.MULTILINE
        )
        return code, found[1] if found else "", time.monotonic() - began

    def _run(self, tests: tuple[str, ...], compiled: bool) -> None:
        import resource

        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(self.folder)
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.urandom = SYSTEM.randbytes
        sys.dont_write_bytecode = not compiled
        sys.path.insert(0, str(self.folder / "src"))
        os.environ["PYTHONPATH"] = str(self.folder / "src")  # of processes that tests start
        found = find_spec("moretta")
        if not found or not str(found.origin).startswith(str(self.folder)):
            raise RuntimeError(f"expected to test the copy in {self.folder}, got {found}")
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--basetemp", str(self.folder / "tmp")]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of packages that are imported already
        code = pytest.main([*options, *tests], plugins=[SameDraws()])
        sys.stdout.flush()
        os._exit(int(code))

    def limit(self, module: str) -> float:
        """Return the seconds after which a mutant has timed out. Raises RuntimeError if the tests fail without one."""
        for compiled in (True, False):  # the first run compiles, the second is timed
            code, first, seconds = self.test(module, 600, compiled=compiled)
            if code != 0:
                raise RuntimeError(f"tests fail without a mutant: {first}\n{self.log.read_text()[-3000:]}")
        return 10 + 5 * seconds

    def tried(self, mutant: Mutant, limit: float) -> dict[str, Any]:
        """Return what becomes of a mutant, as a line of the log."""
        at = self.folder / MODULES[mutant.module][0]
        original = at.read_text()
        Path(cache_from_source(str(at))).unlink(missing_ok=True)  # it is found by size and second: of no use here
        at.write_text(mutant.source)
        try:
            code, first, seconds = self.test(mutant.module, limit)
        finally:
            at.write_text(original)
        outcome = "timeout" if code is None else "killed" if code else "survived"
        return {
            "mutant": mutant.name,
            "module": mutant.module,
            "line": mutant.line,
            "change": mutant.digest,
            "outcome": outcome,
            "by": first if outcome == "killed" else "",
            "seconds": round(seconds, 1),
        }


def run(log: Path, count: int) -> list[dict[str, Any]]:
    """Return the lines of all mutants; those that the log has already are not run again."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {(line["mutant"], line["change"]): line for line in lines}
    found = []
    with tempfile.TemporaryDirectory() as folder, log.open("a") as more:
        copy = Copy(Path(folder))
        chosen = {module: drawn(module, count) for module in MODULES}  # before the checkout moves away from the copy
        for module in MODULES:
            limit = 0.0
            for mutant in chosen[module]:
                if (mutant.name, mutant.digest) not in done:
                    limit = limit or copy.limit(module)
                    line = done[mutant.name, mutant.digest] = copy.tried(mutant, limit)
                    print(json.dumps(line), file=more, flush=True)
                found.append(done[mutant.name, mutant.digest])
    return found


def record(lines: list[dict[str, Any]], commit: str) -> dict[str, Any]:
    """Return the figures: outcomes by module and in all, what they were found with, and each mutant."""
    counts = {module: Counter(line["outcome"] for line in lines if line["module"] == module) for module in MODULES}
    return {
        "commit": commit,
        "seed": SEED,
        "versions": {"python": platform.python_version()} | {n: version(n) for n in ("mutmut", "hypothesis", "pytest")},
        "survived": {module: count["survived"] for module, count in counts.items()},
        "timeout": {module: count["timeout"] for module, count in counts.items()},
        "mutants_run": {module: count.total() for module, count in counts.items()},
        "survived_in_all": sum(count["survived"] for count in counts.values()),
        "mutants": lines,
    }


def written(figures: dict[str, Any]) -> str:
    """Return a record as JSON with a line for each mutant."""
    head = json.dumps({name: value for name, value in figures.items() if name != "mutants"}, indent=1)[:-2]
    return f'{head},\n "mutants": [\n  ' + ",\n  ".join(json.dumps(line) for line in figures["mutants"]) + "\n ]\n}\n"


def compare(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Print survivors before and after by module, and those that are new; return whether no more survive."""
    for module in MODULES:
        print(f"{module:14} {before['survived'][module]:4} {after['survived'][module]:4}")
    print(f"{'in all':14} {before['survived_in_all']:4} {after['survived_in_all']:4}")
    was = {line["mutant"]: line for line in before["mutants"]}
    for line in after["mutants"]:
        old = was.get(line["mutant"])
        if line["outcome"] != "survived" or (old and old["outcome"] == "survived"):
            continue
        if old is None:
            print(f"survives now, not drawn before: {line['mutant']}")
        else:
            same = "the same change" if old["change"] == line["change"] else "another change"
            print(f"survives now: {line['mutant']} ({same}; {old['outcome']} before {old['by']})")
    return bool(after["survived_in_all"] <= before["survived_in_all"])


def main() -> int:
    """Run what the options say; return 1 if more mutants survive than before."""
    parser = argparse.ArgumentParser(description="Count the mutants that the tests miss.")
    parser.add_argument("--log", type=Path, default=Path("mutants.jsonl"), help="one line for each mutant run so far")
    parser.add_argument("--out", type=Path, help="where the record is written, when all have run")
    parser.add_argument("--against", type=Path, help="an earlier record; exit 1 if more survive now")
    parser.add_argument("--count", type=int, default=50, help="mutants of each module")
    parser.add_argument("--show", help="print the change of the mutant of this name, or of all drawn of a module")
    options = parser.parse_args()
    if options.show:
        found = drawn(options.show, options.count) if options.show in MODULES else mutants(options.show.split(":")[0])
        for mutant in found:
            if options.show in (mutant.module, mutant.name):
                print(f"{mutant.name} {mutant.digest}, line {mutant.line}\n{mutant.change}")
        return 0
    for name in SLOW_TO_IMPORT:
        importlib.import_module(name)
    last = ["git", "log", "-1", "--format=%H", "--", "src", "tests"]  # before mutants run: the checkout may move on
    commit = subprocess.run(last, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    figures = record(run(options.log, options.count), commit)
    if options.out:
        options.out.write_text(written(figures))
    print(json.dumps({name: value for name, value in figures.items() if name != "mutants"}))
    return int(options.against is not None and not compare(json.loads(options.against.read_text()), figures))


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ALIKE.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALIKE)
    sys.exit(main())
