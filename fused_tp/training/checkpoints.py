"""Checkpoints of a run that may be interrupted at any time and resume with another number of ranks.

A save has five steps, of which only the first blocks training:

    1. every rank copies its shards of parameters and optimizer state to the CPU
    2. rank 0 removes the files of an interrupted save of this step
    3. every rank writes its shards (torch.distributed.checkpoint), and rank 0 the metadata
    4. rank 0 writes complete.pt with all values that are not tensors; a rename makes it appear at once
    5. rank 0 removes older checkpoints

Steps 2 to 5 run in a thread, over a separate gloo group, so that they cannot interleave with collectives of training.
"""

from __future__ import annotations

import copy
import logging
import os
import random
import re
import shutil
import uuid
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from fused_tp.core.errors import FusedTPError, join_words
from fused_tp.core.group import resolve_group
from fused_tp.core.pending import start_thread
from fused_tp.core.store import exchange
from fused_tp.nn.checkpoint import OriginalShapes
from fused_tp.nn.original_shape_tensor import OriginalShapeTensor
from fused_tp.nn.plain_data import PlainPlanner, PlainReader, check_plain, load_plain, refused_type
from fused_tp.ops.arguments import check_bool, check_int
from fused_tp.pipelining.pipeline import Pipeline
from fused_tp.training.batches import DistributedBatches

COMPLETE_FILE = "complete.pt"  # written last; a checkpoint without this file is incomplete
_STEP_FOLDER = re.compile(r"step-(\d+)")
_NON_OPTION_KEYS = ("params", "param_names")  # keys of a param group that are not optimizer options
_EXITED_DURING_SAVE = "the run exited during the save; earlier checkpoints are intact."
_logger = logging.getLogger(__name__)


class CheckpointManager:
    """Save and restore a training run in `folder`: `save(step)`, and `restore()` of the newest complete checkpoint.

    A checkpoint contains model, optimizer, scheduler, position in the data, `extra`, and the states of the random
    number generators. Parameters and optimizer state are restored bit for bit with any numbers of tp, cp, pp and dp
    ranks: they are resharded by their names in the unsharded model. Generators (Python, NumPy, torch on the CPU and on
    the device) are restored per rank if the number of ranks is the same. Otherwise all ranks get the state of rank 0,
    so data parallel ranks draw equal random numbers until the caller sets a different seed on each.

    A checkpoint is a folder `step-N` of torch.distributed.checkpoint. It is complete once it has `complete.pt`, which
    is written last, with checksums of the other files. Files of an interrupted save are ignored, and removed by a later
    save. A checkpoint holds plain data (numbers, strings, containers, tensors, NumPy arrays), and restoring it runs no
    code from its files; `pickles=True` is for folders that you trust.

    The constructor, `save`, `restore` and `close` are collective calls of all ranks. A `with` block closes the manager.

    Args:
        folder: folder on a file system that all ranks share; created if it is missing.
        model: result of `parallelize`, with DTensors or plain parameters, with or without FSDP2; a `Pipeline`; or any
            nn.Module that is equal on all ranks.
        optimizer: optimizer of the model's parameters; for a pipeline, of `pipe.parameters()`. Optimizer state of a
            sharded parameter must have the parameter's shape.
        scheduler: object with `state_dict` and `load_state_dict`, equal on all ranks.
        data: DistributedBatches whose position is saved.
        extra: dict of the caller, equal on all ranks. `save` stores its contents; `restore` replaces them in place.
        keep: number of complete checkpoints to keep.
        async_save: write in the background. False: `save` returns once all files are written.
        pickles: allow any picklable object in `extra` and in the states of scheduler, dataset and optimizer. Restoring
            then executes code from the files.

    Raises:
        TypeError, ValueError: an argument is invalid, or a rank does not see the same `folder` as rank 0.

    Example:
        >>> with CheckpointManager("checkpoints", model, optimizer, data=batches) as checkpoints:
        ...     first = (checkpoints.restore() or 0) + 1
        ...     for step, batch in enumerate(batches, first):
        ...         train(batch)
        ...         if step % 100 == 0:
        ...             checkpoints.save(step)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module | Pipeline,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        data: DistributedBatches | None = None,
        *,
        extra: dict[str, Any] | None = None,
        keep: int = 3,
        async_save: bool = True,
        pickles: bool = False,
    ) -> None:
        if not isinstance(model, (nn.Module, Pipeline)):
            raise TypeError(f"model must be an nn.Module or a Pipeline, got {type(model).__name__}.")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch Optimizer or None, got {type(optimizer).__name__}.")
        if scheduler is not None and not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
            raise TypeError(f"scheduler must have state_dict and load_state_dict, got {type(scheduler).__name__}.")
        if data is not None and not isinstance(data, DistributedBatches):
            raise TypeError(
                f"data must be DistributedBatches or None, got {type(data).__name__}. Positions of other loaders "
                "depend on the rank and on the number of ranks."
            )
        check_bool(async_save=async_save, pickles=pickles)
        check_int("keep", keep, 1)
        self._modules = _list_modules(model)
        self._optimizer, self._scheduler, self._data, self._extra = optimizer, scheduler, data, extra
        self._kept_checkpoints, self._is_async, self._allows_pickles = keep, async_save, pickles
        self._thread: Thread | None = None
        self._write_error: FusedTPError | None = None  # error of the writing thread
        self._is_closed = self._is_exiting = False
        if optimizer is not None:
            self._check_optimizer(optimizer)
        world_group = resolve_group(None)
        self._rank, self._world_size = world_group.rank, world_group.size
        self._group = None if world_group.process_group is None else dist.new_group(backend="gloo")
        self.folder = Path(folder).absolute()
        try:
            self._check_folder()
        except BaseException:
            self.close()
            raise

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Save the current state as the checkpoint after `step`; wait for an earlier save first.

        With `async_save`, return once the state is copied, and write in the background.

        Raises:
            ValueError: a complete checkpoint of this step or of a later one exists; optimizer state of a sharded
                parameter has another shape than the parameter; or, without `pickles`, a value is not plain data.
            FusedTPError: the previous save failed, or without `async_save` this one.
        """
        self.wait()
        check_int("step", step, 0)
        folder = self._folder_of(step)
        if (folder / COMPLETE_FILE).exists():
            raise ValueError(
                f"{folder} is already complete; save each step once. If this run did not save it, another run uses "
                f"{self.folder}: pass a different folder for each run."
            )
        if step < (newest_step := max(self._complete_steps(), default=-1)):
            raise ValueError(
                f"step must be above {newest_step}, the newest step in {self.folder}, got {step}. Call restore() to "
                "resume from the newest step, or pass another folder to start a new run."
            )
        shapes = OriginalShapes(*self._modules)
        model = {
            name: _to_saved_form(value, shapes.parameters_by_name.get(name), shapes)
            for name, value in self._model_state().items()
        }
        state, other_optimizer_state = self._collect_optimizer_state(shapes)
        tensors = _copy_to_cpu({"model": model, "optimizer": state} if state else {"model": model})
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        rank_state = _RankState(step, _capture_random_state(), copy.deepcopy(other_optimizer_state))
        common_values = copy.deepcopy(
            {
                "step": step,
                "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
                "data": None if self._data is None else self._data.state_dict(),
                "extra": self._extra,
            }
        )
        if not self._allows_pickles:
            values = {f"{name!r} of the model": value for name, value in model.items() if not isinstance(value, Tensor)}
            values |= {
                "the state of the scheduler": common_values["scheduler"],
                "the state of the data": common_values["data"],
            }
            for description, value in {
                "extra": self._extra,
                "the state of the optimizer": other_optimizer_state,
                **values,
            }.items():
                check_plain(
                    description,
                    value,
                    "Or pass pickles=True to CheckpointManager if you trust the folder.",
                )
        if not self._is_async:
            self._write(folder, tensors, rank_state, common_values)
            return self.wait()
        # Not a daemon thread: if the process exits without close(), the interpreter waits for the save to finish.
        thread = Thread(
            target=self._write, args=(folder, tensors, rank_state, common_values), name="fused_tp checkpoint"
        )
        start_thread(thread)
        self._thread = thread

    def wait(self) -> None:
        """Wait for the save in progress.

        Raises:
            FusedTPError: the save failed; the message names the step and the reason. Later saves can still succeed, as
                long as all ranks are alive.
        """
        if self._is_closed:
            raise ValueError("This CheckpointManager is closed; create a new one.")
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._write_error = self._write_error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the save in progress, then destroy the manager's process group. May be called twice."""
        if self._is_closed:
            return
        try:
            self.wait()
        finally:
            self._is_closed = True
            if self._group is not None:
                dist.destroy_process_group(self._group)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error, peers may have exited. A save would then fail, and its error would hide the first one.
        self._is_exiting = kind is not None
        if kind is None:
            self.close()

    def _write(
        self, folder: Path, tensors: dict[str, Any], rank_state: _RankState, common_values: dict[str, Any]
    ) -> None:
        try:
            rank_states = self._gather_on_rank_0(rank_state)
            self._run_on_rank_0(lambda: self._remove_unfinished(folder, rank_states))
            with _suppress_no_group_warning(self._group):
                dcp.save(
                    tensors,
                    storage_writer=_OSErrorWriter(folder),
                    process_group=self._group,
                    no_dist=self._group is None,
                )
            rank_checksums = self._gather_on_rank_0(self._compute_rank_checksums(folder))
            common_values["checksums"] = {
                name: value for checksums in rank_checksums for name, value in checksums.items()
            }
            self._run_on_rank_0(lambda: self._write_complete(folder, common_values, rank_states))
        except BaseException as error:  # torch's CheckpointException is not an Exception
            reason = _EXITED_DURING_SAVE if self._is_exiting else _describe_error(error)
            message = f"The checkpoint of step {common_values['step']} was not written to {folder}: {reason}"
            _logger.error(message)  # also logged, because a program may never call wait() after its last save
            self._write_error = FusedTPError(message)
            self._write_error.__cause__ = error

    def _remove_unfinished(self, folder: Path, rank_states: list[_RankState]) -> None:
        if len(steps := {rank_state.step for rank_state in rank_states}) > 1:
            raise ValueError(f"all ranks must save the same step, got {join_words(map(str, sorted(steps)))}.")
        shutil.rmtree(folder, ignore_errors=True)

    def _compute_rank_checksums(self, folder: Path) -> dict[str, int | None]:
        """Return the checksums of the files that this rank wrote; None for an unreadable file.

        Rank 0 raises for None after the gather. Raising here would leave the peers waiting in the gather.
        """
        checksums: dict[str, int | None] = {}
        for path in [*folder.glob(f"__{self._rank}_*"), *([folder / ".metadata"] if self._rank == 0 else [])]:
            try:
                checksums[path.name] = _compute_checksum(path)
            except OSError:
                checksums[path.name] = None
        return checksums

    def _write_complete(self, folder: Path, common_values: dict[str, Any], rank_states: list[_RankState]) -> None:
        optimizer = {
            "kind": None if self._optimizer is None else type(self._optimizer).__name__,
            "groups": [group for rank_state in rank_states for group in rank_state.optimizer["groups"]],
            "values": {
                name: values for rank_state in rank_states for name, values in rank_state.optimizer["values"].items()
            },
        }
        if unreadable_files := [name for name, value in common_values["checksums"].items() if value is None]:
            raise OSError(f"{folder / unreadable_files[0]} was written but cannot be read.")
        content = {
            **common_values,
            "random": [rank_state.random_state for rank_state in rank_states],
            "optimizer": optimizer,
        }
        with open(folder / f"{COMPLETE_FILE}.part", "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / f"{COMPLETE_FILE}.part", folder / COMPLETE_FILE)
        steps = self._complete_steps()
        for path in self.folder.iterdir():
            step = _parse_step(path)
            if step is not None and step < steps[-1] and step not in steps[-self._kept_checkpoints :]:
                # Remove COMPLETE_FILE first, so that a partly removed checkpoint does not count as complete. Failing to
                # remove an old checkpoint must not fail this save.
                with suppress(OSError):
                    (path / COMPLETE_FILE).unlink(missing_ok=True)
                    shutil.rmtree(path)

    # -- restoring ----------------------------------------------------------------------------------------------------

    def restore(self) -> int | None:
        """Load the newest complete checkpoint and return its step; None if there is none.

        Raises:
            ValueError: the checkpoint is damaged, belongs to another model, lacks a state that this manager needs, or
                is not visible to all ranks. All ranks raise, before anything is changed.
        """
        self.wait()
        newest_step = self._exchange(max(self._complete_steps(), default=None) if self._rank == 0 else None)[0]
        if newest_step is None:
            return None
        folder = self._folder_of(newest_step)
        loaded_checkpoint: _LoadedCheckpoint | None = None
        error_message = ""
        try:
            loaded_checkpoint = self._prepare_loading(folder)
        except Exception as error:
            error_message = str(error) or type(error).__name__
        reports = self._gather_on_rank_0(
            (error_message, [] if loaded_checkpoint is None else [*loaded_checkpoint.model])
        )
        self._run_on_rank_0(lambda: _check_reports(folder, reports, loaded_checkpoint))
        assert loaded_checkpoint is not None
        # torch computes the offsets of DTensor shards on the default device and reads each back: slow if that is a GPU.
        with _suppress_no_group_warning(self._group), torch.device("cpu"):
            planner_keywords: dict[str, Any] = {} if self._allows_pickles else {"planner": PlainPlanner()}
            reader, is_single_rank = self._make_reader(folder), self._group is None
            dcp.load(
                loaded_checkpoint.load_targets,
                storage_reader=reader,
                process_group=self._group,
                no_dist=is_single_rank,
                **planner_keywords,
            )
        for module in self._modules:
            rank_state = get_model_state_dict(module)
            set_model_state_dict(module, {name: loaded_checkpoint.model[name] for name in rank_state})
        if self._optimizer is not None:
            _load_optimizer(self._optimizer, loaded_checkpoint.optimizer)
        common_values = loaded_checkpoint.common_values
        if self._scheduler is not None:
            self._scheduler.load_state_dict(common_values["scheduler"])
        if self._data is not None:
            self._data.load_state_dict(common_values["data"])
        if self._extra is not None:
            self._extra.clear()
            self._extra.update(common_values["extra"])
        states = common_values["random"]
        _set_random_state(states[self._rank] if len(states) == self._world_size else states[0])
        return int(newest_step)

    def _prepare_loading(self, folder: Path) -> _LoadedCheckpoint:
        """Check the checkpoint and prepare the targets to load it into, without changing model or optimizer.

        Raises:
            ValueError: the checkpoint is damaged, or does not match model, optimizer or data.
        """
        if not (folder / COMPLETE_FILE).exists():
            raise ValueError(
                f"{folder / COMPLETE_FILE} exists on rank 0 but not on rank {self._rank}. Use a folder that all ranks "
                "share."
            )
        try:
            if self._allows_pickles:
                common_values = torch.load(folder / COMPLETE_FILE, map_location="cpu", weights_only=False)
            else:
                common_values = load_plain(folder / COMPLETE_FILE)
        except Exception as error:
            if (kind := refused_type(error)) is not None:
                raise ValueError(
                    f"{folder / COMPLETE_FILE} contains {kind}, and loading such objects can execute code from the "
                    "file. Pass pickles=True to CheckpointManager if you trust this folder."
                ) from None
            raise ValueError(_damaged_message(folder / COMPLETE_FILE, _describe_error(error))) from error
        for name in sorted(common_values["checksums"])[self._rank :: self._world_size]:
            if not (folder / name).exists() or _compute_checksum(folder / name) != common_values["checksums"][name]:
                raise ValueError(_damaged_message(folder / name, "it is missing, or its checksum differs"))
        managed_objects = {"scheduler": self._scheduler, "data": self._data, "extra": self._extra}
        if missing_names := [
            name for name, managed in managed_objects.items() if managed is not None and common_values[name] is None
        ]:
            raise ValueError(
                f"{folder} was saved without {join_words(missing_names)}; omit {join_words(missing_names)} from the "
                "CheckpointManager, too."
            )
        if self._data is not None:
            self._data.check_state(common_values["data"])
        metadata = self._make_reader(folder).read_metadata()
        shapes, model = OriginalShapes(*self._modules), self._model_state()
        model_targets = {
            name: _to_saved_form(value, shapes.parameters_by_name.get(name), shapes) for name, value in model.items()
        }
        for name, value in model_targets.items():
            saved_shape = getattr(metadata.state_dict_metadata.get(f"model.{name}"), "size", None)
            if isinstance(value, Tensor) and saved_shape != value.shape:
                difference = (
                    "does not contain it" if saved_shape is None else f"contains it with shape {tuple(saved_shape)}"
                )
                raise ValueError(
                    f"{name!r} has shape {tuple(value.shape)} in this model, but {folder} {difference}. Pass the "
                    "saved model."
                )
        loaded_checkpoint = _LoadedCheckpoint(metadata, common_values, model, {"model": model_targets}, {})
        if self._optimizer is not None:
            self._prepare_optimizer_state(self._optimizer, folder, shapes, loaded_checkpoint)
        return loaded_checkpoint

    def _prepare_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        folder: Path,
        shapes: OriginalShapes,
        loaded_checkpoint: _LoadedCheckpoint,
    ) -> None:
        """Put empty optimizer tensors into `optimizer` and `load_targets` of `loaded_checkpoint`.

        torch.distributed.checkpoint then loads the saved values into them.
        """
        saved_optimizer, saved_metadata = (
            loaded_checkpoint.common_values["optimizer"],
            loaded_checkpoint.metadata.state_dict_metadata,
        )
        if saved_optimizer["kind"] != type(optimizer).__name__:
            raise ValueError(
                f"{folder} contains the state of {saved_optimizer['kind'] or 'no optimizer'}, got "
                f"{type(optimizer).__name__}. Pass an optimizer of the saved class, or None."
            )
        options_by_name = {name: options for names, options in saved_optimizer["groups"] for name in names}
        tensor_keys_by_name: dict[str, list[str]] = defaultdict(list)
        for kind, *path in (loaded_checkpoint.metadata.planner_data or {}).values():
            if kind == "optimizer":
                tensor_keys_by_name[path[0]].append(path[1])
        names, index = _names_by_parameter(shapes), 0
        states: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        load_targets: dict[str, dict[str, Tensor]] = {}
        for group_index, group in enumerate(optimizer.param_groups):
            options_of_parameter: dict[str, Any] = {}  # options by parameter name
            first_index = index
            for index, parameter in enumerate(group["params"], first_index):
                parameter_names = names[id(parameter)]
                name = next((name for name in parameter_names if name in options_by_name), None)
                if name is None:
                    raise ValueError(
                        f"{folder} has no optimizer state of {parameter_names[0]!r}, which is in param group "
                        f"{group_index}."
                    )
                options_of_parameter[name] = options_by_name[name]
                tensors = {
                    key: _empty_like(parameter, saved_metadata[f"optimizer.{name}.{key}"], shapes)
                    for key in tensor_keys_by_name[name]
                }
                if tensors:
                    load_targets[name] = {
                        key: _to_saved_form(value, parameter, shapes) for key, value in tensors.items()
                    }
                if state := {**saved_optimizer["values"].get(name, {}), **tensors}:
                    states[index] = state
            index = first_index + len(group["params"])
            shared_options: dict[str, Any] = next(iter(options_of_parameter.values()), {})
            if different_names := [
                name for name, options in options_of_parameter.items() if repr(options) != repr(shared_options)
            ]:
                raise ValueError(
                    f"param group {group_index} contains {next(iter(options_of_parameter))!r} and "
                    f"{different_names[0]!r}, which {folder} has in groups with different options, such as lr. Put "
                    "them into separate groups."
                )
            group_options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**group_options, **shared_options, "params": [*range(first_index, index)]})
        if load_targets:
            loaded_checkpoint.load_targets["optimizer"] = load_targets
        loaded_checkpoint.optimizer.update(state=states, param_groups=groups)

    # -- model and optimizer ------------------------------------------------------------------------------------------

    def _model_state(self) -> dict[str, Any]:
        """Return the state dict with the names of the unsharded model; its tensors share the model's memory."""
        return {name: value for module in self._modules for name, value in get_model_state_dict(module).items()}

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        model_parameter_ids = {id(p) for module in self._modules for p in module.parameters()}
        for group_index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in model_parameter_ids:
                    raise ValueError(
                        f"param group {group_index} of the optimizer has a parameter of shape {tuple(parameter.shape)} "
                        "that is not in the model. Create the optimizer after parallelize, fully_shard and pipeline."
                    )

    def _collect_optimizer_state(self, shapes: OriginalShapes) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Return {parameter name: {key: tensor}}, and the values that are not tensors.

        Rejected: torch's get_optimizer_state_dict, which runs an optimizer step if there is no state yet.
        """
        tensors: dict[str, dict[str, Tensor]] = {}
        values: dict[str, dict[str, Any]] = {}
        if self._optimizer is None:
            return tensors, {"groups": [], "values": values}
        for name, parameter in shapes.parameters_by_name.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    _check_state_shape(name, key, value, parameter, shapes)
                    tensors.setdefault(name, {})[key] = _to_saved_form(value, parameter, shapes)
                else:
                    values.setdefault(name, {})[key] = value
        names, groups = _names_by_parameter(shapes), []
        for group in self._optimizer.param_groups:
            options = {key: value for key, value in group.items() if key not in _NON_OPTION_KEYS}
            groups.append(([name for p in group["params"] for name in names[id(p)]], options))
        return tensors, {"groups": groups, "values": values}

    # -- folders and ranks --------------------------------------------------------------------------------------------

    def _folder_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _make_reader(self, folder: Path) -> dcp.FileSystemReader:
        return dcp.FileSystemReader(folder) if self._allows_pickles else PlainReader(folder)

    def _complete_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in ascending order."""
        step_folders = ((path, _parse_step(path)) for path in self.folder.iterdir())
        return sorted(step for path, step in step_folders if step is not None and (path / COMPLETE_FILE).exists())

    def _check_folder(self) -> None:
        """Raise ValueError on all ranks if some rank does not see the folder of rank 0."""
        probe = self.folder / f".{uuid.uuid4().hex}"
        error_message = ""
        if self._rank == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                probe.touch()
            except OSError as error:
                error_message = str(error)
        name, error_message = self._exchange([probe.name, error_message])[0]
        if error_message:
            raise ValueError(f"rank 0 cannot write to {self.folder}: {error_message}.")
        blind_ranks = [str(rank) for rank, sees in enumerate(self._exchange((self.folder / name).exists())) if not sees]
        if self._rank == 0:
            probe.unlink(missing_ok=True)
        if blind_ranks:
            raise ValueError(
                f"rank{'s' if len(blind_ranks) > 1 else ''} {join_words(blind_ranks)} of {self._world_size} cannot "
                f"see a file that rank 0 created in its folder; the folder of this rank {self._rank} is {self.folder}. "
                "Pass the same folder on all ranks, on a shared file system."
            )

    def _exchange(self, value: Any) -> list[Any]:
        return [value] if self._group is None else exchange(resolve_group(self._group), "CheckpointManager", value)

    def _gather_on_rank_0(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, and [] on other ranks."""
        if self._group is None:
            return [value]
        rank_values: list[Any] | None = [None] * self._world_size if self._rank == 0 else None
        dist.gather_object(value, rank_values, dst=0, group=self._group)
        return rank_values or []

    def _run_on_rank_0(self, action: Callable[[], None]) -> None:
        """Run `action()` on rank 0. If it raises, rank 0 raises its error, and all other ranks a ValueError."""
        action_error: Exception | None = None
        if self._rank == 0:
            try:
                action()
            except Exception as error:
                action_error = error
        message = [action_error and (str(action_error) or type(action_error).__name__)]
        if self._group is not None:
            dist.broadcast_object_list(message, src=0, group=self._group)
        if action_error is not None:
            raise action_error
        if message[0] is not None:
            raise ValueError(message[0])


class _OSErrorWriter(dcp.FileSystemWriter):
    """Writer that raises the underlying OSError, such as for a full disk, instead of torch's RuntimeError."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class _RankState(NamedTuple):
    """State of one rank apart from tensors."""

    step: int
    random_state: dict[str, Any]
    optimizer: dict[str, Any]


class _LoadedCheckpoint(NamedTuple):
    """Data of a checkpoint that is being loaded."""

    metadata: Metadata
    common_values: dict[str, Any]  # contents of complete.pt
    model: dict[str, Any]  # state dict that shares the model's memory
    # Targets for torch.distributed.checkpoint, which share memory with `model` and `optimizer`.
    load_targets: dict[str, Any]
    optimizer: dict[str, Any]  # state dict for optimizer.load_state_dict


def _compute_checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _damaged_message(path: Path, reason: str) -> str:
    return f"{path} is damaged: {reason}. Remove {path.parent}; restore() then uses the checkpoint before it."


def _list_modules(model: nn.Module | Pipeline) -> list[nn.Module]:
    return [model] if isinstance(model, nn.Module) else [stage.model for _, stage in sorted(model.stages.items())]


def _names_by_parameter(shapes: OriginalShapes) -> dict[int, list[str]]:
    """Return the names of each parameter by its id; a tied parameter has several names."""
    names = defaultdict(list)
    for name, parameter in shapes.parameters_by_name.items():
        names[id(parameter)].append(name)
    return names


def _to_saved_form(value: Any, parameter: nn.Parameter | None, shapes: OriginalShapes) -> Any:
    """Convert `value`, which belongs to `parameter`, to the form that torch.distributed.checkpoint saves."""
    is_shaped_like_parameter = parameter is not None and isinstance(value, Tensor) and value.shape == parameter.shape
    return shapes(value, parameter) if is_shaped_like_parameter and parameter is not None else value


def _empty_like(parameter: nn.Parameter, saved_metadata: Any, shapes: OriginalShapes) -> Tensor:
    """Allocate optimizer state of `parameter` for the tensor of the checkpoint that `saved_metadata` describes."""
    dtype = saved_metadata.properties.dtype
    if saved_metadata.size == shapes(parameter.detach(), parameter).shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(saved_metadata.size, dtype=dtype, device="cpu")


def _check_state_shape(name: str, key: str, value: Tensor, parameter: nn.Parameter, shapes: OriginalShapes) -> None:
    is_sharded = isinstance(shapes(parameter.detach(), parameter), (DTensor, OriginalShapeTensor))
    if is_sharded and value.numel() > 1 and value.shape != parameter.shape:
        raise ValueError(
            f"optimizer state {key!r} of the sharded parameter {name!r} has shape {tuple(value.shape)}, but the "
            f"parameter has {tuple(parameter.shape)}, so its sharding is unknown. Use an optimizer whose state has the "
            "shape of its parameters."
        )


def _load_optimizer(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    optimizer.load_state_dict(state_dict)
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for key, value in state_dict["state"].get(index, {}).items():
            state = optimizer.state[parameter]
            # optimizer.load_state_dict casts state to the parameter's dtype; restore the saved dtype, such as fp32.
            if isinstance(value, Tensor) and state[key].dtype != value.dtype:
                state[key] = value.to(state[key].device)


def _check_reports(
    folder: Path, reports: list[tuple[str, list[str]]], loaded_checkpoint: _LoadedCheckpoint | None
) -> None:
    """Raise ValueError if a rank cannot restore, or if the checkpoint has a name that no rank's model has."""
    for rank, (error_message, _) in enumerate(reports):
        if error_message:
            raise ValueError(f"rank {rank} cannot restore: {error_message}")
    assert loaded_checkpoint is not None
    model_names = {name for _, names in reports for name in names}
    for kind, *path in (loaded_checkpoint.metadata.planner_data or {}).values():
        if kind == "model" and path[0] not in model_names:
            raise ValueError(f"{folder} contains {path[0]!r}, which this model does not have. Pass the saved model.")


def _copy_to_cpu(value: Any) -> Any:
    """Copy tensors to the CPU, so that training does not change them.

    Copies from a GPU are asynchronous: synchronize before reading them.
    """
    if isinstance(value, Mapping):
        return {key: _copy_to_cpu(item) for key, item in value.items()}
    if isinstance(value, DTensor):
        value = OriginalShapeTensor.from_dtensor(value)
    if isinstance(value, OriginalShapeTensor):
        return value.copy_to_cpu(_copy_tensor_to_cpu)
    return _copy_tensor_to_cpu(value) if isinstance(value, Tensor) else copy.deepcopy(value)


def _copy_tensor_to_cpu(t: Tensor) -> Tensor:
    cpu_tensor = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=t.is_cuda)
    return cpu_tensor.copy_(t.detach(), non_blocking=True)


def _capture_random_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if torch.accelerator.is_available():
        state["device"] = torch.get_device_module().get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "device" in state and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(state["device"])


def _parse_step(path: Path) -> int | None:
    match = _STEP_FOLDER.fullmatch(path.name)
    return None if match is None or not path.is_dir() else int(match[1])


def _describe_error(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first_error, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_describe_error(first_error)}"
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip()  # drop the C++ stack that torch appends


@contextmanager
def _suppress_no_group_warning(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Suppress torch's warning about a save or load without a process group if `group` is None, which is intended."""
    if group is not None:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
