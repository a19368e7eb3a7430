"""Replacements for torch's tensor parallel styles that overlap the collective with the matmul.

Drop-in for `torch.distributed.tensor.parallel`: same keywords, same defaults, same parameters (DTensors), same outputs
and gradients; a plan for `parallelize_module` may mix both kinds. Linear layers run differently:

| style               | input_layouts | output_layouts | torch                         | here                     |
|---------------------|---------------|----------------|-------------------------------|--------------------------|
| FusedColwise        | Replicate     | Shard(-1)      | matmul; backward: all-reduce  | column_parallel_matmul   |
| FusedColwise        | Shard(seq)    | Shard(-1)      | all-gather, then matmul       | all_gather_matmul        |
| FusedRowwise        | Shard(-1)     | Replicate      | matmul, then all-reduce       | matmul_all_reduce        |
| FusedRowwise        | Shard(-1)     | Shard(seq)     | matmul, then reduce-scatter   | matmul_reduce_scatter    |

DTensor's redistribute converts other layouts to one of these. If the input of a column-wise layer is a Replicate()
DTensor, as after PrepareModuleInput, the layer leaves the sum of the gradient to DTensor, as torch does: all readers of
that DTensor share one sum, which is a reduce-scatter if the DTensor was gathered. A module keeps its identity and its
hooks: its class becomes a subclass of its previous class, with another forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.placement_types import Placement

from fused_tp.nn.embedding import check_ids_in_range, check_integer_ids, sharded_lookup
from fused_tp.nn.linear import check_floating, check_width, column_matmul, row_matmul
from fused_tp.nn.norm import sequence_parallel_
from fused_tp.nn.optimizers import record_replaced_parameters
from fused_tp.nn.sharding import as_dtensor, check_mesh, local_shard
from fused_tp.nn.single_device_writes import write_as_one_process


class _FusedStyle(ParallelStyle):
    """Base of both styles; `style_name` and the class of the module select an entry of `MODULES`."""

    style_name: str
    input_layouts: tuple[Placement]
    output_layouts: tuple[Placement]
    use_local_output: bool

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        for name, layout in (("input_layouts", input_layouts), ("output_layouts", output_layouts)):
            if layout is not None and not isinstance(layout, Placement):
                raise TypeError(f"{name} must be a Placement (Replicate(), Shard(dim)), got {type(layout).__name__}.")
        if isinstance(output_layouts, Partial):
            raise ValueError(
                "output_layouts=Partial() is not supported: the sum over ranks is fused with the matmul. Use "
                "Replicate() or Shard(dim)."
            )
        keywords: dict[str, Any] = {"input_layouts": input_layouts, "output_layouts": output_layouts}
        keywords["use_local_output"] = use_local_output
        super().__init__(**keywords)  # the __init__ of torch's style sets the defaults

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_mesh(device_mesh)
        placements, mixin = MODULES[self.style_name, _base_class(module, type(self).__name__)]
        _shard_parameters(module, device_mesh, placements, self.src_data_rank)
        module_class = type(module)
        if (mixin, module_class) not in _styled_classes:
            _styled_classes[mixin, module_class] = type(mixin.__name__.lstrip("_"), (mixin, module_class), {})
        styled_module = cast(_StyledModule, module)
        styled_module._style, styled_module._style_mesh = self, device_mesh
        module.__class__ = _styled_classes[mixin, module_class]
        return module


class FusedColwiseParallel(_FusedStyle, ColwiseParallel):
    """`ColwiseParallel` for nn.Linear and nn.Embedding that overlaps the collective with the matmul.

    Args:
        input_layouts: placement of the module's input if it is a plain tensor, default Replicate(). Shard(d) of a dim
            before the last (the sequence) is gathered while the matmul runs.
        output_layouts: placement of the output, default Shard(-1).
        use_local_output: return a torch.Tensor instead of a DTensor.

    Raises:
        TypeError: the module is of another kind, or a layout is not a Placement.
        ValueError: a subclass overrides forward, parameters are already DTensors, or the output layout is partial.

    Example:
        >>> plan = {"up": FusedColwiseParallel(), "down": FusedRowwiseParallel()}
        >>> parallelize_module(mlp, mesh["tp"], plan)
    """

    style_name = "column"


class FusedRowwiseParallel(_FusedStyle, RowwiseParallel):
    """`RowwiseParallel` for nn.Linear and nn.Embedding that overlaps the collective with the matmul.

    Args:
        input_layouts: placement of the module's input if it is a plain tensor, default Shard(-1), the features that a
            column-wise layer returns. As in torch, an embedding whose ids are Replicate() needs it explicitly.
        output_layouts: placement of the output, default Replicate(). Shard(d) of a dim before the last (the sequence)
            is reduce-scattered while the matmul runs.
        use_local_output: return a torch.Tensor instead of a DTensor.

    Raises: as FusedColwiseParallel; IndexError for ids outside an embedding's table.

    Example: see FusedColwiseParallel.
    """

    style_name = "row"


class FusedSequenceParallel(SequenceParallel):
    """`SequenceParallel` for norms and dropout: the module runs on this rank's shard of the sequence, as plain tensors.

    torch runs each step of the norm as DTensor operations; here the norm runs directly on the local shard. Its backward
    sums the gradients of the (replicated) parameters over the ranks, so they are Replicate() DTensors. torch's style
    leaves Partial() gradients from this rank's tokens, which an optimizer over DTensors sums in its step.

    Args:
        sequence_dim: sequence dim of the input, default 1.
        use_local_output: return a torch.Tensor instead of a DTensor, default False as in torch.

    Raises:
        ValueError: the module has submodules.
        TypeError: parameters are already DTensors, or the input is not a Tensor.

    Example:
        >>> parallelize_module(block, mesh["tp"], {"norm": FusedSequenceParallel(use_local_output=True)})
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        sequence_parallel_(module, check_mesh(device_mesh))
        sharding = self.sequence_sharding[0]

        def to_local_shard(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x = inputs[0] if inputs else None
            if not isinstance(x, Tensor):
                raise TypeError(f"the first input of {type(module).__name__} must be a Tensor, got {type(x).__name__}.")
            if isinstance(x, DTensor):
                full_shape = x.shape
                x = x.redistribute(placements=[sharding]).to_local()
                # Shards may differ in length, so the global shape is recorded for the output. Record it on a view,
                # because the local tensor itself belongs to the DTensor.
                x = x.view_as(x)
                cast(Any, x)._fused_tp_full_shape = full_shape
            return (x, *inputs[1:])

        def to_dtensor(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            full_shape = getattr(inputs[0], "_fused_tp_full_shape", None)
            if full_shape is None:
                return DTensor.from_local(output, device_mesh, [sharding], run_check=False)
            shape = list(output.shape)
            shape[sharding.dim] = full_shape[sharding.dim]
            return as_dtensor(output, device_mesh, sharding, tuple(shape))

        module.register_forward_pre_hook(to_local_shard)
        if not self.use_local_output:
            module.register_forward_hook(to_dtensor)
        return module


# ---- classes of styled modules --------------------------------------------------------------------------------------


class _StyledModule(nn.Module):
    """Mixin for the class of a module that a style was applied to."""

    _style: _FusedStyle
    _style_mesh: DeviceMesh

    def _input_layout(self, x: Tensor) -> Placement:
        return _with_positive_dim(x.placements[0] if isinstance(x, DTensor) else self._style.input_layouts[0], x.ndim)

    def _local_input(self, x: Tensor, target_layout: Placement, grad: Placement | None = None) -> Tensor:
        """Return this rank's shard of the input in the layout `target_layout`.

        The gradient of a DTensor input has the layout `grad`, default `target_layout`.
        """
        if self._input_layout(x) != target_layout:
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, self._style_mesh, self._style.input_layouts, run_check=False)
            x = x.redistribute(placements=[target_layout])
        return x.to_local(grad_placements=[grad or target_layout]) if isinstance(x, DTensor) else x

    def _convert_output(self, y: Tensor, layout: Placement, shape: tuple[int, ...]) -> Tensor:
        """Convert `y`, this rank's shard in `layout` of an output of global `shape`, to the style's output layout."""
        target_layout = _with_positive_dim(self._style.output_layouts[0], y.ndim)
        if layout == target_layout and self._style.use_local_output:
            return y
        out = as_dtensor(y, self._style_mesh, layout, shape)
        if layout != target_layout:
            out = out.redistribute(placements=[target_layout])
        return out.to_local() if self._style.use_local_output else out

    def _reduce_output(self, reduce: Callable[[int | None], Tensor], shape: tuple[int, ...], num_dims: int) -> Tensor:
        """Return the output of global `shape` in the style's output layout.

        `reduce(dim)` reduce-scatters it along `dim`, one of its first `num_dims` dims; `reduce(None)` all-reduces it.
        """
        dim = _shard_dim(_with_positive_dim(self._style.output_layouts[0], len(shape)), num_dims)
        return self._convert_output(reduce(dim), Replicate() if dim is None else Shard(dim), shape)


class _ColumnLinear(_StyledModule):
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        linear = cast(nn.Linear, self)
        check_floating(x)
        weight, bias = local_shard(self.weight), local_shard(self.bias)
        layout = self._input_layout(x)
        dim = _shard_dim(layout, x.ndim - 1)
        if dim is None and (isinstance(x, DTensor) or layout != Replicate()):
            # Leave the sum of the gradient to DTensor, which does it once for all layers that read x, and by
            # reduce-scatter if x was gathered.
            x = self._local_input(x, Replicate(), grad=Partial())
            check_width(x, linear.in_features, "in_features")
            y = F.linear(x, weight, bias)
        else:
            gather_size = x.shape[dim] if dim is not None and isinstance(x, DTensor) else None
            x = self._local_input(x, layout)
            check_width(x, linear.in_features, "in_features")
            y = column_matmul(x, weight, bias, self._style_mesh, dim, gather_size)
        return self._convert_output(y, Shard(y.ndim - 1), (*y.shape[:-1], linear.out_features))


class _RowLinear(_StyledModule):
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        linear = cast(nn.Linear, self)
        check_floating(x)
        weight = local_shard(self.weight)
        x = self._local_input(x, Shard(x.ndim - 1))
        check_width(x, weight.shape[1], "this rank's part of in_features")
        reduce = partial(row_matmul, x, weight, local_shard(self.bias), self._style_mesh)
        return self._reduce_output(reduce, (*x.shape[:-1], linear.out_features), x.ndim - 1)


class _ColumnEmbedding(_StyledModule):
    def forward(self, ids: Tensor) -> Tensor:
        embedding = cast(nn.Embedding, self)
        check_integer_ids(ids)
        y = F.embedding(self._local_input(ids, Replicate()), local_shard(embedding.weight), embedding.padding_idx)
        return self._convert_output(y, Shard(y.ndim - 1), (*y.shape[:-1], embedding.embedding_dim))


class _RowEmbedding(_StyledModule):
    def forward(self, ids: Tensor) -> Tensor:
        embedding = cast(nn.Embedding, self)
        check_integer_ids(ids)
        ids = self._local_input(ids, Replicate())
        check_ids_in_range(ids, embedding.num_embeddings)
        look_up = partial(
            sharded_lookup, ids, local_shard(embedding.weight), embedding.num_embeddings, embedding.padding_idx
        )
        return self._reduce_output(
            partial(look_up, self._style_mesh), (*ids.shape, embedding.embedding_dim), ids.ndim + 1
        )


# Maps (style, class of the module) to (placements of its parameters, class that defines its forward).
MODULES: dict[tuple[str, type[nn.Module]], tuple[dict[str, Placement], type[_StyledModule]]] = {
    ("column", nn.Linear): ({"weight": Shard(0), "bias": Shard(0)}, _ColumnLinear),
    ("column", nn.Embedding): ({"weight": Shard(1)}, _ColumnEmbedding),
    ("row", nn.Linear): ({"weight": Shard(1), "bias": Replicate()}, _RowLinear),
    ("row", nn.Embedding): ({"weight": Shard(0)}, _RowEmbedding),
}

_styled_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _shard_parameters(
    module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement], src_data_rank: int | None
) -> None:
    write_as_one_process()
    for name, placement in placements.items():
        parameter = getattr(module, name)
        if parameter is None:
            continue
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} of this {type(module).__name__} is a DTensor already ({parameter.placements}). Apply only one "
                "tensor parallel style to a module, before fully_shard."
            )
        sharded_parameter = distribute_tensor(parameter, mesh, [placement], src_data_rank=src_data_rank)
        module.register_parameter(name, nn.Parameter(sharded_parameter, requires_grad=parameter.requires_grad))
        record_replaced_parameters({parameter: name}, module)


def _base_class(module: nn.Module, style: str) -> type[nn.Module]:
    for base in (nn.Linear, nn.Embedding):
        if isinstance(module, base):
            if type(module).forward is not base.forward and not isinstance(module, _StyledModule):
                raise ValueError(
                    f"{style} does not support {type(module).__name__}, a {base.__name__} with a custom forward, which "
                    "would be lost. Use torch's style."
                )
            if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq or module.sparse):
                raise ValueError(
                    f"{style} does not support max_norm, scale_grad_by_freq or sparse of an nn.Embedding. Unset them."
                )
            return base
    raise TypeError(f"{style} supports nn.Linear and nn.Embedding, got {type(module).__name__}.")


def _with_positive_dim(layout: Placement, ndim: int) -> Placement:
    return Shard(layout.dim % ndim) if isinstance(layout, Shard) and ndim else layout


def _shard_dim(layout: Placement, num_dims: int) -> int | None:
    """Return the sharded dim of `layout` if it is one of the first `num_dims`, which the op gathers or scatters."""
    return layout.dim if isinstance(layout, Shard) and layout.dim < num_dims else None
