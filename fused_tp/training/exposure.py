"""Analysis of traces: exposed communication, ranks that make others wait, and advice.

    step = compute + exposed collectives + pipeline waits + idle

Communication is hidden while its rank computes, and exposed otherwise: HolisticTraceAnalysis's definition of overlap
(github.com/facebookresearch/HolisticTraceAnalysis, `get_comm_comp_overlap`). Messages between ranks outside of
fused_tp's ops belong to a pipeline: their exposed time is the bubble and the transfer.

Late ranks are found without a common clock. A collective ends on all ranks at about the same time, so it is shortest on
the last rank to arrive; the extra time on other ranks is waiting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from fused_tp.ops.op import all_ops
from fused_tp.training.intervals import Intervals
from fused_tp.training.traces import OUTSIDE_MODULES, Communication, RankTrace

FLAG = 0.3  # fraction of a step: if more is exposed, the report gives advice
COLLECTIVES = {"all_gather", "all_reduce", "reduce_scatter"}
LATE = 0.05  # fraction of a step: less is noise


@dataclass(frozen=True)
class RankTime:
    """Time of one step on one rank by component, in seconds.

    Attributes:
        hidden: communication overlapped by compute; included in `compute`.
        exposed: collectives not overlapped by compute.
        bubble: messages of a pipeline not overlapped by compute.
        idle: neither compute nor communication.
        waited_for: time that peers waited for this rank, mean over peers.
        cause: module or op in which a late rank spent more time than its peers; "" if unknown.
        more: additional time in `cause`.
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
    """Mean number of calls and seconds of an op, per step and rank."""

    op: str
    group: str
    is_message: bool
    calls: float
    exposed: float
    hidden: float


@dataclass(frozen=True)
class ExposureReport:
    """Report of a run: times of ranks, ops and groups; `notes` lists unknowns, `advice` lists suggested changes."""

    ranks: list[RankTime]
    ops: list[OpTime]
    groups: list[OpTime]
    notes: list[str]
    advice: list[str]


def analyze(traces: Sequence[RankTrace]) -> ExposureReport:
    """Analyze the traces of a run.

    Args:
        traces: one trace per rank.

    Example:
        >>> report = analyze(read_traces([Path("out/train")]))
        >>> max(report.ranks, key=lambda rank: rank.waited_for).cause
        'model.layers.3.mlp'
    """
    waits, notes = _waits_by_rank(traces)
    known_ranks = {trace.rank for trace in traces}
    if missing := set(range(max(trace.world_size for trace in traces))) - known_ranks:
        noun = "rank" if len(missing) == 1 else "ranks"
        notes.append(f"Traces of {noun} {', '.join(map(str, sorted(missing)))} are missing; these ranks may be late.")
    ranks = [_make_rank_time(trace, waits[trace.rank], traces) for trace in traces]
    ops = _sum_op_times(traces)
    return ExposureReport(ranks, ops, _sum_group_times(ops), notes, _make_advice(ranks, ops))


def _make_rank_time(trace: RankTrace, waits: dict[int, float], traces: Sequence[RankTrace]) -> RankTime:
    steps, compute, unhidden_seconds = trace.steps, trace.compute.length, trace.exposed.length
    communication_seconds = Intervals(communication[:2] for communication in trace.communication).length
    collectives = (
        Intervals(communication[:2] for communication in trace.communication if not communication.is_message)
        .without(trace.compute)
        .length
    )
    waited_for = fmean(waits.values()) if waits else 0.0
    cause, extra_seconds = _find_cause(
        trace, [peer.seconds_by_module for peer in traces if peer.rank in waits], waited_for
    )
    return RankTime(
        trace.rank,
        step=trace.seconds / steps,
        compute=compute / steps,
        hidden=(communication_seconds - unhidden_seconds) / steps,
        exposed=collectives / steps,
        bubble=(unhidden_seconds - collectives) / steps,
        idle=(trace.seconds - compute - unhidden_seconds) / steps,
        waited_for=waited_for / steps,
        cause=cause,
        more=extra_seconds,
    )


def _find_cause(trace: RankTrace, peers: Sequence[Mapping[str, float]], waited_for: float) -> tuple[str, float]:
    """Return (module or op, additional time per step) that made this rank late; ("", 0) if no module explains it."""
    if waited_for <= LATE * trace.seconds:  # both may be zero
        return "", 0.0
    labels = set(trace.seconds_by_module) - {""}
    if any(one.is_message for one in trace.communication):  # stages of a pipeline have other modules
        labels = labels.intersection(*peers) - {OUTSIDE_MODULES}
    more = {
        label: trace.seconds_by_module[label] - median(spent.get(label, 0.0) for spent in peers) for label in labels
    }
    cause = max(more, key=more.__getitem__, default="")
    return (cause, more[cause] / trace.steps) if cause and more[cause] > waited_for / 4 else ("", 0.0)


def _waits_by_rank(traces: Sequence[RankTrace]) -> tuple[dict[int, dict[int, float]], list[str]]:
    """Return the time that peers waited in collectives, by late rank and peer; and notes on calls without a match."""
    calls: dict[tuple[tuple[int, ...], str], dict[int, list[Communication]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        for one in sorted(one for one in trace.communication if not one.is_message):
            calls[one.group.ranks, one.op][trace.rank].append(one)
    waits: dict[int, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    unknown: list[str] = []
    for (ranks, op), by_rank in calls.items():
        if not ranks or len({len(own) for own in by_rank.values()}) > 1:
            unknown.append(f"{op} (ranks {', '.join(map(str, ranks)) or 'unknown'})")
            continue
        for call in zip(*by_rank.values(), strict=True):
            shortest, late = min((one.stop - one.start, rank) for rank, one in zip(by_rank, call, strict=True))
            for rank, one in zip(by_rank, call, strict=True):
                if rank != late:
                    waits[late][rank].append((one.start, one.stop - shortest))
    found: dict[int, dict[int, float]] = defaultdict(dict)
    exposed = {trace.rank: trace.exposed for trace in traces}
    for late, times in waits.items():
        for rank, own in times.items():  # overlapping calls count once
            found[late][rank] = sum(exposed[rank].covered_length(*one) for one in Intervals(own))
    notes = [
        f"Late ranks are unknown for these ops, whose calls cannot be matched between ranks: {'; '.join(unknown)}."
    ]
    return found, notes if unknown and len(traces) > 1 else []


def _sum_op_times(traces: Sequence[RankTrace]) -> list[OpTime]:
    """Return the times by op and group, in descending order of exposed time."""
    found: dict[tuple[str, str, bool], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    steps = sum(trace.steps for trace in traces)
    for trace in traces:
        for one in trace.communication:
            exposed = trace.exposed.covered_length(one.start, one.stop)
            for at, value in enumerate((1, exposed, one.stop - one.start - exposed)):
                found[one.op, one.group.name, one.is_message][at] += value / steps
    times = [OpTime(*key, *values) for key, values in found.items()]
    return sorted((one for one in times if one.exposed + one.hidden > 0), key=lambda one: -one.exposed)


def _sum_group_times(ops: Sequence[OpTime]) -> list[OpTime]:
    found = []
    for group in dict.fromkeys(op.group for op in ops):
        own = [op for op in ops if op.group == group]
        calls, exposed, hidden = (sum(getattr(op, part) for op in own) for part in ("calls", "exposed", "hidden"))
        found.append(OpTime("all", group, all(op.is_message for op in own), calls, exposed, hidden))
    return found


def _make_advice(ranks: Sequence[RankTime], ops: Sequence[OpTime]) -> list[str]:
    step, exposed, bubble = (fmean(getattr(rank, name) for rank in ranks) for name in ("step", "exposed", "bubble"))
    if exposed + bubble <= FLAG * step:
        return []
    found = [f"{(exposed + bubble) / step:.0%} of a step is exposed communication."]
    late = max(ranks, key=lambda rank: rank.waited_for)
    if late.waited_for > (exposed + bubble) / 2 and late.cause:
        found.append(f"Most of it is waiting for rank {late.rank}: first find why {late.cause} is slower on this rank.")
    elif bubble > exposed:
        found.append(
            "Most of it is waiting in the pipeline: use more microbatches, or a schedule with a smaller bubble "
            "(Interleaved1F1B, ZBVZeroBubble)."
        )
    else:
        found.append(_advise_on_op(next(op for op in ops if not op.is_message)))
    return found


def _advise_on_op(worst: OpTime) -> str:
    """Return advice on the op with the longest exposed time."""
    where = f"{worst.op} over {worst.group}" if worst.group else worst.op
    if "(plain)" in worst.op:
        return f"{where} starts after its matmul: use a fused schedule (unset FUSED_TP_SCHEDULE)."
    # COLLECTIVES are also names of collectives of torch and other libraries, so they do not identify fused_tp's ops.
    if worst.op.split(" ")[0] in all_ops().keys() - COLLECTIVES:
        return (
            f"{where} waits for its peers: keep its ranks within a node, bind each CPU rank to a separate core, "
            "or use fewer ranks (parallel.tp, cp)."
        )
    if worst.group in ("tp", "cp"):
        return f"{where} is a plain collective: fused_tp.parallelize(model, mesh) overlaps it with its matmuls."
    return (
        f"{where} moves gradients or parameters: use more rows or microbatches per step, or shard within a node "
        "(dp_shard) and replicate across nodes (dp_replicate)."
    )
