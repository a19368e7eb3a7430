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

The comparison restores modes, random states, buffers and attributes of the unsharded model. It does not cover
gradients, caches, or windows longer than its few tokens.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from fused_tp.parallelizing.checks.batch_check import is_suspended, of_all_ranks
from fused_tp.parallelizing.checks.model_check import warn_once
from fused_tp.parallelizing.checks.module_outputs import (
    OutputComparison,
    RankPart,
    Recording,
    first_difference,
    recorded,
)
from fused_tp.parallelizing.checks.undisturbed import Mode, undisturbed
from fused_tp.parallelizing.hf.hf_model import is_transformers_model
from fused_tp.parallelizing.outputs import tensors_in

SECONDS = 2.0  # time limit for the unsharded model; the sharded one takes about as long
_LARGE = 32_000_000  # models with more parameters get a batch of one short row, which keeps the comparison cheap
_NOISE = 0.1
_IDS: dict[str, Any] = {"dtype": torch.long, "device": "cpu"}
_NUMBERS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
# Bounds of a token's output error, relative to its norm. Loose for fp64, because some modules always compute in fp32.
BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 0.04}
ROUNDING_FACTOR = 4.0  # errors up to this factor times the measured effect of rounding are accepted
LARGEST_BOUND = 0.7  # a wrong output is off by about its own norm, so larger bounds could not detect it
# By torch.get_float32_matmul_precision(): the dtype whose rounding is closest to that of fp32 matmuls.
_MATMUL_PRECISIONS = {"highest": torch.float32, "high": torch.float16, "medium": torch.bfloat16}


class TooLongError(Exception):
    """The unsharded model takes longer than its time limit."""


@dataclass
class Compared:
    """The sharded model, and the outcome of `compared`.

    Attributes:
        sharded: object whose `named_parameters` has the model's names: the model, or the pipeline built from it.
        modules: modules of this rank, whose submodules have the same names as in the unsharded model.
        run: function of the keyword arguments of forward that returns the output, or None on ranks without it.
        right: True if the outputs match those of the unsharded model; False also if they were not compared.
    """

    sharded: Any
    modules: Sequence[nn.Module]
    run: Callable[[dict[str, Any]], Any]
    right: bool = False


def check_verify(verify: object) -> None:
    """Raise ValueError if `compared` does not accept `verify`."""
    if not (isinstance(verify, (bool, Mapping)) or verify == "auto"):
        raise ValueError(f"verify must be 'auto', True, False or a dict of arguments of forward, got {verify!r}.")


@contextmanager
def compared(
    model: nn.Module,
    verify: str | bool | Mapping[str, Any],
    meshes: Sequence[DeviceMesh],
    *,
    tp: DeviceMesh | None,
    cp: DeviceMesh | None,
    rows: int = 1,
) -> Iterator[Compared]:
    """Context manager in which the caller shards `model`; on exit it is compared with the unsharded model.

    Args:
        verify: see `parallelize`.
        meshes: 1-D meshes whose ranks share the model.
        tp, cp: the meshes among them that shard features and tokens.
        rows: the pseudo-random batch has a multiple of this number of rows.

    Raises:
        ValueError: raised on all ranks if the models differ, or cannot be compared and `verify` is not "auto".
    """
    outcome = Compared(model, [model], lambda arguments: model(**arguments))
    if verify is False or not meshes or is_suspended():
        yield outcome
        return
    with ExitStack() as stack:
        reason, whole = _obstacle(model), None
        if not reason:
            stack.enter_context(_noise(model, outcome))
            whole, reason = _run_whole(
                model, verify, rows, (1 if tp is None else tp.size()) * (1 if cp is None else cp.size())
            )
        reason = next(filter(None, of_all_ranks(meshes, "outputs of the unsharded model", reason)), "")
        if whole is None or reason:
            stack.close()
            _skip(verify, reason, meshes)
            yield outcome
            return
        yield outcome
        run = _ShardedRun(whole, outcome, tp, cp)
        refusal = run.run()
        of_dtype = BOUNDS.get(whole.dtype, BOUNDS[torch.bfloat16])
        ranks = of_all_ranks(meshes, "outputs of the sharded model", [run.error, refusal, of_dtype])
        if refusals := [one[1] for one in ranks if one[1]]:
            _skip(verify, f"it does not support a batch that the unsharded model accepts: {refusals[0]}", meshes)
            return
        # Maximum over ranks, so that all decide alike even if their processors or settings round differently.
        error, bound = (max(one[field] for one in ranks) for field in (0, 2))
        if BOUNDS[torch.float32] < bound < error < float("inf"):
            rounding = max(of_all_ranks(meshes, "rounding errors of the sharded model", run.error_of_rounding()))
            bound = max(bound, ROUNDING_FACTOR * rounding)
        if bound > LARGEST_BOUND:
            kind = type(model).__name__
            _skip(verify, f"rounding alone changes outputs of the {kind} by {bound / ROUNDING_FACTOR:.2g}", meshes)
            return
        outcome.right = error <= bound
        first = None if outcome.right else run.first_difference(bound)
        names = [] if outcome.right else of_all_ranks(meshes, "the first module that differs", [run.error, first])
    if not outcome.right:
        first = max(names, key=lambda one: one[0])[1]
        at = "The first module whose output differs is {!r} ({}). ".format(*first) if first else ""
        raise ValueError(
            f"the sharded {type(model).__name__} does not match the unsharded model: on {whole.shown} its relative "
            f"output error is {error:.2g}, above the rounding bound {bound:g}. {at}{advice(tp, cp)} "
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


def _skip(verify: object, reason: str, meshes: Sequence[DeviceMesh]) -> None:
    if verify != "auto":
        raise ValueError(f"verify={verify if verify is True else 'a batch'}: {reason}.")
    warn_once(
        meshes,
        reason,
        "parallelize did not compare the sharded model with the unsharded one: %s. Use `fused-tp check` to compare a "
        "small model of this kind on CPUs.",
        reason,
    )


def _obstacle(model: nn.Module) -> str:
    """Return the reason why `model` cannot run by itself, or an empty string."""
    for name, t in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(t) or t.is_meta:
            return f"{name!r} has no values yet (meta device)"
    return ""


# -- the unsharded model -----------------------------------------------------------------------------------------------


@dataclass
class _Whole:
    """Outputs of the unsharded model.

    Attributes:
        recording: outputs of all modules; the model's own name is "".
        arguments: keyword arguments of its forward.
        rows, tokens: rows of a pseudo-random batch, and tokens of each row; `tokens` is 0 for the caller's batch.
        dtype: dtype in which it computes.
        mode: mode in which both models run.
        routed: True if it routes tokens to experts in 16 bits, so that rounding may change the experts of some tokens.
    """

    recording: Recording
    arguments: dict[str, Any]
    rows: int
    tokens: int
    dtype: torch.dtype
    mode: Mode
    routed: bool

    @property
    def shown(self) -> str:
        return f"{self.rows} rows of {self.tokens} pseudo-random tokens" if self.tokens else "the given batch"

    def error(self, found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
        """Return the largest error of a token's output, or the median error over tokens if they are `routed`."""
        # If the numbers of outputs differ, some are optional: compare the first only.
        count = len(expected) if len(found) == len(expected) else 1
        errors = [token_errors(*pair) for pair in zip(found[:count], expected, strict=False)]
        return max((float(one.median() if self.routed else one.max()) for one in errors if one.numel()), default=0.0)


class _ShardedRun:
    """Run of the sharded model on the unsharded model's batch. Each method except `first_difference` is collective.

    Attributes:
        error: error of the output; 0.0 on ranks that do not have the output.
    """

    def __init__(self, whole: _Whole, outcome: Compared, tp: DeviceMesh | None, cp: DeviceMesh | None) -> None:
        tokens = whole.tokens or next((t.shape[1] for t in tensors_in(whole.arguments) if t.ndim > 1), 1)
        self._whole, self._outcome, self._advice = whole, outcome, advice(tp, cp)
        self._comparison = OutputComparison(whole.recording, RankPart(tp, cp, tokens))
        self._found: list[Tensor] = []
        self.error = 0.0

    def run(self) -> str:
        """Run the sharded model. Return "", or the reason why it does not support the batch."""
        modules = self._outcome.modules
        try:
            with self._comparison.watching(modules):
                self._found = self._outputs()
        except FusedTPError:
            raise
        except Exception as error:
            if _says_unsupported(error):
                return str(error)
            raise ValueError(
                f"the sharded {type(modules[0]).__name__} fails on {self._whole.shown}, on which the unsharded model "
                f"runs: {type(error).__name__}: {error}. {self._advice} Pass verify=False to skip this check."
            ) from error
        self.error = self._whole.error(self._found, self._whole.recording.outputs[""][0]) if self._found else 0.0
        return ""

    def error_of_rounding(self) -> float:
        """Return the error of a run with rounding errors added, compared with the run without them."""
        with ExitStack() as stack:
            for module in self._outcome.modules:
                stack.enter_context(rounding_errors(module, self._whole.dtype))
            return self._whole.error(self._outputs(), self._found)

    def first_difference(self, bound: float) -> tuple[str, str] | None:
        """Return (name, class) of the first module whose output error exceeds `bound`, or None."""
        name = first_difference(self._comparison.differences()[0], bound)[0]
        kinds = {at: type(module).__name__ for one in self._outcome.modules for at, module in one.named_modules()}
        return (name, kinds[name]) if name else None

    def _outputs(self) -> list[Tensor]:
        with undisturbed(self._outcome.modules, self._whole.mode):
            return tensors_in(self._outcome.run(_on_device(self._whole.arguments, self._outcome.modules)))


def _says_unsupported(error: Exception) -> bool:
    """True if `error` was raised in `fused_tp.parallelizing`, where such errors name an unsupported argument."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    ours = trace is not None and trace.tb_frame.f_code.co_filename.startswith(str(Path(__file__).parents[1]))
    return ours and isinstance(error, (ValueError, TypeError))


def token_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Return for each token the norm of the difference, relative to the norm of `expected` [..., features]."""
    if found.shape != expected.shape:
        return torch.tensor([float("inf")], dtype=torch.float64, device="cpu")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = (
        t.detach().to("cpu", wide).reshape(-1, t.shape[-1] if t.ndim > 1 else 1) for t in (found, expected)
    )
    difference = torch.where(found == expected, 0.0, found - expected).norm(dim=-1)
    sizes = torch.where(expected.isfinite(), expected, 0.0).norm(dim=-1)
    errors = difference / torch.maximum(sizes, 0.1 * sizes.square().mean().sqrt()).clamp_min(1e-12)
    return torch.where(errors.isnan(), float("inf"), errors)


def _run_whole(model: nn.Module, verify: object, rows: int, ranks: int) -> tuple[_Whole | None, str]:
    """Run the unsharded model. Return (outputs, ""), or (None, reason) if it cannot be compared."""
    kind, given = type(model).__name__, isinstance(verify, Mapping)
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    dtype = dtype_of(model)
    large = sum(p.numel() for p in parameters) > _LARGE
    rows *= 1 if large else 2
    tokens = max(4 if large else 8, 2 * ranks)
    routed = dtype.itemsize < 4 and any("expert" in name for name, _ in model.named_modules())
    reason = f"no pseudo-random batch for {kind}.forward is known; pass a batch as verify={{name: tensor}}"
    begun = time.monotonic()

    def stop_in_time() -> None:
        if not given and time.monotonic() - begun > SECONDS:
            raise TooLongError

    candidates = [dict(verify)] if isinstance(verify, Mapping) else list(_batches(model, rows, tokens))
    for mode, arguments in itertools.product(Mode if model.training else (Mode.EVAL,), candidates):
        try:
            with undisturbed([model], mode) as drew, _fast_linears(model), recorded(model, stop_in_time) as recording:
                found = tensors_in(model(**_on_device(arguments, [model])))
        except TooLongError:
            return None, f"the unsharded {kind} takes longer than {SECONDS:g} s on this processor"
        except Exception as error:
            reason = f"the unsharded {kind} fails on {[*arguments]}: {type(error).__name__}: {error}"
            continue
        if drew() and mode is not Mode.EVAL:
            continue
        if not found:
            return None, f"{kind}.forward returns no tensors"
        if any(bool(t.isnan().any()) for t in found):
            return None, f"the unsharded {kind} returns NaN"
        return _Whole(recording, arguments, rows, 0 if given else tokens, dtype, mode, routed), ""
    return None, reason


@contextmanager
def _fast_linears(model: nn.Module) -> Iterator[None]:
    """Compute the nn.Linear layers of `model` by the kernels for few rows, up to three times as fast as torch's."""
    # The kernels know neither a forward that the caller has replaced nor autocast.
    usable = nn.Linear.forward.__module__ == nn.Linear.__module__ and not torch.is_autocast_enabled("cpu")
    layers = [m for m in model.modules() if usable and type(m) is nn.Linear and "forward" not in vars(m)]
    for layer in layers:
        vars(layer)["forward"] = partial(_linear_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def _linear_forward(layer: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, layer.weight, layer.bias)


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the least precise dtype in which `model` computes."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}
    dtype = max(kinds, key=lambda dtype: torch.finfo(dtype).eps)
    return _MATMUL_PRECISIONS[torch.get_float32_matmul_precision()] if dtype == torch.float32 else dtype


@contextmanager
def rounding_errors(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Add a rounding error of `dtype` to the outputs and gradients of the innermost modules, in this context."""

    def perturbed(t: Tensor) -> Tensor:
        # Tensors of the same shape get the same error, so that replicated values stay equal on all ranks.
        generator = torch.Generator().manual_seed(2)
        off = 1 + torch.finfo(dtype).eps * (torch.rand(t.shape, generator=generator, **_NUMBERS) - 0.5)
        return (t * off.to(t.device)).to(t.dtype)

    def disturb(module: nn.Module, args: object, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point() or not output.ndim:
            return None
        output = perturbed(output)
        if output.requires_grad:
            output.register_hook(perturbed)
        return output

    innermost = [module for module in model.modules() if not any(True for _ in module.children())]
    handles = [module.register_forward_hook(disturb) for module in innermost]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _batches(model: nn.Module, rows: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield sets of keyword arguments that `model` may accept, the most likely set first."""
    names = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)

    def ids(count: int, without: Collection[Any] = ()) -> Tensor:
        usual = torch.tensor([i for i in range(min(count, 4096)) if i not in without] or [0], **_IDS)
        return usual[torch.randint(len(usual), (rows, tokens), generator=generator, **_IDS)]

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, **_NUMBERS).to(next(model.parameters()).dtype)

    if is_transformers_model(model):
        config: Any = model.config
        text = config.get_text_config(decoder=True)
        named = [value for one in (config, text) for name, value in vars(one).items() if "token" in name]
        # A config may list several end-of-text tokens.
        special = [i for value in named for i in (value if isinstance(value, (list, tuple)) else [value])]
        vocabulary = getattr(text, "vocab_size", 0)
        batch: dict[str, Any] = {}
        if "input_ids" in names and vocabulary:
            batch["input_ids"] = ids(vocabulary, special)
        if config.is_encoder_decoder and "decoder_input_ids" in names:
            batch["decoder_input_ids"] = ids(vocabulary)
        vision = getattr(config, "vision_config", config)
        size, channels = (getattr(vision, name, None) for name in ("image_size", "num_channels"))
        needs_pixels = "pixel_values" in names and model.main_input_name == "pixel_values"
        if needs_pixels and isinstance(size, int) and isinstance(channels, int):
            batch["pixel_values"] = numbers(rows, channels, size, size)
        if "use_cache" in names:
            batch["use_cache"] = False
        if batch:
            yield batch
        return
    required = [
        name
        for name, one in names.items()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    first = next(iter(names), "")
    others = {name: torch.arange(tokens, **_IDS) for name in required[1:] if "position" in name}
    if not first or len(others) < len(required) - 1:
        return
    embeddings = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    if embeddings:
        yield {first: ids(min(embeddings)), **others}
    for width in dict.fromkeys(module.in_features for module in model.modules() if isinstance(module, nn.Linear)):
        yield {first: numbers(rows, tokens, width), **others}
        return


def _on_device(arguments: Mapping[str, Any], models: Sequence[nn.Module]) -> dict[str, Any]:
    device = next(p.device for model in models for p in model.parameters())
    # Copy, because models may write into their arguments.
    moved: dict[str, Any] = tree_map(lambda t: t.to(device, copy=True) if isinstance(t, Tensor) else t, dict(arguments))
    return moved


# -- noise on constant parameters --------------------------------------------------------------------------------------


@contextmanager
def _noise(model: nn.Module, outcome: Compared) -> Iterator[None]:
    """Add noise to constant parameters, and restore their constant on exit."""
    generator = torch.Generator().manual_seed(1)
    held: dict[str, tuple[nn.Parameter, Tensor]] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            number = _constant_of(parameter)
            if number is not None:
                held[name] = parameter, number
                noise = torch.randn(parameter.shape, generator=generator, **_NUMBERS) * _NOISE
                parameter.add_(noise.to(parameter.device, parameter.dtype))
    try:
        yield
    finally:
        sharded = dict(outcome.sharded.named_parameters())
        with torch.no_grad():
            for name, (parameter, number) in held.items():
                for one in {id(one): one for one in (parameter, sharded.get(name)) if one is not None}.values():
                    one.fill_(number.item())  # also in the unsharded parameter, which the caller may still use


def _constant_of(parameter: Tensor) -> Tensor | None:
    """Return the value that all elements share; None if they differ, or if there is only one element."""
    plain = type(parameter).__torch_dispatch__ is Tensor.__torch_dispatch__ and parameter.layout == torch.strided
    if not plain or not parameter.is_floating_point() or parameter.numel() < 2 or parameter.is_inference():
        return None
    first = parameter.detach()[(0,) * parameter.ndim]
    edge = parameter.detach()[(0,) * (parameter.ndim - 1)]  # compared first, because one row rules out most tensors
    return first.clone() if bool((edge == first).all()) and bool((parameter == first).all()) else None
