"""Train a GPT of Megatron-Core with fused layers over tensor and context parallel ranks, on the CPU.

    torchrun --standalone --nproc-per-node 4 -m examples.megatron_gpt

Four ranks form tp=2 x cp=2, two form tp=2, and one runs the same model alone: all print the same losses. On GPUs, omit
`on_cpu()` and train as usual: Megatron's optimizers and pipeline schedules accept the model unchanged.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron warns that Transformer Engine and APEX are missing
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    from fused_tp.integrations.megatron import fused_layers, layer_spec, on_cpu

import fused_tp

VOCAB, BATCH, SEQ, STEPS = 64, 4, 64, 10


def main() -> None:
    warnings.filterwarnings("ignore", module="megatron")  # it recommends settings of CUDA
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group("gloo")
    tp = 2 if dist.get_world_size() % 2 == 0 else 1
    cp = dist.get_world_size() // tp
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        add_bias_linear=False,
        activation_func=F.gelu,
        softmax_type="off-by-one",  # an attention sink
        window_size=(15, 0),
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        context_parallel_size=cp,
        cp_comm_type="p2p",
        gradient_accumulation_fusion=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # For the CPU.
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    with on_cpu():
        with fused_layers():  # for the embedding, the output layer and the last norm; layer_spec covers the rest
            model = GPTModel(config, layer_spec(config), VOCAB, SEQ, position_embedding_type="rope")
        model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(STEPS):
            loss = train_step(model, optimizer, torch.arange(BATCH * SEQ).view(BATCH, SEQ) % 7)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss:.5f}", flush=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def train_step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    """Train one step, and return the mean loss of all tokens before it."""
    group = parallel_state.get_context_parallel_group()
    positions = torch.arange(SEQ).expand(BATCH, SEQ)
    # The sharding of Megatron's get_batch_on_this_cp_rank.
    shard, label_shard, position_shard = (
        fused_tp.shard_sequence(t, 1, group=group) for t in (tokens, tokens.roll(-1, 1), positions)
    )
    model.zero_grad_buffer()
    loss = model(shard, position_shard, None, labels=label_shard).mean()
    loss.backward()
    finalize_model_grads([model])
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad
    optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss, group=group)
    return float(loss) / group.size()


if __name__ == "__main__":
    main()
