"""Loss differences of data against those of noise: BAFFLE's appendix D, as a test instead of its plot.

The paper plots the K loss differences of a batch of data and of noise and states that they are indistinguishable. The
server, which holds the model and the directions, need not look at a plot. It computes the K numbers of its own rows,
x^d of data and x^n of noise, at the same parameters w and along the same d_k. As x_k = d_k . grad L, the numbers of
each kind of rows lie around a mean of that kind. For the uploaded x,

    T = x . (mean x^d - mean x^n)        z = (T - mean T of noise) / deviation of T of noise

is how much further it lies towards data than noise does (Fisher's discriminant with unit covariance). The means, the
deviations and the z of noise to compare with are from separate noise batches.

Under a secure sum the server has the K numbers of all silos' rows together; under the scheme "none", those of each
silo. Noise has the column means and deviations of background rows, and their labels at random.
"""

from collections.abc import Mapping

import numpy as np

from moretta.audit.attacks.baffle import estimates
from moretta.audit.evidence import network
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given
from moretta.audit.evidence.case import Case
from moretta.audit.evidence.intervals import Floats, auc
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array, Message

LEAST, DRAWS = 12, 48  # noise batches an upload; thirds are for the mean, T's deviation, and the test
TOGETHER = 4  # in one pass through the model
SECONDS, SECONDS_THOROUGH = 3.0, 600.0  # of an idle core, approximately; they set the number of batches
MOST_ROWS = 512  # of background
SEED = 11
SMALL = 1e-300


def gather(truth: Truth) -> Given:
    """Return the server's view, its opened sums, and background rows."""
    known = truth.background
    knowledge = f"{len(known.x)} labelled background rows, to compare with and to make noise like"
    return estimates.gather_numbers(truth, {"x": known.x, "y": known.y}, knowledge)


def attack(case: Case) -> Claim:
    """Claim z of the uploads, [rounds or silos of them], of noise, and the p value of masked words."""
    forward = estimates.forward_in(case, tokens=case.arrays["x"].dtype.kind in "iu")
    recipe = estimates.recipe_of(case.run, forward)
    generator = np.random.Generator(np.random.PCG64(SEED))
    seen = estimates.seeded_rounds(case.run, case.heard("server", Message), forward)
    uploads, tokens = estimates.uploads_of(case, seen), case.run.has_tokens
    draws = _draws(case, seen, max(rows for *_, rows in uploads), len(uploads))
    data, noise = list[float](), list[float]()
    for number, _, uploaded, rows in uploads:
        known_x, known_y = case.arrays["x"][:MOST_ROWS].copy(), case.arrays["y"][:MOST_ROWS]
        batches = list[Floats]()
        while len(batches) < draws:
            x, y = noise_rows(case.arrays["x"], case.arrays["y"], rows * TOGETHER, generator, tokens=tokens)
            slopes = estimates.by_row(recipe, forward, seen[number], x, y).reshape(-1, TOGETHER, rows).mean(axis=2)
            batches += list(slopes.T)
        of_data = estimates.scalars(recipe, forward, seen[number], known_x, known_y)
        z, others = z_scores(uploaded, of_data, np.array(batches))
        data.append(z)
        noise += list(others)
    words = [word for number in seen for word in seen[number].words.values()]
    return {"data": np.array(data), "noise": np.array(noise), "words_p": np.array(uniformity(words))}


def _draws(case: Case, seen: Mapping[int, estimates.Round], rows: int, uploads: int) -> int:
    """Return the number of noise batches for each of `uploads` uploads of `rows` rows."""
    last, tokens = seen[max(seen)], case.arrays["x"].dtype.kind in "iu"
    model, count = case.model(), last.directions.count
    each_row = network.cost_of_row(model, case.run.shape, tokens=tokens)
    together = count * network.cost_of_passes(model, each_row, rows * TOGETHER, 1.0) + estimates.drawn_at(
        last.directions
    )
    seconds = (SECONDS_THOROUGH if case.thorough else SECONDS) / uploads
    return TOGETHER * network.times(seconds, together, LEAST // TOGETHER, DRAWS // TOGETHER)


def z_scores(uploaded: Floats, of_data: Floats, of_noise: Floats) -> tuple[float, Floats]:
    """Return z of the uploaded x_k, and of a third of the noise batches.

    Args:
        uploaded, of_data: x_k of the upload and of the data, [K].
        of_noise: x_k of noise batches, [batches, K].
    """
    third = len(of_noise) // 3
    towards = of_data - of_noise[:third].mean(axis=0)
    measured = of_noise[third : 2 * third] @ towards
    middle, scale = measured.mean(), max(float(measured.std(ddof=1)), SMALL)
    return float((uploaded @ towards - middle) / scale), (of_noise[2 * third :] @ towards - middle) / scale


def noise_rows(
    x: Array, y: Array, rows: int, generator: np.random.Generator, *, tokens: bool = False
) -> tuple[Array, Array]:
    """Return a batch of noise: columns Gaussian with the means and deviations of x, labels of y at random.

    Args:
        x: Rows [n, ...]. Whole numbers are tokens, and each is drawn from its column.
        tokens: Whether all columns are drawn from their values, as tokens are.
    """
    if tokens or x.dtype.kind in "iu":
        pick = generator.integers(0, len(x), (rows, *x.shape[1:]))
        noise = np.take_along_axis(x, pick, axis=0)
    else:
        drawn = generator.standard_normal((rows, *x.shape[1:]))
        noise = (x.mean(axis=0) + x.std(axis=0) * drawn).astype(x.dtype)
    return noise, y[generator.integers(0, len(y), rows)]


def uniformity(words: list[Array]) -> float:
    """Return the p value of Kolmogorov and Smirnov's test that ring elements are uniform; 1 without any."""
    from scipy import stats

    if not words:
        return 1.0
    together = np.concatenate([word.ravel() for word in words])
    return float(stats.kstest(together / 2.0 ** (8 * together.dtype.itemsize), "uniform").pvalue)


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Return the area under the ROC curve of distinguishing data from noise, and the two-sample p value."""
    from scipy import stats

    data, noise = claim["data"], claim["noise"]
    area, interval = auc(data, noise)
    p = float(stats.ks_2samp(data, noise).pvalue)
    what = "sums of silos' loss differences" if truth.run.masked else "silos' loss differences"
    figures = {"p": p, "uploads": float(len(data)), "noise_batches": float(len(noise))}
    if truth.run.masked:
        figures["masked_words_p"] = float(claim["words_p"])
    return AttackResult(
        measure="area under the ROC curve of distinguishing loss differences of data from those of noise",
        score=area,
        chance=0.5,
        constant=0.5,
        interval=interval,
        sentence=f"The server distinguishes {what} from those of noise with an AUC of {area:.2f} "
        f"(two-sample p = {p:.1e})",
        figures=figures,
    )


ATTACK = Attack(
    name="loss-differences",
    title="finds out whether uploads were made from data or from noise",
    severity="protocol",
    role="server",
    source="two-sample test of Feng et al. (BAFFLE), appendix D, Fig. 5",
    protocols=frozenset({"baffle"}),
    fits=estimates.fits,
    given=gather,
    attack=attack,
    score=score,
)
