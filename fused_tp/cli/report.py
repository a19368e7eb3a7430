"""`fused-tp report`: print hidden and exposed communication per rank, and the ranks that others wait for.

Example:
    $ fused-tp train train.yaml --set profile.steps=3    # writes the traces of three steps
    $ fused-tp report out/train
    $ fused-tp report --live train.yaml                  # trains some steps for it
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fused_tp.cli import at_least, make_folder
from fused_tp.cli.train import start_ranks

if TYPE_CHECKING:
    from fused_tp.training.exposure import ExposureReport

_TIME_COMPONENTS = ("compute", "hidden", "exposed", "bubble", "idle")
_BAR_PARTS = ("compute", "exposed", "bubble", "idle")  # parts of a step; hidden communication is part of compute


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="*", type=Path, help="traces of torch.profiler, one of each rank, or their folder"
    )
    parser.add_argument(
        "--live",
        type=Path,
        metavar="CONFIG",
        help="configuration of `fused-tp train`: train some steps and report on them",
    )
    parser.add_argument(
        "--steps", type=at_least(1), help="number of steps that --live records, after two warmup steps (3)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of --live")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--out", type=Path, default=Path("out/report"), help="folder for report.json and report.png (out/report)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Report on traces; exit code 0: reported, 1: a rank of --live has failed, 2: no readable traces."""
    from fused_tp.training.exposure import analyze
    from fused_tp.training.traces import read_traces

    try:
        if (arguments.live is None) == (not arguments.paths):
            raise ValueError("pass either traces, or a configuration by --live.")
        if arguments.live is None and (arguments.steps or arguments.set):
            raise ValueError("--steps and --set need --live. Omit them to report on existing traces.")
        make_folder("--out", arguments.out)
        if arguments.live is not None and not _train_with_profile(arguments):
            return 1
        report = analyze(read_traces(arguments.paths or [arguments.out]))
    except ValueError as error:
        print(f"fused-tp report: {error}", file=sys.stderr)
        return 2
    text = json.dumps(asdict(report), indent=1)
    (arguments.out / "report.json").write_text(text + "\n")
    print(text if arguments.json else format_table(report))
    draw_bars(report, arguments.out / "report.png")
    return 0


def _train_with_profile(arguments: argparse.Namespace) -> bool:
    """Train with a profile in --out. Return False if a rank failed; its output is then printed."""
    from fused_tp.planning.config import read_mapping
    from fused_tp.training.settings import TrainSettings, apply_changes

    settings, steps = apply_changes(read_mapping(arguments.live), arguments.set), arguments.steps or 3
    settings |= {"out": str(arguments.out), "steps": 2 + steps, "profile": {"first": 3, "steps": steps}}
    settings |= {"checkpoints": None, "evaluate_every": None, "sample": None, "export": None}
    config = arguments.out / "train.json"
    config.write_text(json.dumps(settings))
    return start_ranks(TrainSettings.from_mapping(settings).minimum_ranks(), config, is_quiet=True) == 0


def format_table(report: ExposureReport) -> str:
    """Format the report: ranks, communication by op and by group, late ranks, advice."""
    rows = [(str(rank.rank), asdict(rank)) for rank in report.ranks]
    rows.append(
        ("mean", {name: fmean(row[name] for _, row in rows) for name in ("step", *_TIME_COMPONENTS, "waited_for")})
    )
    lines = [f"{'rank':>5} {'s/step':>9}{''.join(f'{part:>9}' for part in _TIME_COMPONENTS)}   others wait"]
    for name, row in rows:
        shares = "".join(f"{row[part] / row['step']:9.1%}" for part in _TIME_COMPONENTS)
        lines.append(f"{name:>5} {row['step']:9.4f}{shares} {row['waited_for']:11.4f} s")
    lines.append(f"\n{'communication of a step':36} {'group':14} {'calls':>7} {'exposed':>10} {'hidden':>10}")
    for op_time in (*report.ops, *report.groups):
        group = op_time.group or "not known"
        lines.append(
            f"{op_time.op:36} {group:14} {op_time.calls:7.1f} {op_time.exposed:8.4f} s {op_time.hidden:8.4f} s"
        )
    return "\n".join([*lines, *(f"\n{line}" for line in (*late_rank_sentences(report), *report.notes, *report.advice))])


def late_rank_sentences(report: ExposureReport) -> list[str]:
    """Return a sentence for each late rank with a known cause, the latest rank first.

    The latest rank has a sentence even if its cause is unknown.
    """
    from fused_tp.training.exposure import LATE_THRESHOLD

    sentences = []
    for position, rank in enumerate(sorted(report.ranks, key=lambda rank: -rank.waited_for)):
        sentence = f"Rank {rank.rank} is late: others wait {rank.waited_for:.4f} s of a step for it."
        if rank.cause:
            sentences.append(f"{sentence} It spends {rank.more:.4f} s more than they do in {rank.cause}.")
        elif position == 0 and rank.waited_for > LATE_THRESHOLD * rank.step:
            sentences.append(f"{sentence} No module explains it: look for other work on its core or GPU.")
    return sentences


def draw_bars(report: ExposureReport, path: Path) -> None:
    """Draw a bar per rank with the parts of its step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.35 * len(report.ranks)), layout="constrained")
    axes = figure.subplots()
    names = [f"rank {rank.rank}" for rank in report.ranks]
    bar_starts = [0.0] * len(names)
    for part in _BAR_PARTS:
        times = [getattr(rank, part) for rank in report.ranks]
        axes.barh(names, times, left=bar_starts, label=part)
        bar_starts = [start + time for start, time in zip(bar_starts, times, strict=True)]
    axes.set_xlabel("seconds of a step")
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)
