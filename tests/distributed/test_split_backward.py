"""`grad_input` and `grad_weight` of an op: together its backward, to the bit, with nothing communicated twice."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.ops.all_gather_matmul import ALL_GATHER_MATMUL
from fused_tp.ops.column_parallel_matmul import COLUMN_PARALLEL_MATMUL
from fused_tp.ops.matmul_all_reduce import MATMUL_ALL_REDUCE
from fused_tp.ops.matmul_all_reduce_rms_norm import MATMUL_ALL_REDUCE_RMS_NORM
from fused_tp.ops.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER
from fused_tp.ops.op import Op
from fused_tp.runtime.group import GroupName, resolve_group
from fused_tp.transport.torch_dist import torch_dist
from tests.reference import seeded
from tests.workers import on_ranks


class Context:
    """What autograd gives `setup_context`."""

    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


def flattened(grads: dict[str, Any]) -> dict[str, list[Tensor]]:
    found = {
        name: [g for g in (grad if isinstance(grad, list) else [grad]) if g is not None] for name, grad in grads.items()
    }
    return {name: grads for name, grads in found.items() if grads}


@on_ranks(2, env={"FUSED_TP_SCHEDULE": "plain"})
def test_input_and_weight_gradients_apart_are_those_of_a_backward(group: dist.ProcessGroup) -> None:
    rank, name = dist.get_rank(group), GroupName(group.group_name)
    transport = torch_dist(resolve_group(group), "cpu")

    def leaf(*shape: int, seed: int) -> Tensor:
        return seeded(*shape, dtype=torch.float32, seed=10 * seed + rank).requires_grad_()

    x, w, b = leaf(6, 5, seed=1), leaf(7, 5, seed=2), leaf(7, seed=3)
    residual, norm = leaf(6, 7, seed=4), leaf(7, seed=5)
    size = 6 * dist.get_world_size(group)
    cases: list[tuple[Op[Any], tuple[Any, ...]]] = [
        (ALL_GATHER_MATMUL, (x, [w, w], [b], [False, True], 0, size, True)),
        (COLUMN_PARALLEL_MATMUL, (x, [w], [b], [True])),
        (MATMUL_REDUCE_SCATTER, (x, w, b, 0)),
        (MATMUL_ALL_REDUCE, (x, w, b)),
        (MATMUL_ALL_REDUCE_RMS_NORM, (x, w, residual, norm, 1e-5)),
    ]
    for op, values in cases:
        args = op.pack((*values, name))
        context = Context()
        with torch.no_grad():
            output = op.forward(op.select(args), args)
            op.setup_context(context, args, output)
            outputs = [output] if isinstance(output, Tensor) else list(output)
            grads: list[Any] = [seeded(*y.shape, dtype=y.dtype, seed=90 + i) for i, y in enumerate(outputs)]
            given = [grads] if op.returns_list else grads
            before = transport.calls
            assert op.backward is not None
            joint = flattened(op.backward(op.saved(context), *given))
            counted, before = transport.calls - before, transport.calls
            saved = op.saved(context)
            inputs, weights = flattened(op.grad_input(saved, *given)), flattened(op.grad_weight(saved, *given))
            assert transport.calls - before == counted, op.name
            alone = flattened(op.grad_weight(op.saved(context), *given))
        assert not inputs.keys() & weights.keys()
        for found in ({**inputs, **weights}, {**inputs, **alone}):
            assert found.keys() == joint.keys(), op.name
            for key, tensors in joint.items():
                assert all(torch.equal(a, b) for a, b in zip(tensors, found[key], strict=True)), (op.name, key)
