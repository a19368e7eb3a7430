"""DeepSpeed's ZeRO 3 over a tensor parallel Llama: each tensor parallel rank holds a shard of each parameter, and ZeRO
shards it again over the data parallel ranks.

    torchrun --nproc-per-node 4 -m examples.deepspeed_zero

It trains a small model on random tokens, so it also runs without GPUs. To train yours, replace `make_model` by its
from_pretrained, and `tokens` by your batches.
"""

from __future__ import annotations

import os

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import fused_tp
from fused_tp.integrations.deepspeed import MeshMPU
from fused_tp.nn import gather_state_dict

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,  # torch's AdamW
    "steps_per_print": 10**9,
}


def make_model() -> PreTrainedModel:
    torch.manual_seed(0)  # all ranks create the same model, and each keeps its shard
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=96, **sizes))


def main() -> None:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = fused_tp.make_mesh(dp_shard=-1, tp=2)
    model = fused_tp.parallelize(make_model(), mesh, parameters="plain", grad_sync=False, sequence_parallel=True)
    mpu = MeshMPU(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, mpu=mpu, config=CONFIG)

    # Each data parallel rank has its own batch, which its tensor parallel ranks share.
    generator = torch.Generator().manual_seed(mpu.get_data_parallel_rank())
    tokens = torch.randint(96, (2, 32), generator=generator).to(engine.device)
    for step in range(10):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if dist.get_rank() == 0 and step % 3 == 0:
            print(f"step {step}: loss {loss.item():.4f}, gradient norm {float(engine.get_global_grad_norm()):.4f}")

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        state = gather_state_dict(model, rank0_only=True, device="cpu")  # full tensors of all parameters
    if dist.get_rank() == 0:
        print(f"{len(state)} tensors, {sum(t.numel() for t in state.values())} numbers")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
