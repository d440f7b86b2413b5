"""The operations that a model's graph may have, each with checks of its arguments.

A graph may be another's. PyTorch trusts some arguments of its operations: an invalid number for an enumeration ends the
process, and so does a missing dimension. So only listed operations exist, and each call's arguments are checked against
the schema. Tensors are plain, numbers are within range, and memory formats, layouts and dtypes are words. Arithmetic on
sizes accepts numbers alone. A graph can still compute wrong numbers, take long, and request much memory, which is
bounded where it runs (`moretta.engines.process`).
"""

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from moretta.errors import ParameterError

SIZES: Mapping[str, Callable[..., Any]] = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "getitem", "eq", "ne", "lt", "le", "gt", "ge")
}
# ATen's core set without operations that expose uninitialised memory, change tensors in place, or trust offsets
# (`_embedding_bag`, `_fft_c2r`, `empty`).
_ATEN = """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _cdist_forward _fft_r2c _local_scalar_dense _log_softmax
    _native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training _pdist_forward _softmax _to_copy abs acos
    acosh add.Scalar add.Tensor addmm alias amax amin any any.dim any.dims arange.start_step argmax argmin as_strided
    asin asinh atan atan2 atanh avg_pool2d avg_pool3d bitwise_and.Scalar bitwise_and.Tensor bitwise_not
    bitwise_or.Scalar bitwise_or.Tensor bitwise_xor.Scalar bitwise_xor.Tensor bmm cat ceil clamp clamp.Tensor clone
    col2im constant_pad_nd convolution copy cos cosh cumsum diagonal div.Scalar div.Scalar_mode div.Tensor
    div.Tensor_mode elu embedding eq.Scalar eq.Tensor erf exp expand expm1 fill.Scalar flip floor fmod.Scalar
    fmod.Tensor full full_like gather ge.Scalar ge.Tensor gelu grid_sampler_2d gt.Scalar gt.Tensor hardtanh index.Tensor
    index_put index_select isinf isnan le.Scalar le.Tensor leaky_relu log log10 log1p log2 logical_and logical_not
    logical_or logical_xor lt.Scalar lt.Tensor masked_scatter max.dim max_pool2d_with_indices max_pool3d_with_indices
    maximum mean mean.dim min.dim minimum mm mul.Scalar mul.Tensor native_dropout native_group_norm native_layer_norm
    ne.Scalar ne.Tensor neg nonzero permute pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prod prod.dim_int rand randn
    randperm reciprocal reflection_pad1d reflection_pad2d reflection_pad3d relu remainder.Scalar remainder.Tensor repeat
    replication_pad2d replication_pad3d round rsqrt scalar_tensor scatter.src scatter.value scatter_add
    scatter_reduce.two select.int select_scatter sigmoid sign sin sinh slice.Tensor slice_scatter sort split_with_sizes
    sqrt squeeze.dim squeeze.dims sub.Scalar sub.Tensor sum.dim_IntList sym_numel sym_size.int sym_storage_offset
    sym_stride.int tan tanh topk trunc unsqueeze upsample_bilinear2d.vec upsample_nearest2d.vec var.correction var.dim
    view where.self
"""
ATEN = frozenset(_ATEN.split())
DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
FORMATS = {  # memory formats, by the number of dimensions that a tensor must have
    torch.contiguous_format: None,
    torch.preserve_format: None,
    torch.channels_last: 4,
    torch.channels_last_3d: 5,
}
WORDS: Mapping[str, Any] = {str(item): item for item in (*DTYPES, *FORMATS, torch.strided)}
TEXTS = ("none", "tanh", "floor", "trunc", "sum", "prod", "mean", "amax", "amin")
LARGEST = 1 << 31  # of a size or offset, and of the numbers in one result
DIMENSIONS = 16
DIMS = ("dim", "dims", "dim1", "dim2")
POSITIVE = ("kernel_size", "stride", "dilation", "groups", "group", "step")
ENUMERATIONS = {"interpolation_mode": 3, "padding_mode": 3, "compute_mode": 3, "normalization": 3}
SIDES = ("self", "other")  # of operations with two tensors
BOUNDS = ("start", "end")  # of a slice: a number past the end means the end
Sym = (torch.SymInt, torch.SymFloat, torch.SymBool)  # sizes while a graph is exported again


def operation(name: str) -> Callable[..., Any]:
    """Return an operation by its name in a graph, such as "aten.addmm.default" or "sizes.mul".

    Raises:
        ParameterError: It is not on the list; or, when called, it receives invalid arguments.
    """
    home, _, rest = name.partition(".")
    if home == "sizes" and rest in SIZES:
        return SIZES[rest] if rest == "getitem" else partial(_of_sizes, SIZES[rest])
    if home == "aten" and rest.count(".") == 1 and rest.removesuffix(".default") in ATEN:
        packet, _, overload = rest.partition(".")
        result = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if isinstance(result, torch._ops.OpOverload):
            return CheckedOperation(result)
    raise ParameterError(f"`{name:.80}` is not a core operation of PyTorch; a graph may have these alone")


class CheckedOperation:
    """An operation that checks its arguments and its results."""

    def __init__(self, does: torch._ops.OpOverload) -> None:
        self._does, self._packet = does, does._schema.name.removeprefix("aten::")
        self._kinds = {item.name: str(item.real_type) for item in does._schema.arguments}
        self._further = FURTHER.get(self._packet)
        self._numbers = SIDES if self._kinds.keys() >= set(SIDES) else ()

    def __call__(self, *values: Any, **by_name: Any) -> Any:
        """Return the operation's result. Raises `moretta.errors.ParameterError` before it gets invalid arguments."""
        arguments = dict(zip(self._kinds, values, strict=False)) | by_name
        if len(values) + len(by_name) != len(arguments) or not arguments.keys() <= self._kinds.keys():
            raise self._wrong("arguments")
        rank = self._rank(arguments)
        for name, value in arguments.items():
            # PyTorch converts a number to a tensor here: a graph has `x + 1` as a sum of tensors.
            number = name in self._numbers and isinstance(value, (int, float, *Sym))
            if not _fits("number" if number else self._kinds[name], value, name, rank):
                raise self._wrong(name)
        if self._further is not None and not self._further(**arguments):
            raise self._wrong("shapes")
        result = self._does(*values, **by_name)
        for item in result if isinstance(result, tuple | list) else [result]:
            if isinstance(item, Tensor) and not _small(item):
                raise self._wrong("sizes")
        return result

    def _rank(self, arguments: Mapping[str, Any]) -> int:
        """Return the number of dimensions within which a dimension must lie."""
        first = next(iter(arguments.values()), None)
        first = first[0] if isinstance(first, list) and first else first
        return (first.ndim if isinstance(first, Tensor) else 0) + (self._packet == "unsqueeze")

    def _wrong(self, what: str) -> ParameterError:
        return ParameterError(
            f"this graph's `{self._packet}` has {what} that it cannot take; have the model saved again"
        )


def _fits(kind: str, value: Any, name: str, rank: int) -> bool:
    """Return whether a value has an argument's kind and is within its range. rank: of the tensor concerned."""
    if kind.startswith("Optional["):
        return value is None or _fits(kind[9:-1], value, name, rank)
    if kind.startswith("List["):
        if not isinstance(value, list):
            return kind == "List[int]" and _fits("int", value, name, rank)
        if name in DIMS and len({_place(item, rank) for item in value}) < len(value):
            return False
        return len(value) <= LARGEST and all(_fits(kind[5:-1], item, name, rank) for item in value)
    if isinstance(value, Sym):
        return kind in ("int", "number", "float", "bool")
    match kind:
        case "Tensor":
            return isinstance(value, Tensor) and value.layout is torch.strided and value.dtype in DTYPES
        case "int":
            return type(value) is int and _in_range(value, name, rank)
        case "number":
            return isinstance(value, bool | float) or (type(value) is int and -1 << 63 <= value < 1 << 63)
        case "float":
            return type(value) in (int, float) and abs(value) < LARGEST if type(value) is int else type(value) is float
        case "bool":
            return type(value) is bool and not (value and name == "pin_memory")
        case "str":
            return value in TEXTS
        case "ScalarType":
            return value in DTYPES
        case "Layout":
            return value is torch.strided
        case "MemoryFormat":
            return isinstance(value, torch.memory_format) and FORMATS.get(value, -1) in (None, rank)
        case "Device":
            return isinstance(value, torch.device)
    return False


def _in_range(value: int, name: str, rank: int) -> bool:
    if name in DIMS:
        return -max(rank, 1) <= value < max(rank, 1)
    if name in ENUMERATIONS:
        return 0 <= value < ENUMERATIONS[name]
    if name in BOUNDS:
        return -1 << 63 <= value < 1 << 63
    return (1 if name in POSITIVE else -LARGEST) <= value < LARGEST


def _place(dim: Any, rank: int) -> Any:
    """Return a dimension counted from the front, if it is a number."""
    return dim % rank if type(dim) is int and rank else dim


def _small(item: Tensor) -> bool:
    """Return whether a result has a size that models have; a size that is still unknown is checked later."""
    sizes = list(item.shape)
    known = [size for size in sizes if type(size) is int]
    return len(sizes) <= DIMENSIONS and max(known, default=0) < LARGEST and math.prod(known) < LARGEST


def _of_sizes(does: Callable[..., Any], *values: Any) -> Any:
    """Return the result of arithmetic on numbers; text, lists and huge numbers could fill the memory."""
    known = [item for item in values if not isinstance(item, Sym)]
    if not all(isinstance(item, int | float) and abs(item) < 1 << 63 for item in known):
        raise ParameterError("this graph computes with a value that is not a size; have the model saved again")
    return does(*values)


# -- Checks of single operations ---------------------------------------------------------------------------------------


def _batch_norm(input: Tensor, training: bool = True, **rest: Any) -> bool:
    """Return whether a norm's tensors have one number a channel; it would read beyond the end of shorter ones.

    A norm without statistics must use the batch's, or it would read absent ones.
    """
    return training is True and _by_channel(input, rest)


def _by_channel(input: Tensor, rest: Mapping[str, Any]) -> bool:
    tensors = [tensor for tensor in rest.values() if isinstance(tensor, Tensor)]
    return input.ndim >= 2 and all(tensor.shape == input.shape[1:2] for tensor in tensors)


def _group_norm(input: Tensor, N: Any, C: Any, HxW: Any, group: Any, **rest: Any) -> bool:
    """Return whether a norm's arguments equal its input's sizes, and its tensors have one number a channel."""
    sizes = zip((N, C), input.shape[:2], strict=False)
    same = all(argument == size for argument, size in sizes if type(argument) is int and type(size) is int)
    return same and _by_channel(input, rest)


def _pairs(self: Tensor, p: float = 2.0) -> bool:
    plain = self.ndim == 2 and self.is_floating_point() and self.is_contiguous()
    return plain and p >= 0 and self.shape[0] ** 2 < LARGEST


def _division(self: Any, other: Any, **rest: Any) -> bool:
    """Return whether no integer is divided by -1: the processor stops at the least integer."""
    if not all(
        not item.is_floating_point() if isinstance(item, Tensor) else type(item) is int for item in (self, other)
    ):
        return True
    if isinstance(other, Tensor):
        return isinstance(other, FakeTensor) or not bool((other == -1).any())
    return bool(other != -1)


FURTHER: Mapping[str, Callable[..., bool]] = {
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "native_group_norm": _group_norm,
    "_pdist_forward": _pairs,
    # It does not check for negative dimensions, because its usual callers count them from the front.
    "_fft_r2c": lambda self, dim, **rest: bool(dim) and min(dim) >= 0,
    "div": lambda self, other, rounding_mode=None: rounding_mode is None or _division(self, other),
    "fmod": _division,
    "remainder": _division,
}
