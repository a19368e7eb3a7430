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

ADVICE_THRESHOLD = 0.3  # fraction of a step: if more is exposed, the report gives advice
COLLECTIVES = {"all_gather", "all_reduce", "reduce_scatter"}
LATE_THRESHOLD = 0.05  # fraction of a step: less is noise


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
    waits, notes = _sum_waits_by_rank(traces)
    known_ranks = {trace.rank for trace in traces}
    if missing_ranks := set(range(max(trace.world_size for trace in traces))) - known_ranks:
        noun = "rank" if len(missing_ranks) == 1 else "ranks"
        notes.append(
            f"Traces of {noun} {', '.join(map(str, sorted(missing_ranks)))} are missing; these ranks may be late."
        )
    ranks = [_make_rank_time(trace, waits[trace.rank], traces) for trace in traces]
    ops = _sum_op_times(traces)
    return ExposureReport(ranks, ops, _sum_group_times(ops), notes, _make_advice(ranks, ops))


def _make_rank_time(trace: RankTrace, waits: dict[int, float], traces: Sequence[RankTrace]) -> RankTime:
    num_steps, compute_seconds, exposed_seconds = (
        trace.num_steps,
        trace.compute_intervals.length,
        trace.exposed_communication.length,
    )
    communication_seconds = Intervals(communication[:2] for communication in trace.communication).length
    exposed_collective_seconds = (
        Intervals(communication[:2] for communication in trace.communication if not communication.is_message)
        .without(trace.compute_intervals)
        .length
    )
    waited_seconds = fmean(waits.values()) if waits else 0.0
    cause, extra_seconds = _find_cause(
        trace, [peer.seconds_by_module for peer in traces if peer.rank in waits], waited_seconds
    )
    return RankTime(
        trace.rank,
        step=trace.seconds / num_steps,
        compute=compute_seconds / num_steps,
        hidden=(communication_seconds - exposed_seconds) / num_steps,
        exposed=exposed_collective_seconds / num_steps,
        bubble=(exposed_seconds - exposed_collective_seconds) / num_steps,
        idle=(trace.seconds - compute_seconds - exposed_seconds) / num_steps,
        waited_for=waited_seconds / num_steps,
        cause=cause,
        more=extra_seconds,
    )


def _find_cause(trace: RankTrace, peers: Sequence[Mapping[str, float]], waited_seconds: float) -> tuple[str, float]:
    """Return (module or op, additional time per step) that made this rank late; ("", 0) if no module explains it."""
    if waited_seconds <= LATE_THRESHOLD * trace.seconds:  # both may be zero
        return "", 0.0
    labels = set(trace.seconds_by_module) - {""}
    if any(call.is_message for call in trace.communication):  # stages of a pipeline have other modules
        labels = labels.intersection(*peers) - {OUTSIDE_MODULES}
    extra_seconds = {
        label: trace.seconds_by_module[label] - median(peer_seconds.get(label, 0.0) for peer_seconds in peers)
        for label in labels
    }
    cause = max(extra_seconds, key=extra_seconds.__getitem__, default="")
    return (
        (cause, extra_seconds[cause] / trace.num_steps)
        if cause and extra_seconds[cause] > waited_seconds / 4
        else ("", 0.0)
    )


def _sum_waits_by_rank(traces: Sequence[RankTrace]) -> tuple[dict[int, dict[int, float]], list[str]]:
    """Return the time that peers waited in collectives, by late rank and peer; and notes on calls without a match."""
    calls: dict[tuple[tuple[int, ...], str], dict[int, list[Communication]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        for call in sorted(call for call in trace.communication if not call.is_message):
            calls[call.group.ranks, call.op][trace.rank].append(call)
    waits: dict[int, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    unmatched_ops: list[str] = []
    for (ranks, op), calls_by_rank in calls.items():
        if not ranks or len({len(rank_calls) for rank_calls in calls_by_rank.values()}) > 1:
            unmatched_ops.append(f"{op} (ranks {', '.join(map(str, ranks)) or 'unknown'})")
            continue
        for rank_calls in zip(*calls_by_rank.values(), strict=True):
            shortest_seconds, late_rank = min(
                (call.stop - call.start, rank) for rank, call in zip(calls_by_rank, rank_calls, strict=True)
            )
            for rank, call in zip(calls_by_rank, rank_calls, strict=True):
                if rank != late_rank:
                    waits[late_rank][rank].append((call.start, call.stop - shortest_seconds))
    wait_seconds: dict[int, dict[int, float]] = defaultdict(dict)
    exposed_by_rank = {trace.rank: trace.exposed_communication for trace in traces}
    for late_rank, spans_by_rank in waits.items():
        for rank, spans in spans_by_rank.items():  # overlapping calls count once
            wait_seconds[late_rank][rank] = sum(
                exposed_by_rank[rank].covered_length(*span) for span in Intervals(spans)
            )
    notes = [
        "Late ranks are unknown for these ops, whose calls cannot be matched between ranks: "
        f"{'; '.join(unmatched_ops)}."
    ]
    return wait_seconds, notes if unmatched_ops and len(traces) > 1 else []


def _sum_op_times(traces: Sequence[RankTrace]) -> list[OpTime]:
    """Return the times by op and group, in descending order of exposed time."""
    totals: dict[tuple[str, str, bool], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    num_steps = sum(trace.num_steps for trace in traces)
    for trace in traces:
        for communication in trace.communication:
            exposed_seconds = trace.exposed_communication.covered_length(communication.start, communication.stop)
            for index, value in enumerate(
                (1, exposed_seconds, communication.stop - communication.start - exposed_seconds)
            ):
                totals[communication.op, communication.group.name, communication.is_message][index] += value / num_steps
    times = [OpTime(*key, *values) for key, values in totals.items()]
    return sorted(
        (op_time for op_time in times if op_time.exposed + op_time.hidden > 0), key=lambda op_time: -op_time.exposed
    )


def _sum_group_times(ops: Sequence[OpTime]) -> list[OpTime]:
    group_times = []
    for group in dict.fromkeys(op.group for op in ops):
        group_ops = [op for op in ops if op.group == group]
        calls, exposed, hidden = (sum(getattr(op, part) for op in group_ops) for part in ("calls", "exposed", "hidden"))
        group_times.append(OpTime("all", group, all(op.is_message for op in group_ops), calls, exposed, hidden))
    return group_times


def _make_advice(ranks: Sequence[RankTime], ops: Sequence[OpTime]) -> list[str]:
    step, exposed, bubble = (fmean(getattr(rank, name) for rank in ranks) for name in ("step", "exposed", "bubble"))
    if exposed + bubble <= ADVICE_THRESHOLD * step:
        return []
    sentences = [f"{(exposed + bubble) / step:.0%} of a step is exposed communication."]
    latest_rank = max(ranks, key=lambda rank: rank.waited_for)
    if latest_rank.waited_for > (exposed + bubble) / 2 and latest_rank.cause:
        sentences.append(
            f"Most of it is waiting for rank {latest_rank.rank}: first find why {latest_rank.cause} is slower on this "
            "rank."
        )
    elif bubble > exposed:
        sentences.append(
            "Most of it is waiting in the pipeline: use more microbatches, or a schedule with a smaller bubble "
            "(Interleaved1F1B, ZBVZeroBubble)."
        )
    else:
        sentences.append(_advise_on_op(next(op for op in ops if not op.is_message)))
    return sentences


def _advise_on_op(op_time: OpTime) -> str:
    """Return advice on the op with the longest exposed time."""
    description = f"{op_time.op} over {op_time.group}" if op_time.group else op_time.op
    if "(plain)" in op_time.op:
        return f"{description} starts after its matmul: use a fused schedule (unset FUSED_TP_SCHEDULE)."
    # COLLECTIVES are also names of collectives of torch and other libraries, so they do not identify fused_tp's ops.
    if op_time.op.split(" ")[0] in all_ops().keys() - COLLECTIVES:
        return (
            f"{description} waits for its peers: keep its ranks within a node, bind each CPU rank to a separate core, "
            "or use fewer ranks (parallel.tp, cp)."
        )
    if op_time.group in ("tp", "cp"):
        return f"{description} is a plain collective: fused_tp.parallelize(model, mesh) overlaps it with its matmuls."
    return (
        f"{description} moves gradients or parameters: use more rows or microbatches per step, or shard within a node "
        "(dp_shard) and replicate across nodes (dp_replicate)."
    )
