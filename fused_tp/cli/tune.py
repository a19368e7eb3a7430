"""`fused-tp tune`: check every schedule on this machine, measure them, and keep the results for `FUSED_TP_AUTOTUNE`.

Example:
    $ fused-tp tune --ranks 8 --model llama-3-8b --tokens 64 8192
    $ torchrun --nnodes 2 --nproc-per-node 8 --no-python fused-tp tune --model llama-3-70b
    $ fused-tp tune --check-only --dtypes bf16 fp32 --json out/check.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fused_tp.cli import at_least, make_parent_folder
from fused_tp.cli.ranks import Job, choose_start_method, is_under_torchrun, launch, preload

if TYPE_CHECKING:
    import torch

_AT_LEAST_ONE = at_least(1)
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# (m, k, n) of a check. Kernels choose their code path by size: few rows, a prime number of rows, and many rows.
CHECKED_SIZES = ((16, 256, 192), (83, 72, 56), (640, 256, 384))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fused-tp tune`."""
    parser.epilog = (
        "Exit status: 0: all schedules are right; 1: a schedule is wrong (it is then never chosen), or a rank failed; "
        "2: invalid arguments. The machine should be idle."
    )
    parser.add_argument("--ranks", type=at_least(2), metavar="W", help="ranks on this machine (all its GPUs, or 2)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"], help="(bf16)")
    parser.add_argument(
        "--calls", type=_AT_LEAST_ONE, default=100, metavar="N", help="calls of each op in a check (100)"
    )
    parser.add_argument("--check-only", action="store_true", help="measure nothing")
    group = parser.add_argument_group("measurements (without --check-only)")
    group.add_argument(
        "--model", default="llama-3-8b", help="model whose matmuls are measured: a name or a config.json"
    )
    group.add_argument(
        "--tokens", nargs="+", type=_AT_LEAST_ONE, default=[16, 256, 4096], metavar="M", help="(16 256 4096)"
    )
    parser.add_argument("--folder", type=Path, help="folder for the results (FUSED_TP_AUTOTUNE, or ~/.cache/fused_tp)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")


def main(arguments: argparse.Namespace) -> int:
    """Print the results; exit code 0: all schedules right, 1: one wrong or a rank failed, 2: invalid arguments."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        num_ranks = arguments.ranks or max(2, torch.cuda.device_count())
        if is_under_torchrun():
            num_ranks = int(os.environ["WORLD_SIZE"])
            if arguments.ranks not in (None, num_ranks):
                raise ValueError(f"--ranks is {arguments.ranks}, but torchrun has started {num_ranks}. Omit --ranks.")
        if num_ranks < 2:
            raise ValueError(f"at least two ranks are needed, got {num_ranks}.")
        has_one_gpu = device == "cuda" and not is_under_torchrun() and torch.cuda.device_count() == 1
        if device == "cuda" and not is_under_torchrun() and not has_one_gpu and num_ranks > torch.cuda.device_count():
            raise ValueError(
                f"--ranks must be at most {torch.cuda.device_count()}, the number of GPUs, got {num_ranks}."
            )
        if not arguments.check_only and not has_one_gpu:
            matmul_sizes_of(arguments.model, num_ranks)
        for option in ("folder", "json"):
            if (path := getattr(arguments, option)) is not None:
                make_parent_folder(f"--{option}", path / "file" if option == "folder" else path)
        if has_one_gpu:
            results = check_on_one_gpu(arguments)
        else:
            method = None if is_under_torchrun() else choose_start_method(device)
            if method == "forkserver":
                preload(["fused_tp.ops.verify"])
            results = launch(Job(tune, arguments, num_ranks, device), method)
    except ValueError as error:
        print(f"fused-tp tune: {error}", file=sys.stderr)
        return 2
    except ChildProcessError as error:
        print(f"fused-tp tune: {error} A check that was running is recorded as wrong.", file=sys.stderr)
        return 1
    if arguments.json is not None and os.environ.get("RANK", "0") == "0":
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if results["wrong"] else 0


def check_on_one_gpu(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check the fused kernels with ranks as threads on the only GPU, like `fused-tp selftest`.

    Nothing is measured: times of ranks that share a GPU do not predict times of ranks with a GPU each.

    Raises:
        ValueError: no kernel has a check with this number of ranks and these dtypes.
    """
    import torch

    from fused_tp.selftest.kernels import CASES, check

    dtypes = [getattr(torch, DTYPES[name]) for name in arguments.dtypes]
    rank_counts = (arguments.ranks,) if arguments.ranks else (1, 2, 3, 4)
    cases = [case for case in CASES if case.dtype in dtypes and case.world in rank_counts]
    if not cases:
        raise ValueError(
            f"on one GPU, --ranks must be 2 to 4 for bf16, or 2 for fp16 and fp32, got --ranks {arguments.ranks} "
            f"--dtypes {' '.join(arguments.dtypes)}."
        )
    print_now("This machine has one GPU: kernels are checked with ranks as threads, and nothing is measured.")
    results: dict[str, Any] = {"ranks": "threads of one GPU", "right": [], "wrong": {}, "choices": {}}
    device = torch.device("cuda", torch.cuda.current_device())
    for case in cases:
        if problem := check(case, device):
            print_now(f"WRONG: {case.name}: {problem}")
            results["wrong"][case.name] = problem
        else:
            print_now(f"{case.name}: right")
            results["right"].append(case.name)
    print_now(f"{len(results['right'])} right, {len(results['wrong'])} wrong.")
    return results


def tune(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check and measure all schedules, on every rank; rank 0 prints each result as soon as it is known."""
    import torch
    import torch.distributed as dist

    from fused_tp.core.settings import autotune, override_environment
    from fused_tp.ops.verify import verify

    print_on_rank_0: Callable[[str], None] = print_now if dist.get_rank() == 0 else lambda line: None
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    folder = autotune() or "1" if arguments.folder is None else str(arguments.folder.resolve())
    results: dict[str, Any] = {"ranks": dist.get_world_size(), "right": [], "wrong": {}, "choices": {}}
    with override_environment({"FUSED_TP_AUTOTUNE": folder, "FUSED_TP_SCHEDULE": ""}):
        for name in arguments.dtypes:
            dtype = getattr(torch, DTYPES[name])
            verdicts = verify(dist.group.WORLD, device, dtype, CHECKED_SIZES, num_calls=arguments.calls)
            for op, op_verdicts in groupby(verdicts, lambda verdict: verdict.op):
                right_schedules = []
                for verdict in op_verdicts:
                    check_name = f"{op} in {name} on {verdict.schedule}"
                    if verdict.problem:
                        print_on_rank_0(f"WRONG: {check_name}: {verdict.problem}")
                        results["wrong"][check_name] = verdict.problem
                    else:
                        right_schedules.append(verdict.schedule)
                        results["right"].append(check_name)
                print_on_rank_0(f"{op} in {name} is right on {', '.join(right_schedules) or 'none'}")
        # Measure after all checks, because wrong schedules are not measured.
        for name in [] if arguments.check_only else arguments.dtypes:
            for call, choice in measure_model(arguments.model, arguments.tokens, getattr(torch, DTYPES[name]), device):
                print_on_rank_0(f"{call}: {choice}")
                results["choices"][call] = choice
    print_on_rank_0(
        f"{len(results['right'])} right, {len(results['wrong'])} wrong. To use these results, set "
        f"FUSED_TP_AUTOTUNE={folder}"
    )
    return results


def measure_model(model: str, tokens: list[int], dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield (description of a call, schedule with times) for the matmuls of a layer, forward and backward."""
    import torch
    import torch.distributed as dist

    from fused_tp.backends.autotune import describe_choices
    from fused_tp.core.group import resolve_group
    from fused_tp.ops.all_gather_matmul import all_gather_matmul
    from fused_tp.ops.matmul_all_reduce import matmul_all_reduce
    from fused_tp.ops.matmul_reduce_scatter import matmul_reduce_scatter

    group = dist.group.WORLD
    rank, world_size = dist.get_rank(), dist.get_world_size()
    column_sizes, row_sizes = matmul_sizes_of(model, world_size)

    def random_tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32, device=device).to(dtype).requires_grad_()

    known_calls = set(describe_choices(resolve_group(group)))
    for m in tokens:
        rows_per_rank = -(-m // world_size)
        local_rows = min(rows_per_rank, max(0, m - rank * rows_per_rank))
        for k, n in column_sizes:
            # Autotuning measures an op in its first call; backward calls the ops of backward.
            all_gather_matmul(
                random_tensor(local_rows, k), random_tensor(n, k), group=group, gather_size=m
            ).sum().backward()
        for k, n in row_sizes:
            matmul_reduce_scatter(random_tensor(m, k), random_tensor(n, k), group=group).sum().backward()
            matmul_all_reduce(random_tensor(m, k), random_tensor(n, k), group=group)
        choices = describe_choices(resolve_group(group))
        yield from ((call, choice) for call, choice in choices.items() if call not in known_calls)
        known_calls |= set(choices)


def matmul_sizes_of(model: str, world_size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the local sizes (k, n) of the column-parallel matmuls, and of the row-parallel ones, without experts.

    Experts run on other ops, which are not measured.

    Raises:
        ValueError: `world_size` does not divide the features, or the model has no such matmuls.
    """
    from fused_tp.planning.config import ParallelConfig
    from fused_tp.planning.find_shape import find_shape

    shape = find_shape(model)
    ParallelConfig(tp=world_size, sequence_parallel=False, loss_parallel=False).check(shape)
    blocks = [
        block
        for kind in shape.layer_kinds
        for block in kind.blocks
        if block.column_features and block.row_features and not block.has_experts
    ]
    sizes = list(dict.fromkeys((block.column_features, block.row_features) for block in blocks))
    for size in (size for pair in sizes for size in pair):
        if size % world_size:
            raise ValueError(
                f"{world_size} ranks do not divide the {size:g} features of {shape.name}; use another model."
            )
    if not sizes:
        raise ValueError(f"{shape.name} has no layers that tensor parallelism shards; use another model.")
    column_sizes = [(shape.hidden, int(column_features) // world_size) for column_features, _ in sizes]
    return column_sizes, [(int(row_features) // world_size, shape.hidden) for _, row_features in sizes]


def print_now(line: str) -> None:
    print(line, flush=True)
