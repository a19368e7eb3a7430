"""Base of all differentiable ops: schema, forward, fake, backward and the key for dispatch.

`torch.compile`, `make_fx` and dispatch modes (selective checkpointing, fake tensors, flop counters) require a
`torch.library` op, with a schema, a fake implementation and an autograd formula. In eager mode such an op costs 17 us
per call without gradients and 52 us with gradients (list arguments, torch 2.13, one x86 core), while a decode-sized
`F.linear` takes 7 us. Eager calls with plain tensors therefore bypass torch's dispatcher: they call the forward
directly, or through an `autograd.Function` around the same forward and backward (12 us). Rejected:
`torch.library.custom_op`, which takes 4 to 6 us more than `Library.define` + `impl`.

Decoding repeats the same call for each token. A decode-sized matmul reads its entire weight through the CPU caches, so
code that runs after it is no longer cached: a Python frame costs 5 to 10 us then, and 0.2 us in a hot loop. The checked
arguments and the schedule are equal for all calls of one shape, so they are cached as a plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd import profiler as _profiler
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from fused_tp.backends.local import LOCAL_SCHEDULE
from fused_tp.backends.schedule import Schedule
from fused_tp.core import settings, tracing
from fused_tp.core.dispatch import ScheduleKey as ScheduleKey
from fused_tp.core.group import GroupName, GroupSlot, cached_group, empty_dict, group_by_name, group_identity
from fused_tp.core.subclass import result_type
from fused_tp.core.tracing import is_recording, op_span
from fused_tp.ops.counting import enable_collective_counting, enable_flop_counting
from fused_tp.ops.main_grad import redirect_to_main_grad
from fused_tp.ops.split_backward import apply_split, is_backward_split

LIBRARY = torch.library.Library("fused_tp", "DEF")
AnyGroup: TypeAlias = Any
"""Type of `group`: any group that callers may pass; after `prepare`, a `GroupName`."""

_PLAIN_TYPES = frozenset({Tensor, Parameter})
# Module-level bindings of functions and settings that every call reads, to save attribute lookups.
_SCHEDULE_KEY, _SHM_KEY, _TABLE_KEY = settings.ROUTING_KEYS
_get_raw_setting, _NVTX_SETTING_KEY = settings.RAW_ENVIRON.get, tracing.NVTX_KEY
_in_dispatch_mode = torch._C._len_torch_dispatch_stack
_in_autocast = torch._C._is_any_autocast_enabled
_in_functorch = torch._C._are_functorch_transforms_active
_is_grad_enabled = torch.is_grad_enabled

# Results of the checks, reused by all calls of one shape: the schedule, its fast forward function
# (`Schedule.make_fast_call`), the arguments that `prepare` changes, as (index, new value), and the group's name.
_Plan: TypeAlias = tuple["Schedule | None", "Callable[..., Any] | None", tuple[tuple[int, Any], ...], GroupName]
_MAX_PLANS = 1024  # maximum plans per op and group, which limits the memory of programs whose shapes keep changing
_WEIGHTS = frozenset({"weight", "weights", "bias", "biases", "norm_weight"})

OPS: dict[str, Op[Any]] = {}  # ops by name; an op is added when its module is imported


@cache
def all_ops() -> dict[str, Op[Any]]:
    """Return all ops by name; imports the modules that define them."""
    for module in iter_modules(import_module("fused_tp.ops").__path__):
        import_module(f"fused_tp.ops.{module.name}")
    return OPS


A = TypeVar("A", bound=tuple[Any, ...])


class SavedForBackward(Generic[A]):
    """Values that backward keeps from forward.

    Attributes:
        args: the arguments; None for tensors that were not saved.
        needs: for each argument, True if its gradient is needed; a list of bools for a list of tensors. In one half of
            a split backward, False for arguments of the other half.
        all_needs: `needs` without this restriction.
        shapes: shapes of the arguments that are tensors; None for the others.
        outputs: the results that were saved.
        carry: values that the first half of a split backward passes to the second half; None if there are none.
    """

    def __init__(self, args: A, needs: Any, shapes: Any, outputs: Sequence[Tensor]) -> None:
        self.args, self.needs, self.all_needs, self.shapes, self.outputs = args, needs, needs, shapes, outputs
        self.carry: Any = None

    @contextmanager
    def restrict_needs(self, is_weight_half: bool) -> Iterator[None]:
        """Context manager that restricts `needs` to weights or, if not `is_weight_half`, to all other arguments."""
        restricted_needs = [
            need if (name in _WEIGHTS) == is_weight_half else [False] * len(need) if isinstance(need, list) else False
            for name, need in zip(self.all_needs._fields, self.all_needs, strict=True)
        ]
        self.needs = type(self.all_needs)(*restricted_needs)
        try:
            yield
        finally:
            self.needs = self.all_needs


class Op(Generic[A]):
    """One op `fused_tp::<name>`.

    Arguments are passed internally as one NamedTuple. Its annotations define the schema. Its last field, `group`, holds
    the group that callers pass and, after `prepare`, the group's name. A field may itself be a NamedTuple; the schema
    then contains its fields. Callers pass all fields as separate positional arguments.

    Args:
        name: name of the op.
        arguments: the NamedTuple.
        returns: return type of the schema: "Tensor", "Tensor[]" or "(Tensor, Tensor)".
        forward: computes the results from a schedule (None without `key`) and the arguments. Results must not share
            memory with arguments: torch.compile relies on it.
        fake: computes results without data from the arguments.
        key: computes the key for dispatch from the arguments; returns None for a call without communication.
        backward_key: computes the key for dispatch of backward from the arguments of forward.
        make_example_args: builds arguments for `explain` from the group size and one rank's tensors. All values that
            `key` and `backward_key` read must be as in a real call.
        prepare: checks, casts and normalizes the arguments. Without autocast its result must depend only on shapes,
            dtypes, devices and arguments that are not tensors.
        saves: values that backward needs: tensor arguments by name, results by index.
        backward: computes gradients by argument name from (saved, gradients of the results); see `grad_input`. None
            for an op that is not differentiable, such as an op that computes gradients.
        materialize_grads: True if the gradients of unused results are zeros, not None.
        non_differentiable: indices of the results without a gradient.
        has_local_backward: True if backward does not communicate. A second derivative over several ranks would then
            miss the terms of other ranks, so it raises. On one rank it raises only if some results have no gradient.
    """

    def __init__(
        self,
        name: str,
        arguments: type[A],
        returns: str,
        forward: Callable[[Any, A], Any],
        fake: Callable[[A], Any],
        *,
        key: Callable[[A], ScheduleKey | None] | None = None,
        backward_key: Callable[[A], ScheduleKey | None] | None = None,
        make_example_args: Callable[..., A] | None = None,
        prepare: Callable[[A], A] | None = None,
        saves: Sequence[str | int] = (),
        backward: Callable[..., dict[str, Any]] | None = None,
        materialize_grads: bool = True,
        non_differentiable: Sequence[int] = (),
        has_local_backward: bool = False,
    ) -> None:
        self.name = name
        self.qualified_name = f"fused_tp::{name}"
        annotations = _schema_types(arguments)
        self.fields = tuple(annotations)
        self.pack: Callable[[Sequence[Any]], A] = _make_packer(arguments)
        self.forward = forward
        self.fake = fake
        self.key = key
        self.backward_key = backward_key
        self.make_example_args = make_example_args
        self.prepare = prepare
        self.backward = backward
        self.has_local_backward = has_local_backward
        self.returns_list = returns == "Tensor[]"
        self._saved_names, self._saved_outputs = frozenset(saves), [item for item in saves if isinstance(item, int)]
        self.weight_indices = [index for index, field in enumerate(self.fields) if field in _WEIGHTS]
        self._materialize_grads, self._non_differentiable = materialize_grads, non_differentiable
        self._plans: GroupSlot[dict[Any, _Plan]] = GroupSlot(empty_dict)
        schema = ", ".join(f"{type_name} {field}" for field, type_name in annotations.items())
        LIBRARY.define(f"{name}({schema}) -> {returns}")
        LIBRARY.impl(name, self._run_dispatched, "CompositeExplicitAutograd")
        torch.library.register_fake(self.qualified_name, self._run_fake, lib=LIBRARY)
        if backward is not None:
            torch.library.register_autograd(
                self.qualified_name, self.run_backward, setup_context=self.setup_context, lib=LIBRARY
            )
        self.overload = getattr(torch.ops.fused_tp, name).default
        OPS[name] = self
        enable_flop_counting(self)

    # -- forward ------------------------------------------------------------------------------------------------------

    def __call__(self, *values: Any) -> Any:
        """Run the op on its arguments; the last, `group`, may be a `GroupName`."""
        # Not torch.compiler.is_compiling: it also checks for TorchScript and export, which costs two more Python
        # frames. Export traces under a dispatch mode, which is checked below.
        if (
            is_dynamo_compiling()
            or _in_dispatch_mode()
            or _in_autocast()
            or _profiler._is_profiler_enabled
            or tracing.HAS_NVTX_TOOL
            or _get_raw_setting(_NVTX_SETTING_KEY)
            or forward_ad._current_level >= 0
            or _in_functorch()
            or (group := cached_group(values[-1])) is None
        ):
            return self._call_without_plan(values)
        args: Sequence[Any] = values[:-1]
        # The key is built as nested tuples, because appending to a list would take a quarter of this function's time.
        key: tuple[Any, ...] = _get_raw_setting(_SCHEDULE_KEY), _get_raw_setting(_SHM_KEY), _get_raw_setting(_TABLE_KEY)
        grad_mode, needs_grad = _is_grad_enabled(), False
        for value in args:
            value_type = type(value)
            if value_type is Tensor or value_type is Parameter:
                try:
                    key = key, value.shape, value.dtype, value.device, value.layout
                except RuntimeError:  # a nested tensor has no shape; the argument checks reject it
                    return self._call_without_plan(values)
                if grad_mode and value.requires_grad:
                    needs_grad = True
            elif value is None:
                key = key, None
            elif value_type is list or value_type is tuple:
                item_keys: list[Any] = []
                for item in value:
                    if type(item) is Tensor or type(item) is Parameter:
                        try:
                            item_keys += item.shape, item.dtype, item.device, item.layout
                        except RuntimeError:
                            return self._call_without_plan(values)
                        if grad_mode and item.requires_grad:
                            needs_grad = True
                    elif isinstance(item, Tensor):
                        return self._call_with_subclasses(values)
                    else:
                        item_keys += type(item), item
                key = key, tuple(item_keys)
            elif isinstance(value, Tensor):
                return self._call_with_subclasses(values)
            else:
                key = key, value_type, value  # with the type: True == 1, but the argument checks distinguish them
        try:
            plan = self._plans[group].get(key)
        except TypeError:  # an argument is not hashable; the argument checks reject it
            return self._call_without_plan(values)
        if plan is None:
            return self._call_without_plan(values, key)
        schedule, fast_call, changed_args, group_name = plan
        if changed_args:
            args = new_args = list(args)
            for index, value in changed_args:
                new_args[index] = value
        # `fast_call` begins with a torch op, which handles conjugate and negative bits: no check here.
        if fast_call is not None and not needs_grad:
            repeated_result = fast_call(*args)
            return self._call_without_plan(values) if repeated_result is None else repeated_result
        for value in args:
            for item in value if type(value) is list else (value,):
                if type(item) in _PLAIN_TYPES and (
                    item.is_neg() or item.is_conj() or (not item.data_ptr() and item.numel())
                ):
                    return self._call_without_plan(values)
        if needs_grad:
            return self._run_with_grad(schedule, self.pack((*self._redirect_main_grads(args), group_name)))
        result = self.forward(schedule, self.pack((*args, group_name)))
        if type(result) is Tensor:
            return result.data if result._is_view() else result  # inlined `_detach_views`
        for item in result:
            if item._is_view():
                return _detach_views(result)
        return result

    def call_prepared(self, *values: Any) -> Any:
        """Run the op on prepared arguments whose last is a group's name; for calls from other ops and from backward."""
        if is_dynamo_compiling():
            return self.overload(*values)
        return self(*values[:-1], GroupName(values[-1]))

    def _call_with_subclasses(self, values: Sequence[Any]) -> Any:
        """Call the op with tensors of Tensor subclasses.

        If the memory of all of them holds plain values, the op runs on plain tensors. Its results then have the type
        that torch's own functions would return. Other subclasses are handled by `_call_without_plan`.
        """
        values = self._redirect_main_grads(values)  # before `as_subclass`, whose results have no main_grad
        result_class: type[Tensor] = Tensor
        plain_values: list[Any] = []
        for value in values:
            items: Sequence[Any] = value if type(value) is list or type(value) is tuple else (value,)
            plain_items = []
            for item in items:
                if isinstance(item, Tensor) and type(item) not in _PLAIN_TYPES:
                    item_class = result_type(type(item))
                    if item_class is None:
                        return self._call_without_plan(values)
                    result_class = (
                        item_class if result_class is Tensor or issubclass(item_class, result_class) else result_class
                    )
                    item = item.as_subclass(Tensor)
                plain_items.append(item)
            plain_values.append(
                (plain_items if type(value) is list else tuple(plain_items)) if items is value else plain_items[0]
            )
        results = self(*plain_values)
        if result_class is Tensor:
            return results
        return (
            results.as_subclass(result_class)
            if isinstance(results, Tensor)
            else type(results)(item.as_subclass(result_class) for item in results)
        )

    def _call_without_plan(self, values: Sequence[Any], key: object = None) -> Any:
        """Call the op without a plan; with `key`, save a plan for the next call."""
        values = self._redirect_main_grads(values)  # before autocast casts weights: the casts have no main_grad
        if not is_dynamo_compiling():  # compiled code calls torch's dispatcher, which resolves conjugate tensors
            values = [_materialize(value) for value in values]
        *prepared_args, group = values if self.prepare is None else _flatten(self.prepare(self.pack(values)))
        group_name = str(group) if isinstance(group, GroupName) else group_identity(group).name
        if not is_dynamo_compiling() and _in_dispatch_mode():
            enable_collective_counting(OPS)
        if (
            is_dynamo_compiling()
            or _in_dispatch_mode()
            or any(type(t) not in _PLAIN_TYPES for t in _iterate_tensors(prepared_args))
        ):
            if is_backward_split() and not is_dynamo_compiling() and torch.is_grad_enabled():
                args = self.pack((*prepared_args, group_name))
                split_results = apply_split(
                    self, partial(self.overload, *prepared_args, group_name), args, prepared_args
                )
                if split_results is not None:
                    return split_results
            return self.overload(*prepared_args, group_name)
        if forward_ad._current_level >= 0:
            raise RuntimeError(
                f"{self.qualified_name} does not support forward-mode AD, because ranks do not exchange tangents. Use "
                "backward, or call the op outside of forward_ad.dual_level()."
            )
        if _in_functorch():
            raise RuntimeError(
                f"{self.qualified_name} does not support torch.func transforms (grad, vmap, ...), because it sends the "
                "values of its tensors to other ranks. Instead of vmap, call the op with a batch dim; instead of grad, "
                "use backward() or torch.autograd.grad."
            )
        args = self.pack((*prepared_args, GroupName(group_name)))
        if (
            self.key is not None
            and group_by_name(group_name).size > 1
            and any(t.is_meta for t in _iterate_tensors(prepared_args))
        ):
            raise ValueError(
                f"{self.name} does not support meta tensors on several ranks: they have no data to send. Use "
                "FakeTensorMode to trace shapes."
            )
        schedule = self.select_schedule(args)
        if key is not None:
            self._save_plan(key, values, args, schedule)
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in _iterate_tensors(prepared_args))
        run = self._run_with_grad if needs_grad else self._run
        if not is_recording():
            return run(schedule, args)
        profiler_range: AbstractContextManager[object] = nullcontext()
        if _profiler._is_profiler_enabled:  # this path bypasses torch's dispatcher, which would record the op
            profiler_range = torch.profiler.record_function(self.qualified_name)
        with profiler_range, self._op_span(schedule, args):
            return run(schedule, args)

    def _redirect_main_grads(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return `values`, in which `redirect_to_main_grad` is applied to each weight that has a `main_grad`."""
        for index in self.weight_indices:
            value = values[index]
            for t in value if type(value) is list else (value,):
                if getattr(t, "main_grad", None) is not None:
                    redirected_value = (
                        [redirect_to_main_grad(weight) for weight in value]
                        if type(value) is list
                        else redirect_to_main_grad(value)
                    )
                    values = (*values[:index], redirected_value, *values[index + 1 :])
                    break
        return values

    def _save_plan(self, key: object, values: Sequence[Any], args: Any, schedule: Schedule | None) -> None:
        pairs = enumerate(zip(values[:-1], _flatten(args)[:-1], strict=True))
        changed_args = [(i, new) for i, (old, new) in pairs if new is not old]
        if (
            next(_iterate_tensors([new for _, new in changed_args]), None) is not None
        ):  # tensors were cast or copied: not reusable
            return
        plans = self._plans[group_by_name(args[-1])]
        if len(plans) >= _MAX_PLANS:
            plans.clear()
        fast_call = None if schedule is None else schedule.make_fast_call(self.name, args)
        plans[key] = schedule, fast_call, tuple(changed_args), args[-1]

    def select_schedule(self, args: A) -> Schedule | None:
        """Select the schedule for a call with `args`; None if the call does not communicate."""
        key = None if self.key is None else self.key(args)
        if key is None:
            return None
        group = group_by_name(args[-1])
        if group.size == 1:
            return LOCAL_SCHEDULE
        # Imported here, because these modules import the transports, which a single rank does not need.
        from fused_tp.backends.autotune import is_measured, tuned_schedule
        from fused_tp.backends.registry import select_schedule

        selected_schedule = select_schedule(key, group)
        if is_measured(self.name, key, group):

            def run(schedule: Schedule) -> Any:
                return self.forward(schedule, args)

            return tuned_schedule(self.name, key, group, run) or selected_schedule
        return selected_schedule

    def _run_dispatched(self, *values: Any) -> Any:
        """Run the op when torch's dispatcher calls it."""
        args = self.pack((*values[:-1], GroupName(values[-1])))
        schedule = self.select_schedule(args)
        if not is_recording():
            return self._run(schedule, args)
        with self._op_span(schedule, args):
            return self._run(schedule, args)

    def _run_fake(self, *values: Any) -> Any:
        return self.fake(self.pack(values))

    def _run(self, schedule: Schedule | None, args: A) -> Any:
        return _detach_views(self.forward(schedule, args))

    def _op_span(self, schedule: Schedule | None, args: A) -> AbstractContextManager[object]:
        return op_span(args[-1], self.name, args, None if schedule is None else schedule.name)

    # -- backward -----------------------------------------------------------------------------------------------------

    def grad_input(self, saved: SavedForBackward[A], *grads: Any) -> dict[str, Any]:
        """Return the gradients by name of all arguments that are not weights; `grads` are gradients of the results.

        `grad_input` and `grad_weight` are the two halves of backward. A pipeline schedule may run them at different
        times. The first half stores values for the second half in `saved`, so that nothing is communicated twice.
        """
        assert self.backward is not None
        with saved.restrict_needs(is_weight_half=False):
            return self.backward(saved, *grads)

    def grad_weight(self, saved: SavedForBackward[A], *grads: Any) -> dict[str, Any]:
        """Return the gradients by name of weights, biases and norm weights; see `grad_input`."""
        assert self.backward is not None
        if _WEIGHTS.isdisjoint(self.fields):
            return {}
        with saved.restrict_needs(is_weight_half=True):
            return self.backward(saved, *grads)

    def setup_context(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        """Save for backward: the tensors in `saves`, all shapes, and all arguments that are not tensors."""
        tensors: list[Tensor] = []
        args: list[Any] = []
        needs: list[Any] = []
        shapes: list[Any] = []
        ctx.saved_positions = {}
        for index, (name, value) in enumerate(zip(self.fields, _flatten(inputs), strict=True)):
            if isinstance(value, Tensor):
                needs.append(value.requires_grad)
                shapes.append(value.shape)
            elif type(value) is list and (not value or isinstance(value[0], Tensor)):
                needs.append([t.requires_grad for t in value])
                shapes.append([t.shape for t in value])
            else:
                args.append(value)
                needs.append(False)
                shapes.append(None)
                continue
            args.append(None)
            if name in self._saved_names:
                start = len(tensors)
                ctx.saved_positions[index] = slice(start, start + len(value)) if type(value) is list else start
                tensors += value if type(value) is list else [value]
        args[-1] = GroupName(args[-1])
        outputs = [output[index] for index in self._saved_outputs]
        ctx.args, ctx.needs, ctx.shapes, ctx.outputs = args, needs, shapes, len(outputs)
        ctx.set_materialize_grads(self._materialize_grads)
        if self._non_differentiable:
            ctx.mark_non_differentiable(*(output[index] for index in self._non_differentiable))
        ctx.save_for_backward(*tensors, *outputs)

    def load_saved(self, ctx: Any) -> SavedForBackward[A]:
        """Return the values that `setup_context` saved in `ctx`."""
        tensors = ctx.saved_tensors
        args = list(ctx.args)
        for index, position in ctx.saved_positions.items():
            args[index] = list(tensors[position]) if isinstance(position, slice) else tensors[position]
        outputs = tensors[len(tensors) - ctx.outputs :]
        return SavedForBackward(self.pack(args), self.pack(ctx.needs), self.pack(ctx.shapes), outputs)

    def run_backward(self, ctx: Any, *grads: Any) -> Any:
        """Run `backward` and return the gradients in the order of the arguments, as autograd requires."""
        assert self.backward is not None
        return self._order_gradients(ctx, self.run_half(ctx, self.backward, self.load_saved(ctx), grads))

    def run_half(
        self, ctx: Any, half: Callable[..., dict[str, Any]], saved: SavedForBackward[A], grads: Sequence[Any]
    ) -> dict[str, Any]:
        """Run `half(saved, *grads)` in a profiler range. Under a dispatch mode, which would trace it, omit the range.

        Args:
            half: `backward`, `grad_input` or `grad_weight`.
        """
        grads = tuple(map(_materialize, grads))
        if any(isinstance(grad, Tensor) and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads):
            raise RuntimeError(
                f"backward of {self.qualified_name} does not support is_grads_batched=True (vectorize=True in "
                "torch.autograd.functional), because it sends values of tensors to other ranks. Call "
                "torch.autograd.grad once for each gradient of the outputs."
            )
        if (
            self.has_local_backward
            and torch.is_grad_enabled()
            and (self._non_differentiable or group_by_name(ctx.args[-1]).size > 1)
        ):
            raise self._double_backward_error()
        if not is_recording() or _in_dispatch_mode():
            return half(saved, *grads)
        with op_span(ctx.args[-1], f"{self.name} backward", grads):
            return half(saved, *grads)

    def _double_backward_error(self) -> RuntimeError:
        name = self.qualified_name if self.backward is None else f"backward of {self.qualified_name}"
        return RuntimeError(
            f"{name} is not differentiable: the ops can be differentiated only once. Omit create_graph=True."
        )

    def _order_gradients(self, ctx: Any, gradients: dict[str, Any]) -> tuple[Any, ...]:
        """Return the gradients in `gradients`, by name, in the order of the arguments: a list for a list of tensors."""
        result: list[Any] = []
        for name, needs in zip(self.fields, ctx.needs, strict=True):
            grad = gradients.get(name)
            if isinstance(needs, list) and grad is None:
                grad = [None] * len(needs)
            result.append(grad)
        return tuple(result)

    def _run_with_grad(self, schedule: Schedule | None, args: A) -> Any:
        if self.backward is None:
            raise self._double_backward_error()
        values = _flatten(args)
        if (
            is_backward_split()
            and (split_results := apply_split(self, partial(self._run, schedule, args), args, values)) is not None
        ):
            return split_results
        flat_values: list[Any] = []
        lengths = []  # for each argument, the length of a list of tensors; -1 for anything else
        for arg in values:
            if type(arg) is list and (not arg or isinstance(arg[0], Tensor)):
                lengths.append(len(arg))
                flat_values += arg
            else:
                lengths.append(-1)
                flat_values.append(arg)
        outputs = _EagerFunction.apply(self, schedule, lengths, *flat_values)
        return list(outputs) if self.returns_list else outputs


class _EagerFunction(torch.autograd.Function):
    """Autograd node of an eager call. Lists are flattened, because autograd does not track tensors inside lists."""

    @staticmethod
    def forward(ctx: Any, op: Op[Any], schedule: Schedule | None, lengths: list[int], *flat_values: Any) -> Any:
        values: list[Any] = []
        start = 0
        for length in lengths:
            values.append(flat_values[start] if length < 0 else list(flat_values[start : start + length]))
            start += abs(length)
        args = op.pack(values)
        output = op._run(schedule, args)
        op.setup_context(ctx, args, output)
        ctx.op, ctx.lengths = op, lengths
        return tuple(output) if op.returns_list else output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        op = ctx.op
        result = op.run_backward(ctx, list(grads)) if op.returns_list else op.run_backward(ctx, *grads)
        flat_grads: list[Any] = [None, None, None]
        for value, length in zip(result, ctx.lengths, strict=True):
            if length < 0:
                flat_grads.append(value)
            else:
                flat_grads += value
        return tuple(flat_grads)


# -- helpers ----------------------------------------------------------------------------------------------------------


def _schema_types(arguments: Any) -> dict[str, str]:
    """Map the fields of a NamedTuple to schema types, such as `Tensor?` for `Tensor | None`."""
    types: dict[str, str] = {}
    for name, annotation in arguments.__annotations__.items():
        type_name = getattr(annotation, "__forward_arg__", annotation)
        if (nested_type := _nested_type(arguments, name)) is not None:
            types |= _schema_types(nested_type)
            continue
        optional_suffix = "?" if type_name.endswith(" | None") else ""
        type_name = type_name.removesuffix(" | None")
        if type_name.startswith("list["):
            type_name = f"{type_name.removeprefix('list[').removesuffix(']')}[]"
        types[name] = ("str" if type_name == "AnyGroup" else type_name) + optional_suffix
    return types


def _nested_type(arguments: Any, name: str) -> Any:
    """Return the type of field `name` if it is a NamedTuple, otherwise None."""
    annotation = arguments.__annotations__[name]
    field_type = getattr(sys.modules[arguments.__module__], getattr(annotation, "__forward_arg__", annotation), None)
    return field_type if hasattr(field_type, "_fields") else None


def _make_packer(arguments: Any) -> Callable[[Sequence[Any]], Any]:
    """Return a function that packs flat values into the NamedTuple type `arguments`.

    Without nested NamedTuples it is `tuple.__new__`, a C function, because the generated constructor is slower.
    """
    nested_types = [
        (index, nested_type)
        for index, name in enumerate(arguments._fields)
        if (nested_type := _nested_type(arguments, name)) is not None
    ]
    if not nested_types:
        return partial(tuple.__new__, arguments)

    def pack(values: Sequence[Any]) -> Any:
        nested_values = list(values)
        for index, nested_type in nested_types:
            stop = index + len(nested_type._fields)
            nested_values[index:stop] = [tuple.__new__(nested_type, nested_values[index:stop])]
        return tuple.__new__(arguments, nested_values)

    return pack


def _flatten(args: Sequence[Any]) -> list[Any]:
    """Flatten nested tuples in `args`."""
    return [item for arg in args for item in (arg if isinstance(arg, tuple) else (arg,))]


def _materialize(value: Any) -> Any:
    """Materialize lazy conjugate, negative and zero tensors, also inside lists.

    Native code and peers read raw memory, which does not hold the values of such tensors.
    """
    value_type = type(value)
    if value_type is list or value_type is tuple:
        return value_type(map(_materialize, value))
    if isinstance(value, Tensor) and (value.is_neg() or value.is_conj() or value._is_zerotensor()):
        return value.clone().resolve_neg().resolve_conj()
    return value


def _detach_views(result: Any) -> Any:
    """Return `result` with views replaced by tensors in the same memory that autograd does not treat as views.

    Callers may write to results in place, which autograd rejects for some views. The schedule decides which results are
    views of a buffer.
    """
    if isinstance(result, Tensor):
        return result.data if result._is_view() else result  # takes a tenth of the time of aten._unsafe_view
    return type(result)(map(_detach_views, result))


def _iterate_tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    for arg in args:
        for t in arg if type(arg) is list else (arg,):
            if isinstance(t, Tensor):
                yield t
