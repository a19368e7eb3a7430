"""Whether the schedules of a group are right where it runs: every op, against fp64, in more than one situation.

    values    results and gradients of two sets of inputs are those of float64, but for roundings
    again     ... the same bits in many calls, which take the sets in turn: what a call leaves behind is not read again
    late      ... while each rank in turn comes late
    beside    ... while torch.distributed moves something of its own
    graph     ... captured in a CUDA graph and replayed with other inputs; on GPUs

A schedule whose bits differ between calls is right where those of the plain one differ too. Of ops of which all ranks
get the same, the ranks' bits are compared.

float64 is computed from the inputs of all ranks, which every rank makes by itself: no schedule checks another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.ops import collectives
from fused_tp.ops.all_gather_matmul import all_gather_matmul
from fused_tp.ops.matmul_all_reduce import matmul_all_reduce
from fused_tp.ops.matmul_all_reduce_rms_norm import matmul_all_reduce_rms_norm
from fused_tp.ops.matmul_reduce_scatter import matmul_reduce_scatter
from fused_tp.ops.ring_attention import ring_attention
from fused_tp.runtime import settings
from fused_tp.runtime.errors import FusedTPError
from fused_tp.runtime.group import GroupLike, resolve_group
from fused_tp.schedules.autotune import EVERYWHERE, checksum, difference, known_problem, set_right, set_wrong, usable
from fused_tp.transport.store import exchange

LATE_SECONDS = 0.02
LATE_CYCLES = 20_000_000  # of a GPU
BESIDE_ELEMENTS = 1 << 18
EPS = 1e-6
HEAD_DIM = 64
_BEGUN = "a check of it has begun and did not come back; delete this line to check it again"

ByRank = list[list[Tensor]]


class Example(NamedTuple):
    """An op with sizes.

    Attributes:
        op: its name.
        run: (inputs, group) -> results of this rank.
        reference: inputs of all ranks -> results of all ranks; differentiable.
        shapes: of the inputs of a rank.
        alike: numbers of the inputs that all ranks have alike.
        one_result: all ranks hold the same result, whose gradient they have alike, too.
    """

    op: str
    run: Callable[[Sequence[Tensor], GroupLike], Any]
    reference: Callable[[ByRank], ByRank]
    shapes: Callable[[int], list[tuple[int, ...]]]
    alike: frozenset[int] = frozenset()
    one_result: bool = False


class Verdict(NamedTuple):
    """What was found of an op on a schedule; `problem` is empty where it is right."""

    schedule: str
    op: str
    dtype: torch.dtype
    problem: str


def verify(
    group: GroupLike,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sequence[tuple[int, int, int]],
    *,
    calls: int = 100,
) -> Iterator[Verdict]:
    """What is found of each op on each schedule that the group can have, the plain ones first. A collective call.

    What is wrong is kept in the file of `FUSED_TP_AUTOTUNE`, which has to be set, and neither chosen by it nor checked
    again until its line is deleted. What is right is kept, too: then it is also measured where the variable is not set,
    between GPUs with NVLink. A check that ends the program counts as one that failed.

    Args:
        sizes: (m, k, n) of matmuls: rows over all ranks, features of x and columns of y on one.
        calls: of each op, sizes and schedule, at the least.

    Raises:
        ValueError: the group has one rank.

    Example:
        for verdict in verify(dist.group.WORLD, torch.device("cuda"), torch.bfloat16, [(4096, 4096, 1024)]):
            print(verdict)
    """
    described = resolve_group(group)
    ranks = list(described.ranks)
    if len(ranks) == 1:
        raise ValueError("The group has one rank, which has nothing to send: there is nothing to check.")
    # Checks have groups of their own, which they may leave unusable: ops one, and what moves beside them another.
    current, beside = dist.new_group(ranks), dist.new_group(ranks)
    examples: dict[str, list[Example]] = {}
    for one in (made for size in sizes for made in examples_of(len(ranks), *size)):
        examples.setdefault(one.op, []).append(one)
    for op, of_op in examples.items():
        uneven = False
        sets = [[_inputs(one, described.rank, described.size, device, dtype, seed) for seed in (1, 2)] for one in of_op]
        for schedule in usable(op, dtype, device, resolve_group(current)):
            what, problem = (schedule, op, dtype), ""
            if known := known_problem(described, device, *what):
                yield Verdict(schedule, op, dtype, known)
                continue
            set_wrong(described, device, {what: _BEGUN})
            for example, inputs in zip(of_op, sets, strict=True):
                try:
                    mine = _examined(schedule, example, inputs, current, beside, device, calls)
                except KeyboardInterrupt:  # the user's doing
                    set_wrong(described, device, {what: ""})
                    raise
                # Ranks that wait for one that has failed come here later than it does, by the deadline.
                patience = {"FUSED_TP_TIMEOUT": str(3 * settings.timeout_seconds())}
                with settings.environment(patience):
                    looks = exchange(described, f"check of {op} on {schedule}", mine)
                uneven |= schedule == "plain" and any(look["uneven"] for look in looks)
                problem = problem or _problem(looks, op in EVERYWHERE, uneven)
                if any(look["unusable"] for look in looks):
                    current, beside = dist.new_group(ranks), dist.new_group(ranks)
                    break
            backward = {(schedule, f"{op}_backward", dtype): problem} if problem else {}
            set_wrong(described, device, {what: problem, **backward})
            if not problem:
                set_right(described, device, [what, (schedule, f"{op}_backward", dtype)])
            yield Verdict(schedule, op, dtype, problem)


def _problem(looks: Sequence[dict[str, Any]], everywhere: bool, uneven: bool) -> str:
    for kind in ("unusable", "wrong", *([] if uneven else ["uneven"])):
        for rank, look in enumerate(looks):
            if look[kind]:
                return f"on rank {rank} {look[kind]}"
    if everywhere and not uneven and len({tuple(look["bits"]) for look in looks}) > 1:
        return "ranks hold different bits"
    return ""


class _Set(NamedTuple):
    inputs: list[Tensor]
    grads: list[Tensor]
    wanted: list[Tensor]  # results and gradients


def _examined(
    schedule: str,
    example: Example,
    sets: Sequence[_Set],
    group: dist.ProcessGroup,
    beside: dist.ProcessGroup,
    device: torch.device,
    calls: int,
) -> dict[str, Any]:
    """What one rank sees. However wrong a result is, it makes all calls that its peers make."""
    look: dict[str, Any] = {"unusable": "", "wrong": "", "uneven": "", "bits": []}
    try:
        with settings.environment({"FUSED_TP_SCHEDULE": schedule}):
            first = [_outcome(example, one, group) for one in sets]
            for found, one in zip(first, sets, strict=True):
                look["wrong"] = look["wrong"] or difference(found, one.wanted)
            results = len(sets[0].grads)
            look["bits"] = [checksum(t) for found in first for t in found[:results]]
            for when, again in _situations(example, sets, group, beside, device, calls):
                for number, found in again:
                    if not all(map(torch.equal, found, first[number])):
                        wrong = difference(found, first[number])
                        kind = "wrong" if wrong else "uneven"
                        look[kind] = look[kind] or f"{wrong or 'other bits'} {when}"
    except Exception as error:
        look["unusable"] = f"{type(error).__name__}: {error}"
        if not isinstance(error, FusedTPError):
            look["unusable"] = look["unusable"].splitlines()[0]
    return look


Again = Iterator[tuple[int, list[Tensor]]]


def _situations(
    example: Example,
    sets: Sequence[_Set],
    group: dist.ProcessGroup,
    beside: dist.ProcessGroup,
    device: torch.device,
    calls: int,
) -> Iterator[tuple[str, Again]]:
    """(when, (number of the set, outcome) of each call)."""

    def again() -> Again:
        for call in range(calls):
            yield call % 2, _outcome(example, sets[call % 2], group)

    def late() -> Again:
        for call, rank in enumerate(range(group.size())):
            if rank == group.rank():
                time.sleep(LATE_SECONDS)  # the host is late, and then the device
                if device.type == "cuda":
                    torch.cuda._sleep(LATE_CYCLES)
            yield call % 2, _outcome(example, sets[call % 2], group)

    def moving() -> Again:
        moved = torch.ones(BESIDE_ELEMENTS, dtype=torch.float32, device=device)
        for call in range(4):
            work = dist.all_reduce(moved, group=beside, async_op=True)
            found = _outcome(example, sets[call % 2], group)
            assert work is not None
            work.wait()
            yield call % 2, found

    def replayed() -> Again:
        static = _Set([x.clone() for x in sets[0].inputs], sets[0].grads, [])
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = _results(example.run(static.inputs, group))
        for call in range(6):
            for mine, given in zip(static.inputs, sets[call % 2].inputs, strict=True):
                mine.copy_(given)
            graph.replay()
            # The gradients are those of a call outside of the graph: between replays there are others.
            rest = _outcome(example, sets[call % 2], group)[len(results) :]
            yield call % 2, [*(t.clone() for t in results), *rest]

    yield "in a later call", again()
    yield "where a rank was late", late()
    yield "beside a collective of torch.distributed", moving()
    if device.type == "cuda":
        yield "in a CUDA graph", replayed()


def _outcome(example: Example, one: _Set, group: dist.ProcessGroup) -> list[Tensor]:
    """Results and gradients."""
    leaves = [x.detach().requires_grad_() for x in one.inputs]
    results = _results(example.run(leaves, group))
    return [*(t.detach() for t in results), *torch.autograd.grad(results, leaves, one.grads)]


def _results(given: Any) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else list(given)


def _inputs(example: Example, rank: int, world: int, device: torch.device, dtype: torch.dtype, seed: int) -> _Set:
    """Of one rank, with what float64 makes of all ranks' inputs."""

    def made(shape: Sequence[int], *number: int) -> Tensor:
        name = 0
        for part in (seed, *number):
            name = 1009 * name + part
        seeded = torch.Generator().manual_seed(name)
        return torch.randn(shape, generator=seeded, dtype=torch.float32, device="cpu").to(device, dtype)

    inputs: ByRank = []
    for one in range(world):
        of_rank = [made(shape, 1, 0 if i in example.alike else one, i) for i, shape in enumerate(example.shapes(one))]
        inputs.append(of_rank)
    wide: ByRank = []
    for one in range(world):
        first = wide[0] if wide else []
        wide.append(
            [
                first[i] if first and i in example.alike else x.double().requires_grad_()
                for i, x in enumerate(inputs[one])
            ]
        )
    results = example.reference(wide)
    grads = [
        [made(t.shape, 2, 0 if example.one_result else one, i) for i, t in enumerate(of_rank)]
        for one, of_rank in enumerate(results)
    ]
    counted = range(1) if example.one_result else range(world)  # what all ranks hold is one result
    terms = [(t * g.double()).sum() for one in counted for t, g in zip(results[one], grads[one], strict=True)]
    wanted = [*(t.detach() for t in results[rank]), *torch.autograd.grad(torch.stack(terms).sum(), wide[rank])]
    return _Set(inputs[rank], grads[rank], [t.to(dtype) for t in wanted])


def examples_of(world: int, m: int, k: int, n: int) -> list[Example]:
    """Every op that is checked, at that size."""
    share = -(-m // world)

    def rows(rank: int) -> int:
        return min(share, max(0, m - rank * share))

    def sizes(t: Tensor) -> list[Tensor]:
        return list(t.split([rows(rank) for rank in range(world)]))

    def total(ranks: ByRank) -> Tensor:
        return torch.stack([x @ w.t() for x, w, *_ in ranks]).sum(0)

    def normed(ranks: ByRank) -> ByRank:
        residual = total(ranks) + ranks[0][2]
        scale = (residual.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return [[residual * scale * ranks[0][3], residual]] * world

    def attended(ranks: ByRank) -> ByRank:
        q, keys, values = (torch.cat(parts, 1).transpose(1, 2) for parts in zip(*ranks, strict=True))
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True).transpose(1, 2)
        return [[part] for part in out.split(share, 1)]

    return [
        Example(
            "all_gather_matmul",
            lambda x, group: all_gather_matmul(x[0], x[1], group=group, gather_size=m),
            lambda ranks: [[torch.cat([x for x, _ in ranks]) @ w.t()] for _, w in ranks],
            lambda rank: [(rows(rank), k), (n, k)],
        ),
        Example(
            "matmul_reduce_scatter",
            lambda x, group: matmul_reduce_scatter(x[0], x[1], group=group),
            lambda ranks: [[part] for part in sizes(total(ranks))],
            lambda rank: [(m, k), (n, k)],
        ),
        Example(
            "matmul_all_reduce",
            lambda x, group: matmul_all_reduce(x[0], x[1], group=group),
            lambda ranks: [[total(ranks)]] * world,
            lambda rank: [(m, k), (n, k)],
            one_result=True,
        ),
        Example(
            "matmul_all_reduce_rms_norm",
            lambda x, group: matmul_all_reduce_rms_norm(x[0], x[1], x[2], x[3], EPS, group=group),
            normed,
            lambda rank: [(m, k), (n, k), (m, n), (n,)],
            alike=frozenset({2, 3}),
            one_result=True,
        ),
        Example(
            "all_gather",
            lambda x, group: collectives.all_gather(x[0], 0, group=group, gather_size=m),
            lambda ranks: [[torch.cat([x for (x,) in ranks])]] * world,
            lambda rank: [(rows(rank), k)],
        ),
        Example(
            "reduce_scatter",
            lambda x, group: collectives.reduce_scatter(x[0], 0, group=group),
            lambda ranks: [[part] for part in sizes(torch.stack([x for (x,) in ranks]).sum(0))],
            lambda rank: [(m, n)],
        ),
        Example(
            "all_reduce",
            lambda x, group: collectives.all_reduce(x[0], group=group),
            lambda ranks: [[torch.stack([x for (x,) in ranks]).sum(0)]] * world,
            lambda rank: [(m, n)],
            one_result=True,
        ),
        Example(  # of as many tokens on all ranks: of those that are cut unevenly a layout says more
            "ring_attention",
            lambda x, group: ring_attention(x[0], x[1], x[2], group=group, causal=True, layout="contiguous"),
            attended,
            lambda rank: [(1, share, max(1, n // HEAD_DIM), HEAD_DIM)] * 3,
        ),
    ]
