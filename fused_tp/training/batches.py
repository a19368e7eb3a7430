"""Distributed batches: equal on ranks that share a model replica, different on data parallel ranks.

A position counts samples of the whole run, not of a rank: at another number of ranks the same samples follow.

    sample      0 1 2 3 | 4 5 6 7 | 8 ...      in the order of the epoch
    rank dp 0   0 1     | 4 5     |            of 2: global_batch_size=4
    rank dp 1       2 3 |     6 7 |

Rejected: StatefulDataLoader of torchdata. Its state is that of one rank's workers, and can be restored only at the same
numbers of ranks and workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as data_worker

from fused_tp.core.errors import RankMismatchError
from fused_tp.ops.arguments import check_bool, check_int
from fused_tp.parallelizing.checks.batch_check import of_all_ranks

DP_DIMS = ("dp_replicate", "dp_shard", "ep")  # dims of make_mesh along which batches differ
_OURS = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator", "persistent_workers"}
_LIKE = ("length", "shuffle", "seed")  # these determine the order of samples


class DistributedBatches:
    """Loader of a dataset for each rank: this rank's part of the same global batches for any number of ranks.

    Ranks along tp, cp and pp get equal batches; ranks along dp_replicate, dp_shard and ep get equal parts of a global
    batch. Iteration continues where it stopped, over all epochs. `state_dict()` is the position after the latest batch,
    equal on all ranks. `load_state_dict` accepts it at another number of ranks or workers, or with another
    `global_batch_size`: no sample is repeated or skipped.

    The constructor is a collective call: the ranks compare their arguments.

    Args:
        dataset: a map-style dataset, or an iterable one that yields the same samples in the same order on each
            iteration; every rank and worker reads all samples and keeps its own. Its `set_epoch(epoch)`, if defined, is
            called before each epoch.
        mesh: mesh of `make_mesh`, or with other names of dims; None: one process.
        global_batch_size: samples over all ranks; this rank has `batch_size` of them.
        shuffle: shuffle a map-style dataset in each epoch, in an order determined by `seed + epoch`.
        seed: see `shuffle`.
        epochs: number of passes over the dataset; None: infinite.
        drop_last: drop an incomplete global batch at the end of an epoch. If False, its size must be a multiple of the
            data parallel ranks.
        dp_dims: dims of `mesh` along which batches differ; None: those of dp_replicate, dp_shard and ep that it has.
        dataset_state: resume by `state_dict` and `load_state_dict` of an iterable dataset, which must restore its
            position exactly (that of `datasets` omits its shuffle buffer). False: read and drop the earlier samples.
        collate_fn: converts a list of samples to a batch; None: torch's.
        loader: further keywords of torch.utils.data.DataLoader, such as num_workers and pin_memory.

    Attributes:
        batch_size: samples per batch on this rank.
        epoch: number of the current epoch, from 0.
        samples: samples of this epoch that all ranks together have received.

    Raises:
        TypeError, ValueError: an argument does not fit.
        RankMismatchError: the ranks have datasets of different lengths, or different arguments.

    Example:
        >>> batches = fused_tp.DistributedBatches(dataset, mesh, 32, shuffle=True, epochs=3)
        >>> for batch in batches:
        ...     model(**batch).loss.backward()
    """

    def __init__(
        self,
        dataset: Any,
        mesh: DeviceMesh | None,
        global_batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epochs: int | None = 1,
        drop_last: bool = True,
        dp_dims: Sequence[str] | None = None,
        dataset_state: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **loader: Any,
    ) -> None:
        check_bool(shuffle=shuffle, drop_last=drop_last, dataset_state=dataset_state)
        check_int("global_batch_size", global_batch_size, 1)
        check_int("seed", seed, 0)
        if epochs is not None:
            check_int("epochs", epochs, 0)
        if taken := sorted(_OURS & set(loader)):
            raise TypeError(f"DistributedBatches takes no {taken[0]!r}: it decides which samples a batch has.")
        self._streams = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        if self._streams and not hasattr(dataset, "__iter__"):
            raise TypeError(f"dataset must have __getitem__ or __iter__; {type(dataset).__name__} has neither.")
        if self._streams and shuffle:
            raise ValueError("shuffle=True needs a map-style dataset; an iterable one is to shuffle itself, by a seed.")
        known = self._streams and hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        if dataset_state and not known:
            raise ValueError(
                "dataset_state=True needs an iterable dataset with state_dict and load_state_dict, and "
                f"{type(dataset).__name__} is not one. Leave it out: samples that came before are then skipped."
            )
        self.dataset, self.global_batch_size, self.epochs = dataset, global_batch_size, epochs
        self.epoch, self.samples = 0, 0
        self._length = None if self._streams else len(dataset)
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._collate, self._loader = collate_fn or default_collate, loader
        self._keeps_state = dataset_state
        self._dataset_state: Any = None
        self._iterator: object | None = None  # latest iteration: an older one would continue from its position
        self._dp_rank, self._dp_size = data_parallel_place(mesh, dp_dims)
        self._agree(mesh)
        share, rest = divmod(global_batch_size, self._dp_size)
        if rest:
            raise ValueError(
                f"global_batch_size={global_batch_size} cannot be shared out evenly to {self._dp_size} data parallel "
                f"ranks; pass a multiple of {self._dp_size}."
            )
        self.batch_size = share
        if self._length is not None:
            if drop_last and self._length < global_batch_size:
                raise ValueError(
                    f"dataset has {self._length} samples, less than global_batch_size={global_batch_size}; with "
                    "drop_last=True there is no batch."
                )
            self._check_rest(self._length)

    def _agree(self, mesh: DeviceMesh | None) -> None:
        meshes = [] if mesh is None else [mesh[dim] for dim in mesh.mesh_dim_names or () if mesh[dim].size() > 1]
        mine = [self._length, self.global_batch_size, self._shuffle, self._seed, self.epochs, self._drop_last]
        names = ("length of the dataset", "global_batch_size", "shuffle", "seed", "epochs", "drop_last")
        every = of_all_ranks(meshes, "DistributedBatches", mine)
        for name, values in zip(names, zip(*every, strict=True), strict=True):
            if len(set(values)) > 1:
                raise RankMismatchError(
                    f"DistributedBatches: the ranks differ in {name}: {', '.join(map(str, values))}. Ranks get equal "
                    "batches, or parts of one batch, of one dataset: give all of them the whole of it and the same "
                    "arguments."
                )

    def _check_rest(self, samples: int) -> None:
        """Refuse an epoch with `samples` left whose last batch cannot be split evenly over ranks."""
        left = samples % self.global_batch_size
        if not self._drop_last and left % self._dp_size:
            raise ValueError(_uneven(left, self._dp_size))

    def state_dict(self) -> dict[str, Any]:
        """Position, equal on all ranks: `epoch`, `samples` of it, and the settings that determine their order."""
        known = {"length": self._length, "shuffle": self._shuffle, "seed": self._seed}
        return {"epoch": self.epoch, "samples": self.samples, "dataset": self._dataset_state, **known}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise the errors that `load_state_dict(state)` would raise, without changing anything."""
        for name, mine in zip(_LIKE, (self._length, self._shuffle, self._seed), strict=True):
            if state[name] != mine:
                raise ValueError(
                    f"The position is one of batches with {name}={state[name]}, and these have {name}={mine}: other "
                    "samples would follow. Give the dataset and the arguments that it was made with."
                )
        if self._length is not None:
            self._check_rest(self._length - state["samples"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of `state_dict`. A running iteration ends with an error; start a new one.

        Raises:
            ValueError: the order of samples would differ, or the rest of the epoch cannot be split evenly over ranks.
        """
        self.check_state(state)
        self.epoch, self.samples, self._dataset_state = state["epoch"], state["samples"], state["dataset"]
        self._iterator = None

    def __iter__(self) -> Iterator[Any]:
        current = self._iterator = object()
        while self.epochs is None or self.epoch < self.epochs:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(self.epoch)
            for batch, samples, state in self._rest_of_epoch():
                self.samples, self._dataset_state = self.samples + samples, state
                yield batch
                if self._iterator is not current:
                    raise RuntimeError("These batches have another position since; iterate over them anew.")
            if not self.samples:
                raise ValueError(f"dataset has given less than global_batch_size={self.global_batch_size} samples.")
            self.epoch, self.samples, self._dataset_state = self.epoch + 1, 0, None

    def _rest_of_epoch(self) -> Iterator[tuple[Any, int, Any]]:
        """Yield (batch of this rank, samples of the global batch, state of the dataset after it)."""
        # A separate generator: a loader draws a number from it, which would change the random state of a resumed run.
        loader = {**self._loader, "generator": torch.Generator().manual_seed(self._seed + self.epoch)}
        on_host = torch.device(
            "cpu"
        )  # torch draws a seed from the generator as iteration begins, on the default device
        if self._streams:
            with on_host:
                batches = iter(DataLoader(_BatchShare(self), batch_size=None, collate_fn=_as_it_is, **loader))
            yield from batches
            return
        sizes, indices = self._indices()
        with on_host:
            batches = iter(DataLoader(self.dataset, batch_sampler=indices, collate_fn=self._collate, **loader))
        for batch, size in zip(batches, sizes, strict=True):
            yield batch, size, None

    def _indices(self) -> tuple[list[int], Iterator[list[int]]]:
        """Return the sizes of the epoch's remaining global batches, and this rank's samples of each."""
        assert self._length is not None
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        if self._shuffle:
            order = torch.randperm(self._length, generator=generator, device="cpu")
        else:
            order = torch.arange(self._length, device="cpu")
        order = order[self.samples :]
        if self._drop_last:
            order = order[: len(order) // self.global_batch_size * self.global_batch_size]
        parts = order.split(self.global_batch_size) if len(order) else ()
        return [len(part) for part in parts], (part.chunk(self._dp_size)[self._dp_rank].tolist() for part in parts)


class _BatchShare(IterableDataset[Any]):
    """Stream of this rank's part of each global batch. Each of W workers reads the whole stream and yields every W-th
    batch, in the order in which the loader polls workers."""

    def __init__(self, batches: DistributedBatches) -> None:
        self._dataset, self._collate = batches.dataset, batches._collate
        self._skip, self._keeps_state = batches.samples, batches._keeps_state
        self._state = batches._dataset_state if self._keeps_state else None
        self._size, self._drop_last = batches.global_batch_size, batches._drop_last
        self._rank, self._ranks = batches._dp_rank, batches._dp_size

    def __iter__(self) -> Iterator[tuple[Any, int, Any]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        # Hidden from datasets that shard their samples by worker, as those of `datasets` do.
        data_worker._worker_info = None
        if self._state is not None:
            self._dataset.load_state_dict(self._state)
        stream = iter(self._dataset)
        if self._state is None:
            skipped = sum(1 for _ in islice(stream, self._skip))
            if skipped < self._skip:
                raise ValueError(f"dataset has given {skipped} samples, and the position is behind {self._skip}.")
        for number in count():
            samples = list(islice(stream, self._size))
            if not samples or (self._drop_last and len(samples) < self._size):
                return
            share, rest = divmod(len(samples), self._ranks)
            if rest:
                raise ValueError(_uneven(len(samples), self._ranks))
            state = self._dataset.state_dict() if self._keeps_state else None
            if number % workers == worker:
                yield self._collate(samples[share * self._rank :][:share]), len(samples), state


def _as_it_is(batch: Any) -> Any:
    return batch


def _uneven(samples: int, ranks: int) -> str:
    return (
        f"an epoch ends with {samples} samples, which {ranks} data parallel ranks cannot share evenly; pass "
        "drop_last=True, or a dataset that fits."
    )


def data_parallel_place(mesh: DeviceMesh | None, dp_dims: Sequence[str] | None = None) -> tuple[int, int]:
    """Return this rank's data parallel rank, and the number of data parallel ranks."""
    if mesh is None:
        return 0, 1
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh or None, not {type(mesh).__name__}.")
    names = mesh.mesh_dim_names
    if names is None or mesh.get_coordinate() is None:
        raise ValueError(f"mesh {'has no names of dims' if names is None else 'does not contain this rank'}.")
    wanted = [name for name in DP_DIMS if name in names] if dp_dims is None else list(dp_dims)
    if unknown := [name for name in wanted if name not in names]:
        raise ValueError(f"dp_dims has {unknown[0]!r}, and mesh has the dims {names}.")
    rank, size = 0, 1
    for name in names:
        if name in wanted:
            rank, size = rank * mesh[name].size() + mesh[name].get_local_rank(), size * mesh[name].size()
    return rank, size
