"""Load a pretrained checkpoint into a parallel transformers model, of which each rank has memory for its shards only.

transformers reads a checkpoint, renames and merges its tensors (`core_model_loading`), and sets them as parameters of a
model on the meta device. Here such a model is loaded beside the parallel one, and each tensor that would be set is
copied into this rank's shard and freed. So names, conversions, missing weights and reports are those of
`from_pretrained`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fused_tp.parallelizing.attribute_names import PARALLELISM_ATTRIBUTE
from fused_tp.parallelizing.state_dict import FullTensorLoader

_LAZY_VARIABLE = "HF_DEACTIVATE_ASYNC_LOAD"  # else threads of transformers read ahead, up to the whole checkpoint


def load_pretrained(model: nn.Module, name: str | os.PathLike[str], **keywords: Any) -> nn.Module:
    """Load a checkpoint into a transformers model that `parallelize` returned, shard by shard, and return the model.

    With a model from the meta device, a rank never holds more than its shards and the tensor that is being read. Every
    rank reads the files itself. As in `from_pretrained`, weights that the checkpoint lacks are initialized (by seed
    0, equally on all ranks), and a report names them.

    Args:
        model: a transformers model after `parallelize`, before fully_shard.
        name: folder, or a name that transformers resolves.
        keywords: other keyword arguments of `from_pretrained` that say where the files are (`revision`, `cache_dir`,
            `subfolder`, `variant`, `token`, ...).

    Raises:
        TypeError: `model` is not a parallel transformers model.
        ValueError: the model is quantized, or a keyword changes the model instead of saying where the files are.
        RuntimeError: this version of transformers loads in another way; load_full_state_dict then serves.

    Example:
        >>> with torch.device("meta"):
        ...     model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name), dtype=torch.bfloat16)
        >>> fused_tp.parallelize(model, mesh, sequence_parallel=True)
        >>> fused_tp.load_pretrained(model, name)
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or not hasattr(model, PARALLELISM_ATTRIBUTE):
        raise TypeError(
            f"load_pretrained needs a transformers model that parallelize returned, got {type(model).__name__}."
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(
            f"{type(model).__name__} has a quantization_config, which load_pretrained does not support: load the model "
            "by from_pretrained, and then call parallelize."
        )
    if unsupported := keywords.keys() & {"config", "dtype", "torch_dtype", "device_map", "quantization_config"}:
        raise ValueError(
            f"load_pretrained loads into the model as it is, so it takes no {', '.join(sorted(unsupported))}. Make the "
            "model with it."
        )
    loader = FullTensorLoader(model)
    with torch.random.fork_rng(devices=[]), _captured_tensors(loader):
        torch.default_generator.manual_seed(0)  # for missing weights, equally on all ranks; not of GPUs
        beside, report = type(model).from_pretrained(
            name, config=copy.deepcopy(model.config), dtype=model.dtype, output_loading_info=True, **keywords
        )
    missing_names = set(loader.missing_names())
    for key, value in beside.state_dict().items():  # what transformers has initialized
        if key in missing_names and not value.is_meta:
            loader.load(key, value)
    if unset_names := loader.missing_names():
        raise RuntimeError(f"{name} has left {unset_names[:5]} without values. Report: {report}.")
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # else init_weights() would draw it anew
    model.generation_config = beside.generation_config
    return model


@contextmanager
def _captured_tensors(loader: FullTensorLoader) -> Iterator[None]:
    """Context manager in which tensors that transformers reads go to `loader`, and its own model stays on meta."""
    from transformers import core_model_loading

    set_parameter = getattr(core_model_loading, "set_param_for_module", None)
    if set_parameter is None:
        import transformers

        raise RuntimeError(
            f"transformers {transformers.__version__} loads checkpoints in another way than 5.x, which load_pretrained "
            "builds on. Use load_full_state_dict."
        )

    def capture(beside: nn.Module, name: str, value: Tensor, report: Any, quantizer: Any) -> None:
        path, _, key = name.rpartition(".")
        reference = getattr(beside.get_submodule(path), key, None)
        if name not in loader.state or reference is None or reference.shape != value.shape:
            set_parameter(beside, name, value, report, quantizer)  # which records the difference
            return
        report.missing_keys.discard(name)
        loader.load(name, value)
        reference._is_hf_initialized = True  # so that transformers does not initialize it

    replaced = mock.patch.object(core_model_loading, "set_param_for_module", capture)
    with replaced, mock.patch.dict(os.environ, {_LAZY_VARIABLE: "1"}):
        yield
