"""Small models, and comparisons of a parallel model with the whole model that it was made from."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from examples.llama import Llama, LlamaConfig
from fused_tp.nn import gather_state_dict
from fused_tp.nn.sharding import packed_dims
from fused_tp.parallelizing.parallelize import parallelize
from fused_tp.parallelizing.state_dict import load_full_state_dict
from tests.integrations.model_families import FAMILIES, OWN_SIZES
from tests.workers import on_ranks

VOCAB = 67  # odd: the ranks' vocabulary shards differ in length
# fp32 throughout. Sums over ranks and attention blocks add in another order than one matmul does; after two layers
# only the last bits differ. Logits are of order 1; gradients are compared relative to the largest element of a tensor.
TOLERANCE = 2e-5

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {  # cp, tp, keywords
    "tp2": (1, 2, {}),
    "tp2_sp": (1, 2, {"sequence_parallel": True}),
    "tp2_lossparallel": (1, 2, {"loss_parallel": True}),
    "tp2_sp_lossparallel": (1, 2, {"sequence_parallel": True, "loss_parallel": True}),
    "cp2": (2, 1, {}),
    "ulysses2": (2, 1, {"ulysses_size": 2}),
    "ring2_ulysses2": (4, 1, {"ulysses_size": 2}),
    "ulysses2_tp2": (2, 2, {"ulysses_size": 2}),
    "cp2_tp2": (2, 2, {}),
    "cp2_tp2_sp": (2, 2, {"sequence_parallel": True}),
    "cp2_tp2_sp_lossparallel": (2, 2, {"sequence_parallel": True, "loss_parallel": True}),
}


def on_layouts(*layouts: str, full: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Make a test of `fn(group, layout, ...)` on the ranks of each layout; layouts in `full` run in `make test-all`."""
    cases = [*layouts, *(pytest.param(name, marks=pytest.mark.full) for name in full)]
    ranks = on_ranks(lambda layout: LAYOUTS[layout][0] * LAYOUTS[layout][1])
    return lambda fn: pytest.mark.parametrize("layout", cases)(ranks(fn))


def pair(group: dist.ProcessGroup, layout: str, family: str = "plain", **changes: Any) -> tuple[Any, Any]:
    """A model from `make`, and a parallel model with the same weights."""
    cp, tp, keywords = LAYOUTS[layout]
    whole = make(family, **changes)
    return whole, parallelize(copy_of(whole), mesh_of(group, cp, tp), **keywords)


def mesh_of(group: dist.ProcessGroup, cp: int, tp: int) -> DeviceMesh:
    """A mesh of cp x tp ranks. A dim of size 1 is left out; with both dims the mesh takes all ranks of the pool."""
    if cp == 1:
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    if tp == 1:
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    return DeviceMesh("cpu", torch.arange(cp * tp).view(cp, tp), mesh_dim_names=("cp", "tp"))


def make(family: str, *, tied: bool = False, **changes: Any) -> Any:
    """A small model with random weights, the same on every rank. Families: plain and FAMILIES."""
    torch.manual_seed(0)
    if family == "plain":
        model: nn.Module = Llama(LlamaConfig(**{**SIZES, "tie_word_embeddings": tied, **changes}))
    else:
        model = _transformers_model(family, tied, changes)
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from their initial values: norms of all ones and biases of zero would hide wrong gradients.
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def _transformers_model(family: str, tied: bool, changes: dict[str, Any]) -> nn.Module:
    import transformers

    name = FAMILIES[family]
    sizes = {**SIZES, "tie_word_embeddings": tied, "head_dim": 8, "attn_implementation": "sdpa"}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if family == "mistral":
        sizes["sliding_window"] = 64  # longer than the tests' sequences
    sizes |= OWN_SIZES.get(family, {})
    kind = getattr(transformers, f"{name}TextConfig" if family.endswith("_text") else f"{name}Config")
    config = kind(**{**sizes, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def make_tokens(batch: int, seq: int) -> Tensor:
    return torch.randint(3, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(1))


def full(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def assert_near(
    actual: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE, *, least: float = 1e-3
) -> None:
    """Bound the largest difference, relative to the largest expected value or to `least`, the larger of the two."""
    actual, expected = full(actual).detach(), full(expected).detach()
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    error = (actual - expected).abs().max().item() / max(expected.abs().max().item(), least)
    assert error <= tolerance, f"{what}: relative error {error:.1e} > {tolerance:.0e}"


def assert_same_gradients(parallel: nn.Module, whole: nn.Module, *, factor: float = 1.0) -> None:
    """Compare every parameter's gradient by name; the parallel ones are expected to be `factor` times as large."""
    expected = dict(whole.named_parameters())
    names = [name for name, _ in parallel.named_parameters()]
    assert names == list(expected), (names, list(expected))
    parts = packed_dims(parallel)
    # Some are zero except for rounding, such as a query's when attention has one key.
    largest = max(full(p.grad).abs().max().item() for p in expected.values() if p.grad is not None)
    for name, parameter in parallel.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found = full(parameter.grad)
        if (dim := parts.get(id(parameter))) is not None:
            found = found.flatten(dim, dim + 1)
        assert_near(found / factor, expected[name].grad, f"gradient of {name}", least=max(1e-3, 1e-3 * largest))


def assert_trains_alike(parallel: nn.Module, whole: nn.Module, loss_of: Callable[[Any], Any]) -> None:
    """Compare the loss, and the gradients after its backward."""
    losses = [loss_of(model) for model in (whole, parallel)]
    assert_near(losses[1], losses[0], "loss")
    for loss in losses:
        loss.backward()
    assert_same_gradients(parallel, whole)


def assert_steps_alike(
    parallel: nn.Module, whole: nn.Module, mesh: DeviceMesh, batches: Sequence[Tensor], clip: float = math.inf
) -> None:
    """Compare all parameters after two steps of SGD, in which each rank of dim "dp" has one of the batches."""
    mine = [batches[mesh["dp"].get_local_rank()]]
    for model, given in ((whole, batches), (parallel, mine)):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            for tokens in given:
                (model(input_ids=tokens, labels=tokens).loss / len(given)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    for name, t in gather_state_dict(parallel).items():
        assert_near(t, whole.state_dict()[name], name)


def assert_equal_states(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Compare names, their order, and the bits of the values."""
    assert list(one) == list(other)
    for name, t in one.items():
        assert torch.equal(t, other[name]), name


def assert_states_travel(group: dist.ProcessGroup, whole: Any, folder: Path) -> None:
    """Gather a parallel model's state, load it into another, and save it: each equals the whole state bit for bit."""
    import transformers

    mesh, state = mesh_of(group, 1, 2), whole.state_dict()
    parallel = parallelize(copy_of(whole), mesh)
    assert_equal_states(gather_state_dict(parallel), state)
    with torch.device("meta"):
        blank = type(whole)(whole.config)
    blank = parallelize(blank, mesh)
    load_full_state_dict(blank, state)
    assert_equal_states(gather_state_dict(blank), state)
    tokens = make_tokens(2, 5)
    with torch.no_grad():
        assert_near(blank(tokens).logits, whole(tokens).logits, "logits of the loaded model")
    alone = folder / "alone"
    whole.save_pretrained(alone)  # global rank 0 writes
    parallel.save_pretrained(folder)
    dist.barrier(group)
    # Not `state`: loading by transformers sets some buffers (Zaya's) to values of its own.
    loaded = [transformers.AutoModelForCausalLM.from_pretrained(one).state_dict() for one in (folder, alone)]
    assert_equal_states(*loaded)


def assert_trains_checkpointed(parallel: Any, whole: Any) -> None:
    """Compare training in which backward recomputes layers after a forward pass of another length."""
    losses = []
    for model in (whole, parallel):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        parts = [model(input_ids=tokens, labels=tokens).loss for tokens in (make_tokens(2, 9), make_tokens(1, 4))]
        losses.append(sum(parts))
        losses[-1].backward()
    assert_near(losses[1], losses[0], "loss")
    assert_same_gradients(parallel, whole)


def assert_same_calls(parallel: nn.Module, whole: nn.Module, tokens: Tensor, labels: Tensor, **more: Any) -> None:
    """Compare logits, loss and every gradient of the same call."""
    with torch.no_grad():
        assert_near(parallel(tokens, **more).logits, whole(tokens, **more).logits, "logits")
    assert_trains_alike(parallel, whole, lambda model: model(tokens, labels=labels, **more).loss)


def copy_of(model: Any) -> Any:
    return copy.deepcopy(model)
