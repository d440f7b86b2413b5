"""A case is the same after its way to another process, and builds the run's own model."""

import dataclasses

import numpy as np
import pytest
import torch
from recorded import recorded
from torch import nn

from moretta.audit.evidence.case import Architecture, Case, exported
from moretta.errors import ParameterError
from moretta.protocols.fedsgd.messages import TrainOn


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("run"), run={"rounds": 3})


@pytest.fixture(scope="module")
def case(truth):
    arrays = {"x": np.arange(6.0).reshape(2, 3).T, "a/b": np.array(3), "no": np.zeros((0, 4), np.float32)}
    return truth.case({"server": (1, 2), "silo-1": (3,)}, arrays, thorough=True)


def test_there_and_back(case):
    back = Case.unpack(case.pack())
    assert back.run == case.run
    assert back.thorough
    assert back.views == case.views
    assert set(back.views["server"]) == {1, 2}
    assert back.architecture == case.architecture
    assert back.arrays.keys() == case.arrays.keys()
    for name, value in case.arrays.items():
        np.testing.assert_array_equal(back.arrays[name], value)
        assert back.arrays[name].dtype == value.dtype
    assert sorted({one.round for one in back.heard("server", TrainOn)}) == [1, 2]
    assert set(back.last_of_each_round("silo-1", TrainOn)) == {3}


def test_arrays_cannot_be_written_to(case):
    back = Case.unpack(case.pack())
    for array in back.arrays.values():
        assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        back.arrays["x"][0, 0] = 1.0


def test_a_role_that_was_given_nothing_has_no_view(case):
    with pytest.raises(KeyError):
        Case.unpack(case.pack()).heard("silo-2", TrainOn)


def test_model_is_the_runs(case, truth):
    made = Case.unpack(case.pack()).model()
    held = truth.parameters(2)
    assert {name: tuple(one.shape) for name, one in made.state_dict().items()} == {
        name: value.shape for name, value in held.items()
    }
    assert next(made.parameters()).dtype == truth.dtype
    assert made.training


def test_exported_program_is_the_model_without_its_weights(case):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    program = exported(model, (5,), np.dtype(np.float32))
    run = dataclasses.replace(case.run, shape=(5,), outputs=2)
    packed = dataclasses.replace(case, run=run, architecture=Architecture(program=program)).pack()
    made, x = Case.unpack(packed).model(), torch.randn(7, 5)
    weights = model.state_dict()
    assert made.state_dict().keys() == weights.keys()
    assert all(not torch.equal(made.state_dict()[name], one) for name, one in weights.items())
    found = torch.func.functional_call(made, dict(weights), (x,))
    torch.testing.assert_close(found, model(x))


def test_a_model_that_cannot_be_written_down_is_refused():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, x):
            return self.layer(x) if float(x.sum()) > 0 else -self.layer(x)

    with pytest.raises(ParameterError, match=r"torch\.export failed on this model"):
        exported(Asks(), (5,), np.dtype(np.float32))
