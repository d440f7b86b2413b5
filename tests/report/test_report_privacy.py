import pytest

from moretta.report.folder import read_run
from moretta.report.statements import UNTESTED, privacy_statements, reading_notes

FORBIDDEN = ("encrypt", "semantically secure", "anonym", "cannot learn", "guarantee", "safe")
SUMMED = {"secure_aggregation": {"scheme": "pairwise", "ring_bits": 64}}


def sum_of(silos, of="round", *rounds):
    """What a run records of a sum of so many silos."""
    return {"of": of, "silos": [f"silo-{one}" for one in range(1, silos + 1)], "rounds": list(rounds or [1])}


def said(record, role):
    return " ".join(one.text for one in privacy_statements(record) if one.role == role)


@pytest.mark.parametrize("protocol", ["pbpfl", "fedsgd", "fedavg", "fedprox", "local", "centralised", "cgd", "baffle"])
def test_every_role_has_a_sentence_none_is_tested_none_promises_more_than_the_design(make_run, protocol):
    record = read_run(make_run(protocol))
    statements = privacy_statements(record)
    assert {one.role for one in statements} == {"Server", "A silo", "An eavesdropper"}
    assert all(one.evidence == UNTESTED for one in statements)
    text = " ".join([one.text for one in statements] + list(reading_notes(record))).lower()
    assert not [word for word in FORBIDDEN if word in text]


def test_pbpfl(make_run):
    record = read_run(make_run("pbpfl", dropped=[]))
    assert "only the ring sum (modulo 2⁶⁴)" in said(record, "Server")
    assert "Holds the true model" in said(record, "Server")
    assert "of all inputs together and of the targets, over all silos" in said(record, "Server")
    silo = said(record, "A silo")
    for words in (
        "parameter values are obfuscated by 64 secret scales",
        "scaling and permutation",
        "here m = 2",
        "least squares",
        "true function",
    ):
        assert words in silo
    for words in ("softmax", "no free scale", "three"):
        assert words not in said(record, "Server") + silo


@pytest.mark.parametrize("variant", ["probabilities", "paper", None])
def test_pbpfl_under_cross_entropy_both_sides_see_the_softmax(make_run, variant):
    settings = {"protocol": {"loss": "cross-entropy", **({"variant": variant} if variant else {})}}
    record = read_run(make_run("pbpfl", settings=settings))
    assert "each sample of each silo’s batch by itself: its softmax, and alpha" in said(record, "Server")
    silo = said(record, "A silo")
    assert ("once its batch has at least m samples" in silo) == (variant == "paper")
    assert ("Is handed the true softmax" in silo) == (variant != "paper")
    assert "whole offset where m is below the number of outputs" in silo


def test_a_model_without_free_scales_is_not_called_obfuscated(make_run):
    def received(number, **facts):
        return said(read_run(make_run("pbpfl", folder=str(number), facts=facts)), "A silo")

    bare = received(0, free_scales=0.0, forced_to_one=3.0)
    assert "obfuscated" not in bare
    assert "true parameter values" in bare
    assert "up to the order of their channels" in bare
    assert "3 weight and bias tensors have no free scale" in bare
    assert "1 weight or bias tensor has no free scale" in received(1, free_scales=6.0, forced_to_one=1.0)
    assert "the run does not say where" in received(2)


def test_powers_of_two_hide_less_and_it_is_said(make_run):
    def received(number, **facts):
        settings = {"protocol": {"loss": "mse", "scales": "powers-of-two"}}
        record = read_run(make_run("pbpfl", folder=str(number), settings=settings, facts=facts, silos=2, dropped=[]))
        return said(record, "A silo")

    scaled = received(0, free_scales=6.0)
    for words in (
        "the sign and the mantissa of each parameter value are plain",
        "only exponents are obfuscated, by 6 secret scales of three values each",
        "their averages over rounds give the true ones",
        "up to powers of two",
        "Two consecutive rounds also give the offset of the last layer, without labels",
        "works out the other’s gradient (at the last layer approximately)",
    ):
        assert words in scaled
    for words in ("permutation", "only the perturbation keeps"):
        assert words not in scaled
    bare = received(1, free_scales=0.0)
    assert "its true parameter values but for the offset of the last layer" in bare
    assert "Sees the hidden layers as they are" in bare
    assert "works out the other’s gradient below the last layer" in bare
    assert "without labels" not in bare  # no scale of the last layer's inputs changes, so that nothing tells r from W
    for settings in ({}, {"scales": "continuous"}):
        record = read_run(make_run("pbpfl", folder=f"c{len(settings)}", settings={"protocol": settings}))
        assert "mantissa" not in said(record, "A silo")
        assert "without labels" not in said(record, "A silo")


def test_who_knows_the_true_start(make_run):
    assert "true model of round 1" in said(read_run(make_run("pbpfl")), "A silo")
    settings = {"run": {"seed": 7}, "protocol": {"loss": "mse", "warm-start": "start.pt"}}
    assert "round 1" not in said(read_run(make_run("pbpfl", folder="warm", settings=settings)), "A silo")
    settings = {"protocol": {"loss": "mse"}}  # from Python: the seed makes no weights
    assert "round 1" not in said(read_run(make_run("pbpfl", folder="python", settings=settings)), "A silo")


@pytest.mark.parametrize("protocol", ["pbpfl", "fedsgd", "fedavg", "fedprox", "local"])
def test_the_common_statistics_are_named_where_inputs_are_standardised(make_run, protocol):
    words = "mean and standard deviation of each input column, over all silos"
    for standardise in (True, None, False):
        settings = {"data": {} if standardise is None else {"standardise": standardise}}
        record = read_run(make_run(protocol, folder=str(standardise), settings=settings, **SUMMED))
        for role in ("Server", "A silo"):
            assert (words in said(record, role)) == (standardise is not False)
            assert ("if inputs are standardised" in said(record, role)) == (standardise is None)
    plain = read_run(make_run(protocol, folder="plain", secure_aggregation={"scheme": "none", "ring_bits": None}))
    assert "each input column, of each silo by itself" in said(plain, "Server")


def test_what_local_training_shows(make_run):
    record = read_run(make_run("local", settings={"data": {"standardise": False}}))
    assert "loss and number of rows in every round, and its whole model at the end" in said(record, "Server")
    assert "at most its name and public key" in said(record, "A silo")


def test_two_silos_expose_each_other(make_run):
    exposed = "fewer than three expose each other"

    def of(protocol, **replaced):
        folder = f"{protocol}-{len(list(seen))}"
        seen.append(folder)
        return said(read_run(make_run(protocol, folder=folder, **replaced)), "A silo")

    seen = []
    assert "works out the other’s gradient from consecutive models" in of("fedsgd", silos=2)
    assert "works out the other’s weight change from consecutive models" in of("fedavg", silos=2)
    assert "only the perturbation keeps the other’s gradient" in of("pbpfl", silos=2, dropped=[])
    bare = of("pbpfl", silos=2, dropped=[], facts={"free_scales": 0.0, "forced_to_one": 3.0})
    assert "works out the other’s gradient below the last layer" in bare
    assert "less its own part" in of("local", silos=2)
    assert exposed not in of("local", silos=2)
    assert exposed not in of("fedsgd")
    assert exposed not in of("fedsgd", silos=1)
    late = [{"round": 3, "silo": "silo-2", "reason": "late"}]
    unknown = of("fedsgd", dropped=late)  # a folder of before the record showed who was in a sum
    assert "In rounds with fewer than three silos, if there were any, which this run’s record does not show" in unknown
    assert "In rounds with fewer than three silos, works out" in of("fedsgd", sums=[sum_of(2), sum_of(3)])
    assert exposed not in of("fedsgd", dropped=late, sums=[sum_of(3)])
    assert exposed not in of("fedsgd", dropped=[late[0] | {"round": 81}])  # at the release, after the last round
    assert exposed in of("fedsgd", silos=4, settings={"run": {"participation": 0.5}})


def test_who_takes_part_and_how_many_rows_are_no_secret(make_run):
    settings = {"run": {"participation": 0.5}, "data": {"batch-size": 0}}
    record = read_run(make_run("fedsgd", settings=settings))
    assert "drawn from the training seed" in said(record, "A silo")
    assert "number of rows of all silos together" in said(record, "A silo")
    assert "As not all sums were over the same silos, differences" in said(record, "Server")
    record = read_run(make_run("fedsgd", folder="all"))
    for words in ("drawn from the training seed", "number of rows of all silos", "differences of totals"):
        assert words not in said(record, "A silo") + said(record, "Server")


def test_without_masks_the_server_sees_each_silo(make_run):
    for number, plain in enumerate(({"scheme": "none", "ring_bits": None}, None)):
        record = read_run(make_run("fedsgd", folder=str(number), secure_aggregation=plain))
        assert "gradient of each silo by itself" in said(record, "Server")
    record = read_run(make_run("fedsgd"))
    assert "only the ring sum" in said(record, "Server")
    assert "Receives the model itself" in said(record, "A silo")


def test_a_protocol_or_scheme_without_sentences_says_so(make_run):
    assert "no sentence about the protocol swarm" in said(read_run(make_run("swarm")), "Server")
    record = read_run(make_run("fedavg", secure_aggregation={"scheme": "homomorphic", "ring_bits": 64}))
    assert "no sentence about the aggregation scheme homomorphic" in said(record, "Server")


LABELS = "tell of the balance of the other silos’ labels"


@pytest.mark.parametrize("protocol", ["fedsgd", "pbpfl", "baffle", "cgd"])
def test_plain_gradient_steps_tell_of_the_others_labels(make_run, protocol):
    def silo(folder, regression=False, silos=3, data=None, **settings):
        settings = {"protocol": {"loss": "mse", **settings}, "data": data or {}}
        run = make_run(protocol, folder=folder, regression=regression, silos=silos, settings=settings)
        return said(read_run(run), "A silo")

    assert LABELS in silo("plain", optimizer="sgd", momentum=0.0)
    assert LABELS not in silo("alone", silos=1)
    assert LABELS not in silo("adam", optimizer="adam")
    assert LABELS not in silo("momentum", momentum=0.9)
    numbers = silo("numbers", regression=True)
    assert LABELS not in numbers
    assert "mean of the other silos’ targets" in numbers
    if protocol == "cgd":
        assert LABELS not in silo("split", data={"grid": [2, 2]})


def test_weight_changes_of_whole_epochs_tell_nothing_of_labels_by_plain_steps(make_run):
    assert LABELS not in said(read_run(make_run("fedavg")), "A silo")


@pytest.mark.parametrize("scheme", ["pairwise", "additive-shares"])
def test_who_vouched_for_the_keys_and_who_saw_the_weights(make_run, scheme):
    def server(folder, **keys):
        used = {"scheme": scheme, "ring_bits": 64}
        settings = {"secure-aggregation": {"scheme": scheme, "ring-bits": 64, **keys}}
        return said(read_run(make_run("fedavg", folder=folder, settings=settings, secure_aggregation=used)), "Server")

    trusting = server("trusting", weights="hidden")
    assert "only the ring sum (modulo 2⁶⁴) of the silos’ weight changes" in trusting
    assert "took them on trust, as no roster was set" in trusting
    assert "could read each weight change" in trusting
    assert "weights were public" not in trusting
    signed = server("signed", roster="roster.toml", identity="keys/{silo}")
    assert "signed with its identity in the roster" in signed
    assert "on trust" not in signed
    assert "Sees how much each silo’s part weighs: weights were public." in server("public", weights="public")
    assert "given up as late" not in trusting
    assert "on trust" not in said(
        read_run(make_run("fedsgd", folder="none", secure_aggregation={"scheme": "none", "ring_bits": None})), "Server"
    )


@pytest.mark.parametrize(("scheme", "reason", "exposed"), [
    ("additive-shares", "late: expected an answer in 5 s, it took 9.0 s", True),
    ("additive-shares", "disconnected: gone", False),
    ("pairwise", "late: expected an answer in 5 s, it took 9.0 s", True),
    ("pairwise", "disconnected: gone", False),
])  # fmt: skip
def test_a_late_silo_is_not_always_protected(make_run, scheme, reason, exposed):
    dropped = [{"round": 3, "silo": "silo-2", "reason": reason}]
    record = read_run(make_run("fedsgd", dropped=dropped, secure_aggregation={"scheme": scheme, "ring_bits": 64}))
    assert ("given up as late" in said(record, "Server")) == exposed


CONFINED = {"displacement": {"loss": 0.05, "accuracy": 0.95}, "mean": {"loss": 0.1, "accuracy": 0.92}}


def cgd(make_run, folder, *, engine="in-process", data=None, test=None, **protocol):
    settings = {
        "data": {"standardise": True, **(data or {})},
        "protocol": {"name": "cgd", **protocol},
        "engine": {"name": engine},
        "secure-aggregation": {"scheme": "pairwise", "ring-bits": 64},
    }
    scores = {"loss": 0.2, "accuracy": 0.9, **(test or {})}
    return read_run(make_run("cgd", folder=folder, settings=settings, test=scores, **SUMMED))


def test_cgd_says_what_is_known_of_it(make_run):
    blind = cgd(make_run, "blind", test=CONFINED)
    assert "sums that it cannot read" in said(blind, "Server")
    assert "took them on trust" in said(blind, "Server")
    silo = said(blind, "A silo")
    assert "D alone is a model" in silo
    assert "95.0 %, the worst confined model 90.0 %" in silo
    assert "raw features" not in silo
    seeing = said(cgd(make_run, "seeing", blind=False), "Server")
    assert "Sees D, the sum of all steps" in seeing
    assert "cannot read" not in seeing


def test_cgd_of_columns_says_what_its_rows_tell_each_other(make_run):
    joint = said(cgd(make_run, "joint", data={"grid": [3, 3]}, vertical="joint"), "A silo")
    assert "raw features" in joint
    assert "clusters of like labels" in joint
    independent = said(cgd(make_run, "independent", data={"grid": [3, 3]}, vertical="independent"), "A silo")
    assert "raw features" not in independent
    assert "Holds the labels of its rows" in independent


def test_a_simulation_hid_nothing(make_run):
    fused = cgd(make_run, "fused", engine="fused")
    assert "nothing was hidden" in said(fused, "Server")
    assert "nothing was hidden" in said(fused, "A silo")


def test_noise_is_said_with_what_it_bounds_and_what_it_leaves_out(make_run):
    facts = {"epsilon": 2.0, "delta": 1e-5, "epsilon_to_silos": 4.5, "epsilon_leaves_out": "means of the columns"}
    server = said(read_run(make_run("fedsgd", facts=facts, **SUMMED)), "Server")
    assert "ε = 2 and δ = 1e-05" in server
    assert "with ε = 4.5" in server
    assert "Not counted: means of the columns." in server
    assert "private" not in said(read_run(make_run("fedsgd", folder="plain", **SUMMED)), "Server")


def test_noise_is_said_with_what_is_counted_and_whose_noise_is_assumed(make_run):
    facts = {"epsilon": 4.73, "delta": 1e-5, "releases": 28.0, "noise_silos": 8.0, "epsilon_to_silos": 5.1}
    facts |= {"epsilon_with_noise_of_4": 7.7, "epsilon_with_noise_of_1": "unbounded"}
    server = said(read_run(make_run("fedsgd", facts=facts, **SUMMED)), "Server")
    assert "Counted are 28 noised sums that may have been opened" in server
    assert "assumed is that the noise of 8 silos in each is unknown to who looks" in server
    assert "where it is that of 4 with ε = 7.7, of 1 with ε = unbounded." in server
    clear = {"epsilon": 4.73, "delta": 1e-5, "releases": 28.0, "noise_silos": 1.0}
    server = said(read_run(make_run("fedsgd", folder="clear", facts=clear, **SUMMED)), "Server")
    assert "Counted are 28 noised sums that may have been opened; each silo adds all of the noise." in server
    two = clear | {"noise_silos": 2.0, "epsilon_to_silos": 9.0}
    server = said(read_run(make_run("fedsgd", folder="two", facts=two, **SUMMED)), "Server")
    assert "the noise of 2 silos in each is unknown to who looks." in server


IN_THE_CLEAR = {"secure_aggregation": {"scheme": "none", "ring_bits": None}}
SPAN = "the sum gives the silos’ gradient as far as it lies in their span: K numbers of it a round"


def baffle(make_run, folder, protocol=None, data=None, **replaced):
    settings = {
        "protocol": {"name": "baffle", **(protocol or {})},
        "data": {"standardise": True, "batch-size": 32, **(data or {})},
        "secure-aggregation": {"scheme": "pairwise", "ring-bits": 64},
    }
    return read_run(make_run("baffle", folder=folder, settings=settings, **{**SUMMED, **replaced}))


def test_baffle_says_what_loss_differences_tell(make_run):
    record = baffle(make_run, "batches")
    server, silo = said(record, "Server"), said(record, "A silo")
    assert "only the ring sum (modulo 2⁶⁴) of the silos’ loss-difference vectors" in server
    assert SPAN in server
    assert "Holds the model." in server
    assert "the number of rows that a round uses, over all silos" in server
    assert "private" not in server
    assert "Receives the model itself, every round; runs it forward only, and knows all directions." in silo
    assert "expose each other" not in silo
    assert "number of rows of all silos together" not in silo
    assert "number of rows of all silos together" in said(baffle(make_run, "all", data={"batch-size": 0}), "A silo")


def test_baffle_of_whole_epochs_sums_weight_changes(make_run):
    record = baffle(make_run, "epochs", {"local-epochs": 2, "optimizer": "sgd"})
    server = said(record, "Server")
    assert "of the silos’ weight changes" in server
    assert "loss-difference" not in server
    assert "their span" not in server  # what goes up is as long as the model
    assert "runs it forward only" in said(record, "A silo")


def test_baffle_with_own_directions_sums_estimates(make_run):
    record = baffle(make_run, "own", {"directions": "own"})
    server = said(record, "Server")
    assert "of the silos’ gradient estimates" in server
    assert "their span" not in server
    assert "Is not given the directions" in server
    assert "knows its own directions alone" in said(record, "A silo")


@pytest.mark.parametrize(("protocol", "upload"), [
    ({}, "loss-difference vector"),
    ({"local-epochs": 1}, "weight change"),
    ({"directions": "own"}, "gradient estimate"),
])  # fmt: skip
def test_baffle_without_masks_or_with_few_silos(make_run, protocol, upload):
    clear = said(baffle(make_run, "clear", protocol, **IN_THE_CLEAR), "Server")
    assert f"{upload} of each silo by itself" in clear
    assert "of each input column, of each silo by itself" in clear
    assert "ring sum" not in clear
    pair = said(baffle(make_run, "pair", protocol, silos=2, dropped=[]), "A silo")
    assert f"works out the other’s {upload} from consecutive models and its own" in pair


def test_baffle_says_what_its_noise_bounds(make_run):
    facts = {"epsilon": 2.0, "delta": 1e-5, "epsilon_to_silos": 4.5, "epsilon_leaves_out": "means of the columns"}
    server = said(baffle(make_run, "noisy", {"dp-noise": 1.0, "dp-clip": 3.0}, facts=facts), "Server")
    assert "ε = 2 and δ = 1e-05" in server
    assert "with ε = 4.5" in server
    assert "Not counted: means of the columns." in server
    assert SPAN in server


def test_a_run_over_many_machines_travelled_and_tells_no_first_parameters(make_run):
    here = read_run(make_run("pbpfl"))
    far = here.model_copy(update={"settings": {**here.settings, "engine": {"name": "flare"}}})
    assert "Nothing travelled over a network" in said(here, "An eavesdropper")
    assert "by NVIDIA FLARE over TLS with a certificate on either side" in said(far, "An eavesdropper")
    assert "All roles of this run were played by one process" not in " ".join(reading_notes(far))
    assert "The initial weights follow from the training seed" in said(here, "A silo")
    assert "The initial weights follow from the training seed" not in said(far, "A silo")
