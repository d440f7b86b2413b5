"""What a recorded view contains, to the byte: what is secret is searched for in everything that a role saw."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import FIRST, Fault, Run, Seen, both, failing, grid, participants, run, watched
from message_kinds import arrays_of, tag_of

from moretta import CGD, SecureAggregation, Silo
from moretta.contract.messages import Message
from moretta.engines import views
from moretta.errors import MorettaError, PeerError
from moretta.protocols.cgd.group_keys import group_of
from moretta.protocols.cgd.messages import Backward, Contribute, Descend, Forward, Join
from moretta.protocols.common.roles import Roles

ROUNDS = 3
JOINT = grid([6, 4, 7, 5], [3, 2, 2], holders=[0, 1, 0, 2], ids=True)
INDEPENDENT = grid([6, 4, 7], [3, 2], joint=False)
ROWS = grid([6, 4, 7, 5], [5])
CASES: dict[str, tuple[list[Silo], dict[str, Any], str]] = {
    "joint": (JOINT, {}, "pairwise"),
    "joint, shares": (JOINT, {}, "additive-shares"),
    "independent": (INDEPENDENT, {"vertical": "independent"}, "pairwise"),
    "rows": (ROWS, {}, "pairwise"),
}


class Truth:
    """All that is secret, kept beside the run: by participant or row, floats and whole numbers."""

    def __init__(self) -> None:
        self.starts: dict[str, list[Any]] = {}
        self.displacements: list[Any] = []
        self.gradients: dict[str, list[Any]] = {}
        self.deltas: dict[str, list[Any]] = {}
        self.parts: dict[str, list[Any]] = {}
        self.sums: list[Any] = []

    def watch(self, players: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, client in participants(players).items():
            self.starts[name] = [np.array(value) for tensor, value in client._start.items()]
            self._watch_client(name, client)

    def _watch_client(self, name: str, client: Any) -> None:
        answer = client.answer
        contributors = client._contributors

        def answering(message: Message) -> Message:
            reply = answer(message)
            if isinstance(message, Contribute):
                group = client._position.groups[group_of(message.stamp)]
                local = client._local[1]
                self.gradients.setdefault(name, []).extend(local.gradients[tensor] for tensor in group.shapes)
            if isinstance(message, Forward | Join) and client._own_z is not None:
                self.parts.setdefault(name, []).append(np.asarray(client._own_z[2]))
            if isinstance(message, Descend):
                self.displacements.extend(value.copy() for value in client.displacement.values())
            return reply

        client.answer = answering
        for contributor in contributors.values():
            read = contributor.read

            def reading(*args: Any, asked: Any, read: Any = read) -> Any:
                total = read(*args, asked=asked)
                self.sums.extend(value.copy() for value in total.means.values())
                return total

            contributor.read = reading
        if client._position.head is not None:
            keyring = client._group_keys
            seal = keyring.seal

            def sealing(stamp: Any, what: str, maker: str, content: bytes) -> Any:
                if what == "delta":
                    self.deltas.setdefault(client._position.row[0][:6], []).append(np.frombuffer(content))
                return seal(stamp, what, maker, content)

            keyring.seal = sealing


def recorded(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[Run, Truth, Path]:
    silos, protocol, scheme = CASES[case]
    truth, out = Truth(), tmp_path / "run"
    protocol = CGD.model_validate({"delta": (0.1, 0.3), **protocol, **settings.pop("protocol", {})})
    found = run(
        silos, ROUNDS, protocol, scheme=scheme, wrap=lambda players: truth.watch(players, monkeypatch), out=out,
        record_views=True, **settings,
    )  # fmt: skip
    return found, truth, out / "views"


def view(folder: Path, role: str) -> bytes:
    """Everything that a role sent and received, as it travelled."""
    return b"".join(seen.data for path in sorted((folder / role).iterdir()) for seen in views.read(path))


def encodings(values: Iterable[Any]) -> Iterator[bytes]:
    """Every number as float64 and as float32."""
    for array in values:
        flat = np.asarray(array, dtype=np.float64).ravel()
        for number in flat[np.abs(flat) > 1e-9]:
            yield number.tobytes()
            yield np.float32(number).tobytes()


def in_the_ring(values: Iterable[Any], weights: Iterable[int], bits: Iterable[int]) -> Iterator[bytes]:
    """Values as whole numbers at any point; those of few digits are everywhere, and left out."""
    for array, weight, bit in itertools.product(values, weights, bits):
        words = np.rint(np.ldexp(np.asarray(array, dtype=np.float64).ravel() * weight, bit)).astype(np.int64)
        yield from (word.tobytes() for word in words[np.abs(words) >= 2**36].view(np.uint64))


def hits(data: bytes, needles: Iterable[bytes]) -> int:
    """How many of them are in the data, wherever they begin."""
    by_length: dict[int, set[bytes]] = {}
    for needle in needles:
        by_length.setdefault(len(needle), set()).add(needle)
    found = 0
    for length, some in by_length.items():
        if length in (4, 8):
            kind = np.dtype(f"<u{length}")
            cut = [data[at : at + (len(data) - at) // length * length] for at in range(length)]
            there = np.unique(np.concatenate([np.frombuffer(one, dtype=kind) for one in cut]))
            found += int(np.isin(np.frombuffer(b"".join(sorted(some)), dtype=kind), there).sum())
        else:
            found += sum(needle in data for needle in some)
    return found


def by_chance(data: bytes, needles: int) -> float:
    """How many needles of 4 bytes are found in as much noise, and five deviations more."""
    expected = needles * len(data) / 2.0**32
    return expected + 5 * expected**0.5 + 1


@pytest.mark.parametrize("case", CASES)
def test_a_blind_relay_sees_nothing_in_the_clear(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, truth, folder = recorded(tmp_path, case, monkeypatch)
    data = view(folder, "server")
    silos = CASES[case][0]
    own = [value for kept in (truth.starts, truth.gradients, truth.deltas, truth.parts) for one in kept.values()
           for value in one]  # fmt: skip
    secret = [*own, *truth.displacements, *truth.sums, *(tensors[FIRST] for tensors in found.models.values())]
    secret += [silo.x for silo in silos]
    needles = set(encodings(secret))
    assert len(needles) > 1000
    assert hits(data, (needle for needle in needles if len(needle) != 4)) == 0
    short = {needle for needle in needles if len(needle) == 4}
    assert hits(data, short) <= by_chance(data, len(short))
    # As the ring has them: every gradient, part of z and sum, at each point that a plan could choose.
    added = [*truth.sums, *(value for one in (truth.gradients, truth.parts) for kept in one.values() for value in kept)]
    weights = {1, *(len(silo.x) for silo in silos), sum(len(silo.x) for silo in silos if silo.name.endswith("0"))}
    assert hits(data, set(in_the_ring(added, weights, range(36, 46)))) == 0
    ids = {str(one) for silo in silos if silo.ids is not None for one in silo.ids}
    assert not [one for one in ids if one.encode() in data]


def test_the_search_finds_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same search, where sums are not blind and where nothing is masked."""
    found, truth, folder = recorded(tmp_path, "joint", monkeypatch, protocol={"blind": False})
    data = view(folder, "server")
    assert truth.gradients
    moved = [found.displacement[FIRST]]
    assert hits(data, set(encodings(moved))) <= by_chance(data, 2 * moved[0].size)  # D itself is never sent
    means = [np.frombuffer(message.data[-8:]) for path in (folder / "server").iterdir() for message in views.read(path)
             if tag_of(message.data) == "cgd/descend" and message.direction == "sent"]  # fmt: skip
    assert means
    assert hits(data, (one.tobytes() for one in means)) == len({one.tobytes() for one in means})
    _, truth, folder = recorded(tmp_path / "clear", "rows", monkeypatch, aggregation=SecureAggregation(scheme="none"))
    gradients = [value for kept in truth.gradients.values() for value in kept]
    wide = {needle for needle in encodings(gradients) if len(needle) == 8}
    assert hits(view(folder, "server"), wide) == len(wide)


@pytest.mark.parametrize("case", CASES)
def test_a_participant_sees_nobody_elses_start_or_gradient(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, truth, folder = recorded(tmp_path, case, monkeypatch)
    silos = CASES[case][0]
    for silo in (silos[0], silos[-1]):
        data = view(folder, silo.name)
        others = [
            value
            for kept in (truth.starts, truth.gradients, truth.parts)
            for name, values in kept.items()
            if name != silo.name
            for value in values
        ] + [other.x for other in silos if other.name != silo.name]
        needles = {needle for needle in encodings(others) if len(needle) != 4}
        assert len(needles) > 1000
        assert hits(data, needles) == 0
        ids = {str(one) for other in silos if other.ids is not None for one in other.ids}
        assert not [one for one in ids if one.encode() in data]


def sent_to_or_by(folder: Path, role: str) -> dict[str, list[bytes]]:
    """What is in arrays of messages, by their kind."""
    found: dict[str, list[bytes]] = {}
    for path in sorted((folder / role).iterdir()):
        for seen in views.read(path):
            found.setdefault(tag_of(seen.data), []).append(arrays_of(seen.data))
    return found


@pytest.mark.parametrize("case", ["joint", "rows"])
def test_other_secrets_are_other_bytes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same data and training seed: all that a relay sees differs, and between two runs of fresh secrets too."""
    everything = []
    for number, insecure in enumerate((5, 6, None)):
        folder = tmp_path / str(number)
        _, _, seen = recorded(folder, case, monkeypatch, insecure_secret_seed=insecure)
        everything.append(sent_to_or_by(seen, "server"))
    _, _, again = recorded(tmp_path / "again", case, monkeypatch, insecure_secret_seed=5)
    assert sent_to_or_by(again, "server") == everything[0]  # the comparison can be met
    masked = {"secure-aggregation/masked", "cgd/partial", "cgd/join", "cgd/deltas", "cgd/backward", "cgd/descend"}
    for kind in masked & everything[0].keys():
        contents = [set(one[kind]) for one in everything]
        for index, one in enumerate(contents):
            assert all(one)
            assert not any(one & other for other in contents[index + 1 :])
    assert masked & everything[0].keys() == (
        masked if case == "joint" else {"secure-aggregation/masked", "cgd/descend"}
    )


def test_what_a_relay_sees_is_uniform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, folder = recorded(tmp_path, "joint", monkeypatch)
    found = sent_to_or_by(folder, "server")
    for kind in ("secure-aggregation/masked", "cgd/partial", "cgd/descend", "cgd/deltas"):
        data = np.frombuffer(b"".join(dict.fromkeys(found[kind])), dtype=np.uint8)
        counts = np.bincount(data, minlength=256)
        statistic = float(((counts - data.size / 256) ** 2).sum() / (data.size / 256))
        assert abs(statistic - 255) < 6 * (2 * 255) ** 0.5  # chi-squared with 255 degrees, six deviations


def test_weights_of_a_blind_sum_are_no_small_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()
    run(ROWS, ROUNDS, CGD(delta=0.2), wrap=watched(seen))
    weights = [int(message.weight) for _, message in seen.asked(Descend)]
    assert min(weights) > 2**40  # of 2^64; by chance 2^-24 each
    told = Seen()
    run(ROWS, ROUNDS, CGD(delta=0.2, blind=False), wrap=watched(told))
    assert {int(message.weight) for _, message in told.asked(Descend)} == {22}


def test_a_row_keeps_its_delta_from_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sealed to one row does not open in another, nor at another time, and is never sealed alike twice."""
    seen = Seen()
    found = run(JOINT, ROUNDS, CGD(delta=0.2), wrap=watched(seen))
    clients = participants(found.players)
    backs = [(silo, ask) for silo, ask in seen.asked(Backward)]
    for silo, ask in backs:
        row = f"row-{silo[5]}"
        head = found.players.server._grid.heads[row]  # type: ignore[attr-defined]
        assert len(clients[silo]._group_keys.open(ask.stamp, "delta", head, ask.sealed)) == ask.sealed.size - 28
        other = next(name for name in clients if name[5] != silo[5])
        with pytest.raises(MorettaError, match=r"no key yet|is not as"):
            clients[other]._group_keys.open(ask.stamp, "delta", head, ask.sealed)
        later = dataclasses.replace(ask.stamp, round=ask.stamp.round + 1)
        with pytest.raises(PeerError, match="is not as"):
            clients[silo]._group_keys.open(later, "delta", head, ask.sealed)
    assert len({ask.sealed.tobytes() for _, ask in backs}) == 4 * ROUNDS


def test_secrets_are_in_no_representation_and_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    seen = Seen()
    wrong = Fault("silo-0-1", 2, Backward)
    garbled = Fault("silo-1-0", 2, Contribute)
    found = run(JOINT, ROUNDS, CGD(delta=0.2), wrap=both(failing(wrong, garbled), watched(seen)), out=tmp_path / "run")
    clients = participants(found.players)
    secrets: list[bytes] = []
    said = [(tmp_path / "run" / "log.txt").read_text(), caplog.text, repr(found.result), repr(found.players.server)]
    assert "silo-0-1" in said[0]
    for client in clients.values():
        secrets += [client.state()["root"], *client._group_keys._keys.values()]
        agreement, _ = client._group_keys._set_up.agreed
        secrets += list(agreement.seeds.values())
        said += [repr(client), repr(client._group_keys), repr(client._root), repr(agreement)]
        said += [repr(contributor) for contributor in client._contributors.values()]
    said += [repr(message) for _, ask, answer in seen.messages for message in (ask, answer)]
    for secret in secrets:
        assert len(secret) == 32
        for text in said:
            assert secret.hex() not in text
            assert repr(secret)[2:-1] not in text
    numbers = [float(value) for tensors in found.starts.values() for value in tensors[FIRST].ravel()[:5]]
    assert not [number for number in numbers for text in said if f"{number:.6f}"[:8] in text and abs(number) > 1e-3]


def test_a_blind_relay_has_no_losses_to_tell() -> None:
    found = run(JOINT, ROUNDS, CGD(delta=0.2))
    assert all("loss" not in line and "rows" not in line for line in found.result.history)
    told = run(JOINT, ROUNDS, CGD(delta=0.2, blind=False))
    assert all(line["rows"] == 22 for line in told.result.history)
