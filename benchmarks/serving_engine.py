"""One engine that runs workloads on request, for benchmarks.serving: a line of JSON in, a line of JSON out.

    {"prompts": [lengths], "new_tokens": n} -> {"seconds", "first", "steps": [seconds between tokens], "tokens"}
    {..., "cancel_after": [number or null]} -> the same; requests are cancelled after so many of their tokens
    {"processes": true}                     -> {"memory": [bytes of each worker, shared pages by share], "threads": [n]}

Requests arrive at once. The first line out says how long the start took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

_NUM_TOKENS = 7900  # prompts are of the first tokens, which every model has
_MAX_LENGTH = 4096  # of a prompt and its new tokens, and of a batch of prompts
WORKER_TITLES = {"vllm": "VLLM::Worker", "sglang": "sglang::scheduler"}  # of a rank's process; "_TP<rank>" may follow


class _Times:
    """Times of each request's tokens, and the tokens. `cancel_after`: tokens after which to cancel each request."""

    def __init__(self, cancel_after: Sequence[int | None]) -> None:
        num_requests, self.cancel_after = len(cancel_after), cancel_after
        self.start = time.perf_counter()
        self.last: dict[int, float] = {}
        self.first, self.steps = list[float](), list[float]()
        self.tokens: list[list[int]] = [[] for _ in range(num_requests)]

    def add(self, request: int, tokens: Sequence[int]) -> bool:
        """Note that request `request` has these tokens now; return True if it is to be cancelled."""
        now = time.perf_counter()
        if request in self.last:
            self.steps.append(now - self.last[request])
        else:
            self.first.append(now - self.start)
        self.last[request], self.tokens[request] = now, list(tokens)
        limit = self.cancel_after[request]
        return limit is not None and len(tokens) >= limit

    def reply(self) -> dict[str, Any]:
        """Return the reply to a request of benchmarks.serving."""
        seconds = time.perf_counter() - self.start
        return {"seconds": seconds, "first": self.first, "steps": self.steps, "tokens": self.tokens}


# Runs prompts (their tokens) to this number of new tokens each, or until they are cancelled.
Run = Callable[[list[list[int]], int, Sequence[int | None]], dict[str, Any]]


def start_vllm(arguments: argparse.Namespace) -> Run:
    """Start vLLM."""
    import torch
    from vllm import LLM, SamplingParams

    # Two engines share the GPUs, of which vLLM would give 0.9 to each.
    shares = {"gpu_memory_utilization": 0.4} if torch.cuda.is_available() else {}
    engine = LLM(
        arguments.model,
        load_format="dummy" if arguments.dummy else "auto",
        skip_tokenizer_init=True,
        tensor_parallel_size=arguments.ranks,
        enforce_eager=not arguments.compile,
        dtype=arguments.dtype,
        max_model_len=_MAX_LENGTH,
        max_num_batched_tokens=_MAX_LENGTH,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        distributed_executor_backend="mp",
        **shares,
    ).llm_engine

    def run(prompts: list[list[int]], new_tokens: int, cancel_after: Sequence[int | None]) -> dict[str, Any]:
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        times = _Times(cancel_after)
        for index, tokens in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": tokens}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if times.add(int(output.request_id), output.outputs[0].token_ids):
                    engine.abort_request([output.request_id])
        return times.reply()

    return run


def start_sglang(arguments: argparse.Namespace) -> Run:
    """Start SGLang's engine for CPUs."""
    import sglang

    engine = sglang.Engine(
        model_path=arguments.model,
        load_format="dummy" if arguments.dummy else "auto",
        skip_tokenizer_init=True,
        device="cpu",
        attention_backend="torch_native",
        tp_size=arguments.ranks,
        disable_cuda_graph=True,
        enable_torch_compile=arguments.compile,
        dtype=arguments.dtype,
        context_length=_MAX_LENGTH,
        chunked_prefill_size=_MAX_LENGTH,
        max_total_tokens=4 * _MAX_LENGTH,
        mem_fraction_static=0.3,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        sleep_on_idle=True,  # else an engine that waits takes the time of the one that is measured
        random_seed=0,
        log_level="info",
    )

    def run(prompts: list[list[int]], new_tokens: int, cancel_after: Sequence[int | None]) -> dict[str, Any]:
        sampling = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
        times = _Times(cancel_after)

        async def follow(index: int) -> None:
            name = uuid4().hex
            outputs = await engine.async_generate(
                input_ids=prompts[index], sampling_params=sampling, stream=True, rid=name
            )
            async for output in outputs:
                if times.add(index, output["output_ids"]):
                    engine.tokenizer_manager.abort_request(name)

        async def follow_all() -> None:
            await asyncio.gather(*(follow(index) for index in range(len(prompts))))

        engine.loop.run_until_complete(follow_all())
        return times.reply()

    return run


_STARTS = {"vllm": start_vllm, "sglang": start_sglang}


def main() -> None:
    """Start the engine, and serve requests until the end of the input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--engine", choices=list(_STARTS), default="vllm")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dummy", action="store_true", help="random weights, by the config alone")
    arguments = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine's own lines are not replies
    start = time.perf_counter()
    run = _STARTS[arguments.engine](arguments)
    reply: dict[str, Any] = {"start": time.perf_counter() - start}
    while True:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if not (line := sys.stdin.readline()):
            return
        request = json.loads(line)
        if "processes" in request:
            reply = _describe_workers(WORKER_TITLES[arguments.engine])
        else:
            prompts = [
                [(31 * index + 7 * position) % _NUM_TOKENS + 1 for position in range(length)]
                for index, length in enumerate(request["prompts"])
            ]
            cancel_after = request.get("cancel_after") or [None] * len(prompts)
            reply = run(prompts, request["new_tokens"], cancel_after)


def _describe_workers(title: str) -> dict[str, list[int]]:
    """Return the proportional set size, and the number of threads, of each worker process of this engine."""
    memory, threads = [], []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_text().startswith(title) and _is_descendant(int(process.name)):
                lines = (process / "smaps_rollup").read_text().splitlines()
                memory.append(next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024)
                threads.append(len(list((process / "task").iterdir())))
        except OSError:
            continue  # it has ended meanwhile
    return {"memory": sorted(memory), "threads": sorted(threads)}


def _is_descendant(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


if __name__ == "__main__":
    main()
