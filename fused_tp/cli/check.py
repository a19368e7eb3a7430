"""`fused-tp check`: compare a parallel model with the same model on one process, and locate differences.

Example:
    $ fused-tp check llama --tp 2 --cp 2
    $ fused-tp check path/to/model --layers 2 --set hidden_size=64 --tp 2 --pp 2 --microbatches 4
    $ fused-tp check my_package.model:make_model --config cluster.yaml --dtype fp64
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fused_tp.cli import at_least, make_place, positive
from fused_tp.cli.ranks import Job, launch, preload, start_method, under_torchrun

if TYPE_CHECKING:
    from torch import nn

    from fused_tp.planning.config import ParallelConfig
    from fused_tp.training.check_report import CheckReport

_ONE = at_least(1)
_SIZES = {
    "pp": "pipeline ranks",
    "dp_replicate": "data parallel ranks with all parameters",
    "dp_shard": "data parallel ranks with a part of the parameters (FSDP2)",
    "ep": "ranks that whole experts are distributed over",
    "cp": "context parallel ranks",
    "tp": "tensor parallel ranks",
    "ulysses_size": "context parallel ranks that share out heads",
    "virtual_stages": "stages of a pipeline rank",
    "microbatches": "parts of a rank's batch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fused-tp check`."""
    parser.epilog = "Exit status: 0 where all is right, 1 where something differs, 2 where the arguments do not fit."
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a transformers model type (a small one is made), a folder or file with a config.json, or "
        "module:function that makes a model whose forward takes tokens and labels and returns something with a loss",
    )
    group = parser.add_argument_group("parallelism")
    group.add_argument("--config", type=Path, metavar="FILE", help="YAML or JSON of a ParallelConfig")
    for name, what in _SIZES.items():
        group.add_argument(_option(name), type=_ONE, metavar="N", help=what)
    for name in ("sequence_parallel", "loss_parallel"):
        group.add_argument(
            _option(name), action=argparse.BooleanOptionalAction, default=None, help="on when --tp is above 1"
        )
    group.add_argument("--schedule", help="of the pipeline, such as 1F1B or ZBV")
    group.add_argument("--recompute", choices=("none", "full"), help="activation checkpointing of layers")
    group.add_argument(
        "--build", metavar="MODULE:FUNCTION", help="function(model, config, mesh) that makes it parallel in another way"
    )
    group = parser.add_argument_group("model")
    group.add_argument("--layers", type=_ONE, metavar="N", help="so many layers")
    group.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of the model's config")
    group.add_argument("--dtype", choices=("fp32", "fp64"), default="fp32")
    group = parser.add_argument_group("batch and steps")
    group.add_argument("--seq", type=at_least(2), default=24, help="tokens of a row (24)")
    group.add_argument("--batch-size", type=_ONE, metavar="ROWS", help="of all ranks (two for each microbatch)")
    group.add_argument("--packed", action="store_true", help="two documents in each row, by position_ids")
    group.add_argument("--batch", metavar="MODULE:FUNCTION", help="function(model, config) -> keywords of forward")
    group.add_argument("--steps", type=_ONE, default=1, help="of gradient descent, whose losses are compared (1)")
    group.add_argument("--tolerance", type=positive, help="of relative errors (1e-3 in fp32, 1e-5 in fp64)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here, too")


def main(arguments: argparse.Namespace) -> int:
    """Print the report; exit code 0: equal, 1: something differs or a rank failed, 2: invalid arguments."""
    try:
        config = parallel_config(arguments)
        if arguments.json is not None:
            make_place("--json", arguments.json)
        how = None if under_torchrun() else start_method("cpu")
        if how == "forkserver":
            preload(["fused_tp.training.check", *(["transformers"] if ":" not in arguments.model else [])])
        report: CheckReport = launch(Job(check, arguments, config.world_size), how)
    except ValueError as error:
        print(f"fused-tp check: {error}", file=sys.stderr)
        return 2
    except ChildProcessError as error:
        print(f"fused-tp check: {error}", file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") == "0":  # under torchrun, rank 0 reports
        print(report)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    return 0 if report.right else 1


def parallel_config(arguments: argparse.Namespace) -> ParallelConfig:
    """ParallelConfig of --config, overridden by the other options.

    Raises:
        ValueError: the fields contradict each other.
    """
    from fused_tp.planning.config import ParallelConfig, field_names

    given = {} if arguments.config is None else ParallelConfig.from_file(arguments.config).to_dict()
    options = {name: getattr(arguments, name) for name in field_names()}
    return ParallelConfig(**given | {name: value for name, value in options.items() if value is not None})


def check(arguments: argparse.Namespace) -> CheckReport:
    """Run the check on every rank and return its report."""
    import torch

    from fused_tp.planning.build import build
    from fused_tp.training.check import check_model, random_batch

    config = parallel_config(arguments)
    make = model_maker(arguments.model, layers=arguments.layers, changes=dict(map(_setting, arguments.set)))
    options: dict[str, Any] = {"rows": arguments.batch_size, "seq": arguments.seq, "packed": arguments.packed}
    return check_model(
        make,
        config,
        batch=partial(random_batch, **options) if arguments.batch is None else named(arguments.batch),
        build=build if arguments.build is None else named(arguments.build),
        dtype={"fp32": torch.float32, "fp64": torch.float64}[arguments.dtype],
        tolerance=arguments.tolerance,
        steps=arguments.steps,
    )


def model_maker(model: str, *, layers: int | None, changes: dict[str, Any]) -> Callable[[], nn.Module]:
    """Return a function that creates the model of the command line.

    Raises:
        ValueError: there is no such model.
    """
    from fused_tp.planning.small_config import at_depth, small_config

    if ":" in model:
        if layers is not None or changes:
            raise ValueError(f"--layers and --set change a config, and {model} makes the model by itself.")
        return partial(_called, model)
    from transformers import CONFIG_MAPPING, AutoConfig

    if Path(model).exists():
        config = AutoConfig.from_pretrained(model, local_files_only=True)
        changes = changes if layers is None else at_depth(config, layers) | changes
        config = type(config).from_dict({**config.to_dict(), **changes})
    elif model in CONFIG_MAPPING:
        kind = CONFIG_MAPPING[model]
        changes = changes if layers is None else at_depth(small_config(kind), layers) | changes
        config = small_config(kind, **changes)
    else:
        raise ValueError(f"MODEL is {model}; it must be a model type of transformers, a path, or module:function.")
    return partial(_from_config, config)


def _called(name: str) -> nn.Module:
    from torch import nn

    function = named(name)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{name} is called without arguments, to make the model: {error}.") from error
    model = function()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} has returned a {type(model).__name__}; it must make the model, an nn.Module.")
    return model


def _from_config(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    from fused_tp.planning.small_config import draw_values

    model: nn.Module = AutoModelForCausalLM.from_config(config)
    draw_values(model)
    return model.train()


def named(name: str) -> Any:
    """Import the function `module:function`; modules in the working directory are found, too.

    Raises:
        ValueError: there is no such function.
    """
    module, _, function = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} cannot be had: {error}") from error
    return found


def _setting(text: str) -> tuple[str, Any]:
    """Parse `hidden_size=64` into ("hidden_size", 64)."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text}: write NAME=VALUE, the value as in JSON.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
