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

from fused_tp.cli import at_least, make_parent_folder, positive_number
from fused_tp.cli.ranks import Job, choose_start_method, is_under_torchrun, launch, preload

if TYPE_CHECKING:
    from torch import nn

    from fused_tp.planning.config import ParallelConfig
    from fused_tp.training.check_report import CheckReport

_AT_LEAST_ONE = at_least(1)
_SIZE_OPTIONS = {
    "pp": "pipeline ranks",
    "dp_replicate": "data parallel ranks that replicate parameters",
    "dp_shard": "data parallel ranks that shard parameters (FSDP2)",
    "ep": "ranks that experts are distributed over",
    "cp": "context parallel ranks",
    "tp": "tensor parallel ranks",
    "ulysses_size": "context parallel ranks that shard attention by heads",
    "virtual_stages": "stages per pipeline rank",
    "microbatches": "microbatches of a rank's batch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fused-tp check`."""
    parser.epilog = "Exit status: 0: everything is right; 1: something differs, or a rank failed; 2: invalid arguments."
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a transformers model type (a small model is created), a config.json or its folder, or "
        "module:function that creates a model whose forward takes tokens and labels and returns an object with a loss",
    )
    group = parser.add_argument_group("parallelism")
    group.add_argument("--config", type=Path, metavar="FILE", help="YAML or JSON of a ParallelConfig")
    for name, help_text in _SIZE_OPTIONS.items():
        group.add_argument(_option_name(name), type=_AT_LEAST_ONE, metavar="N", help=help_text)
    for name in ("sequence_parallel", "loss_parallel"):
        group.add_argument(
            _option_name(name), action=argparse.BooleanOptionalAction, default=None, help="on when --tp is above 1"
        )
    group.add_argument("--schedule", help="pipeline schedule, such as 1F1B or ZBV")
    group.add_argument("--recompute", choices=("none", "full"), help="activation checkpointing of layers")
    group.add_argument(
        "--build", metavar="MODULE:FUNCTION", help="function(model, config, mesh) to use instead of fused_tp.build"
    )
    group = parser.add_argument_group("model")
    group.add_argument("--layers", type=_AT_LEAST_ONE, metavar="N", help="number of layers")
    group.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change the model's config")
    group.add_argument("--dtype", choices=("fp32", "fp64"), default="fp32")
    group = parser.add_argument_group("batch and steps")
    group.add_argument("--seq", type=at_least(2), default=24, help="tokens per row (24)")
    group.add_argument(
        "--batch-size", type=_AT_LEAST_ONE, metavar="ROWS", help="rows over all ranks (two per microbatch)"
    )
    group.add_argument("--packed", action="store_true", help="two documents in each row, by position_ids")
    group.add_argument("--batch", metavar="MODULE:FUNCTION", help="function(model, config) -> keywords of forward")
    group.add_argument(
        "--steps", type=_AT_LEAST_ONE, default=1, help="steps of gradient descent to compare losses of (1)"
    )
    group.add_argument("--tolerance", type=positive_number, help="allowed relative error (1e-3 in fp32, 1e-5 in fp64)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to FILE")


def main(arguments: argparse.Namespace) -> int:
    """Print the report; exit code 0: equal, 1: something differs or a rank failed, 2: invalid arguments."""
    try:
        config = parallel_config(arguments)
        if arguments.json is not None:
            make_parent_folder("--json", arguments.json)
        method = None if is_under_torchrun() else choose_start_method("cpu")
        if method == "forkserver":
            preload(["fused_tp.training.check", *(["transformers"] if ":" not in arguments.model else [])])
        report: CheckReport = launch(Job(check, arguments, config.world_size), method)
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
    """Return the ParallelConfig of --config, overridden by the other options.

    Raises:
        ValueError: the fields contradict each other.
    """
    from fused_tp.planning.config import ParallelConfig, field_names

    fields = {} if arguments.config is None else ParallelConfig.from_file(arguments.config).to_dict()
    options = {name: getattr(arguments, name) for name in field_names()}
    return ParallelConfig(**fields | {name: value for name, value in options.items() if value is not None})


def check(arguments: argparse.Namespace) -> CheckReport:
    """Run the check on every rank and return its report."""
    import torch

    from fused_tp.planning.build import build
    from fused_tp.training.check import check_model, random_batch

    config = parallel_config(arguments)
    make_model = model_maker(arguments.model, layers=arguments.layers, changes=dict(map(_parse_setting, arguments.set)))
    options: dict[str, Any] = {"rows": arguments.batch_size, "seq_len": arguments.seq, "packed": arguments.packed}
    return check_model(
        make_model,
        config,
        batch=partial(random_batch, **options) if arguments.batch is None else import_function(arguments.batch),
        build=build if arguments.build is None else import_function(arguments.build),
        dtype={"fp32": torch.float32, "fp64": torch.float64}[arguments.dtype],
        tolerance=arguments.tolerance,
        steps=arguments.steps,
    )


def model_maker(model: str, *, layers: int | None, changes: dict[str, Any]) -> Callable[[], nn.Module]:
    """Return a function that creates the model of the command line.

    Raises:
        ValueError: there is no such model.
    """
    from fused_tp.planning.small_config import depth_overrides, small_config

    if ":" in model:
        if layers is not None or changes:
            raise ValueError(f"--layers and --set change a config, but the function {model} has none; omit them.")
        return partial(_call_model_function, model)
    from transformers import CONFIG_MAPPING, AutoConfig

    if Path(model).exists():
        config = AutoConfig.from_pretrained(model, local_files_only=True)
        changes = changes if layers is None else depth_overrides(config, layers) | changes
        config = type(config).from_dict({**config.to_dict(), **changes})
    elif model in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[model]
        changes = changes if layers is None else depth_overrides(small_config(config_class), layers) | changes
        config = small_config(config_class, **changes)
    else:
        raise ValueError(f"MODEL must be a model type of transformers, a path, or module:function, got {model}.")
    return partial(_from_config, config)


def _call_model_function(name: str) -> nn.Module:
    from torch import nn

    function = import_function(name)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{name} must be callable without arguments: {error}.") from error
    model = function()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} must return an nn.Module, got {type(model).__name__}.")
    return model


def _from_config(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    from fused_tp.planning.small_config import draw_values

    model: nn.Module = AutoModelForCausalLM.from_config(config)
    draw_values(model)
    return model.train()


def import_function(name: str) -> Any:
    """Import the function `module:function`; the module may be in the working directory.

    Raises:
        ValueError: there is no such function.
    """
    module, _, function = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        value = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} cannot be imported: {error}") from error
    return value


def _parse_setting(text: str) -> tuple[str, Any]:
    """Parse `hidden_size=64` into ("hidden_size", 64)."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set must be NAME=VALUE with VALUE in JSON, got {text!r}.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _option_name(name: str) -> str:
    return "--" + name.replace("_", "-")
