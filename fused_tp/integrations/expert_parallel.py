"""Experts dealt out over ranks: which modules, and how rows come to their experts and back.

| ranks of `ep_dim`                    | forward                                       | gradients of experts     |
|--------------------------------------|-----------------------------------------------|--------------------------|
| tensor parallel ones, of same tokens | each runs its experts; outputs are summed     | complete                 |
| others, whose tokens differ          | rows to their experts by all-to-all, and back | of all ranks' tokens     |

Where other gradients are averaged over these ranks, those of experts are divided by their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.integrations.global_loss import scale_gradient
from fused_tp.ops.collectives import all_gather
from fused_tp.ops.exchange_rows import exchange_rows
from fused_tp.runtime.group import GroupLike


@dataclass(frozen=True)
class ExpertRanks:
    """Which ranks have which part of the experts of a module.

    Attributes:
        parts: the ranks that hold parts of the same experts; one where experts are whole.
        dealt: those over which experts are dealt out, or None. The same as `parts` where these have the same tokens.
        grad_factor: of the gradients of parameters.
    """

    parts: GroupLike
    dealt: DeviceMesh | None = None
    grad_factor: float = 1.0

    @property
    def exchange(self) -> bool:
        """Whether the ranks of `dealt` have tokens of their own, which go to the experts."""
        return self.dealt is not None and self.dealt is not self.parts

    def own(self, experts: int) -> range:
        """This rank's experts of so many."""
        if self.dealt is None:
            return range(experts)
        each = experts // self.dealt.size()
        return range(self.dealt.get_local_rank() * each, (self.dealt.get_local_rank() + 1) * each)


@dataclass(frozen=True)
class Dealing:
    """What `parallelize` deals out.

    Attributes:
        names: of the modules of experts.
        mesh: over whose ranks.
        tp_mesh: that of tensor parallel ranks, which is `mesh` itself where experts are dealt out over them, or None.
        parameter_mesh: of both dims, where there are both.
        grad_factor: of the gradients of their parameters.
    """

    names: frozenset[str]
    mesh: DeviceMesh
    tp_mesh: DeviceMesh | None
    parameter_mesh: DeviceMesh | None
    grad_factor: float

    def ranks(self, *, cut: bool) -> ExpertRanks:
        """Of experts that tensor parallel ranks hold parts of (`cut`), or whole."""
        if self.mesh is self.tp_mesh:
            return ExpertRanks(self.mesh, self.mesh)
        parts = self.tp_mesh if cut and self.tp_mesh is not None else self._one_rank
        return ExpertRanks(parts, self.mesh, self.grad_factor)

    @cached_property
    def _one_rank(self) -> DeviceMesh:
        """Of this rank alone; a mesh, which can be copied with the model."""
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return DeviceMesh.from_group(group, self.mesh.device_type, mesh_dim_names=("experts",))


class Exchange:
    """Rows sorted by expert, of all experts, to the ranks that have these, and what is made of them back.

    Args:
        counts: int64 [experts], how many rows each expert has of this rank.
        ranks: which exchange.

    Attributes:
        chosen: of each row received, sorted by expert, its expert, counted from the first of this rank's.
    """

    def __init__(self, counts: Tensor, ranks: ExpertRanks) -> None:
        mesh = ranks.dealt
        assert mesh is not None
        self._mesh, self._factor = mesh, ranks.grad_factor
        with torch.no_grad():  # as float64, which ranks can gather: exact up to 2^53 rows
            every = all_gather(counts.double()[None], 0, group=mesh).long()
        own = ranks.own(len(counts))
        from_each = every[:, own.start : own.stop]
        self._send: list[int] = every[mesh.get_local_rank()].view(mesh.size(), -1).sum(1).tolist()
        self._receive: list[int] = from_each.sum(1).tolist()
        # Rows come rank by rank, those of each sorted by expert.
        numbers = torch.arange(len(own), device=counts.device).repeat(mesh.size())
        arrived = numbers.repeat_interleave(from_each.reshape(-1), output_size=sum(self._receive))
        self.chosen, self._order = arrived.sort(stable=True)

    def bring(self, rows: Tensor) -> Tensor:
        """The rows that all ranks have for this rank's experts, sorted by expert."""
        received = exchange_rows(rows, self._send, self._receive, group=self._mesh)
        # The factor of all that is computed until `take_back`, and of nothing before.
        return scale_gradient(received.index_select(0, self._order), 1 / self._factor)

    def take_back(self, rows: Tensor) -> Tensor:
        """What the experts have made of this rank's rows, in the order in which it had them."""
        made = scale_gradient(rows, self._factor).index_select(0, self._order.argsort())
        return exchange_rows(made, self._receive, self._send, group=self._mesh)


def check_dealt(name: str, experts: nn.Module, ranks: int, served: bool) -> None:
    """Refuse experts that cannot be dealt out.

    Raises:
        ValueError: their number is no multiple of the ranks; code or modules of their own; parameters that are not one
            for each expert.
    """
    of_each = {key: len(p) if p.ndim else 0 for key, p in experts.named_parameters(recurse=False)}
    inside = [key for key, child in experts.named_children() if next(child.parameters(), None) is not None]
    kind = type(experts).__name__
    if not served or inside or not of_each or len(set(of_each.values())) > 1:
        why = (
            f"it has {inside[0]!r} inside"
            if inside
            else "it runs its experts by code of its own, which says of no token where it goes"
            if not served
            else f"its parameters have first dims of {of_each}, not one for each expert"
        )
        raise ValueError(
            f"{name!r} ({kind}) cannot be dealt out over expert parallel ranks: {why}. Leave ep_dim out; where the "
            "mesh has a tensor parallel dim, each of its ranks holds a part of each expert."
        )
    count = next(iter(of_each.values()))
    if count % ranks:
        sizes = [n for n in range(1, count + 1) if count % n == 0]
        raise ValueError(
            f"{name!r} has {count} experts, which {ranks} expert parallel ranks cannot share evenly. Numbers of ranks "
            f"that work: {', '.join(map(str, sizes))}."
        )


def offsets_to_counts(offsets: Tensor) -> Tensor:
    """int64 [experts], of where the rows of each expert end."""
    return offsets.long().diff(prepend=offsets.new_zeros(1).long())
