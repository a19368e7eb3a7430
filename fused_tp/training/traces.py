"""Readers of torch.profiler traces: times of computation and communication on each rank, by module.

A trace is a file that `export_chrome_trace` of any program wrote, in Kineto's format. On a GPU, kernels and copies are
timed. On a CPU, ops in the computing thread, gloo's ranges, and the waits of fused_tp's ops are timed. A fused kernel
counts as compute, and so does an op of fused_tp in shared memory, except for its waits: a trace does not separate
arithmetic from communication within them.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fused_tp.ops.op import all_ops
from fused_tp.training.intervals import Intervals

OUTSIDE_MODULES = "outside of modules"
_GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
# Names of kernels that only communicate: of NCCL, RCCL, torch and fused_tp, and copies between GPUs.
_COMMUNICATION_NAME = re.compile(
    r"nccl|rccl|nvshmem|Memcpy PtoP|multimem|(one|two)_shot|"
    r"\b(all_gather|reduce_scatter|all_to_all|barrier|sum_terms|stage|relay|begin)_kernel"
)
# Names of ops of torch and other libraries, without ranges that contain ops (autograd nodes, torch.distributed calls).
_COMPUTE_NAME = re.compile(r"(?!autograd::|torch::|fused_tp::|FSDP::|_?c10d)\w+::|## Call CompiledFxGraph")
_STEP_NAME = re.compile(r"step \d+|ProfilerStep#\d+")
# Names of the ranges that fused_tp.core.tracing records.
_WAIT_NAME = re.compile(r"waited (?P<seconds>\S+) s, group (.*)|waiting for (?:exchange of .*, group (.*)|.*)")
_AUTOGRAD_PREFIX = "autograd::engine::evaluate_function: "


class TraceGroup(NamedTuple):
    """Name and ranks of a group that communicates; empty if the trace does not specify them."""

    name: str = ""
    ranks: tuple[int, ...] = ()


class Communication(NamedTuple):
    """Collective, message between two ranks, or wait; `op` is the name of fused_tp's op, or else of the collective."""

    start: float
    stop: float
    op: str
    group: TraceGroup = TraceGroup()
    is_message: bool = False


@dataclass(frozen=True)
class RankTrace:
    """Trace of one rank; times in seconds.

    Attributes:
        groups: groups of the rank, by torch's group names.
        num_steps: number of steps that the trace covers; 1 if it has no step ranges.
        exposed_communication: communication that is not overlapped by compute.
        seconds_by_module: time that is not exposed communication, by module, or by op outside of modules.
    """

    rank: int
    world_size: int
    groups: Mapping[str, TraceGroup]
    num_steps: int
    seconds: float
    compute_intervals: Intervals
    communication: list[Communication]
    exposed_communication: Intervals
    seconds_by_module: Mapping[str, float]


class _Event(NamedTuple):
    start: float
    stop: float
    name: str
    category: str
    thread: Any
    args: Mapping[str, Any]


class _WorkRange(NamedTuple):
    """Time range of the module or op `label`; its time is subtracted from that of `enclosing_label`."""

    start: float
    stop: float
    label: str
    enclosing_label: str = ""


def read_traces(paths: Sequence[Path]) -> list[RankTrace]:
    """Read the traces of a run, ordered by rank.

    Args:
        paths: files, folders with `*.json` and `*.json.gz` files, or folders with such a subfolder `traces`.

    Raises:
        ValueError: a file is not a trace, its rank is unknown, a rank has two traces, or there is no trace.
    """
    traces: dict[int, RankTrace] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist; pass traces of torch.profiler, or a folder of them.")
        folder = path / "traces" if (path / "traces").is_dir() else path
        files = [path] if not path.is_dir() else sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")])
        files = [file for file in files if file == path or file.name != "report.json"]  # written by `fused-tp report`
        if not files:
            raise ValueError(f"{folder} has no trace; pass a folder with *.json or *.json.gz files of torch.profiler.")
        for file in files:
            trace = _read_trace(file)
            if trace.rank in traces:
                raise ValueError(f"{file} is a second trace of rank {trace.rank}; pass one trace per rank, of one run.")
            traces[trace.rank] = trace
    return [traces[rank] for rank in sorted(traces)]


def _read_trace(file: Path) -> RankTrace:
    try:
        content = json.loads(gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes())
        events = [_parse_event(event) for event in content["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} cannot be read as a trace of torch.profiler ({type(error).__name__}: {error}); record it again, "
            "and wait until the program has exited."
        ) from error
    events.sort(key=lambda event: (event.start, -event.stop))
    info = content.get("distributedInfo") or {}
    rank = info.get("rank", next(iter(re.findall(r"rank\D?(\d+)", file.name)), None))
    if rank is None:
        raise ValueError(f"The rank of {file} is unknown; rename the file to, for example, rank0.json.")
    groups = _parse_groups(info, (content.get("mesh") or {}).get("groups") or {})
    steps = [event for event in events if event.category == "user_annotation" and _STEP_NAME.fullmatch(event.name)]
    device_events = [event for event in events if event.category in _GPU_CATEGORIES]
    covered_events = device_events or steps or events
    if not covered_events:
        raise ValueError(f"{file} has no events; record at least one step, on a CPU or a GPU.")
    start, stop = covered_events[0].start, max(event.stop for event in covered_events)
    if device_events:
        compute_intervals, communication, work_ranges = _split_gpu_events(events, groups)
    else:
        compute_intervals, communication, work_ranges = _split_cpu_events(
            [e for e in events if start <= e.start and e.stop <= stop], groups
        )
        work_ranges.append(_WorkRange(start, stop, OUTSIDE_MODULES))
    exposed_communication = Intervals(span[:2] for span in communication).without(compute_intervals)
    seconds_by_module: dict[str, float] = defaultdict(float)
    for span in work_ranges:
        busy_seconds = span.stop - span.start - exposed_communication.covered_length(span.start, span.stop)
        seconds_by_module[span.label] += busy_seconds
        seconds_by_module[span.enclosing_label] -= busy_seconds
    num_steps, world_size = len({step.name for step in steps}) or 1, int(info.get("world_size", 1))
    return RankTrace(
        int(rank),
        world_size,
        groups,
        num_steps,
        stop - start,
        compute_intervals,
        communication,
        exposed_communication,
        seconds_by_module,
    )


def _parse_event(event: Mapping[str, Any]) -> _Event:
    start, thread = event["ts"] * 1e-6, (event.get("pid"), event.get("tid"))
    stop = start + event["dur"] * 1e-6
    return _Event(start, stop, event["name"], event.get("cat", ""), thread, event.get("args") or {})


def _parse_groups(info: Mapping[str, Any], dims: Mapping[str, str]) -> dict[str, TraceGroup]:
    """Map torch's group names to groups, named after their mesh dim, or else by torch's description."""
    groups = {}
    for group in info.get("pg_config") or ():
        name, ranks = str(group["pg_name"]), tuple(group.get("ranks") or ())
        description = str(group.get("pg_desc") or "undefined").removeprefix("mesh_")
        description = {"default_pg": "world", "undefined": f"ranks {ranks}"}.get(description, description)
        groups[name] = TraceGroup(dims.get(name, description), ranks)
    return groups


_SplitEvents = tuple[Intervals, list[Communication], list[_WorkRange]]


def _split_gpu_events(events: Sequence[_Event], groups: Mapping[str, TraceGroup]) -> _SplitEvents:
    """Split kernels and copies into compute and communication, attributed to the op and module that launched them."""
    compute_spans, communication, work_ranges = list[tuple[float, float]](), list[Communication](), list[_WorkRange]()
    cpu_events = (event for event in events if event.category not in _GPU_CATEGORIES)
    op_and_module_of_launch = {
        event.args.get("correlation"): (op, module.label) for event, op, module in _attribute_events(cpu_events)
    }
    for event in events:
        if event.category not in _GPU_CATEGORIES:
            continue
        op, module = op_and_module_of_launch.get(event.args.get("correlation", -1), (None, event.name))
        if "Collective name" not in event.args and not _COMMUNICATION_NAME.search(event.name):
            compute_spans.append((event.start, event.stop))
            start = work_ranges[-1].stop if work_ranges else event.start
            work_ranges.append(_WorkRange(min(start, event.stop), max(start, event.stop), module))
            continue
        name = str(event.args.get("Collective name") or event.name.removeprefix("void ").split("(")[0])
        default_group = TraceGroup(str(event.args.get("Process Group Description") or ""))
        group = groups.get(str(event.args.get("Process Group Name")), default_group)
        is_message = op is None and "SendRecv" in event.name and "all_to_all" not in name
        communication.append(Communication(event.start, event.stop, _op_name(op) if op else name, group, is_message))
    return Intervals(compute_spans), communication, work_ranges


def _split_cpu_events(events: Sequence[_Event], groups: Mapping[str, TraceGroup]) -> _SplitEvents:
    """Split events of the computing thread and of gloo's threads into compute and communication, including waits."""
    busiest_threads = Counter(event.thread for event in events if not event.name.startswith("gloo:")).most_common(1)
    main_thread = busiest_threads[0][0] if busiest_threads else None
    groups_by_ranks = {group.ranks: group for group in groups.values() if len(group.ranks) > 1}
    # Gloo's ranges do not name their group.
    only_group = groups_by_ranks.popitem()[1] if len(groups_by_ranks) == 1 else TraceGroup()
    thread_events = (
        event._replace(thread=main_thread) if event.name.startswith("gloo:") else event for event in events
    )
    compute_spans, wait_spans = list[tuple[float, float]](), list[tuple[float, float]]()
    communication, work_ranges = list[Communication](), list[_WorkRange]()
    # By start of an op. The last "waited" range inside an op states the total time that the op waited.
    waited_ops: dict[float, tuple[_Event, float, TraceGroup]] = {}
    gloo_op_starts: set[float] = set()  # starts of ops whose communication appears in gloo's ranges
    for event, op, module in _attribute_events(event for event in thread_events if event.thread == main_thread):
        span = event.start, event.stop
        if event.name.startswith("gloo:"):
            name = event.name.removeprefix("gloo:")
            is_message = op is None and name in ("send", "recv", "recvAnySource")
            communication.append(Communication(*span, _op_name(op) if op else name, only_group, is_message))
            gloo_op_starts |= {op.start} if op else set()
            continue
        work_ranges.append(module)
        wait_match = _WAIT_NAME.fullmatch(event.name)
        if wait_match and wait_match["seconds"]:
            if op is not None:
                waited_ops[op.start] = op, float(wait_match["seconds"]), groups.get(wait_match[2], TraceGroup())
        elif wait_match:
            wait_spans.append(span)
            if wait_match[3]:
                communication.append(Communication(*span, "exchange", groups.get(wait_match[3], TraceGroup())))
        elif op is event or (event.category != "user_annotation" and _COMPUTE_NAME.match(event.name)):
            compute_spans.append(span)
    # The trace has only the length of a wait in native code, not its start: assume that it ends with the op.
    for op, seconds, group in (waited_ops[start] for start in waited_ops.keys() - gloo_op_starts):
        wait_start = max(op.start, op.stop - seconds)
        wait_spans.append((wait_start, op.stop))
        communication.append(Communication(wait_start, op.stop, _op_name(op), group))
    return Intervals(compute_spans).without(Intervals(wait_spans)), communication, work_ranges


def _attribute_events(events: Iterable[_Event]) -> Iterator[tuple[_Event, _Event | None, _WorkRange]]:
    """Yield (event, op, work): `op` is the outermost op of fused_tp around `event`, and `work.label` is its module.

    The module is the innermost range named by the program, FSDP or `with_stack`. In backward it is the module whose
    forward created the autograd node; outside modules, the op itself. Ranges of a thread are nested, except gloo's.
    """
    stacks: dict[Any, list[tuple[_Event, _Event | None, str]]] = defaultdict(list)
    # Module by sequence number of an op. The autograd node of the op has the same number.
    forward_modules: dict[int, str] = {}
    for event in events:
        stack = stacks[event.thread]
        while stack and stack[-1][0].stop <= event.start:
            stack.pop()
        op, enclosing_label = stack[-1][1:] if stack else (None, OUTSIDE_MODULES)
        label, sequence_nr = enclosing_label, event.args.get("Sequence number", -1)
        is_range = event.category == "user_annotation" and not event.name.startswith(("gloo:", "fused_tp::"))
        if op is not None or _STEP_NAME.fullmatch(event.name) or _WAIT_NAME.fullmatch(event.name):
            pass
        elif is_range and event.name.split(" ")[0] in all_ops():
            op, label = event, _op_name(event) if enclosing_label == OUTSIDE_MODULES else enclosing_label
        elif event.name.startswith(_AUTOGRAD_PREFIX):
            label = (
                f"backward of {forward_modules[sequence_nr]}"
                if sequence_nr in forward_modules
                else event.name.removeprefix(_AUTOGRAD_PREFIX)
            )
        elif is_range or event.name.startswith("nn.Module: "):
            label = event.name.removeprefix("nn.Module: ")
        elif enclosing_label == OUTSIDE_MODULES and _COMPUTE_NAME.match(event.name):
            label = event.name
        elif event.category == "cpu_op" and sequence_nr >= 0:
            forward_modules.setdefault(sequence_nr, enclosing_label)
        yield event, op, _WorkRange(event.start, event.stop, label, enclosing_label)
        if event.category in ("user_annotation", "cpu_op", "python_function") and not event.name.startswith("gloo:"):
            stack.append((event, op, label))


def _op_name(op: _Event) -> str:
    words = op.name.split(" ")
    name = " ".join(words[: 2 if words[1:2] == ["backward"] else 1])
    return f"{name} (plain)" if words[-1] == "plain" else name
