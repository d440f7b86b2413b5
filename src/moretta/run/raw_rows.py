"""Models that take raw rows: they fill in absent values, scale, compute, and undo the targets' scale."""

from collections.abc import Callable
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.data.tables.preparation import ONE_OF, PLAIN, Expansion, Preparation
from moretta.models.checks import dtype_of


class _Uncast(nn.Module):
    """A module whose `exact` buffers are moved, but not cast, by `.float()` and the like.

    Such calls are meant for the model, not for the preparation of its rows.
    """

    exact: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept = {name: self.get_buffer(name) for name in self.exact}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            self.register_buffer(name, buffer.to(self.get_buffer(name).device))
        return self


class Prepared(_Uncast):
    """A model behind its preparation.

    It takes a silo's inputs, NaN for an absent value, or with an expansion coded rows, [rows, features] (numbers, days,
    and places of categories). Tokens pass unchanged. Sums are in float64, as at the silos. A row that predictions
    refuse has outputs of NaN: with a forbidden absence, an infinite value, or an invalid place of a category.

    Args:
        may_lack: Whether a value may be absent: bool[columns], or [1] for all columns.
    """

    exact = ("fill", "mean", "deviation")

    def __init__(
        self,
        model: nn.Module,
        preparation: Preparation,
        may_lack: NDArray[np.bool_],
        expansion: Expansion | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.fill: Tensor
        self.mean: Tensor
        self.deviation: Tensor
        for name in self.exact:
            self.register_buffer(name, torch.tensor(getattr(preparation, name), dtype=torch.float64))
        self.whole: Tensor
        self.register_buffer("whole", torch.tensor(~may_lack))
        self.expand = None if expansion is None else Expanded(expansion)
        self.unscale = Unscaled(preparation) if preparation.scales_targets else None
        self.like: Tensor  # follows casts of the model; a scripted forward cannot read parameters' dtypes
        self.register_buffer("like", torch.zeros((), dtype=dtype_of(model)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, [rows, outputs]."""
        if not x.is_floating_point():
            return self._outputs(x)
        wide = x.double()
        if self.expand is not None:
            wide = self.expand(wide)
        absent = torch.isnan(wide)
        wrong = ((absent & self.whole) | torch.isinf(wide)).flatten(1).any(1, keepdim=True)
        filled = torch.where(absent, self.fill, wide)
        outputs = self._outputs(((filled - self.mean) / self.deviation).to(self.like.dtype))
        # Applied to the outputs, because a NaN in the inputs may be lost: onnxruntime's ReLU turns it into 0.
        return torch.where(wrong, torch.nan, outputs)

    def _outputs(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.model(x)
        if self.unscale is not None:
            outputs = self.unscale(outputs)
        return outputs


class Unscaled(_Uncast):
    """`Preparation.unscaled` as a module."""

    exact = ("mean", "deviation")

    def __init__(self, preparation: Preparation) -> None:
        super().__init__()
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.tensor(preparation.target_mean, dtype=torch.float64))
        self.register_buffer("deviation", torch.tensor(preparation.target_deviation, dtype=torch.float64))

    def forward(self, outputs: Tensor) -> Tensor:
        """Return outputs, [rows, outputs], in the targets' own units."""
        return (outputs.double() * self.deviation + self.mean).to(outputs.dtype)


class Expanded(_Uncast):
    """`Expansion.apply` as a module."""

    exact = ("codes", "category")

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
        categories = np.unique(expansion.source[expansion.kinds == ONE_OF])
        # float64[inputs, categories], 1 if a column of zeros and ones belongs to the category.
        self.category: Tensor
        self.register_buffer("category", torch.tensor(expansion.source[:, None] == categories, dtype=torch.float64))

    def forward(self, coded: Tensor) -> Tensor:
        """Return inputs, [rows, inputs]: NaN for an absent plain value, infinite for a category without a column."""
        value = torch.index_select(coded, 1, self.source)
        marks = torch.where(self.one_of, (value == self.codes).double(), torch.isnan(value).double())
        if self.category.shape[1]:
            wrong = (marks @ self.category != 1).any(1, keepdim=True)
            marks = torch.where(wrong, torch.inf, marks)
        return torch.where(self.plain, value, marks)
