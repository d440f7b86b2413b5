"""The tables of BAFFLE (arXiv 2301.12195v3), and of what was measured beside them."""

from printed import Table, grid, joined, paper_of

DATA = {"mnist": "LeNet, 1 x 28 x 28", "cifar10": "LeNet, 3 x 32 x 32"}
"""The network's name among counted multiply-adds."""
LENET = {data: {row: paper for row, (paper,) in paper_of(f"baffle-table-1-{data}").items()} for data in DATA}
"""Table 1, LeNet: accuracy, per cent."""
QUICK = {"mnist": ("K = 100", "K = 200", "w/o EMA", "ReLU", "SELU", "Central", "BP baseline"),
         "cifar10": ("K = 100", "K = 200", "ReLU", "BP baseline")}  # fmt: skip


def _side_by_side(data: str) -> list[str]:
    ours, counted = f"baffle-table-1-{data}", f"baffle-multiply-adds[{DATA[data]}, "
    rows = []
    for row, paper in LENET[data].items():
        place = f"{ours}[{row}, LeNet; "
        work = (
            f"{place}rows] * {counted}backpropagation; "
            if row == "BP baseline"
            else f"{place}row-forwards] * {counted}one forward pass; "
        )
        forwards = "" if row == "BP baseline" else f"{{{place}row-forwards] / 1e6:.1f}}"
        rows.append(joined(
            row, paper, f"{{baffle-table-1-{data}-authors[{row}, LeNet]:.2f}}", f"{{{ours}[{row}, LeNet]:.2f}} ± {{{ours}[{row}, LeNet; ±]:.2f}}", "",
            forwards, f"{{{work}multiply-adds a row, million] / 1e6:.2f}}", f"{{{place}seconds]:,.0f}}",
        ))  # fmt: skip
    return rows


def _past(record: str, row: str, counted: str, paper: str = "", where: str = "LeNet", label: str = "") -> str:
    place = f"{record}[{row}, {where}"
    counts = f"baffle-multiply-adds[{counted}; "
    return joined(
        label or row, paper, "", "", f"{{{place}]:.2f}} ± {{{place}; ±]:.2f}}",
        f"{{{place}; rows] * {counts}over one forward pass] / 1e6:.1f}}",
        f"{{{place}; rows] * {counts}multiply-adds a row, million] / 1e6:.2f}}", f"{{{place}; seconds]:,.0f}}",
    )  # fmt: skip


SIDES = (
    " | paper | authors' settings | ours | past the paper | row-forwards, million | multiply-adds, 1e12 "
    "| seconds of ours, a run"
)
PAST = {
    "mnist": [
        joined("K = 200, 2,500 rounds", "", "", "", "{baffle-mnist[K = 200, LeNet]:.2f} ± {baffle-mnist[K = 200, LeNet; ±]:.2f}",
               "{baffle-mnist[K = 200, LeNet; row-forwards] / 1e6:.1f}",
               "{baffle-mnist[K = 200, LeNet; row-forwards] * baffle-multiply-adds[LeNet, 1 x 28 x 28, one forward pass; "
               "multiply-adds a row, million] / 1e6:.2f}", "{baffle-mnist[K = 200, LeNet; seconds]:,.0f}"),
        _past("baffle-blocks-mnist", "activations", "LeNet, 1 x 28 x 28, by blocks, activations",
              label="by blocks, `activations`"),
        _past("baffle-blocks-mnist", "scalars", "LeNet, 1 x 28 x 28, by blocks, scalars", label="by blocks, `scalars`"),
    ],
    "cifar10": [
        _past("baffle-blocks-cifar10", "activations", "LeNet, 3 x 32 x 32, by blocks, activations",
              label="by blocks, `activations`"),
        _past("baffle-blocks-cifar10", "activations, flips, 10,000 rounds", "LeNet, 3 x 32 x 32, by blocks, activations",
              label="by blocks, `activations`, flips and 10,000 rounds"),
        _past("baffle-blocks-cifar10", "712 scalars", "LeNet, 3 x 32 x 32, by blocks, scalars",
              label="by blocks, `scalars`, 712"),
        _past("baffle-blocks-cifar10", "4,864 scalars, 10,000 rounds", "LeNet, 3 x 32 x 32, by blocks, scalars, 4,864",
              label="by blocks, `scalars`, 4,864"),
        _past("baffle-blocks-cifar10", "BP baseline", "LeNet, 3 x 32 x 32, backpropagation", label="backpropagation of as many rows"),
    ],
}  # fmt: skip


def _seeds(record: str, rows: dict[str, str], column: str = "LeNet") -> list[str]:
    places = ((label, f"{record}[{row}, {column}") for row, label in rows.items())
    return [
        joined(label, f"{{{place}]:.2f}} ± {{{place}; ±]:.2f}}", ", ".join(f"{{{place}; seed {seed}]:.2f}}" for seed in (1, 2, 3)))
        for label, place in places
    ]  # fmt: skip


def _means(record: str, rows: dict[str, str], column: str) -> list[str]:
    return [
        f"{label} | {{{record}[{row}, {column}]:.2f}} ± {{{record}[{row}, {column}; ±]:.2f}}"
        for row, label in rows.items()
    ]


def _theorem(start: str, k: int) -> str:
    kinds = ("rademacher", "gaussian", "orthogonal")
    cell = "{{baffle-theorem[{}, {}, K = {}; {}]:.{}f}}"
    errors = [
        f"{cell.format(start, kind, k, 'relative error', 2)} ± {cell.format(start, kind, k, '± of the error', 2)}"
        for kind in kinds
    ]
    cosines = [cell.format(start, kind, k, "cosine", 3) for kind in kinds]
    return joined(
        f"{start}, K = {k}",
        cell.format(start, "rademacher", k, "expected", 2),
        *errors[:2],
        f"{errors[2]} ({cell.format(start, 'orthogonal', k, 'expected', 2)})",
        cell.format(start, "rademacher", k, "expected cosine", 3),
        *cosines,
    )


MEMORY = {"lenet, 32 x 32, batch 8": (1680, 174, 10.35), "lenet, 32 x 32, batch 64": (1680, 174, 10.35),
          "wrn, 32 x 32, batch 8": (1878, 196, 10.43), "wrn, 32 x 32, batch 64": (1878, 196, 10.43),
          "mobilenet, 32 x 32, batch 8": (2041, 217, 10.63), "mobilenet, 32 x 32, batch 64": (2041, 217, 10.63),
          "lenet, 224 x 224, batch 8": (2527, 201, 7.95), "wrn, 224 x 224, batch 8": (3425, 251, 7.32),
          "mobilenet, 224 x 224, batch 8": (5271, 289, 5.48)}  # fmt: skip
"""Table 4: backpropagation, BAFFLE, and the latter in per cent of the former, MB of a GPU."""
MEMORY_COLUMNS = ("PyTorch alone", "backprop", "forward", "edge", "forward / backprop %", "edge / backprop %")
SLICES = ("edge", "whole", "slices", "one at a time", "slices / whole, time", "one at a time / whole, time", "slices 2")
SLICED = [f"{name}, {size} x {size}, batch 8" for size in (32, 224) for name in ("lenet", "wrn", "mobilenet")]
FIVE = ("KS statistic", "KS p", "p < 0.05, %", "control, %", "by shape, %", "p", "by direction, %", "p 2")
UPLOADS = [
    f"{when}, {noise}, {what}"
    for when in ("start", "after 200 steps")
    for noise in ("Gaussian", "Laplacian")
    for what in ("one silo", "sum of ten", "sum with one of them")
]


def _told_apart(row: str) -> str:
    ks, p, below, control, shape, p_shape, direction, p_direction = (f"baffle-figure-5[{row}; {name}]" for name in FIVE)
    return joined(
        row, f"{{{ks}:.2f}}", f"{{{p}:.1g}}", f"{{{below}:.0f}}", f"{{{control}:.0f}}",
        f"{{{shape}:.1f}} ({{{p_shape}:.1g}})", f"{{{direction}:.1f}} ({{{p_direction}:.1g}})",
    )  # fmt: skip


def _counted(ways: dict[str, str], name: str) -> list[str]:
    rows = []
    for way, label in ways.items():
        place = f"baffle-multiply-adds[{name}, {way}; "
        moves = f"{{{place}moves or directions]:,.0f}}" if way not in ("one forward pass", "backpropagation") else ""
        rows.append(
            joined(
                label, f"{{{place}multiply-adds a row, million]:.3g}}", f"{{{place}over one forward pass]:.3g}}", moves
            )
        )
    return rows


WAYS = {"one forward pass": "one forward pass", "backpropagation": "backpropagation",
        "all at once, K = 100": "all at once, K = 100", "all at once, K = 500": "all at once, K = 500",
        "by blocks, activations": "by blocks, `activations`", "by blocks, scalars": "by blocks, `scalars`",
        "by blocks, scalars, 4,864": "by blocks, `scalars`, 4,864"}  # fmt: skip
ROUNDS = (50, 100, 250, 500, 1000, 1500, 2000, 2500)

TABLES = {
    "baffle-1-mnist": Table(SIDES.replace(" | paper", "MNIST, accuracy, per cent | paper", 1),
                            [*_side_by_side("mnist"), *PAST["mnist"]]),
    "baffle-1-cifar10": Table(SIDES.replace(" | paper", "CIFAR-10, accuracy, per cent | paper", 1),
                              [*_side_by_side("cifar10"), *PAST["cifar10"]]),
    "baffle-theorem": Table(
        " | expected | Rademacher | Gaussian | orthogonal (expected) | cosine: expected | Rademacher | Gaussian | orthogonal",
        [_theorem("start", k) for k in (16, 64, 256, 1024, 4096)]
        + [_theorem("after 100 steps", k) for k in (16, 64, 256, 1024)],
    ),
    "baffle-mnist": Table(
        "accuracy, per cent | seed 1 | seed 2 | seed 3 | mean | the paper, K = 500",
        [joined("K = 200, 2,500 rounds", *(f"{{baffle-mnist[K = 200, LeNet; seed {seed}]:.2f}}" for seed in (1, 2, 3)),
                "{baffle-mnist[K = 200, LeNet]:.2f}", LENET["mnist"]["K = 500"])],
    ),
    "baffle-mnist-rounds": Table(
        joined("accuracy at round", *ROUNDS),
        ["forward passes of a silo, thousands | " + joined(*(f"{200 * at / 1000:g}" for at in ROUNDS))]
        + [joined(f"seed {seed}", *(f"{{100 * baffle-mnist[K = 200, LeNet; seed {seed}; round {at}]:.2f}}" for at in ROUNDS))
           for seed in (1, 2, 3)],
    ),
    "baffle-1-quick": Table(
        "accuracy, per cent | MNIST | CIFAR-10",
        [joined(row, *(f"{{baffle-table-1-{data}-quick[{row}, LeNet]:.2f}} ({LENET[data][row]})" if row in QUICK[data] else ""
                       for data in QUICK))
         for row in LENET["mnist"] if row != "K = 500"],
        "BAFFLE, Table 1",
    ),
    "baffle-rate": Table(
        "accuracy on validation rows, per cent | 0.003 | 0.01 | 0.03 | 0.1",
        [joined(label, *(f"{{baffle-rate-quick[rate {rate}, {column}]:.2f}}" for rate in ("0.003", "0.01", "0.03", "0.1")))
         for label, column in (("BAFFLE", "MNIST"), ("backpropagation", "BP, MNIST"))],
    ),
    "baffle-blocks-mnist": Table(
        " | accuracy on the test rows, % | seeds 1, 2, 3",
        [*_seeds("baffle-blocks-mnist", {"activations": "activations", "scalars": "scalars, 568 a round"}),
         f"the paper's LeNet, K = 500, all at once | {LENET['mnist']['K = 500']} | "],
    ),
    "baffle-blocks-cifar10": Table(
        " | accuracy on the test rows, % | seeds 1, 2, 3",
        [*_seeds("baffle-blocks-cifar10", {
            "activations": "activations", "712 scalars": "scalars, 712 a round",
            "4,864 scalars, 10,000 rounds": "scalars, 4,864 a round, 10,000 rounds",
            "activations, flips, 10,000 rounds": "activations, flips, 10,000 rounds", "BP baseline": "backpropagation",
         }),
         f"the paper's LeNet, K = 100, 200, 500, all at once | {', '.join(LENET['cifar10'][f'K = {k}'] for k in (100, 200, 500))} | "],
    ),
    "baffle-multiply-adds": Table(
        "LeNet on CIFAR-10 | million a row | over a forward pass | moves or directions", _counted(WAYS, DATA["cifar10"])
    ),
    "baffle-directions": Table(
        " | LeNet",
        grid("baffle-directions-quick", dict.fromkeys(("Rademacher, mean", "Gaussian, mean", "orthogonal, mean", "Rademacher, mean, 100 of a pool of 200", "Gaussian, twice-forward, K = 50"), ()), ("LeNet",), ".2f"),
    ),
    "baffle-surrogate": Table(
        "exact derivatives | accuracy on 5,000 held-out rows, per cent | scalars a round",
        [joined(row, f"{{baffle-surrogate-cifar10[{row}; accuracy on 5,000 held-out rows, %]:.2f}}",
                f"{{baffle-surrogate-cifar10[{row}; scalars a round]:,.0f}}")
         for row in ("backpropagation", "activations", "activations, twice the moves", "scalars", "scalars, 4,864")],
    ),
    "baffle-secrets": Table(
        joined("seed of the secrets", 1, 2, 3, 4, 5),
        [joined("accuracy, per cent", *(f"{{baffle-secrets[seed 1, secret {number}; seed 1]:.2f}}" for number in range(1, 6)))],
    ),
    "baffle-forms": Table(
        "accuracy, per cent | sigma 1e-4 | sigma 1e-3",
        [joined(row, *(f"{{baffle-forms[{row}, {column}]:.2f}} ± {{baffle-forms[{row}, {column}; ±]:.2f}}"
                       for column in ("sigma 1e-4", "sigma 1e-3")))
         for row in ("mean, K = 100", "twice-forward, K = 50")],
    ),
    "baffle-sigma": Table(
        " | 1e-5 | 1e-4 | 1e-3 | 1e-2 | 1e-1",
        grid("baffle-sigma-quick", {"BAFFLE": ()}, ("1e-5", "1e-4", "1e-3", "1e-2", "1e-1"), ".2f"),
    ),
    "baffle-equal-forwards": Table(
        " | accuracy, % | loss | rounds | MB down a silo",
        [joined(row, *(f"{{baffle-equal-forwards-quick[{row}; {column}]:{form}}}" for column, form in (
            ("accuracy, %", ".2f"), ("loss", ".3f"), ("rounds", ".0f"), ("MB down a silo", ".1f"))))
         for row in ("K = 20", "K = 50", "K = 100", "K = 200", "K = 500")],
    ),
    "baffle-growing-k": Table(
        " | accuracy, %",
        _means("baffle-growing-k", {row: row for row in ("K = 100", "K from 40 to 200", "K from 200 to 40")}, "constant rate"),
    ),
    "baffle-norm": Table(
        " | accuracy, %",
        _means("baffle-norm", {"GroupNorm": "GroupNorm", "BatchNorm": "BatchNorm, `batch-statistics`"}, "4 rows a silo"),
    ),
    "baffle-own": Table(
        " | accuracy, %",
        _means("baffle-own", {row: row for row in ("shared, K = 40", "own, K = 40", "shared, K = 400")}, "LeNet"),
    ),
    "baffle-epoch-level": Table(
        " | accuracy, %",
        grid("baffle-epoch-level", dict.fromkeys(("Adam at each silo", "Adam at each silo, own directions", "SGD at each silo"), ()), ("2 rounds of one epoch",), ".2f"),
    ),
    "baffle-dp": Table(
        " | accuracy | epsilon",
        grid("baffle-dp-quick", {"noise 1": (), "noise 4": ()}, ("accuracy", "epsilon"), ".2f", "; "),
    ),
    "baffle-2": Table(
        " | non-iid | iid | authors' settings, non-iid | authors' settings, iid",
        [
            joined(row, *(f"{{{record}[{row}, {one}]:.2f}}" for record in ("baffle-table-2-quick", "baffle-table-2-authors")
                          for one in ("non-iid", "iid")))
            for row in ("K = 200", "BP baseline")
        ],
    ),
    "baffle-3": Table(
        " | plain | rotated | blurred | recoloured | mean",
        grid("baffle-domains", dict.fromkeys(("K = 20", "K = 50", "K = 100", "K = 200", "K = 500", "BP baseline"), ()),
             ("plain", "rotated", "blurred", "recoloured", "mean"), ".2f", "; "),
    ),
    "baffle-4": Table(
        joined("", *MEMORY_COLUMNS),
        grid("baffle-table-4", {row: (None, a, b, None, c, None) for row, (a, b, c) in MEMORY.items()}, MEMORY_COLUMNS,
             ".0f", "; "),
        "BAFFLE, Table 4",
    ),
    "baffle-slices": Table(
        " | edge | whole | slices | one at a time | slices, time | one at a time, time | slices",
        [joined(row.removesuffix(", batch 8"), *(f"{{baffle-slices[{row}; {column}]:{'.3g' if 'time' in column[-4:] and '/' in column else '.0f'}}}"
                for column in SLICES)) for row in SLICED],
    ),
    "baffle-figure-5": Table(
        " | KS statistic | p, median | p < 0.05, % | images beside images, % | by shape, % (p) | by direction, % (p)",
        [_told_apart(row) for row in UPLOADS],
    ),
}  # fmt: skip
