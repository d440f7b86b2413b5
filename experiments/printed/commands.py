"""The records that a script makes, not `moretta reproduce`, and its command."""

LOCAL = "python experiments/cgd/local.py"

SCRIPTS = {
    "baffle-domains": "python experiments/baffle/domains.py runs/baffle-backbone --data DIR",
    "baffle-equal-forwards-quick": "python experiments/baffle/equal_forwards.py --quick --data DIR",
    "baffle-figure-5": "python experiments/baffle/loss_differences.py --data DIR",
    "baffle-multiply-adds": "python experiments/baffle/multiply_adds.py",
    "baffle-slices": "python experiments/baffle/slices.py",
    "baffle-surrogate-cifar10": "python experiments/baffle/surrogate.py --data DIR",
    "baffle-table-4": "python experiments/baffle/memory.py",
    "baffle-theorem": "python experiments/baffle/theorem.py --data DIR",
    "cgd-leaks": "python experiments/cgd/leaks.py --out cgd-leaks.json",
    "cgd-leaks-mnist": "python experiments/cgd/leaks.py --only d-alone --data DIR --out cgd-leaks-mnist.json",
    "cgd-local-cifar10": f"{LOCAL} cifar10.toml 10x2 --sample 5, and 100x16 1000x32",
    "cgd-local-mnist": f"{LOCAL} mnist.toml 1000x112 100x49 1000x1 10x7 --rounds 800 --data DIR, and more",
    "cgd-local-mnist-40": f"{LOCAL} mnist.toml 1000x1 100x1 10x1 --rounds 40 --sample 10 --record cgd-local-mnist-40 --data DIR",
    "cgd-third-reading": "python experiments/cgd/third_reading.py --data DIR --rounds 150 --set data.validation-fraction=0.8",
    "dp-central": "python experiments/dp/central.py --data DIR",
    "pbpfl-exchange": "python experiments/pbpfl/exchange.py",
    "pbpfl-rounding": "python experiments/pbpfl/rounding.py --data DIR",
    "table4": "python experiments/audit/table4.py --data DIR --out table4.json",
}  # fmt: skip
