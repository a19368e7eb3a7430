"""`fused-tp train`: pretrains or finetunes a transformers causal language model on text, over any ranks.

Under torchrun, or `fused-tp launch`, a process is a rank. Without, it starts the ranks of its configuration on this
machine by torchrun, which starts them again when one dies.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fused_tp.runtime.settings import timeout_seconds

if TYPE_CHECKING:
    from fused_tp.training.settings import TrainSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="YAML or JSON file; its keys: fused_tp.training.settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key, such as parallel.tp=4"
    )
    parser.add_argument("--max-restarts", type=int, default=0, help="how often ranks are started again after a failure")


def main(arguments: argparse.Namespace) -> int:
    """0: trained; 1: a rank failed; 2: settings that do not fit."""
    try:
        from fused_tp.cli import make_folder
        from fused_tp.training.run import check_sizes
        from fused_tp.training.settings import TrainSettings

        settings = TrainSettings.from_file(arguments.config, arguments.set)
        make_folder("out", settings.out)
        if "RANK" not in os.environ:
            ranks = settings.least_ranks()
            if ranks > 1:
                check_sizes(settings, ranks)
                return start_ranks(ranks, arguments.config, arguments.set, max_restarts=arguments.max_restarts)
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        return run_rank(settings)
    except ValueError as error:
        print(f"fused-tp train: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"fused-tp train: {error}", file=sys.stderr)
        return 1


def start_ranks(
    ranks: int,
    config: Path,
    changes: Sequence[str] = (),
    *,
    max_restarts: int = 0,
    quiet: bool = False,
) -> int:
    """Trains by so many ranks on this machine, which torchrun starts: 0 if they have, 128 + n if signal n has ended
    them, else 1.

    Args:
        quiet: what they print is shown only if one fails.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(max_restarts), "-m", "fused_tp", "train"]
    command += [str(config), *(word for change in changes for word in ("--set", change))]
    # The agent's own store outlives its ranks, which would then meet what those before them have left.
    given = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"} | os.environ
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if quiet else {}
    # A session of its own: Ctrl-C reaches torchrun once, from here. At a second signal it would leave its ranks behind.
    process = subprocess.Popen(command, env=given, text=True, start_new_session=True, **output)
    with _passed_on(process) as signals:
        printed, _ = process.communicate()
    if process.returncode and quiet:
        print(printed)
    return 128 + signals[0] if signals else int(process.returncode != 0)


@contextmanager
def _passed_on(process: subprocess.Popen[str]) -> Iterator[list[int]]:
    """The first SIGINT, SIGTERM or SIGHUP goes to `process`, which ends its ranks; gives those that came."""
    came: list[int] = []

    def pass_on(number: int, _: object) -> None:
        if not came:
            process.send_signal(number)
        came.append(number)

    if threading.current_thread() is not threading.main_thread():  # which alone may have handlers
        yield came
        return
    # SIGHUP, too: a closed terminal does not reach another session. Under nohup it stays ignored.
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        number: signal.signal(number, pass_on) for number in wanted if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_rank(settings: TrainSettings) -> int:
    """Trains as one of the ranks whose variables torchrun has set."""
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
            log = RunLog(run, writes=dist.get_rank() == 0)
            log.start()
            for step in run.steps():
                log.step(step)
                last = step.number == settings.steps
                if last or (settings.evaluate_every and step.number % settings.evaluate_every == 0):
                    log.evaluation(step.number, run.evaluate(), run.sample())
            log.close()
    finally:
        dist.destroy_process_group()
    return 0
