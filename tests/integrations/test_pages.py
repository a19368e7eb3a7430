"""Commands and scripts of README.md and docs run as printed, in a folder with the files that their reader has.

In the order of a page: a `py` block that begins with `# NAME.py` is written to that file, another one is run; `sh`
blocks are run; commands of `console` blocks are run, and print what is shown. (`python` blocks: test_documentation.py.)

A comment `<!-- needs: NAME -->` before a block names what this machine lacks. Of such a block, `fused-tp launch` is run
with `--dry-run`, and Python is compiled.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers import REPOSITORY

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

PAGES = ["README.md", "docs/quickstart.md", "docs/tutorial.md", "docs/install.md", "docs/development.md"]
PAGES += sorted(str(page.relative_to(REPOSITORY)) for page in (REPOSITORY / "docs" / "guides").glob("*.md"))
NEEDS = {"GPU", "hosts", "Kubernetes", "SLURM", "Ray", "ms-swift", "torchtitan", "vLLM", "SGLang", "network"}
BLOCK = re.compile(r"^(?:<!-- needs: ([^\n]+) -->\n)?```(py|sh|console)\n(.*?)^```$", re.M | re.S)
SECONDS = 900

TRAIN = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group()
total = torch.ones(1)
dist.all_reduce(total)
print("ranks:", int(total), sys.argv[1:])
dist.destroy_process_group()
"""
MODEL = """
from transformers import AutoModelForCausalLM, LlamaConfig

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}

def make_model():
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_hidden_layers=4))
"""


def blocks(page: str) -> list[tuple[str, str, str]]:
    """(need or "", kind, text) of the blocks of a page."""
    return BLOCK.findall((REPOSITORY / page).read_text())


def environment(folder: Path) -> dict[str, str]:
    """Environment with this Python's commands, as if fused_tp were installed."""
    commands = {"python": "", "python3": "", "torchrun": "-m torch.distributed.run", "fused-tp": "-m fused_tp"}
    (folder / "bin").mkdir()
    for name, arguments in commands.items():
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    given = {name: value for name, value in os.environ.items() if not name.startswith("FUSED_TP_")}
    own = {"PATH": path, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}.", "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    return given | own | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}


@pytest.fixture(scope="module")
def readers_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the files of a reader: a configuration, a script, a model, and a list of hosts."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copy(REPOSITORY / "examples" / "train.yaml", folder)
    for name, text in (("train.py", TRAIN), ("package/train.py", TRAIN), ("my_package/model.py", MODEL)):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for name in ("hosts", "pods"):
        (folder / name).write_text("".join(f"node{number} slots=8\n" for number in range(128)))
    (folder / "cluster.yaml").write_text("{tp: 2}\n")
    names: dict[str, Any] = {}
    exec(MODEL, names)
    names["make_model"]().save_pretrained(folder / "path" / "to" / "model")
    shutil.copy(folder / "path" / "to" / "model" / "config.json", folder / "path" / "to")
    return folder


def on_this_machine(text: str, need: str) -> str:
    """Commands that this machine can run: none that install; those of `make` are printed only."""
    lines = text.replace("\\\n", " ").splitlines()
    if need:
        launches = (line for line in lines if line.startswith("fused-tp launch "))
        return "\n".join(line.replace("fused-tp launch ", "fused-tp launch --dry-run ") for line in launches)
    lines = [line for line in lines if not line.startswith("pip install")]
    text = re.sub(r"^make ", f"make -n -C {REPOSITORY} ", "\n".join(lines), flags=re.M)
    return text.replace("bash benchmarks/", f"bash {REPOSITORY}/benchmarks/")


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Commands of a `console` block, and the lines shown below each."""
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, *shown = part.splitlines()
        yield command, shown


def without_numbers(line: str) -> str:
    return " ".join(re.sub(r"\d[\d.,]*(e[+-]?\d+)?", "0", line).split())


def run(text: str, folder: Path, given: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", text],
        cwd=folder,
        env=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-6000:]}"
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_blocks_run_as_printed(page: str, readers_files: Path, tmp_path: Path) -> None:
    faulthandler.cancel_dump_traceback_later()  # pytest's deadline of a test; each command has its own
    shutil.copytree(readers_files, tmp_path, dirs_exist_ok=True)
    given = environment(tmp_path)
    for need, kind, text in blocks(page):
        if kind == "py":
            compile(text, page, "exec")
            named = re.match(r"# ([\w]+\.py)\n", text)
            file = tmp_path / (named[1] if named else "block.py")
            file.write_text(text)
            if not named and not need:
                run(f"python {file.name}", tmp_path, given)
        elif kind == "sh":
            run(on_this_machine(text, need), tmp_path, given)
        else:
            for command, shown in commands(text):
                printed = run(on_this_machine(command, need), tmp_path, given)
                lines = {without_numbers(line) for line in printed.splitlines()}
                found = [without_numbers(line) in lines for line in shown if line.strip() not in ("", "...")]
                assert sum(found) * 2 >= len(found), f"{command} printed\n{printed}"


def test_needs_are_known() -> None:
    for page in (REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")):
        text = page.read_text()
        needs = [need for need, _, _ in BLOCK.findall(text) if need]
        assert len(re.findall("^<!-- needs:", text, re.M)) == len(needs), page
        assert {*needs} <= NEEDS, page
