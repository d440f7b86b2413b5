"""What a silo computes at the noisy head: the scalars of the exact identities, and their cotangents.

With y^ = y + alpha r, alpha_n = sum_j h_nj (+ 1 if the head has a bias) and r = gamma_s r_a on part s:

**Squared error** (`practical.md`, Lemma 3). With e = y^ - t,

    L = L^ - sum_s gamma_s S_s + |r|^2 beta,
    L^ = mean |e|^2 / 2,   S_s = mean(alpha (r_a . e)_s),   beta = mean(alpha^2 / 2).

**Cross-entropy** (Lemma 5), after the server has returned the softmax p of the true outputs. u has the weighted
targets, and U is their sum over outputs. G, sigma, beta and psi are gradients of the scalars behind their colons. These
are sums over rows divided by D, with the first factor held constant.

    grad L = G - sum_s gamma_s sigma_s,   G: (U p - u) . y^,   sigma_s: (r_a . (U p - u))_s alpha.

In the paper's form the server returns y* = p exp(-delta) and k = (1 - exp(delta)) / xi, so that p = y* - xi y~ with y~
= y* k. G and sigma are then formed from y* in place of p, and two corrections per part undo the difference:

    grad L = G - sum_s gamma_s sigma_s + sum_s gamma_s xi_s beta_s - sum_s xi_s psi_s,
    beta_s: U (r_a . y~)_s alpha,   psi_s: U y~_s . y^_s.

Differs from the paper: there the brackets reverse two of these signs.

So the true gradient is a combination of gradients of scalars that a silo can compute without gamma (and xi). The
scalars depend on the layers below the head through h alone, and their cotangents d scalar / d h have a closed form.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_ALPHA = 1e-3  # times sqrt(H) rms(h), alpha's size for H inputs of either sign


def alpha_size(h: Tensor, *, bias: bool) -> float:
    """Return the rms over rows of alpha, the sum of a head's inputs h, [B, H], and 1 for a bias."""
    return float((h.double().sum(dim=1) + float(bias)).square().mean().sqrt())


def least_alpha(h: Tensor) -> float:
    """Return the least size of alpha for which an offset may be chosen, from a head's inputs h, [B, H]."""
    return LEAST_ALPHA * math.sqrt(h.shape[1]) * float(h.double().square().mean().sqrt())


def bounded_alpha(h: Tensor, *, bias: bool) -> float:
    """Return the size of alpha for which to choose an offset, from a head's inputs h, [B, H]; 1 if all are 0."""
    return max(alpha_size(h, bias=bias), least_alpha(h)) or 1.0


@dataclass(frozen=True)
class Terms:
    """The terms of one batch of B rows.

    Differs from the paper: gradients of sigma and beta at the head are never uploaded whole. Under the squared error
    those of sigma are r_a (x) mean(alpha h), one vector for all parts and outputs. All others are zero.

    Attributes:
        prefixes: The names of the scalars whose gradients are uploaded.
        cotangents: d scalar / d h, [scalars, B, inputs].
        values: Scalars that are uploaded themselves, from which the server computes the true loss.
        weight, bias: Gradients at the noisy head by prefix, [outputs, inputs] and [outputs]; "psi" joins all parts.
        alpha_h: For the squared error mean(alpha h), [inputs], then mean(alpha) if the head has a bias; else None.
        beside: d scalar / d c for the addend c of the outputs, [scalars, B, outputs]; None without one.
    """

    prefixes: tuple[str, ...]
    cotangents: Tensor
    values: Tensor
    weight: dict[str, Tensor]
    bias: dict[str, Tensor]
    alpha_h: Tensor | None = None
    beside: Tensor | None = None


@dataclass(frozen=True)
class NoisyHead:
    """A batch at the noisy head, where B counts each position of a sample as a row.

    Attributes:
        h: [B, inputs].
        outputs: y^, [B, outputs].
        weight: The head's, [outputs, inputs].
        bias: Whether the head has one.
        spread: `selector`, [m, outputs].
        positions: Rows of h per sample, over which the squared error adds up.
        residual: Whether something is added to the outputs (`moretta.protocols.pbpfl.head`).
    """

    h: Tensor
    outputs: Tensor
    weight: Tensor
    bias: bool
    spread: Tensor
    positions: int = 1
    residual: bool = False

    @property
    def alpha(self) -> Tensor:
        """Return sum_j h_nj (+ 1), [B, 1]."""
        return self.h.sum(dim=1, keepdim=True) + float(self.bias)


def selector(parts: Tensor, direction: Tensor) -> Tensor:
    """Return r_a spread over its parts, [m, outputs]: row s holds r_a on I_s and 0 elsewhere."""
    rows = torch.zeros(int(parts.max()) + 1, len(parts), dtype=direction.dtype, device=direction.device)
    rows[parts, torch.arange(len(parts), device=direction.device)] = direction
    return rows


def squared_error(at: NoisyHead, targets: Tensor, weights: Tensor | None = None) -> Terms:
    """Return the terms of the mean of |y - t|^2 / 2 over the samples.

    Args:
        targets: [B, outputs].
        weights: For label masks, the weight w of each position, repeated for its outputs, [B, outputs]. All terms then
            have w e in place of e, and beta has w alpha^2 / 2.
    """
    h, own, rows = at.h, at.alpha, len(at.h) // at.positions
    alpha, gaps = own, at.outputs - targets
    e = gaps
    if weights is not None:
        e, alpha = weights * gaps, weights[:, :1] * own
    along = e @ at.spread.T  # (r_a . e)_s, [B, m]
    size, beta = (e * gaps).sum()[None] / 2, (alpha * own).sum()[None] / 2
    values = torch.cat([size, (own * along).sum(0), beta]) / rows
    # S depends on h through alpha and through e.
    of_sigma = along.T[:, :, None] + alpha * (at.spread @ at.weight)[:, None, :]
    cotangents = torch.cat([(e @ at.weight)[None], of_sigma, alpha.expand_as(h)[None]])
    alpha_h = (alpha * h).sum(0) / rows
    beside = torch.cat([e[None], alpha * at.spread[:, None, :], torch.zeros_like(e)[None]]) / rows
    return Terms(
        beside=beside if at.residual else None,
        prefixes=("noisy", *(f"sigma/{s}" for s in range(len(at.spread))), "beta"),
        cotangents=cotangents.div_(rows),
        values=values,
        weight={"noisy": e.T @ h / rows},
        bias={"noisy": e.sum(0) / rows} if at.bias else {},
        alpha_h=torch.cat([alpha_h, alpha.sum()[None] / rows]) if at.bias else alpha_h,
    )


def cross_entropy(at: NoisyHead, u: Tensor, y: Tensor, k: Tensor, parts: Tensor) -> Terms:
    """Return the terms of the cross-entropy as means over the B rows; the server divides by D / B.

    Args:
        u: Weighted targets, [B, outputs].
        y, k: The server's answer (`messages.Softmax`), in the dtype of h.
        parts: int64[outputs].
    """
    rows, m = len(at.h), len(at.spread)
    total = u.sum(dim=1, keepdim=True)  # U, [B, 1]
    error = total * y - u
    flat = torch.ones_like(at.h)  # d alpha / d h
    beside = [error, *(torch.zeros_like(error) for _ in range(m))]
    cotangents = [error @ at.weight, *((error @ at.spread.T).T[:, :, None] * flat)]
    prefixes = ["noisy", *(f"sigma/{s}" for s in range(m))]
    weight, bias = {"noisy": error.T @ at.h / rows}, {"noisy": error.mean(0)}
    values = -(u * y.clamp_min(torch.finfo(y.dtype).tiny).log()).sum()[None]  # -u . log p
    if k.shape[1]:
        z = at.outputs - at.outputs.amax(dim=1, keepdim=True)
        values = torch.cat([-(u * z).sum()[None], (at.alpha * (u @ at.spread.T)).sum(0)])
        tilde = total * y * k[:, parts]  # U y~
        cotangents += [*((tilde @ at.spread.T).T[:, :, None] * flat)]
        cotangents += [(tilde * (parts == s)) @ at.weight for s in range(m)]
        beside += [*(torch.zeros_like(error) for _ in range(m)), *(tilde * (parts == s) for s in range(m))]
        prefixes += [*(f"beta/{s}" for s in range(m)), *(f"psi/{s}" for s in range(m))]
        # Each row of the head belongs to one part, so all psi_s fit one tensor there.
        weight["psi"], bias["psi"] = tilde.T @ at.h / rows, tilde.mean(0)
    return Terms(
        prefixes=tuple(prefixes),
        cotangents=torch.stack(cotangents) / rows,
        values=values / rows,
        beside=torch.stack(beside) / rows if at.residual else None,
        weight=weight,
        bias=bias if at.bias else {},
    )
