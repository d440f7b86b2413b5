"""Models that take rows as the data has them: they fill in what is absent, scale, and then compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moretta.data.tables.preparation import ONE_OF, PLAIN, Expansion, Preparation


class Prepared(nn.Module):
    """A model behind its preparation.

    It takes a silo's inputs, NaN where a value is absent, or with an expansion coded rows, [rows, features] (numbers,
    days, and places of categories). Tokens pass as they are. Sums are in float64, as at the silos.
    """

    def __init__(self, model: nn.Module, preparation: Preparation, expansion: Expansion | None = None) -> None:
        super().__init__()
        self.model = model
        self.fill: Tensor
        self.mean: Tensor
        self.deviation: Tensor
        for name in ("fill", "mean", "deviation"):
            self.register_buffer(name, torch.tensor(getattr(preparation, name), dtype=torch.float64))
        self.expand = None if expansion is None else _Expanded(expansion)
        self._dtype = next(model.parameters()).dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, [rows, outputs]."""
        if not x.is_floating_point():
            outputs: Tensor = self.model(x)
            return outputs
        wide = x.double()
        if self.expand is not None:
            wide = self.expand(wide)
        filled = torch.where(torch.isnan(wide), self.fill, wide)
        found: Tensor = self.model(((filled - self.mean) / self.deviation).to(self._dtype))
        return found


class _Expanded(nn.Module):
    """`Expansion.apply` as a module."""

    def __init__(self, expansion: Expansion) -> None:
        super().__init__()
        self.source: Tensor
        self.codes: Tensor
        self.plain: Tensor
        self.one_of: Tensor
        self.register_buffer("source", torch.tensor(expansion.source))
        self.register_buffer("codes", torch.tensor(expansion.codes))
        self.register_buffer("plain", torch.tensor(expansion.kinds == PLAIN))
        self.register_buffer("one_of", torch.tensor(expansion.kinds == ONE_OF))

    def forward(self, coded: Tensor) -> Tensor:
        """Return inputs, [rows, inputs], NaN where a plain value is absent."""
        value = torch.index_select(coded, 1, self.source)
        marks = torch.where(self.one_of, (value == self.codes).double(), torch.isnan(value).double())
        return torch.where(self.plain, value, marks)
