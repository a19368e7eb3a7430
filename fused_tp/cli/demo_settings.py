"""What a `fused-tp demo` was asked for: the command line as one dataclass, checked before any process starts."""

from __future__ import annotations

import argparse
import importlib.util
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

# Sized so that fifty steps of each of the three runs end in about two minutes on two cores of a server CPU.
DEFAULT_SIZES = {"hidden": 512, "intermediate": 1408, "layers": 4, "heads": 8, "kv_heads": 4}
DTYPES = ("fp32", "bf16")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class DemoSettings:
    """One field for each option of `fused-tp demo`; picklable, so that it can travel to the ranks."""

    tp: int
    cp: int
    steps: int
    batch: int
    seq: int
    lr: float
    seed: int
    dtype: str
    device: str
    threads: int
    sequence_parallel: bool
    loss_parallel: bool
    out: Path
    data: Path | None
    hf: Path | None
    save: Path | None
    resume: Path | None
    prompt: str
    sample_tokens: int
    sample_temperature: float
    hidden: int | None
    intermediate: int | None
    layers: int | None
    heads: int | None
    kv_heads: int | None

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> DemoSettings:
        """The settings of a command line, checked.

        Raises:
            ValueError: a sentence that names the option, what it was and what it may be.
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
        """Refuse, in a sentence, what could only fail later, in every rank at once and in worse words."""
        for name in ("tp", "cp", "steps", "batch", "threads", "hidden", "intermediate", "layers", "heads", "kv_heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{option(name)} is {value}; it must be at least 1.")
        if self.seq < 2:
            raise ValueError(f"--seq is {self.seq}; a token and the one it predicts make it at least 2.")
        if self.sample_tokens < 0:
            raise ValueError(f"--sample-tokens is {self.sample_tokens}; 0 leaves the sample out, else it is positive.")
        if not self.lr > 0:
            raise ValueError(f"--lr is {self.lr}; it must be positive.")
        if not self.prompt:
            raise ValueError("--prompt is empty; a sample starts from at least one token.")
        if self.sample_temperature < 0:
            raise ValueError(f"--sample-temperature is {self.sample_temperature}; 0 is greedy, else it is positive.")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype is {self.dtype!r}; it may be {' or '.join(DTYPES)}.")
        if self.device not in DEVICES:
            raise ValueError(f"--device is {self.device!r}; it may be {' or '.join(DEVICES)}.")
        for name in ("sequence_parallel", "loss_parallel"):
            if getattr(self, name) and self.tp == 1:
                raise ValueError(f"{option(name)} cuts over the tensor-parallel ranks, and --tp is 1; leave it out.")
        self._check_launch()
        self._check_model()
        self._check_paths()
        self._check_packages()

    def _check_launch(self) -> None:
        world_size = os.environ.get("WORLD_SIZE")
        if under_torchrun() and world_size != str(self.ranks):
            raise ValueError(
                f"torchrun started {world_size} ranks, but --tp {self.tp} x --cp {self.cp} needs {self.ranks}: "
                f"use torchrun --nproc-per-node {self.ranks}, or leave torchrun out and the demo starts its own ranks."
            )

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
            return  # parallelize knows best which models it can cut
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

    def _check_packages(self) -> None:
        needed = {"matplotlib": "demo", "rich": "demo"} | ({"transformers": "hf"} if self.hf else {})
        for package, extra in needed.items():
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"The demo needs {package}, which is not installed: pip install 'fused-tp[{extra}]'")

    def to_json(self) -> dict[str, object]:
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


def option(name: str) -> str:
    """`kv_heads` -> `--kv-heads`."""
    return "--" + name.replace("_", "-")


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
