"""torch's own tensor parallel styles, with the collective run together with the matmul.

Drop-in for `torch.distributed.tensor.parallel`: same names of keywords, same defaults, same parameters (DTensors), same
outputs and gradients; a plan for `parallelize_module` may mix both kinds. What is different is how a linear layer runs:

| style               | input_layouts | output_layouts | torch                         | here                     |
|---------------------|---------------|----------------|-------------------------------|--------------------------|
| FusedColwise        | Replicate     | Shard(-1)      | matmul; backward: all-reduce  | column_parallel_matmul   |
| FusedColwise        | Shard(seq)    | Shard(-1)      | all-gather, then matmul       | all_gather_matmul        |
| FusedRowwise        | Shard(-1)     | Replicate      | matmul, then all-reduce       | matmul_all_reduce        |
| FusedRowwise        | Shard(-1)     | Shard(seq)     | matmul, then reduce-scatter   | matmul_reduce_scatter    |

Other layouts are brought to one of these by DTensor's redistribute. Where a column-wise layer reads a DTensor that is
Replicate(), as behind PrepareModuleInput, it leaves the sum of the gradient to DTensor, as torch does: all that read it
share one, and it is a reduce-scatter where the DTensor was gathered. A module keeps its identity and its hooks: its
class becomes a subclass of what it was, with another forward.
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

from fused_tp.nn.embedding import check_ids_inside, check_integer_ids, lookup
from fused_tp.nn.linear import check_floating, check_width, column_matmul, row_matmul
from fused_tp.nn.norm import sequence_parallel_
from fused_tp.nn.optimizers import note_replaced
from fused_tp.nn.sharding import as_dtensor, check_mesh, local
from fused_tp.nn.single_device_writes import write_as_one_process


class _FusedStyle(ParallelStyle):
    """What both styles of linear layers and embeddings share. `become`: the entry of `MODULES` that they apply."""

    become: str
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
                raise TypeError(f"{name} must be a Placement (Replicate(), Shard(dim)), not {type(layout).__name__}.")
        if isinstance(output_layouts, Partial):
            raise ValueError(
                "output_layouts cannot be Partial(): the sum over ranks is what runs together with the matmul."
            )
        given: dict[str, Any] = {"input_layouts": input_layouts, "output_layouts": output_layouts}
        given["use_local_output"] = use_local_output
        super().__init__(**given)  # of torch's style, which has the defaults

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_mesh(device_mesh)
        kind = _kind(module, type(self).__name__)
        cuts, behaviour = MODULES[self.become, kind]
        _shard_parameters(module, device_mesh, cuts, self.src_data_rank)
        owner = type(module)
        if (behaviour, owner) not in _classes:
            _classes[behaviour, owner] = type(behaviour.__name__.lstrip("_"), (behaviour, owner), {})
        styled = cast(_Styled, module)
        styled._style, styled._style_mesh = self, device_mesh
        module.__class__ = _classes[behaviour, owner]
        return module


class FusedColwiseParallel(_FusedStyle, ColwiseParallel):
    """`ColwiseParallel` for nn.Linear and nn.Embedding, with the collective run together with the matmul.

    Args:
        input_layouts: placement of the module's input where that is a plain tensor, default Replicate(). Shard(d) of a
            dim before the last (the sequence) is gathered while the matmul runs.
        output_layouts: placement of the output, default Shard(-1).
        use_local_output: return a torch.Tensor instead of a DTensor.

    Raises:
        TypeError: another kind of module, or a layout that is no Placement.
        ValueError: a subclass with a forward of its own, parameters that are DTensors already, a partial output layout.

    Example:
        >>> plan = {"up": FusedColwiseParallel(), "down": FusedRowwiseParallel()}
        >>> parallelize_module(mlp, mesh["tp"], plan)
    """

    become = "column"


class FusedRowwiseParallel(_FusedStyle, RowwiseParallel):
    """`RowwiseParallel` for nn.Linear and nn.Embedding, with the collective run together with the matmul.

    Args:
        input_layouts: placement of the module's input where that is a plain tensor, default Shard(-1), the features
            that a column-wise layer leaves. As in torch it must be given for an embedding whose ids are Replicate().
        output_layouts: placement of the output, default Replicate(). Shard(d) of a dim before the last (the sequence)
            is reduce-scattered while the matmul runs.
        use_local_output: return a torch.Tensor instead of a DTensor.

    Raises: as FusedColwiseParallel; IndexError for ids outside an embedding's table.

    Example: see FusedColwiseParallel.
    """

    become = "row"


class FusedSequenceParallel(SequenceParallel):
    """`SequenceParallel` for norms and dropout: the module runs on this rank's part of the sequence, as plain tensors.

    torch runs each step of the norm as DTensor operations; here it runs at once on the local part, and the gradients of
    its (replicated) parameters are summed over the ranks inside the backward: they are Replicate() DTensors. Those that
    torch's style leaves are Partial(), of this rank's tokens, which an optimizer over DTensors sums in its step.

    Args:
        sequence_dim: of the input, default 1.
        use_local_output: return a torch.Tensor instead of a DTensor, default False as in torch.

    Raises:
        ValueError: a module with submodules.
        TypeError: parameters that are DTensors already; an input that is no Tensor.

    Example:
        >>> parallelize_module(block, mesh["tp"], {"norm": FusedSequenceParallel(use_local_output=True)})
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        sequence_parallel_(module, check_mesh(device_mesh))
        sharding = self.sequence_sharding[0]

        def take_local(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x = inputs[0] if inputs else None
            if not isinstance(x, Tensor):
                raise TypeError(f"the first input of {type(module).__name__} must be a Tensor, not {type(x).__name__}.")
            if isinstance(x, DTensor):
                whole = x.shape
                x = x.redistribute(placements=[sharding]).to_local()
                # The parts may differ in length, which only x knew. The view is no tensor that another DTensor holds.
                x = x.view_as(x)
                cast(Any, x)._fused_tp_whole = whole
            return (x, *inputs[1:])

        def give_dtensor(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            whole = getattr(inputs[0], "_fused_tp_whole", None)
            if whole is None:
                return DTensor.from_local(output, device_mesh, [sharding], run_check=False)
            shape = list(output.shape)
            shape[sharding.dim] = whole[sharding.dim]
            return as_dtensor(output, device_mesh, sharding, tuple(shape))

        module.register_forward_pre_hook(take_local)
        if not self.use_local_output:
            module.register_forward_hook(give_dtensor)
        return module


# ---- what the modules become ----------------------------------------------------------------------------------------


class _Styled(nn.Module):
    """Mixed into the class of a module that a style was applied to."""

    _style: _FusedStyle
    _style_mesh: DeviceMesh

    def _layout_of(self, x: Tensor) -> Placement:
        return _positive(x.placements[0] if isinstance(x, DTensor) else self._style.input_layouts[0], x.ndim)

    def _take(self, x: Tensor, wanted: Placement, grad: Placement | None = None) -> Tensor:
        """This rank's part of the input in the layout `wanted`. A DTensor is told that its gradient has the layout
        `grad`, default the same."""
        if self._layout_of(x) != wanted:
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, self._style_mesh, self._style.input_layouts, run_check=False)
            x = x.redistribute(placements=[wanted])
        return x.to_local(grad_placements=[grad or wanted]) if isinstance(x, DTensor) else x

    def _give(self, y: Tensor, layout: Placement, shape: tuple[int, ...]) -> Tensor:
        """y, this rank's part in `layout` of an output of global `shape`, as the style's user wants it."""
        wanted = _positive(self._style.output_layouts[0], y.ndim)
        if layout == wanted and self._style.use_local_output:
            return y
        out = as_dtensor(y, self._style_mesh, layout, shape)
        if layout != wanted:
            out = out.redistribute(placements=[wanted])
        return out.to_local() if self._style.use_local_output else out

    def _give_sum(self, sums: Callable[[int | None], Tensor], shape: tuple[int, ...], dims: int) -> Tensor:
        """The output of global `shape` that `sums` adds up over ranks, or scatters along one of its first `dims`."""
        dim = _cut_dim(_positive(self._style.output_layouts[0], len(shape)), dims)
        return self._give(sums(dim), Replicate() if dim is None else Shard(dim), shape)


class _ColumnLinear(_Styled):
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        linear = cast(nn.Linear, self)
        check_floating(x)
        weight, bias = local(self.weight), local(self.bias)
        layout = self._layout_of(x)
        dim = _cut_dim(layout, x.ndim - 1)
        if dim is None and (isinstance(x, DTensor) or layout != Replicate()):
            # DTensor sums the gradient: once for all layers that read x, and by a reduce-scatter where x was gathered.
            x = self._take(x, Replicate(), grad=Partial())
            check_width(x, linear.in_features, "in_features")
            y = F.linear(x, weight, bias)
        else:
            gather_size = x.shape[dim] if dim is not None and isinstance(x, DTensor) else None
            x = self._take(x, layout)
            check_width(x, linear.in_features, "in_features")
            (y,) = column_matmul(x, [weight], [bias], self._style_mesh, dim, gather_size)
        return self._give(y, Shard(y.ndim - 1), (*y.shape[:-1], linear.out_features))


class _RowLinear(_Styled):
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        linear = cast(nn.Linear, self)
        check_floating(x)
        weight = local(self.weight)
        x = self._take(x, Shard(x.ndim - 1))
        check_width(x, weight.shape[1], "this rank's part of in_features")
        sums = partial(row_matmul, x, weight, local(self.bias), self._style_mesh)
        return self._give_sum(sums, (*x.shape[:-1], linear.out_features), x.ndim - 1)


class _ColumnEmbedding(_Styled):
    def forward(self, ids: Tensor) -> Tensor:
        embedding = cast(nn.Embedding, self)
        check_integer_ids(ids)
        y = F.embedding(self._take(ids, Replicate()), local(embedding.weight), embedding.padding_idx)
        return self._give(y, Shard(y.ndim - 1), (*y.shape[:-1], embedding.embedding_dim))


class _RowEmbedding(_Styled):
    def forward(self, ids: Tensor) -> Tensor:
        embedding = cast(nn.Embedding, self)
        check_integer_ids(ids)
        ids = self._take(ids, Replicate())
        check_ids_inside(ids, embedding.num_embeddings)
        sums = partial(lookup, ids, local(embedding.weight), embedding.num_embeddings, embedding.padding_idx)
        return self._give_sum(partial(sums, self._style_mesh), (*ids.shape, embedding.embedding_dim), ids.ndim + 1)


# How a style cuts the parameters of a kind of module, and the forward that the module gets.
MODULES: dict[tuple[str, type[nn.Module]], tuple[dict[str, Placement], type[_Styled]]] = {
    ("column", nn.Linear): ({"weight": Shard(0), "bias": Shard(0)}, _ColumnLinear),
    ("column", nn.Embedding): ({"weight": Shard(1)}, _ColumnEmbedding),
    ("row", nn.Linear): ({"weight": Shard(1), "bias": Replicate()}, _RowLinear),
    ("row", nn.Embedding): ({"weight": Shard(0)}, _RowEmbedding),
}

_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _shard_parameters(module: nn.Module, mesh: DeviceMesh, cuts: dict[str, Placement], source: int | None) -> None:
    write_as_one_process()
    for name, placement in cuts.items():
        parameter = getattr(module, name)
        if parameter is None:
            continue
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} of this {type(module).__name__} is a DTensor already ({parameter.placements}); apply one "
                "tensor parallel style to a module, before fully_shard."
            )
        cut = distribute_tensor(parameter, mesh, [placement], src_data_rank=source)
        module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        note_replaced({parameter: name}, module)


def _kind(module: nn.Module, style: str) -> type[nn.Module]:
    for kind in (nn.Linear, nn.Embedding):
        if isinstance(module, kind):
            if type(module).forward is not kind.forward and not isinstance(module, _Styled):
                raise ValueError(
                    f"{type(module).__name__} is a {kind.__name__} with a forward of its own, which {style} would "
                    "replace."
                )
            if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq or module.sparse):
                raise ValueError(f"{style} cannot do max_norm, scale_grad_by_freq or sparse of an nn.Embedding.")
            return kind
    raise TypeError(f"{style} applies to nn.Linear and nn.Embedding, not to {type(module).__name__}.")


def _positive(layout: Placement, ndim: int) -> Placement:
    return Shard(layout.dim % ndim) if isinstance(layout, Shard) and ndim else layout


def _cut_dim(layout: Placement, dims: int) -> int | None:
    """The dim, one of the first `dims`, that `layout` cuts and the op itself gathers or scatters."""
    return layout.dim if isinstance(layout, Shard) and layout.dim < dims else None
