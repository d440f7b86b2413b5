"""The server and all silos but one subtract what they know from the sum: the rest is the last silo's upload.

Derivation: the secure sum is M = sum_k N_k g_k / N over the rows N_k of each silo's batch, and the server sees it. With
the g_k of the colluding silos it has

    g_v = (N M - sum_{k != v} N_k g_k) / N_v

exactly, up to the ring's steps, under all masks. That follows from the sum itself, so no secure sum prevents it. The
server computes M from its recorded messages. A silo recomputes its own g_k from its rows and the received model, with
the dropout and the crops of that round. With one silo fewer on their side they have only the weighted mean of two
uploads. Under PBPFL g is the gradient of the noisy loss at the noisy model, which the server's key turns into the true
one; under cross-entropy a silo computes it from the server's answer.
"""

from typing import Any

import numpy as np

from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, no_training, rounds_of
from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.exposure import exposure, fitting
from moretta.audit.evidence.intervals import flat, of_units, relative_error, to_error
from moretta.audit.evidence.truth import Truth
from moretta.audit.evidence.uploads import first_rounds, gradient_of, of_round, rows_of
from moretta.contract.roles import over, under

ROUNDS = 10  # only the first ones


def fits(run: PublicRun) -> str:
    """Return why the attack cannot be tried; empty if it can."""
    if not run.masked:
        return "uploads are in the clear; the server needs nobody's help to read one"
    if run.setting("dp-noise"):
        return "silos add noise that they draw in secret, so there is no gradient to compare with"
    if run.setting("class-weights"):
        return "class weights make uploads count by their labels, which colluders do not know of each other"
    return no_training(run)


def gather(truth: Truth) -> Given:
    """Return the server's view, and the colluders' gradients, computed from their own rows."""
    run, counted = truth.run, first_rounds(truth, ROUNDS, least=2)
    victim = max(run.silos, key=lambda silo: sum(silo in silos for silos in counted.values()))  # the first such
    rounds = [number for number, silos in counted.items() if victim in silos]
    arrays = {"rounds": np.array(rounds), "victim": np.array(run.silos.index(victim))}
    for number in rounds:
        for silo in set(counted[number]) - {victim}:
            own = exposure(run).uploaded(truth, silo, number)
            arrays |= over(f"own/{number}/{silo}/", own)
    return Given(
        views={"server": tuple(number for number in run.recorded if number <= rounds[-1])},
        arrays=arrays,
        view=f"{rounds_of(len(rounds))} of the server's messages",
        knowledge=f"what all silos of a round but {victim} upload, computed from their own rows, and how many rows "
        "each batch has",
    )


def attack(case: Case) -> Claim:
    """Claim the victim's gradient by round, and that of one colluding silo fewer. others: [rounds], colluders."""
    run, victim = case.run, case.run.silos[int(case.arrays["victim"])]
    prefix = exposure(run).prefix
    found_by: dict[str, list[Any]] = {"alone": [], "pair": [], "mean": [], "others": []}
    for number in case.arrays["rounds"].tolist():
        total = of_round(case, number).total()
        mean = flat(gradient_of(total.means, prefix))
        left, others = mean * total.weight, [silo for silo in total.silos if silo != victim]
        for silo in reversed(others):
            if silo == others[0]:
                found_by["pair"].append(left / (rows_of(run, victim, number) + rows_of(run, silo, number)))
            left = left - rows_of(run, silo, number) * flat(under(f"own/{number}/{silo}/", case.arrays))
        found_by["mean"].append(mean)
        found_by["alone"].append(left / rows_of(run, victim, number))
        found_by["others"].append(len(others))
    of = {name: case.arrays[name] for name in ("rounds", "victim")}
    return of | {name: np.array(values) for name, values in found_by.items()}


def score(claim: Claim, truth: Truth) -> AttackResult:
    """Compare with the silo's gradient: the median over rounds of 1 - relative error."""
    silo = truth.run.silos[int(claim["victim"])]
    uploaded = exposure(truth.run).uploaded
    true = [flat(uploaded(truth, silo, int(number))) for number in claim["rounds"]]
    errors = {
        name: np.array([relative_error(a, b) for a, b in zip(claim[name], true, strict=True)])
        for name in ("alone", "pair", "mean")
    }
    middle = {name: float(np.median(values)) for name, values in errors.items()}
    least, most = int(claim["others"].min()), int(claim["others"].max())
    who = f"the other {most if least == most else f'{least} to {most}'} silos of a round"
    who = "the other silo" if most == 1 else who
    sentence = f"The server and {who} subtract what they know and have the upload of {silo} "
    sentence += f"{to_error(middle['alone'])}. With one silo fewer they have it {to_error(middle['pair'])}"
    return AttackResult(
        "1 - relative error of the gradient, median over rounds",
        *of_units(errors["alone"], errors["mean"]),  # the mean is a guess without a colluder
        sentence=sentence,
        figures={
            "relative_error": middle["alone"],
            "relative_error_with_one_silo_fewer": middle["pair"],
            "relative_error_of_the_mean": middle["mean"],
            "rounds": float(len(true)),
        },
    )


ATTACK = Attack(
    name="server-and-silos",
    title="works out the upload of the one silo that does not collude",
    severity="protocol",
    role="server and silos",
    source="arithmetic of sums; the limit that every secure sum has (Bonawitz et al., CCS 2017)",
    protocols=fitting("server-and-silos"),
    fits=fits,
    given=gather,
    attack=attack,
    score=score,
)
