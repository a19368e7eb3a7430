"""Folder of a trained model, which transformers loads without fused_tp: weights in fp32, configuration and tokenizer.

The folder is written under a temporary name and then renamed: a reader finds the old model, the new one, or none.
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

MARK_FILE = "fused_tp.json"  # step and settings of the run; only a folder with this file is replaced


def check_folder(settings: TrainSettings) -> None:
    """Check that the folder of `settings.export` is new, empty, or an earlier export.

    Raises:
        ValueError: the folder has other files, or is the one that the run loads its model from.
    """
    folder, pretrained = settings.export, settings.model.pretrained
    if folder is None:
        return
    if pretrained is not None and folder.resolve() == Path(pretrained).resolve():
        raise ValueError(f"export: the run starts from the model in {folder}; set another folder.")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"export must be a folder, got the file {folder}.")
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK_FILE).exists():
        raise ValueError(f"export: {folder} contains files that no export has written; set another folder.")


def write_model(folder: Path, model: Any, tokenizer: Any, settings: TrainSettings, step: int) -> None:
    """Write the model, of which ranks hold shards, and its tokenizer to `folder`. All ranks must call it.

    Global rank 0 gathers the shards on the CPU, and writes.

    Args:
        model: a transformers model or a Pipeline of one.
        tokenizer: a tokenizer of transformers, or Bytes.
        settings: settings of the run, which are written to `fused_tp.json`.
        step: number of steps done.

    Raises:
        OSError: raised on rank 0 if the folder cannot be written.
    """
    from safetensors import SafetensorError

    folder = folder.resolve()
    temporary_folder = folder.with_name(f"{folder.name}.writing")
    if is_writer := dist.get_rank() == 0:
        shutil.rmtree(temporary_folder, ignore_errors=True)
        temporary_folder.mkdir(parents=True)
    try:
        if isinstance(model, Pipeline):
            model.save_pretrained(temporary_folder)
        else:
            save_pretrained(model, temporary_folder)
    except SafetensorError as error:  # also raised for a full disk
        raise OSError(f"the model cannot be written to {temporary_folder}: {error}") from error
    if not is_writer:
        return
    tokenizer.save_pretrained(temporary_folder)
    (temporary_folder / MARK_FILE).write_text(
        json.dumps({"step": step, "settings": settings.model_dump(mode="json")}, indent=1)
    )
    previous_folder = folder.with_name(f"{folder.name}.replaced")
    shutil.rmtree(previous_folder, ignore_errors=True)
    if folder.exists():
        folder.rename(previous_folder)
    temporary_folder.rename(folder)
    shutil.rmtree(previous_folder, ignore_errors=True)
