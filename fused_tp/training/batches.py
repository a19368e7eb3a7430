"""Distributed batches: equal on ranks that share a model replica, different on data parallel ranks.

A position counts samples over all ranks, not per rank: a run that resumes with another number of ranks continues with
the same samples.

    sample      0 1 2 3 | 4 5 6 7 | 8 ...      in the order of the epoch, global_batch_size=4
    dp rank 0   0 1     | 4 5     |
    dp rank 1       2 3 |     6 7 |

Rejected: StatefulDataLoader of torchdata. Its state describes the workers of one rank, and can be restored only with
the same numbers of ranks and workers.
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
from fused_tp.parallelizing.checks.batch_check import gather_over_meshes

DP_DIMS = ("dp_replicate", "dp_shard", "ep")  # dims of make_mesh along which batches differ
_RESERVED_KEYWORDS = {
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "drop_last",
    "generator",
    "persistent_workers",
}
_ORDER_SETTINGS = ("length", "shuffle", "seed")  # these determine the order of samples


class DistributedBatches:
    """Data loader that yields this rank's share of each global batch; global batches do not depend on the rank count.

    Ranks along tp, cp and pp get equal batches. Ranks along dp_replicate, dp_shard and ep get equally large slices of a
    global batch. Iteration continues where it stopped, over all epochs. `state_dict()` returns the position after the
    latest batch, equal on all ranks. `load_state_dict` accepts it with another number of ranks or workers, or with
    another `global_batch_size`: no sample is repeated or skipped.

    The constructor is a collective call: the ranks compare their arguments.

    Args:
        dataset: a map-style dataset, or an iterable one that yields the same samples in the same order on each
            iteration. Every rank and worker reads all samples of an iterable dataset and keeps its share. Its
            `set_epoch(epoch)`, if defined, is called before each epoch.
        mesh: mesh of `make_mesh`, or any mesh together with `dp_dims`; None: one process.
        global_batch_size: samples per batch over all ranks.
        shuffle: shuffle a map-style dataset in each epoch, in an order determined by `seed + epoch`.
        seed: see `shuffle`.
        epochs: number of passes over the dataset; None: infinite.
        drop_last: drop an incomplete global batch at the end of an epoch. If False, its size must be a multiple of the
            number of data parallel ranks.
        dp_dims: dims of `mesh` along which batches differ; None: dp_replicate, dp_shard and ep, as far as they exist.
        dataset_state: resume by `state_dict` and `load_state_dict` of an iterable dataset, which must restore its
            position exactly (`datasets` does not save its shuffle buffer). False: read and drop the earlier samples.
        collate_fn: converts a list of samples to a batch; None: torch's.
        loader: further keywords of torch.utils.data.DataLoader, such as num_workers and pin_memory.

    Attributes:
        batch_size: samples per batch on this rank.
        epoch: number of the current epoch, from 0.
        samples: samples of this epoch that all ranks together have received.

    Raises:
        TypeError, ValueError: an argument is invalid.
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
        if reserved_keywords := sorted(_RESERVED_KEYWORDS & set(loader)):
            raise TypeError(
                f"DistributedBatches does not support {reserved_keywords[0]!r}: it selects the samples itself. Omit it."
            )
        self._is_iterable = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        if self._is_iterable and not hasattr(dataset, "__iter__"):
            raise TypeError(f"dataset must have __getitem__ or __iter__; {type(dataset).__name__} has neither.")
        if self._is_iterable and shuffle:
            raise ValueError("shuffle=True needs a map-style dataset; shuffle an iterable dataset itself, with a seed.")
        has_state = self._is_iterable and hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        if dataset_state and not has_state:
            raise ValueError(
                "dataset_state=True needs an iterable dataset with state_dict and load_state_dict, got "
                f"{type(dataset).__name__}. Omit dataset_state: earlier samples are then read and dropped."
            )
        self.dataset, self.global_batch_size, self.epochs = dataset, global_batch_size, epochs
        self.epoch, self.samples = 0, 0
        self._length = None if self._is_iterable else len(dataset)
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._collate, self._loader_keywords = collate_fn or default_collate, loader
        self._saves_dataset_state = dataset_state
        self._dataset_state: Any = None
        # Token of the latest __iter__; an older iterator raises when it continues.
        self._iterator_token: object | None = None
        self._dp_rank, self._dp_size = data_parallel_rank_and_size(mesh, dp_dims)
        self._check_arguments_agree(mesh)
        batch_size, remainder = divmod(global_batch_size, self._dp_size)
        if remainder:
            raise ValueError(
                f"global_batch_size must be a multiple of the {self._dp_size} data parallel ranks, got "
                f"{global_batch_size}."
            )
        self.batch_size = batch_size
        if self._length is not None:
            if drop_last and self._length < global_batch_size:
                raise ValueError(
                    f"dataset has {self._length} samples, fewer than global_batch_size={global_batch_size}. Pass a "
                    "smaller global_batch_size, or drop_last=False."
                )
            self._check_last_batch(self._length)

    def _check_arguments_agree(self, mesh: DeviceMesh | None) -> None:
        meshes = [] if mesh is None else [mesh[dim] for dim in mesh.mesh_dim_names or () if mesh[dim].size() > 1]
        arguments = [self._length, self.global_batch_size, self._shuffle, self._seed, self.epochs, self._drop_last]
        names = ("length of the dataset", "global_batch_size", "shuffle", "seed", "epochs", "drop_last")
        rank_arguments = gather_over_meshes(meshes, "DistributedBatches", arguments)
        for name, values in zip(names, zip(*rank_arguments, strict=True), strict=True):
            if len(set(values)) > 1:
                raise RankMismatchError(
                    f"DistributedBatches: the ranks differ in {name}: {', '.join(map(str, values))}. Pass the full "
                    "dataset and the same arguments on all ranks; DistributedBatches shards the batches."
                )

    def _check_last_batch(self, num_samples: int) -> None:
        """Raise ValueError if the last batch of an epoch with `num_samples` left cannot be split evenly over ranks."""
        last_batch_size = num_samples % self.global_batch_size
        if not self._drop_last and last_batch_size % self._dp_size:
            raise ValueError(_uneven_batch_message(last_batch_size, self._dp_size))

    def state_dict(self) -> dict[str, Any]:
        """Return the position: `epoch`, `samples` consumed in it, and the settings that determine the sample order."""
        order_settings = {"length": self._length, "shuffle": self._shuffle, "seed": self._seed}
        return {"epoch": self.epoch, "samples": self.samples, "dataset": self._dataset_state, **order_settings}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise the errors that `load_state_dict(state)` would raise, without changing anything."""
        for name, current_value in zip(_ORDER_SETTINGS, (self._length, self._shuffle, self._seed), strict=True):
            if state[name] != current_value:
                raise ValueError(
                    f"The position was saved with {name}={state[name]}, got {name}={current_value}: different samples "
                    "would follow. Pass the dataset and the arguments of the saved run."
                )
        if self._length is not None:
            self._check_last_batch(self._length - state["samples"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position `state`, returned by `state_dict`. A running iteration raises; start a new one.

        Raises:
            ValueError: the order of samples would differ, or the rest of the epoch cannot be split evenly over ranks.
        """
        self.check_state(state)
        self.epoch, self.samples, self._dataset_state = state["epoch"], state["samples"], state["dataset"]
        self._iterator_token = None

    def __iter__(self) -> Iterator[Any]:
        token = self._iterator_token = object()
        while self.epochs is None or self.epoch < self.epochs:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(self.epoch)
            for batch, num_samples, state in self._remaining_batches():
                self.samples, self._dataset_state = self.samples + num_samples, state
                yield batch
                if self._iterator_token is not token:
                    raise RuntimeError(
                        "load_state_dict or a newer iteration has moved the position; call iter() again."
                    )
            if not self.samples:
                raise ValueError(
                    f"dataset yielded fewer than global_batch_size={self.global_batch_size} samples. Pass a smaller "
                    "global_batch_size."
                )
            self.epoch, self.samples, self._dataset_state = self.epoch + 1, 0, None

    def _remaining_batches(self) -> Iterator[tuple[Any, int, Any]]:
        """Yield (batch of this rank, number of samples in the global batch, state of the dataset after it)."""
        # A DataLoader draws a seed from its generator. From the global generator, a resumed run would draw one number
        # more than an uninterrupted run.
        loader_keywords = {**self._loader_keywords, "generator": torch.Generator().manual_seed(self._seed + self.epoch)}
        # That seed is drawn on the default device, where a CPU generator would raise if the default is a GPU.
        cpu = torch.device("cpu")
        if self._is_iterable:
            with cpu:
                batches = iter(DataLoader(_RankBatches(self), batch_size=None, collate_fn=_identity, **loader_keywords))
            yield from batches
            return
        sizes, indices = self._sample_indices()
        with cpu:
            batches = iter(DataLoader(self.dataset, batch_sampler=indices, collate_fn=self._collate, **loader_keywords))
        for batch, size in zip(batches, sizes, strict=True):
            yield batch, size, None

    def _sample_indices(self) -> tuple[list[int], Iterator[list[int]]]:
        """Return the sizes of the epoch's remaining global batches, and this rank's sample indices in each."""
        assert self._length is not None
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        if self._shuffle:
            sample_order = torch.randperm(self._length, generator=generator, device="cpu")
        else:
            sample_order = torch.arange(self._length, device="cpu")
        sample_order = sample_order[self.samples :]
        if self._drop_last:
            sample_order = sample_order[: len(sample_order) // self.global_batch_size * self.global_batch_size]
        global_batches = sample_order.split(self.global_batch_size) if len(sample_order) else ()
        return [len(global_batch) for global_batch in global_batches], (
            global_batch.chunk(self._dp_size)[self._dp_rank].tolist() for global_batch in global_batches
        )


class _RankBatches(IterableDataset[Any]):
    """Iterable dataset of this rank's share of each global batch.

    Each of W workers reads the full stream and yields every W-th batch: the DataLoader polls its workers in this order.
    """

    def __init__(self, batches: DistributedBatches) -> None:
        self._dataset, self._collate = batches.dataset, batches._collate
        self._num_skipped_samples, self._saves_dataset_state = batches.samples, batches._saves_dataset_state
        self._state = batches._dataset_state if self._saves_dataset_state else None
        self._global_batch_size, self._drop_last = batches.global_batch_size, batches._drop_last
        self._dp_rank, self._dp_size = batches._dp_rank, batches._dp_size

    def __iter__(self) -> Iterator[tuple[Any, int, Any]]:
        worker_info = get_worker_info()
        worker, num_workers = (0, 1) if worker_info is None else (worker_info.id, worker_info.num_workers)
        # Hide the workers from the dataset: `datasets`, for one, would yield only 1/W of its samples to each worker.
        data_worker._worker_info = None
        if self._state is not None:
            self._dataset.load_state_dict(self._state)
        stream = iter(self._dataset)
        if self._state is None:
            num_skipped = sum(1 for _ in islice(stream, self._num_skipped_samples))
            if num_skipped < self._num_skipped_samples:
                raise ValueError(
                    f"dataset yielded only {num_skipped} samples, but the position is after "
                    f"{self._num_skipped_samples}. Pass the dataset of the saved run."
                )
        for batch_index in count():
            samples = list(islice(stream, self._global_batch_size))
            if not samples or (self._drop_last and len(samples) < self._global_batch_size):
                return
            num_rank_samples, remainder = divmod(len(samples), self._dp_size)
            if remainder:
                raise ValueError(_uneven_batch_message(len(samples), self._dp_size))
            state = self._dataset.state_dict() if self._saves_dataset_state else None
            if batch_index % num_workers == worker:
                yield self._collate(samples[num_rank_samples * self._dp_rank :][:num_rank_samples]), len(samples), state


def _identity(batch: Any) -> Any:
    return batch


def _uneven_batch_message(num_samples: int, num_ranks: int) -> str:
    return (
        f"the last batch of an epoch has {num_samples} samples, which is not a multiple of the {num_ranks} data "
        "parallel ranks; pass drop_last=True, or change the length of the dataset."
    )


def data_parallel_rank_and_size(mesh: DeviceMesh | None, dp_dims: Sequence[str] | None = None) -> tuple[int, int]:
    """Return this rank's data parallel rank, and the number of data parallel ranks."""
    if mesh is None:
        return 0, 1
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh or None, got {type(mesh).__name__}.")
    names = mesh.mesh_dim_names
    if names is None or mesh.get_coordinate() is None:
        raise ValueError(f"mesh {'must have mesh_dim_names' if names is None else 'does not contain this rank'}.")
    dp_names = [name for name in DP_DIMS if name in names] if dp_dims is None else list(dp_dims)
    if unknown_dims := [name for name in dp_names if name not in names]:
        raise ValueError(f"dp_dims must be dims of mesh, which has {names}, got {unknown_dims[0]!r}.")
    rank, size = 0, 1
    for name in names:
        if name in dp_names:
            rank, size = rank * mesh[name].size() + mesh[name].get_local_rank(), size * mesh[name].size()
    return rank, size
