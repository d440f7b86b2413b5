"""Why PBPFL's and FedSGD's accuracies differ on images in float32: the same few rounds in float32 and in float64.

    python experiments/pbpfl/rounding.py --data DIR

Table II's run file for 8 rounds, on the first 200 rows of each of five silos, seed 2. Written is
OUT/pbpfl-rounding.json: the loss of the first rounds, and how far weights are from FedSGD's of the same type.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import numpy as np

from moretta.config import run_files
from moretta.errors import MorettaError
from moretta.run.assembly import federation_of

sys.path.append(str(Path(__file__).resolve().parents[1]))
from provenance import provenance
from reproduction import as_json, seeds

RUN = Path(__file__).parent / "table-2.toml"
SEED, ROUNDS, ROWS = 2, 8, 200


def trained(protocol: str, dtype: str, data: Path) -> tuple[list[float], np.ndarray]:
    """Return the loss of each round and all weights after the last, [parameters]."""
    settings = [f"protocol.name={protocol}", f"run.dtype={dtype}", *seeds(SEED), f"data.path={data}"]
    whole = federation_of(run_files.load(RUN, settings), None)
    silos = [dataclasses.replace(silo, x=silo.x[:ROWS], y=silo.y[:ROWS]) for silo in whole.silos]
    result = type(whole).of(whole.spec, whole.model, silos).train(ROUNDS, SEED)
    weights = [tensor.detach().numpy().ravel() for _, tensor in result.model.named_parameters()]
    return [line["loss"] for line in result.history], np.concatenate(weights)


def main() -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets; it has ham10000_subset/")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"))
    given = parser.parse_args()
    began, rows = time.perf_counter(), list[dict[str, object]]()
    try:
        for dtype in ("float64", "float32"):
            plain = np.zeros(0)
            for protocol in ("fedsgd", "pbpfl"):
                losses, weights = trained(protocol, dtype, given.data / "ham10000_subset")
                plain = weights if protocol == "fedsgd" else plain
                apart = float(np.linalg.norm(weights - plain) / np.linalg.norm(plain))
                rows.append({"row": f"{protocol}, {dtype}", "losses": losses, "apart": apart})
    except MorettaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = {"run": RUN.name, "seed": SEED, "public_secret_seed": SEED, "rounds": ROUNDS, "rows": ROWS}
    record = {"rows": rows, "settings": settings, "seconds": round(time.perf_counter() - began, 1), **provenance()}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "pbpfl-rounding.json").write_text(as_json(record), encoding="utf-8")
    print(as_json(record), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
