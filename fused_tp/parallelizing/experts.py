"""Run the experts of transformers models over ranks, by grouped matmuls with their communication.

transformers looks up the function that runs the experts of a layer by name (`ExpertsInterface`). The function computes
one row for each pair of a token and an expert that the token is routed to; rows are sorted by expert. Tensor parallel
ranks shard each expert:

| step                    | forward                               | backward                                |
|-------------------------|---------------------------------------|-----------------------------------------|
| gate_up_proj, columns   | local                                 | sum over ranks of the gradient of x     |
| gate                    | local, on this rank's columns         | local                                   |
| down_proj, rows         | sum per token and over ranks          | local                                   |
| routing weights         | factors of the rows                   | sum over ranks                          |
| bias of down_proj       | routing weights @ bias, after the sum | local                                   |

With sequence parallelism, the block around the experts, including the router, runs on this rank's shard of each
sequence, if `whole_blocks` finds that the block supports it:

| step                    | forward                               | backward                                |
|-------------------------|---------------------------------------|-----------------------------------------|
| routing                 | all-gather                            | reduce-scatter of the weights' gradient |
| gate_up_proj, columns   | all-gather of x                       | reduce-scatter of the gradient of x     |
| gate                    | local, on this rank's columns         | local                                   |
| down_proj, rows         | sum per token; reduce-scatter         | all-gather                              |
| bias of down_proj       | own routing weights @ bias            | sum over ranks                          |

If experts are distributed over ranks with different tokens, rows are sent to their experts before the first of these
steps and sent back after the last; routing weights stay on their rank. See `expert_parallel`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fused_tp.backends.grouped import Routing
from fused_tp.core.group import GroupLike
from fused_tp.ops.all_gather_grouped_matmul import all_gather_grouped_matmul
from fused_tp.ops.collectives import all_gather, copy_to_group, gather, scatter
from fused_tp.ops.column_parallel_grouped_matmul import column_parallel_grouped_matmul
from fused_tp.ops.grouped_matmul_all_reduce import grouped_matmul_all_reduce
from fused_tp.ops.grouped_matmul_reduce_scatter import grouped_matmul_reduce_scatter
from fused_tp.parallelizing.expert_parallel import ExpertExchange, ExpertRanks, offsets_to_counts
from fused_tp.parallelizing.forward_shard import LayerState

EXPERTS_FUNCTION = "fused_tp"
_RANKS_ATTRIBUTE = "_fused_tp_ranks"
_STATE_ATTRIBUTE = "_fused_tp_current_state"


def takes_routing(experts: Any) -> bool:
    """True if transformers looks up the function that runs `experts`; that function receives each token's routing."""
    return hasattr(experts, "is_transposed") and hasattr(experts, "_apply_gate")


def use_grouped_matmuls(experts: Any, ranks: ExpertRanks, current_state: Callable[[], LayerState]) -> None:
    """Make `experts`, for which `takes_routing` is true, run over `ranks`.

    `current_state` returns the sharding state of the running forward pass.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_FUNCTION, _run_experts)
    setattr(experts, _RANKS_ATTRIBUTE, ranks)
    setattr(experts, _STATE_ATTRIBUTE, current_state)
    experts.config = copy.copy(experts.config)  # other layers share the config and must keep their implementation
    experts.config._experts_implementation = EXPERTS_FUNCTION


def _run_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the output [tokens, hidden] for `hidden_states` [tokens, hidden].

    `top_k_index` and `top_k_weights` [tokens, top_k] are the routing. Ranks that shard the same experts all pass the
    same tokens or, with sequence parallelism, each its shard.
    """
    ranks: ExpertRanks = getattr(experts, _RANKS_ATTRIBUTE)
    casts_input = not torch.is_autocast_enabled(hidden_states.device.type)
    x = hidden_states.to(experts.down_proj.dtype) if casts_input else hidden_states
    run_over_ranks = _run_exchanging_rows if ranks.needs_exchange else _run_summing_outputs
    y: Tensor = run_over_ranks(experts, ranks, x, top_k_index, top_k_weights)
    return y.to(hidden_states.dtype)


def _run_summing_outputs(experts: Any, ranks: ExpertRanks, x: Tensor, top_k_index: Tensor, weights: Tensor) -> Tensor:
    state: LayerState = getattr(experts, _STATE_ATTRIBUTE)()
    group, length = ranks.shard_ranks, state.local_len
    up_matmul: Callable[..., Tensor]
    down_matmul: Callable[..., Tensor]
    if state.is_tp_sharded and length is not None:
        shape = (state.batch_size, length)
        expert_indices, routing_weights = _gather_routing(top_k_index, weights, shape, group)
        x = x.unflatten(0, (state.batch_size, -1))
        up_matmul = partial(all_gather_grouped_matmul, group=group, gather_dim=1, gather_size=length)
        down_matmul = partial(grouped_matmul_reduce_scatter, shape=shape, group=group, scatter_dim=1)
    else:
        expert_indices, routing_weights = top_k_index, copy_to_group(weights, group=group)
        up_matmul = partial(column_parallel_grouped_matmul, group=group)
        down_matmul = partial(grouped_matmul_all_reduce, shape=x.shape[:1], group=group)
    row_experts, order = expert_indices.reshape(-1).sort(stable=True)
    local_count = len(experts.down_proj)
    if ranks.expert_mesh is not None:
        local_experts = ranks.local_experts(local_count * ranks.expert_mesh.size())
        ends = torch.tensor(
            [local_experts.start, local_experts.stop], dtype=row_experts.dtype, device=row_experts.device
        )
        start, stop = torch.searchsorted(row_experts, ends).tolist()
        row_experts, order = row_experts[start:stop] - local_experts.start, order[start:stop]
    routing = routing_from_sorted_experts(row_experts, order // weights.shape[-1], local_count)
    hidden = _apply_gate_up(experts, up_matmul, x, routing, row_experts)
    y = down_matmul(hidden, _down_weight(experts), *routing, routing_weights.reshape(-1)[order]).flatten(0, -2)
    if experts.has_bias:
        bias = experts.down_proj_bias
        if ranks.expert_mesh is not None:
            bias = (all_gather if state.is_tp_sharded else gather)(bias, 0, group=ranks.expert_mesh)
        weights_by_expert = weights.new_zeros(len(weights), len(bias)).scatter_add(1, top_k_index, weights)
        y = y + weights_by_expert.to(y.dtype) @ bias.to(y.dtype)
    return y


def _gather_routing(
    top_k_index: Tensor, weights: Tensor, shape: tuple[int, int], group: GroupLike
) -> tuple[Tensor, Tensor]:
    """Gather the expert indices and weights of all ranks' tokens, `shape` [batch, length].

    Indices are sent as floats (exact in float32) to gather both tensors in one message. Backward reduce-scatters the
    gradient of the weights.
    """
    dtype = torch.promote_types(weights.dtype, torch.float32)
    local_routing = torch.cat([top_k_index.to(dtype), weights.to(dtype)], 1).unflatten(0, (shape[0], -1))
    expert_indices, routing_weights = (
        all_gather(local_routing, 1, group=group, gather_size=shape[1]).flatten(0, 1).chunk(2, 1)
    )
    return expert_indices.long(), routing_weights.to(weights.dtype)


def _run_exchanging_rows(experts: Any, ranks: ExpertRanks, x: Tensor, top_k_index: Tensor, weights: Tensor) -> Tensor:
    assert ranks.expert_mesh is not None
    row_experts, order = top_k_index.reshape(-1).sort(stable=True)
    expert_count = len(experts.down_proj) * ranks.expert_mesh.size()
    all_routing = routing_from_sorted_experts(row_experts, order // weights.shape[-1], expert_count)
    exchange = ExpertExchange(offsets_to_counts(all_routing.offsets), ranks)
    rows = exchange.send_rows(all_routing.gather_rows(x))
    # The grouped matmuls treat each received row as one token.
    row_indices = torch.arange(len(rows), device=rows.device)
    routing = routing_from_sorted_experts(exchange.row_experts, row_indices, len(experts.down_proj))
    up_matmul = partial(column_parallel_grouped_matmul, group=ranks.shard_ranks)
    hidden = _apply_gate_up(experts, up_matmul, rows, routing, exchange.row_experts)
    y = grouped_matmul_all_reduce(
        hidden, _down_weight(experts), *routing, shape=rows.shape[:1], group=ranks.shard_ranks
    )
    if experts.has_bias:
        y = y + experts.down_proj_bias[exchange.row_experts]
    outputs = exchange.return_rows(y).index_select(0, order.argsort()).view(*weights.shape, -1)
    return (outputs * weights.unsqueeze(-1)).sum(1)


def _apply_gate_up(
    experts: Any, multiply: Callable[..., Tensor], x: Tensor, routing: Routing, row_experts: Tensor
) -> Tensor:
    """Return the input of down_proj, one row per row of `routing`.

    `row_experts` holds the expert of each row. `multiply` is the op that applies gate_up_proj.
    """
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    up_weight = getattr(experts, name)
    up_weight = up_weight.transpose(1, 2) if experts.is_transposed else up_weight
    h = multiply(x, up_weight, *routing)
    if experts.has_bias:
        h = h + getattr(experts, f"{name}_bias")[row_experts]
    gated: Tensor = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
    return gated


def _down_weight(experts: Any) -> Tensor:
    down: Tensor = experts.down_proj
    return down.transpose(1, 2) if experts.is_transposed else down


def routing_from_sorted_experts(row_experts: Tensor, row_tokens: Tensor, expert_count: int) -> Routing:
    """Return the Routing of rows whose experts are `row_experts` (sorted) and whose tokens are `row_tokens`."""
    # Not bincount, which would synchronize with the GPU.
    ends = torch.searchsorted(
        row_experts, torch.arange(expert_count, device=row_experts.device, dtype=row_experts.dtype), right=True
    )
    return Routing(row_tokens, ends.int())


# ---- experts with precomputed rows ----------------------------------------------------------------------------------
#
# Llama 4 passes every token to each expert as a row scaled by its score, with the rows sorted by expert.


def distribute_rows(experts: nn.Module, ranks: ExpertRanks, *, sum_output: Any, share_input: Any) -> None:
    """Hook `experts`, whose input is rows [experts * tokens, hidden], so that their forward runs this rank's experts.

    `share_input` and `sum_output` are the hooks for ranks that shard the same experts.
    """
    setattr(experts, _RANKS_ATTRIBUTE, ranks)
    experts.register_forward_pre_hook(_send_rows)
    if ranks.needs_exchange:
        experts.register_forward_pre_hook(share_input, with_kwargs=True)
        experts.register_forward_hook(sum_output)
    experts.register_forward_hook(_return_rows)


def _send_rows(experts: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    ranks: ExpertRanks = getattr(experts, _RANKS_ATTRIBUTE)
    (x,) = args
    if not ranks.needs_exchange:
        return (scatter(x, 0, group=ranks.expert_mesh),)
    assert ranks.expert_mesh is not None
    expert_count = next(experts.parameters()).shape[0]  # a DTensor's shape counts the experts of all ranks
    experts._fused_tp_exchange = ExpertExchange(
        torch.full((expert_count,), len(x) // expert_count, dtype=torch.int64, device=x.device), ranks
    )
    return (experts._fused_tp_exchange.send_rows(x),)


def _return_rows(experts: Any, args: Any, y: Tensor) -> Tensor:
    ranks: ExpertRanks = getattr(experts, _RANKS_ATTRIBUTE)
    if not ranks.needs_exchange:
        return gather(y, 0, group=ranks.expert_mesh)
    exchange: ExpertExchange = experts._fused_tp_exchange
    del experts._fused_tp_exchange
    return exchange.return_rows(y)
