"""The tables of the PBPFL papers and of what was measured beside them. "Feng et al.": arXiv 2002.09843, a later version."""

from printed import Table, grid, joined, paper_of

FENG_1 = paper_of("pbpfl-table-1")
SILOS = ("k = 1", "k = 5", "k = 10")

SIDE_BY_SIDE = [
    joined(
        f"{cell}, {silos}",
        paper,
        f"{{pbpfl-table-1-authors[{cell}, {silos}]:.3f}}",
        f"{{pbpfl-table-1[{cell}, {silos}]:.3f}} ± {{pbpfl-table-1[{cell}, {silos}; ±]:.4f}}",
        f"{{pbpfl-table-1[{cell}, {silos}; rounds]:,.0f}}",
        f"{{pbpfl-table-1[{cell}, {silos}; seconds]:,.0f}}",
    )
    for cell, row in FENG_1.items()
    for silos, paper in zip(SILOS, row, strict=True)
]

SHORT = {cell.removeprefix("FedAvg, "): row for cell, row in FENG_1.items() if "FedAvg" in cell}

IMAGES = (
    ("Table II (Feng et al.), HAM10000, cross-entropy", "pbpfl-table-2", "FedAvg, ResNet20", "PBPFL, ResNet20"),
    ("Table 2 (first version), HAM10000, squared error", "pbpfl-first-table-2", "FedAvg-MSE", "PBPFL"),
    ("Table III (Feng et al.), CIFAR-100 subset, PBPFL with masks", "pbpfl-table-3", "FedAvg", "PBPFL with masks"),
)
K_5 = 1
"""The place of k = 5 in a row that the papers print."""

HIDDEN = (
    ("nothing", "", ".1e", ".1e", ".1e"),
    ("noise of variance 1e-4", " (0.017)", ".3f", ".4f", ".3f"),
    ("noise of variance 1e-3", " (0.092)", ".3f", ".4f", ".3f"),
    ("noise of variance 1e-2", " (0.217)", ".3f", ".4f", ".3f"),
    ("noise of variance 1e-1", " (0.238)", ".2f", ".3f", ".3f"),
    ("masks of real numbers, +-10", ' (0.235, "our method")', ".1f", ".2f", ".3f"),
    ("ring words", "", ".1f", ".2f", ".3f"),
)
"""What hides a gradient, Feng et al.'s "defendability" (Table IV), and the digits of three columns."""

PHASES = ("PP", "LFP", "LBP", "MU", "MB down", "MB up")

EXCHANGES = (
    ("wdbc, 2 classes, m = 2, 32 rows", 0),
    ("digits, 10 classes, m = 5, 32 rows", 2),
    ("digits, 10 classes, m = 5, 1 row", 4),
)
"""The first of each case's two rows in the record: outputs, then ratios."""


def _exchange(row: int, who: str) -> str:
    score = "pbpfl-exchange[rows; {}; {}; {}]"
    return f"{{{score.format(row, who, 'score')}:.2f}} ({{{score.format(row, who, 'chance')}:.2f}})"


def _traffic(row: int, way: str) -> str:
    each = (f"{{pbpfl-exchange[rows; {at}; bytes; {way}] / 1000:.0f}}" for at in (row, row + 1))
    return "; ".join(each)


TABLES = {
    "pbpfl-1": Table(
        "mean squared error | paper | authors' settings | ours | rounds of ours | seconds of ours",
        SIDE_BY_SIDE,
    ),
    "pbpfl-1-short": Table(
        "FedAvg | k = 1 | k = 5 | k = 10", grid("pbpfl-table-1-short", SHORT, SILOS, ".3f"), "Feng et al., Table I"
    ),
    "pbpfl-1-rate": Table(
        "FedSGD, MLP-5, k = 5 | loss on validation rows",
        grid("pbpfl-table-1-rate", {f"rate {rate}": () for rate in (0.01, 0.03, 0.1, 0.3)}, ["k = 5"], ".5f"),
    ),
    "pbpfl-1-same-rows": Table(
        " | ".join(["", *SILOS[1:]]),
        grid("pbpfl-table-1-same-rows", paper_of("pbpfl-table-1-same-rows"), SILOS[1:], ".1f"),
        "Feng et al., Table I",
    ),
    "pbpfl-5": Table(
        " | PP | LFP | LBP | MU | MB down | MB up",
        grid(
            "pbpfl-table-5-quick",
            paper_of("pbpfl-table-5"),
            PHASES,
            ".2f",
            "; ",
        )
        + [
            joined(f"{one}, authors' network, 224 x 224", *(f"{{pbpfl-table-5-cpu[{one}; {phase}]:.2f}}" for phase in PHASES))
            for one in ("FedAvg", "PBPFL")
        ],
        "Feng et al., Table V",
    ),
    "pbpfl-images": Table(
        "accuracy, per cent | FedAvg | PBPFL | authors' settings, FedAvg | authors' settings, PBPFL",
        [
            *(
                joined(
                    what,
                    *(f"{{{name}-quick[{cell}, k = 5]:.2f}} ({paper_of(name)[cell][K_5]})" for cell in cells),
                    *(f"{{{name}-authors[{cell}, k = 5]:.2f}}" for cell in cells),
                )
                for what, name, *cells in IMAGES
            ),
            "Table 2 (first version), HAM10000, cross-entropy | "
            f"{{pbpfl-first-table-2-quick[FedAvg-CE, k = 5]:.2f}} ({paper_of('pbpfl-first-table-2')['FedAvg-CE'][K_5]}) | | "
            "{pbpfl-first-table-2-authors[FedAvg-CE, k = 5]:.2f} | ",
            joined(
                "Fig. 4 (Feng et al.), HAM10000, two seeds",
                *(
                    f"{{pbpfl-figure-4-quick[{one}, ResNet20, k = 5]:.2f}} ± "
                    f"{{pbpfl-figure-4-quick[{one}, ResNet20, k = 5; ±]:.2f}}"
                    for one in ("FedAvg", "PBPFL")
                ),
                *(f"{{pbpfl-figure-4-authors[{one}, ResNet20, k = 5]:.2f}}" for one in ("FedAvg", "PBPFL")),
            ),
        ],
        "of each row's table at k = 5",
    ),
    "pbpfl-images-rates": Table(
        "FedSGD's loss on validation rows | 0.003 | 0.01 | 0.03 | 0.1 | 0.3",
        [
            joined(what, *(f"{{{record}[rate {rate}, k = 5]:.3f}}" if rate in rates else "" for rate in (
                "0.003", "0.01", "0.03", "0.1", "0.3")))
            for what, record, rates in (
                ("Table II and Fig. 4", "pbpfl-table-2-rate-quick", ("0.03", "0.1", "0.3")),
                ("Table III", "pbpfl-table-3-rate-quick", ("0.01", "0.03", "0.1")),
                ("first version's Table 2", "pbpfl-first-table-2-rate-quick", ("0.003", "0.01", "0.03")),
            )
        ],
    ),
    "pbpfl-rounding": Table(
        " | loss in rounds 1, 2, 3 | weights, relative difference from FedSGD after 8 rounds",
        [
            joined(
                f"{label}, {dtype}",
                ", ".join(f"{{pbpfl-rounding[rows; {row}; losses; {number}]:.6f}}" for number in range(3)),
                f"{{pbpfl-rounding[rows; {row}; apart]:.1e}}" if label == "PBPFL" else "",
            )
            for row, (label, dtype) in enumerate(
                (label, dtype) for dtype in ("float64", "float32") for label in ("FedSGD", "PBPFL")
            )
        ],
    ),
    "pbpfl-4": Table(
        "hidden by | distance of gradients | relative to the gradient | mean squared error of the image | images found "
        "| labels right",
        [
            *(
                joined(
                    what,
                    f"{{table4[rows; {row}; gradient_distance]:{a}}}{paper}",
                    f"{{table4[rows; {row}; relative_distance]:{b}}}",
                    f"{{table4[rows; {row}; image_error]:{c}}}",
                    f"{{table4[rows; {row}; images_found]:.0f}}",
                    f"{{table4[rows; {row}; labels_right]:.0f}}",
                )
                for row, (what, paper, a, b, c) in enumerate(HIDDEN)
            ),
            "(the mean of other images) | | | {table4[mean_image_error]:.3f} | | ",
        ],
        'Feng et al., Table IV, "defendability"',
    ),
    "pbpfl-exchange": Table(
        " | server, outputs | server, ratios | silo, outputs | silo, ratios | kB up a silo and round | down",
        [
            joined(
                what,
                *(_exchange(row + add, who) for who in ("server", "silo") for add in (0, 1)),
                _traffic(row, "up"),
                _traffic(row, "down"),
            )
            for what, row in EXCHANGES
        ],
        "what guessing scores",
    ),
}  # fmt: skip
