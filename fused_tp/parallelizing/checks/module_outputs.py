"""Compare the module outputs of a parallel model with those of the unsharded model for the same batch.

A rank's output may hold some of the tokens, in the order of its context parallel layout, some of the features or heads,
or both. The rank finds the matching shard of the full output by its shape, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fused_tp.core.partition import shard_range
from fused_tp.parallelizing.forward_shard import CpContext, running_node_number
from fused_tp.parallelizing.hf.hf_model import TransformersSequenceSharding
from fused_tp.parallelizing.outputs import find_tensors
from fused_tp.parallelizing.plain_model import CACHE_NAMES as PLAIN_CACHE_NAMES

ModuleOutputs = dict[str, list[list[Tensor]]]
"""Lists of returned tensors, one for each call, by module name in the order in which modules return."""
# Numbers of equal blocks of a dim, each of which is sharded separately: 2 for gate and up; 3 for q, k and v.
_PACKED_BLOCK_COUNTS = (1, 2, 3)
# Names of arguments and outputs that are caches.
CACHE_NAMES = frozenset({*PLAIN_CACHE_NAMES, *TransformersSequenceSharding.cache_names})
_MIN_DENOMINATOR = 1e-6  # smallest denominator of a relative error


def output_tensors(output: Any) -> list[Tensor]:
    """Return the tensors in `output`, the result of forward, except KV caches, which may be sharded."""
    if isinstance(output, Mapping):
        output = {name: value for name, value in dict(output).items() if name not in CACHE_NAMES}
    elif isinstance(output, tuple):
        output = [value for value in output if not is_cache(value)]
    return find_tensors(output)


def is_cache(value: object) -> bool:
    """True if the class of `value` is named like transformers' caches, which may not be installed."""
    return type(value).__name__.endswith("Cache")


def relative_error(actual: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    """Return the largest difference divided by the largest expected value, or by `scale` if that is larger."""
    if not actual.numel():
        return 0.0
    wide_dtype = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = actual.detach().to(expected.device, wide_dtype), expected.detach().to(wide_dtype)
    difference = torch.where(actual == expected, 0.0, (actual - expected).abs()).max().item()  # inf - inf is nan
    finite_values = expected.abs()[expected.isfinite()]
    largest_value = finite_values.max().item() if finite_values.numel() else 0.0
    return difference / max(largest_value, scale, _MIN_DENOMINATOR) if difference == difference else inf


@dataclass
class Recording:
    """Module outputs of an unsharded model.

    Attributes:
        outputs: outputs of each call, by module name.
        parameters: parameter names by module name, including those of submodules.
    """

    parameters: dict[str, set[str]]
    outputs: ModuleOutputs = field(default_factory=dict)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all recorded tensors."""
        for call_outputs in self.outputs.values():
            for tensors in call_outputs:
                yield from tensors


@contextmanager
def record_outputs(model: nn.Module, before_record: Callable[[], object] = lambda: None) -> Iterator[Recording]:
    """Record the outputs of all modules of `model` in this context, as copies on the CPU.

    Args:
        before_record: called whenever a module returns; an exception that it raises stops the forward pass.
    """
    recording = Recording(_parameter_names(model))

    def record(name: str, module: nn.Module, args: object, output: Any) -> None:
        before_record()
        # Copy, because later modules may write into these tensors in place.
        tensors = find_tensors(output) if name else output_tensors(output)
        copies = [t.detach().to("cpu", copy=True) for t in tensors]
        recording.outputs.setdefault(name, []).append(copies)

    handles = [module.register_forward_hook(partial(record, name)) for name, module in model.named_modules()]
    try:
        yield recording
    finally:
        for handle in handles:
            handle.remove()


def first_difference(errors: Mapping[str, float], bound: float) -> tuple[str | None, set[str]]:
    """Return the name of the first module with a wrong output (or None), and the names of the exempt modules.

    An output is wrong if its error exceeds `bound`. A module is exempt if the module that encloses it has a correct
    output: inside, a sharded model may compute other values, such as terms of a sum or tokens in another order.
    """
    wrong_names = {name for name, error in errors.items() if not error <= bound}
    exempt_names = set()
    for name in filter(None, wrong_names):
        enclosing_name = next((candidate for candidate in enclosing_names(name) if candidate in errors), name)
        if enclosing_name not in wrong_names:
            exempt_names.add(name)
    return next((name for name in errors if name in wrong_names - exempt_names), None), exempt_names


def enclosing_names(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain the module `name`, the innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


class RankShards:
    """The shards of a tensor that this rank may hold; `error` compares an output with the one that fits.

    Args:
        tp, cp: 1-D meshes; None if nothing is sharded over such a mesh.
        seq_len: number of tokens of a row, over all ranks.
        documents: the start of each packed document, then the end of the last one; () for one document.
    """

    def __init__(
        self, tp: DeviceMesh | None, cp: DeviceMesh | None, seq_len: int, documents: tuple[int, ...] = ()
    ) -> None:
        self._seq_len = seq_len
        self._tp_ranks, self._tp_rank = (1, 0) if tp is None else (tp.size(), tp.get_local_rank())
        cpu = torch.device("cpu")
        positions = (
            torch.arange(seq_len, device=cpu)
            if cp is None
            else CpContext(cp, seq_len, documents=documents).positions(cpu)
        )
        start, stop = shard_range(len(positions), self._tp_ranks, self._tp_rank)
        self._positions = [positions, positions[start:stop]]  # without and with sequence parallelism

    def error(
        self, actual: Tensor, expected: Tensor, measure: Callable[[Tensor, Tensor], float] = relative_error
    ) -> float | None:
        """Error of `actual` against this rank's shard of `expected`; None if no shard has its shape."""
        if actual.ndim != expected.ndim:
            return None
        errors = []
        for dim_indices in product(
            *(self._index_choices(*sizes) for sizes in zip(expected.shape, actual.shape, strict=True))
        ):
            shard = expected
            for dim, indices in enumerate(dim_indices):
                shard = shard if indices is None else shard.index_select(dim, indices)
            errors.append(measure(actual, shard))
        # Several shards may have that shape. The right one has the smallest error: the others differ everywhere.
        return min(errors, default=None)

    def _index_choices(self, full_size: int, local_size: int) -> list[Tensor | None]:
        """Return the sets of `local_size` indices, out of `full_size`, that this rank may hold; None means all."""
        if local_size == full_size:
            return [None]
        index_choices: list[Tensor] = []
        num_rows, remainder = divmod(full_size, self._seq_len)
        if num_rows and not remainder:  # the dim may hold the tokens of one row, or of all rows
            offsets = torch.arange(num_rows, device="cpu").unsqueeze(1) * self._seq_len
            index_choices += [(offsets + positions).flatten() for positions in self._positions]
        for block_count in _PACKED_BLOCK_COUNTS:
            if full_size % block_count == 0:
                start, stop = shard_range(full_size // block_count, self._tp_ranks, self._tp_rank)
                offsets = torch.arange(block_count, device="cpu").unsqueeze(1) * (full_size // block_count)
                index_choices.append((offsets + torch.arange(start, stop, device="cpu")).flatten())
        return [indices for indices in index_choices if len(indices) == local_size]


class OutputComparison:
    """Recorder of the module outputs of a parallel model; `differences` compares them with `expected`."""

    def __init__(self, expected_recording: Recording, rank_shards: RankShards) -> None:
        self._expected_recording, self._rank_shards = expected_recording, rank_shards
        # Copies, because models may write into tensors in place.
        self._recorded_outputs: list[tuple[str, list[Tensor]]] = []

    @contextmanager
    def recording_outputs(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Record the module outputs of `models` in this context: the whole model, or this rank's pipeline stages."""
        handles = []
        for model in models:
            parameters = _parameter_names(model)
            for name, module in model.named_modules():
                # A module with fewer parameters lacks layers of other pipeline stages: its output is not comparable.
                if self._expected_recording.parameters.get(name) == parameters[name]:
                    handles.append(module.register_forward_hook(partial(self._record, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, name: str, module: nn.Module, args: object, output: Any) -> None:
        if running_node_number() is not None:
            return  # recomputed by activation checkpointing
        tensors = find_tensors(output) if name else output_tensors(output)
        self._recorded_outputs.append((name, [t.detach().clone() for t in tensors]))

    @torch.no_grad()
    def differences(self) -> tuple[dict[str, float], dict[str, str]]:
        """Return (largest error over all calls, reason why the module is not compared), each a dict by module name."""
        errors: dict[str, float] = {}
        skip_reasons: dict[str, str] = {}
        call_counts: dict[str, int] = {}
        for name, outputs in self._recorded_outputs:
            call = call_counts[name] = call_counts.get(name, 0) + 1
            expected_calls = self._expected_recording.outputs.get(name, [])
            if call > len(expected_calls) or len(outputs) != len(expected_calls[call - 1]):
                skip_reasons[name] = (
                    f"it returns a different number of tensors, or is called more than {len(expected_calls)} times"
                )
                continue
            for t, expected in zip(outputs, expected_calls[call - 1], strict=True):
                if not expected.ndim:
                    continue  # losses
                if isinstance(t, DTensor) and any(placement.is_partial() for placement in t.placements):
                    skip_reasons[name] = "it returns a term of a sum over ranks"
                    continue
                local_output = t.to_local() if isinstance(t, DTensor) else t
                error = self._rank_shards.error(local_output, expected)
                if error is None:
                    skip_reasons[name] = (
                        f"it returns {tuple(local_output.shape)}, which is not a known shard of {tuple(expected.shape)}"
                    )
                else:
                    errors[name] = max(errors.get(name, 0.0), error)
        return errors, skip_reasons


def _parameter_names(model: nn.Module) -> dict[str, set[str]]:
    """Map each module name to the names of its parameters, relative to the module and including submodules."""
    names: dict[str, set[str]] = {name: set() for name, _ in model.named_modules(remove_duplicate=False)}
    for name, _ in model.named_parameters(remove_duplicate=False):
        for enclosing_name in enclosing_names(name):
            names[enclosing_name].add(name.removeprefix(f"{enclosing_name}."))
    return names
