"""Text as packed rows: positions and targets of documents, and the supported forms of text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fused_tp.training.text import IGNORED_LABEL, Bytes, PackedText, load_text
from tests.workers import error_of


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 7))
def test_rows_are_the_documents_one_after_the_other(lengths: list[int], seq: int) -> None:
    starts, total = np.cumsum([0, *lengths[:-1]]), sum(lengths)
    if total < seq:
        assert "must have at least seq=" in str(error_of(PackedText, np.arange(total), starts, seq))
        return
    rows = PackedText(np.arange(total), starts, seq)
    assert len(rows) == total // seq
    for index in range(len(rows)):
        row = rows[index]
        first = index * seq
        assert row["input_ids"].tolist() == [*range(first, first + seq)]
        for at, (position, label) in enumerate(zip(row["position_ids"].tolist(), row["labels"].tolist(), strict=True)):
            begins = max(start for start in starts if start <= first + at)
            assert position == first + at - max(begins, first)
            assert label == (IGNORED_LABEL if position == 0 else first + at)


def test_forms_of_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.jsonl").write_text('{"text": "wörld\u2028"}\n\n' + json.dumps({"text": "!"}) + "\n")
    (tmp_path / "c.bin").write_bytes(b"not text")
    rows = load_text(tmp_path, Bytes(), 4)
    assert bytes(rows.tokens.tolist()) == "hellowörld\u2028!".encode() and rows.starts.tolist() == [0, 5, 14]
    assert len(load_text(tmp_path / "a.txt", Bytes(), 5)) == 1
    np.save(tmp_path / "d.npy", np.arange(10, dtype=np.uint16))
    mapped = load_text(tmp_path / "d.npy", None, 4)
    assert isinstance(mapped.tokens, np.memmap) and mapped[1]["input_ids"].tolist() == [4, 5, 6, 7]
    assert mapped[1]["input_ids"].dtype == torch.int64
    assert len(load_text(None, Bytes(), 1000)) > 300


@pytest.mark.full
def test_datasets_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed; pip install datasets")
    datasets.Dataset.from_dict({"text": ["abc", "de"]}).save_to_disk(tmp_path / "text")
    datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]]}).save_to_disk(tmp_path / "ids")
    assert load_text(tmp_path / "text", Bytes(), 2).starts.tolist() == [0, 3]
    assert load_text(tmp_path / "ids", Bytes(), 2).tokens.tolist() == [1, 2, 3]
    datasets.Dataset.from_dict({"words": ["abc"]}).save_to_disk(tmp_path / "words")
    assert "needs a column 'text' or 'input_ids'" in str(error_of(load_text, tmp_path / "words", Bytes(), 2))
    for column, says in (
        ({"text": ["abc", None]}, "text of row 1 of the dataset .* must be a string, got None"),
        ({"text": [5]}, "text of row 0 of the dataset .* must be a string, got 5"),
        ({"input_ids": [[1, 2], [-3]]}, r"input_ids of row 1 of .* must be a list of integers from 0, got \[-3\]"),
        ({"text": []}, "has no rows or is not readable"),
    ):
        folder = tmp_path / str(column)
        datasets.Dataset.from_dict(column).save_to_disk(folder)
        with pytest.raises(ValueError, match=says):
            load_text(folder, Bytes(), 2)
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["abc"]})}).save_to_disk(tmp_path / "parts")
    assert "has the splits ['test'], not 'train'" in str(error_of(load_text, tmp_path / "parts", Bytes(), 2))


def test_text_that_is_none(tmp_path: Path) -> None:
    for line in (b'{"txt": 1}', b'{"text": null}', b'{"text": 12345}', b"[1]", b"{", b'{"text": "caf\xe9"}'):
        (tmp_path / "b.jsonl").write_bytes(b'{"text": "abc"}\n' + line)
        said = str(error_of(load_text, tmp_path, Bytes(), 2))
        assert said.startswith(f"Line 2 of {tmp_path / 'b.jsonl'} is b") and 'whose "text" is a string' in said
    (tmp_path / "b.jsonl").unlink()
    assert "has no text" in str(error_of(load_text, tmp_path, Bytes(), 2))
    np.save(tmp_path / "d.npy", np.zeros(3))
    assert "must be a 1-D integer array, got" in str(error_of(load_text, tmp_path / "d.npy", Bytes(), 2))
    whole = (tmp_path / "d.npy").read_bytes()
    for content in (b"", b"no tokens", whole[:-1]):
        (tmp_path / "d.npy").write_bytes(content)
        assert "d.npy is not a readable .npy file" in str(error_of(load_text, tmp_path / "d.npy", Bytes(), 2))
    for name in ("none.npy", "none.txt"):
        assert f"{name} does not exist" in str(error_of(load_text, tmp_path / name, Bytes(), 2))
