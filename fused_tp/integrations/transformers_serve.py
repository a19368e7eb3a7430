"""`transformers serve` over tensor parallel ranks: an OpenAI-compatible server of one model, by continuous batching.

    torchrun --nproc-per-node 2 -m fused_tp.integrations.transformers_serve MODEL --port 8000

The options are those of `transformers serve`. Every rank parses them, and loads and shards the model:

| when                     | rank 0                                             | other ranks                          |
|--------------------------|----------------------------------------------------|--------------------------------------|
| the first request        | broadcasts its configs, and starts the batches     | receive these, and start the batches |
| each step of the batches | broadcasts new requests (transformers does)        | receive them                         |
| the server ends          | ends the batches, and broadcasts None              | end                                  |
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import uvicorn
from torch.distributed.device_mesh import DeviceMesh
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.transformers import app

from fused_tp.parallelizing.mesh import make_mesh
from fused_tp.parallelizing.parallelize import parallelize

# Ranks wait for the first request and for the end of the server. A rank whose peers have died does not wait.
_FOREVER = timedelta(days=3650)


class TensorParallelServer:
    """The model of `transformers serve` on this rank of `mesh`, whose rank 0 has the HTTP server."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._is_first = mesh.get_local_rank() == 0
        self._group = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._load_whole, self._run_http = ModelManager._load_model, uvicorn.Server.run
        self._model: Any = None
        self._start: Any = None  # the model's own init_continuous_batching
        self._batches: Any = None

    def install(self) -> None:
        """Make `transformers serve` of this process load a sharded model, and serve HTTP on rank 0 only."""
        classes: Any = ModelManager, uvicorn.Server
        classes[0]._load_model = lambda manager, *args, **keywords: self._load(manager, *args, **keywords)
        classes[1].run = lambda server, *args, **keywords: self._run(server)

    def _load(self, manager: Any, name: str, *args: Any, **keywords: Any) -> Any:
        if self._model is not None:
            raise ValueError(
                f"This server has one model over {self._mesh.size()} ranks, the one of its command line, and a request "
                f"names {name!r}. Omit the model in requests, or start another server for it."
            )
        model = self._load_whole(manager, name, *args, **keywords)
        self._start = model.init_continuous_batching
        # Before parallelize, which logs later changes of the model.
        model.init_continuous_batching = self._start_on_all_ranks
        model.generate = partial(_refuse_generate, type(model).__name__)
        self._model = parallelize(model, self._mesh)
        return self._model

    def _run(self, server: Any) -> None:
        if self._model is None:
            raise ValueError("Name the model on the command line: all ranks load it before the first request.")
        if not self._is_first:
            self._follow()
            return
        try:
            self._run_http(server)
        finally:
            if self._batches is not None:
                self._batches.stop()  # transformers passes this on to the other ranks' batches
            self._broadcast(None)

    def _start_on_all_ranks(self, **configs: Any) -> Any:
        self._broadcast(configs)
        self._batches = self._start(**configs)
        return self._batches

    def _follow(self) -> None:
        """Do what rank 0 broadcasts until its server ends."""
        for number in (signal.SIGINT, signal.SIGTERM):  # torchrun sends them to all ranks; rank 0 ends the others
            signal.signal(number, signal.SIG_IGN)
        while (configs := self._broadcast(None)) is not None:
            self._batches = self._start(**configs)
            self._batches.start()

    def _broadcast(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, group=self._group, group_src=0, device=torch.device("cpu"))
        return values[0]


def _refuse_generate(name: str, *args: Any, **keywords: Any) -> None:
    raise ValueError(f"{name} cannot be served over several ranks: transformers has no continuous batching for it.")


def main(argv: Sequence[str] | None = None) -> None:
    """Serve a model over all ranks of torchrun; `argv` (default: that of the process) is that of `transformers serve`.

    Each rank must have memory for the whole model while it loads.

    Raises:
        ValueError: no model is named.

    Example:
        $ torchrun --nproc-per-node 2 -m fused_tp.integrations.transformers_serve Qwen/Qwen3-0.6B --port 8000
        $ curl localhost:8000/v1/completions --json '{"prompt": "Once", "max_tokens": 9}'
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--continuous-batching" not in argv:  # requests one by one would run on rank 0 alone
        argv.append("--continuous-batching")
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if "--device" not in argv:
            argv += ["--device", f"cuda:{os.environ['LOCAL_RANK']}"]
    elif "--device" not in argv:
        argv += ["--device", "cpu"]
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpus else "gloo")
    TensorParallelServer(make_mesh("cuda" if has_gpus else "cpu", tp=dist.get_world_size())["tp"]).install()
    app(["serve", *argv], standalone_mode=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
