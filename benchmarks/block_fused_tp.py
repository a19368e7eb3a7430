"""The block's layers by fused_tp.nn, used as its documentation says."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fused_tp.nn import ColumnParallelLinear, RowParallelLinear, reduce_grad, share_gather


class FusedLayers:
    """Column- and row-parallel layers over all ranks; q, k, v share a gather, and so do gate and up."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

        def linear(name: str) -> nn.Linear:
            whole = nn.Linear(weights[name].shape[1], weights[name].shape[0], bias=False, device="meta")
            whole.weight = nn.Parameter(weights[name])
            return whole

        def column(name: str) -> ColumnParallelLinear:
            return ColumnParallelLinear.from_linear(linear(name), mesh=mesh, sequence_parallel=True, sequence_dim=0)

        def row(name: str) -> RowParallelLinear:
            return RowParallelLinear.from_linear(linear(name), mesh=mesh, sequence_parallel=True, sequence_dim=0)

        self._mesh = mesh
        self._q, self._k, self._v = column("q"), column("k"), column("v")
        self._gate, self._up = column("gate"), column("up")
        self._o, self._down = row("o"), row("down")
        share_gather([self._q, self._k, self._v])
        share_gather([self._gate, self._up])
        self._norms = [nn.Parameter(weights[f"norm{index}"].clone()) for index in range(2)]
        layers = (self._q, self._k, self._v, self._gate, self._up, self._o, self._down)
        self.parameters: list[nn.Parameter] = [*self._norms, *(layer.weight for layer in layers)]

    def norm_weight(self, index: int) -> Tensor:
        return reduce_grad(self._norms[index], self._mesh)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._q(x), self._k(x), self._v(x)

    def attention_out(self, x: Tensor) -> Tensor:
        return self._o(x)

    def gate_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._gate(x), self._up(x)

    def down(self, x: Tensor) -> Tensor:
        return self._down(x)

    def finish_grads(self) -> None:
        pass  # complete when backward() returns

    def norm_grad(self) -> Tensor:
        grad = self._norms[0].grad
        assert grad is not None
        return grad
