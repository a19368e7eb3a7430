"""Megatron-Core (0.16 and later): its parallel linear layers and core attention, computed by the ops of fused_tp.

The layers subclass Megatron's and keep its initialisation, parameter attributes and saving. Parameters are plain
tensors, and groups are those of `parallel_state` or a `pg_collection`, so Megatron's DistributedDataParallel,
optimizers, pipeline schedules and checkpoints work unchanged. Only forward differs: it runs the ops of the table in
`fused_tp.nn.linear`, on tensors in Megatron's order, [seq, batch, hidden]. See `megatron_attention` for core attention,
also over context parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import rotary_pos_embedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, random
from megatron.core.transformer import transformer_block
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from fused_tp.integrations.megatron_attention import FusedDotProductAttention
from fused_tp.nn.linear import column_matmul, row_matmul
from fused_tp.ops.collectives import all_reduce, gather, reduce_scatter, scatter
from fused_tp.ops.main_grad import redirect_to_main_grad
from fused_tp.ops.sequence import shard_sequence

__all__ = [
    "layer_spec",
    "fused_layers",
    "on_cpu",
    "FusedColumnParallelLinear",
    "FusedRowParallelLinear",
    "FusedVocabParallelEmbedding",
    "FusedDotProductAttention",
    "SequenceParallelNorm",
]


def layer_spec(config: Any, base: Any = None) -> Any:
    """Copy `base` with fused layers for Megatron's column- and row-parallel linear layers and core attention.

    torch's norms, which Megatron does not support under sequence_parallel, become `SequenceParallelNorm`. The linear
    layers of experts are replaced, too; there only the token dispatcher communicates. Activations, routers, grouped
    experts and all other modules of `base` are kept.

    Args:
        config: the TransformerConfig of the model.
        base: a ModuleSpec of a layer, the submodules of a block (`get_gpt_decoder_block_spec`,
            `get_gpt_mtp_block_spec`), or None for a `get_gpt_layer_local_spec` that matches `config`.

    Returns:
        An object of the type of `base`, for `transformer_layer_spec=` (or `mtp_block_spec=`). `base` is not changed.

    Raises:
        ValueError: `base` has no such layers (Transformer Engine's layers are not replaced: they contain a norm or fp8
            weights); `base` is None and the layers of `config` differ; `config` has multi_latent_attention.

    Example:
        >>> with fused_layers():
        ...     model = GPTModel(config, layer_spec(config), vocab_size=32_000, max_sequence_length=4096)
    """
    if config.multi_latent_attention:
        raise ValueError(
            "multi_latent_attention=True is not supported: Megatron builds these layers from Transformer Engine's "
            "classes only. Use Megatron's Transformer Engine spec without layer_spec."
        )
    if base is None:
        if config.num_moe_experts and config.moe_layer_freq != 1:
            raise ValueError(
                f"base=None needs equal layers, got moe_layer_freq={config.moe_layer_freq}. Pass "
                "base=get_gpt_decoder_block_spec(config, use_transformer_engine=False)."
            )
        base = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            normalization=config.normalization,
        )
    classes: list[type] = []
    spec = _replace_classes(base, classes)
    if not {ColumnParallelLinear, RowParallelLinear, DotProductAttention}.intersection(classes):
        names = sorted({c.__name__ for c in classes if "Linear" in c.__name__ or "Attention" in c.__name__})
        raise ValueError(
            "base must have ColumnParallelLinear, RowParallelLinear or DotProductAttention, got "
            f"{', '.join(names) or 'no layers'}. Create base by a local spec, such as get_gpt_layer_local_spec()."
        )
    return spec


@contextmanager
def fused_layers() -> Iterator[None]:
    """Context in which Megatron builds fused layers where no spec names their class: the embedding, the output layer
    (tied or not) and the last norm.

    Example:
        >>> with fused_layers():
        ...     model = GPTModel(config, layer_spec(config), vocab_size=32_000, max_sequence_length=4096)
    """
    norm_class = transformer_block.LayerNormImpl
    with (
        mock.patch.object(tensor_parallel, "ColumnParallelLinear", FusedColumnParallelLinear),
        mock.patch.object(tensor_parallel, "RowParallelLinear", FusedRowParallelLinear),
        mock.patch.object(tensor_parallel, "VocabParallelEmbedding", FusedVocabParallelEmbedding),
        mock.patch.object(transformer_block, "LayerNormImpl", _FUSED_CLASSES.get(norm_class, norm_class)),
    ):
        yield


@contextmanager
def on_cpu() -> Iterator[None]:
    """Context in which Megatron-Core builds and runs models on the CPU over gloo, to test without a GPU.

    Set use_cpu_initialization=True, hidden_dropout=0.0, bias_dropout_fusion=False and masked_softmax_fusion=False in
    the config. Megatron's optimizers and pipeline schedules still need a GPU: set the `grad` of each parameter to its
    `main_grad`, and use an optimizer of torch.

    Example:
        >>> with on_cpu():
        ...     model(tokens, positions, None, labels=labels).mean().backward()
    """
    with (
        mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")),
        mock.patch.multiple("torch.cuda", synchronize=lambda: None, current_stream=lambda: None),
        # Megatron copies positions through pinned memory, and uses random generators of a GPU.
        mock.patch.object(
            rotary_pos_embedding,
            "get_pos_emb_on_this_cp_rank",
            lambda x, dim, group: shard_sequence(x, dim, group=group),
        ),
        mock.patch.multiple(random, _get_cuda_rng_state=lambda **_: None, _set_cuda_rng_state=lambda *_, **__: None),
        mock.patch.object(random.CudaRNGStatesTracker, "fork", lambda self, name="": nullcontext()),
    ):
        yield


class FusedColumnParallelLinear(ColumnParallelLinear):
    """Megatron's ColumnParallelLinear with its gather, or its sum of input gradients, overlapped with its matmuls.

    Arguments, attributes and results are the parent's. With and without gradient_accumulation_fusion, gradients are
    added to the `main_grad` of parameters that have one, rounded once to the dtype of the parameter. APEX is not
    needed.

    Raises:
        ValueError: the config asks for a feature of Transformer Engine (fp8, fp4, delayed weight gradients, activation
            offloading), or for deferred gradients of the embedding (defer_embedding_wgrad_compute).
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **keywords: Any) -> None:
        if keywords.get("embedding_activation_buffer") is not None:
            raise ValueError(
                "embedding_activation_buffer (defer_embedding_wgrad_compute=True) is not supported: weight gradients "
                "are computed in backward. Set defer_embedding_wgrad_compute=False."
            )
        _check_config(config)
        # The parent requires an APEX extension for this option, which the ops of fused_tp implement without APEX.
        parent_config = copy(config)
        parent_config.gradient_accumulation_fusion = False
        super().__init__(input_size, output_size, config=parent_config, **keywords)
        self.config, self.gradient_accumulation_fusion = config, config.gradient_accumulation_fusion
        _check_unsharded(self)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, bias if skip_bias_add else None) for `input_` [seq, batch, n] or [tokens, n]."""
        weight = self.weight if weight is None else weight
        shape = (self.output_size_per_partition, self.input_size)
        if weight is None or tuple(weight.shape) != shape:
            actual_shape = "None" if weight is None else str(tuple(weight.shape))
            raise ValueError(f"weight must have shape {list(shape)}, this rank's rows, got {actual_shape}.")
        _check_weight(weight)
        bias = None if self.skip_bias_add else self.bias
        if self.explicit_expert_comm or (self.disable_grad_reduce and not self.sequence_parallel):
            output = F.linear(input_, redirect_to_main_grad(weight), bias)
        else:
            output = column_matmul(input_, weight, bias, self.tp_group, 0 if self.sequence_parallel else None)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            output = gather(output, -1, group=self.tp_group)
        return output, self.bias if self.skip_bias_add else None


class FusedRowParallelLinear(RowParallelLinear):
    """Megatron's RowParallelLinear with its sum over ranks overlapped with its matmul.

    Arguments, attributes and results are the parent's; gradients are accumulated as in `FusedColumnParallelLinear`.

    Raises:
        ValueError: the config asks for a feature of Transformer Engine (fp8, fp4, delayed weight gradients, activation
            offloading). Or the layer of an expert, whose output its token dispatcher sums, has skip_bias_add=False.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **keywords: Any) -> None:
        _check_config(config)
        super().__init__(input_size, output_size, config=config, **keywords)
        _check_unsharded(self)
        if self.explicit_expert_comm and not self.skip_bias_add:
            raise ValueError(
                "skip_bias_add=False is not supported for experts, whose output the token dispatcher sums. Set "
                "skip_bias_add=True."
            )

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (output, bias if skip_bias_add else None) for `input_` [seq, batch, features].

        If input_is_parallel, `input_` holds this rank's features only.
        """
        x = input_ if self.input_is_parallel else scatter(input_, -1, group=self.tp_group)
        _check_weight(self.weight)
        bias = None if self.skip_bias_add else self.bias
        if self.explicit_expert_comm:
            output = F.linear(x, redirect_to_main_grad(self.weight))
        elif self.sequence_parallel:
            output = row_matmul(x, self.weight, None, self.tp_group, 0)
            # Add the bias outside of the op: the op would sum its gradient over ranks, and Megatron sums it again.
            output = output if bias is None else output + bias
        else:
            output = row_matmul(x, self.weight, bias, self.tp_group)
        return output, self.bias if self.skip_bias_add else None


class FusedVocabParallelEmbedding(VocabParallelEmbedding):
    """Megatron's VocabParallelEmbedding with its sum over ranks by an op of fused_tp; same arguments and results."""

    def __init__(self, *sizes: int, **keywords: Any) -> None:
        super().__init__(*sizes, **keywords)
        _check_unsharded(self)

    def forward(self, input_: Tensor) -> Tensor:
        """Embed `input_` [batch, seq].

        Returns [seq / ranks, batch, embedding_dim] if reduce_scatter_embeddings, else [batch, seq, embedding_dim].
        """
        ids = input_.transpose(0, 1) if self.reduce_scatter_embeddings else input_
        is_on_other_rank = (ids < self.vocab_start_index) | (ids >= self.vocab_end_index)
        rows = (ids - self.vocab_start_index).masked_fill(is_on_other_rank, 0)
        # As in the parent class: on GPUs the gradient of indexing is deterministic, that of F.embedding is not.
        embeddings = self.weight[rows] if self.deterministic_mode else F.embedding(rows, self.weight)
        partial_sum = embeddings.masked_fill(is_on_other_rank.unsqueeze(-1), 0)
        if self.reduce_scatter_embeddings:
            return reduce_scatter(partial_sum, 0, group=self.tp_group)
        return all_reduce(partial_sum, group=self.tp_group)


class SequenceParallelNorm(WrappedTorchNorm):
    """Megatron's WrappedTorchNorm (LayerNorm or RMSNorm of torch) with support for sequence_parallel.

    It marks its parameters; Megatron's finalize_model_grads sums the gradients of marked parameters over the ranks.
    """

    def __new__(cls, config: Any, *arguments: Any, **keywords: Any) -> Any:
        parent_config = copy(config)
        parent_config.sequence_parallel = False
        norm = WrappedTorchNorm(parent_config, *arguments, **keywords)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def _check_config(config: Any) -> None:
    for name in ("fp8", "fp4", "delay_wgrad_compute", "cpu_offloading"):
        if getattr(config, name, None):
            raise ValueError(
                f"{name}={getattr(config, name)!r} is not supported without Transformer Engine's layers. Unset {name}, "
                "or use Transformer Engine's spec."
            )


def _check_unsharded(layer: Any) -> None:
    """Raise ValueError for weights that are also sharded over data parallel ranks, as Megatron-Core 0.19 can do."""
    if getattr(layer, "gtp_remat_size", 1) > 1:
        raise ValueError(
            f"{type(layer).__name__} does not support generalized tensor parallelism, got a weight that is sharded "
            f"over {layer.gtp_remat_size} more ranks. Set gtp_remat_size to 1."
        )


def _check_weight(weight: Tensor) -> None:
    if hasattr(weight, "__fsdp_param__"):
        raise ValueError(
            "Megatron-FSDP is not supported, because it expects each gradient to overwrite main_grad, but fused layers "
            "add to main_grad. Use Megatron's DistributedDataParallel."
        )


_FUSED_CLASSES: dict[type, type] = {
    ColumnParallelLinear: FusedColumnParallelLinear,
    RowParallelLinear: FusedRowParallelLinear,
    WrappedTorchNorm: SequenceParallelNorm,
    DotProductAttention: FusedDotProductAttention,
}


def _replace_classes(spec: Any, classes: list[type]) -> Any:
    """Copy a part of a spec with fused classes, and append all classes in it to `classes`."""
    if isinstance(spec, type):
        classes.append(spec)
        return _FUSED_CLASSES.get(spec, spec)
    if isinstance(spec, (list, tuple)):
        return type(spec)(_replace_classes(part, classes) for part in spec)
    if isinstance(spec, partial):  # Megatron-Core 0.19 uses these instead of some specs
        keywords = {name: _replace_classes(value, classes) for name, value in spec.keywords.items()}
        return partial(_replace_classes(spec.func, classes), *spec.args, **keywords)
    if is_dataclass(spec) and not isinstance(spec, type):
        names = [field.name for field in fields(spec) if field.init]
        return replace(spec, **{name: _replace_classes(getattr(spec, name), classes) for name in names})
    return spec
