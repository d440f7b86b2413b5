"""The runs that are recorded: text of run files, and nothing of the package."""

from __future__ import annotations

from typing import Any

SUMS = ("pairwise", "additive-shares")
GRID = 'partition = "grid"\ngrid = [2, 2]\nbatch-size = 8'
SPLIT = "silos = 3\nbatch-size = 8"
EXACT = 'dtype = "float64"'  # of which a CPU's way of adding moves the last digits alone


def run_file(
    protocol: str,
    *,
    data: str = SPLIT,
    run: str = EXACT,
    engine: str = "strict = true",
    secure: str = "",
    model: str = 'source = "mlp"\nhidden = [5]',
    source: str = "rows.npz",
    rounds: int = 3,
    views: bool = True,
) -> str:
    """Return the text of a run file with all secrets given."""
    sections = {
        "run": f'name = "frozen"\nrounds = {rounds}\nseed = 7\ninsecure-secret-seed = 3\n'
        f"record-views = {str(views).lower()}\ncheckpoint-every = 2\n{run}",
        "data": f'source = "{source}"\nstandardise = true\n{data}',
        "model": model,
        "protocol": protocol,
        "secure-aggregation": secure,
        "engine": engine,
    }
    return "\n".join(f"[{name}]\n{text}" for name, text in sections.items())


FEDSGD = 'name = "fedsgd"\nlearning-rate = 0.1\nmomentum = 0.5'
FEDAVG = 'name = "fedavg"\nlearning-rate = 0.05\nlocal-epochs = 2'
PBPFL = 'name = "pbpfl"\nlearning-rate = 0.05\nloss = '
CGD = 'name = "cgd"\nlearning-rate = 0.3\ndelta = 0.1'
BAFFLE = 'name = "baffle"\nlearning-rate = 0.01\nk = 16'
EPOCHS = f'{BAFFLE}\nlocal-epochs = 1\noptimizer = "sgd"\nform = "central"\nema = 0\nseed-pool = 64'
NOISE = "dp-noise = 1.0\ndp-clip = 1.0"
LINEAR = 'source = "mlp"\nhidden = []'
LENET = 'source = "lenet"\nnorm = "batch"\nactivation = "relu"'
NO_SUM = 'scheme = "none"'

PROTOCOLS = {
    "fedsgd": FEDSGD,
    "fedavg": FEDAVG,
    "pbpfl, mse": f'{PBPFL}"mse"',
    "pbpfl, cross-entropy": f'{PBPFL}"cross-entropy"',
    "cgd": CGD,
    "baffle": BAFFLE,
}

UNMASKED = ("fedsgd", "pbpfl, cross-entropy", "cgd", "baffle")

RUNS: dict[str, str] = {
    **{
        f"{name}, {scheme}": run_file(protocol, secure=f'scheme = "{scheme}"')
        for name, protocol in PROTOCOLS.items()
        for scheme in SUMS
    },
    **{f"{name}, nothing masked": run_file(PROTOCOLS[name], secure=NO_SUM) for name in UNMASKED},
    "local": run_file('name = "local"\nlearning-rate = 0.1'),
    "centralised": run_file('name = "centralised"\nlearning-rate = 0.1'),
    "fedsgd, single precision": run_file(FEDSGD, run=""),
    "fedsgd, ring of 32 bits": run_file(FEDSGD, secure="ring-bits = 32"),
    "fedsgd, participation": run_file(FEDSGD, run=f"{EXACT}\nparticipation = 0.7"),
    "fedsgd, early stopping": run_file(
        FEDSGD, run=f"{EXACT}\nearly-stopping = 1\nevaluate-every = 1", data=f"{SPLIT}\nvalidation-fraction = 0.2"
    ),
    "fedsgd, dp-noise": run_file(f"{FEDSGD}\n{NOISE}"),
    "fedsgd, a silo drops out": run_file(
        FEDSGD,
        secure="threshold = 2",
        engine='strict = true\n[engine.faults]\ndrop = [{silo = "silo-2", round = 2, phase = "unmasking"}]',
    ),
    "fedavg, weights of classes": run_file(
        'name = "fedavg"\nlearning-rate = 0.01\nloss = "cross-entropy"\nclass-weights = [1.0, 2.0, 0.5]'
    ),
    "pbpfl, paper's scales in parts": run_file(f'{PBPFL}"mse"\nscales = "powers-of-two"\npartitions = 3'),
    "pbpfl, the paper's softmax": run_file(f'{PBPFL}"cross-entropy"\nvariant = "paper"'),
    "cgd, not blind": run_file(f"{CGD}\nblind = false"),
    "cgd, joint grid": run_file(CGD, data=GRID),
    "cgd, independent grid": run_file(f'{CGD}\nvertical = "independent"', data=GRID),
    "cgd, fused": run_file(CGD, engine='name = "fused"', run="", views=False),
    "cgd, exact ring": run_file(CGD, engine='name = "exact-ring"', run="", views=False),
    "baffle, local epochs": run_file(EPOCHS),
    "baffle, dp-noise": run_file(f"{BAFFLE}\n{NOISE}"),
    "baffle, gaussian": run_file(f'{BAFFLE}\ndirection = "gaussian"\nk-last = 24\nform = "twice-forward"'),
    "baffle, orthogonal": run_file(f"{BAFFLE}\northogonal = true"),
    "fedsgd, plain": run_file('name = "fedsgd"\nlearning-rate = 0.1'),
    "fedavg, one step": run_file(
        'name = "fedavg"\nlearning-rate = 0.1', secure=NO_SUM, data="silos = 3\nbatch-size = 0", rounds=2
    ),
    "baffle, sgd": run_file(f'{BAFFLE}\noptimizer = "sgd"'),
    "cgd, linear and whole": run_file(
        f'{CGD}\nloss = "mse"\nblind = false', model=LINEAR, data="silos = 3\nbatch-size = 0", rounds=4
    ),
    "baffle, blocks": run_file(f'{BAFFLE}\nperturb = "blocks"'),
    "fedsgd, roster": run_file(FEDSGD, secure='roster = "roster.toml"\nidentity = "keys/{silo}"'),
    "pbpfl, roster": run_file(f'{PBPFL}"mse"', secure='roster = "roster.toml"\nidentity = "keys/{silo}"'),
    "pbpfl, images": run_file(f'{PBPFL}"cross-entropy"', model=LENET, source="images.npz", rounds=2),
    "cgd, images": run_file(CGD, model=LENET, source="images.npz", rounds=2),
}

# Runs of two rounds whose folders are kept in started.zip, to be gone on with; without views it stays small.
STARTED: dict[str, str] = {
    name: run_file(protocol, views=False, rounds=2, data=data)
    for name, protocol, data in (
        *((name, protocol, SPLIT) for name, protocol in PROTOCOLS.items()),
        ("cgd, joint grid", CGD, GRID),
        ("fedsgd, dp-noise", f"{FEDSGD}\n{NOISE}", SPLIT),
        ("baffle, local epochs", EPOCHS, SPLIT),
        ("local", 'name = "local"\nlearning-rate = 0.1', SPLIT),
    )
}

EDGE: dict[str, str] = {
    "baffle, batches": run_file(BAFFLE, engine='edge = ["silo-2"]', run="", rounds=2),
    "baffle, local epochs": run_file(EPOCHS, engine='edge = ["silo-2"]', run="", rounds=2),
}

# Protocol, further sections and settings of tests/deployment/loopback.py's Machines.
LOOPBACK: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fedsgd": ((FEDSGD,), {}),
    "fedsgd, additive": ((FEDSGD, f'[secure-aggregation]\nscheme = "{SUMS[1]}"'), {}),
    "fedsgd, dp-noise": ((f"{FEDSGD}\n{NOISE}",), {"sites": "least-rows = 20"}),
    "fedavg": ((FEDAVG,), {}),
    "pbpfl, mse": ((f'{PBPFL}"mse"',), {}),
    "pbpfl, cross-entropy": ((f'{PBPFL}"cross-entropy"',), {}),
    "cgd": ((CGD,), {}),
    "cgd, joint grid": ((CGD,), {"data": GRID}),
    "baffle": ((BAFFLE,), {}),
    "baffle, dp-noise": ((f"{BAFFLE}\n{NOISE}",), {"sites": "least-rows = 20"}),
    "baffle, local epochs": ((EPOCHS,), {}),
    "fedsgd, scored at silos": ((FEDSGD,), {"sites": "score-at-silos = true"}),
}
HOLDING_BACK = "fedsgd, scored at silos"  # whose sites hold a quarter of their rows back

AUDITED = ("fedsgd, pairwise", "pbpfl, mse, pairwise", "cgd, pairwise", "baffle, pairwise", "local")
