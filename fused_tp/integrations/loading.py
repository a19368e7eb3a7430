"""Fused layers for models that transformers' own loader shards: collectives overlap with the matmuls.

transformers (5.23 and later) shards a model over tensor parallel ranks while loading it: parameters become DTensors,
and the forward of a planned layer is wrapped in DTensor operations. This module replaces only that forward. Parameters,
loading, saving, FSDP2 and generation do not change:

| style                                                 | transformers                | here                     |
|-------------------------------------------------------|-----------------------------|--------------------------|
| colwise, colwise_gather_output, colwise_rep           | matmul; all-reduce backward | `column_parallel_matmul` |
| rowwise, rowwise_split_input, rowwise_rep             | matmul, then all-reduce     | `matmul_all_reduce`      |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fused_tp.nn.linear import column_matmul, row_matmul
from fused_tp.nn.sharding import local_shard
from fused_tp.ops.collectives import gather, scatter

COLUMN_STYLES = ("colwise", "colwise_gather_output", "colwise_rep")
ROW_STYLES = ("rowwise", "rowwise_split_input", "rowwise_rep")


@contextmanager
def fused_styles() -> Iterator[None]:
    """Context manager in which transformers' loader creates layers whose collectives overlap with their matmuls.

    Models loaded outside of the context, before or after, are not changed. Sequence and context parallelism, and one
    all-reduce for the gradients of q, k and v, need `parallelize`. Quantized layers and DTensor inputs run
    transformers' own forward.

    Raises:
        ImportError: transformers has no such styles.

    Example:
        >>> from transformers.distributed.configuration_utils import DistributedConfig
        >>> with fused_styles():
        ...     model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_size=2))
    """
    try:
        from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES as styles
    except ImportError as error:
        raise ImportError("fused_styles() needs transformers 5.23 or later, whose loader has such styles.") from error
    column_class, row_class = _fused_classes()
    previous_styles = {name: styles._local_mapping.get(name) for name in (*COLUMN_STYLES, *ROW_STYLES)}
    for names, fused_class in ((COLUMN_STYLES, column_class), (ROW_STYLES, row_class)):
        for name in names:
            style = styles[name]
            styles[name] = fused_class(
                input_layouts=style.input_layouts,
                output_layouts=style.output_layouts,
                use_local_output=style.use_local_output,
            )
    try:
        yield
    finally:
        for name, style in previous_styles.items():
            if style is None:
                del styles[name]
            else:
                styles[name] = style


@cache
def _fused_classes() -> tuple[Any, Any]:
    """Return subclasses of transformers' styles, which still define how parameters are sharded, loaded and saved."""
    from transformers.distributed import tensor_parallel

    class FusedColumn(tensor_parallel.ColwiseParallel):
        def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
            own_forward = super().install_forward(module, mesh).forward
            gathers_output = self.output_layouts.is_replicate()

            def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
                if not _is_supported_call(module, x):
                    return own_forward(x, *args, **kwargs)
                y = column_matmul(x, local_shard(module.weight), local_shard(module.bias), mesh)
                return gather(y, -1, group=mesh, gather_size=module.out_features) if gathers_output else y

            module.forward = forward
            return module

    class FusedRow(tensor_parallel.RowwiseParallel):
        def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
            own_forward = super().install_forward(module, mesh).forward
            scatters_input = self.input_layouts.is_replicate()

            def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
                if not _is_supported_call(module, x):
                    return own_forward(x, *args, **kwargs)
                x = scatter(x, -1, group=mesh) if scatters_input else x
                return row_matmul(x, local_shard(module.weight), local_shard(module.bias), mesh)

            module.forward = forward
            return module

    return FusedColumn, FusedRow


def _is_supported_call(module: nn.Module, x: Any) -> bool:
    # Compare forward methods, not classes: FSDP2 changes a module's class to a subclass.
    is_linear = type(module).forward is nn.Linear.forward and not getattr(module, "_hf_quantized_needs_local_tp", False)
    return is_linear and isinstance(x, Tensor) and not isinstance(x, DTensor)
