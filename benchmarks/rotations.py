"""Whether a residual stream could be rotated under PBPFL: exactness, the cost of a step, and what a silo gets back.

x is the stream, [.., d], and Q orthogonal. RMSNorm(x) = g o x / rms(x), and rms(Q x) = rms(x). With g folded into what
reads it, W' = W diag(g), the network of Q E, Q W_o and W' Q^T is the same function, and

    grad W' = grad(W' Q^T) Q,   grad W = grad W' diag(g),   grad g_j = sum_i W_ij grad W'_ij  over all readers.

LayerNorm(x) = g o M x / |M x| sqrt(d) + b with M = I - 1 1^T / d. M commutes with every orthogonal Q for which Q 1 = 1.
b goes into the readers' biases, c' = c + W b, from which grad b = sum over readers of W^T grad c', and grad W has
grad c' b^T besides.

    OMP_NUM_THREADS=1 python benchmarks/rotations.py --json FILE
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

WORDS, CLASSES, HEADS = 1000, 10, 4
Weights = dict[str, Tensor]


def drawn(d: int, layers: int, kind: str, seed: int = 0) -> Weights:
    """Return a transformer's weights, float64. kind: of its norms, "rms" or "layer"."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64) / shape[-1] ** 0.5

    found = {"words": normal(WORDS, d)}
    for n in range(layers):
        shapes = {"q": (d, d), "k": (d, d), "v": (d, d), "up": (4 * d, d)}
        found |= {f"{n}.{name}": normal(*shape) for name, shape in shapes.items()}
        found |= {f"{n}.{name}.c": 0.1 * normal(shape[0]) for name, shape in shapes.items()}
        found |= {f"{n}.out": normal(d, d), f"{n}.down": normal(d, 4 * d)}
        found |= {f"{n}.{one}.g": 1 + 0.2 * normal(d) for one in ("first", "second")}
        found |= {f"{n}.{one}.b": 0.1 * normal(d) for one in ("first", "second")}
    found |= {"last.g": 1 + 0.2 * normal(d), "last.b": 0.1 * normal(d), "head": normal(CLASSES, d)}
    found["head.c"] = normal(CLASSES)
    return found if kind == "layer" else {name: one for name, one in found.items() if not name.endswith(".b")}


def readers(layers: int) -> dict[str, tuple[str, ...]]:
    """Return the matrices that read each norm."""
    found = {"last": ("head",)}
    for n in range(layers):
        found |= {f"{n}.first": (f"{n}.q", f"{n}.k", f"{n}.v"), f"{n}.second": (f"{n}.up",)}
    return found


def loss(w: Mapping[str, Tensor], words: Tensor, y: Tensor, layers: int, kind: str) -> Tensor:
    """Return the mean cross-entropy of the mean over words. Of folded weights norms have neither g nor b."""

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if kind == "layer" else x
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        x = x * w[f"{name}.g"] if f"{name}.g" in w else x
        return x + w[f"{name}.b"] if f"{name}.b" in w else x

    x = w["words"][words]
    for n in range(layers):
        h = norm(x, f"{n}.first")
        q, k, v = (
            F.linear(h, w[f"{n}.{one}"], w[f"{n}.{one}.c"]).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in "qkv"
        )
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) @ w[f"{n}.out"].T
        x = x + F.gelu(F.linear(norm(x, f"{n}.second"), w[f"{n}.up"], w[f"{n}.up.c"])) @ w[f"{n}.down"].T
    return F.cross_entropy(F.linear(norm(x, "last"), w["head"], w["head.c"]).mean(1), y)


def orthogonal(d: int, kind: str, seed: int, dtype: torch.dtype) -> Tensor:
    """Return a random orthogonal matrix, of LayerNorm one that keeps the vector of ones."""
    random = torch.Generator().manual_seed(seed)
    size = d - (kind == "layer")
    q, r = torch.linalg.qr(torch.randn(size, size, generator=random, dtype=torch.float64))
    q = q * r.diagonal().sign()
    if kind == "layer":
        basis = torch.linalg.qr(torch.cat([torch.ones(d, 1, dtype=q.dtype), torch.eye(d, dtype=q.dtype)[:, 1:]], 1))[0]
        q = torch.outer(basis[:, 0], basis[:, 0]) + basis[:, 1:] @ q @ basis[:, 1:].T
    return q.to(dtype)


def rotated(w: Weights, q: Tensor, layers: int) -> Weights:
    """Return what silos are sent: norms folded into their readers, and the stream turned."""
    sent = {name: one for name, one in w.items() if not name.endswith((".g", ".b"))}
    for name, of in readers(layers).items():
        for one in of:
            if f"{name}.b" in w:
                sent[f"{one}.c"] = w[f"{one}.c"] + w[one] @ w[f"{name}.b"]
            sent[one] = (w[one] * w[f"{name}.g"]) @ q.T
    sent["words"] = w["words"] @ q.T
    for n in range(layers):
        for one in ("out", "down"):
            sent[f"{n}.{one}"] = q @ w[f"{n}.{one}"]
    return sent


def recovered(w: Weights, found: Weights, q: Tensor, layers: int) -> Weights:
    """Return the gradients of the true weights from those of what was sent."""
    back = dict(found)
    back["words"] = found["words"] @ q
    for n in range(layers):
        back |= {f"{n}.{one}": q.T @ found[f"{n}.{one}"] for one in ("out", "down")}
    for name, of in readers(layers).items():
        whole = {one: found[one] @ q for one in of}
        back[f"{name}.g"] = sum((w[one] * whole[one]).sum(0) for one in of)  # type: ignore[assignment]
        back |= {one: whole[one] * w[f"{name}.g"] for one in of}
        if f"{name}.b" in w:
            back[f"{name}.b"] = sum(w[one].T @ found[f"{one}.c"] for one in of)  # type: ignore[assignment]
            back |= {one: back[one] + torch.outer(found[f"{one}.c"], w[f"{name}.b"]) for one in of}
    return back


def gradient(w: Weights, *of: Any) -> Weights:
    """Return the gradient of the loss."""
    own = {name: one.detach().requires_grad_() for name, one in w.items()}
    return dict(zip(own, torch.autograd.grad(loss(own, *of), list(own.values())), strict=True))


def rows(count: int, length: int) -> tuple[Tensor, Tensor]:
    """Return made-up words and classes."""
    random = torch.Generator().manual_seed(3)
    return torch.randint(WORDS, (count, length), generator=random), torch.arange(count) % CLASSES


def exactness(kind: str, dtype: torch.dtype, d: int = 64, layers: int = 2) -> float:
    """Return the error of the whole gradient, relative to its norm."""
    w = {name: one.to(dtype) for name, one in drawn(d, layers, kind).items()}
    of = (*rows(8, 16), layers, kind)
    wanted, q = gradient(w, *of), orthogonal(d, kind, 1, dtype)
    got = recovered(w, gradient(rotated(w, q, layers), *of), q, layers)
    gaps = sum((got[name] - one).double().square().sum() for name, one in wanted.items())
    return float((gaps / sum(one.double().square().sum() for one in wanted.values())).sqrt())  # type: ignore[union-attr]


def cost(d: int, count: int, length: int, layers: int = 2, runs: int = 5) -> dict[str, float]:
    """Return a step's seconds, and those of turning its weights and gradients, of the process, float32."""
    w = {name: one.float() for name, one in drawn(d, layers, "rms").items()}
    of, q = (*rows(count, length), layers, "rms"), orthogonal(d, "rms", 1, torch.float32)
    found = gradient(w, *of)

    def least(work: Callable[[], object]) -> float:
        taken = []
        for _ in range(runs):
            began = time.process_time()
            work()
            taken.append(time.process_time() - began)
        return min(taken)

    step, turn = least(lambda: gradient(w, *of)), least(lambda: (rotated(w, q, layers), recovered(w, found, q, layers)))
    return {"step": step, "turning": turn, "drawing": least(lambda: orthogonal(d, "rms", 2, torch.float32)),
            "ratio": (step + turn) / step}  # fmt: skip


def seen(d: int = 64, layers: int = 2, rate: float = 1.0) -> dict[str, float]:
    """Return what a silo gets of a step between two rounds with fresh Q, by turning one's weights onto the other's.

    cosine_common: of the step found with the true one, where all of it is turned by one Q; cosine: in the true basis.
    cosine_known_start: where the silo knows the weights that the first round began with.
    """
    w = drawn(d, layers, "rms")
    of = (*rows(8, 16), layers, "rms")
    after = {name: one - rate * g for (name, one), g in zip(w.items(), gradient(w, *of).values(), strict=True)}
    first, second = (orthogonal(d, "rms", seed, torch.float64) for seed in (5, 6))
    one, other = rotated(w, first, layers)["words"], rotated(after, second, layers)["words"]

    def onto(a: Tensor, b: Tensor) -> Tensor:
        u, _, v = torch.linalg.svd(b.T @ a)
        return b @ u @ v

    def cosine(a: Tensor, b: Tensor) -> float:
        return float((a * b).sum() / (a.norm() * b.norm()))

    step = after["words"] - w["words"]
    found = onto(one, other) - one
    return {
        "cosine_common": cosine(found @ first, step),
        "cosine": cosine(found, step),
        "cosine_known_start": cosine(onto(w["words"], other) - w["words"], step),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print or write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="the file to write")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    kinds = {"float64": torch.float64, "float32": torch.float32}
    found: dict[str, Any] = {
        "error": {
            f"{norm}, {name}": exactness(norm, kind) for norm in ("rms", "layer") for name, kind in kinds.items()
        },
        "cost": {
            f"{d} wide, {n} x {length}": cost(d, n, length)
            for d, n, length in ((128, 8, 64), (256, 8, 64), (512, 8, 64))
        },
        "seen": seen(),
    }
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
