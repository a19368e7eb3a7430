"""Argument checks: every error names the argument, its value and the requirement.

The checks run before anything is sent, so that an invalid call on one rank does not leave its peers waiting in an op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from fused_tp.backends.gemm import bias_grad
from fused_tp.backends.grouped import Routing
from fused_tp.core.partition import shard_range

_FLOAT_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def check_local(name: str, t: Any) -> None:
    """Check that `t` is a dense tensor local to this rank, of any dtype."""
    is_plain = type(t) is Tensor or type(t) is Parameter
    if not is_plain and not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a Tensor, not {type(t).__name__}.")
    if not is_dynamo_compiling():
        _check_memory(name, t, is_plain)
    if not is_plain and hasattr(t, "to_local"):  # not isinstance: importing DTensor costs every program 0.6 s
        raise TypeError(f"{name} is a {type(t).__name__}; pass this rank's shard, {name}.to_local().")


def _check_memory(name: str, t: Tensor, is_plain: bool) -> None:
    """Check that `t` is stored in dense memory, which native code and peers read.

    The memory address is checked only with `is_plain`, for tensors that are not of a subclass of Tensor.
    """
    if t.layout is not torch.strided or t.is_nested:
        kind_name = "nested" if t.is_nested else str(t.layout).removeprefix("torch.").removeprefix("_")
        raise TypeError(
            f"{name} is a {kind_name} tensor; pass a dense tensor ({name}.to_dense(), or to_padded_tensor)."
        )
    if t.is_quantized:
        raise TypeError(f"{name} is quantized; pass {name}.dequantize().")
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        if not torch._C._are_functorch_transforms_active():
            raise TypeError(
                f"{name} was created in a torch.func transform that has exited; return {name} from the transform."
            )
    elif is_plain and not t.is_meta and t.numel() and not (t.data_ptr() or t._is_zerotensor()):
        raise ValueError(
            f"{name} of shape {tuple(t.shape)} has no memory: its storage was freed. Allocate a new tensor."
        )


def check_tensor(name: str, t: Any, *, min_dims: int = 1) -> None:
    """Check that `t` is a local floating-point tensor with at least `min_dims` dims."""
    check_local(name, t)
    if t.dtype not in _FLOAT_DTYPES:
        raise TypeError(f"{name} has dtype {t.dtype}; the op supports float16, bfloat16, float32 and float64.")
    if t.ndim < min_dims:
        raise ValueError(f"{name} has shape {tuple(t.shape)}; it needs at least {min_dims} dims.")


def check_like(name: str, t: Any, template_name: str, template: Tensor) -> None:
    """Check that `t` has the dtype and device of `template`."""
    check_tensor(name, t)
    if t.dtype != template.dtype:
        raise TypeError(f"{name} has dtype {t.dtype}, but {template_name} has {template.dtype}; convert one of them.")
    check_device(name, t, template_name, template)


def check_device(name: str, t: Tensor, template_name: str, template: Tensor) -> None:
    """Check that `t` is on the device of `template`."""
    if t.device != template.device:
        raise ValueError(f"{name} is on {t.device}, but {template_name} is on {template.device}; move one of them.")


def check_shape(name: str, t: Tensor, shape: Sequence[int], reason: str) -> None:
    """Check that `t` has exactly `shape`; `reason` explains the shape in the error."""
    if tuple(t.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(t.shape)}; it must be {tuple(shape)}, {reason}.")


def check_linear(x_name: str, x: Tensor, weight: Any, bias: Any, suffix: str = "") -> None:
    """Check `x` [..., K], `weight` [N, K] and `bias`, [N] or None. `suffix` is the index of a list, such as "[1]"."""
    check_tensor(x_name, x)
    check_like(f"weight{suffix}", weight, x_name, x)
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight{suffix} has shape {tuple(weight.shape)}; it must be [out, {x.shape[-1]}], "
            f"because {x_name} has shape {tuple(x.shape)}."
        )
    if bias is not None:
        check_like(f"bias{suffix}", bias, x_name, x)
        check_shape(f"bias{suffix}", bias, weight.shape[:1], f"one for each row of weight{suffix}")


def check_float8(float8: Any, x_name: str, x: Tensor) -> None:
    """Check that `float8` names a recipe for matmuls with `x`."""
    check_float8_recipe(float8)
    if x.dtype == torch.float64:
        raise TypeError(f"{x_name} has dtype float64; float8={float8!r} supports float16, bfloat16 and float32.")
    if x.is_cuda and torch.version.hip is None and (arch := torch.cuda.get_device_capability(x.device)) < (8, 9):
        raise ValueError(
            f"float8={float8!r} needs a GPU with float8 matmuls, sm_89 or later; {x_name} is on sm_{arch[0]}{arch[1]}. "
            "Omit float8."
        )


def check_float8_recipe(float8: Any) -> None:
    """Check that `float8` is the name of a recipe."""
    from fused_tp.backends.float8 import RECIPES  # needed only here

    if not isinstance(float8, str):
        raise TypeError(f"float8 must be the name of a recipe or None, not {type(float8).__name__}.")
    if float8 not in RECIPES:
        raise ValueError(f"float8 is {float8!r}; it must be one of {', '.join(map(repr, RECIPES))}.")


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Dtype to which autocast casts matmul operands; None if autocast is off or does not apply (float64)."""
    # torch raises for the meta device, which autocast does not support.
    if isinstance(x, Tensor) and (device := x.device.type) != "meta" and torch.is_autocast_enabled(device):
        return None if x.dtype == torch.float64 else torch.get_autocast_dtype(device)
    return None


def cast(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    """Cast floating-point tensors to `dtype`, differentiably. Return other values unchanged: the checks reject them."""
    return [t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]


def checked_linear(x_name: str, x: Any, weight: Any, bias: Any, *, min_dims: int = 1) -> tuple[Any, Any, Any]:
    """Cast `x`, `weight` and `bias` to autocast's dtype and check that their shapes, dtypes and devices match."""
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight, bias = cast(dtype, x, weight, bias)
    check_tensor(x_name, x, min_dims=min_dims)
    check_linear(x_name, x, weight, bias)
    return x, weight, bias


def checked_linears(
    x_name: str, x: Any, weights: list[Any], biases: list[Any], has_bias: Sequence[bool], *, min_dims: int = 1
) -> tuple[Any, list[Any], list[Any]]:
    """Apply `checked_linear` to every weight, and to its bias if it has one."""
    dtype = autocast_dtype(x)
    if dtype is not None:
        (x,), weights, biases = cast(dtype, x), cast(dtype, *weights), cast(dtype, *biases)
    check_tensor(x_name, x, min_dims=min_dims)
    for i, (weight, bias) in enumerate(zip(weights, spread_biases(biases, has_bias), strict=True)):
        check_linear(x_name, x, weight, bias, f"[{i}]" if len(weights) > 1 else "")
    return x, weights, biases


def checked_grouped(
    x_name: str, x: Any, weight: Any, tokens: Any, offsets: Any, scale: Any = None, *, min_dims: int = 1
) -> tuple[Any, Any]:
    """Cast `x` [..., K] and `weight` [experts, N, K] to autocast's dtype; check them and the routing tensors."""
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight = cast(dtype, x, weight)
    check_tensor(x_name, x, min_dims=min_dims)
    check_like("weight", weight, x_name, x)
    if weight.ndim != 3 or weight.shape[2] != x.shape[-1] or not len(weight):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; it must be [experts, out, {x.shape[-1]}], because {x_name} has "
            f"shape {tuple(x.shape)}."
        )
    for name, routing_tensor, required_dtype in (("tokens", tokens, torch.int64), ("offsets", offsets, torch.int32)):
        check_local(name, routing_tensor)
        check_device(name, routing_tensor, x_name, x)
        if routing_tensor.dtype != required_dtype or routing_tensor.ndim != 1:
            raise TypeError(
                f"{name} is {routing_tensor.dtype} of shape {tuple(routing_tensor.shape)}; it must be {required_dtype} "
                "with one dim."
            )
    check_shape("offsets", offsets, weight.shape[:1], "one for each expert of weight")
    if scale is not None:
        check_tensor("scale", scale)
        check_device("scale", scale, x_name, x)
        check_shape("scale", scale, tokens.shape, "one for each row, like tokens")
    return x, weight


def check_rows(x: Tensor, tokens: Tensor) -> None:
    """Check that `x` [S, k] has one row for each of `tokens` [S]."""
    if x.ndim != 2 or len(x) != len(tokens):
        raise ValueError(
            f"x has shape {tuple(x.shape)}; it must be [{len(tokens)}, features], one row for each entry of tokens."
        )


def checked_sizes(name: str, sizes: Any) -> list[int]:
    """Check that `sizes` is a nonempty sequence of lengths, and return it as a list."""
    if not isinstance(sizes, (list, tuple)):
        raise TypeError(f"{name} must be a sequence of ints, not {type(sizes).__name__}.")
    if not sizes:
        raise ValueError(f"{name} is empty; it needs at least one dim.")
    for size in sizes:
        check_int(name, size, 0)
    return list(sizes)


def make_example_routing(x: Tensor, weight: Tensor) -> Routing:
    """Uninitialized routing with one row per token of `x`, for `explain`, which reads no values."""
    return Routing(
        torch.empty(prod(x.shape[:-1]), dtype=torch.int64, device=x.device),
        torch.empty(len(weight), dtype=torch.int32, device=x.device),
    )


def to_lists(weight: Any, bias: Any) -> tuple[list[Any], list[Any], list[bool]]:
    """Return (weights, biases that are not None, has_bias): three lists, the last with one bool per weight.

    Biases that are None are omitted because autograd does not track lists that contain None.
    """
    if not isinstance(weight, (list, tuple)):
        if isinstance(bias, (list, tuple)):
            raise TypeError(f"bias is a {type(bias).__name__}, but weight is a single tensor; pass one bias or None.")
        return [weight], [] if bias is None else [bias], [bias is not None]
    if not weight:
        raise ValueError("weight is an empty list; pass at least one weight.")
    if bias is None:
        return list(weight), [], [False] * len(weight)
    if not isinstance(bias, (list, tuple)) or len(bias) != len(weight):
        bias_text = f"a list of {len(bias)}" if isinstance(bias, (list, tuple)) else type(bias).__name__
        raise ValueError(
            f"bias is {bias_text}, but weight is a list of {len(weight)}; pass a bias or None for each weight."
        )
    return list(weight), [b for b in bias if b is not None], [b is not None for b in bias]


def spread_biases(biases: Sequence[Tensor], has_bias: Sequence[bool]) -> list[Tensor | None]:
    """Undo `to_lists`: return a list with a bias or None for each weight."""
    bias_per_weight: list[Tensor | None] = [None] * len(has_bias)
    if biases:
        remaining_biases = iter(biases)
        for index, is_present in enumerate(has_bias):
            if is_present:
                bias_per_weight[index] = next(remaining_biases)
    return bias_per_weight


def bias_grads(
    d_outputs: Sequence[Tensor | None], has_bias: Sequence[bool], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return a gradient or None for each bias that is not None."""
    bias_d_outputs = [d for d, is_present in zip(d_outputs, has_bias, strict=False) if is_present]
    return [bias_grad(d) if needed and d is not None else None for d, needed in zip(bias_d_outputs, needs, strict=True)]


def fake_grads(x: Tensor, needs_x: bool, weights: Sequence[Tensor], needs_weight: Sequence[bool]) -> list[Tensor]:
    """Return fake gradients: of `x` (empty if it is not needed), and of the weights that need a gradient."""
    d_weights = [w.new_empty(w.shape) for w, needed in zip(weights, needs_weight, strict=True) if needed]
    return [x.new_empty(x.shape if needs_x else 0), *d_weights]


def fake_grouped_grads(x: Tensor, needs_x: bool, weight: Tensor, needs_weight: bool) -> tuple[Tensor, Tensor]:
    """Return fake gradients of `x` and of the experts' weight; a gradient that is not needed is empty."""
    return x.new_empty(x.shape if needs_x else 0), x.new_empty(weight.shape if needs_weight else 0)


def normalize_token_dim(name: str, dim: Any, t_name: str, t: Tensor) -> int:
    """Normalize `dim` of `t` to be non-negative. Raise for the last dim, which is the feature dim of the matmul."""
    dim = normalize_dim(name, dim, t_name, t)
    if dim == t.ndim - 1:
        raise ValueError(
            f"{name}={dim} is the last dim of {t_name}, the feature dim; pass a token dim, 0 to {t.ndim - 2}."
        )
    return dim


def normalize_dim(name: str, dim: Any, t_name: str, t: Tensor) -> int:
    """Normalize `dim` of `t` to be non-negative."""
    check_int(name, dim)
    if not -t.ndim <= dim < t.ndim:
        raise ValueError(f"{name}={dim} is out of range for {t_name} of shape {tuple(t.shape)}.")
    return int(dim % t.ndim)


def resized_shape(t: Tensor, dim: int, size: int) -> list[int]:
    """Shape of `t` with `dim` replaced by `size`."""
    return [*t.shape[:dim], size, *t.shape[dim + 1 :]]


def is_int(value: Any) -> bool:
    """True if `value` is an integer and not a bool."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def check_int(name: str, value: Any, minimum: int | None = None, suffix: str = "") -> None:
    """Check that `value` is an integer (not a bool) of at least `minimum`; `suffix` ends the error message."""
    if not is_int(value):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}.")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} is {value}; it must be at least {minimum}{suffix}.")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} is {value}; it must fit in 64 bits.")


def check_integers(name: str, t: Any) -> None:
    """Check that `t` is a local tensor of int32 or int64."""
    check_local(name, t)
    if t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {t.dtype}; it must be int32 or int64.")


def checked_number(
    name: str, value: Any, is_valid: Callable[[float], bool], requirement: str, type_name: str = "a float"
) -> float:
    """Convert `value` to float and check it with `is_valid`; `requirement` describes valid values in the message."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {type_name}, not {type(value).__name__}.")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} is an int too large for a float; it must be {requirement}.") from None
    if not is_valid(number):
        raise ValueError(f"{name} is {value}; it must be {requirement}.")
    return number


def check_bool(**values: Any) -> None:
    """Check that each value is a bool. Other types are rejected because, for example, the string "False" is true."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, not {type(value).__name__}.")


def total_size(name: str, total: Any, length: int, world_size: int, rank: int, owner: str) -> int:
    """Return the length over all ranks of a dim that has `length` on this rank.

    `total` is the length that the caller passed, which is checked; None means that all shards are equal.
    """
    if total is None:
        return length * world_size
    check_int(name, total)
    start, stop = shard_range(total, world_size, rank) if total >= 0 else (0, -1)
    if stop - start != length:
        raise ValueError(
            f"{name}={total} sharded over {world_size} ranks by torch.chunk assigns {max(0, stop - start)} to rank "
            f"{rank}, but {owner} has length {length}. {name} must be the sum of the lengths on all ranks."
        )
    return int(total)
