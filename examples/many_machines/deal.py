"""Make what three hospitals and a server would each have, on one machine: to try many machines with.

    python examples/many_machines/deal.py runs/many

writes runs/many/server (run.toml, test.npz) and runs/many/north, south and west (patients.npz, silo.toml). In earnest
every site has its own rows, writes its own silo.toml, and nobody deals anything.
"""

import sys
from pathlib import Path

import numpy as np

from moretta.data import datasets, partition
from moretta.data.settings import Data

SITES = ("north", "south", "west")
SEED = 7
RUN = """[run]
name = "wdbc"
rounds = 40
seed = {seed}

[data]
source = "sites"                    # each site's silo.toml says where its rows are; this file never does
inputs = [30]
classes = 2
test = "test.npz"                   # the server's own test rows
standardise = true

[model]
source = "mlp"
hidden = [32, 32]

[protocol]
name = "pbpfl"
loss = "mse"
learning-rate = 0.3

[engine]
name = "flare"
sites = [{sites}]
deadline = 60
"""
SILO = """[silo]
name = "{name}"

[data]
source = "patients.npz"
"""


def main(out: Path) -> None:
    """Deal out the Wisconsin breast cancer records."""
    dealt = partition.distribute(datasets.load(Data(source="wdbc"), seed=SEED), len(SITES), "iid", SEED)
    server = out / "server"
    server.mkdir(parents=True)
    np.savez(server / "test.npz", x=dealt.test.x, y=dealt.test.y)
    names = ", ".join(f'"{name}"' for name in SITES)
    (server / "run.toml").write_text(RUN.format(seed=SEED, sites=names))
    for name, rows in zip(SITES, dealt.silos, strict=True):
        (out / name).mkdir()
        np.savez(out / name / "patients.npz", x=rows.x, y=rows.y)
        (out / name / "silo.toml").write_text(SILO.format(name=name))
    print(f"made {server} and {', '.join(str(out / name) for name in SITES)}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/many"))
