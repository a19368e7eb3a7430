"""One vLLM engine that runs workloads on request, for benchmarks.serving: a line of JSON in, a line of JSON out.

    {"prompts": [lengths], "new_tokens": n} -> {"seconds", "first", "steps": [seconds between tokens], "tokens"}
    {"processes": true}                     -> {"memory": [bytes of each worker, shared pages by share], "threads": [n]}

Requests arrive at once. The first line out says how long the start took.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_NUM_TOKENS = 7900  # prompts are of the first tokens, which every model has


def main() -> None:
    """Start the engine, and serve requests until the end of the input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dummy", action="store_true", help="random weights, by the config alone")
    arguments = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own lines are not replies
    start = time.perf_counter()
    from vllm import LLM

    llm = LLM(
        arguments.model,
        load_format="dummy" if arguments.dummy else "auto",
        skip_tokenizer_init=True,
        tensor_parallel_size=arguments.ranks,
        enforce_eager=not arguments.compile,
        dtype=arguments.dtype,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        distributed_executor_backend="mp",
    )
    reply: dict[str, Any] = {"start": time.perf_counter() - start}
    for count in range(sys.maxsize):
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if not (line := sys.stdin.readline()):
            return
        request = json.loads(line)
        if "processes" in request:
            reply = _describe_workers()
        else:
            reply = _run(llm.llm_engine, request["prompts"], request["new_tokens"], str(count))


def _run(engine: Any, prompts: list[int], new_tokens: int, name: str) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    for index, length in enumerate(prompts):
        tokens = [(31 * index + 7 * position) % _NUM_TOKENS + 1 for position in range(length)]
        engine.add_request(f"{name}-{index}", {"prompt_token_ids": tokens}, sampling)
    last, first, steps = dict[str, float](), list[float](), list[float]()
    outputs: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            now, request = time.perf_counter(), output.request_id
            if request in last:
                steps.append(now - last[request])
            else:
                first.append(now - start)
            last[request], outputs[request] = now, list(output.outputs[0].token_ids)
    return {
        "seconds": time.perf_counter() - start,
        "first": first,
        "steps": steps,
        "tokens": [outputs[request] for request in sorted(outputs)],
    }


def _describe_workers() -> dict[str, list[int]]:
    """Return the proportional set size, and the number of threads, of each worker process of this engine."""
    memory, threads = [], []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_text().startswith("VLLM::Worker") and _is_descendant(int(process.name)):
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
