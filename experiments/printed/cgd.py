"""The tables of CGD (arXiv 2104.13050), and of what its participants learn of each other."""

from printed import Table, grid, joined, paper_of

# Worst accuracy and loss of tables 3, 7 and 8 by delta and grid.
MNIST = {
    "delta 0.1, centralised": (97.54, "0.080"),
    "delta 0.1, 10 x 7": ("95.60", 0.143),
    "delta 0.1, 100 x 49": (94.22, 0.188),
    "delta 0.1, 1000 x 112": (93.74, 0.209),
    "delta 0.01, centralised": (97.61, 0.078),
    "delta 0.01, 10 x 7": (97.21, 0.092),
    "delta 0.01, 100 x 49": (97.15, 0.094),
    "delta 0.01, 1000 x 112": (97.08, 0.096),
}
FIFTH = {"0.1": "95.60", "0.06": 96.72, "0.01": 97.21, "0.001": 96.38, "0.001 to 0.1": 96.59}
ROWS = {"10 x 1": (95.62, 0.201), "100 x 1": (94.22, None), "1000 x 1": (93.76, None)}
WORST_LOSS_8 = {"10 x 1": " (0.143)", "100 x 1": "", "1000 x 1": ""}
LOCAL = (
    ("mnist", "MNIST", {"10x7": (54.39, 1.283), "100x49": (23.53, 2.076), "1000x112": (11.64, 2.348),
                        "10x1": (92.01, 0.278), "100x1": (82.89, 0.549), "1000x1": (50.11, 1.566)}),
    ("cifar10", "CIFAR-10", {"10x2": ("65.30", "0.980"), "100x16": (26.25, 2.008), "1000x32": (16.19, 2.434)}),
)  # fmt: skip
CIFAR = paper_of("cgd-table-5")
DP = (("4", "Table 4, MNIST", {"no privacy": 98.3, "epsilon 8": "97.0", "epsilon 2": "95.0", "epsilon 0.5": "90.0"}),
      ("6", "Table 6, CIFAR-10's features",
       {"no privacy": "80.0", "epsilon 8": "73.0", "epsilon 4": "70.0", "epsilon 2": "67.0"}))  # fmt: skip
EPSILONS = ("no privacy", "epsilon 8", "epsilon 4", "epsilon 2", "epsilon 0.5")


def _seven(record: str, row: str, accuracy: object, loss: str, label: str = "", authors: str = "") -> str:
    place = f"{record}[{row}"
    return joined(
        label or row,
        f"{{{place}; Worst %]:.2f}} ({accuracy})",
        *([f"{{{authors}[{row}; Slices %]:.2f}}"] if authors else []),
        f"{{{place}; Mean %]:.2f}}",
        f"{{{place}; Worst loss]:.3f}}{loss}",
        f"{{{place}; D alone %]:.2f}}",
    )


def _private(number: str, label: str, printed: dict[str, object]) -> list[str]:
    place = f"cgd-table-{number}[DP-FL, "
    base = float(str(printed["no privacy"]))
    ours = (f"{{{place}{one}]:.2f}} ({printed[one]})" if one in printed else "" for one in EPSILONS)
    less = (f"{{{place}no privacy] - {place}{one}]:.2f}} ({base - float(str(printed[one])):.1f})"
            if one in printed else "" for one in EPSILONS[1:])  # fmt: skip
    return [joined(label, *ours), joined("less than its baseline, points", "", *less)]


def _local(file: str, data: str, row: str, accuracy: object, loss: object) -> str:
    place = f"cgd-local-{file}[{row}; "
    return joined(
        f"{data}, {row.replace('x', ' x ')}",
        f"{{{place}Mean %]:.2f}} ± {{{place}Standard error]:.2f}} ({accuracy})",
        f"{{{place}Worst %]:.2f}}",
        f"{{{place}Mean loss]:.3f}} ({loss})",
        f"{{{place}Trained]:.0f}} of {{{place}Of]:.0f}}",
    )


def _five(row: str, accuracy: object, loss: object) -> str:
    paper = 75.72 - float(str(accuracy))
    figures = []
    for record in ("cgd-table-5", "cgd-table-5-600"):
        place, base = f"{record}[{row}; Worst %]", f"{record}[centralised; Worst %]"
        less = "" if row == "centralised" else f"{{{base} - {place}:.2f}} ({paper:.2f})"
        figures += [f"{{{place}:.2f}} ({accuracy})", less, f"{{{record}[{row}; Worst loss]:.3f}} ({loss})"]
    authors = "" if row == "centralised" else f"{{cgd-table-5-authors[{row}; Slices %]:.2f}}"
    return joined(row, *figures, authors)


SIDE_BY_SIDE = [
    joined(
        row,
        paper,
        "" if "centralised" in row else f"{{cgd-authors[{row}; Slices %]:.2f}}",
        f"{{cgd-table-7[{row}; Worst %]:.2f}}",
        f"{{cgd-table-7[{row}; Mean %]:.2f}}",
        f"{{cgd-table-7[{row}; D alone %]:.2f}}",
        f"{{cgd-table-7[{row}; rounds]:,.0f}}",
        f"{{cgd-table-7[{row}; seconds]:,.0f}}",
    )
    for row, (paper, _) in MNIST.items()
]

CURVE = [
    joined(grid, *(f"{{100 * (cgd-table-5[centralised; round {at}] - cgd-table-5[{grid}; round {at}]):.2f}}"
                   for at in range(50, 301, 50)))
    for grid in ("10 x 2", "100 x 16", "1000 x 32")
]  # fmt: skip

READINGS = {
    "each by itself": "by itself",
    "by the sum of their first layers, in one holder's upper layers": "first layers added",
    "by the sum of their outputs": "outputs added",
    "by the mean of their softmax": "mean of softmax",
}
MU = ("0.001", "0.01", "0.1", "0.5")
LEAKS = "cgd-leaks"


def _alone(record: str, data: str, case: str, deltas: tuple[str, ...], first: str) -> list[str]:
    rows = []
    for delta in deltas:
        place = f"{record}[d-alone; scores; {case.format(delta)}; accuracy of D alone; "
        beside = f"{place}beside; "
        rows.append(joined(
            first if delta == deltas[0] else "",
            f"{data}, delta {delta}",
            f"{{100 * {place}value]:.1f}} % right",
            f"confined models: mean {{100 * {beside}mean of confined models]:.1f}}, worst "
            f"{{100 * {beside}min of confined models]:.1f}}, best {{100 * {beside}max of confined models]:.1f}} %, of "
            f"which D beats {{100 * {beside}share of them that D beats]:.0f}} %",
        ))  # fmt: skip
    return rows


def _leak(what: str, case: str, name: str, at: str, measured: str, beside: str, control: str) -> str:
    place = f"{LEAKS}[{name}; scores; {at}; {measured}; "
    against = f"{control}: {{{place}beside; {beside}]:.2g}}" if control else ""
    return joined(what, case, f"error {{{place}value]:.2g}}", against)


FEATURES, HEAD_ALONE = "relative error of silo-1-2's features", "relative error of the others' X X'"
DEGREES = ((8, "digits, 61 columns, 10 outputs"), (30, "digits, 61 columns, 10 outputs"),
           (100, "digits, 61 columns, 10 outputs"), (10, "diabetes, 10 columns, 1 output"),
           (30, "diabetes, 10 columns, 1 output"), (300, "diabetes, 10 columns, 1 output"),
           (30, "wdbc, 30 columns, 1 output"), (300, "wdbc, 30 columns, 1 output"))  # fmt: skip


def _moments(number: int, data: str) -> str:
    at = f"{data.removesuffix('s')}s, 5 x 1, delta 0.01, {number} sums"
    place = f"{LEAKS}[linear-regression; scores; {at}; relative error of X'X; "
    return joined(
        f"{data}; {number} sums",
        f"{{{place}value]:.2g}}",
        f"{{{place}beside; from one's own rows]:.2g}}",
        f"{{{place}beside; X'y]:.2g}}",
        f"{{{place}beside; predictions of D]:.2g}}",
    )


def _regret(delta: str, parties: int, label: str, schedule: str = "inverse-square") -> str:
    place = f"{LEAKS}[theorem-1; scores; digits, {parties} x 1, delta {delta}, {schedule}, 300 iterations; regret R; "
    beside = f"{place}beside; "
    return joined(
        label, parties, f"{{{beside}epsilon]:.3g}}", f"{{{place}value]:.2g}}",
        f"{{{beside}F(w_l) - F(w*) at the end]:.2g}}",
        f"{{{beside}left of (19)]:.2g}}, {{{beside}right of (19)]:.2g}}",
    )  # fmt: skip


def _three(row: str, worst: str, mean: str, loss: str) -> str:
    def ours(figure: str, digits: int) -> str:
        place = f"cgd-table-3[{row}; {figure}"
        return f"{{{place}]:.{digits}f}} ± {{{place}; ±]:.{digits}f}}"

    return joined(
        row, f"{ours('Worst %', 2)} ({worst})", f"{ours('Mean %', 2)}", f"{ours('Worst loss', 3)} ({loss})",
        f"{{cgd-table-3[{row}; seconds]:,.0f}}",
    )  # fmt: skip


TABLES = {
    "cgd-rate": Table(
        "rate | 0.1 | 0.3 | 0.5 | 1 | 2",
        [joined("worst accuracy on validation rows, per cent",
                *(f"{{cgd-rate[CGD, rate {rate}]:.2f}}" for rate in ("0.1", "0.3", "0.5", "1", "2")))],
    ),
    "cgd-3-2000": Table(
        "2000 iterations, delta 0.1 | worst accuracy, per cent | mean | worst loss | seconds of ours",
        [_three(row, *paper) for row, paper in paper_of("cgd-table-3").items()],
        "CGD, Table 3",
    ),
    "cgd-3": Table(
        "worst accuracy, per cent | paper | authors' settings, mean over slices | ours | mean of ours | D alone, past the paper "
        "| iterations of ours | seconds of ours",
        SIDE_BY_SIDE,
    ),
    "cgd-7": Table(
        "60,000 rows | worst accuracy, per cent | mean | worst loss | D alone",
        [_seven("cgd-table-7", row, accuracy, f" ({loss})") for row, (accuracy, loss) in MNIST.items()],
        "CGD, Tables 3 and 7",
    ),
    "cgd-7-fifth": Table(
        "12,000 rows, 10 x 7 | worst accuracy, per cent | mean | worst loss | D alone",
        [_seven("cgd-table-7-fifth", f"delta {delta}, 10 x 7", one, "", f"delta {delta}") for delta, one in FIFTH.items()],
        "CGD, Table 7, of 60,000 rows",
    ),
    "cgd-8": Table(
        "delta 0.1 | worst accuracy, per cent | authors' settings, mean over slices | mean | worst loss | D alone",
        [
            _seven("cgd-table-8", row, accuracy, WORST_LOSS_8[row], authors="cgd-table-8-authors")
            for row, (accuracy, _) in ROWS.items()
        ],
        "CGD, Table 8",
    ),
    "cgd-local": Table(
        "grid | mean accuracy, per cent | worst in the sample | mean loss | participants",
        [_local(file, data, row, *one) for file, data, rows in LOCAL for row, one in rows.items()],
        'CGD, Tables 3, 5 and 8, "local training"',
    ),
    "cgd-local-2000": Table(
        "2000 iterations, CIFAR-10 600 | mean accuracy, per cent | worst in the sample | mean loss | participants",
        [_local(f"{file}-local-{row}", data, row, *one) for file, data, rows in LOCAL for row, one in rows.items()],
        'CGD, Tables 3, 5 and 8, "local training"',
    ),
    "cgd-local-40": Table(
        "stopped after 40 iterations | mean accuracy, per cent | mean loss | participants",
        [
            f"MNIST, {row.replace('x', ' x ')} | {{cgd-local-mnist-40[{row}; Mean %]:.1f}} | "
            f"{{cgd-local-mnist-40[{row}; Mean loss]:.2f}} | {{cgd-local-mnist-40[{row}; Trained]:.0f}}"
            for row in ("10x1", "100x1", "1000x1")
        ],
    ),
    "cgd-4-6": Table(
        "accuracy, per cent | no privacy | epsilon 8 | epsilon 4 | epsilon 2 | epsilon 0.5",
        [row for table in DP for row in _private(*table)],
        "CGD, Tables 4 and 6, from Abadi et al.",
    ),
    "cgd-4-6-rate": Table(
        "validation accuracy, per cent, by rate | 0.03 | 0.1 | 0.25 | 0.3 | 0.5 | 1",
        [
            joined(what, *(f"{{cgd-table-{number}-rate[rate {rate}; Accuracy %]:.2f}}" if rate in rates else ""
                           for rate in ("0.03", "0.1", "0.25", "0.3", "0.5", "1")))
            for number, what, rates in (("4", "Table 4, epsilon 2", ("0.1", "0.25", "0.5", "1")),
                                        ("6", "Table 6, epsilon 4", ("0.03", "0.1", "0.3", "1")))
        ],
    ),
    "cgd-4-clip": Table(
        " | no noise | epsilon 8 | epsilon 0.5",
        grid("cgd-table-4-clip", {f"clip norm {norm}": () for norm in (1, 4, 16)}, ("no noise", "epsilon 8", "epsilon 0.5"),
             ".2f"),
    ),
    "cgd-5": Table(
        "grid | worst after 300 iterations, per cent | less than centralised, points | worst loss | after 600 | less | worst loss "
        "| authors' settings, mean over slices",
        [_five(row, *one) for row, one in CIFAR.items()],
        "CGD, Table 5",
    ),
    "cgd-5-curve": Table("less than centralised, points, after | 50 | 100 | 150 | 200 | 250 | 300", CURVE),
    "cgd-5-rate": Table(
        "validation loss by rate | 0.1 | 0.3 | 1",
        [joined(form, *(f"{{cgd-table-5-rate[{form}, rate {rate}; Loss]:.3f}}" for rate in ("0.1", "0.3", "1")))
         for form in ("as they are", "standardised")],
    ),
    "cgd-figure-8": Table(
        "mu | 0.001 | 0.01 | 0.1 | 0.5",
        [joined(what, *(f"{{cgd-figure-8-quick[mu {mu}, 100 x 49; {figure}]:.2f}}" for mu in MU))
         for what, figure in (("worst accuracy, per cent", "Worst %"), ("mean accuracy, per cent", "Mean %"))],
    ),
    "cgd-vertical": Table(
        " | worst accuracy, per cent | mean accuracy, per cent | worst loss",
        [
            joined(what, *(f"{{cgd-vertical[{row}; {figure}]:{form}}}" for figure, form in (
                ("Worst %", ".2f"), ("Mean %", ".2f"), ("Worst loss", ".3f"))))
            for what, row in (
                ('`vertical = "joint"`: a row of the grid adds up its columns\' parts', "joint"),
                ('`vertical = "independent"`, as Algorithm 2 is printed', "independent"),
            )
        ],
    ),
    "cgd-third-reading": Table(
        "the seven holders of a row answer | worst accuracy, per cent | mean | worst loss | mean loss",
        [
            joined(what, *(f"{{{times}cgd-third-reading[{row}; {which}; {key}]:{form}}}" for key, times, form in (
                ("accuracy", "100 * ", ".2f"), ("loss", "", ".3f")) for which in ("worst", "mean")))
            for what, row in READINGS.items()
        ],
    ),
    "cgd-authors": Table(
        "12,000 rows, 10 x 7 | mean over slices, per cent | mean | worst | loss over slices | D alone",
        [
            joined(f"delta {delta}", *(f"{{cgd-authors-quick[delta {delta}, 10 x 7; {figure}]:{form}}}" for figure, form in (
                ("Slices %", ".2f"), ("Mean %", ".2f"), ("Worst %", ".2f"), ("Slices loss", ".3f"), ("D alone %", ".2f"))))
            for delta in ("0.1", "0.001")
        ],
    ),
    "cgd-leaks-d-alone": Table(
        "who attacks, with what | case | found | beside it",
        [
            *_alone("cgd-leaks-mnist", "MNIST, 1000 x 1, 200 iterations", "mnist, 1000 x 1, delta {}, 200 iterations",
                    ("0.1", "0.06", "0.01"), "one participant takes D as a model"),
            *_alone(LEAKS, "digits, 20 x 1, 400 iterations", "digits, 20 x 1, delta {}, 400 iterations",
                    ("0.1", "0.06", "0.01"), "the same"),
        ],
    ),
    "cgd-leaks": Table(
        "who attacks, with what | case | found | beside it",
        [
            _leak("one participant, once shown another's w_l(10), adds D(j) - D(10)", "digits, 4 x 1, all 30 iterates",
                  "leaked-iterate", "digits, 4 x 1, 30 iterations", "relative error of all w_l(j)",
                  "one's own models instead", "its own models instead"),
            _leak("one of two takes its part off the sum: the other's gradient", "digits, 2 x 1",
                  "two-parties", "digits, 2 x 1", "relative error of another's n_l g_l", "one's own instead", "its own instead"),
            _leak("the same, one of three", "digits, 3 x 1",
                  "two-parties", "digits, 3 x 1", "relative error of another's n_l g_l", "one's own instead", "its own instead"),
            _leak("head of a row of two takes its part off z: X_i2 W_i2", "digits, 2 x 2",
                  "two-parties", "digits, joint row of 2", "relative error of another's X_ij W_ij", "one's own instead", "its own instead"),
            _leak("the same in a row of three", "digits, 2 x 3",
                  "two-parties", "digits, joint row of 3", "relative error of another's X_ij W_ij", "one's own instead", "its own instead"),
            *(
                _leak("head and who knows the other columns' D1: raw features" if (dtype, number) == ("float64", 2) else "",
                      f"digits, 2 x 2, {dtype}, {number} iterations", "raw-features",
                      f"digits, 2 x 2, 32 columns, H1 16, {dtype}, {number} iterations", FEATURES,
                      "the helper's mean row" if number == 2 else "other starts' D1",
                      "the mean row" if number == 2 else "with D1 of other starts")
                for dtype in ("float64", "float32") for number in (2, 3, 5, 20, 100)
            ),
            _leak("head of the only row, alone: inner products X X' of the others' rows", "digits, 1 x 2, float64, 20 iterations",
                  "one-row", "digits, 1 x 2, H1 16, float64, 20 iterations", HEAD_ALONE, "its own", "its own columns'"),
            _leak("", "digits, 1 x 3, the two others' in sum", "one-row", "digits, 1 x 3, H1 16, float64, 20 iterations",
                  HEAD_ALONE, "its own", "its own columns'"),
            _leak("the same in a grid of two rows", "digits, 2 x 2", "one-row", "digits, 2 x 2, H1 16, float64, 20 iterations",
                  HEAD_ALONE, "its own", "its own columns'"),
            *(
                joined("partner without labels clusters the rows of Delta by k-means" if (delta, at) == ("0.1", 1) else "",
                       f"digits, 2 x 2, delta {delta}, iteration {at}",
                       f"adjusted Rand index {{{LEAKS}[labels; scores; digits, 2 x 2, H1 32, delta {delta}, iteration {at}; adjusted Rand index; value]:.2f}}",
                       f"its own columns: {{{LEAKS}[labels; scores; digits, 2 x 2, H1 32, delta {delta}, iteration {at}; adjusted Rand index; beside; from its own columns]:.2f}}; chance: 0")
                for delta in ("0.1", "0.01") for at in (1, 5, 20)
            ),
        ],
    ),
    "cgd-leaks-linear": Table(
        "one of five that fit a linear model | error of X'X, from successive sums | X'X from its own rows | X'y, up to the "
        "starts, at delta 0.01 | predictions of D, beside least squares on all rows",
        [_moments(*one) for one in DEGREES],
    ),
    "cgd-theorem-1": Table(
        "delta | m | epsilon | R | F(w_l) - F(w*) at the end | left and right of Inequality 19",
        [
            _regret("0.01", 10, "0.01"),
            _regret("0.1", 2, "0.1"),
            _regret("0.1", 10, "0.1"),
            _regret("0.1", 50, "0.1"),
            _regret("1", 10, "1"),
            _regret("0.1", 10, "0.1, constant rate", "constant"),
        ],
    ),
}  # fmt: skip
