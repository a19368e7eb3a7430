"""Experts of transformers models over tensor parallel ranks: grouped matmuls with their communication.

transformers looks up by name what runs the experts of a layer (`ExpertsInterface`). Rows, one for each token and expert
that it is routed to, are sorted by expert:

| step                        | forward                              | backward                                    |
|-----------------------------|--------------------------------------|---------------------------------------------|
| gate_up_proj, by columns    | local                                | sum over ranks of the gradient of x         |
| gate                        | the model's own, of this rank's half of gates and ups | local                      |
| down_proj, by rows          | added up by token and over ranks     | local                                       |
| routing weights             | factors of the rows                  | sum over ranks                              |
| bias of down_proj           | routing weights @ bias, after the sum | local                                      |
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.ops.collectives import copy_to_group
from fused_tp.ops.column_parallel_grouped_matmul import column_parallel_grouped_matmul
from fused_tp.ops.grouped_matmul_all_reduce import grouped_matmul_all_reduce
from fused_tp.schedules.grouped import Routing

NAME = "fused_tp"
_MESH = "_fused_tp_mesh"


def takes_routing(experts: Any) -> bool:
    """Whether transformers looks up what runs these experts, which is told of each token's experts and weights."""
    return hasattr(experts, "is_transposed") and hasattr(experts, "_apply_gate")


def run_grouped(experts: Any, mesh: DeviceMesh) -> None:
    """Have experts, of each of which a rank holds a part, run by `_forward` over the ranks of `mesh`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
    setattr(experts, _MESH, mesh)
    experts.config = copy.copy(experts.config)  # which layers share that run as they did
    experts.config._experts_implementation = NAME


def _forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The output [tokens, hidden] for `hidden_states` [tokens, hidden], routed by `top_k_index` and `top_k_weights`
    [tokens, top_k], all of which every rank has."""
    mesh: DeviceMesh = getattr(experts, _MESH)
    up = experts.gate_up_proj if experts.has_gate else experts.up_proj
    down, top_k = experts.down_proj, top_k_index.shape[-1]
    if experts.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    x = hidden_states if torch.is_autocast_enabled(hidden_states.device.type) else hidden_states.to(down.dtype)
    weights = copy_to_group(top_k_weights, group=mesh)

    chosen, order = top_k_index.reshape(-1).sort(stable=True)
    routing = route(chosen, order // top_k, len(down))
    h = column_parallel_grouped_matmul(x, up, *routing, group=mesh)
    if experts.has_bias:
        h = h + (experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias)[chosen]
    h = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
    scale = weights.reshape(-1)[order]
    y = grouped_matmul_all_reduce(h, down, *routing, scale, shape=x.shape[:1], group=mesh)
    if experts.has_bias:
        y = y + _by_expert(top_k_index, top_k_weights, len(down)) @ experts.down_proj_bias.to(y.dtype)
    return y.to(hidden_states.dtype)


def route(chosen: Tensor, tokens: Tensor, experts: int) -> Routing:
    """The rows of `tokens`, whose experts `chosen` are sorted."""
    # Not by bincount, for which a GPU would have to be waited for.
    ends = torch.searchsorted(chosen, torch.arange(experts, device=chosen.device, dtype=chosen.dtype), right=True)
    return Routing(tokens, ends.int())


def _by_expert(top_k_index: Tensor, top_k_weights: Tensor, experts: int) -> Tensor:
    """[tokens, experts]: the weight of each expert for each token."""
    weights = top_k_weights.new_zeros(len(top_k_index), experts)
    return weights.scatter_add(1, top_k_index, top_k_weights)
