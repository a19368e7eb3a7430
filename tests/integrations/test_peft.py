"""LoRA adapters of PEFT on parallel models: added before `parallelize` or after it, trained, saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fused_tp.core.errors import RankMismatchError
from fused_tp.nn import gather_state_dict
from fused_tp.nn.linear import RepeatedColumnLinear
from fused_tp.nn.sharding import packed_dims
from fused_tp.parallelizing.parallelize import parallelize
from fused_tp.parallelizing.state_dict import load_full_state_dict
from tests.integrations.models import (
    LAYOUTS,
    assert_equal_states,
    assert_near,
    assert_steps_alike,
    full,
    make,
    make_tokens,
    mesh_of,
    on_layouts,
)
from tests.integrations.sweep import make_model
from tests.reference import refuses
from tests.tiers import quick
from tests.workers import on_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")
peft = pytest.importorskip("peft", reason="peft is not installed; pip install peft")

from fused_tp.parallelizing.peft import ParallelLoraLinear, parallel_config, save_pretrained  # noqa: E402

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LLAMA = {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "llama": (lambda: make("llama"), LLAMA),
    "head": (
        lambda: make("llama"),
        {"target_modules": ["q_proj", "o_proj", "lm_head"], "use_rslora": True},
    ),
    "saved": (
        lambda: make("llama"),
        {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm", "k_proj"]},
    ),
    "biases": (lambda: make("qwen2"), {"target_modules": ATTENTION[:3], "lora_bias": True, "bias": "all"}),
    "one_kv_head": (lambda: make("llama", num_key_value_heads=1), LLAMA),
    "phi3": (lambda: make_model("phi3"), {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "glm4": (lambda: make_model("glm4"), {"target_modules": [*ATTENTION, "gate_up_proj", "down_proj"]}),
    "mixtral": (lambda: make("mixtral"), {"target_modules": ATTENTION}),
    "shared_expert": (  # it receives the tokens of all rows in one dim
        lambda: make_model("laguna"),
        {"target_modules": [f"shared_experts.{name}_proj" for name in ("gate", "up", "down")]},
    ),
    # In float64, because gradients ahead of the norm of the latent are differences: fp32 rounds them by 2e-4.
    "minicpm3": (
        lambda: make_model("minicpm3").double(),
        {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
    ),
    "kimi_linear": (  # latent attention, and delta attention
        lambda: make_model("kimi_linear", torch.float64),
        {"target_modules": [*ATTENTION, "kv_b_proj", "b_proj", "f_a_proj", "f_b_proj", "g_b_proj"]},
    ),
    "bloom": (  # its code reads two of these weights itself, under an option that is off
        lambda: make_model("bloom"),
        {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]},
    ),
}


def adapted(case: str, **more: Any) -> Any:
    """The PEFT model of a case, with adapters that change its output."""
    model = peft.get_peft_model(CASES[case][0](), config_of(case, **more))
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def config_of(case: str, **more: Any) -> Any:
    return peft.LoraConfig(**{"r": 3, "lora_alpha": 5, "task_type": "CAUSAL_LM", **CASES[case][1], **more})


def cut(model: Any, group: dist.ProcessGroup, layout: str) -> Any:
    cp, tp, keywords = LAYOUTS[layout]
    return parallelize(model, mesh_of(group, cp, tp), **keywords)


def assert_trains_alike(parallel: Any, whole: Any, tokens: Tensor) -> None:
    """Compare the loss, the logits, and the gradients of all trained parameters."""
    with torch.no_grad():
        assert_near(parallel(input_ids=tokens).logits, whole(input_ids=tokens).logits, "logits")
    losses = []
    for model in (parallel, whole):
        model.zero_grad()
        if tokens.shape[1] > 1:
            losses.append(model(input_ids=tokens, labels=tokens).loss)
        else:  # a single token has no target
            losses.append(model(input_ids=tokens).logits.square().mean())
        losses[-1].backward()
    assert_near(*losses, "loss")
    assert_same_gradients(parallel, whole)


def assert_same_gradients(parallel: Any, whole: Any) -> None:
    """Compare gradients of all trained parameters; no other parameter may have one."""
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    found = {name: p for name, p in parallel.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys() == {n for n, p in whole.named_parameters() if p.requires_grad}
    parts = packed_dims(parallel)
    for name, parameter in found.items():
        gradient = full(parameter.grad)
        if (dim := parts.get(id(parameter))) is not None:
            gradient = gradient.flatten(dim, dim + 1)
        assert_near(gradient, expected[name], f"gradient of {name}", 1e-4)


def assert_cut(parallel: Any) -> None:
    """Check that one of the two matrices of every adapter in attention is sharded, as its base layer is.

    Unless neighboring ranks compute the same head of keys and values: then all hold them.
    """
    for name, module in parallel.named_modules():
        if isinstance(module, ParallelLoraLinear) and ".self_attn." in name and "_a_proj" not in name:
            if isinstance(module.base_layer, RepeatedColumnLinear):
                assert isinstance(module.lora_B.default, RepeatedColumnLinear), name
                continue
            dims = [p.placements[0].is_shard() for p in (module.lora_A.default.weight, module.lora_B.default.weight)]
            assert dims == ([True, False] if name.endswith("o_proj") else [False, True]), name
            base = module.base_layer.weight
            assert base.to_local().numel() * 2 == base.numel() and not base.requires_grad


FULL = ("tp2_lossparallel", "tp2_sp_lossparallel", "cp2", "cp2_tp2_sp", "cp2_tp2_sp_lossparallel")


@on_layouts("tp2", "tp2_sp", "cp2_tp2", full=FULL)
@pytest.mark.parametrize("case", quick(CASES, "llama", "head", "saved", "one_kv_head", "phi3", "shared_expert"))
def test_adapters_from_before(group: dist.ProcessGroup, layout: str, case: str) -> None:
    whole = adapted(case)
    parallel = cut(copy.deepcopy(whole), group, layout)
    if LAYOUTS[layout][1] > 1 and case != "saved":
        assert_cut(parallel)
    for length in (9, 8, 1):
        assert_trains_alike(parallel, whole, make_tokens(2, length))


@on_layouts("tp2_sp", full=["tp2", "tp2_sp_lossparallel", "cp2", "cp2_tp2"])
@pytest.mark.parametrize("case", quick(["llama", "head", "biases", "minicpm3"], "llama", "head"))
def test_adapters_from_after(group: dist.ProcessGroup, layout: str, case: str, tmp_path: Path) -> None:
    """Load adapters saved by a model on one rank, and add new ones; both models train and save alike."""
    whole = adapted(case)
    if dist.get_rank(group) == 0:
        whole.save_pretrained(tmp_path / "whole")
    dist.barrier(group)
    parallel = cut(CASES[case][0](), group, layout)
    config = parallel_config(parallel, peft.LoraConfig.from_pretrained(tmp_path / "whole"))
    parallel = peft.PeftModel.from_pretrained(parallel, tmp_path / "whole", config=config, is_trainable=True)
    if CASES[case][1].get("bias"):  # PEFT saves biases, and trains them only where it creates adapters
        for model, other in ((parallel, whole), (whole, whole)):
            for name, p in model.named_parameters():
                p.requires_grad_(dict(other.named_parameters())[name].requires_grad)
    for length in (9, 1):
        assert_trains_alike(parallel, whole, make_tokens(2, length))
    save_pretrained(parallel, tmp_path / "parallel")
    dist.barrier(group)
    assert_same_files(tmp_path / "parallel", tmp_path / "whole")
    if "bias" in CASES[case][1]:
        return  # PEFT allows no second adapter then
    made = []
    for model in (parallel, whole):
        torch.manual_seed(4)
        config = config_of(case, r=2, target_modules="all-linear")
        model.add_adapter("other", parallel_config(model, config) if model is parallel else config)
        model.set_adapter("other")
        made.append(gather_state_dict(model))
        assert_trains_alike(parallel, whole, make_tokens(2, 7)) if model is whole else None
    assert_equal_states(*made)


@on_ranks(3)
@pytest.mark.parametrize("sequence_parallel", [True, pytest.param(False, marks=pytest.mark.full)])
def test_adapters_over_three_ranks(group: dist.ProcessGroup, sequence_parallel: bool, tmp_path: Path) -> None:
    """Shard the 44 features between gate and down unevenly over three ranks."""
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 44}
    whole = peft.get_peft_model(make("llama", **sizes), config_of("llama", init_lora_weights=False))
    parallel = copy.deepcopy(whole)
    parallel = parallelize(parallel, mesh_of(group, 1, 3), sequence_parallel=sequence_parallel)
    for length in (7, 2, 1):
        assert_trains_alike(parallel, whole, make_tokens(2, length))
    assert_saves_alike(parallel, whole, tmp_path, group)
    parallel.load_adapter(tmp_path / "whole", "again")
    parallel.set_adapter("again")
    whole, parallel = whole.merge_and_unload(), parallel.merge_and_unload()
    for name, t in gather_state_dict(parallel).items():
        assert_near(t, whole.state_dict()[name], name)


def assert_saves_alike(parallel: Any, whole: Any, folder: Path, group: dist.ProcessGroup) -> None:
    parallel.save_pretrained(folder / "parallel")
    if dist.get_rank(group) == 0:
        whole.save_pretrained(folder / "whole")
    dist.barrier(group)
    assert_same_files(folder / "parallel", folder / "whole")


def assert_same_files(one: Path, other: Path) -> None:
    assert (one / "adapter_model.safetensors").read_bytes() == (other / "adapter_model.safetensors").read_bytes()
    configs = [peft.LoraConfig.from_pretrained(folder).to_dict() for folder in (one, other)]
    assert configs[0] == configs[1]  # a set of target_modules is written in any order


@on_layouts("tp2_sp", full=["tp2", "cp2_tp2"])
@pytest.mark.parametrize("case", quick(["llama", "saved", "phi3", "head"], "llama", "saved"))
def test_adapters_are_saved_switched_and_merged(
    group: dist.ProcessGroup, layout: str, case: str, tmp_path: Path
) -> None:
    whole, tokens = adapted(case), make_tokens(2, 9)
    parallel = cut(copy.deepcopy(whole), group, layout)
    assert_saves_alike(parallel, whole, tmp_path, group)
    assert_equal_states(gather_state_dict(parallel), whole.state_dict())

    for model in (whole, parallel):
        model.eval()
    assert_trains_alike(copy.deepcopy(parallel), whole, tokens)

    def assert_same() -> None:
        with torch.no_grad():
            assert_near(parallel(input_ids=tokens).logits, whole(input_ids=tokens).logits, "logits")

    with whole.disable_adapter(), parallel.disable_adapter():
        assert_same()
    if case != "saved":
        for model in (whole, parallel):
            model.load_adapter(tmp_path / "whole", "again")
            model.set_adapter("again")
        assert_same()
        assert_equal_states(gather_state_dict(parallel), whole.state_dict())
        for model in (whole, parallel):
            model.base_model.set_adapter(["default", "again"])
        assert_same()
        with torch.no_grad():
            for model in (whole, parallel):
                model.set_adapter("default")
            mixed: dict[str, Any] = {"input_ids": tokens, "adapter_names": ["again", "__base__"]}
            assert_near(parallel(**mixed).logits, whole(**mixed).logits, "logits")
        for model in (whole, parallel):
            model.delete_adapter("again")
    made = [model.generate(input_ids=tokens, max_new_tokens=4, do_sample=False) for model in (whole, parallel)]
    assert torch.equal(*made)
    for model in (whole, parallel):
        model.merge_adapter()
    assert_same()
    for model in (whole, parallel):
        model.unmerge_adapter()
    assert_same()
    whole, parallel = whole.merge_and_unload(), parallel.merge_and_unload()
    assert type(parallel) is type(whole)
    assert_same()
    for model in (whole, parallel):
        model.requires_grad_(True)
    assert_trains_alike(parallel, whole, tokens)
    for name, t in gather_state_dict(parallel).items():
        assert_near(t, whole.state_dict()[name], name)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, r"DoraLinearVariant.*supports LoRA on nn.Linear only"),
    "embedding": ({"target_modules": ["embed_tokens"]}, r"'model.embed_tokens' in a peft.tuners.lora.layer.Embedding"),
    "tokens": ({"trainable_token_indices": [1]}, r"'model.embed_tokens' .*TrainableTokensWrapper"),
    "block": ({"modules_to_save": ["mlp"]}, r"'model.layers.0.mlp' .* without submodules"),
}


@on_ranks(2)
def test_what_is_not_served_is_refused_before_anything_is_changed(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group, 1, 2)
    for keywords, says in REFUSED.values():
        unchanged(lambda kw=keywords: adapted("llama", **kw), says, mesh)
    experts = {"target_modules": None, "target_parameters": ["mlp.experts.down_proj"]}
    unchanged(lambda: adapted("mixtral", **experts), r"'model.layers.0.mlp.experts' in a .*ParamWrapper", mesh)
    loha = peft.LoHaConfig(target_modules=["q_proj"])
    unchanged(lambda: peft.get_peft_model(make("llama"), loha), "has the type LOHA", mesh)
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    unchanged(lambda: peft.get_peft_model(make("llama"), prompt), "has the type PROMPT_TUNING", mesh)

    def added() -> Any:
        model = make("llama")
        peft.inject_adapter_in_model(loha, model)
        return model

    unchanged(added, "'model.layers.0.self_attn.q_proj' in a peft.tuners.loha.layer.Linear", mesh)

    def hooked() -> Any:
        model = adapted("llama")
        next(p for p in model.parameters() if p.requires_grad).register_hook(torch.neg)
        return model

    unchanged(hooked, r"q_proj.lora_A.default.weight' has gradient hooks", mesh)


def unchanged(make_one: Callable[[], Any], says: str, mesh: Any) -> None:
    model = make_one()
    before = {name: (type(module), id(module)) for name, module in model.named_modules()}
    state = model.state_dict()
    refuses(ValueError, says, parallelize, model, mesh, sequence_parallel=True)
    assert before == {name: (type(module), id(module)) for name, module in model.named_modules()}
    assert_equal_states(model.state_dict(), state)


@on_ranks(2)
def test_adapters_on_a_parallel_model_that_are_not_served(group: dist.ProcessGroup) -> None:
    model = parallelize(make("llama"), mesh_of(group, 1, 2), sequence_parallel=True)
    for keywords, says in (
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*before parallelize"),
        ({"init_lora_weights": "pissa"}, "'pissa', which reads full weights"),
    ):
        refuses(ValueError, says, parallel_config, model, config_of("llama", **keywords))
    refuses(TypeError, "is not parallel", parallel_config, make("llama"), config_of("llama"))
    # Without parallel_config PEFT creates whole adapters, for sharded layers and for others.
    wrapped = peft.get_peft_model(model, config_of("llama"))
    refuses(ValueError, "was added to the model after parallelize", wrapped, input_ids=make_tokens(1, 4))
    model = parallelize(make("deepseek_v3"), mesh_of(group, 1, 2), sequence_parallel=True)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_a_proj"]))
    refuses(ValueError, "was added to the model after parallelize", wrapped, input_ids=make_tokens(1, 4))
    # Adapters that differ between ranks.
    model = parallelize(make("llama"), mesh_of(group, 1, 2))
    torch.manual_seed(dist.get_rank(group))
    config = parallel_config(model, config_of("llama"))
    refuses(RankMismatchError, "built different models", peft.get_peft_model, model, config)


@on_ranks(2)
def test_adapters_train_in_bfloat16_and_checkpointed(group: dist.ProcessGroup) -> None:
    """Adapters in float32 on weights in bfloat16; backward recomputes the layers."""
    whole, tokens = peft.get_peft_model(make("llama").bfloat16(), config_of("llama")), make_tokens(2, 9)
    assert next(p for p in whole.parameters() if p.requires_grad).dtype == torch.float32
    after = parallelize(make("llama").bfloat16(), mesh_of(group, 1, 2), sequence_parallel=True)
    torch.manual_seed(3)
    after = peft.get_peft_model(after, parallel_config(after, config_of("llama")))
    load_full_state_dict(after, whole.state_dict())
    before = parallelize(copy.deepcopy(whole), mesh_of(group, 1, 2), sequence_parallel=True)
    losses = []
    for model in (whole, before, after):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for _ in range(3):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss)
    assert_near(losses[1], losses[0], "loss", 1e-2)
    assert torch.equal(losses[1], losses[2])


@on_ranks(2)
def test_dropout_of_what_all_ranks_hold(group: dist.ProcessGroup) -> None:
    """Ranks with equal random states drop the same elements as the whole model."""
    whole, tokens = (
        adapted("llama", target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.3),
        make_tokens(2, 9),
    )
    parallel = parallelize(copy.deepcopy(whole), mesh_of(group, 1, 2))
    losses = []
    for model in (parallel, whole):
        torch.manual_seed(5)
        losses.append(model.train()(input_ids=tokens, labels=tokens).loss)
        losses[-1].backward()
    assert_near(*losses, "loss")
    assert_same_gradients(parallel, whole)


@on_ranks(2)
def test_adapters_that_transformers_has_added(group: dist.ProcessGroup, tmp_path: Path) -> None:
    whole = make("llama")
    whole.add_adapter(config_of("llama", init_lora_weights=False))
    parallel = parallelize(copy.deepcopy(whole), mesh_of(group, 1, 2), sequence_parallel=True)
    assert_trains_alike(parallel, whole, make_tokens(2, 9))
    assert_saves_alike(parallel, whole, tmp_path, group)


@pytest.mark.full
@on_ranks(4)
def test_fsdp_over_adapters(group: dist.ProcessGroup) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    whole, batches = adapted("llama"), [make_tokens(2, 9), make_tokens(2, 9).flip(1)]
    parallel = parallelize(copy.deepcopy(whole), mesh, sequence_parallel=True)
    for layer in parallel.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(parallel.get_base_model(), mesh=mesh["dp"])
    assert_steps_alike(parallel, whole, mesh, batches, clip=1.0)


@on_ranks(2)
def test_adapters_on_a_model_from_the_meta_device(group: dist.ProcessGroup, tmp_path: Path) -> None:
    whole = adapted("llama")
    if dist.get_rank(group) == 0:
        whole.save_pretrained(tmp_path)
    dist.barrier(group)
    with torch.device("meta"):
        model = type(whole.get_base_model())(whole.config)
    parallelize(model, mesh_of(group, 1, 2), sequence_parallel=True)
    load_full_state_dict(model, make("llama").state_dict())
    config = parallel_config(model, peft.LoraConfig.from_pretrained(tmp_path))
    load = partial(peft.PeftModel.from_pretrained, model, tmp_path, config=config, is_trainable=True)
    refuses(ValueError, "Omit low_cpu_mem_usage", load, low_cpu_mem_usage=True)
    parallel = load()
    assert_trains_alike(parallel, whole, make_tokens(2, 9))


@pytest.mark.full
@on_ranks(2)
def test_plain_models_and_compiled_ones(group: dist.ProcessGroup, tmp_path: Path) -> None:
    torch._dynamo.reset()
    whole = peft.get_peft_model(make("plain"), peft.LoraConfig(init_lora_weights=False, **LLAMA))
    parallel = parallelize(copy.deepcopy(whole), mesh_of(group, 1, 2), sequence_parallel=True)
    compiled = parallelize(copy.deepcopy(whole), mesh_of(group, 1, 2), sequence_parallel=True)
    tokens = make_tokens(2, 9)
    for model, call in ((whole, whole), (parallel, parallel), (compiled, torch.compile(compiled, backend="aot_eager"))):
        loss = call(tokens, labels=tokens)
        (loss if isinstance(loss, Tensor) else loss.loss).backward()
        assert_same_gradients(model, whole)
    assert_saves_alike(parallel, whole, tmp_path, group)


class Direct(torch.nn.Module):
    """A layer with a linear layer for whole sequences as its direct child."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x)


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11)
        self.layers = torch.nn.ModuleList([Direct()])

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.head(self.layers[0](self.embed(tokens)))


@on_ranks(2)
def test_an_adapter_on_a_block_of_whole_sequences_is_refused(group: dist.ProcessGroup) -> None:
    plan = {"layers.*.up": "rowwise_split_input", "head": "colwise_gather_output"}
    how: dict[str, Any] = {"plan": plan, "sequence_parallel": True}
    config = peft.LoraConfig(target_modules=["up"])
    model = peft.get_peft_model(Stack(), config)
    refuses(
        ValueError, r"'layers.0.up', which runs on the full sequence", parallelize, model, mesh_of(group, 1, 2), **how
    )
    after = parallelize(Stack(), mesh_of(group, 1, 2), **how)
    config = parallel_config(after, peft.LoraConfig(target_modules=["up"]))
    refuses(ValueError, r"'layers.0.up', which runs on the full sequence", peft.get_peft_model, after, config)
