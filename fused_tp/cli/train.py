"""`fused-tp train`: pretrain or finetune a transformers causal language model on text, over any ranks.

Under torchrun or `fused-tp launch`, the process is one rank. Otherwise the command starts the ranks of its
configuration on this machine by torchrun, which can restart them after a failure (--max-restarts).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from fused_tp.cli import at_least
from fused_tp.core.settings import timeout_seconds

if TYPE_CHECKING:
    from fused_tp.training.settings import TrainSettings

# Exit code for invalid settings. Ranks use it, too, because some settings can be checked only on a rank.
INVALID_SETTINGS_CODE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="YAML or JSON file; its keys: fused_tp.training.settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key, such as parallel.tp=4"
    )
    parser.add_argument(
        "--max-restarts", type=at_least(0), default=0, help="number of restarts of all ranks after a failure (0)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Train; exit code 0: trained, 1: a rank failed, 2: invalid settings, 128 + n: ended by signal n."""
    try:
        from fused_tp.cli import make_folder
        from fused_tp.training.run import check_sizes
        from fused_tp.training.settings import TrainSettings

        settings = TrainSettings.from_file(arguments.config, arguments.set)
        make_folder("out", settings.out)
        if "RANK" not in os.environ:
            num_ranks = settings.minimum_ranks()
            if num_ranks > 1:
                check_sizes(settings, num_ranks)
                return start_ranks(num_ranks, arguments.config, arguments.set, max_restarts=arguments.max_restarts)
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        return run_rank(settings)
    except ValueError as error:
        print(f"fused-tp train: {error}", file=sys.stderr)
        return INVALID_SETTINGS_CODE
    except BrokenPipeError:
        print(
            "fused-tp train: stopped, because its stdout was closed. Use `> FILE` to keep the output.", file=sys.stderr
        )
        return 1
    except (FloatingPointError, OSError) as error:
        print(f"fused-tp train: {error}", file=sys.stderr)
        return 1


def start_ranks(
    num_ranks: int,
    config: Path,
    changes: Sequence[str] = (),
    *,
    max_restarts: int = 0,
    is_quiet: bool = False,
) -> int:
    """Train on `num_ranks` ranks of this machine, which torchrun starts. Return the exit code of `main`.

    Args:
        is_quiet: hide the ranks' output, except the last lines of a failed rank.
    """
    from fused_tp.cli.launch_node import RanksFailed, run_ranks

    torchrun_arguments = ["--standalone", "--local-addr", "localhost", "--nproc-per-node", str(num_ranks)]
    torchrun_arguments += ["--max-restarts", str(max_restarts), "--redirects", "3" if is_quiet else "0"]
    torchrun_arguments += ["-m", "fused_tp", "train", str(config)]
    for change in changes:
        torchrun_arguments += ["--set", change]
    try:
        return run_ranks(torchrun_arguments)
    except RanksFailed as error:
        has_invalid_settings = error.code == INVALID_SETTINGS_CODE
        if is_quiet or not has_invalid_settings:  # otherwise the ranks have printed the reason
            print(f"fused-tp train: {error}", file=sys.stderr)
        return INVALID_SETTINGS_CODE if has_invalid_settings else 1


def run_rank(settings: TrainSettings) -> int:
    """Train as one rank, in the environment that torchrun has set."""
    import torch
    import torch.distributed as dist

    from fused_tp.training.log import RunLog
    from fused_tp.training.run import TrainingRun

    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds()))
    try:
        with TrainingRun(settings) as run:
            log = RunLog(run, is_writer=dist.get_rank() == 0)
            log.start()
            for step in run.steps():
                log.log_step(step)
                is_last = step.number == settings.steps
                if is_last or (settings.evaluate_every and step.number % settings.evaluate_every == 0):
                    log.log_evaluation(step.number, run.evaluate(), run.sample())
            run.export()
            log.close()
    finally:
        dist.destroy_process_group()
    return 0
