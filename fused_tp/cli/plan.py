"""`fused-tp plan`: find the fastest configurations of a model over GPUs, as the cost model predicts them.

Example:
    $ fused-tp plan --model llama-3-70b --gpus 64 --gpu h100 --seq 8192 --batch 512
    $ fused-tp plan --model path/to/config.json --gpus 16 --seq 4096 --batch 128 --write plan.json --format megatron
    $ fused-tp plan --measure here.json    # and then: --machine here.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from fused_tp.cli import at_least, cpu_name, make_parent_folder, positive_number
from fused_tp.cli.ranks import Job, choose_start_method, launch, preload
from fused_tp.planning.dialects import DIALECTS
from fused_tp.planning.find_shape import find_shape
from fused_tp.planning.hardware import GIB, MACHINES, PRECISIONS, Machine, find_machine
from fused_tp.planning.model_shape import SHAPES
from fused_tp.planning.recommend import Plan, recommend

DEFAULT_FORMAT = "fused-tp"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fused-tp plan`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"models known by name: {', '.join(SHAPES)}"
    parser.add_argument("--model", help="a name listed below, a config.json or its folder, or a type of transformers")
    parser.add_argument("--gpus", type=at_least(1), help="number of ranks")
    parser.add_argument("--gpu", choices=tuple(MACHINES), default="h100", help="kind of machine (default h100)")
    parser.add_argument("--machine", metavar="FILE", help="JSON or YAML of another machine, in place of --gpu")
    parser.add_argument(
        "--measure",
        type=Path,
        metavar="FILE",
        help="measure this machine, which should be idle, by a rank on each GPU or core; write FILE, for --machine",
    )
    parser.add_argument("--seq", type=at_least(1), default=8192, help="tokens of a row (default 8192)")
    parser.add_argument("--batch", type=at_least(1), default=512, help="rows of a step, of all ranks (default 512)")
    parser.add_argument(
        "--precision", choices=PRECISIONS, help="precision of matmuls (default bf16, or the machine's first)"
    )
    parser.add_argument(
        "--memory", type=positive_number, metavar="GIB", help="memory of a GPU (default: the machine's)"
    )
    parser.add_argument("--plain", action="store_true", help="plan for plain collectives, not for fused ops")
    parser.add_argument("--top", type=at_least(1), default=5, help="number of plans to print (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the best plan's configuration, as JSON")
    parser.add_argument(
        "--format",
        choices=(DEFAULT_FORMAT, *DIALECTS),
        default=DEFAULT_FORMAT,
        help="format of --write, which saves the best plan that the format can express (default fused-tp)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the plans; exit code 2 if the arguments are invalid or nothing fits."""
    try:
        if arguments.measure is not None:
            make_parent_folder("--measure", arguments.measure)
            machine = measure_this_machine()
            arguments.measure.write_text(json.dumps(machine.to_dict(), indent=1) + "\n")
            print(f"Wrote {machine.name}, {machine.ranks_per_node} ranks, to {arguments.measure}.")
            if arguments.model is None:
                return 0
        if arguments.model is None or arguments.gpus is None:
            raise ValueError("a plan needs --model and --gpus; without them, --measure FILE measures this machine.")
        if arguments.write is None and arguments.format != DEFAULT_FORMAT:
            raise ValueError(f"--format {arguments.format} is the format of --write; add --write FILE.")
        if arguments.write is not None:
            make_parent_folder("--write", arguments.write)
        shape = find_shape(arguments.model)
        machine = find_machine(arguments.measure or arguments.machine or arguments.gpu)
        precision = arguments.precision or next(iter(machine.peak_flops))
        plans = recommend(
            shape,
            arguments.gpus,
            machine=machine,
            seq=arguments.seq,
            global_batch=arguments.batch,
            precision=precision,
            memory=None if arguments.memory is None else arguments.memory * GIB,
            fused_tp=not arguments.plain,
            top=arguments.top,
            words=None if arguments.format == DEFAULT_FORMAT else arguments.format,
        )
        written_plan_number = None if arguments.write is None else _write_plan(plans, arguments.write, arguments.format)
    except (ValueError, OSError) as error:
        print(f"fused-tp plan: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps([plan.to_dict() for plan in plans], indent=1))
        return 0
    print(
        f"{shape.name}, {shape.parameters / 1e9:.1f} billion parameters, on {arguments.gpus} x {machine.name}: "
        f"{arguments.batch} rows of {arguments.seq} tokens, {precision}"
    )
    _print_table(plans)
    for plan_number, plan in enumerate(plans, 1):
        print(f"{plan_number}. {plan.reason}")
    if machine == MACHINES.get(machine.name):
        print(_speed_note(plans[0], precision))
    for note in shape.notes:
        print(f"Note: {note}")
    if written_plan_number is not None:
        print(f"Wrote plan {written_plan_number} to {arguments.write}.")
    return 0


def measure_this_machine() -> Machine:
    """Measure this machine, with a rank on each GPU, or without GPUs on each core that this process may use.

    Raises:
        ChildProcessError: a rank has failed, or a signal has ended it.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    name, device = (torch.cuda.get_device_name(), "cuda") if num_gpus else (cpu_name(), "cpu")
    method = choose_start_method(device)
    if method == "forkserver":
        preload(["fused_tp.planning.measure", "transformers"])
    num_ranks = num_gpus or len(os.sched_getaffinity(0))
    num_ranks = max(1, num_ranks - num_ranks % 2)  # an even number, because links are measured between pairs of ranks
    machine: Machine = launch(Job(_measure_on_rank, name, num_ranks, device), method)
    return machine


def _measure_on_rank(name: str) -> Machine:
    from fused_tp.planning.measure import measure_machine

    return measure_machine(name)


def _write_plan(plans: list[Plan], path: Path, format_name: str) -> int:
    """Write the first plan that the format can express, and return its number."""
    for plan_number, plan in enumerate(plans, 1):
        with contextlib.suppress(ValueError):
            config = (
                plan.config.to_dict() if format_name == DEFAULT_FORMAT else DIALECTS[format_name].write(plan.config)
            )
            path.write_text(json.dumps(config, indent=1) + "\n")
            return plan_number
    raise AssertionError(f"recommend(words={format_name!r}) ends with a plan that {format_name} expresses")


def _speed_note(plan: Plan, precision: str) -> str:
    """Return a sentence that names the training stacks for which the speed is predicted."""
    fastest = "the fastest published stacks, NeMo and Megatron-Core"
    if plan.low_tokens_per_second is None:
        return f"Speed: predicted for {fastest}. Other stacks are slower."
    share = plan.low_tokens_per_second / plan.tokens_per_second
    return (
        f"Speed: step, MFU and the higher tokens/s are predicted for {fastest}. The lower tokens/s are {share:.0%} of "
        f"that, the share that torchtitan publishes for Llama 3 8B in {precision}."
    )


_TABLE_HEAD = (
    "",
    "ranks",
    "rows x microbatches",
    "recompute",
    "step",
    "MFU",
    "tokens/s/GPU",
    "memory",
    "bubble",
    "waits: fused",
    "plain",
)


def _table_row(plan_number: int, plan: Plan) -> tuple[str, ...]:
    config = plan.config
    stages = f", {config.virtual_stages} stages" if (config.virtual_stages or 1) > 1 else ""
    return (
        str(plan_number),
        config.shown() + stages,
        f"{plan.microbatch_rows} x {config.microbatches}",
        config.recompute,
        f"{plan.time.total:.{2 if plan.time.total >= 1 else 3}f} s",
        f"{plan.mfu:.1%}",
        _tokens_per_gpu(plan),
        f"{plan.memory.total / GIB:.0f} GiB",
        f"{plan.bubble:.1%}",
        f"{plan.fused_exposed_share:.1%}",
        f"{plan.plain_exposed_share:.1%}",
    )


def _tokens_per_gpu(plan: Plan) -> str:
    """Format the range of tokens per second and GPU."""
    low, high = plan.low_tokens_per_second, plan.tokens_per_second
    num_gpus = plan.config.world_size
    return f"{high / num_gpus:,.0f}" if low is None else f"{low / num_gpus:,.0f} - {high / num_gpus:,.0f}"


def _print_table(plans: list[Plan]) -> None:
    rows = [_table_row(plan_number, plan) for plan_number, plan in enumerate(plans, 1)]
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        widths = [max(map(len, column)) for column in zip(_TABLE_HEAD, *rows, strict=True)]
        for row in (_TABLE_HEAD, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    for name in _TABLE_HEAD:
        table.add_column(name, justify="left" if name == "ranks" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    # For a pipe, rich assumes 80 columns and truncates cells.
    wide_console = console if console.is_terminal else Console(width=150)
    wide_console.print(table)
