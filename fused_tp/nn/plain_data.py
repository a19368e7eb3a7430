"""Safe loading of checkpoint files as plain data, which never runs code from the files.

`torch.distributed.checkpoint` itself unpickles its metadata, and every value that is not a tensor, without restriction,
and a pickle may run any code.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

_METADATA_TYPES: dict[tuple[str, str], Any] = {
    (metadata_type.__module__, metadata_type.__name__): metadata_type
    for metadata_type in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
        torch.device,
        OrderedDict,
        set,
    )
}
_METADATA_TYPES["torch.serialization", "_get_layout"] = torch.serialization._get_layout
# Allow the module paths of all Python versions: pathlib and pathlib._local.
_METADATA_TYPES |= {(module, type(Path()).__name__): type(Path()) for module in ("pathlib", "pathlib._local")}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA_TYPES:
            return _METADATA_TYPES[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, (torch.dtype, torch.layout, torch.memory_format)):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in checkpoint metadata")


class PlainReader(dcp.FileSystemReader):
    """A FileSystemReader that accepts only metadata of the types that torch.distributed.checkpoint itself writes.

    Raises:
        pickle.UnpicklingError: the metadata contain another type.
    """

    def read_metadata(self, *args: Any, **keywords: Any) -> Metadata:
        rank = keywords.get("rank")
        name = ".metadata" if rank is None else f"__{rank}.metadata"
        with self.fs.create_stream(Path(self.path, name), "rb") as file:
            loaded_metadata: Metadata = _MetadataUnpickler(file).load()
        storage = getattr(loaded_metadata, "storage_meta", None) or metadata.StorageMeta()
        storage.load_id, loaded_metadata.storage_meta = self.load_id, storage
        return loaded_metadata


class PlainPlanner(DefaultLoadPlanner):
    """A DefaultLoadPlanner that reads values other than tensors as plain data.

    Raises:
        pickle.UnpicklingError: a value holds an object of another type.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain_file = io.BytesIO()
        torch.save(load_plain(value), plain_file)
        plain_file.seek(0)
        super().load_bytes(read_item, plain_file)


def load_plain(file: str | os.PathLike[str] | io.BytesIO) -> Any:
    """Load `file` like torch.load, restricted to numbers, strings, containers, tensors and NumPy arrays.

    Raises:
        pickle.UnpicklingError: the file holds an object of another type; `refused_type` names it.
    """
    dtypes: list[Any] = [
        type(np.dtype(scalar_type)) for scalar_type in np.sctypeDict.values() if not np.issubdtype(scalar_type, np.void)
    ]
    # Allow both module paths: numpy.core (NumPy 1) and numpy._core (NumPy 2).
    numpy_core: Any = np._core if hasattr(np, "_core") else np.core
    numpy_constructors = (numpy_core.multiarray._reconstruct, numpy_core.multiarray.scalar)
    constructors_by_name: list[Any] = [
        (constructor, f"numpy.{package}.multiarray.{constructor.__name__}")
        for constructor in numpy_constructors
        for package in ("core", "_core")
    ]
    with torch.serialization.safe_globals([np.ndarray, np.dtype, *dict.fromkeys(dtypes), *constructors_by_name]):
        return torch.load(file, map_location="cpu", weights_only=True)


def refused_type(error: BaseException) -> str | None:
    """Return the name of the type that `load_plain` rejected with `error`; None for any other error."""
    match = (
        re.search(r"GLOBAL ([\w.]+)|class ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
    )
    return None if match is None else match[1] or match[2]


def check_plain(name: str, value: Any, remedy: str) -> None:
    """Check that `load_plain` would read `value` back.

    Raises:
        ValueError: `value` is not plain; the message names the type that it holds, and `remedy`.
    """
    file = io.BytesIO()
    try:
        torch.save(_without_tensors(value), file)
        file.seek(0)
        load_plain(file)
    except Exception as error:
        refused_name = refused_type(error) or f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"{name} holds {refused_name}, which can only be stored as a pickle, and loading a pickle can run any "
            f"code. Only numbers, strings, lists, tuples, dicts, sets, tensors and NumPy arrays are supported. {remedy}"
        ) from None


def _without_tensors(value: Any) -> Any:
    """Copy `value`, with 0 in place of each tensor, because tensors are plain and may be large."""
    value_type = type(value)
    if value_type is torch.Tensor:
        return 0
    if value_type is dict:
        return {key: _without_tensors(item) for key, item in value.items()}
    return value_type(map(_without_tensors, value)) if value_type in (list, tuple) else value
