"""Checks of a model: its size, before it takes memory where possible; its first weights; and its layers."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from moretta.errors import ParameterError, UnsupportedModel


def check_weights(model: nn.Module) -> None:
    """Raise ParameterError, naming a tensor at fault, unless a model has finite parameters and some to train."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ParameterError(
            f"model: expected the module itself, not {type(model).__name__} around it; pass its .module"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ParameterError("model: no parameter requires a gradient; expected at least one to train")
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(value):
            raise ParameterError(
                f"model: `{name}` belongs to a lazy layer, and has no numbers yet; call the model once on a row"
            )
        if value.is_meta:
            raise ParameterError(
                f"model: `{name}` is on the meta device, which holds no numbers; build the model on the CPU"
            )
        if isinstance(value, nn.Parameter) and (value._backward_hooks or value._post_accumulate_grad_hooks):
            raise ParameterError(
                f"model: `{name}` has a hook on its gradient, which copies of the model lose; remove it, and freeze "
                "the tensor (requires_grad_(False)) or change it in forward, where it is read"
            )
        if isinstance(value, nn.Parameter) and not value.numel():
            raise ParameterError(f"model: `{name}`: expected numbers, got shape {list(value.shape)}; leave it out")
        if value.is_complex():  # a cast of the model would make it real
            raise ParameterError(
                f"model: `{name}`: expected real numbers, got {value.dtype}; keep real and imaginary parts as two "
                "tensors, and join them by torch.complex"
            )
        if isinstance(value, nn.Parameter) and not value.isfinite().all():
            raise ParameterError(f"model: `{name}`: expected finite numbers, got NaN or infinity; start it anew")
    saved, needed = model.state_dict(), {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known = needed | {name for name, _ in model.named_buffers(remove_duplicate=False)}
    if wrong := sorted((needed - saved.keys()) | (saved.keys() - known)):
        raise ParameterError(
            f"model: state_dict() {'has' if wrong[0] in saved else 'lacks'} `{wrong[0]}`; expected each parameter and "
            "buffer by its own name, and nothing else: remove the hook, extra state or method that changes it"
        )


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype in which a model computes: that of its first floating-point parameter."""
    return next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer computes as its class does: no hook, such as `prune`'s, replaces its weight."""
    return not (layer._forward_pre_hooks or layer._forward_hooks or is_parametrized(layer))


def copied(model: nn.Module) -> nn.Module:
    """Return a model's copy for training: its tensors have no history, and its layers no sparse gradients.

    Weights that a layer computes from others (`torch.nn.utils.weight_norm`, `prune`) are tensors with a history. Call
    it within `as_by_default`, because a copy made under inference mode can never be trained.

    Raises:
        ParameterError: The model cannot be copied, or only before it runs; the sentence names the layer.
    """
    kept = [leaf for layer in model.modules() for leaf in tree_leaves(dict(vars(layer)))]
    computed = {id(leaf): leaf.detach().clone() for leaf in kept if isinstance(leaf, Tensor) and not leaf.is_leaf}
    try:
        own: nn.Module = copy.deepcopy(model, dict(computed))
    except Exception as error:
        named = list(model.named_modules())
        name = next((name for name, layer in reversed(named) if not _can_be_copied(layer, computed)), "")
        raise ParameterError(
            f"model: {f'layer `{name}`' if name else 'it'} cannot be copied, and each role needs its own "
            f"({type(error).__name__}: {error}".splitlines()[0]
            + "); keep no file, lock, generator or connection in it, or give it a __deepcopy__"
        ) from error
    for name, layer in own.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            layer.sparse = False
        if isinstance(layer, nn.RNNBase) and is_parametrized(layer):
            raise ParameterError(
                f"model: layer `{name}` cannot be copied, because a recurrent layer keeps what its parametrization "
                "computes; use torch.nn.utils.weight_norm or spectral_norm, which are hooks"
            )
    return own


def _can_be_copied(layer: nn.Module, computed: Mapping[int, Tensor]) -> bool:
    try:
        copy.deepcopy(layer, dict(computed))
    except Exception:  # noqa: BLE001  # a user's layer may raise anything; the caller names it
        return False
    return True


@contextmanager
def as_by_default() -> Iterator[None]:
    """Let torch compute as by default, whatever mode a caller has set: no_grad, inference mode or autocast."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        if not torch.cuda.is_available():
            yield
            return
        with torch.autocast("cuda", enabled=False):
            yield


def check_traceable(model: nn.Module) -> None:
    """Raise `moretta.errors.UnsupportedModel` for a module whose layers cannot be inspected or run one by one."""
    for name, module in model.named_modules():
        compiled = isinstance(module, torch.jit.ScriptModule)
        if compiled or hasattr(module, "_orig_mod"):
            raise UnsupportedModel(
                f"{f'`{name}`' if name else 'model'}: expected a module of Python's, whose layers can be run; give it "
                f"as it was before {'torch.jit' if compiled else 'torch.compile'}"
            )


TENSORS = 10_000  # the most that fit a message's header


def build_within(most: int, build: Callable[[], nn.Module], otherwise: str = "") -> nn.Module:
    """Build a model of at most `most` numbers in at most `TENSORS` parameters and buffers.

    It is built twice, first without memory on PyTorch's meta device. If its code cannot do that, its tensors are
    counted while it is built.

    Args:
        most: The most numbers.
        build: Returns the model.
        otherwise: The sentence about a larger model; by default that a site's [limits] are smaller.

    Raises:
        ParameterError: The model is larger.
    """
    with suppress(Exception), _counted(most, otherwise) as sizes, torch.device("meta"):
        build()
    _refuse(sizes, most, otherwise)
    try:
        with _counted(most, otherwise) as sizes:
            return build()
    except Exception:
        _refuse(sizes, most, otherwise)
        raise


@contextmanager
def _counted(most: int, otherwise: str) -> Iterator[list[int]]:
    """Count the numbers of each tensor that this thread registers in a module, and stop at too many."""
    sizes, thread = list[int](), threading.get_ident()

    def count(owner: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is not None and threading.get_ident() == thread:
            sizes.append(tensor.numel())
            _refuse(sizes, most, otherwise)

    handles = [
        hooks.register_module_parameter_registration_hook(count),
        hooks.register_module_buffer_registration_hook(count),
    ]
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()


def _refuse(sizes: list[int], most: int, otherwise: str) -> None:
    if sum(sizes) > most or len(sizes) > TENSORS:
        raise ParameterError(
            otherwise
            or f"[model] of the run has {sum(sizes)} numbers or more in {len(sizes)} tensors, but [limits] "
            f"parameters allows {most} in {TENSORS} here; raise it if this machine is to hold that"
        )
