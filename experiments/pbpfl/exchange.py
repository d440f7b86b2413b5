"""What each exchange under cross-entropy shows: outputs, and ratios as `practical.md` prints them (Eq. 22 to 24).

    python experiments/pbpfl/exchange.py --out runs/reproduce

Two data sets that need no download: `wdbc` of two classes and `digits` of ten, three silos, an MLP, five parts. Of each
run the last views are attacked, by the server (`server-softmax`) and by a silo (`softmax-from-sum`). Written is
OUT/pbpfl-exchange.json: the relative error of all samples' softmax, beside that of guessing, and bytes.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from moretta.audit.attacks.pbpfl import server_softmax, softmax
from moretta.audit.evidence.attack import Attack
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.truth import Truth
from moretta.config import run_files
from moretta.errors import MorettaError
from moretta.run.assembly import federation_of

sys.path.append(str(Path(__file__).resolve().parents[1]))
from provenance import provenance
from reproduction import as_json, seeds

RUN = """
[run]
rounds = 20
record-views = [16, 17, 18, 19, 20]
evaluate-every = 1000
[data]
source = "{data}"
silos = 3
batch-size = {batch}
[model]
source = "mlp"
hidden = [16]
[protocol]
name = "pbpfl"
loss = "cross-entropy"
variant = "paper"
exchange = "{exchange}"
partitions = {parts}
learning-rate = 0.1
"""
SEED = 1
CASES = [("wdbc", 2, 32), ("digits", 5, 32), ("digits", 5, 1)]  # data, parts, rows of a batch


def attacked(attack: Attack, truth: Truth) -> dict[str, float]:
    """Return the score of an attack and what guessing scores, given what its process would be given."""
    given = attack.given(truth)
    claim = attack.attack(Case.unpack(truth.case(given.views, given.arrays, thorough=False).pack()))
    found = attack.score(claim, truth)
    return {"score": found.score, "chance": found.chance, "relative_error": found.figures["relative_error"]}


def measured(data: str, parts: int, batch: int, exchange: str) -> dict[str, Any]:
    """Train, attack, and return the figures of one run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(RUN.format(data=data, parts=parts, batch=batch, exchange=exchange))
        run_file = run_files.load(folder / "run.toml", seeds(SEED))
        federation = federation_of(run_file, folder / "out")
        result = federation.train(run_file.run.rounds, run_file.run.seed)
        truth = Truth(folder / "out", federation, run_file.run.rounds, run_file.run.seed, None)
        both = {"server": server_softmax.ATTACK, "silo": softmax.SOFTMAX}
        told = {who: attacked(attack, truth) for who, attack in both.items()}
        traffic = {way: result.bytes[f"{way}_per_silo_per_round"] for way in ("up", "down")}
        return {"data": data, "batch": batch, "exchange": exchange, **told, "bytes": traffic}


def main() -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"))
    given = parser.parse_args()
    began = time.perf_counter()
    try:
        rows = [measured(*case, exchange) for case in CASES for exchange in ("outputs", "ratios")]
    except MorettaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    record = {"rows": rows, "public_secret_seed": SEED, "seconds": round(time.perf_counter() - began, 1)}
    record |= provenance()
    (given.out / "pbpfl-exchange.json").write_text(as_json(record), encoding="utf-8")
    print(as_json(record), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
