"""The backward pass along several cotangents, part by part.

A plain backward pass frees each layer's activations on its way down. The first of two passes cannot, because the second
needs them. So a large model's graph is cut into parts, and both pass one part before the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

LARGE = 1 << 20  # parameters; the activations of smaller models take little memory
PARTS = 64  # at most, because each costs a call of autograd


def gradients_along(
    ends: Sequence[Tensor], seeds: Sequence[Sequence[Tensor]], parameters: Sequence[Tensor]
) -> list[list[Tensor]]:
    """Compute parameters' gradients along each of several cotangents, and free the graph.

    Operations and their order are those of whole passes, so the gradients have the same bits. Tied weights, used at the
    top and at the bottom, allow no cut between.

    Args:
        ends: tensors to differentiate; without any, all gradients are 0.
        seeds: for each cotangent a tensor for each of the ends, of its shape.
        parameters: leaves of the graph; those outside of it have the gradient 0.

    Returns:
        For each cotangent a gradient for each parameter, of its shape.
    """
    gradients = [dict[int, Tensor]() for _ in seeds]  # by the parameter's id
    seeds, own = list(seeds), set(map(id, parameters))
    graph = [get_gradient_edge(end) for end in ends]
    large = len(ends) == 1 < len(seeds) and sum(tensor.numel() for tensor in parameters) >= LARGE
    parts: Iterator[Part] = parts_of(graph[0].node) if large else iter([(parameters, None)] if ends else [])
    for leaves, cut in parts:
        leaves = [leaf for leaf in leaves if id(leaf) in own]
        inputs: list[Any] = [*leaves, *([cut] if cut else [])]
        for number in range(len(seeds) if inputs else 0):
            keep = number < len(seeds) - 1
            values = torch.autograd.grad(graph, inputs, seeds[number], retain_graph=keep, allow_unused=True)
            gradients[number] |= {id(leaf): value for leaf, value in zip(leaves, values, strict=False)}
            seeds[number] = values[len(leaves) :]  # frees the one above
        reached = next((seed for each in seeds for seed in each if seed is not None), None)
        if cut is None or reached is None:
            break
        # A function with a backward pass of its own may end the paths of some directions.
        seeds = [[torch.zeros_like(reached) if seed is None else seed for seed in each] for each in seeds]
        graph = [cut]
    named = [[each.get(id(leaf)) for leaf in parameters] for each in gradients]
    return [
        [torch.zeros_like(leaf) if value is None else value for leaf, value in zip(parameters, each, strict=True)]
        for each in named
    ]


Part = tuple[Sequence[Tensor], GradientEdge | None]
"""The leaves below some nodes of a graph, and the one edge through which all other paths from these nodes go."""


def parts_of(top: Node) -> Iterator[Part]:
    """Yield the parts of the graph below a node, from the top down; the last one has no edge."""
    depths, uses = _depths(top)
    least, order, nodes = len(depths) / PARTS, count(), 0
    ready, edges = [(depths[top], next(order), top)], dict[Node, set[int]]()  # seen nodes: their outputs in use
    leaves = list[Tensor]()
    while ready:
        *_, node = heappop(ready)  # the shallowest: a leaf's edge goes with its user
        outputs, nodes = edges.pop(node, set()), nodes + 1
        if not node.next_functions:
            leaves += [node.variable] if hasattr(node, "variable") else []
        elif nodes > least and not edges and len(outputs) == 1:  # an edge to a leaf that is used below stays open
            yield leaves, GradientEdge(node, outputs.pop())
            leaves, nodes = [], 0
        for below, output in node.next_functions:
            if below is None:
                continue
            uses[below] -= 1
            edges.setdefault(below, set()).add(output)
            if not uses[below]:
                heappush(ready, (depths[below], next(order), below))
    yield leaves, None


def _depths(top: Node) -> tuple[dict[Node, int], Counter[Node]]:
    """Return each node's longest path to a leaf, and the number of edges to it."""
    depths, uses, waiting = dict[Node, int](), Counter[Node](), [top]
    while waiting:
        below = [node for node, _ in waiting[-1].next_functions if node is not None]
        if new := [node for node in below if node not in depths]:
            waiting += new
            continue
        node = waiting.pop()
        if node not in depths:
            depths[node] = 1 + max((depths[node] for node in below), default=0)
            uses.update(below)
    return depths, uses
