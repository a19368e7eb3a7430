"""`fused-tp demo`: train a small language model on one process, with plain collectives and with fused_tp, and compare.

It shows that the three train alike (losses equal to rounding), what a step of each costs and how much of that is
waiting, a sample of text, and writes demo.json and demo.png. It starts its own ranks, or is started by torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from fused_tp.cli.demo_settings import DEFAULT_SIZES, DEVICES, DTYPES, DemoSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fused-tp demo`; `DemoSettings` has a field for each."""
    layout = parser.add_argument_group("parallelism")
    layout.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks (2)")
    layout.add_argument("--cp", type=int, default=1, help="context-parallel ranks (1)")
    layout.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        help="cut activations between the parallel layers along the sequence (on when --tp is above 1)",
    )
    layout.add_argument(
        "--loss-parallel",
        action=argparse.BooleanOptionalAction,
        help="compute the loss from logits cut along the vocabulary (on when --tp is above 1)",
    )
    layout.add_argument("--device", default="cpu", help=f"{' or '.join(DEVICES)} (cpu)")
    layout.add_argument("--threads", type=int, default=1, help="CPU threads of each rank (1)")

    training = parser.add_argument_group("training")
    training.add_argument(
        "--steps", type=int, default=50, help="training steps of each run, counted from --resume's (50)"
    )
    training.add_argument(
        "--dtype", default="fp32", help=f"{' or '.join(DTYPES)}: of matmuls; weights stay in fp32 (fp32)"
    )
    training.add_argument("--batch", type=int, default=4, help="rows of a batch (4)")
    training.add_argument("--seq", type=int, default=256, help="tokens of a row (256)")
    training.add_argument(
        "--lr", type=float, default=5e-4, help="AdamW's learning rate, after 5 steps of warm-up (5e-4)"
    )
    training.add_argument("--seed", type=int, default=0, help="of weights, batches and the sample (0)")
    training.add_argument("--data", type=Path, metavar="FILE", help="text to train on (Python's language reference)")
    training.add_argument("--save", type=Path, metavar="DIR", help="save model and optimizer here at the end")
    training.add_argument(
        "--resume", type=Path, metavar="DIR", help="go on from what --save wrote, at any --tp and --cp"
    )

    model = parser.add_argument_group("model")
    model.add_argument(
        "--hf", type=Path, metavar="DIR", help="a saved transformers model, with its tokenizer if it has one"
    )
    for name, size in DEFAULT_SIZES.items():
        model.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"of the built-in Llama ({size})")

    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", type=Path, default=Path("out/demo"), metavar="DIR", help="for demo.json, demo.png (out/demo)"
    )
    output.add_argument("--prompt", default="The ", help="where the sample starts ('The ')")
    output.add_argument("--sample-tokens", type=int, default=120, help="length of the sample, 0 for none (120)")
    output.add_argument(
        "--sample-temperature", type=float, default=0.7, help="0 for the likeliest token each time (0.7)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the demo: 0 when the runs train alike, 1 when they differ, 2 when the arguments do not fit."""
    try:
        settings = DemoSettings.from_arguments(arguments)
        # Here, not above: `fused-tp --help` and a wrong argument need not wait for torch.
        from fused_tp.cli.demo_launch import launch
        from fused_tp.cli.demo_run import rank_main

        launch(rank_main, settings)
    except ValueError as error:
        print(f"fused-tp demo: {error}", file=sys.stderr)
        return 2
    if os.environ.get("RANK", "0") != "0":
        return 0  # under torchrun, rank 0 reports
    return 0 if json.loads((settings.out / "demo.json").read_text())["trained_alike"] else 1
