"""Expert parallelism: the ranks that hold the experts of a module, and the exchange of rows with them.

| ranks of `ep_dim`                    | forward                                       | gradients of experts     |
|--------------------------------------|-----------------------------------------------|--------------------------|
| tensor parallel, same tokens         | each runs its experts; outputs are summed     | complete                 |
| not tensor parallel, other tokens    | all-to-all of rows to their experts, and back | over all ranks' tokens   |

If the gradients of the other parameters are averaged over the ranks of `ep_dim`, the gradients of experts are divided
by the number of these ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.core.group import GroupLike
from fused_tp.ops.collectives import all_gather
from fused_tp.ops.exchange_rows import exchange_rows
from fused_tp.parallelizing.global_loss import scale_gradient


@dataclass(frozen=True)
class ExpertRanks:
    """Placement of the experts of a module on ranks.

    Attributes:
        shard_ranks: ranks that each hold a shard of the same experts; this rank alone if its experts are unsharded.
        expert_mesh: ranks over which experts are distributed, or None. `shard_ranks` itself if these ranks have the
            same tokens.
        grad_factor: factor by which the gradients of the experts' parameters are multiplied.
    """

    shard_ranks: GroupLike
    expert_mesh: DeviceMesh | None = None
    grad_factor: float = 1.0

    @property
    def needs_exchange(self) -> bool:
        """True if the ranks of `expert_mesh` have different tokens, so that rows must be exchanged between them."""
        return self.expert_mesh is not None and self.expert_mesh is not self.shard_ranks

    def local_experts(self, expert_count: int) -> range:
        """Indices of this rank's experts, out of `expert_count`."""
        if self.expert_mesh is None:
            return range(expert_count)
        experts_per_rank = expert_count // self.expert_mesh.size()
        return range(
            self.expert_mesh.get_local_rank() * experts_per_rank,
            (self.expert_mesh.get_local_rank() + 1) * experts_per_rank,
        )


@dataclass(frozen=True)
class ExpertDistribution:
    """Distribution of experts over the ranks of `ep_dim`, as requested from `parallelize`.

    Attributes:
        names: names of the modules of experts.
        mesh: mesh of the ranks that experts are distributed over.
        tp_mesh: tensor parallel mesh, or None. It is `mesh` itself if experts are distributed over its ranks.
        parameter_mesh: 2-D mesh of the expert parallel and tensor parallel dims, or None if one of them is missing.
        grad_factor: factor of the gradients of the experts' parameters.
    """

    names: frozenset[str]
    mesh: DeviceMesh
    tp_mesh: DeviceMesh | None
    parameter_mesh: DeviceMesh | None
    grad_factor: float

    def expert_ranks(self, *, is_sharded: bool) -> ExpertRanks:
        """Placement of experts. `is_sharded`: the tensor parallel ranks also shard each expert."""
        if self.mesh is self.tp_mesh:
            return ExpertRanks(self.mesh, self.mesh)
        shard_ranks = self.tp_mesh if is_sharded and self.tp_mesh is not None else self._single_rank_mesh
        return ExpertRanks(shard_ranks, self.mesh, self.grad_factor)

    @cached_property
    def _single_rank_mesh(self) -> DeviceMesh:
        """Mesh of this rank alone. Unlike a process group, a mesh can be copied with the model."""
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return DeviceMesh.from_group(group, self.mesh.device_type, mesh_dim_names=("experts",))


class ExpertExchange:
    """Exchange of rows with the ranks that hold the experts: sends rows, sorted by expert, and returns the outputs.

    Args:
        counts: int64 [experts], number of this rank's rows per expert.
        ranks: placement of the experts.

    Attributes:
        row_experts: expert of each received row, ascending; an index into this rank's experts.
    """

    def __init__(self, counts: Tensor, ranks: ExpertRanks) -> None:
        mesh = ranks.expert_mesh
        assert mesh is not None
        self._mesh, self._grad_factor = mesh, ranks.grad_factor
        with torch.no_grad():  # all_gather takes float64, which is exact up to 2^53 rows
            all_counts = all_gather(counts.double()[None], 0, group=mesh).long()
        local_experts = ranks.local_experts(len(counts))
        received_counts = all_counts[:, local_experts.start : local_experts.stop]
        self._send_counts: list[int] = all_counts[mesh.get_local_rank()].view(mesh.size(), -1).sum(1).tolist()
        self._receive_counts: list[int] = received_counts.sum(1).tolist()
        # Rows arrive grouped by rank, and sorted by expert within each rank.
        expert_indices = torch.arange(len(local_experts), device=counts.device).repeat(mesh.size())
        arrival_experts = expert_indices.repeat_interleave(
            received_counts.reshape(-1), output_size=sum(self._receive_counts)
        )
        self.row_experts, self._arrival_order = arrival_experts.sort(stable=True)

    def send_rows(self, rows: Tensor) -> Tensor:
        """Send `rows` to their experts. Return the rows of all ranks for this rank's experts, sorted by expert."""
        received_rows = exchange_rows(rows, self._send_counts, self._receive_counts, group=self._mesh)
        # In backward this undoes the factor that `return_rows` applies, so that only the gradients computed between the
        # two calls, those of the experts' parameters, are scaled.
        return scale_gradient(received_rows.index_select(0, self._arrival_order), 1 / self._grad_factor)

    def return_rows(self, rows: Tensor) -> Tensor:
        """Return the experts' outputs for this rank's rows, in the order of the rows passed to `send_rows`."""
        outputs = scale_gradient(rows, self._grad_factor).index_select(0, self._arrival_order.argsort())
        return exchange_rows(outputs, self._receive_counts, self._send_counts, group=self._mesh)


def check_distributable(name: str, experts: nn.Module, num_ranks: int, is_supported: bool) -> None:
    """Raise if `experts` cannot be distributed over `num_ranks` ranks.

    Args:
        is_supported: this package can run the experts on rows received from other ranks.

    Raises:
        ValueError: `is_supported` is False; the number of experts is not a multiple of `num_ranks`; a submodule of
            `experts` has parameters; or a parameter does not have one entry per expert in its first dim.
    """
    first_dims = {key: len(p) if p.ndim else 0 for key, p in experts.named_parameters(recurse=False)}
    submodules = [key for key, child in experts.named_children() if next(child.parameters(), None) is not None]
    class_name = type(experts).__name__
    if not is_supported or submodules or not first_dims or len(set(first_dims.values())) > 1:
        reason = (
            f"its submodule {submodules[0]!r} has parameters"
            if submodules
            else "its forward is custom and does not expose which expert each token is routed to"
            if not is_supported
            else f"the first dim of each parameter must be the number of experts, got {first_dims}"
        )
        raise ValueError(
            f"{name!r} ({class_name}) cannot be distributed over expert parallel ranks: {reason}. Omit ep_dim; with a "
            "tensor parallel dim, every rank then holds a shard of each expert."
        )
    expert_count = next(iter(first_dims.values()))
    if expert_count % num_ranks:
        rank_counts = [n for n in range(1, expert_count + 1) if expert_count % n == 0]
        raise ValueError(
            f"{name!r} has {expert_count} experts, which is not a multiple of the {num_ranks} expert parallel ranks. "
            f"Use one of these numbers of ranks: {', '.join(map(str, rank_counts))}."
        )


def offsets_to_counts(offsets: Tensor) -> Tensor:
    """Convert the end offsets of each expert's rows to counts, int64 [experts]."""
    return offsets.long().diff(prepend=offsets.new_zeros(1).long())
