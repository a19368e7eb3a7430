"""`fused-tp`: find the subcommand and run its module.

Each subcommand is a module `fused_tp.cli.<name>`, or benchmarks.cpu, with `add_arguments(parser)` and
`main(arguments) -> int` (the exit code). Only the requested module is imported, so that `fused-tp --help` is fast and
needs no optional dependency.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from fused_tp.cli import import_shipped_module
from fused_tp.core.errors import FusedTPError

COMMANDS = {
    "train": "pretrain or finetune a transformers model on text, over any ranks",
    "compare": "train the same model with several parallel configurations, and compare time, memory and loss",
    "report": "report from traces how much communication is hidden, which ranks are late, and what to change",
    "bench": "measure the ops against plain collectives; with --tune, write this machine's dispatch table",
    "selftest": "check and measure the kernels on the GPUs of this machine, in minutes",
    "tune": "check and measure every schedule on this machine, and save the results for FUSED_TP_AUTOTUNE",
    "launch": "run a script on the ranks of this machine, of other hosts or of SLURM, over torchrun",
    "check": "compare a parallel model on CPU ranks with the same model on one process, and locate differences",
    "doctor": "check this installation, and report what is missing and how to install it",
    "plan": "find the fastest parallel configurations of a model on GPUs, by a cost model",
    "explain": "print the schedule that an op would use, and the reason",
}

# Extra that installs each module that a subcommand may need.
_EXTRA_BY_MODULE = {
    "rich": "train",
    "matplotlib": "train",
    "numpy": "hf",
    "transformers": "hf",
    "pydantic": "train",
    "yaml": "train",
    "tensorboard": "train",
    "triton": "triton",
    "deepspeed": "deepspeed",
    "megatron": "megatron",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit code.

    0: done; 1: the command found a problem; 2: invalid arguments or a missing dependency; 130: interrupted.

    Example:
        >>> main(["doctor", "--json"])  # doctest: +SKIP
        0
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in argv if not word.startswith("-")), None)
    try:
        parser = _make_parser(name)
        arguments = parser.parse_args(argv)
        if arguments.command is None:
            parser.print_help()
            return 2
        return int(arguments.run(arguments))
    except ModuleNotFoundError as error:
        missing_module = (error.name or "").split(".")[0]
        if missing_module not in _EXTRA_BY_MODULE:
            raise
        print(
            f"fused-tp {name} needs {missing_module}: pip install 'fused-tp[{_EXTRA_BY_MODULE[missing_module]}]'",
            file=sys.stderr,
        )
        return 2
    except FusedTPError as error:
        print(f"fused-tp {name}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"fused-tp {name}: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of stdout has exited, as in `fused-tp doctor | head`
        sys.stderr.close()
        return 0


def _make_parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fused-tp", description="Tensor and context parallelism with overlapped communication."
    )
    parser.add_argument("--version", action="version", version=f"fused-tp {_installed_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="command")
    for name, help_text in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
        if name == command:
            try:
                module_name = f"fused_tp.cli.{name}"
                module = (
                    import_shipped_module("benchmarks", "cpu")
                    if name == "bench"
                    else importlib.import_module(module_name)
                )
            except FileNotFoundError as error:
                subparser.error(str(error))
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.main)
    return parser


def _installed_version() -> str:
    try:
        return version("fused-tp")
    except PackageNotFoundError:
        return "(not installed: run from its sources)"


if __name__ == "__main__":
    sys.exit(main())
