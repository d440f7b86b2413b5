"""A model from another's folder, as a graph: this process has its tensors, and a confined process runs it.

`python -m moretta.run.foreign` is that process (`moretta.engines.process`). It starts with the first rows and serves
all rows of a command.
"""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from moretta.contract.messages import Array, Tensors
from moretta.engines.process import ConfinedProcess, serve
from moretta.errors import ParameterError
from moretta.models.graph import Graph
from moretta.protocols.common.modules import CHUNK, Inputs, arrays, chunks, outputs_of

MODULE = "moretta.run.foreign"
GRAPH, ROWS, AT_ONCE, OUTPUTS = "graph", "rows", "at_once", "outputs"
WEIGHT = "weight "  # begins the name of a tensor of the model, before its own


class ForeignGraph(Graph):
    """A graph whose forward runs in a confined process, without gradients; its outputs are checked."""

    def __init__(
        self, description: Mapping[str, Any], tensors: Mapping[str, Tensor], constants: Mapping[str, Tensor]
    ) -> None:
        super().__init__(description, tensors, constants)
        self._process = ConfinedProcess(MODULE, torch.get_num_threads())
        self._file: bytes = b""

    @classmethod
    def read(cls, file: bytes, tensors: Tensors) -> Self:
        """Return the model, as `Graph.read` does."""
        graph = super().read(file, tensors)
        graph._file = file
        return graph

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, [rows, outputs]."""
        return self.outputs(x, max(1, len(x)))

    def outputs(self, inputs: Inputs, at_a_time: int = CHUNK) -> Tensor:
        """Return the outputs of rows, [rows, outputs], computed `at_a_time` rows at a time.

        Raises:
            ParameterError: the graph fails, takes too long or too much memory, or returns malformed outputs.
        """
        weights = self.request()
        parts = []
        for rows in chunks(inputs, max(CHUNK, at_a_time)):
            x = rows.detach().cpu().numpy()
            outputs = self._process.ask({**weights, ROWS: x, AT_ONCE: np.array(at_a_time)}).get(OUTPUTS)
            if outputs is None or outputs.ndim != 2 or len(outputs) != len(x) or outputs.dtype.kind != "f":
                raise ParameterError("the model's graph does not return one row of outputs for each row; save it again")
            parts.append(torch.tensor(outputs, device=rows.device))
            weights = {}  # the process keeps them
        return torch.cat(parts)

    def request(self) -> dict[str, Array]:
        """Return the content from which the process builds this model: its file and its present tensors."""
        return {
            GRAPH: np.frombuffer(self._file, np.uint8),
            **{WEIGHT + name: array for name, array in arrays(self).items()},
        }


def model_of(request: Mapping[str, Array]) -> Graph:
    """Return the model of `ForeignGraph.request`, in the process that received it."""
    tensors = {name.removeprefix(WEIGHT): array for name, array in request.items() if name.startswith(WEIGHT)}
    return Graph.read(request[GRAPH].tobytes(), tensors)


def main() -> None:
    """Serve outputs on standard input and output until they end."""
    kept: list[Graph] = []

    def answer(request: dict[str, Array]) -> Mapping[str, Array]:
        if GRAPH in request:
            kept[:] = [model_of(request)]
        with torch.no_grad():
            outputs = outputs_of(kept[0], torch.tensor(request[ROWS]), int(request[AT_ONCE]))
        return {OUTPUTS: outputs.numpy()}

    torch.set_num_interop_threads(1)
    serve(answer)


if __name__ == "__main__":
    main()
