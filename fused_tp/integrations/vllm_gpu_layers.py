"""Row-parallel layers of the plugin for vLLM on GPUs (`fused_tp.integrations.vllm`): matmul and all-reduce as one op.

    y [..., N] = all_reduce(x [..., K / ranks] @ weight^T) + bias

When a model is loaded, both ways are timed in CUDA graphs for each shape of weight, and their results are compared. A
call takes `matmul_all_reduce` where it was faster for the next smaller and the next larger number of rows that were
timed, and vLLM's matmul and all-reduce elsewhere. The ranks agree on the choice, so that all make the same call.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

from fused_tp.backends.autotune import choose_fastest, describe_difference
from fused_tp.integrations.engine_plugin import LayerType
from fused_tp.ops.matmul_all_reduce import matmul_all_reduce

logger = init_logger("vllm.plugins.fused_tp")

_STOCK, _FUSED = "vLLM's", "matmul_all_reduce"
_TIMED_ROWS = (1, 8, 32, 128, 512, 2048, 8192)
_ROUNDS = 5
_CALLS_PER_GRAPH = 8
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Of each shape and dtype of a weight: the numbers of rows that were timed, in ascending order, and whether
# matmul_all_reduce was faster.
_choices: dict[tuple[torch.Size, torch.dtype], list[tuple[int, bool]]] = {}


def register() -> None:
    """Register the layer for vLLM's of the same name."""
    registered = op_registry_oot.get("RowParallelLinear")
    if registered is None:
        PluggableLayer.register_oot(MatmulAllReduceLinear, name="RowParallelLinear")
    elif registered is not MatmulAllReduceLinear:
        logger.warning("fused_tp: RowParallelLinear stays that of another plugin, %s.", registered.__module__)


class TimedLinearMethod(UnquantizedLinearMethod):
    """UnquantizedLinearMethod that times the layer's shape once its weight is loaded."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Choose between vLLM's way and `matmul_all_reduce`. A collective call."""
        super().process_weights_after_loading(layer)
        key = layer.weight.shape, layer.weight.dtype
        if key not in _choices:
            _choices[key] = _time_rows(layer.weight.detach())
            faster = [str(num_rows) for num_rows, is_faster in _choices[key] if is_faster]
            logger.info(
                "fused_tp: matmul_all_reduce for a weight of %s of %s is faster with %s rows.",
                *(tuple(key[0]), key[1], ", ".join(faster) or "no number of"),
            )
        layer.is_fused = any(is_faster for _, is_faster in _choices[key])


class MatmulAllReduceLinear(RowParallelLinear, metaclass=LayerType):
    """vLLM's layer, with the matmul and the all-reduce as one op where that is faster.

    Attributes:
        is_fused: True if some number of rows takes `matmul_all_reduce`; else the layer is vLLM's.
    """

    is_fused = False
    quant_method: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.quant_method) is not UnquantizedLinearMethod or not self.reduce_results or self.tp_size == 1:
            return
        if reason := _reason_stock(self.weight):
            logger.info_once(f"fused_tp: row-parallel layers stay vLLM's, because {reason}.")
        else:
            self.quant_method = TimedLinearMethod()

    def forward(self, input_: Tensor) -> Any:
        """Return (y, bias that was not added), or y alone without `return_bias`."""
        if not self.is_fused or not self.input_is_parallel:
            return super().forward(input_)
        y = row_parallel(input_, self.weight, None if self.skip_bias_add else self.bias)
        if not self.return_bias:
            return y
        return y, self.bias if self.skip_bias_add else None


def _reason_stock(weight: Tensor) -> str:
    """Return the reason why a layer with this weight must be vLLM's; empty if there is none."""
    if weight.dtype not in _DTYPES:
        return f"its weights are of {weight.dtype}"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT wants vLLM's own sums"
    config = get_current_vllm_config_or_none()
    if config is not None and config.compilation_config.pass_config.fuse_allreduce_rms:
        return "vLLM fuses the all-reduce with the norm behind it (pass_config.fuse_allreduce_rms)"
    return ""


@torch.library.custom_op("fused_tp::vllm_row_parallel", mutates_args=())
def row_parallel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return all_reduce(x @ weight^T) + bias over vLLM's tensor-parallel group.

    Opaque to torch.compile, because the number of rows is known in a call only. No gradients.
    """
    # Without vLLM's subclass of Parameter, by which an operation would be dispatched through Python.
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    if _is_fused(weight, x.numel() // x.shape[-1]):
        return matmul_all_reduce(x, weight, bias, group=get_tp_group().device_group)
    return _stock(x, weight, bias)


@row_parallel.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _stock(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    group = get_tp_group()
    y: Tensor = group._all_reduce_out_place(linear(x, weight, bias if group.rank_in_group == 0 else None))
    return y


def _is_fused(weight: Tensor, num_rows: int) -> bool:
    """Return True if `matmul_all_reduce` was faster on both sides of `num_rows`, or at the end that is next to it."""
    choices = _choices.get((weight.shape, weight.dtype))
    if choices is None:  # the call is of a compiled graph that an engine with other options has saved
        return False
    above = bisect_left(choices, (num_rows, False))
    return all(is_faster for _, is_faster in choices[max(0, above - 1) : above + 1])


# -- timing -----------------------------------------------------------------------------------------------------------


def _time_rows(weight: Tensor) -> list[tuple[int, bool]]:
    config = get_current_vllm_config_or_none()
    most = _TIMED_ROWS[-1] if config is None else config.scheduler_config.max_num_batched_tokens
    counts = sorted({min(count, most) for count in _TIMED_ROWS})
    return [(count, _is_faster(weight, count)) for count in counts]


def _is_faster(weight: Tensor, num_rows: int) -> bool:
    """Return True if `matmul_all_reduce` is right and clearly faster for this number of rows, on all ranks."""
    group = get_tp_group()
    x = torch.randn(num_rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    ways: dict[str, Callable[[], Tensor]] = {
        _STOCK: lambda: _stock(x, weight, None),
        _FUSED: lambda: matmul_all_reduce(x, weight, group=group.device_group),
    }
    seconds = torch.full((len(ways), _ROUNDS), float("inf"), dtype=torch.float64, device="cpu")
    try:
        problem = describe_difference([ways[_FUSED]()], [ways[_STOCK]()])
        timers = [_make_timer(way, x.device) for way in ways.values()]
        for number in range(_ROUNDS):
            for index, timer in enumerate(timers):
                seconds[index, number] = timer()
    except Exception as error:  # vLLM must start without the op as well
        problem = f"{type(error).__name__}: {error}"
    if problem:
        logger.warning("fused_tp: matmul_all_reduce is not used for %d rows: %s", num_rows, problem)
        seconds[1] = float("inf")
    torch.distributed.all_reduce(seconds, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    if not seconds.isfinite().all():
        return False
    return choose_fastest(dict(zip(ways, seconds.tolist(), strict=True)), incumbent=_STOCK) == _FUSED


def _make_timer(run: Callable[[], Tensor], device: torch.device) -> Callable[[], float]:
    """Return a function that times `run`; on GPUs in a graph, where the time to launch kernels does not count."""
    if device.type != "cuda":

        def time_call() -> float:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start

        return time_call

    run()  # what is compiled or allocated in a first call is not captured
    graph = torch.cuda.CUDAGraph()
    with get_tp_group().graph_capture() as context, torch.cuda.graph(graph, stream=context.stream):
        for _ in range(_CALLS_PER_GRAPH):
            run()

    def time_graph() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / _CALLS_PER_GRAPH

    return time_graph
