"""Examples in README.md, docs and docstrings run as written, and print the output shown below them."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fused_tp
from fused_tp.cli.main import COMMANDS
from tests.tiers import quick
from tests.workers import REPOSITORY, fresh_ranks, run_ranks

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
VOCABULARY, HIDDEN = 64, 32
SHOWN_IN_PAGES = {"load_pretrained", "nn", "parallelize"}
SHOWN_IN_PAGES |= {"pipeline", "split_backward", "make_mesh", "fsdp_mesh", "no_sync", "sync_gradients"}
SHOWN_IN_PAGES |= {"ParallelConfig", "build", "is_parallelized", "CheckpointManager", "DistributedBatches"}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def projections(x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """Projections of a model that reads only this rank's tokens, at their positions in the sequence."""
    assert x.shape[1] == len(positions)
    turned = x + positions[:, None].sin()
    return tuple(turned.unflatten(-1, (4, -1)) for _ in "qkv")


def theirs(checkpoint: str) -> dict[str, Any]:
    """Names that readers have: no example defines them."""
    torch.manual_seed(0)
    return {
        "act": torch.relu,
        "batches": list(torch.randint(2, VOCABULARY, (6, 2, 12))),
        "dataset": list(torch.randint(2, VOCABULARY, (16, 12))),
        "documents": [{"input_ids": list(range(2, 2 + length))} for length in (5, 9, 1, 13)],
        "hidden": torch.randn(2, 24, HIDDEN),
        "mlp": MLP(),
        "next_token": torch.randn(1, 1, 256),
        "packed": torch.randn(1, 16384, 4),
        "path": checkpoint,
        "projections": projections,
        "prompt": torch.randn(1, 2100, 256),
        "tokens": torch.randint(2, VOCABULARY, (2, 12)),
        "train": lambda batch: None,
        "w_down": torch.randn(HIDDEN, 2 * HIDDEN),
        "w_up": torch.randn(2 * HIDDEN, HIDDEN),
        "x_shard": torch.randn(6, HIDDEN),
        **dict(zip("qkv", torch.randn(3, 1, 8, 4, 8), strict=True)),
    }


# Replacements for the reader's paths, and for a layer too large for one CPU.
SMALLER = {
    '"path/to/llama"': "path",
    '"path/to/saved"': "path + '/saved'",
    '"path/to/checkpoints"': "path + '/checkpoints'",
    '"traces"': "path + '/traces'",
    'f"traces/': 'path + f"/traces/',
    '"path/to/step.png"': "path + '/step.png'",
    "ParallelAttention(4096, 32, 8,": "ParallelAttention(256, 2, 2,",
}


def run_page(group: dist.ProcessGroup, page: str, blocks: list[tuple[str, str]], checkpoint: str) -> None:
    names, printed = theirs(checkpoint), ""
    for kind, block in blocks:
        if kind == "text":
            assert printed.rstrip() == block.rstrip()
            continue
        for written, smaller in SMALLER.items():
            block = block.replace(written, smaller)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block, page, "exec"), names)
        printed = out.getvalue()
    assert all(names[name].isfinite().all() for name in ("loss", "y", "o", "whole") if name in names)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    path = tmp_path_factory.mktemp("checkpoint")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def pages_with_examples() -> dict[str, list[tuple[str, str]]]:
    found = {page: re.findall(r"^```(python|text)\n(.*?)^```$", page.read_text(), re.M | re.S) for page in PAGES}
    return {str(page.relative_to(REPOSITORY)): blocks for page, blocks in found.items() if blocks}


@pytest.mark.parametrize("page", quick(pages_with_examples(), "README.md", "docs/quickstart.md"))
def test_examples_of_pages(page: str, checkpoint: str) -> None:
    run_ranks(4, run_page, page, pages_with_examples()[page], checkpoint)


def test_readme_is_short_and_links_to_pages_that_are_there() -> None:
    text = PAGES[0].read_text()
    assert len(text.splitlines()) <= 150
    links = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text)
    assert links and not [link for link in links if not (REPOSITORY / link).exists()]


def test_features_have_tests_and_commands() -> None:
    text = (REPOSITORY / "docs" / "features.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| what")]
    for row in rows:
        tests = re.findall(r"`(\w+/test_\w+\.py)`", row)
        assert tests and not [test for test in tests if not (REPOSITORY / "tests" / test).exists()], row
    assert set(re.findall(r"`fused-tp (\w+)", text)) == set(COMMANDS)


def test_reference_has_the_public_api() -> None:
    written = "".join(page.read_text() for page in (REPOSITORY / "docs" / "reference").glob("*.md"))
    documented = set(re.findall(r"^\.\. auto\w+:: (\w+)", written, re.M))
    assert documented >= {*fused_tp.__all__, *fused_tp.nn.__all__} - {"nn"}


def examples() -> Iterator[tuple[str, str]]:
    """Yield (name, code) of all docstring examples in the public API, except names that pages show in programs."""
    public = [(name, getattr(fused_tp, name)) for name in fused_tp.__all__ if name not in SHOWN_IN_PAGES]
    public += [(f"nn.{name}", getattr(fused_tp.nn, name)) for name in fused_tp.nn.__all__]
    for name, thing in public:
        found = re.search(r"^Example:\n(.*?)(?=^\S|\Z)", inspect.getdoc(thing) or "", re.M | re.S)
        if found is not None:
            code = textwrap.dedent(found[1])
            if ">>> " in code:
                code = "\n".join(line[4:] for line in code.splitlines() if line.startswith((">>> ", "... ")))
            yield name, code.replace('"cuda", (hosts, 8)', '"cpu", (1, 2)')


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(512)
        self.mlp = nn.Module()
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(512, 1024), nn.Linear(1024, 512)
        self.mlp.act = nn.GELU()


def theirs_in_examples(code: str, folder: str) -> dict[str, Any]:
    """Names for the docstring examples, which share few: W = 2 ranks, in the mesh dim that the example names."""
    torch.manual_seed(0)
    line = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp"))
    block = Block()
    attention = fused_tp.nn.ParallelAttention(512, 8, causal=True, mesh=grid["tp"])
    unsharded, tokens = nn.Linear(512, 4), torch.randn(2, 6, 512)
    public = {name: getattr(fused_tp, name) for name in fused_tp.__all__}
    return {
        **public,
        **{name: getattr(fused_tp.nn, name) for name in fused_tp.nn.__all__},
        **{name: torch.randn(8, 512) for name in ("w_q", "w_k", "w_v", "w_gate", "w_up", "w_down")},
        **dict(zip("qkv", torch.randn(3, 1, 6, 4, 8), strict=True)),
        "F": nn.functional,
        "attention": attention,
        "block": block,
        "experts": torch.randint(8, (24, 2)),
        "folder": folder,
        "h": tokens,
        "hidden": tokens,
        "ids": torch.randint(32_000, (2, 6)),
        "init_device_mesh": init_device_mesh,
        "keys": torch.randn(1, 64, 4, 8),
        "labels": torch.randint(8, (2, 6)),
        "lengths": torch.tensor([20]),
        "lm_head": nn.Linear(512, 4),
        "logits": torch.randn(1, 3, 8),
        "logits_shard_n": torch.randn(1, 6, 4),
        "mesh": grid if 'mesh["cp"]' in code else line,
        "mlp": nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}),
        "model": block if "model.mlp" in code else unsharded,
        "my_own_part": nn.Identity(),
        "next_token": torch.randn(1, 1, 512),
        "next_tokens": torch.randn(2, 1, 512),
        "nn": nn,
        "norm": nn.RMSNorm(8 if "residual" in code else 512),
        "offsets": torch.tensor([3, 3, 7, 8, 8, 9, 12, 12], dtype=torch.int32),
        "parallelize_module": torch.distributed.tensor.parallel.parallelize_module,
        "partial": torch.randn(2, 6, 8),
        "prompt": torch.randn(1, 70, 512),
        "residual": torch.randn(2, 6, 8),
        "rotary": lambda positions: (positions.cos(), positions.sin()),
        "rows": torch.randn(12, 16),
        "seq_len": 6,
        "tokens": torch.arange(12),
        "torch": torch,
        "unsharded_model": unsharded,
        "values": torch.randn(1, 64, 4, 8),
        "w_gate_up": torch.randn(8, 16, 512),
        "w_out": torch.randn(8, 512, 16),
        "x": tokens,
        "x_shard": tokens,
        "x_shard_m": tokens,
    }


def docstrings(group: dist.ProcessGroup, written: list[tuple[str, str]], folder: str) -> None:
    for name, code in written:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, name, "exec"), theirs_in_examples(code, folder))
        except Exception as error:
            raise AssertionError(f"the example of fused_tp.{name} raised {error!r}:\n{code}") from error


def test_examples_of_docstrings(tmp_path: Path) -> None:
    written = list(examples())
    assert len(written) >= 31
    for rank in fresh_ranks(2, docstrings, written, str(tmp_path)):
        rank.unwrap()
