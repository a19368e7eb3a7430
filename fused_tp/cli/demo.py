"""`fused-tp demo`: train a small language model on one process, with plain collectives and with fused_tp, and compare.

It shows that the three train in the same way (losses equal to rounding), what a step of each costs and how much of
that is waiting, a sample of text, and writes demo.json and demo.png. It starts its own ranks, or torchrun starts it.
"""

# ruff: noqa: RUF009  # _option makes a field

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fused_tp.cli import at_least, make_folder, positive
from fused_tp.cli.ranks import Job, launch, preload, start_method, under_torchrun

# Sized so that the default run ends in about a minute on two cores of a server CPU.
DEFAULT_SIZES = {"hidden": 512, "intermediate": 1408, "layers": 4, "heads": 8, "kv_heads": 4}
# Titles in the help, by the first option below them.
GROUPS = {"tp": "parallelism", "steps": "training", "hf": "model", "out": "output"}


def _option(default: Any, help: str, **how: Any) -> Any:
    """A field that is an option; `how` goes to `add_argument`."""
    if default is not None:
        help = f"{help} ({default!r})" if isinstance(default, str) and " " in default else f"{help} ({default})"
    return field(metadata={"default": default, "help": help, **how})


def _path(fits: Callable[[Path], bool], wanted: str) -> dict[str, Any]:
    """Keywords of `add_argument` for a path of which `fits` is true."""

    def path(text: str) -> Path:
        if not fits(Path(text)):
            raise argparse.ArgumentTypeError(f"is {text}; give {wanted}")
        return Path(text)

    return {"type": path, "metavar": "FILE" if "file" in wanted else "DIR"}


_ONE = at_least(1)
_FOLDER = _path(lambda path: path.is_dir() or not path.exists(), "a folder, new or old")
_FLAG = {"action": argparse.BooleanOptionalAction}


def _size(name: str) -> Any:
    return _option(None, f"of the built-in Llama ({DEFAULT_SIZES[name]})", type=_ONE)


@dataclass(frozen=True)
class DemoSettings:
    """One field for each option of `fused-tp demo`, in the order of its help; picklable, to travel to the ranks."""

    tp: int = _option(2, "tensor-parallel ranks", type=_ONE)
    cp: int = _option(1, "context-parallel ranks", type=_ONE)
    sequence_parallel: bool = _option(
        None, "shard activations between layers along the sequence (on when --tp is above 1)", **_FLAG
    )
    loss_parallel: bool = _option(
        None, "compute the loss from logits sharded by vocabulary (on when --tp is above 1)", **_FLAG
    )
    device: str = _option("cpu", "of the ranks", choices=("cpu", "cuda"))
    threads: int = _option(1, "CPU threads of each rank", type=_ONE)

    steps: int = _option(30, "training steps of each run, counted from --resume's", type=_ONE)
    dtype: str = _option("fp32", "of matmuls; weights stay in fp32", choices=("fp32", "bf16"))
    batch: int = _option(4, "rows of a batch", type=_ONE)
    seq: int = _option(256, "tokens of a row, one of them and its successor at least", type=at_least(2))
    lr: float = _option(5e-4, "AdamW's learning rate, after 5 steps of warm-up", type=positive)
    seed: int = _option(0, "of weights, batches and the sample", type=int)
    data: Path | None = _option(None, "text to train on (Python's language reference)", **_path(Path.is_file, "a file"))
    save: Path | None = _option(None, "save model and optimizer here at the end", **_FOLDER)
    resume: Path | None = _option(
        None,
        "go on from what --save wrote, at any --tp and --cp",
        **_path(lambda path: (path / ".metadata").is_file(), "a checkpoint that --save has written"),
    )

    hf: Path | None = _option(
        None,
        "a saved transformers model, with its tokenizer if it has one",
        **_path(lambda path: (path / "config.json").is_file(), "where model.save_pretrained has put a config.json"),
    )
    hidden: int | None = _size("hidden")
    intermediate: int | None = _size("intermediate")
    layers: int | None = _size("layers")
    heads: int | None = _size("heads")
    kv_heads: int | None = _size("kv_heads")

    out: Path = _option(Path("out/demo"), "for demo.json, demo.png", **_FOLDER)
    prompt: str = _option("The ", "where the sample starts")
    sample_tokens: int = _option(120, "length of the sample, 0 for none", type=at_least(0))
    sample_temperature: float = _option(0.7, "0 for the likeliest token each time", type=at_least(0, float))

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> DemoSettings:
        """The settings of a command line, checked.

        Raises:
            ValueError: options that do not go together, in a sentence.
        """
        values = {field.name: getattr(arguments, field.name) for field in fields(cls)}
        for name in ("sequence_parallel", "loss_parallel"):
            if values[name] is None:
                values[name] = values["tp"] > 1
        if values["hf"] is None:
            values |= {name: size for name, size in DEFAULT_SIZES.items() if values[name] is None}
        settings = cls(**values)
        settings.check()
        return settings

    @property
    def ranks(self) -> int:
        return self.tp * self.cp

    def check(self) -> None:
        """Refuse, in a sentence, what could only fail later, on every rank at once and in worse words."""
        tp, sizes = self.tp, {name: getattr(self, name) for name in DEFAULT_SIZES}
        for name in ("sequence_parallel", "loss_parallel"):
            if getattr(self, name) and tp == 1:
                raise ValueError(f"{option(name)} shards over the tensor-parallel ranks, and --tp is 1; leave it out.")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"--seed is {self.seed}; it must be from 0 to {(1 << 32) - 1}.")
        if not self.prompt:
            raise ValueError("--prompt is empty; a sample starts from at least one token.")
        world_size = os.environ.get("WORLD_SIZE")
        if under_torchrun() and world_size != str(self.ranks):
            raise ValueError(
                f"torchrun started {world_size} ranks, but --tp {tp} x --cp {self.cp} needs {self.ranks}: "
                f"use torchrun --nproc-per-node {self.ranks}, or leave torchrun out and the demo starts its own ranks."
            )
        if self.hf is not None:  # parallelize knows best which models it can shard
            given = ", ".join(option(name) for name, size in sizes.items() if size is not None)
            if given:
                raise ValueError(f"{given} given with --hf: the sizes are those of {self.hf}; leave them out.")
            return
        hidden, heads, kv_heads = sizes["hidden"], sizes["heads"], sizes["kv_heads"]
        if hidden % (2 * heads):
            raise ValueError(
                f"--hidden is {hidden}; {heads} heads (--heads) of an even size need a multiple of {2 * heads}."
            )
        if heads % kv_heads:
            raise ValueError(f"--heads is {heads}, which --kv-heads {kv_heads} does not divide.")
        for name, count in (("--heads", heads), ("--kv-heads", kv_heads)):
            if count % tp:
                raise ValueError(f"{name} is {count}, which --tp {tp} does not divide: a rank holds whole heads.")

    def to_json(self) -> dict[str, object]:
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fused-tp demo`: the fields of `DemoSettings`."""
    group = parser.add_argument_group()
    for one in fields(DemoSettings):
        if one.name in GROUPS:
            group = parser.add_argument_group(GROUPS[one.name])
        group.add_argument(option(one.name), **one.metadata)


def main(arguments: argparse.Namespace) -> int:
    """Run the demo: 0 when the runs train alike, 1 when they differ, 2 when the arguments do not fit."""
    try:
        settings = DemoSettings.from_arguments(arguments)
        for package in ("matplotlib", "rich", *(("transformers",) if settings.hf else ())):
            if find_spec(package) is None:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        if settings.device == "cuda":
            _check_gpus(settings.ranks)
        for name, folder in (("--save", settings.save), ("--out", settings.out)):
            if folder is not None:
                make_folder(name, folder)
        how = None if under_torchrun() else start_method(settings.device)
        if how == "forkserver":
            preload(["fused_tp.cli.demo_run"])
        # Here, not above: `fused-tp --help` and a wrong argument need not wait for it, nor the fork server.
        from fused_tp.cli.demo_run import rank_main

        launch(Job(rank_main, settings, settings.ranks, settings.device, settings.threads), how)
    except ValueError as error:
        print(f"fused-tp demo: {error}", file=sys.stderr)
        return 2
    except ChildProcessError as error:
        print(f"fused-tp demo: {error}", file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") != "0":
        return 0  # under torchrun, rank 0 reports
    return 0 if json.loads((settings.out / "demo.json").read_text())["trained_alike"] else 1


def _check_gpus(ranks: int) -> None:
    """Raises ValueError where this host has fewer GPUs than ranks; under torchrun there may be other hosts."""
    import torch

    found, wanted = torch.cuda.device_count(), 1 if under_torchrun() else ranks
    if found < wanted:
        raise ValueError(f"--device cuda needs a GPU for each of the {ranks} ranks; torch sees {found}.")


def option(name: str) -> str:
    """`kv_heads` -> `--kv-heads`."""
    return "--" + name.replace("_", "-")
