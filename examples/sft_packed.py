"""TRL's SFTTrainer on packed documents, over context and tensor parallel ranks.

    torchrun --nproc-per-node 4 -m examples.sft_packed --cp 2 --tp 2
    accelerate launch --multi_gpu --num_processes 2 -m examples.sft_packed --cp 2

Rows hold packed documents. The context parallel ranks shard a row as one sequence; no token attends to another
document. The model is small and its texts are random, so it also runs without GPUs. To train yours, load model,
tokenizer and dataset in `make_model` and `make_texts`.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import fused_tp
from fused_tp.integrations.trainer import parallel_trainer

WORDS = 96


def make_model() -> PreTrainedModel:
    torch.manual_seed(0)  # all ranks create the same model
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=WORDS, eos_token_id=1, **sizes))


def make_texts() -> tuple[Dataset, PreTrainedTokenizerFast]:
    words = Tokenizer(WordLevel({str(word): word for word in range(WORDS)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 40, (200,), generator=generator).tolist()
    texts = [" ".join(map(str, torch.randint(3, WORDS, (n,), generator=generator).tolist())) for n in lengths]
    return Dataset.from_dict({"text": texts}), PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="0", eos_token="1", pad_token="2"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parsed = parser.parse_args()
    if not dist.is_initialized():
        on_gpu = torch.cuda.is_available()
        dist.init_process_group("nccl" if on_gpu else "gloo")
        if on_gpu:
            torch.cuda.set_device(dist.get_node_local_rank())
    mesh = fused_tp.make_mesh(cp=parsed.cp, tp=parsed.tp)
    model = fused_tp.parallelize(make_model(), mesh, sequence_parallel=parsed.tp > 1)
    dataset, tokenizer = make_texts()
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder,
            packing=True,
            max_length=96,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=parsed.steps,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = parallel_trainer(SFTTrainer)(
            model=model, args=settings, train_dataset=dataset, processing_class=tokenizer
        )
        trainer.train()
    if dist.get_rank() == 0:
        for entry in trainer.state.log_history:
            if "grad_norm" in entry:
                print(f"step {entry['step']}: loss {entry['loss']:.6f}, gradient norm {entry['grad_norm']:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
