"""Differences between methods, each paired over the seeds that both have."""

from collections.abc import Sequence

from printed import Table, joined

K = (("K = 200", "K = 100"), ("K = 500", "K = 200"), ("BP baseline", "K = 500"))
DIFFERENCES: Sequence[tuple[str, str, str, str, str]] = (
    *(("pbpfl-table-1", f"PBPFL, {mlp}, k = {k}", f"FedAvg, {mlp}, k = {k}", "MSE", ".6f")
      for mlp in ("MLP-3", "MLP-5", "MLP-7") for k in (1, 5, 10)),
    *(("cgd-table-3", grid, "centralised", "Worst %", ".2f") for grid in ("10 x 7", "100 x 49", "1000 x 112")),
    *((f"baffle-table-1-{data}", f"{more}, LeNet", f"{less}, LeNet", "accuracy", ".2f")
      for data in ("mnist", "cifar10") for more, less in K),
    ("baffle-blocks-mnist", "activations, LeNet", "scalars, LeNet", "accuracy", ".2f"),
    ("baffle-blocks-cifar10", "4,864 scalars, 10,000 rounds, LeNet", "712 scalars, LeNet", "accuracy", ".2f"),
    ("baffle-blocks-cifar10", "activations, LeNet", "4,864 scalars, 10,000 rounds, LeNet", "accuracy", ".2f"),
    ("baffle-blocks-cifar10", "BP baseline, LeNet", "activations, LeNet", "accuracy", ".2f"),
    ("baffle-blocks-cifar100", "BP baseline, LeNet", "activations, LeNet", "accuracy", ".2f"),
    *(("baffle-forms", f"twice-forward, K = 50, {sigma}", f"mean, K = 100, {sigma}", "accuracy", ".2f")
      for sigma in ("sigma 1e-4", "sigma 1e-3")),
    *(("baffle-growing-k", f"{k}, constant rate", "K = 100, constant rate", "accuracy", ".2f")
      for k in ("K from 40 to 200", "K from 200 to 40")),
    ("baffle-norm", "BatchNorm, 4 rows a silo", "GroupNorm, 4 rows a silo", "accuracy", ".2f"),
    ("baffle-own", "own, K = 40, LeNet", "shared, K = 40, LeNet", "accuracy", ".2f"),
)  # fmt: skip
"""Record, the two levels, the figure and its digits."""


def _row(record: str, first: str, second: str, figure: str, form: str) -> str:
    place = f"{record}[{first} less {second}; {figure}"
    half = f"{place}; 95 %]"
    return joined(
        f"`{record}`", figure, f"{first} less {second}", f"{{{place}]:+{form}}}",
        f"{{{place}] - {half}:+{form}}} to {{{place}] + {half}:+{form}}}", f"{{{place}; seeds]:.0f}}",
    )  # fmt: skip


def _beside_central(name: str, data: str, epsilon: int, figure: str) -> str:
    row = f"dp-central[{data}, epsilon {epsilon}, {figure}"
    mean, half = f"{row}; difference]", f"{row}; half of 95 %]"
    return joined(
        f"{name}, epsilon {epsilon}", f"{{{row}; ours %]:.2f}}", f"{{{row}; central %]:.2f}}", f"{{{mean}:+.2f}}",
        f"{{{mean} - {half}:+.2f}} to {{{mean} + {half}:+.2f}}", f"{{{row}; seeds]:.0f}}",
        f"{{{row}; lost silos %]:.1f}}",
    )  # fmt: skip


TABLES = {
    "paired": Table("record | figure | difference | mean | 95 % interval | seeds", [_row(*one) for one in DIFFERENCES]),
    "dp-central": Table(
        "per cent | 10 silos | one party | difference, points | 95 % interval | seeds | silos lost",
        [
            _beside_central(f"{name}, {said}", data, epsilon, figure)
            for name, data, figure, said in (("Bank", "bank", "accuracy", "accuracy"), ("Bank", "bank", "auc", "AUC"),
                                             ("MNIST", "mnist", "accuracy", "accuracy"))
            for epsilon in (8, 2)
        ],
    ),
}  # fmt: skip
