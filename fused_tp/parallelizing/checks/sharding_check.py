"""Compare a sharded model with the whole one: both run on a few pseudo-random tokens, without gradients.

| when | what happens |
|---|---|
| before sharding | constant parameters (norms at 1, biases at 0) get noise, so that their wrong use shows |
| | the whole model runs in its current mode, and the outputs of all its modules are recorded; if it draws random |
| | numbers, which differ on a rank with a part of the tokens, it runs without dropout, or in eval mode instead |
| | the ranks agree whether all have outputs; if not, nothing is compared and a log line gives the reason |
| after sharding | the sharded model runs on the same tokens, in the same mode; ranks exchange its output error |
| | 16-bit models above the bound of their dtype run again with rounding errors added, which may explain the error |
| | the parameters get their constant back |
| | if the error exceeds the bound and rounding does not explain it, all ranks raise and name the first module |

The comparison restores modes, random states, buffers and attributes of the whole model. It does not cover gradients,
caches, or windows longer than its few tokens.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

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

SECONDS = 2.0  # limit for the whole model; the sharded one takes about as long
_LARGE = 32_000_000  # parameters; above that, the batch is one short row, which keeps the comparison cheap
_NOISE = 0.1
_IDS: dict[str, Any] = {"dtype": torch.long, "device": "cpu"}
_NUMBERS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
# Bounds of a token's output error, relative to its norm. Parts of fp64 models compute in fp32.
BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 0.04}
ROUNDING_FACTOR = 4.0  # times the rounding error measured on this model, where the bound by dtype is smaller
LARGEST_BOUND = 0.7  # above that, a wrong output, off by about its own size, would pass
_OF_MATMULS = {"highest": torch.float32, "high": torch.float16, "medium": torch.bfloat16}  # precision of fp32 matmuls


class TooLongError(Exception):
    """The whole model takes longer than `SECONDS`."""


@dataclass
class Compared:
    """The sharded model, and the outcome of `compared`.

    Attributes:
        sharded: owner of the parameters by name: the model itself, or the pipeline built from it.
        modules: modules of this rank, each with names as in the whole model.
        run: takes keyword arguments of forward and returns its output, or None on ranks that do not have it.
        right: True if it computes the same as the whole model; False also if they were not compared.
    """

    sharded: Any
    modules: Sequence[nn.Module]
    run: Callable[[dict[str, Any]], Any]
    right: bool = False


def check_verify(verify: object) -> None:
    """Raise ValueError if `compared` does not accept `verify`."""
    if not (isinstance(verify, (bool, Mapping)) or verify == "auto"):
        raise ValueError(f"verify is {verify!r}; it must be 'auto', True, False or a dict of forward's arguments.")


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
    """Context manager in which the caller shards `model`; on exit the result is compared with the whole model.

    Args:
        verify: see `parallelize`.
        meshes: one-dim meshes whose ranks share the model.
        tp, cp: the meshes among them that shard features and tokens.
        rows: the number of rows of the pseudo-random batch is a multiple of it.

    Raises:
        ValueError: on all ranks: the models differ, or they cannot be compared and `verify` is not "auto".
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
        reason = next(filter(None, of_all_ranks(meshes, "outputs of the whole model", reason)), "")
        if whole is None or reason:
            stack.close()
            _leave_out(verify, reason, meshes)
            yield outcome
            return
        yield outcome
        run = _ShardedRun(whole, outcome, tp, cp)
        refusal = run.run()
        of_dtype = BOUNDS.get(whole.dtype, BOUNDS[torch.bfloat16])
        ranks = of_all_ranks(meshes, "outputs of the sharded model", [run.error, refusal, of_dtype])
        if refusals := [one[1] for one in ranks if one[1]]:
            _leave_out(verify, f"it refuses what the whole model takes: {refusals[0]}", meshes)
            return
        # The maximum over ranks: all take the same decision even if their processors or settings round differently.
        error, bound = (max(one[field] for one in ranks) for field in (0, 2))
        if BOUNDS[torch.float32] < bound < error < float("inf"):
            rounding = max(of_all_ranks(meshes, "rounding errors of the sharded model", run.error_of_rounding()))
            bound = max(bound, ROUNDING_FACTOR * rounding)
        if bound > LARGEST_BOUND:
            kind = type(model).__name__
            _leave_out(verify, f"rounding alone changes outputs of the {kind} by {bound / ROUNDING_FACTOR:.2g}", meshes)
            return
        outcome.right = error <= bound
        first = None if outcome.right else run.first_difference(bound)
        names = [] if outcome.right else of_all_ranks(meshes, "the first module that differs", [run.error, first])
    if not outcome.right:
        first = max(names, key=lambda one: one[0])[1]
        at = "The first module whose output differs is {!r} ({}). ".format(*first) if first else ""
        raise ValueError(
            f"the sharded {type(model).__name__} does not compute what the whole one does: on {whole.shown} its output "
            f"is off by {error:.2g} of its size, of which rounding explains {bound:g}. {at}{advice(tp, cp)} "
            "verify=False leaves this comparison out."
        )


def advice(tp: DeviceMesh | None, cp: DeviceMesh | None) -> str:
    over_cp = (
        "Over context parallel ranks tokens may meet in attention only: transformers' AttentionInterface with a causal "
        "mask and no bias, or F.scaled_dot_product_attention; another forward, hook or function that mixes tokens sees "
        "this rank's."
    )
    over_tp = (
        "Over tensor parallel ranks nothing between two sharded layers may join features or heads (softmax, norm, "
        "chunk, topk), and with sequence_parallel nothing may join tokens: leave such layers out of the plan."
    )
    return " ".join([over_cp] * (cp is not None) + [over_tp] * (tp is not None))


def _leave_out(verify: object, reason: str, meshes: Sequence[DeviceMesh]) -> None:
    if verify != "auto":
        raise ValueError(f"verify={verify if verify is True else 'a batch'}: {reason}.")
    warn_once(
        meshes,
        reason,
        "parallelize does not compare the sharded model with the whole one: %s. `fused-tp check` compares a model of "
        "this kind on CPUs.",
        reason,
    )


def _obstacle(model: nn.Module) -> str:
    """Return the reason why `model` cannot run by itself, or an empty string."""
    for name, t in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(t) or t.is_meta:
            return f"{name!r} has no values yet (meta device)"
    return ""


# -- the whole model ---------------------------------------------------------------------------------------------------


@dataclass
class _Whole:
    """Outputs of the whole model.

    Attributes:
        recording: outputs of all modules; "" is the model.
        arguments: keyword arguments of its forward.
        rows, tokens: rows of a pseudo-random batch, and tokens of each row; `tokens` is 0 for a given batch.
        dtype: dtype in which it computes.
        mode: mode in which both models run.
        routed: routers compute in so few bits that some tokens choose other experts in the sharded model.
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
        """Largest error of a token's output; the median token's error if tokens are `routed`."""
        count = len(expected) if len(found) == len(expected) else 1  # else optional outputs follow the first
        errors = [token_errors(*pair) for pair in zip(found[:count], expected, strict=False)]
        return max((float(one.median() if self.routed else one.max()) for one in errors if one.numel()), default=0.0)


class _ShardedRun:
    """Runs the sharded model on the whole one's batch. All methods but `first_difference` are collective calls.

    Attributes:
        error: error of its output; 0.0 on ranks that do not have the output.
    """

    def __init__(self, whole: _Whole, outcome: Compared, tp: DeviceMesh | None, cp: DeviceMesh | None) -> None:
        tokens = whole.tokens or next((t.shape[1] for t in tensors_in(whole.arguments) if t.ndim > 1), 1)
        self._whole, self._outcome, self._advice = whole, outcome, advice(tp, cp)
        self._comparison = OutputComparison(whole.recording, RankPart(tp, cp, tokens))
        self._found: list[Tensor] = []
        self.error = 0.0

    def run(self) -> str:
        """Run the sharded model. Return its reason for refusing the batch, or an empty string."""
        modules = self._outcome.modules
        try:
            with self._comparison.watching(modules):
                self._found = self._outputs()
        except FusedTPError:
            raise
        except Exception as error:
            if _is_refusal(error):
                return str(error)
            raise ValueError(
                f"the sharded {type(modules[0]).__name__} does not run on {self._whole.shown}, which the whole one "
                f"takes: {type(error).__name__}: {error}. {self._advice} verify=False leaves this comparison out."
            ) from error
        self.error = self._whole.error(self._found, self._whole.recording.outputs[""][0]) if self._found else 0.0
        return ""

    def error_of_rounding(self) -> float:
        """Error of a run with rounding errors added, relative to the run without."""
        with ExitStack() as stack:
            for module in self._outcome.modules:
                stack.enter_context(rounding_errors(module, self._whole.dtype))
            return self._whole.error(self._outputs(), self._found)

    def first_difference(self, bound: float) -> tuple[str, str] | None:
        """(Name, class) of the first module whose output differs by more than `bound`; None if there is none."""
        name = first_difference(self._comparison.differences()[0], bound)[0]
        kinds = {at: type(module).__name__ for one in self._outcome.modules for at, module in one.named_modules()}
        return (name, kinds[name]) if name else None

    def _outputs(self) -> list[Tensor]:
        with undisturbed(self._outcome.modules, self._whole.mode):
            return tensors_in(self._outcome.run(_on_device(self._whole.arguments, self._outcome.modules)))


def _is_refusal(error: Exception) -> bool:
    """True if `error` was raised in `fused_tp.parallelizing`, whose messages address the caller."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    ours = trace is not None and trace.tb_frame.f_code.co_filename.startswith(str(Path(__file__).parents[1]))
    return ours and isinstance(error, (ValueError, TypeError))


def token_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Norm of the difference per token, relative to the norm of the expected output [..., features]."""
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
    """Run the whole model. Return its outputs, or None and the reason."""
    kind, given = type(model).__name__, isinstance(verify, Mapping)
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    dtype = dtype_of(model)
    large = sum(p.numel() for p in parameters) > _LARGE
    rows *= 1 if large else 2
    tokens = max(4 if large else 8, 2 * ranks)
    routed = dtype.itemsize < 4 and any("expert" in name for name, _ in model.named_modules())
    reason = f"no pseudo-random batch for {kind}.forward is known; give one as verify={{name: tensor}}"
    begun = time.monotonic()

    def stop_in_time() -> None:
        if not given and time.monotonic() - begun > SECONDS:
            raise TooLongError

    candidates = [dict(verify)] if isinstance(verify, Mapping) else list(_batches(model, rows, tokens))
    for mode, arguments in itertools.product(Mode if model.training else (Mode.EVAL,), candidates):
        try:
            with undisturbed([model], mode) as drew, recorded(model, stop_in_time) as recording:
                found = tensors_in(model(**_on_device(arguments, [model])))
        except TooLongError:
            return None, f"the whole {kind} takes longer than {SECONDS:g} s on this processor"
        except Exception as error:
            reason = f"the whole {kind} does not run on {[*arguments]}: {type(error).__name__}: {error}"
            continue
        if drew() and mode is not Mode.EVAL:
            continue
        if not found:
            return None, f"{kind}.forward returns no tensors"
        if any(bool(t.isnan().any()) for t in found):
            return None, f"the whole {kind} returns NaN"
        return _Whole(recording, arguments, rows, 0 if given else tokens, dtype, mode, routed), ""
    return None, reason


def dtype_of(model: nn.Module) -> torch.dtype:
    """Dtype with the largest rounding error among those in which `model` computes."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}
    dtype = max(kinds, key=lambda dtype: torch.finfo(dtype).eps)
    return _OF_MATMULS[torch.get_float32_matmul_precision()] if dtype == torch.float32 else dtype


@contextmanager
def rounding_errors(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Context manager: innermost modules add a rounding error of `dtype` to their outputs and gradients."""

    def other(t: Tensor) -> Tensor:
        # The same error for all tensors of a shape, so that replicated values stay equal on all ranks.
        generator = torch.Generator().manual_seed(2)
        off = 1 + torch.finfo(dtype).eps * (torch.rand(t.shape, generator=generator, **_NUMBERS) - 0.5)
        return (t * off.to(t.device)).to(t.dtype)

    def disturb(module: nn.Module, args: object, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point() or not output.ndim:
            return None
        output = other(output)
        if output.requires_grad:
            output.register_hook(other)
        return output

    innermost = [module for module in model.modules() if not any(True for _ in module.children())]
    handles = [module.register_forward_hook(disturb) for module in innermost]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _batches(model: nn.Module, rows: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield keyword arguments that `model` may accept, the likely ones first."""
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
    # Copies, because models write into arguments.
    moved: dict[str, Any] = tree_map(lambda t: t.to(device, copy=True) if isinstance(t, Tensor) else t, dict(arguments))
    return moved


# -- values that show wrong use ----------------------------------------------------------------------------------------


@contextmanager
def _noise(model: nn.Module, outcome: Compared) -> Iterator[None]:
    """Context manager that adds noise to constant parameters, and restores their constant on exit."""
    generator = torch.Generator().manual_seed(1)
    held: dict[str, tuple[nn.Parameter, Tensor]] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            number = _one_number(parameter)
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
                    one.fill_(number.item())  # also the whole parameter, which the caller may hold


def _one_number(parameter: Tensor) -> Tensor | None:
    """The value that all elements of a plain tensor share; None if they differ or there is only one element."""
    plain = type(parameter).__torch_dispatch__ is Tensor.__torch_dispatch__ and parameter.layout == torch.strided
    if not plain or not parameter.is_floating_point() or parameter.numel() < 2 or parameter.is_inference():
        return None
    first = parameter.detach()[(0,) * parameter.ndim]
    edge = parameter.detach()[(0,) * (parameter.ndim - 1)]  # a few elements rule out most tensors
    return first.clone() if bool((edge == first).all()) and bool((parameter == first).all()) else None
