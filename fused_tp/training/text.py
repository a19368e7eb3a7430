"""Text packed into rows of equal length: consecutive documents, without attention between them.

documents   | A A A A A | B B | C C C C C C ...
rows of 6   | A A A A A B | B C C C C C | C ...
position_ids| 0 1 2 3 4 0 | 0 0 1 2 3 4 | 0 ...       positions restart at each document and each row
labels      | . A A A A . | . . C C C C | . ...       first tokens of documents and rows are not targets (-100)
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

IGNORED_LABEL = -100  # label of tokens that are not targets, transformers' convention
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".jsonl")


class Bytes:
    """Tokenizer of UTF-8 bytes, with 256 tokens."""

    name = "bytes"
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def save_pretrained(self, folder: Path) -> None:
        """Write an equivalent tokenizer of transformers, which `AutoTokenizer` can load."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        # Byte-level tokenizers map printable bytes to their own characters, and other bytes to characters from 256 on.
        printable_bytes = {*range(33, 127), *range(161, 173), *range(174, 256)}
        other_characters = iter(range(256, 512))
        vocabulary = {chr(byte if byte in printable_bytes else next(other_characters)): byte for byte in range(256)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False).save_pretrained(folder)


class PackedText(Dataset[dict[str, Tensor]]):
    """Dataset of rows {input_ids, position_ids, labels} of `seq` tokens each, packed from consecutive documents.

    Tokens after the last full row are dropped. Rows are in order; `DistributedBatches` can shuffle them.

    Args:
        tokens: int [tokens], the documents one after the other, in memory or memory-mapped.
        starts: int [documents], index of the first token of each document, ascending from 0.
        seq: number of tokens per row.

    Raises:
        ValueError: there are fewer tokens than in one row.

    Example:
        >>> rows = PackedText(np.arange(7), np.array([0, 5]), 6)
        >>> rows[0]["position_ids"].tolist(), rows[0]["labels"].tolist()
        ([0, 1, 2, 3, 4, 0], [-100, 1, 2, 3, 4, -100])
    """

    def __init__(self, tokens: np.ndarray[Any, Any], starts: np.ndarray[Any, Any], seq: int) -> None:
        if len(tokens) < seq:
            raise ValueError(f"The text must have at least seq={seq} tokens, got {len(tokens)}; use more text.")
        self.tokens, self.starts, self.seq = tokens, starts, seq

    def __len__(self) -> int:
        return len(self.tokens) // self.seq

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row_start = index * self.seq
        token_indices = np.arange(row_start, row_start + self.seq)
        # Positions restart at the row, to stay below `seq`. Tokens before the row are not attended to, and rotary
        # embeddings depend only on differences of positions.
        document_starts = self.starts[np.searchsorted(self.starts, token_indices, side="right") - 1]
        tokens = torch.from_numpy(np.array(self.tokens[row_start : row_start + self.seq], dtype=np.int64))
        labels = torch.where(torch.from_numpy(document_starts == token_indices), IGNORED_LABEL, tokens)
        labels[0] = IGNORED_LABEL  # rows may be concatenated, and the previous row must not predict this token
        return {
            "input_ids": tokens,
            "position_ids": torch.from_numpy(token_indices - np.maximum(document_starts, row_start)),
            "labels": labels,
        }


def load_text(path: Path | None, tokenizer: Any, seq: int) -> PackedText:
    """Tokenize the documents of `path` and pack them into rows.

    Args:
        path: a text file (one document); a folder of text and .jsonl files (each line's "text" is a document); a
            dataset saved by `datasets` (column "text", or "input_ids" of tokens); or an .npy file of tokens, which is
            memory-mapped and one document. None: Python's language reference as `help()` shows it.
        tokenizer: a tokenizer of transformers, or Bytes().

    Raises:
        ValueError: there is no text, its format is not supported, or it is shorter than one row.
    """
    if path is not None and not path.exists():
        raise ValueError(f"{path} does not exist; pass an existing file or folder of text.")
    if path is not None and path.suffix == ".npy":
        return PackedText(_map_tokens(path), np.zeros(1, np.int64), seq)
    token_arrays, lengths = [], []
    for document in _load_language_reference() if path is None else _read_documents(path):
        ids = tokenizer.encode(document) if isinstance(document, str) else document
        if len(ids):
            token_arrays.append(np.asarray(ids, np.int32))
            lengths.append(len(ids))
    if not token_arrays:
        raise ValueError(f"{path} has no text; use a text file, or a folder of {', '.join(TEXT_SUFFIXES)} files.")
    starts = np.cumsum([0, *lengths[:-1]])
    return PackedText(np.concatenate(token_arrays), starts, seq)


def _load_language_reference() -> Iterable[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("This Python lacks pydoc_data, the default text; set data.path.") from None
    return topics.values()


def _map_tokens(path: Path) -> np.ndarray[Any, Any]:
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        reason = str(error).rstrip(".")
        raise ValueError(f"{path} is not a readable .npy file ({reason}). It must be a 1-D integer array.") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"{path} must be a 1-D integer array, got {tokens.dtype} of shape {tokens.shape}.")
    return tokens


def _read_dataset_rows(path: Path) -> Iterator[str | list[int]]:
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(str(path))
    except (OSError, ValueError, KeyError, IndexError) as error:  # IndexError: a dataset without rows
        raise ValueError(f"The dataset {path} has no rows or is not readable ({error!r}); save it again.") from error
    if isinstance(dataset, DatasetDict) and "train" not in dataset:
        raise ValueError(f"The dataset {path} has the splits {[*dataset]}, not 'train'; pass the folder of one split.")
    table = dataset["train"] if isinstance(dataset, DatasetDict) else dataset
    column = "input_ids" if "input_ids" in table.column_names else "text"
    if column not in table.column_names:
        raise ValueError(f"The dataset {path} needs a column 'text' or 'input_ids', got {table.column_names}.")
    for row_index, row in enumerate(table[column]):
        if not (isinstance(row, str) if column == "text" else _are_tokens(row)):
            requirement = "a string" if column == "text" else "a list of integers from 0"
            raise ValueError(
                f"{column} of row {row_index} of the dataset {path} must be {requirement}, got {reprlib.repr(row)}."
            )
        yield row


def _are_tokens(row: Any) -> bool:
    return isinstance(row, list) and all(isinstance(token, int) and 0 <= token < 2**31 for token in row)


def _parse_text(line: bytes) -> str:
    text = json.loads(line)["text"]
    if not isinstance(text, str):
        raise TypeError(f'"text" must be a string, got {type(text).__name__}')
    return text


def _read_documents(path: Path) -> Iterator[str | list[int]]:
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        yield from _read_dataset_rows(path)
        return
    files: Iterable[Path] = [path] if path.is_file() else sorted(path.rglob("*"))
    for file in files:
        if file.suffix == ".jsonl":
            with file.open("rb") as lines:  # splits at \n only, unlike splitlines
                for line_number, line in enumerate(lines, 1):
                    try:
                        if line.strip():
                            yield _parse_text(line)
                    except (ValueError, KeyError, TypeError) as error:
                        requirement = 'it must be a JSON object in UTF-8 whose "text" is a string'
                        raise ValueError(
                            f"Line {line_number} of {file} is {reprlib.repr(line)}; {requirement}."
                        ) from error
        elif file.is_file() and (path.is_file() or file.suffix in TEXT_SUFFIXES):
            yield file.read_text(errors="replace")
