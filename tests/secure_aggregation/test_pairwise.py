from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sum_driver import CODEC, NOW, Silo, Train, play, whole_sum

from moretta.errors import MisuseError, ParameterError, PeerError, RangeError
from moretta.keystream import SecretRoot
from moretta.protocol import Aborted, Reason, Stamp
from moretta.secure_aggregation import Wanted, aggregator, contributor
from moretta.secure_aggregation.agreement import AdvertiseKey, Agreement, KeyAdvert, PeerKeys
from moretta.secure_aggregation.pairwise import MOST_WEIGHT, MaskedUpload, add_masks

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "agreement.json").read_text(encoding="utf-8"))


def agreed(names: list[str], bits: int = 64) -> dict:
    """Contributors with fixed keys after a set-up."""
    silos = {name: contributor("pairwise", name, bits, insecure=SecretRoot.insecure(0, name)) for name in names}
    assert play(aggregator("pairwise", bits).setup(NOW, names), {n: silo.answer for n, silo in silos.items()}) is None
    return silos


@pytest.mark.parametrize("case", VECTORS["uploads"], ids=lambda case: f"{case['bits']} bits")
def test_whole_transcript_vector(case: dict) -> None:
    roots, stamp = VECTORS["setup"]["roots"], Stamp(*VECTORS["setup"]["stamp"])
    silos = {
        name: contributor("pairwise", name, case["bits"], insecure=SecretRoot(bytes.fromhex(root)))
        for name, root in roots.items()
    }
    server = aggregator("pairwise", case["bits"])
    assert play(server.setup(stamp, list(roots)), {name: silo.answer for name, silo in silos.items()}) is None
    wanted = server.want({"w": (3,)}, {"w": case["limit"]}, case["most_weight"])
    assert wanted.fraction_bits == {"w": case["fraction_bits"], MOST_WEIGHT: case["most_weight"]}
    for name, expected in case["silos"].items():
        upload = silos[name].upload(
            stamp, {"w": np.array(expected["values"])}, expected["weight"], wanted.fraction_bits
        )
        assert upload.tensors["w"].tolist() == expected["words"]
        assert int(upload.weight) == expected["masked_weight"]


@settings(max_examples=25, deadline=None)
@given(
    names=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5), min_size=2, max_size=8,
                   unique=True),
    bits=st.sampled_from([32, 64]),
)  # fmt: skip
def test_masks_cancel_for_any_cohort(names: list[str], bits: int) -> None:
    silos = agreed(names, bits)
    dtype = np.dtype(f"uint{bits}")
    total = np.zeros((2, 3), dtype=dtype)
    for silo in silos.values():
        agreement, _ = silo._agreed
        mask = add_masks(np.zeros((2, 3), dtype=dtype), agreement, NOW, "mask", "w")
        assert mask.any()
        np.add(total, mask, out=total)
    assert not total.any()


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(5)), st.sampled_from([32, 64]), st.randoms(use_true_random=False))
def test_order_of_replies_does_not_matter_exactly(order: list[int], bits: int, random) -> None:
    data = {f"s{k}": Silo("pairwise", f"s{k}", bits, {"w": [random.uniform(-9, 9), 1.0]}, k + 1) for k in range(5)}
    straight = whole_sum(data, "pairwise", bits)
    shuffled = whole_sum({f"s{k}": data[f"s{k}"] for k in order}, "pairwise", bits)
    assert straight.weight == shuffled.weight == 15
    assert straight.means["w"].tobytes() == shuffled.means["w"].tobytes()


def test_changing_anything_in_its_label_changes_the_mask() -> None:
    def mask(seed=b"s" * 32, run="r", number=1, attempt=0, cohort=b"c", use="mask", tensor="w", peer="b") -> bytes:
        agreement = Agreement(NOW, "a", cohort, {peer: seed})
        stamp = Stamp(run, number, attempt)
        return add_masks(np.zeros(4, dtype=np.uint64), agreement, stamp, use, tensor).tobytes()

    changes = [
        {"seed": b"t" * 32}, {"run": "q"}, {"number": 2}, {"attempt": 1}, {"cohort": b"d"}, {"tensor": "v"},
        {"peer": "c"}, {"use": "mask of weight"},
    ]  # fmt: skip
    masks = {mask(), *(mask(**change) for change in changes)}
    assert len(masks) == len(changes) + 1
    assert mask() == mask()


def test_a_mask_is_used_once() -> None:
    silo = agreed(["a", "b"])["a"]
    one, encoding = {"w": np.ones(2)}, {"w": 20, MOST_WEIGHT: 2}
    silo.upload(NOW, one, 1, encoding)
    with pytest.raises(MisuseError, match=r"'w'.*uploaded before"):
        silo.upload(NOW, one, 1, encoding)
    with pytest.raises(MisuseError, match="uploaded before"):  # one fresh name does not help
        silo.upload(NOW, {"v": np.ones(1), **one}, 1, {"v": 20, **encoding})
    other = silo.upload(NOW, {"v": np.ones(2)}, 1, {"v": 20, MOST_WEIGHT: 2})  # other tensors of the same stamp
    later = Stamp(NOW.run, 2, 0)
    assert silo.upload(later, one, 1, encoding).weight != other.weight  # the weight's mask is another each time
    for stamp in (NOW, Stamp(NOW.run, 1, 5), Stamp("another run", 9, 0)):
        with pytest.raises(MisuseError):
            silo.upload(stamp, {"u": np.ones(2)}, 1, {"u": 20, MOST_WEIGHT: 2})


def test_a_refused_upload_uses_no_label() -> None:
    silo = agreed(["a", "b"])["a"]
    encoding = {"w": 20, MOST_WEIGHT: 2}
    with pytest.raises(RangeError, match=r"`w`: a value of magnitude 1e\+30 .*nothing was sent"):
        silo.upload(NOW, {"w": np.array([1e30])}, 1, encoding)
    silo.upload(NOW, {"w": np.array([1.0])}, 1, encoding)


@pytest.mark.parametrize(
    ("tensors", "weight", "encoding", "error"),
    [
        ({"w": np.ones(1)}, 0, {"w": 1, MOST_WEIGHT: 2}, ParameterError),
        ({"w": np.ones(1)}, -1, {"w": 1, MOST_WEIGHT: 2}, ParameterError),
        ({"w": np.ones(1)}, True, {"w": 1, MOST_WEIGHT: 2}, ParameterError),
        ({"w": np.ones(1)}, 3, {"w": 1, MOST_WEIGHT: 2}, ParameterError),
        ({"w": np.ones(1)}, 1, {"w": 1}, PeerError),
        ({"w": np.ones(1)}, 1, {"w": 1, MOST_WEIGHT: 0}, PeerError),
        ({"w": np.ones(1)}, 1, {"w": 1, MOST_WEIGHT: 2**63}, PeerError),
        ({"w": np.ones(1)}, 1, {"v": 1, MOST_WEIGHT: 2}, PeerError),
        ({"w": np.ones(1)}, 1, {"w": 10**9, MOST_WEIGHT: 2}, PeerError),
        ({}, 1, {MOST_WEIGHT: 2}, PeerError),
        ({"w": np.array([1j])}, 1, {"w": 1, MOST_WEIGHT: 2}, MisuseError),
        ({"w": np.array([np.nan])}, 1, {"w": 1, MOST_WEIGHT: 2}, RangeError),
    ],
)
def test_uploads_that_are_refused(tensors: dict, weight: int, encoding: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        agreed(["a", "b"])["a"].upload(NOW, tensors, weight, encoding)


def test_calls_in_the_wrong_order() -> None:
    silo = contributor("pairwise", "a")
    with pytest.raises(MisuseError, match="set-up"):
        silo.upload(NOW, {"w": np.ones(1)}, 1, {"w": 1, MOST_WEIGHT: 2})
    advert = silo.answer(AdvertiseKey(stamp=NOW))
    assert isinstance(advert, KeyAdvert)
    other = contributor("pairwise", "b").answer(AdvertiseKey(stamp=NOW))
    keys = PeerKeys(stamp=NOW, keys={"a": advert.public_key, "b": other.public_key})
    silo.answer(keys)
    with pytest.raises(MisuseError, match="before the own key"):
        silo.answer(keys)
    assert silo.answer(Train(stamp=NOW, encoding={})) is None
    silo.answer(AdvertiseKey(stamp=NOW))  # a new set-up forgets the old seeds
    with pytest.raises(MisuseError, match="set-up"):
        silo.upload(NOW, {"w": np.ones(1)}, 1, {"w": 1, MOST_WEIGHT: 2})


def test_the_server_needs_a_cohort() -> None:
    server = aggregator("pairwise")
    with pytest.raises(ParameterError, match='one silo needs scheme = "none"'):
        play(server.setup(NOW, ["a"]), {})
    for cohort in ([], ["a", "a"]):
        with pytest.raises(MisuseError):
            play(server.setup(NOW, cohort), {})
    wanted = Wanted({"w": ()}, {"w": 1, MOST_WEIGHT: 2}, 2)
    with pytest.raises(MisuseError, match="without a set-up"):
        play(server.sum(Train(stamp=NOW, encoding=wanted.fraction_bits), wanted), {})


def test_a_bad_key_costs_only_its_silo() -> None:
    silos = {name: contributor("pairwise", name).answer for name in "abc"}
    low = CODEC.encode(KeyAdvert(stamp=NOW, public_key=bytes([9]) + bytes(31))).replace(b"09", b"00", 1)
    server = aggregator("pairwise")
    aborted = play(server.setup(NOW, list("abc")), {**silos, "b": lambda asked: low})
    assert isinstance(aborted, Aborted)
    assert {name: why.reason for name, why in aborted.missing.items()} == {"b": Reason.MALFORMED}
    same = contributor("pairwise", "a", insecure=SecretRoot(bytes(32))).answer
    aborted = play(server.setup(NOW, list("abc")), {**silos, "a": same, "b": same})
    assert isinstance(aborted, Aborted)
    assert set(aborted.missing) == {"a", "b"}
    assert server.cohort == ()


def test_a_plan_names_what_has_no_headroom() -> None:
    server = aggregator("pairwise", 32)
    with pytest.raises(RangeError, match=r"`v`.*Z_2\^32"):
        server.want({"v": ()}, {"v": 1.0}, 2**32)
    with pytest.raises(RangeError, match="`v`: expected a limit"):
        server.want({"w": (), "v": ()}, {"w": 1.0, "v": float("inf")}, 5)
    for shapes, limits, most in (({}, {}, 1), ({"w": ()}, {}, 1), ({"w": ()}, {"w": 1.0}, 0)):
        with pytest.raises(MisuseError):
            server.want(shapes, limits, most)
    with pytest.raises(MisuseError, match="reserved"):
        server.want({MOST_WEIGHT: ()}, {MOST_WEIGHT: 1.0}, 1)


def test_an_impossible_weight_ends_the_sum() -> None:
    silos = {name: Silo("pairwise", name, 64, {"w": [1.0]}, 5) for name in "ab"}

    def lie(asked: Train) -> MaskedUpload:
        told = silos["b"](asked)
        return MaskedUpload(
            stamp=told.stamp, tensors=told.tensors, weight=np.add(told.weight, 7, out=told.weight.copy())
        )

    with pytest.raises(PeerError, match="weights that sum to 2 to 10, got 17"):
        whole_sum(silos, "pairwise", replaced={"b": lie})


def test_what_the_server_sees_of_one_silo_is_not_its_data() -> None:
    seen: list[bytes] = []
    silos = {name: Silo("pairwise", name, 64, {"w": np.zeros(4000)}) for name in "ab"}
    whole_sum(silos, "pairwise", seen=seen)
    for data in seen:
        bits = np.unpackbits(CODEC.decode(data).tensors["w"].view(np.uint8))
        # 256,000 fair bits: six standard deviations of their mean are 0.006; a true failure is certain.
        assert abs(bits.mean() - 0.5) < 0.006


def test_secrets_are_not_in_representations() -> None:
    silo = agreed(["a", "b"])["a"]
    agreement, _ = silo._agreed
    seed = agreement.seeds["b"]
    for shown in (repr(silo), repr(agreement)):
        assert "redacted" in shown
        assert seed.hex() not in shown
        assert repr(seed) not in shown
