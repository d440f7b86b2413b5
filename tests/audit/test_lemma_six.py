"""The game of Definition 2, on recorded runs."""

from recorded import attacked, recorded

from moretta.audit.attacks.pbpfl import lemma_six
from moretta.audit.attacks.pbpfl.canonical import plan_of
from moretta.audit.attacks.pbpfl.lemma_six import ATTACK
from moretta.secure_aggregation.keystream import SecretRoot


def run(folder):
    return recorded(folder, run={"rounds": 6}, protocol={"name": "pbpfl", "rho": 3.0})


def test_games_are_won(tmp_path):
    found = attacked(ATTACK, run(tmp_path))
    assert found.succeeded
    assert found.score == 1.0
    assert found.figures["advantage"] == 1.0
    assert found.figures["canonical"] == 1.0


def test_perturbations_of_one_model_are_not_told_apart(tmp_path, monkeypatch):
    truth = run(tmp_path)
    plan, root = plan_of(truth), SecretRoot(bytes(32))

    def perturbed(number):
        return lambda true, matrix, generator: plan.perturb(true, plan.draw(root.stream("key", number)))

    monkeypatch.setattr(lemma_six, "ALTERNATIVES", {f"key {number}": perturbed(number) for number in range(4)})
    found = attacked(ATTACK, truth)
    assert found.figures["games"] == 24.0
    # No invariant differs, so that each guess is that of a coin, the order of two hashes.
    assert found.figures["undecided"] == 1.0
    # 24 throws of a coin are further from 12 than 8 in 1 of 2000 times.
    assert abs(found.score - 0.5) <= 8 / 24
