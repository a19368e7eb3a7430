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
        parts: ranks that each hold a shard of the same experts; this rank alone if its experts are unsharded.
        dealt: ranks over which experts are distributed, or None. `parts` itself if these ranks have the same tokens.
        grad_factor: factor by which the gradients of the experts' parameters are multiplied.
    """

    parts: GroupLike
    dealt: DeviceMesh | None = None
    grad_factor: float = 1.0

    @property
    def exchange(self) -> bool:
        """True if the ranks of `dealt` have different tokens, so that rows must be exchanged between them."""
        return self.dealt is not None and self.dealt is not self.parts

    def own(self, experts: int) -> range:
        """Indices of this rank's experts, out of `experts`."""
        if self.dealt is None:
            return range(experts)
        each = experts // self.dealt.size()
        return range(self.dealt.get_local_rank() * each, (self.dealt.get_local_rank() + 1) * each)


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

    def ranks(self, *, sharded: bool) -> ExpertRanks:
        """Placement of experts. `sharded`: the tensor parallel ranks also shard each expert."""
        if self.mesh is self.tp_mesh:
            return ExpertRanks(self.mesh, self.mesh)
        parts = self.tp_mesh if sharded and self.tp_mesh is not None else self._one_rank
        return ExpertRanks(parts, self.mesh, self.grad_factor)

    @cached_property
    def _one_rank(self) -> DeviceMesh:
        """Mesh of this rank alone. Unlike a process group, a mesh can be copied with the model."""
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return DeviceMesh.from_group(group, self.mesh.device_type, mesh_dim_names=("experts",))


class ExpertExchange:
    """Exchange of rows with the ranks that hold the experts: sends rows, sorted by expert, and returns the outputs.

    Args:
        counts: int64 [experts], number of this rank's rows per expert.
        ranks: placement of the experts.

    Attributes:
        chosen: expert of each received row, ascending; an index into this rank's experts.
    """

    def __init__(self, counts: Tensor, ranks: ExpertRanks) -> None:
        mesh = ranks.dealt
        assert mesh is not None
        self._mesh, self._factor = mesh, ranks.grad_factor
        with torch.no_grad():  # all_gather takes float64, which is exact up to 2^53 rows
            every = all_gather(counts.double()[None], 0, group=mesh).long()
        own = ranks.own(len(counts))
        from_each = every[:, own.start : own.stop]
        self._send: list[int] = every[mesh.get_local_rank()].view(mesh.size(), -1).sum(1).tolist()
        self._receive: list[int] = from_each.sum(1).tolist()
        # Rows arrive grouped by rank, and sorted by expert within each rank.
        numbers = torch.arange(len(own), device=counts.device).repeat(mesh.size())
        arrived = numbers.repeat_interleave(from_each.reshape(-1), output_size=sum(self._receive))
        self.chosen, self._order = arrived.sort(stable=True)

    def bring(self, rows: Tensor) -> Tensor:
        """Send `rows` to their experts. Return the rows of all ranks for this rank's experts, sorted by expert."""
        received = exchange_rows(rows, self._send, self._receive, group=self._mesh)
        # In backward this undoes the factor that `take_back` applies, so that only the gradients computed between the
        # two calls, those of the experts' parameters, are scaled.
        return scale_gradient(received.index_select(0, self._order), 1 / self._factor)

    def take_back(self, rows: Tensor) -> Tensor:
        """Return the experts' outputs for this rank's rows, in the order of the rows passed to `bring`."""
        made = scale_gradient(rows, self._factor).index_select(0, self._order.argsort())
        return exchange_rows(made, self._receive, self._send, group=self._mesh)


def check_distributed(name: str, experts: nn.Module, ranks: int, supported: bool) -> None:
    """Raise if `experts` cannot be distributed over `ranks` ranks.

    Args:
        supported: this package can run the experts on rows received from other ranks.

    Raises:
        ValueError: `supported` is False; the number of experts is not a multiple of `ranks`; a submodule of `experts`
            has parameters; or a parameter does not have one entry per expert in its first dim.
    """
    first_dims = {key: len(p) if p.ndim else 0 for key, p in experts.named_parameters(recurse=False)}
    inside = [key for key, child in experts.named_children() if next(child.parameters(), None) is not None]
    kind = type(experts).__name__
    if not supported or inside or not first_dims or len(set(first_dims.values())) > 1:
        why = (
            f"its submodule {inside[0]!r} has parameters"
            if inside
            else "its forward is custom and does not expose which expert each token is routed to"
            if not supported
            else f"the first dim of each parameter must be the number of experts, got {first_dims}"
        )
        raise ValueError(
            f"{name!r} ({kind}) cannot be distributed over expert parallel ranks: {why}. Omit ep_dim; with a tensor "
            "parallel dim, every rank then holds a shard of each expert."
        )
    count = next(iter(first_dims.values()))
    if count % ranks:
        sizes = [n for n in range(1, count + 1) if count % n == 0]
        raise ValueError(
            f"{name!r} has {count} experts, which is not a multiple of the {ranks} expert parallel ranks. Use one of "
            f"these numbers of ranks: {', '.join(map(str, sizes))}."
        )


def offsets_to_counts(offsets: Tensor) -> Tensor:
    """Convert the end offsets of each expert's rows to counts, int64 [experts]."""
    return offsets.long().diff(prepend=offsets.new_zeros(1).long())
