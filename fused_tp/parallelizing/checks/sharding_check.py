"""Compare a sharded model with the unsharded one: both run on a few pseudo-random tokens, without gradients.

| when | action |
|---|---|
| before sharding | add noise to constant parameters (norms at 1, biases at 0), which would hide that they are misused |
| | run the unsharded model in its current mode, and record the outputs of all its modules; if it draws random |
| | numbers, which would differ on a rank with a shard of the tokens, run it without dropout or in eval mode instead |
| | exchange whether all ranks have outputs; if not, log the reason and skip the comparison |
| after sharding | run the sharded model on the same tokens, in the same mode; exchange the error of its output |
| | if the error exceeds the bound of the dtype, run it again with rounding errors added, to measure their effect |
| | set the parameters back to their constant |
| | if the error exceeds both the bound and the effect of rounding, raise on all ranks, naming the first wrong module |

A small 16-bit model is compared once more in fp32 (`float32`).

The comparison restores modes, random states, buffers and attributes of the unsharded model. It does not cover
gradients, caches, or windows longer than its few tokens.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from fused_tp.backends.gemm import linear
from fused_tp.core.errors import FusedTPError
from fused_tp.nn.float8 import without_float8
from fused_tp.parallelizing.checks.batch_check import are_checks_suspended, gather_over_meshes
from fused_tp.parallelizing.checks.float32 import Find16BitResults, has_16_bit_parameters, in_float32, widen_arguments
from fused_tp.parallelizing.checks.model_check import warn_once
from fused_tp.parallelizing.checks.module_outputs import (
    OutputComparison,
    RankShards,
    Recording,
    first_difference,
    output_tensors,
    record_outputs,
)
from fused_tp.parallelizing.checks.parameter_noise import noise_on_constants
from fused_tp.parallelizing.checks.read_values import PACKAGE_FOLDERS
from fused_tp.parallelizing.checks.token_functions import FindTokenFunctions
from fused_tp.parallelizing.checks.undisturbed import LARGE_MODEL_PARAMETERS, Mode, preserve_state
from fused_tp.parallelizing.hf.hf_model import is_transformers_model
from fused_tp.parallelizing.outputs import find_tensors

TIME_LIMIT_SECONDS = 2.0  # time limit for the unsharded model; the sharded one takes about as long
_ID_OPTIONS: dict[str, Any] = {"dtype": torch.long, "device": "cpu"}
_FLOAT_OPTIONS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
# Bounds of a token's output error, relative to its norm. Loose for fp64, because some modules always compute in fp32.
OUTPUT_BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 0.04}
ROUNDING_FACTOR = 4.0  # errors up to this factor times the measured effect of rounding are accepted
MAX_BOUND = 0.7  # a wrong output is off by about its own norm, so larger bounds could not detect it
# For each torch.get_float32_matmul_precision(), the dtype whose rounding is closest to that of fp32 matmuls.
_MATMUL_PRECISIONS = {"highest": torch.float32, "high": torch.float16, "medium": torch.bfloat16}


class TooLongError(Exception):
    """The unsharded model takes longer than its time limit."""


@dataclass
class ShardingOutcome:
    """The sharded model, and the outcome of `compare_sharding`.

    Attributes:
        sharded: object whose `named_parameters` has the model's names: the model, or the pipeline built from it.
        modules: modules of this rank, whose submodules have the same names as in the unsharded model.
        run: function of the keyword arguments of forward that returns the output, or None on ranks without it.
        is_equal: True if the outputs match those of the unsharded model; False also if they were not compared.
    """

    sharded_model: Any
    modules: Sequence[nn.Module]
    run: Callable[[dict[str, Any]], Any]
    is_equal: bool = False


def check_verify(verify: object) -> None:
    """Raise ValueError if `compare_sharding` does not accept `verify`."""
    if not (isinstance(verify, (bool, Mapping)) or verify == "auto"):
        raise ValueError(f"verify must be 'auto', True, False or a dict of arguments of forward, got {verify!r}.")


@contextmanager
def compare_sharding(
    model: nn.Module,
    verify: str | bool | Mapping[str, Any],
    meshes: Sequence[DeviceMesh],
    *,
    tp: DeviceMesh | None,
    cp: DeviceMesh | None,
    num_rows: int = 1,
    is_pipeline: bool = False,
) -> Iterator[ShardingOutcome]:
    """Context manager in which the caller shards `model`; on exit it is compared with the unsharded model.

    Args:
        verify: see `parallelize`.
        meshes: 1-D meshes whose ranks share the model.
        tp, cp: the meshes among them that shard features and tokens.
        num_rows: the pseudo-random batch has a multiple of this number of rows.
        is_pipeline: the sharded model runs in eval mode only (`pipelining.training_check` compares training), and sends
            tensors of the model's dtype, so it cannot compute in fp32.

    Raises:
        ValueError: raised on all ranks if the models differ, or cannot be compared and `verify` is not "auto".
    """
    outcome = ShardingOutcome(model, [model], lambda arguments: model(**arguments))
    if verify is False or not meshes or are_checks_suspended():
        yield outcome
        return
    failures: list[str] = []
    with ExitStack() as stack:
        reason, runs = reason_not_runnable(model), list[_UnshardedRun]()
        if not reason:
            stack.enter_context(noise_on_constants(model, outcome))
            num_ranks = (1 if tp is None else tp.size()) * (1 if cp is None else cp.size())
            with without_float8([model]):
                runs, reason = _run_unsharded(model, verify, num_rows, num_ranks, is_pipeline, cp is not None)
            if runs:
                _report_token_functions(type(model).__name__, runs[0].token_functions, meshes)
        reports = gather_over_meshes(meshes, "outputs of the unsharded model", [reason, len(runs)])
        reason = next((rank_reason for rank_reason, _ in reports if rank_reason), "")
        if reason:
            stack.close()
            _report_skipped(verify, reason, meshes)
            yield outcome
            return
        is_in_eval_mode = model.training and runs[0].mode is Mode.EVAL and not is_pipeline
        yield outcome
        with without_float8(outcome.modules):  # the scales of shards differ from those of the whole
            results = [
                _compare_run(run, outcome, meshes, tp, cp) for run in runs[: min(run_count for _, run_count in reports)]
            ]
        failures = [message for is_equal, message in results if is_equal is False]
        outcome.is_equal = not failures and any(is_equal for is_equal, _ in results)
    if failures:
        raise ValueError(failures[0])
    if not outcome.is_equal:
        _report_skipped(verify, results[0][1], meshes)
    elif is_in_eval_mode:
        warn_once(
            meshes,
            f"{type(model).__name__} draws random numbers",
            "parallelize compared the sharded %s with the unsharded one in eval mode, because it draws random numbers "
            "in training mode. Code that runs in training mode only was not compared; compare it once without the "
            "random numbers.",
            type(model).__name__,
        )


def _compare_run(
    unsharded_run: _UnshardedRun,
    outcome: ShardingOutcome,
    meshes: Sequence[DeviceMesh],
    tp: DeviceMesh | None,
    cp: DeviceMesh | None,
) -> tuple[bool | None, str]:
    """Run the sharded model like `unsharded_run`.

    Returns:
        (True, "") if the outputs match, (False, error message), or (None, reason) if they cannot be compared.
    """
    class_name = type(outcome.modules[0]).__name__
    sharded_run = _ShardedRun(unsharded_run, outcome, tp, cp)
    unsupported_reason = sharded_run.run()
    dtype_bound = OUTPUT_BOUNDS.get(unsharded_run.dtype, OUTPUT_BOUNDS[torch.bfloat16])
    reports = gather_over_meshes(
        meshes,
        "outputs of the sharded model",
        [sharded_run.error, unsupported_reason, dtype_bound, sharded_run.failure],
    )
    if failure := next((report[3] for report in reports if report[3]), ""):
        if unsharded_run.is_widened:  # code of the caller may not support fp32
            return None, failure
        raise ValueError(failure) from sharded_run.cause
    if unsupported_reason := next((report[1] for report in reports if report[1]), ""):
        return None, f"it does not support a batch that the unsharded model accepts: {unsupported_reason}"
    # Maximum over ranks, so that all decide alike even if their processors or settings round differently.
    error, bound = (max(report[field] for report in reports) for field in (0, 2))
    if OUTPUT_BOUNDS[torch.float32] < bound < error < float("inf"):
        rounding = max(gather_over_meshes(meshes, "rounding errors of the sharded model", sharded_run.rounding_error()))
        bound = max(bound, ROUNDING_FACTOR * rounding)
    if bound > MAX_BOUND:
        return None, f"rounding alone changes outputs of the {class_name} by {bound / ROUNDING_FACTOR:.2g}"
    if error <= bound:
        return True, ""
    names = gather_over_meshes(
        meshes, "the first module that differs", [sharded_run.error, sharded_run.first_difference(bound)]
    )
    first_module = max(names, key=lambda report: report[0])[1]
    location = "The first module whose output differs is {!r} ({}). ".format(*first_module) if first_module else ""
    return False, (
        f"the sharded {class_name} does not match the unsharded model: on {unsharded_run.description} its "
        f"relative output error is {error:.2g}, above the rounding bound {bound:g}. {location}{advice(tp, cp)} "
        "Pass verify=False to skip this check."
    )


def advice(tp: DeviceMesh | None, cp: DeviceMesh | None) -> str:
    """Return sentences on the usual causes of a difference, for error messages."""
    over_cp = (
        "With a cp_dim, only attention may mix tokens: transformers' AttentionInterface with a causal mask and no "
        "bias, or F.scaled_dot_product_attention. Any other forward, hook or function that mixes tokens would see only "
        "this rank's tokens."
    )
    over_tp = (
        "With a tp_dim, nothing between two sharded layers may mix features or heads (softmax, norm, chunk, topk), and "
        "with sequence_parallel nothing may mix tokens: remove such layers from the plan."
    )
    return " ".join([over_cp] * (cp is not None) + [over_tp] * (tp is not None))


def _report_skipped(verify: object, reason: str, meshes: Sequence[DeviceMesh]) -> None:
    if verify != "auto":
        raise ValueError(f"verify={verify if verify is True else 'a batch'}: {reason}.")
    warn_once(
        meshes,
        reason,
        "parallelize did not compare the sharded model with the unsharded one: %s. Use `fused-tp check` to compare a "
        "small model of this kind on CPUs.",
        reason,
    )


def _report_token_functions(class_name: str, calls: Iterable[str], meshes: Sequence[DeviceMesh]) -> None:
    names = ", ".join(calls)
    if names:
        warn_once(
            meshes,
            names,
            "%s.forward or a hook combines tokens by other means than attention: %s. Over context parallel ranks these "
            "calls see only this rank's tokens, so the model differs from the unsharded one on each batch for which "
            "that matters.",
            class_name,
            names,
        )


def reason_not_runnable(model: nn.Module) -> str:
    """Return the reason why `model` cannot run by itself, or an empty string."""
    for name, t in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(t) or t.is_meta:
            return f"{name!r} has no values yet (meta device)"
    return ""


# -- the unsharded model -----------------------------------------------------------------------------------------------


@dataclass
class _UnshardedRun:
    """Outputs of the unsharded model.

    Attributes:
        recording: outputs of all modules; the model's own name is "".
        arguments: keyword arguments of its forward.
        num_rows, num_tokens: rows of a pseudo-random batch, and tokens of each row; 0 tokens for the caller's batch.
        dtype: dtype in which it computes.
        mode: mode in which both models run.
        is_routed: True if it routes tokens to experts in 16 bits, so that rounding may change the experts of some
            tokens.
        is_widened: True if its 16-bit parameters were fp32 copies.
        token_functions: calls of functions that combine tokens, see `FindTokenFunctions`.
    """

    recording: Recording
    arguments: dict[str, Any]
    num_rows: int
    num_tokens: int
    dtype: torch.dtype
    mode: Mode
    is_routed: bool
    is_widened: bool
    token_functions: Iterable[str]

    @property
    def description(self) -> str:
        return (
            f"{self.num_rows} rows of {self.num_tokens} pseudo-random tokens" if self.num_tokens else "the given batch"
        )

    def error(self, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
        """Return the largest error of a token's output, or the median error over tokens if `is_routed`."""
        # If the numbers of outputs differ, some are optional: compare the first only.
        num_compared = len(expected) if len(actual) == len(expected) else 1
        errors = [token_errors(*pair) for pair in zip(actual[:num_compared], expected, strict=False)]
        return max(
            (
                float(token_error.median() if self.is_routed else token_error.max())
                for token_error in errors
                if token_error.numel()
            ),
            default=0.0,
        )


class _ShardedRun:
    """Run of the sharded model on the unsharded model's batch. Each method except `first_difference` is collective.

    Attributes:
        error: error of the output; 0.0 on ranks that do not have the output.
        failure: message for the caller if the sharded model fails, else "".
        cause: the exception that it raised, or None.
    """

    def __init__(
        self, unsharded_run: _UnshardedRun, outcome: ShardingOutcome, tp: DeviceMesh | None, cp: DeviceMesh | None
    ) -> None:
        seq_len = unsharded_run.num_tokens or _token_shape(unsharded_run.arguments)[1]
        self._unsharded_run, self._outcome, self._advice = unsharded_run, outcome, advice(tp, cp)
        self._comparison = OutputComparison(unsharded_run.recording, RankShards(tp, cp, seq_len))
        self._run_outputs: list[Tensor] = []
        self.error, self.failure = 0.0, ""
        self.cause: Exception | None = None

    def run(self) -> str:
        """Run the sharded model, and set `error` or `failure`. Return "", or why it does not support the batch."""
        modules = self._outcome.modules
        try:
            with self._comparison.recording_outputs(modules):
                self._run_outputs = self._compute_outputs()
        except FusedTPError:
            raise
        except Exception as error:
            if _is_unsupported_error(error):
                return str(error)
            self.cause = error
            self.failure = (
                f"the sharded {type(modules[0]).__name__} fails on {self._unsharded_run.description}, on which the "
                f"unsharded model runs: {type(error).__name__}: {str(error).rstrip('.')}. {self._advice} Pass "
                "verify=False to skip this check."
            )
        self.error = (
            self._unsharded_run.error(self._run_outputs, self._unsharded_run.recording.outputs[""][0])
            if self._run_outputs
            else 0.0
        )
        return ""

    def rounding_error(self) -> float:
        """Return the error of a run with rounding errors added, compared with the run without them."""
        with ExitStack() as stack:
            for module in self._outcome.modules:
                stack.enter_context(add_rounding_errors(module, self._unsharded_run.dtype))
            return self._unsharded_run.error(self._compute_outputs(), self._run_outputs)

    def first_difference(self, bound: float) -> tuple[str, str] | None:
        """Return (name, class) of the first module whose output error exceeds `bound`, or None."""
        name = first_difference(self._comparison.differences()[0], bound)[0]
        class_names = {
            module_name: type(module).__name__
            for root in self._outcome.modules
            for module_name, module in root.named_modules()
        }
        return (name, class_names[name]) if name else None

    def _compute_outputs(self) -> list[Tensor]:
        modules, unsharded_run = self._outcome.modules, self._unsharded_run
        with (
            preserve_state(modules, unsharded_run.mode),
            in_float32(modules if unsharded_run.is_widened else ()),
        ):
            return output_tensors(self._outcome.run(_copy_to_device(unsharded_run.arguments, modules)))


def _is_unsupported_error(error: Exception) -> bool:
    """True if `error` was raised in `fused_tp.parallelizing`, where such errors name an unsupported argument."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    is_own_error = trace is not None and trace.tb_frame.f_code.co_filename.startswith(str(Path(__file__).parents[1]))
    return is_own_error and isinstance(error, (ValueError, TypeError))


def token_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Return for each token the norm of the difference, relative to the norm of `expected` [..., features]."""
    if actual.shape != expected.shape:
        return torch.tensor([float("inf")], dtype=torch.float64, device="cpu")
    wide_dtype = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = (
        t.detach().to("cpu", wide_dtype).reshape(-1, t.shape[-1] if t.ndim > 1 else 1) for t in (actual, expected)
    )
    difference = torch.where(actual == expected, 0.0, actual - expected).norm(dim=-1)
    sizes = torch.where(expected.isfinite(), expected, 0.0).norm(dim=-1)
    errors = difference / torch.maximum(sizes, 0.1 * sizes.square().mean().sqrt()).clamp_min(1e-12)
    return torch.where(errors.isnan(), float("inf"), errors)


def _run_unsharded(
    model: nn.Module, verify: object, num_rows: int, num_ranks: int, is_pipeline: bool, finds_token_functions: bool
) -> tuple[list[_UnshardedRun], str]:
    """Run the unsharded model. Return (runs, ""), or ([], reason) if it cannot be compared.

    A small 16-bit model runs twice, unless `is_pipeline`: as it is, and in fp32, in which errors exceed rounding.
    """
    class_name, has_batch = type(model).__name__, isinstance(verify, Mapping)
    is_large = sum(p.numel() for p in model.parameters() if p.is_floating_point()) > LARGE_MODEL_PARAMETERS
    num_rows *= 1 if is_large else 2  # one short row keeps the comparison of a large model cheap
    num_tokens = max(4 if is_large else 8, 2 * num_ranks)
    reason = f"no pseudo-random batch for {class_name}.forward is known; pass a batch as verify={{name: tensor}}"
    start = time.monotonic()

    def stop_in_time() -> None:
        if not has_batch and time.monotonic() - start > TIME_LIMIT_SECONDS:
            raise TooLongError

    def run(mode: Mode, batch: dict[str, Any], is_widened: bool) -> _UnshardedRun | None:
        """Return None if the run draws random numbers, or computes in 16 bits although its parameters are fp32."""
        arguments = widen_arguments(batch) if is_widened else batch
        operations = Find16BitResults()
        # The code of transformers' models combines tokens where fused_tp expects it.
        ignored_folders = PACKAGE_FOLDERS if is_transformers_model(model) else ()
        token_functions = FindTokenFunctions(*_token_shape(arguments), ignored_folders)
        with (
            preserve_state([model], mode) as drew_random,
            in_float32([model] if is_widened else ()),
            _fast_linears(model),
            record_outputs(model, stop_in_time) as recording,
            operations if is_widened else nullcontext(),
            token_functions if finds_token_functions else nullcontext(),
        ):
            dtype = least_precise_dtype(model)
            model(**_copy_to_device(arguments, [model]))
        if operations.found_16_bit or (drew_random() and mode is not Mode.EVAL):
            return None
        # Under autocast, modules compute in a less precise dtype than that of the parameters.
        output_dtypes = {t.dtype for t in recording.tensors() if t.is_floating_point()}
        dtype = max({dtype, *output_dtypes}, key=lambda output_dtype: torch.finfo(output_dtype).eps)
        is_routed = dtype.itemsize < 4 and any("expert" in name for name, _ in model.named_modules())
        return _UnshardedRun(
            recording,
            arguments,
            num_rows,
            0 if has_batch else num_tokens,
            dtype,
            mode,
            is_routed,
            is_widened,
            token_functions.calls,
        )

    modes = Mode if model.training and not is_pipeline else (Mode.EVAL,)
    candidates = [dict(verify)] if isinstance(verify, Mapping) else list(candidate_batches(model, num_rows, num_tokens))
    for mode, batch in itertools.product(modes, candidates):
        try:
            unsharded_run = run(mode, batch, is_widened=False)
        except TooLongError:
            return [], f"the unsharded {class_name} takes longer than {TIME_LIMIT_SECONDS:g} s on this processor"
        except Exception as error:
            reason = f"the unsharded {class_name} fails on {[*batch]}: {type(error).__name__}: {error}"
            continue
        if unsharded_run is None:
            continue
        outputs = unsharded_run.recording.outputs[""][0]
        if not outputs:
            return [], f"{class_name}.forward returns no tensors"
        if any(bool(t.isnan().any()) for t in outputs):
            return [], f"the unsharded {class_name} returns NaN"
        widened_run = None
        if not (is_large or is_pipeline) and has_16_bit_parameters(model):
            with suppress(Exception):  # code of the caller may not support fp32
                widened_run = run(mode, batch, is_widened=True)
        return [unsharded_run, *([] if widened_run is None else [widened_run])], ""
    return [], reason


def _token_shape(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return [batch, seq] of the first argument that has at least two dims."""
    return next(((t.shape[0], t.shape[1]) for t in find_tensors(arguments) if t.ndim > 1), (1, 1))


@contextmanager
def _fast_linears(model: nn.Module) -> Iterator[None]:
    """Compute the nn.Linear layers of `model` by the kernels for few rows, up to three times as fast as torch's."""
    is_usable = nn.Linear.forward.__module__ == nn.Linear.__module__  # not replaced by the caller
    layers = [m for m in model.modules() if is_usable and type(m) is nn.Linear and "forward" not in vars(m)]
    for layer in layers:
        vars(layer)["forward"] = partial(_linear_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def _linear_forward(layer: nn.Linear, input: Tensor) -> Tensor:
    # The model's forward may have entered autocast or a torch.func transform, which the kernels do not know.
    if torch.is_autocast_enabled(input.device.type) or torch._C._are_functorch_transforms_active():
        return nn.functional.linear(input, layer.weight, layer.bias)
    return linear(input, layer.weight, layer.bias)


def least_precise_dtype(model: nn.Module) -> torch.dtype:
    """Return the least precise dtype in which `model` computes."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}
    dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    return _MATMUL_PRECISIONS[torch.get_float32_matmul_precision()] if dtype == torch.float32 else dtype


@contextmanager
def add_rounding_errors(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Add a rounding error to the outputs and gradients of the innermost modules, in this context.

    The error is that of `dtype`, or that of the output's dtype if the output is less precise, as under autocast.
    """

    def perturb(t: Tensor) -> Tensor:
        # Tensors of the same shape get the same error, so that replicated values stay equal on all ranks.
        generator = torch.Generator().manual_seed(2)
        eps = max(torch.finfo(dtype).eps, torch.finfo(t.dtype).eps)
        factor = 1 + eps * (torch.rand(t.shape, generator=generator, **_FLOAT_OPTIONS) - 0.5)
        return (t * factor.to(t.device)).to(t.dtype)

    def perturb_output(module: nn.Module, args: object, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point() or not output.ndim:
            return None
        output = perturb(output)
        if output.requires_grad:
            output.register_hook(perturb)
        return output

    innermost_modules = [module for module in model.modules() if not any(True for _ in module.children())]
    handles = [module.register_forward_hook(perturb_output) for module in innermost_modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def candidate_batches(model: nn.Module, num_rows: int, num_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield sets of keyword arguments that `model` may accept, the most likely set first."""
    names = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)

    def random_ids(num_ids: int, excluded: Collection[Any] = ()) -> Tensor:
        allowed_ids = torch.tensor([i for i in range(min(num_ids, 4096)) if i not in excluded] or [0], **_ID_OPTIONS)
        return allowed_ids[torch.randint(len(allowed_ids), (num_rows, num_tokens), generator=generator, **_ID_OPTIONS)]

    def random_numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, **_FLOAT_OPTIONS).to(next(model.parameters()).dtype)

    if is_transformers_model(model):
        config: Any = model.config
        text_config = config.get_text_config(decoder=True)
        token_values = [
            value
            for config_part in (config, text_config)
            for name, value in vars(config_part).items()
            if "token" in name
        ]
        # A config may list several end-of-text tokens.
        special_ids = [i for value in token_values for i in (value if isinstance(value, (list, tuple)) else [value])]
        vocab_size = getattr(text_config, "vocab_size", 0)
        batch: dict[str, Any] = {}
        if "input_ids" in names and vocab_size:
            batch["input_ids"] = random_ids(vocab_size, special_ids)
        if config.is_encoder_decoder and "decoder_input_ids" in names:
            batch["decoder_input_ids"] = random_ids(vocab_size)
        vision_config = getattr(config, "vision_config", config)
        image_size, num_channels = (getattr(vision_config, name, None) for name in ("image_size", "num_channels"))
        needs_pixels = "pixel_values" in names and model.main_input_name == "pixel_values"
        if needs_pixels and isinstance(image_size, int) and isinstance(num_channels, int):
            batch["pixel_values"] = random_numbers(num_rows, num_channels, image_size, image_size)
        if "use_cache" in names:
            batch["use_cache"] = False
        if batch:
            yield batch
        return
    required_names = [
        name
        for name, parameter in names.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    first_name = next(iter(names), "")
    positions = {name: torch.arange(num_tokens, **_ID_OPTIONS) for name in required_names[1:] if "position" in name}
    if not first_name or len(positions) < len(required_names) - 1:
        return
    embeddings = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    if embeddings:
        yield {first_name: random_ids(min(embeddings)), **positions}
    for width in dict.fromkeys(module.in_features for module in model.modules() if isinstance(module, nn.Linear)):
        yield {first_name: random_numbers(num_rows, num_tokens, width), **positions}
        return


def _copy_to_device(arguments: Mapping[str, Any], models: Sequence[nn.Module]) -> dict[str, Any]:
    device = next(p.device for model in models for p in model.parameters())
    # Copy, because models may write into their arguments.
    copies: dict[str, Any] = tree_map(
        lambda t: t.to(device, copy=True) if isinstance(t, Tensor) else t, dict(arguments)
    )
    return copies
