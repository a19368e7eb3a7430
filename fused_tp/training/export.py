"""Folder of a trained model, which transformers loads without fused_tp: weights in fp32, configuration and tokenizer.

It is written beside its place and renamed, so that a reader finds the old folder, the new one, or none.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fused_tp.parallelizing.state_dict import save_pretrained
from fused_tp.pipelining.pipeline import Pipeline
from fused_tp.training.settings import TrainSettings

MARK = "fused_tp.json"  # step and settings of the run; only a folder with this file is replaced


def check_folder(settings: TrainSettings) -> None:
    """Check that the folder of `settings.export` is new, empty, or an earlier export.

    Raises:
        ValueError: it is none of these, or the folder that the run starts from.
    """
    folder, first = settings.export, settings.model.pretrained
    if folder is None:
        return
    if first is not None and folder.resolve() == Path(first).resolve():
        raise ValueError(f"export: the run starts from the model in {folder}; give another folder.")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"export: {folder} is no folder; give another one.")
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise ValueError(f"export: {folder} has files that no export has written; give another folder.")


def write_model(folder: Path, model: Any, tokenizer: Any, settings: TrainSettings, step: int) -> None:
    """Write the model, of which ranks hold shards, and its tokenizer to `folder`. All ranks must call it.

    Global rank 0 gathers the shards on the CPU, and writes.

    Args:
        model: a transformers model or a Pipeline of one.
        tokenizer: a tokenizer of transformers, or Bytes.
        settings: of the run; `fused_tp.json` holds them.
        step: number of steps done.

    Raises:
        OSError: on rank 0; the folder cannot be written.
    """
    from safetensors import SafetensorError

    folder = folder.resolve()
    written = folder.with_name(f"{folder.name}.writing")
    if first := dist.get_rank() == 0:
        shutil.rmtree(written, ignore_errors=True)
        written.mkdir(parents=True)
    try:
        if isinstance(model, Pipeline):
            model.save_pretrained(written)
        else:
            save_pretrained(model, written)
    except SafetensorError as error:  # also of a full disk
        raise OSError(f"the model cannot be written to {written}: {error}") from error
    if not first:
        return
    tokenizer.save_pretrained(written)
    (written / MARK).write_text(json.dumps({"step": step, "settings": settings.model_dump(mode="json")}, indent=1))
    replaced = folder.with_name(f"{folder.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    written.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
