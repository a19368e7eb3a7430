"""How much of the ranks' communication is hidden, who makes the others wait, and what to change.

    step = compute + exposed collectives + pipeline waits + idle

Communication is hidden where its rank computes beside it, and exposed elsewhere, which is how HolisticTraceAnalysis
defines overlap (github.com/facebookresearch/HolisticTraceAnalysis, `get_comm_comp_overlap`). Messages between ranks
that no op of fused_tp sends are those of a pipeline: what is exposed of them is the bubble, and the transfer.

Who is late is found without a common clock. A collective ends for all ranks at about the same time, so it is shortest
for the rank that comes last, and what it takes longer for the others, they wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from fused_tp.ops.op import OPS
from fused_tp.training.intervals import Intervals
from fused_tp.training.traces import OUTSIDE, Communication, RankTrace

FLAG = 0.3  # of a step: if more is exposed, there is advice
COLLECTIVES = {"all_gather", "all_reduce", "reduce_scatter"}
_LATE = 0.05  # of a step: less is noise


@dataclass(frozen=True)
class RankTime:
    """Seconds of a step of one rank.

    Attributes:
        hidden: communication beside compute, so a part of `compute`.
        exposed: collectives beside which nothing is computed.
        bubble: the same of messages of a pipeline.
        idle: neither compute nor communication.
        waited_for: how long another rank, in the mean, has waited for this one.
        cause: the module, or op, in which a late rank spent more time than its peers.
        more: so much more.
    """

    rank: int
    step: float
    compute: float
    hidden: float
    exposed: float
    bubble: float
    idle: float
    waited_for: float = 0.0
    cause: str = ""
    more: float = 0.0


@dataclass(frozen=True)
class OpTime:
    """Calls and seconds of a step of a rank, in the mean."""

    op: str
    group: str
    is_message: bool
    calls: float
    exposed: float
    hidden: float


@dataclass(frozen=True)
class Report:
    """Of a run: its ranks, ops, and sums of groups; `notes` say what is not known, `advice` what to change."""

    ranks: list[RankTime]
    ops: list[OpTime]
    groups: list[OpTime]
    notes: list[str]
    advice: list[str]


def analyze(traces: Sequence[RankTrace]) -> Report:
    """The report of a run.

    Args:
        traces: of its ranks, one of each.

    Example:
        >>> report = analyze(read_traces([Path("out/train")]))
        >>> max(report.ranks, key=lambda rank: rank.waited_for).cause
        'model.layers.3.mlp'
    """
    waits, notes = _waits(traces)
    known = {trace.rank for trace in traces}
    if missing := set(range(max(trace.world_size for trace in traces))) - known:
        of = "rank" if len(missing) == 1 else "ranks"
        notes.append(f"There is no trace of {of} {', '.join(map(str, sorted(missing)))}, which may be late.")
    ranks = [_rank_time(trace, waits[trace.rank], traces) for trace in traces]
    ops = _op_times(traces)
    return Report(ranks, ops, _group_times(ops), notes, _advice(ranks, ops))


def _rank_time(trace: RankTrace, waits: dict[int, float], traces: Sequence[RankTrace]) -> RankTime:
    steps, compute, bare = trace.steps, trace.compute.length, trace.exposed.length
    moved = Intervals(one[:2] for one in trace.communication).length
    collectives = Intervals(one[:2] for one in trace.communication if not one.is_message).without(trace.compute).length
    waited_for = fmean(waits.values()) if waits else 0.0
    cause, more = _cause(trace, [peer.spent for peer in traces if peer.rank in waits], waited_for)
    return RankTime(
        trace.rank,
        step=trace.seconds / steps,
        compute=compute / steps,
        hidden=(moved - bare) / steps,
        exposed=collectives / steps,
        bubble=(bare - collectives) / steps,
        idle=(trace.seconds - compute - bare) / steps,
        waited_for=waited_for / steps,
        cause=cause,
        more=more,
    )


def _cause(trace: RankTrace, peers: Sequence[Mapping[str, float]], waited_for: float) -> tuple[str, float]:
    """The module, or op, and how much more of a step this rank spends in it; ("", 0) where none explains the wait."""
    if waited_for <= _LATE * trace.seconds:  # both may be zero
        return "", 0.0
    labels = set(trace.spent) - {""}
    if any(one.is_message for one in trace.communication):  # stages of a pipeline have other modules
        labels = labels.intersection(*peers) - {OUTSIDE}
    more = {label: trace.spent[label] - median(spent.get(label, 0.0) for spent in peers) for label in labels}
    cause = max(more, key=more.__getitem__, default="")
    return (cause, more[cause] / trace.steps) if cause and more[cause] > waited_for / 4 else ("", 0.0)


def _waits(traces: Sequence[RankTrace]) -> tuple[dict[int, dict[int, float]], list[str]]:
    """By rank, how long each of its peers in collectives has waited for it; and of which calls that is not known."""
    calls: dict[tuple[tuple[int, ...], str], dict[int, list[Communication]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        for one in sorted(one for one in trace.communication if not one.is_message):
            calls[one.group.ranks, one.op][trace.rank].append(one)
    waits: dict[int, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    unknown: list[str] = []
    for (ranks, op), by_rank in calls.items():
        if not ranks or len({len(own) for own in by_rank.values()}) > 1:
            unknown.append(f"{op} (of {', '.join(map(str, ranks)) or 'ranks that the traces do not tell'})")
            continue
        for call in zip(*by_rank.values(), strict=True):
            shortest, late = min((one.stop - one.start, rank) for rank, one in zip(by_rank, call, strict=True))
            for rank, one in zip(by_rank, call, strict=True):
                if rank != late:
                    waits[late][rank].append((one.start, one.stop - shortest))
    found: dict[int, dict[int, float]] = defaultdict(dict)
    exposed = {trace.rank: trace.exposed for trace in traces}
    for late, times in waits.items():
        for rank, own in times.items():  # of calls beside each other the time counts once
            found[late][rank] = sum(exposed[rank].covered(*one) for one in Intervals(own))
    notes = [f"Who was late to these is not known, as their calls cannot be matched: {'; '.join(unknown)}."]
    return found, notes if unknown and len(traces) > 1 else []


def _op_times(traces: Sequence[RankTrace]) -> list[OpTime]:
    """By op and group, those that are exposed for longest first."""
    found: dict[tuple[str, str, bool], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    steps = sum(trace.steps for trace in traces)
    for trace in traces:
        for one in trace.communication:
            exposed = trace.exposed.covered(one.start, one.stop)
            for at, value in enumerate((1, exposed, one.stop - one.start - exposed)):
                found[one.op, one.group.name, one.is_message][at] += value / steps
    times = [OpTime(*key, *values) for key, values in found.items()]
    return sorted((one for one in times if one.exposed + one.hidden > 0), key=lambda one: -one.exposed)


def _group_times(ops: Sequence[OpTime]) -> list[OpTime]:
    found = []
    for group in dict.fromkeys(op.group for op in ops):
        own = [op for op in ops if op.group == group]
        calls, exposed, hidden = (sum(getattr(op, part) for op in own) for part in ("calls", "exposed", "hidden"))
        found.append(OpTime("all", group, all(op.is_message for op in own), calls, exposed, hidden))
    return found


def _advice(ranks: Sequence[RankTime], ops: Sequence[OpTime]) -> list[str]:
    step, exposed, bubble = (fmean(getattr(rank, name) for rank in ranks) for name in ("step", "exposed", "bubble"))
    if exposed + bubble <= FLAG * step:
        return []
    found = [f"{(exposed + bubble) / step:.0%} of a step is exposed communication."]
    late = max(ranks, key=lambda rank: rank.waited_for)
    if late.waited_for > (exposed + bubble) / 2 and late.cause:
        found.append(f"Most of it is waiting for rank {late.rank}: see first to what slows it down in {late.cause}.")
    elif bubble > exposed:
        found.append(
            "Most of it is waiting in the pipeline: take more microbatches, or a schedule with a smaller bubble "
            "(Interleaved1F1B, ZBVZeroBubble)."
        )
    else:
        found.append(_change(next(op for op in ops if not op.is_message)))
    return found


def _change(worst: OpTime) -> str:
    """What to do about the op that is exposed for the longest time."""
    where = f"{worst.op} over {worst.group}" if worst.group else worst.op
    if "(plain)" in worst.op:
        return f"{where} moves when the matmul is done: run a fused schedule (leave FUSED_TP_SCHEDULE unset)."
    if worst.op.split(" ")[0] in OPS.keys() - COLLECTIVES:  # of these torch and libraries have some, too
        return (
            f"{where} waits for its peers: keep its ranks inside of a node, give each CPU rank a core of its own, "
            "or take fewer (parallel.tp, cp)."
        )
    if worst.group in ("tp", "cp"):
        return (
            f"{where} is a plain collective: fused_tp.parallelize(model, mesh) hides it behind the matmuls beside it."
        )
    return (
        f"{where} moves gradients or parameters: take more rows or microbatches a step, or shard inside of a node "
        "(dp_shard) and have copies across nodes (dp_replicate)."
    )
