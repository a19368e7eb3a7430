"""Add noise to constant parameters for a comparison, because constants hide how they are used.

Norms start at 1; biases, gates, output layers and the second matrix of LoRA start at 0. A gate of 0 makes the outputs
and gradients of its branch 0. It may stay 0 for several steps, for example while the learning rate is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fused_tp.nn.sharding import as_dtensors, shard_like

_NOISE_SCALE = 0.1


@contextmanager
def noise_on_constants(model: nn.Module, outcome: Any) -> Iterator[None]:
    """Add noise to constant parameters of `model`, which the caller shards; restore their constants on exit.

    Args:
        outcome: `outcome.sharded.named_parameters()` are the parameters after sharding.
    """
    noise, changed_parameters = _Noise(), dict[str, tuple[nn.Parameter, float]]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            constant = _constant_value(parameter)
            if constant is not None:
                changed_parameters[name] = parameter, constant
                parameter.add_(noise.like(parameter))
    try:
        yield
    finally:
        sharded_parameters = dict(outcome.sharded_model.named_parameters())
        with torch.no_grad():
            for name, (parameter, constant) in changed_parameters.items():
                for target in {
                    id(target): target for target in (parameter, sharded_parameters.get(name)) if target is not None
                }.values():
                    target.fill_(constant)  # also in the unsharded parameter, which the caller may still use


@contextmanager
def noise_on_sharded_constants(model: nn.Module, full_parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Add the same noise to constant parameters of the sharded `model` and to `full_parameters`, their full copies.

    On exit, the parameters of `model` are as before; `full_parameters` keep the noise.
    """
    noise, saved_values = _Noise(), list[tuple[Tensor, Tensor]]()
    dtensors = as_dtensors(model)
    try:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                full_parameter = full_parameters[name]
                if _constant_value(full_parameter) is None:
                    continue
                full_parameter.add_(noise.like(full_parameter))
                sharded_parameter: Any = dtensors.get(id(parameter), parameter)
                shard = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
                saved_values.append((shard.data, shard.detach().clone()))
                # `data` has a version counter of its own: autograd may have saved the parameter for a backward pass.
                shard.data.copy_(shard_like(full_parameter, sharded_parameter))
        yield
    finally:
        with torch.no_grad():
            for data, values in saved_values:
                data.copy_(values)


class _Noise:
    """Sequence of pseudo-random tensors, equal on all ranks that ask for equal shapes."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(1)

    def like(self, t: Tensor) -> Tensor:
        noise = torch.randn(t.shape, generator=self._generator, dtype=torch.float32, device="cpu") * _NOISE_SCALE
        return noise.to(t.device, t.dtype)


def _constant_value(parameter: Tensor) -> float | None:
    """Return the value that all elements share, or None. A single element counts as constant if it is 0 or 1."""
    is_dense = type(parameter).__torch_dispatch__ is Tensor.__torch_dispatch__ and parameter.layout == torch.strided
    if not is_dense or not parameter.is_floating_point() or not parameter.numel() or parameter.is_inference():
        return None
    values = parameter.detach()
    # Compare the first and the last value before all others: they differ in most tensors.
    first_value, last_value = (values[(i,) * parameter.ndim] for i in (0, -1))
    if not bool(first_value == last_value) or (values.numel() == 1 and float(first_value) not in (0.0, 1.0)):
        return None
    return float(first_value) if bool((values == first_value).all()) else None
