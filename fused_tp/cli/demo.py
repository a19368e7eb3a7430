"""`fused-tp demo`: train a small language model on one process, with plain collectives and with fused_tp, and compare.

It shows that the three train alike (losses equal to rounding), what a step of each costs and how much of that is
waiting, a sample of text, and writes demo.json and demo.png. It starts its own ranks, or is started by torchrun.
"""

# ruff: noqa: RUF009  # _option makes a field

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, field, fields
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

# Sized so that the default run ends in about a minute on two cores of a server CPU.
DEFAULT_SIZES = {"hidden": 512, "intermediate": 1408, "layers": 4, "heads": 8, "kv_heads": 4}
DTYPES = ("fp32", "bf16")
DEVICES = ("cpu", "cuda")
# Ranks of one host need no network; gloo would look for the address of the host's name, which may not resolve.
LOOPBACK = "lo"
_LONGEST_FOLDER = 64  # a socket's name has 104 bytes at most, and what is made in the folder some 35


def _option(group: str, default: Any, help: str, **how: Any) -> Any:
    """A field that is an option of group `group`; `how` goes to `add_argument`, by default type=type(default)."""
    if default is not None:
        help = f"{help} ({default!r})" if isinstance(default, str) and " " in default else f"{help} ({default})"
        how.setdefault("type", type(default))
    return field(metadata={"group": group, "default": default, "help": help, **how})


def _size(name: str) -> Any:
    return _option("model", None, f"of the built-in Llama ({DEFAULT_SIZES[name]})", type=int)


@dataclass(frozen=True)
class DemoSettings:
    """One field for each option of `fused-tp demo`, in the order of its help; picklable, to travel to the ranks."""

    tp: int = _option("parallelism", 2, "tensor-parallel ranks")
    cp: int = _option("parallelism", 1, "context-parallel ranks")
    sequence_parallel: bool = _option(
        "parallelism",
        None,
        "shard activations between the parallel layers along the sequence (on when --tp is above 1)",
        action=argparse.BooleanOptionalAction,
    )
    loss_parallel: bool = _option(
        "parallelism",
        None,
        "compute the loss from logits sharded along the vocabulary (on when --tp is above 1)",
        action=argparse.BooleanOptionalAction,
    )
    device: str = _option("parallelism", "cpu", " or ".join(DEVICES))
    threads: int = _option("parallelism", 1, "CPU threads of each rank")

    steps: int = _option("training", 30, "training steps of each run, counted from --resume's")
    dtype: str = _option("training", "fp32", f"{' or '.join(DTYPES)}: of matmuls; weights stay in fp32")
    batch: int = _option("training", 4, "rows of a batch")
    seq: int = _option("training", 256, "tokens of a row")
    lr: float = _option("training", 5e-4, "AdamW's learning rate, after 5 steps of warm-up")
    seed: int = _option("training", 0, "of weights, batches and the sample")
    data: Path | None = _option(
        "training", None, "text to train on (Python's language reference)", type=Path, metavar="FILE"
    )
    save: Path | None = _option("training", None, "save model and optimizer here at the end", type=Path, metavar="DIR")
    resume: Path | None = _option(
        "training", None, "go on from what --save wrote, at any --tp and --cp", type=Path, metavar="DIR"
    )

    hf: Path | None = _option(
        "model", None, "a saved transformers model, with its tokenizer if it has one", type=Path, metavar="DIR"
    )
    hidden: int | None = _size("hidden")
    intermediate: int | None = _size("intermediate")
    layers: int | None = _size("layers")
    heads: int | None = _size("heads")
    kv_heads: int | None = _size("kv_heads")

    out: Path = _option("output", Path("out/demo"), "for demo.json, demo.png", type=Path, metavar="DIR")
    prompt: str = _option("output", "The ", "where the sample starts")
    sample_tokens: int = _option("output", 120, "length of the sample, 0 for none")
    sample_temperature: float = _option("output", 0.7, "0 for the likeliest token each time")

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> DemoSettings:
        """The settings of a command line, checked.

        Raises:
            ValueError: a sentence that names the option, its value and what it may be.
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
        for name in ("tp", "cp", "steps", "batch", "threads", *DEFAULT_SIZES):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{option(name)} is {value}; it must be at least 1.")
        for wrong, sentence in (
            (self.seq < 2, f"--seq is {self.seq}; a token and the one it predicts make it at least 2."),
            (self.sample_tokens < 0, f"--sample-tokens is {self.sample_tokens}; 0 leaves the sample out."),
            (not self.lr > 0, f"--lr is {self.lr}; it must be positive."),
            (not self.prompt, "--prompt is empty; a sample starts from at least one token."),
            (self.sample_temperature < 0, f"--sample-temperature is {self.sample_temperature}; 0 is greedy."),
        ):
            if wrong:
                raise ValueError(sentence)
        for name, allowed in (("dtype", DTYPES), ("device", DEVICES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{option(name)} is {getattr(self, name)!r}; it may be {' or '.join(allowed)}.")
        for name in ("sequence_parallel", "loss_parallel"):
            if getattr(self, name) and self.tp == 1:
                raise ValueError(f"{option(name)} shards over the tensor-parallel ranks, and --tp is 1; leave it out.")
        world_size = os.environ.get("WORLD_SIZE")
        if under_torchrun() and world_size != str(self.ranks):
            raise ValueError(
                f"torchrun started {world_size} ranks, but --tp {self.tp} x --cp {self.cp} needs {self.ranks}: "
                f"use torchrun --nproc-per-node {self.ranks}, or leave torchrun out and the demo starts its own ranks."
            )
        self._check_model()
        self._check_paths()
        needed = {"matplotlib": "demo", "rich": "demo"} | ({"transformers": "hf"} if self.hf else {})
        for package, extra in needed.items():
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"The demo needs {package}, which is not installed: pip install 'fused-tp[{extra}]'")

    def _check_model(self) -> None:
        if self.hf is not None:
            given = [option(name) for name in DEFAULT_SIZES if getattr(self, name) is not None]
            if given:
                raise ValueError(
                    f"{', '.join(given)} given with --hf: the sizes are those of {self.hf}; leave them out."
                )
            if not (self.hf / "config.json").is_file():
                raise ValueError(
                    f"--hf is {self.hf}, which has no config.json: give the folder of a saved transformers model "
                    "(model.save_pretrained(folder))."
                )
            return  # parallelize knows best which models it can shard
        hidden, heads, kv_heads = self.hidden or 0, self.heads or 0, self.kv_heads or 0
        if hidden % (2 * heads):
            raise ValueError(
                f"--hidden is {hidden}; {heads} heads (--heads) of an even size need a multiple of {2 * heads}."
            )
        if heads % kv_heads:
            raise ValueError(f"--heads is {heads}, which --kv-heads {kv_heads} does not divide.")
        for name, count in (("--heads", heads), ("--kv-heads", kv_heads)):
            if count % self.tp:
                raise ValueError(f"{name} is {count}, which --tp {self.tp} does not divide: a rank holds whole heads.")

    def _check_paths(self) -> None:
        for name, folder in (("--out", self.out), ("--save", self.save)):
            if folder is not None and folder.exists() and not folder.is_dir():
                raise ValueError(f"{name} is {folder}, which is a file; give a folder, new or old.")
        if self.data is not None and not self.data.is_file():
            raise ValueError(f"--data is {self.data}, which is not a file.")
        if self.resume is not None and not (self.resume / ".metadata").is_file():
            raise ValueError(
                f"--resume is {self.resume}, where there is no checkpoint: give a folder that --save has written."
            )

    def to_json(self) -> dict[str, object]:
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fused-tp demo`: the fields of `DemoSettings`."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for one in fields(DemoSettings):
        how = dict(one.metadata)
        title = how.pop("group")
        group = groups[title] if title in groups else groups.setdefault(title, parser.add_argument_group(title))
        group.add_argument(option(one.name), **how)


def main(arguments: argparse.Namespace) -> int:
    """Run the demo: 0 when the runs train alike, 1 when they differ, 2 when the arguments do not fit."""
    try:
        settings = DemoSettings.from_arguments(arguments)
        how = None if under_torchrun() else start_method(settings)
        if how == "forkserver":
            preload()
        # Here, not above: `fused-tp --help` and a wrong argument need not wait for it, nor the fork server.
        from fused_tp.cli.demo_run import launch

        launch(settings, how)
    except ValueError as error:
        print(f"fused-tp demo: {error}", file=sys.stderr)
        return 2
    if os.environ.get("RANK", "0") != "0":
        return 0  # under torchrun, rank 0 reports
    return 0 if json.loads((settings.out / "demo.json").read_text())["trained_alike"] else 1


def start_method(settings: DemoSettings) -> str:
    """How ranks are started: as forks of one process that has imported what they all need, seconds of work for each.

    Not where they use GPUs: a library that touches one while it is imported would break it for all forks. Nor where the
    name of its socket, in the folder for temporary files, would be too long for the system.
    """
    too_long = len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER
    if too_long or settings.device != "cpu" or "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    return "forkserver"


def preload() -> None:
    """Start the fork server, which imports what ranks need while this process imports it too."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # ranks have the server's environment
    forkserver.set_forkserver_preload(["fused_tp.cli.demo_run"])
    forkserver.ensure_running()


def option(name: str) -> str:
    """`kv_heads` -> `--kv-heads`."""
    return "--" + name.replace("_", "-")


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
