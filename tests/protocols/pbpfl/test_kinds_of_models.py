"""Kinds of models that libraries have, in small: what each does that plain layers do not, and that PBPFL is exact.

The libraries' own are tried by benchmarks/architectures.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint

from moretta import BAFFLE, PBPFL, Engine, Federation, FedSGD, Silo
from moretta.errors import ParameterError
from moretta.protocols.pbpfl.exactness import Input, check
from moretta.protocols.pbpfl.scales import SIGNS, ScalePlan
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.settings import SecureAggregation

CLEAR = SecureAggregation(scheme="none")


class Words(nn.Module):
    """Words, a middle of one's own, and a head; `end` is what happens to the head's outputs at every word."""

    def __init__(
        self,
        middle: nn.Module | None = None,
        end: Callable[[Tensor, Tensor], Tensor] = lambda z, words: z[:, -1],
        outputs: int = 3,
    ) -> None:
        super().__init__()
        self.words, self.middle = nn.Embedding(20, 8), middle or nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head, self.end = nn.Linear(8, outputs), end

    def forward(self, words: Tensor) -> Tensor:
        return self.end(self.head(self.middle(self.words(words))), words)


class Cast(nn.Module):
    """RMSNorm as Llama and T5 have it: in float32 whatever the model is in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False)


class Conv1D(nn.Module):
    """transformers' layer of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.3 * torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, 8), self.weight).view(x.shape).relu()


class Grouped(nn.Module):
    """Attention of four heads of queries that read two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **settings: Any) -> None:
        super().__init__()
        self.layer = kind(8, 4 if settings.get("bidirectional") else 8, batch_first=True, **settings)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)[0]


class Projected(nn.Module):
    """Two layers whose hidden states are projected to fewer channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True, proj_size=4)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)[0]


class Fourier(nn.Module):
    """A filter of frequencies: weights that multiply complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.filter, n=6, dim=1))


class Bins(nn.Module):
    """Adds what a table has for the whole numbers that activations become."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(8, 8), nn.Embedding(9, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.layer(x))
        return y + self.table((4 * y).clamp(max=8).to(torch.int64)).mean(-2)  # type: ignore[no-any-return]


class Averaged(nn.Module):
    """Running statistics that are the mean over all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(x.mT)).mT


class Spectral(nn.Module):
    """A weight that is computed from another, otherwise in training than in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))


class Summed(nn.Module):
    """Attention of two heads by einsum, whose last product is by a weight for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(0.5 * torch.randn(8, 2, 4)) for _ in range(3))
        self.o = nn.Parameter(0.5 * torch.randn(2, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bnd,dhe->bhne", x, weight) for weight in (self.q, self.k, self.v))
        found = torch.einsum("bhij,bhje->bhie", torch.einsum("bhie, bhje -> bhij", q, k).softmax(-1), v)
        return torch.einsum("bhne,hed->bnd", found, self.o).relu()


class Convolved(nn.Module):
    """Convolutions with weight normalisation, also a transposed one, and one in the old way."""

    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.weight_norm
        self.first, self.second = normed(nn.Conv1d(8, 8, 3, padding=1)), normed(nn.Conv1d(8, 8, 1))
        self.back = normed(nn.ConvTranspose1d(8, 8, 3, padding=1))
        self.last, self.whole = normed(nn.Conv1d(8, 8, 3, padding=1, groups=2)), normed(nn.Linear(8, 8), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.second(torch.relu(self.first(x.transpose(1, 2)))))
        y = torch.relu(self.last(torch.relu(self.back(y)))).transpose(1, 2)
        return self.whole(y).relu()  # type: ignore[no-any-return]


def last_word(z: Tensor, words: Tensor) -> Tensor:
    """The outputs at the last word that is not 0, as transformers picks them."""
    places = torch.arange(words.shape[1], device=z.device)
    return z[torch.arange(len(z)), (places * (words != 0)).argmax(-1)]


def masked_mean(z: Tensor, words: Tensor) -> Tensor:
    mask = (words != 0).to(z.dtype)[..., None]
    return (z * mask).sum(1) / mask.sum(1).clamp(min=1)


WORDS = {
    "the last word's outputs": lambda: Words(),
    "the last that is no padding": lambda: Words(end=last_word),
    "a mean of outputs": lambda: Words(end=lambda z, words: z.mean(1)),
    "a masked mean": lambda: Words(end=masked_mean),
    "casts": lambda: Words(nn.Sequential(nn.Linear(8, 8), Cast())),
    "checkpointing": lambda: Words(Checkpointed()),
    "Conv1D": lambda: Words(Conv1D()),
    "grouped queries": lambda: Words(Grouped()),
    "an LSTM": lambda: Words(Recurrent(nn.LSTM, num_layers=2)),
    "an LSTM that projects": lambda: Words(Projected()),
    "a GRU both ways": lambda: Words(Recurrent(nn.GRU, num_layers=2, bidirectional=True)),
    "spectral normalisation": lambda: Words(Spectral()),
    "einsum": lambda: Words(Summed()),
    "frequencies": lambda: Words(Fourier()),
    "bins": lambda: Words(Bins()),
    "averaged statistics": lambda: Words(Averaged()),
    "weight normalisation": lambda: Words(Convolved()),
}
SCALED = {
    "Conv1D": ("middle.weight", "middle.bias"),
    "grouped queries": ("middle.k.weight", "middle.v.weight"),
    "einsum": ("middle.q", "middle.k", "middle.v", "middle.o"),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("kind", WORDS)
def test_kinds_of_classifiers_pass(kind: str) -> None:
    torch.manual_seed(0)
    model = WORDS[kind]()
    for loss in ("mse", "cross-entropy"):
        found = check(model, [Input((6,), 20)], 3, PBPFL(loss=loss))
        assert found["passes"], found
        assert found["relative_error_float64"] < 1e-10
    forced = {one["tensor"] for one in found["forced_to_one"]}
    assert not forced & set(SCALED.get(kind, ()))


def test_normed_weights_follow_the_scales_of_outputs_and_move_with_their_channels() -> None:
    torch.manual_seed(0)
    plan = ScalePlan.of(Words(Convolved()), (torch.arange(12).reshape(2, 6),))

    def axes(layer: str, place: int) -> set[int]:
        return {one.axis for one in plan.parameters[f"middle.{layer}.parametrizations.weight.original{place}"].shuffles}

    assert [axes("first", 0), axes("first", 1)] == [{0}, {0, 1}]  # g and v
    assert [axes("back", 0), axes("back", 1)] == [set(), set()]
    assert not plan.parameters["middle.last.parametrizations.weight.original0"].follows  # another norm reads it
    because = {one.tensor: one.because for one in plan.forced}
    assert because["middle.back.parametrizations.weight.original0"].startswith("conv_transpose1d in middle.back")
    alone = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 8)), nn.ReLU(), nn.Linear(8, 3))
    plan = ScalePlan.of(alone, (torch.randn(4, 5),))
    assert (plan.free, plan.blocks, plan.forced) == (8, (8,), ())


class Twice(nn.Module):
    def __init__(self, end: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.head, self.end = nn.Linear(5, 3), nn.Linear(3, 3), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.head, self.first(x).relu())


@pytest.mark.parametrize(
    "end",
    [
        lambda head, h: head(h) + head(h.tanh()),
        lambda head, h: head(head(h).relu()),
        lambda head, h: torch.cat([head(h), head(-h)], 1),
    ],
)
def test_a_head_that_works_twice_is_refused_by_its_name(end: Any) -> None:
    with pytest.raises(ParameterError, match=r"the last layer head works 2 times.*an nn.Linear of their own"):
        ScalePlan.of(Twice(end), (torch.randn(4, 5),))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_hidden_channels_of_recurrent_layers_move_in_all_gates_at_once(kind: type[nn.RNNBase]) -> None:
    plan = ScalePlan.of(Words(Recurrent(kind)), (torch.arange(12).reshape(2, 6),))
    assert 8 in plan.blocks
    assert {shuffle.axis for shuffle in plan.parameters["middle.layer.weight_hh_l0"].shuffles} == {0, 1}
    assert plan.parameters["middle.layer.weight_ih_l0"].follows  # the scales of what it reads


class Steps(nn.Module):
    """A cell that walks over the rows' words, from nothing or from a state of its own."""

    def __init__(self, kind: Callable[..., nn.Module], begin: bool = False) -> None:
        super().__init__()
        self.cell = kind(8, 8)
        self.begin = nn.Parameter(torch.randn(8)) if begin else None

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None if self.begin is None else self.begin.expand(len(x), -1)
        outputs = []
        for place in range(x.shape[1]):
            state = self.cell(x[:, place], state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)


def network(layer: nn.Module, end: Callable[[Tensor], Tensor] = lambda h: h, width: int = 8) -> nn.Module:
    """Return a model of rows of words, whose recurrent layer stands between layers that have scales."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.layer, self.between = nn.Embedding(20, 8), layer, nn.Linear(width, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, words: Tensor) -> Tensor:
            h = self.layer(self.words(words))
            h = end((h[0] if isinstance(h, tuple) else h).mean(1))
            return self.head(self.between(h).relu())  # type: ignore[no-any-return]

    return Net()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("both", [False, True])
def test_hidden_channels_of_recurrent_layers_have_signs(
    kind: Callable[..., nn.Module], layers: int, both: bool
) -> None:
    torch.manual_seed(0)
    model = network(kind(8, 5, layers, batch_first=True, bidirectional=both), width=10 if both else 5)
    assert_signed(model, 5 * layers * (1 + both))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_hidden_channels_of_cells_have_signs(kind: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    assert_signed(network(Steps(kind)), 8)


def assert_signed(model: nn.Module, count: int) -> None:
    """Check a model's signs, that a key with them changes no output, and that the server has the true gradient back."""
    words, model = torch.arange(24).reshape(4, 6) % 20, model.double()
    plan = ScalePlan.of(model, (words,))
    key = plan.draw(SecretRoot(bytes(32)).stream("key"))
    assert len(plan.signs) == count
    sizes = {name: np.abs(plan.multiplier(name, key)) for name in plan.parameters if name != plan.head.bias}
    of_signs = dict.fromkeys((name for name, size in sizes.items() if (size == 1).all()), SIGNS)
    assert {one.tensor: one.because for one in plan.forced} == of_signs
    assert {*key.scales[list(plan.signs)]} == {1.0, -1.0}
    assert (plan.draw_powers_of_two(SecretRoot(bytes(32)).stream("key")).scales[list(plan.signs)] == 1).all()
    true = {name: value.detach() for name, value in model.named_parameters()}
    results = []
    for parameters in (true, plan.perturb(true, key)):
        leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
        outputs = torch.func.functional_call(model, leaves, (words,))
        gradients = torch.autograd.grad((outputs + 1).square().sum(), list(leaves.values()))
        results.append((outputs, dict(zip(leaves, gradients, strict=True))))
    (outputs, gradients_true), (noisy, gradients_noisy) = results
    torch.testing.assert_close(noisy, outputs, rtol=1e-12, atol=1e-13)
    recovered = plan.recover(gradients_noisy, key)
    for parameter, gradient in gradients_true.items():
        torch.testing.assert_close(recovered[parameter], gradient, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("layer", "end"),
    [
        (nn.LSTM(8, 8, batch_first=True), torch.relu),
        (nn.LSTM(8, 8, batch_first=True), torch.abs),
        (nn.GRU(8, 8, batch_first=True), lambda h: torch.maximum(h, -h)),
        (nn.GRU(8, 8, batch_first=True), lambda h: nn.functional.max_pool1d(h[:, None], 2).repeat(1, 1, 2)[:, 0]),
        (nn.LSTM(8, 8, batch_first=True), lambda h: h.masked_fill(h > 0.1, 0.0)),
        (Steps(nn.GRUCell, begin=True), lambda h: h),
    ],
)
def test_what_a_sign_would_change_has_none(layer: nn.Module, end: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    words, model = torch.arange(24).reshape(4, 6) % 20, network(layer, end).double()
    plan = ScalePlan.of(model, (words,))  # it tries the model under a key
    assert plan.signs == ()


def test_relu_in_a_recurrent_layer_takes_positive_scales() -> None:
    torch.manual_seed(0)
    model = network(nn.RNN(8, 8, 2, batch_first=True, nonlinearity="relu"))
    plan = ScalePlan.of(model, (torch.arange(24).reshape(4, 6) % 20,))
    assert (plan.signs, plan.forced, plan.free) == ((), (), 8 + 2 * 8 + 8)


def test_what_the_head_reads_has_no_signs() -> None:
    """Else alpha, the sum of the head's inputs, changes by the round, which tells a silo the offset."""
    plan = ScalePlan.of(Words(Recurrent(nn.LSTM, num_layers=2)), (torch.arange(12).reshape(2, 6),))
    key = plan.draw(SecretRoot(bytes(32)).stream("key"))
    assert (len(plan.signs), plan.head.weight) == (8, "head.weight")
    assert (plan.multiplier("head.weight", key) == 1).all()
    assert {*plan.multiplier("middle.layer.weight_hh_l0", key)[16].tolist()} == {1.0, -1.0}
    because = {one.tensor: one.because for one in plan.forced}
    assert because["middle.layer.weight_hh_l1"] == "signs of the head's inputs would show its offset"


class Packed(nn.Module):
    """A recurrent layer that reads each row as far as it goes."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(20, 4), kind(4, 5, batch_first=True, bidirectional=True)
        self.middle, self.head = nn.Linear(10, 6), nn.Linear(6, 3)

    def read(self, x: Tensor, lengths: Tensor) -> Tensor:
        outputs, _ = self.layer(rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False))
        whole, _ = rnn.pad_packed_sequence(outputs, batch_first=True)
        return self.head(self.middle(whole.sum(1) / lengths[:, None]).relu())  # type: ignore[no-any-return]


class Lengths(Packed):
    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.read(self.words(ids), lengths)


class Masks(Packed):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.read(self.words(ids), mask.sum(1))


class Padding(Packed):
    def forward(self, ids: Tensor) -> Tensor:
        return self.read(self.words(ids), (ids != 0).sum(1))


def texts(seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    lengths = random.permutation(7) % 6 + 1
    return random.integers(1, 20, size=(7, 6)) * (np.arange(6) < lengths[:, None]), lengths


PACKED: dict[str, tuple[type[Packed], Callable[[NDArray[np.int64], NDArray[np.int64]], Any]]] = {
    "lengths": (Lengths, lambda ids, lengths: {"ids": ids, "lengths": lengths}),
    "masks": (Masks, lambda ids, lengths: {"ids": ids, "mask": ids > 0}),
    "padding": (Padding, lambda ids, lengths: ids),
}


@pytest.mark.parametrize("given", PACKED)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences_take_fedsgd_s_steps(given: str, kind: Any) -> None:
    model, rows = PACKED[given]
    silos = [Silo(name, rows(*texts(seed)), np.arange(7) % 3) for seed, name in enumerate("ab")]
    after = list[dict[str, Tensor]]()
    for protocol in (PBPFL(loss="cross-entropy", learning_rate=0.1), FedSGD(loss="cross-entropy", learning_rate=0.1)):
        torch.manual_seed(0)
        made = Federation(model(kind), silos, protocol, batch_size=0, dtype="float64", aggregation=CLEAR)
        result = made.train(3, seed=1, progress=False)
        after.append(dict(result.raw_model(true_model=True).network.state_dict()))
    for name, one in after[0].items():
        torch.testing.assert_close(one, after[1][name], rtol=1e-11, atol=1e-11)
    torch.manual_seed(0)
    assert not torch.equal(after[0]["layer.weight_hh_l0"], model(kind).layer.weight_hh_l0.double())


class NotPacked(Packed):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.layer(self.words(ids))[0].sum(1)).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("given", PACKED)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences_hide_what_rows_of_one_length_do(given: str, kind: Any) -> None:
    model, rows = PACKED[given]
    read = rows(*texts(0))
    inputs = tuple(map(torch.from_numpy, read.values() if isinstance(read, dict) else [read]))
    packed, whole = ScalePlan.of(model(kind), inputs), ScalePlan.of(NotPacked(kind), (torch.from_numpy(texts(0)[0]),))
    assert (packed.free, packed.blocks, len(packed.signs)) == (whole.free, whole.blocks, len(whole.signs))
    assert packed.blocks.count(5) == 2, "the hidden channels of both ways"
    assert len(packed.signs) == 10


def test_packed_sequences_are_not_cut_into_blocks() -> None:
    silos = [Silo(name, *texts(seed)) for seed, name in enumerate("ab")]
    blocks = BAFFLE(loss="mse", perturb="blocks", k={"*": 4})
    with pytest.raises(ParameterError, match=r'cannot be cut into blocks: .*depends on the values.*perturb = "all"$'):
        Federation(nn.Sequential(Padding(nn.LSTM), nn.Linear(3, 1)), silos, blocks, batch_size=0).train(1)


def normed_head(normed: Callable[..., nn.Module], dim: int | None = 0, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), normed(nn.Linear(8, 3, bias=bias), dim=dim))


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize(
    "settings",
    [{"loss": "mse"}, {"loss": "cross-entropy"}, {"loss": "cross-entropy", "variant": "paper", "partitions": 2}],
)
def test_a_head_with_weight_normalisation_passes(settings: dict[str, Any], dim: int | None) -> None:
    torch.manual_seed(0)
    model = normed_head(nn.utils.parametrizations.weight_norm, dim, bias=dim is None)
    found = check(model, [Input((5,))], 3, PBPFL(**settings))
    assert found["passes"], found
    assert found["relative_error_float64"] < 1e-10
    assert not found["forced_to_one"]  # all 8 scales of the hidden layer are free, as of a plain head


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("normed", "names"),
    [
        (nn.utils.parametrizations.weight_norm, "2.parametrizations.weight.original{}"),
        (nn.utils.weight_norm, "2.weight_{}"),
    ],
)
def test_a_head_with_weight_normalisation_trains_as_under_fedsgd_and_shows_its_effective_weight_alone(
    normed: Any, names: str
) -> None:
    rows = torch.randn(24, 5, dtype=torch.float64).numpy(), torch.arange(24).numpy() % 3
    silos = [Silo(name, rows[0][some], rows[1][some]) for name, some in (("a", slice(0, 9)), ("b", slice(9, 24)))]
    runs = []
    for kind in (FedSGD, PBPFL):
        torch.manual_seed(0)
        made = Federation(normed_head(normed), silos, kind(learning_rate=0.5), batch_size=4, dtype="float64")
        runs.append(made.train(3))
    plain, exact = [modules.state_dict() for run in runs if (modules := run.model) is not None]
    for name, value in plain.items():
        torch.testing.assert_close(exact[name], value, rtol=1e-6, atol=1e-8)
    assert runs[1].released is not None
    g, v = (names.format(end) for end in ("01" if "original" in names else "gv"))
    sent = runs[1].released.state_dict()
    assert not torch.allclose(sent[v], exact[v], rtol=0.1)
    torch.testing.assert_close(sent[g], sent[v].norm(dim=1, keepdim=True))  # g^ says nothing that v^ does not


def test_a_head_whose_weight_is_computed_otherwise_is_refused_by_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3)))
    with pytest.raises(ParameterError, match=r"the last layer 2 is computed from others.*remove_parametrizations"):
        ScalePlan.of(model, (torch.randn(4, 5),))
    nn.utils.parametrize.remove_parametrizations(model[2], "weight")
    assert ScalePlan.of(model, (torch.randn(4, 5),)).head.weight == "2.weight"


class WideAndDeep(nn.Module):
    """Two heads that are added up, as wide and deep networks of tables have them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep, self.head = nn.Linear(5, 3), nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x) + self.head(torch.relu(self.deep(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("settings", [{"loss": "mse"}, {"loss": "cross-entropy", "variant": "paper", "partitions": 2}])
def test_what_is_added_to_the_head_s_outputs_stays_beside_them(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    found = check(WideAndDeep(), [Input((5,))], 3, PBPFL(**settings))
    assert found["passes"], found
    assert found["relative_error_float64"] < 1e-10
    assert ScalePlan.of(WideAndDeep(), (torch.randn(4, 5),)).head.residual


class Beside(WideAndDeep):
    """What trains has no way through the frozen trunk: a part that nothing uses, or the wide part."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.deep.requires_grad_(False)
        self.used = wide

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.used else self.head(torch.relu(self.deep(x)))


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("options", [{}, {"engine": Engine(micro_batch=3)}])
def test_what_trains_beside_a_frozen_trunk_takes_fedsgd_s_steps(wide: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    silos = [Silo(name, random.normal(size=(7, 5)), random.normal(size=(7, 3))) for name in "ab"]
    after = list[dict[str, Tensor]]()
    for protocol in (PBPFL(loss="mse", learning_rate=0.1), FedSGD(loss="mse", learning_rate=0.1)):
        torch.manual_seed(0)
        made = Federation(Beside(wide), silos, protocol, batch_size=0, dtype="float64", aggregation=CLEAR, **options)
        result = made.train(3, seed=1, progress=False)
        after.append(dict(result.raw_model(true_model=True).network.state_dict()))
    for name, one in after[0].items():
        torch.testing.assert_close(one, after[1][name], rtol=1e-11, atol=1e-11)
    assert not torch.equal(after[0]["head.weight"], Beside(wide).head.weight)


# -- dense outputs -----------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Ends in a convolution to which its input is added, as MONAI's residual units do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x  # type: ignore[no-any-return]


def images(*last: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), *last)


DENSE: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "1 x 1": (lambda: images(nn.Conv2d(4, 2, 1)), 64),
    "3 x 3": (lambda: images(nn.Conv2d(4, 2, 3, padding="same", dilation=2)), 64),
    "resized": (lambda: images(nn.MaxPool2d(2), nn.Conv2d(4, 2, 1), nn.Upsample(scale_factor=2, mode="bilinear")), 64),
    "transposed": (
        lambda: images(nn.MaxPool2d(2), nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1)),
        64,
    ),
    "residual": (lambda: images(nn.Conv2d(4, 2, 1), nn.ReLU(), Residual()), 64),
    "mirrored": (lambda: images(nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect")), 64),
}


@pytest.mark.parametrize("kind", DENSE)
def test_dense_outputs_pass(kind: str) -> None:
    torch.manual_seed(0)
    build, positions = DENSE[kind]
    found = check(build(), [Input((1, 8, 8))], 2, PBPFL(loss="mse", partitions=2))
    assert found["passes"], found
    assert found["relative_error_float64"] < 1e-10
    model = nn.Sequential(build(), nn.Flatten())
    assert ScalePlan.of(model, (torch.randn(2, 1, 8, 8),)).head.positions == positions


@pytest.mark.parametrize("kind", ["3 x 3", "transposed", "residual"])
def test_a_run_on_dense_outputs_takes_the_steps_of_a_plain_one(kind: str) -> None:
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    model: Any = DENSE[kind][0]()
    model[1] = nn.GroupNorm(2, 4)
    rows = [(random.normal(size=(5, 1, 8, 8)).astype("float32"), random.normal(size=(5, 2, 8, 8))) for _ in range(2)]
    silos = [Silo(name, x, y.reshape(5, -1).astype("float32")) for name, (x, y) in zip("ab", rows, strict=True)]
    protocol = PBPFL(loss="mse", learning_rate=1e-3)
    made = Federation(model, silos, protocol, batch_size=0, dtype="float64", aggregation=CLEAR)
    result = made.train(3, progress=False)
    plain = copy.deepcopy(model).double()
    for _ in range(3):
        total: Any = sum((plain(torch.tensor(x).double()) - torch.tensor(y)).square().sum() / 20 for x, y in rows)
        gradients = torch.autograd.grad(total, list(plain.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
                parameter -= 1e-3 * gradient
    after = dict(result.raw_model(true_model=True).network.named_parameters())
    for name, one in plain.named_parameters():
        np.testing.assert_allclose(after[name].detach(), one.detach(), atol=1e-5)  # the start is moved by 2^-23
    assert result.raw_model().predict(rows[0][0]).shape == (5, 128)


def test_dense_outputs_under_cross_entropy_are_refused_by_what_the_server_would_see() -> None:
    with pytest.raises(ParameterError, match=r"outputs at 64 positions.*of an image its segmentation"):
        check(DENSE["1 x 1"][0](), [Input((1, 8, 8))], 2, PBPFL(loss="cross-entropy"))


# -- questions about inputs --------------------------------------------------------------------------------------------


class Asks(nn.Module):
    """Leaves the mask out where every word is one, as transformers does."""

    def __init__(self, *, deeper: bool = False) -> None:
        super().__init__()
        self.words, self.query, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.deeper = deeper

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids)
        q = self.query(x)
        if mask.all():
            if self.deeper:
                x = x + 0 * x.sigmoid()
            found = F.scaled_dot_product_attention(q, q, x)
        else:
            found = F.scaled_dot_product_attention(q, q, x, mask[:, None, :].bool())
        return self.head(found.mean(1).relu())  # type: ignore[no-any-return]


def padded(lengths: list[int]) -> tuple[Tensor, Tensor]:
    mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).double()
    return torch.arange(6 * len(lengths)).reshape(-1, 6) % 20, mask


@pytest.mark.parametrize("lengths", [[6, 6], [6, 3]])
def test_both_answers_are_traced_whichever_the_example_has(lengths: list[int]) -> None:
    for deeper, free in ((False, True), (True, False)):
        plan = ScalePlan.of(Asks(deeper=deeper), padded(lengths))
        assert plan.head.answers == {(True,), (False,)}
        assert bool(plan.parameters["words.weight"].follows) == free  # a sigmoid on one way fixes it on both


def test_a_silo_is_held_to_answers_that_were_traced() -> None:
    class Raises(Asks):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            if mask.all():
                raise ValueError("no padding")
            return super().forward(ids, mask)

    head = ScalePlan.of(Raises(), padded([5, 3])).head
    assert head.answers == {(False, False), (False, True)}
    with pytest.raises(ParameterError, match="take another branch of the model"):
        head.run(Asks().double(), padded([5, 3]))


def test_numbers_read_from_inputs_and_questions_to_weights_are_refused() -> None:
    class Longest(Asks):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            longest = int(mask.sum(1).max())
            return super().forward(ids[:, :longest], mask[:, :longest])

    class Weighs(Asks):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return super().forward(ids, mask) * (2 if self.head.weight.sum() > 0 else 1)

    for model in (Longest(), Weighs()):
        with pytest.raises(ParameterError, match="reads the value of a tensor that depends on the data"):
            ScalePlan.of(model, padded([6, 3]))
