"""Check that all ranks have built the same model before it is sharded, and that it is not changed afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fused_tp.core.checks import is_change_check_due
from fused_tp.core.errors import RankMismatchError, join_words
from fused_tp.core.pending import checksum
from fused_tp.nn.sharding import PLAIN_SHARDINGS
from fused_tp.parallelizing.attribute_names import PARALLELISM_ATTRIBUTE
from fused_tp.parallelizing.checks.batch_check import are_checks_suspended, gather_over_meshes

_LOG = logging.getLogger("fused_tp")
# Number of elements of each tensor that are compared. Few suffice, because independently initialized weights differ
# everywhere. But up to _MAX_ROWS rows the sample includes every row, because ranks may differ in a few rows only, such
# as those that were added to a vocabulary.
_SAMPLE_SIZE, _MAX_ROWS = 1021, 1 << 20


def is_parallelized(model: nn.Module) -> bool:
    """True if `parallelize` has made `model`, or a module in it, parallel.

    Hooks such as Lightning's `configure_model` are called more than once, but `parallelize` accepts a model only once.

    Example:
        >>> if not fused_tp.is_parallelized(self.model):
        ...     fused_tp.parallelize(self.model, self.device_mesh, tp_dim="tensor_parallel")
    """
    return any(hasattr(module, PARALLELISM_ATTRIBUTE) for module in model.modules())


class ModuleCheck:
    """Forward pre-hooks that check, at the first calls and periodically, for changes made after sharding.

    New or replaced parameters raise an error, because nothing else would detect them. A new module without parameters,
    and a forward, method, hook, number or flag that the caller has changed, is logged, because it was not compared with
    the unsharded model.

    Args:
        parallelism: value of the attribute `PARALLELISM_ATTRIBUTE` of the model's modules.
        model: the model as `parallelize` returns it.
        is_from_meta: True if the model was built on the meta device, so that its parameters may have no values yet.

    Raises:
        ValueError: a parameter, or a module with parameters, was added to a tensor parallel model, or parameters have
            no values.
    """

    def __init__(self, parallelism: Any, model: nn.Module, *, is_from_meta: bool) -> None:
        self.parallelism = parallelism
        self.is_from_meta = is_from_meta
        self.call_count, self._is_due = 0, False
        self._code: dict[str, dict[str, object]] = {}  # by module name, as last compared with the unsharded model
        self._values: dict[str, dict[str, object]] = {}  # by module name, after the last forward; {} if not recorded
        self._logged_changes: set[tuple[str, ...]] = set()  # a caller may add and remove a hook around each call
        self._tables: list[Any] = []  # dicts of hooks and attributes of all modules
        self._table_sizes: list[int] = []  # their lengths when the code was recorded

    def record_code(self, model: nn.Module) -> None:
        """Record that the current code of `model` has been compared with the unsharded model."""
        self._code = {name: callers_code(module) for name, module in model.named_modules()}
        self._values = {name: _callers_values(module) for name, module in model.named_modules()}
        self._tables = [
            table
            for module in model.modules()
            for table in (
                vars(module),
                module._forward_pre_hooks,
                module._forward_hooks,
                module._backward_pre_hooks,
                module._backward_hooks,
            )
        ]
        self._table_sizes = [*map(len, self._tables)]

    def record_values(self, model: nn.Module, args: Any, output: Any) -> None:
        """Record values before the next check, so that it logs no changes by forward itself. A forward hook."""
        if not are_checks_suspended():
            is_next_due = is_change_check_due(self.call_count + 1)
            self._values = {n: _callers_values(m) for n, m in model.named_modules()} if is_next_due else {}

    def __getstate__(self) -> dict[str, Any]:
        # Without records of parameters and modules, because those of a copy differ.
        return {
            **vars(self),
            "_code": {},
            "_values": {},
            "_tables": [],
            "_table_sizes": [],
        }

    def check_parameters(self, model: nn.Module, args: Any) -> None:
        """Raise ValueError for changed parameters. This hook runs before the hooks that restore the unsharded model."""
        if are_checks_suspended():
            return
        self.call_count += 1
        self._is_due = is_change_check_due(self.call_count)
        if not self._is_due:
            return
        for name, module in model.named_modules():
            local_parameters = {
                key: parameter for key, parameter in module._parameters.items() if parameter is not None
            }
            local_parameters = local_parameters if self.parallelism.tp_mesh is not None else {}
            if local_parameters and getattr(module, PARALLELISM_ATTRIBUTE, None) is not self.parallelism:
                raise ValueError(
                    f"{name!r} ({type(module).__name__}) was added to the model after parallelize, so it is not "
                    "sharded. Add it before parallelize. LoRA adapters can also be added afterwards, with "
                    "fused_tp.parallelizing.peft.parallel_config."
                )
            for key, parameter in local_parameters.items():
                path = f"{name}.{key}".lstrip(".")
                is_plain_shard = key in vars(module).get(PLAIN_SHARDINGS, {}) and not is_traceable_wrapper_subclass(
                    parameter
                )
                if not (is_plain_shard or isinstance(parameter, DTensor)):
                    raise ValueError(
                        f"{path!r} is a {type(parameter).__name__} of shape {tuple(parameter.shape)} that replaced the "
                        "rank's shard after parallelize (a quantizer may do so). Quantize layers before parallelize, "
                        "and remove them from the plan. To load other values, use load_full_state_dict."
                    )
        if self.is_from_meta and self.parallelism.tp_mesh is not None:
            self.is_from_meta = False
            _check_values(model)

    def log_changes(self, model: nn.Module, args: Any) -> None:
        """Log changed code. This hook runs last, after a comparison has recorded the code that it covers.

        It runs at due calls, and at training calls before which hooks or attributes were added or removed.
        """
        if are_checks_suspended():
            return
        if not self._is_due and not (torch.is_grad_enabled() and [*map(len, self._tables)] != self._table_sizes):
            return
        recorded_code, recorded_values = self._code, self._values
        self.record_code(model)
        for name, module in model.named_modules() if recorded_code else ():  # a copy of a model has no record
            recorded_parts = {**recorded_code.get(name, {}), **recorded_values.get(name, self._values[name])}
            current_parts = {**self._code[name], **self._values[name]}
            changed_parts = [part for part, value in current_parts.items() if recorded_parts.get(part) != value]
            change = name, *changed_parts
            if changed_parts and change not in self._logged_changes and is_first_rank(self.parallelism):
                self._logged_changes.add(change)
                _LOG.warning(
                    "%r (%s) was changed after parallelize: %s. Its outputs were not compared with the unsharded "
                    "model, and its tensors may be this rank's shards. Change it before parallelize, which compares.",
                    name,
                    type(module).__name__,
                    ", ".join(changed_parts),
                )


def remember_code(model: nn.Module) -> None:
    """Record that the callers' current code in `model` has been compared with the unsharded model."""
    for hook in model._forward_pre_hooks.values():
        check = getattr(hook, "__self__", None)
        if isinstance(check, ModuleCheck):
            check.record_code(model)


def _check_values(model: nn.Module) -> None:
    """Raise ValueError if parameters still hold NaN, with which `parallelize` fills a model from the meta device."""
    local_tensors = {name: p._local_tensor if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    first_elements = {
        name: t.detach().view(-1)[:1].float() for name, t in local_tensors.items() if t.is_floating_point()
    }
    nonempty_elements = {name: first for name, first in first_elements.items() if first.numel()}
    nan_flags = torch.cat([*nonempty_elements.values()]).isnan().tolist() if nonempty_elements else []
    if any(nan_flags):
        names = [name for name, is_nan in zip(nonempty_elements, nan_flags, strict=True) if is_nan]
        more_text = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise ValueError(
            f"the model was built on the meta device, and {join_words(map(repr, names[:4]))}{more_text} have no values "
            "(NaN). Load values with load_full_state_dict or torch.distributed.checkpoint, or initialize the model "
            "with init_weights() or apply(), with equal random states on all ranks."
        )


_LIBRARIES = (
    "torch.",
    "transformers.",
    "fused_tp.",
    "peft.",
    "accelerate.",
    "deepspeed.",
    "lightning.",
)


def callers_code(module: nn.Module) -> dict[str, object]:
    """Return the callers' code that runs in `module`: its class, methods, callable attributes and hooks, by name.

    Functions of `_LIBRARIES` are omitted, because libraries may register hooks at any time.
    """
    # Not the subclass that fully_shard creates.
    own_class = next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))
    code: dict[str, object] = {"class": own_class, "forward": getattr(own_class, "forward", None)}
    callables = {f"attribute {name!r}": value for name, value in vars(module).items() if callable(value)}
    hook_tables = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    hooks = [hook for table in hook_tables for hook in table.values()]
    for parameter in module._parameters.values():
        hooks += (getattr(parameter, "_backward_hooks", None) or {}).values()
    for label, function in [*callables.items(), *((f"hook {_hook_name(hook)}", hook) for hook in hooks)]:
        if not isinstance(function, (nn.Module, Tensor, type)) and not is_library_function(function):
            code[label] = function
    return code


def _callers_values(module: nn.Module) -> dict[str, object]:
    """Return the numbers, flags and texts that are attributes of `module`, if its class is the caller's, by name."""
    if f"{type(module).__module__}.".startswith(_LIBRARIES):
        return {}
    return {
        f"attribute {name!r}": value
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and name != "training" and not name.startswith("_")
    }


def is_library_function(function: Any) -> bool:
    """True if `function`, or the function that a partial wraps, is defined in one of `_LIBRARIES`."""
    inner_function = getattr(function, "func", function)
    module_name = getattr(inner_function, "__module__", None) or type(inner_function).__module__
    return f"{module_name}.".startswith(_LIBRARIES)


def _hook_name(hook: Any) -> str:
    return getattr(getattr(hook, "func", hook), "__qualname__", type(hook).__name__)


def is_first_rank(parallelism: Any) -> bool:
    """True on the first of the ranks that share the model."""
    return all(mesh is None or mesh.get_local_rank() == 0 for mesh in (parallelism.tp_mesh, parallelism.cp_mesh))


_warned_keys: set[str] = set()


def warn_once(meshes: Sequence[DeviceMesh], key: str, message: str, *values: object) -> None:
    """Log a warning on the first of the ranks of `meshes`, once for each `key` until `allow_warnings`."""
    if key not in _warned_keys and all(mesh.get_local_rank() == 0 for mesh in meshes):
        _warned_keys.add(key)
        _LOG.warning(message, *values)


def allow_warnings() -> None:
    """Allow all warnings of `warn_once` again, for another model."""
    _warned_keys.clear()


def check_equal_models(model: nn.Module, meshes: Sequence[DeviceMesh]) -> None:
    """Compare parameters and persistent buffers over the ranks of `meshes`.

    Names, shapes, dtypes, requires_grad and a sample of the values are compared. Tensors on the meta device are
    compared without values. Tensors that are not dense are not compared.

    Raises:
        RankMismatchError: raised on all ranks. It names the tensors that differ, and the remedy.
    """
    named_tensors = chain(model.named_parameters(), _persistent_buffers(model))
    local_descriptions = {
        name: [list(t.shape), str(t.dtype), t.requires_grad, _sample_checksum(t)]
        for name, t in named_tensors
        if _is_dense(t)
    }
    checksums = gather_over_meshes(meshes, "a checksum of the model", checksum(repr(local_descriptions)))
    if len(set(checksums)) == 1:
        return
    rank_descriptions = gather_over_meshes(meshes, "the model", local_descriptions)
    reference: dict[str, list[object]] = {}  # each entry from the first rank that has values for it
    for descriptions in rank_descriptions:
        reference |= {
            name: description for name, description in descriptions.items() if reference.get(name, [None])[-1] is None
        }
    for i, descriptions in enumerate(rank_descriptions):
        different_names = [
            name for name in reference if not _have_equal_descriptions(reference[name], descriptions.get(name))
        ]
        if different_names:
            dims = join_words(repr((mesh.mesh_dim_names or ("?",))[0]) for mesh in meshes)
            more_text = f" and {len(different_names) - 4} more" if len(different_names) > 4 else ""
            raise RankMismatchError(
                f"the ranks of {dims} have built different models: "
                f"{join_words(map(repr, different_names[:4]))}{more_text} of rank {i} of {len(rank_descriptions)} "
                "differ from another rank's in shape, dtype, requires_grad or values. All ranks must build the same "
                "model, since each keeps a shard of it. Set the same random state on all ranks before they build it "
                "(torch.manual_seed(0)), or load the same checkpoint on all of them."
            )


def _have_equal_descriptions(first: list[object], second: list[object] | None) -> bool:
    return (
        second is not None
        and first[:-1] == second[:-1]
        and (None in (first[-1], second[-1]) or first[-1] == second[-1])
    )


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _is_dense(t: Tensor) -> bool:
    """True if `t` is dense and stores its own values, unlike a DTensor or another class with __torch_dispatch__."""
    if is_lazy(t) or type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    return t.layout == torch.strided and not (t.is_nested or t.is_quantized)


def _sample_checksum(t: Tensor) -> int | None:
    """Checksum of a sample of `t`; None on the meta device, or if elements are smaller than a byte."""
    if t.is_meta:
        return None
    with torch._C.DisableTorchFunctionSubclass():  # parameter classes may override the functions below
        t = t.detach()
        if t.ndim and t.numel():
            try:  # indexed, not flattened: flattening would copy all of a transposed tensor
                sample = t[torch.unravel_index(_sample_indices(t.shape).to(t.device), t.shape)]
            except NotImplementedError:  # torch cannot index elements smaller than a byte
                return None
        else:
            sample = t
        return checksum(sample.resolve_conj().resolve_neg().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())


def _sample_indices(shape: torch.Size) -> Tensor:
    """Flat indices of a sample of each row, or of _MAX_ROWS rows if there are more. Columns vary between rows."""
    num_rows, num_columns = shape[0], shape[1:].numel()
    num_sampled_rows = min(num_rows, _MAX_ROWS)
    columns_per_row = min(num_columns, -(-_SAMPLE_SIZE // num_sampled_rows))
    row = (torch.arange(num_sampled_rows, device="cpu") * num_rows // num_sampled_rows).unsqueeze(1)
    column = torch.arange(columns_per_row, device="cpu") * num_columns // columns_per_row + row * 7919 % (
        num_columns // columns_per_row
    )
    return (row * num_columns + column).flatten()
