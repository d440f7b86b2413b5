"""The start of a run: the model's parameters as they were built or warm-started, each tensor moved a little.

Initialisers draw few bits: PyTorch's draw one of 2^24 values between -b and b. Factors that multiply such numbers can
be found from the products, even rounded once, as PBPFL's scales were (`scales-from-low-bits` of the audit). So each
parameter W, trained or frozen, begins at W + n, with n normal of deviation 2^-23 max|W|. Where max|W| is about b, that
is the step of such a lattice, and W + n is nearly uniform between its points (the density varies by 2 exp(-2 pi^2),
5e-9). This does not hide coarser starts, such as weights of eight bits or normalisation layers of ones. Buffers stay:
no scale multiplies them, and some are masks.

All protocols do so, so that they are compared from one start. As n follows from a digest of all parameters W, runs of
one seed stay the same runs. Whoever does not know the start (from a seed, the operating system or a file) does not know
n either; a start that others know hides nothing, as before.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from moretta.secure_aggregation.keystream import Keystream, derive, digest_of

SPREAD = 2.0**-23  # of max|W|


def first_weights(model: nn.Module) -> nn.Module:
    """Return a copy in float64 with its parameters moved; a tied one once."""
    start = copy.deepcopy(model).double()
    trained = dict(start.named_parameters())
    digest = digest_of({name: value.numpy(force=True) for name, value in trained.items()})
    with torch.no_grad():
        for name, parameter in trained.items():
            stream = Keystream(derive(digest, "first weights", name))
            noise = torch.from_numpy(stream.normal(parameter.numel())).view_as(parameter).to(parameter.device)
            parameter.add_(SPREAD * parameter.abs().max() * noise)
    return start
