"""The demo's text: where it comes from, as tokens, as batches that depend on nothing but the seed and the step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

# Tables and underlined titles. A row of dashes is no English, and what a young model makes of a hundred equal tokens
# amplifies the last bit of every sum (tried: two runs then part by 1e-4 for that batch, else by 1e-6).
DRAWN_LINE = re.compile(r"\s*([|+]|[-=*~^]{3})")
TYPED_QUOTES = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}


class Tokenizer(Protocol):
    """What the demo needs of a tokenizer."""

    name: str

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes, 256 tokens: nothing to download and nothing to train."""

    name = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class CheckpointTokenizer:
    """The tokenizer that was saved beside a transformers model."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        self.name = f"the tokenizer of {path.name}"
        self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)


def make_tokenizer(hf: Path | None) -> Tokenizer:
    """That of the checkpoint in `hf` where it has one, else bytes."""
    if hf is not None and any((hf / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return CheckpointTokenizer(hf)
    return ByteTokenizer()


def read_text(data: Path | None) -> str:
    """The text of the file `data`; by default Python's language reference as `help()` shows it, 420 kB of English."""
    if data is not None:
        return data.read_text(encoding="utf-8", errors="replace")
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("This Python comes without pydoc_data, the demo's default text; pass --data FILE.") from None
    lines = "\n\n".join(topics.values()).splitlines()
    text = "\n".join(line for line in lines if not DRAWN_LINE.match(line))
    return text.translate(TYPED_QUOTES)  # one byte each: a sample then seldom breaks off within a character


def make_tokens(tokenizer: Tokenizer, data: Path | None, *, seq: int, vocab_size: int) -> Tensor:
    """The whole text as int64 tokens [n].

    Raises:
        ValueError: fewer tokens than one row of a batch, or tokens that the model has no embedding for.
    """
    tokens = torch.tensor(tokenizer.encode(read_text(data)), dtype=torch.int64)
    if len(tokens) < seq:
        raise ValueError(
            f"--data has {len(tokens)} tokens, fewer than one row of {seq} (--seq): give more text or a smaller --seq."
        )
    if tokens.max() >= vocab_size:
        raise ValueError(
            f"The text has token {int(tokens.max())} ({tokenizer.name}), but the model's vocabulary ends at "
            f"{vocab_size - 1}."
        )
    return tokens


def make_batch(tokens: Tensor, *, batch: int, seq: int, seed: int, step: int) -> Tensor:
    """Batch number `step`, [batch, seq]: the same on every rank, in every run, and after a resume."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - seq + 1, (batch,), generator=generator)
    return torch.stack([tokens[start : start + seq] for start in starts.tolist()])
