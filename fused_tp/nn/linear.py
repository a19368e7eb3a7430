"""Linear layers sharded over a tensor parallel mesh, after Megatron-LM (https://arxiv.org/abs/1909.08053), with
sequence parallelism ("sp") after https://arxiv.org/abs/2205.05198. W ranks, M tokens, weights [out, in] as in
`nn.Linear`.

| layer  | sp  | x on a rank | weight on a rank | y on a rank  | forward               | dX                    |
|--------|-----|-------------|------------------|--------------|-----------------------|-----------------------|
| column | no  | [M, in]     | [out / W, in]    | [M, out / W] | local matmul          | matmul_all_reduce     |
| column | yes | [M / W, in] | [out / W, in]    | [M, out / W] | all_gather_matmul     | matmul_reduce_scatter |
| row    | no  | [M, in / W] | [out, in / W]    | [M, out]     | matmul_all_reduce     | local matmul          |
| row    | yes | [M, in / W] | [out, in / W]    | [M / W, out] | matmul_reduce_scatter | all_gather_matmul     |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fused_tp.core.group import GroupLike
from fused_tp.core.heads import partition_heads
from fused_tp.nn.float8 import float8_recipe
from fused_tp.nn.norm import with_reduced_grad
from fused_tp.nn.sharding import (
    Memo,
    PartsShard,
    check_mesh,
    copy_full_,
    empty_parameter,
    local_shard,
    shard_parameter,
    shard_rows,
)
from fused_tp.ops.all_gather_matmul import all_gather_matmul
from fused_tp.ops.arguments import check_bool, check_float8_recipe
from fused_tp.ops.collectives import gather, scatter
from fused_tp.ops.column_parallel_matmul import column_parallel_matmul
from fused_tp.ops.matmul_all_reduce import matmul_all_reduce
from fused_tp.ops.matmul_reduce_scatter import matmul_reduce_scatter

if TYPE_CHECKING:
    from typing_extensions import Required, Self, Unpack

    from fused_tp.nn.share_gather import SharedGather

Weights = TypeVar("Weights", Tensor, Sequence[Tensor])


class LayerKeywords(TypedDict, total=False):
    """Keyword arguments that all parallel layers share, with the defaults of `_ParallelLinear`."""

    mesh: Required[DeviceMesh]
    sequence_parallel: bool
    sequence_dim: int
    float8: str | None
    device: torch.device | str | None
    dtype: torch.dtype | None


class _ParallelLinear(nn.Linear):
    """Base class of column- and row-parallel layers: sizes, mesh, checks, initialization, `from_linear`.

    It is a subclass of nn.Linear, so that code that searches for linear layers (initialization, PEFT) finds it.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None  # type: ignore[assignment]  # nn.Linear declares Parameter, but allows None
    _weight_placement: Shard | Replicate  # of the weight [out, in]
    _bias_placement: Shard | Replicate

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        float8: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate full parameters
        check_positive("in_features", in_features)
        check_positive("out_features", out_features)
        check_bool(bias=bias, sequence_parallel=sequence_parallel)
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating point type, got {dtype}.")
        if float8 is not None:
            check_float8_recipe(float8)
        self.mesh = check_mesh(mesh)
        self.float8 = float8
        self.in_features = in_features
        self.out_features = out_features
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = sequence_dim
        self._is_transposed = False  # True if the weight is stored as [in, out]
        self._packed_parameter_dims: dict[str, int] = {}  # see `packed_dims`
        shape = (out_features, in_features)
        self.weight = empty_parameter(shape, mesh, self._weight_placement, device=device, dtype=dtype)
        if bias:
            self.bias = empty_parameter((out_features,), mesh, self._bias_placement, device=device, dtype=dtype)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias from the distribution of a full-size nn.Linear: U(-1/sqrt(in), 1/sqrt(in)).

        With equal random states on all ranks, the values are those that nn.Linear would draw, for any mesh size. The
        full weight is allocated temporarily. On the meta device nothing is drawn. A replicated bias is broadcast.
        """
        if self.weight.is_meta:
            return
        bound = 1 / math.sqrt(self.in_features)
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                full_parameter = torch.empty(parameter.shape, device=parameter.device, dtype=parameter.dtype)
                copy_full_(parameter, full_parameter.uniform_(-bound, bound))

    @classmethod
    def from_linear(
        cls, linear: nn.Module, *, mesh: DeviceMesh, memo: Memo | None = None, parts: int = 1, **keywords: Any
    ) -> Self:
        """Build the layer over `mesh` from an nn.Linear that every rank holds. Each rank copies its shard locally.

        A weight on the meta device stays uninitialized (call `reset_parameters` or load a checkpoint). transformers'
        `Conv1D` is accepted too; its weight stays [in, out]. The layer of torchao's Float8Linear has its recipe.

        Args:
            memo: pass one to all conversions of a model to keep tied weights tied.
            parts: number of equal blocks in the sharded features (3 for q, k and v in one layer). Each block is sharded
                by itself, so a rank holds its heads of q, k and v. The parameters get a dim for the blocks: see
                `shard_parameter`.
            keywords: other keyword arguments of the constructor, such as `sequence_parallel`.

        Raises:
            TypeError: `linear` is not an nn.Linear, or its weight is a DTensor.
            ValueError: the sharded features are no multiple of `parts`, or of `parts` x ranks for more than two parts;
                a Float8Linear has another config than a recipe.

        Example:
            >>> model.up = ColumnParallelLinear.from_linear(model.up, mesh=mesh["tp"])
            >>> model.down = RowParallelLinear.from_linear(model.down, mesh=mesh["tp"])
        """
        if isinstance(linear, _ParallelLinear) or not (isinstance(linear, nn.Linear) or is_conv1d(linear)):
            raise TypeError(f"{cls.__name__}.from_linear needs an nn.Linear, got {type(linear).__name__}.")
        source = cast("nn.Linear", linear)
        sizes = *features_of(source), source.bias is not None
        layer = cls(*sizes, mesh=mesh, device="meta", dtype=source.weight.dtype, **keywords)
        layer.load_shards(source, memo, parts)
        return layer

    def load_shards(self, linear: nn.Linear, memo: Memo | None, num_parts: int = 1) -> None:
        """Replace the parameters by this rank's shards of the parameters of `linear`."""
        self._is_transposed = is_conv1d(linear)
        self.float8 = float8_recipe(linear) or self.float8
        for name, placement in (("weight", self._weight_placement), ("bias", self._bias_placement)):
            full_parameter = linear._parameters[name]
            if full_parameter is None:
                continue
            sharding: Replicate | PartsShard | Shard = placement
            if isinstance(placement, Shard):
                dim = 1 - placement.dim if self._is_transposed and name == "weight" else placement.dim
                sharding = PartsShard(dim, num_parts)
                check_parts(name, full_parameter, sharding, self.mesh.size())
                if num_parts > 1:
                    self._packed_parameter_dims[name] = dim
            setattr(self, name, shard_parameter(full_parameter, self.mesh, sharding, memo))
        self.train(linear.training)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load like nn.Linear; also accept packed parameters in the shape of the original layer."""
        for name, dim in self._packed_parameter_dims.items():
            stored_tensor, parameter = state_dict.get(prefix + name), getattr(self, name)
            if stored_tensor is not None and stored_tensor.ndim == parameter.ndim - 1:
                packed_tensor = stored_tensor.unflatten(dim, parameter.shape[dim : dim + 2])
                # Shard it here: PEFT shards a tensor only if it has the shape of the parameter.
                mesh, placements = parameter.device_mesh, parameter.placements
                state_dict[prefix + name] = distribute_tensor(packed_tensor, mesh, placements, src_data_rank=None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's weight [out, in] and bias [out] as plain tensors, for its matmul."""
        weight, bias = local_shard(self.weight), local_shard(self.bias)
        if (dim := self._packed_parameter_dims.get("weight")) is not None:
            weight = weight.flatten(dim, dim + 1)
        if bias is not None and "bias" in self._packed_parameter_dims:
            bias = bias.flatten()
        return weight.t() if self._is_transposed else weight, bias

    def _check_input(self, x: Tensor, features: int, description: str) -> None:
        check_floating(x)
        check_width(x, features, description)
        if self.sequence_parallel:
            check_sequence_dim("x", x, x.shape, self.sequence_dim)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"tp={self.mesh.size()}, sequence_parallel={self.sequence_parallel}"
            + ("" if self.float8 is None else f", float8={self.float8!r}")
        )


class ColumnParallelLinear(_ParallelLinear):
    """nn.Linear whose output features are sharded over `mesh`: y_shard = x @ w_shard^T + b_shard.

    Shapes on a rank: x [..., in_features] -> [..., out_features / W], or [..., out_features] with `gather_output`. With
    `sequence_parallel`, x is this rank's shard along `sequence_dim`, and the result holds the full sequence. Features
    that W does not divide are sharded like torch.chunk. Parameters are DTensors: weight and bias Shard(0).

    Args:
        in_features, out_features, bias, device, dtype: as in nn.Linear, with sizes of the full layer; device defaults
            to the mesh's.
        mesh: the 1-D DeviceMesh of the tensor parallel ranks, such as mesh["tp"] of a larger mesh.
        sequence_parallel: x is sharded along `sequence_dim`; the gather is fused into the matmul (`all_gather_matmul`).
        gather_output: return all output features on all ranks.
        sequence_dim: the sequence dim of x; used only with `sequence_parallel`.
        float8: recipe by which the layer multiplies in float8, as in `all_gather_matmul`; parameters keep their dtype.

    Raises:
        TypeError, ValueError: the mesh is not 1-D, a size is below 1, or the input has another width or dtype. Raised
            before anything is sent.

    Example:
        >>> mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        >>> up = ColumnParallelLinear(512, 2048, mesh=mesh)
        >>> down = RowParallelLinear(2048, 512, mesh=mesh)
        >>> y = down(torch.relu(up(x)))     # x, y: [..., 512] on every rank
    """

    _weight_placement: Shard | Replicate = Shard(0)
    _bias_placement: Shard | Replicate = Shard(0)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        **keywords: Unpack[LayerKeywords],
    ) -> None:
        check_bool(gather_output=gather_output)
        super().__init__(in_features, out_features, bias, **keywords)
        self.gather_output = gather_output
        self._shared_gather: tuple[SharedGather, int] | None = None  # (group, index in it), set by share_gather
        # Set by `parallelize` for an output layer: called with (layer, x, gather_size, batch) in place of the matmul.
        self.defer_output: Callable[[ColumnParallelLinear, Tensor, int | None, int | None], Tensor] | None = None

    def forward(self, x: Tensor, *, gather_size: int | None = None, batch: int | None = None) -> Tensor:
        """Return y_shard for x.

        Args:
            gather_size: length of the full sequence; needed if the ranks' shards differ in length.
            batch: number of sequences that are concatenated in the first dim of x, and of y.
        """
        if self._shared_gather is not None:
            group, index = self._shared_gather
            return group.layer_output(index, x, gather_size, batch)
        if self.defer_output is not None:
            return self.defer_output(self, x, gather_size, batch)
        return column_forward([self], x, gather_size, batch)[0]


class RowParallelLinear(_ParallelLinear):
    """nn.Linear whose input features are sharded over `mesh`: y = sum over ranks of x_shard @ w_shard^T, + bias once.

    Shapes on a rank: x [..., in_features / W] (all in_features with `input_is_parallel=False`) -> [..., out_features].
    With `sequence_parallel`, the result is this rank's shard along `sequence_dim`. Parameters are DTensors: weight
    Shard(1), bias Replicate with a complete gradient on every rank.

    Args:
        in_features, out_features, bias, device, dtype: as in nn.Linear, with sizes of the full layer.
        mesh: the 1-D DeviceMesh of the tensor parallel ranks.
        sequence_parallel: y is sharded along `sequence_dim`; the reduction is fused (`matmul_reduce_scatter`).
        input_is_parallel: x holds only this rank's features, such as the output of a column-parallel layer.
        sequence_dim: the sequence dim of y; used only with `sequence_parallel`.
        float8: as in ColumnParallelLinear.

    Raises:
        TypeError, ValueError: as in ColumnParallelLinear, or for `sequence_parallel` without `input_is_parallel`.

    Example: see ColumnParallelLinear.
    """

    _weight_placement = Shard(1)
    _bias_placement = Replicate()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        **keywords: Unpack[LayerKeywords],
    ) -> None:
        check_bool(input_is_parallel=input_is_parallel)
        if keywords.get("sequence_parallel") and not input_is_parallel:
            # With x and y both sharded along the sequence, sharding the features would only add an all-to-all.
            raise ValueError(
                "sequence_parallel=True needs input_is_parallel=True: the input must be the full sequence of this "
                "rank's features. Pass the output of a column-parallel layer, or sequence_parallel=False."
            )
        super().__init__(in_features, out_features, bias, **keywords)
        self.input_is_parallel = input_is_parallel

    def forward(self, x: Tensor, *, batch: int | None = None) -> Tensor:
        """Return y for x_shard. `batch`: as in ColumnParallelLinear."""
        if batch is not None:
            return self.forward(x.unflatten(0, (batch, -1))).flatten(0, 1)
        weight, bias = self.local_parameters()
        if self.input_is_parallel:
            self._check_input(x, weight.shape[1], f"this rank's shard of the {self.in_features} input features")
        else:
            self._check_input(x, self.in_features, "in_features")
            x = scatter(x, -1, group=self.mesh)
        scatter_dim = self.sequence_dim if self.sequence_parallel else None
        return row_matmul(x, weight, bias, self.mesh, scatter_dim, self.float8)


def column_matmul(
    x: Tensor,
    weight: Weights,
    bias: Any,
    group: GroupLike,
    gather_dim: int | None = None,
    gather_size: int | None = None,
    float8: str | None = None,
) -> Weights:
    """Return x @ weight^T + bias for this rank's rows of the weight: the computation of every column-parallel linear.

    With `gather_dim`, x is sharded along that dim. A sequence of weights shares one gather, and one sum of dX.

    Args:
        bias: None or a Tensor; for a sequence of weights, a sequence with None or a Tensor for each.
        gather_size: length of the gathered dim; needed if the ranks' shards differ in length.
        float8: as in `all_gather_matmul`.
    """
    if gather_dim is None:
        return column_parallel_matmul(x, weight, bias, group=group, float8=float8)
    return all_gather_matmul(
        x, weight, bias, group=group, gather_dim=gather_dim, gather_size=gather_size, float8=float8
    )


def row_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: GroupLike,
    scatter_dim: int | None = None,
    float8: str | None = None,
) -> Tensor:
    """Return the sum over ranks of x @ weight^T, plus the bias once: the computation of every row-parallel linear.

    With `scatter_dim`, each rank gets only its shard of the sum along that dim.
    """
    if scatter_dim is None:
        return matmul_all_reduce(x, weight, bias, group=group, float8=float8)
    return matmul_reduce_scatter(x, weight, bias, group=group, scatter_dim=scatter_dim, float8=float8)


def column_forward(
    layers: Sequence[ColumnParallelLinear], x: Tensor, gather_size: int | None = None, batch: int | None = None
) -> list[Tensor]:
    """Return the outputs of column-parallel `layers` for the same x, by one op that communicates x once.

    Layers whose `float8` differ need x in different precisions, so each runs by itself.
    """
    if len(layers) > 1 and len({layer.float8 for layer in layers}) > 1:
        return [y for layer in layers for y in column_forward([layer], x, gather_size, batch)]
    if batch is not None:
        return [y.flatten(0, 1) for y in column_forward(layers, x.unflatten(0, (batch, -1)), gather_size)]
    first_layer = layers[0]
    first_layer._check_input(x, first_layer.in_features, "in_features")
    if gather_size is not None and not first_layer.sequence_parallel:
        check_sequence_dim("x", x, x.shape, first_layer.sequence_dim)
        if x.shape[first_layer.sequence_dim] != gather_size:
            raise ValueError(
                f"gather_size must be the size {x.shape[first_layer.sequence_dim]} of dim {first_layer.sequence_dim} "
                f"of x, because the layer is not sequence_parallel; got {gather_size}. Omit gather_size."
            )
    weights, biases = zip(*(layer.local_parameters() for layer in layers), strict=True)
    gather_dim = first_layer.sequence_dim if first_layer.sequence_parallel else None
    outputs = column_matmul(x, weights, biases, first_layer.mesh, gather_dim, gather_size, first_layer.float8)
    return [
        gather(y, -1, group=layer.mesh, gather_size=layer.out_features) if layer.gather_output else y
        for layer, y in zip(layers, outputs, strict=True)
    ]


class RepeatedColumnLinear(ColumnParallelLinear):
    """Column-parallel layer with fewer output blocks than ranks: W / num_blocks neighboring ranks share a block.

    For key and value projections with fewer heads than ranks. x as in ColumnParallelLinear -> [..., out_features /
    num_blocks], where `num_blocks` divides W and out_features. The parameters are replicated, because they are small,
    and so that a checkpoint holds each block once. Every rank has one term of their gradients; backward sums the terms.
    """

    _weight_placement = Replicate()
    _bias_placement = Replicate()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        num_blocks: int,
        **keywords: Unpack[LayerKeywords],
    ) -> None:
        check_positive("num_blocks", num_blocks)
        num_ranks = check_mesh(keywords["mesh"]).size()
        if num_ranks % num_blocks or out_features % num_blocks:
            raise ValueError(
                f"num_blocks must divide the {num_ranks} ranks of the mesh and the {out_features} out_features, got "
                f"{num_blocks}."
            )
        super().__init__(in_features, out_features, bias, **keywords)
        self.num_blocks = num_blocks

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        size = self.out_features // self.num_blocks
        start = self.mesh.get_local_rank() // (self.mesh.size() // self.num_blocks) * size
        weight = with_reduced_grad(self.weight, self.mesh).narrow(0, start, size)
        bias = None if self.bias is None else with_reduced_grad(self.bias, self.mesh).narrow(0, start, size)
        return weight, bias


class MultiQueryLinear(ColumnParallelLinear):
    """Projection to the queries of many heads, followed by the keys and values of a single head.

    The first `in_features` rows of the weight are queries, of which each rank computes its heads. All ranks compute the
    remaining rows: x as in ColumnParallelLinear -> [..., in_features / W + remaining rows]. The parameters are
    replicated as in RepeatedColumnLinear, because no DTensor placement shards only some of the rows. With `num_heads`,
    ranks whose number does not divide the heads have complete heads: see `partition_heads`.
    """

    _weight_placement = Replicate()
    _bias_placement = Replicate()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        num_heads: int | None = None,
        **keywords: Unpack[LayerKeywords],
    ) -> None:
        super().__init__(in_features, out_features, bias, **keywords)
        self.num_heads = num_heads

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        start, stop = shard_rows(self.in_features, self.mesh)
        if self.num_heads is not None:
            heads = partition_heads(self.num_heads, 1, self.mesh.size())[self.mesh.get_local_rank()]
            head_width = self.in_features // self.num_heads
            start, stop = heads.start * head_width, heads.stop * head_width

        def local_rows(parameter: Tensor) -> Tensor:
            all_rows = with_reduced_grad(parameter, self.mesh)
            return torch.cat([all_rows[start:stop], all_rows[self.in_features :]])

        return local_rows(self.weight), None if self.bias is None else local_rows(self.bias)


def compute_column_outputs(layers: Sequence[nn.Module], x: Tensor, gather_size: int | None = None) -> list[Tensor]:
    """Return the outputs of projections of the same x, by one op if all are plain column-parallel layers.

    If a layer has hooks, or is wrapped or replaced (adapters, fully_shard), the layers are called one by one.
    """
    plain_layers = [
        layer
        for layer in layers
        if type(layer) in (ColumnParallelLinear, RepeatedColumnLinear)
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and not (layer._backward_hooks or layer._backward_pre_hooks)
        and "forward" not in layer.__dict__
    ]
    if len(plain_layers) == len(layers):
        return column_forward(cast("list[ColumnParallelLinear]", plain_layers), x, gather_size)
    return [layer(x) if gather_size is None else layer(x, gather_size=gather_size) for layer in layers]


def is_conv1d(module: nn.Module) -> bool:
    """True if `module` is transformers' Conv1D (GPT-2), a linear layer whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def features_of(linear: nn.Module) -> tuple[int, int]:
    """Return (in_features, out_features) of an nn.Linear or a Conv1D."""
    weight = cast("nn.Linear", linear).weight
    return (weight.shape[0], weight.shape[1]) if is_conv1d(linear) else (weight.shape[1], weight.shape[0])


def check_parts(name: str, parameter: Tensor, shard: PartsShard, num_ranks: int) -> None:
    """Check that the sharded dim consists of `shard.num_parts` blocks of equal length.

    The ranks must divide blocks of q, k and v, because their shards must be complete heads.

    Raises:
        ValueError: the dim has another size.
    """
    must_be_even = shard.num_parts > 2
    divisor = shard.num_parts * (num_ranks if must_be_even else 1)
    if parameter.shape[shard.dim] % divisor:
        raise ValueError(
            f"dim {shard.dim} of {name} {tuple(parameter.shape)} has {shard.num_parts} blocks, each sharded over "
            f"{num_ranks} ranks. The size of the dim must be a multiple of {shard.num_parts}"
            f"{f' x {num_ranks}' if must_be_even else ''}, got {parameter.shape[shard.dim]}."
        )


def check_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}.")


def check_floating(x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a Tensor, got {type(x).__name__}.")
    if x.is_nested:
        raise TypeError("x must not be a nested tensor. Pad x, or pack its rows into one dense tensor.")
    if not x.is_floating_point():
        raise TypeError(f"x must have a floating point dtype, got {x.dtype}.")


def check_width(x: Tensor, features: int, description: str) -> None:
    if x.ndim == 0 or x.shape[-1] != features:
        raise ValueError(f"the last dim of x must have size {features} ({description}), got shape {tuple(x.shape)}.")


def check_sequence_dim(name: str, x: Tensor, shape: Sequence[int], sequence_dim: int) -> None:
    """Raise ValueError unless `sequence_dim` is a dim of `shape` before the last one."""
    ndim = len(shape)
    if ndim < 2 or not -ndim <= sequence_dim < ndim or sequence_dim % ndim == ndim - 1:
        raise ValueError(
            f"sequence_dim must be a dim of {tuple(shape)} before the last one, got {sequence_dim} for {name} of shape "
            f"{tuple(x.shape)}."
        )


def require_linear(module: nn.Module, name: str) -> nn.Linear:
    """Return the attribute `name` of `module`. Raise TypeError if it is not an nn.Linear."""
    linear = getattr(module, name)
    if not isinstance(linear, nn.Linear):
        raise TypeError(
            f"{type(module).__name__}.{name} must be an nn.Linear, got {type(linear).__name__}. Convert the layer "
            "to an nn.Linear first, with a weight [out, in]."
        )
    return linear


def check_nothing_dropped(module: nn.Module, class_to_build: str, converted_names: set[str]) -> None:
    """Raise ValueError if `module` has parameters or submodules that are not in `converted_names`.

    The layer of class `class_to_build`, which is built from `module`, would drop them.
    """
    module_class_name = type(module).__name__
    dropped_names = [name for name, _ in module.named_parameters(recurse=False) if name not in converted_names]
    if dropped_names:
        name_list = ", ".join(dropped_names)
        raise ValueError(
            f"{module_class_name} has the parameters {name_list}, which {class_to_build} does not support and would "
            "drop."
        )
    for name, child in module.named_children():
        is_identity = isinstance(child, nn.Identity) or (isinstance(child, nn.Dropout) and child.p == 0)
        if name not in converted_names and not is_identity:
            raise ValueError(
                f"{module_class_name} has a submodule {name} ({type(child).__name__}), which {class_to_build} does not "
                "support and would drop. Convert its linear layers one by one: ColumnParallelLinear and "
                "RowParallelLinear.from_linear."
            )
