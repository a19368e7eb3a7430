"""Hooks around a parallel model's forward that shard its inputs along the sequence and gather its outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.core.checks import is_check_due
from fused_tp.nn import ColumnParallelLinear
from fused_tp.nn.linear import column_forward
from fused_tp.ops.collectives import gather, scatter
from fused_tp.ops.vocab_statistics import exceeds_chunk
from fused_tp.parallelizing.deferred_logits import DeferredLogits
from fused_tp.parallelizing.forward_shard import (
    UNSHARDED,
    CpContext,
    ForwardShard,
    LayerState,
    RunningForward,
    StateHistory,
    enter_forward,
    leave_forward,
    running_forward,
    running_node_number,
    tensor_version,
    unsharded_state,
)
from fused_tp.parallelizing.global_loss import GlobalLoss, UserLoss, scale_gradient, shift_targets
from fused_tp.parallelizing.grad_sync import GradientSync
from fused_tp.parallelizing.graph import HeadOutputs, leaf_tensors, reachable_nodes
from fused_tp.parallelizing.head_layout import HeadLayout
from fused_tp.parallelizing.outputs import find_tensors, map_tensors

# Attribute of a model whose output is not returned to the caller: a pipeline stage other than the last.
INNER_STAGE_ATTRIBUTE = "_fused_tp_passes_on"


@dataclass(frozen=True)
class Parallelism:
    """Meshes and options of `parallelize` that forward passes read.

    Meshes are 1-D; None for a dim that is missing or has one rank.

    Attributes:
        ulysses_meshes: see `CpContext`.
    """

    tp_mesh: DeviceMesh | None
    cp_mesh: DeviceMesh | None
    sequence_parallel: bool
    loss_parallel: bool
    grad_sync: bool
    ulysses_meshes: tuple[DeviceMesh, DeviceMesh | None] | None = None

    @property
    def shards_sequence(self) -> bool:
        return self.sequence_parallel or self.cp_mesh is not None

    @property
    def computes_loss(self) -> bool:
        """True if the model's own loss would see only a shard of the tokens or of the vocabulary."""
        return self.loss_parallel or self.cp_mesh is not None


@dataclass(frozen=True)
class RowMasks:
    """Visibility between tokens, as found in the arguments of a forward pass.

    Attributes:
        has_padding: a mask with padding was removed from the arguments.
        documents: start of each packed document, and the end of the last one; () for one document. See `CpContext`.
    """

    has_padding: bool = False
    documents: tuple[int, ...] = ()


class SequenceSharding:
    """Shards one forward pass at a time, unless it has a KV cache. Subclasses define the argument names of the model.

    Layers call `current_state()` for the state of the running forward pass, or of the one that activation checkpointing
    reruns.
    """

    token_names: tuple[str, ...]  # may hold the tokens [batch, seq] or their embeddings [batch, seq, hidden]
    position_name: str | None  # [seq] or [batch, seq]
    label_name: str | None  # [batch, seq], not shifted
    needs_last_position = False  # True if a module depends on the greatest position of the full sequence
    cache_names: tuple[str, ...]
    # Tensor arguments that are not sharded.
    unsharded_names: frozenset[str] = frozenset({"shift_labels", "num_items_in_batch"})

    def __init__(self, model: nn.Module, parallelism: Parallelism) -> None:
        self.parallelism = parallelism
        self.head: nn.Module | None = None  # the output layer, if it is sharded, with its adapters
        self._head_outputs = HeadOutputs()
        self._history = StateHistory()
        self._is_in_history = True  # `_history` has the latest forward pass; False while torch.compile traces
        self._state = UNSHARDED  # state of the running forward pass
        self._layers_state = UNSHARDED  # state that the attributes of the layers are set to
        cp_mesh = parallelism.cp_mesh
        self.gradient_sync = GradientSync(cp_mesh) if cp_mesh is not None and parallelism.grad_sync else None
        parameters = inspect.signature(model.forward).parameters.values()
        self._positional_names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
        self._is_replicated_over_cp = False  # the running forward pass computes the same on every CP rank
        # With experts, which parameters a forward pass uses depends on its tokens.
        self._has_experts = any("expert" in name for name, _ in model.named_modules())
        self._gradient_pass_count = 0  # forward passes with gradients
        self._layers: list[Any] = []
        self._head_layers: list[ColumnParallelLinear] = []
        self._head_hooks: list[Any] = []  # handles of the hooks of `set_head`
        self.uneven_heads: Mapping[str, HeadLayout] = {}  # of attention modules, see `ShardingPlan`
        self.whole_blocks: list[str] = []  # names of blocks that run on the full sequence, see `whole_blocks`
        self.expert_blocks: list[str] = []  # names of blocks with experts that run on this rank's tokens
        # Modules before and after the layers that see the full sequence, and where it is split and joined: see
        # `modules_before_layers`, `full_arguments`, `gather_after` and `modules_after_layers` of `ShardingPlan`.
        self.modules_before_layers: frozenset[str] = frozenset()
        self.has_full_arguments = False
        self.gather_after = ""
        self.modules_after_layers: tuple[str, ...] = ()
        self._global_loss: GlobalLoss | None = None
        self.min_attention_calls = 0  # calls of attention over CP ranks that a forward pass needs; else ValueError
        self.attention_calls = 0  # number of such calls in the last forward pass
        self._id_counts = _count_ids(model)

    def prepare(self, model: nn.Module) -> None:
        """Change modules of `model` that are not replaced, before the layers are replaced."""

    def adapt(self, model: Any) -> None:
        """Change attention, masks and loss of `model`, after its layers were replaced."""

    def install(self, model: nn.Module) -> None:
        """Register the hooks on `model`, whose layers have been replaced."""
        for name, module in model.named_modules():
            self.add_layer(name, module)
        for module in self.entry_modules(model):
            self._add_state_hook(module)
        if self.head is not None:
            self.set_head(self.head)
        # torch.compile cannot trace the registration of hooks on parameters, which gradient sync needs. Then these two
        # hooks run eagerly, before and after the model's code, which is traced without them.
        is_traced = self.gradient_sync is None
        model.register_forward_pre_hook(
            self.before_forward if is_traced else self.before_forward_untraced, with_kwargs=True
        )
        model.register_forward_hook(
            self.after_forward if is_traced else self.after_forward_untraced, with_kwargs=True, always_call=True
        )

    @property
    def documents(self) -> tuple[int, ...]:
        """Bounds of the packed documents of the last forward pass, `CpContext.documents`."""
        return () if self._state.cp is None else self._state.cp.documents

    def add_layer(self, name: str, module: Any) -> None:
        """Register `module`, called `name` in the model, if its `sequence_parallel` must follow each forward pass."""
        if hasattr(module, "sequence_parallel") and hasattr(module, "mesh") and not self.runs_on_full_sequence(name):
            self._layers.append(module)
            self._add_state_hook(module)

    def set_head(self, head: nn.Module) -> None:
        """Set the output layer to `head`, and find the layers of fused_tp in it."""
        for handle in self._head_hooks:
            handle.remove()
        for layer in self._head_layers:
            layer.defer_output = None
        self.head = head
        self._head_layers = [module for module in head.modules() if isinstance(module, ColumnParallelLinear)]
        # Not if adapters add to its output, nor in float8, in which `linear_cross_entropy` does not multiply.
        if self.parallelism.loss_parallel and type(head) is ColumnParallelLinear and head.float8 is None:
            head.defer_output = self._defer_logits
        # Hook the layers inside, too: when adapters are merged, a layer inside becomes the output layer again.
        self._head_hooks = [
            module.register_forward_hook(self._record_head_output) for module in {head, *self._head_layers}
        ]

    def _add_state_hook(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._update_state, prepend=True)
        restore_hook_order(module._forward_pre_hooks)

    def runs_on_full_sequence(self, name: str) -> bool:
        """True if the module called `name` is, or is inside, a module that runs on the full sequence."""
        return _is_inside_any(name, (*self.whole_blocks, *self.modules_before_layers, *self.modules_after_layers))

    def may_get_flat_tokens(self, name: str) -> bool:
        """True if the module called `name` is in a block that may pass it the tokens of all rows in one dim."""
        return _is_inside_any(name, self.expert_blocks)

    def state_function_of(self, name: str) -> Callable[[], LayerState]:
        """Return the function that returns the state of the running forward pass, for the experts called `name`."""
        follows_sequence = self.parallelism.sequence_parallel and not self.runs_on_full_sequence(name)
        return self.current_state if follows_sequence else unsharded_state

    def make_global_loss(self, loss_function: Callable[..., Tensor]) -> GlobalLoss:
        """Return the loss over all ranks that replaces `loss_function`, the model's loss function."""
        parallelism = self.parallelism
        vocab_mesh = parallelism.tp_mesh if parallelism.loss_parallel else None
        self._global_loss = GlobalLoss(
            loss_function,
            vocab_mesh=vocab_mesh,
            cp_mesh=parallelism.cp_mesh,
            shards_tokens=parallelism.shards_sequence,
            grad_sync=parallelism.grad_sync,
        )
        return self._global_loss

    # ---- overridden by subclasses ----

    def entry_modules(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules that a caller may call instead of the model, and that do not call `current_state`."""
        return []

    def count_attention_layers(self, model: nn.Module) -> int:
        """Return the number of layers that call attention over the CP ranks, as known without a forward pass."""
        return 0

    def is_cached(self, arguments: dict[str, Any]) -> bool:
        """True if this forward pass reads or fills a KV cache.

        Every CP rank then computes the full forward pass, except that `open_cache` may shard attention.
        """
        return any(arguments.get(name) is not None for name in self.cache_names)

    def cache_types(self, arguments: dict[str, Any]) -> tuple[type, ...]:
        """Return the classes of the KV caches that a forward pass with these arguments may return."""
        return tuple(type(arguments[name]) for name in self.cache_names if arguments.get(name) is not None)

    def check_arguments(self, arguments: dict[str, Any], seq_len: int, targets: Tensor | None) -> RowMasks:
        """Check `arguments` of a sharded forward pass, remove masks that it does not need, and return their content.

        Raises:
            ValueError: an argument is not supported on a shard of the sequence.
        """
        return RowMasks()

    def adapt_unsharded_arguments(self, arguments: dict[str, Any], seq_len: int) -> None:
        """Change `arguments` of a pass that is too short to shard, so that they mean the same as in a sharded pass."""

    def is_too_short(self, seq_len: int) -> bool:
        """True if a sequence of `seq_len` tokens is too short to shard."""
        # With fewer tokens than ranks, some ranks would have no tokens, which the code of most models does not support.
        return self.parallelism.cp_mesh is not None and seq_len < self.parallelism.cp_mesh.size()

    def default_positions(self, tokens: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Return the positions that the model uses for `tokens`, the full sequence, if the caller passes none."""
        return torch.arange(tokens.shape[1], device=tokens.device)

    def open_cache(self, model: nn.Module, arguments: dict[str, Any], num_new_tokens: int) -> object | None:
        """Return the cache of an unsharded pass of `num_new_tokens` tokens; None if the CP ranks do not shard it."""
        return None

    def extra_arguments(self, shard: ForwardShard | None) -> dict[str, Any]:
        """Return keyword arguments to add to the call of the model's forward."""
        return {}

    def unshard_output(self, output: Any, shard: ForwardShard) -> Any:
        """Gather `output`, the model's output for this rank's shard, to the output for the full sequence."""
        raise TypeError(f"{type(self).__name__} must define unshard_output.")

    # ---- before forward ----

    def before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        arguments = self.arguments_by_name(args, kwargs)
        self._head_outputs.reset()
        token_name, tokens = self.find_tokens(arguments)
        cp_mesh, grad_sync = self.parallelism.cp_mesh, self.parallelism.grad_sync
        is_too_short = self.is_too_short(tokens.shape[1])
        is_from_parameters = self.gradient_sync is not None and _are_from_parameters(tokens, token_name, model)
        is_cached = self.is_cached(arguments)
        if is_too_short and not is_cached:
            self.adapt_unsharded_arguments(arguments, tokens.shape[1])
        shard = (
            None
            if is_cached or is_too_short
            else self._shard_forward(model, arguments, token_name, tokens, is_from_parameters)
        )
        cache = self.open_cache(model, arguments, tokens.shape[1]) if shard is None and cp_mesh is not None else None
        self._is_replicated_over_cp = shard is None and cp_mesh is not None
        if self._is_replicated_over_cp and grad_sync and tokens.is_floating_point() and not is_from_parameters:
            assert cp_mesh is not None
            # `after_forward` scales gradients by 1 / ranks for the sum over parameters. Undo that for the caller's
            # embeddings.
            arguments[token_name] = scale_gradient(tokens, cp_mesh.size())
        if self.gradient_sync is not None and torch.is_grad_enabled():
            self.gradient_sync.watch(model)
        if self._global_loss is not None:
            self._global_loss.computed_losses = []
        self._state = UNSHARDED
        if shard is not None:
            are_logits_sharded = self.parallelism.loss_parallel and shard.targets is not None
            is_tp_sharded = self.parallelism.sequence_parallel
            untyped_model: Any = model
            if (
                are_logits_sharded
                and self._global_loss
                and not isinstance(untyped_model.loss_function, (GlobalLoss, UserLoss))
            ):
                untyped_model.loss_function = UserLoss(untyped_model.loss_function, self._global_loss)
            self._state = LayerState(is_tp_sharded, shard.local_len, shard.cp, are_logits_sharded, shard.batch_size)
        self._is_in_history = not torch.compiler.is_compiling()
        if self._is_in_history:
            self._history.record(self._state)
        self._set_layer_state(self._state)
        enter_forward(self, shard, cache)
        return (), {**arguments, **self.extra_arguments(shard)}

    def find_tokens(self, arguments: dict[str, Any]) -> tuple[str, Tensor]:
        """Return (name of the argument that holds the tokens or their embeddings, that tensor)."""
        token_name = next((name for name in self.token_names if arguments.get(name) is not None), None)
        if token_name is None:
            raise ValueError(f"forward needs the tokens of the full batch. Pass {' or '.join(self.token_names)}.")
        tokens = arguments[token_name]
        if not isinstance(tokens, Tensor) or tokens.ndim < 2:
            description = (
                f"shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else f"type {type(tokens).__name__}"
            )
            raise ValueError(f"{token_name} must be a tensor [batch, seq, ...], got {description}.")
        return token_name, tokens

    def arguments_by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call of forward by name."""
        names = self._positional_names
        if len(args) > len(names):
            raise TypeError(f"forward takes {len(names)} positional arguments ({', '.join(names)}), got {len(args)}.")
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def _shard_forward(
        self, model: nn.Module, arguments: dict[str, Any], token_name: str, tokens: Tensor, is_from_parameters: bool
    ) -> ForwardShard:
        seq_len = tokens.shape[1]
        ignore_index = arguments.get("ignore_index", -100)
        targets = self._find_targets(arguments, tokens, ignore_index)
        if self.parallelism.cp_mesh is not None:
            self._check_ids(model, token_name, tokens, targets, ignore_index)
        row_masks = self.check_arguments(arguments, seq_len, targets)
        cp = self._make_cp_context(seq_len, row_masks)
        if self.parallelism.shards_sequence and self.position_name is not None:
            positions = self._set_positions(arguments, tokens, self.position_name, cp)
            if cp is not None and self.needs_last_position:
                cp = replace(cp, last_position=int(positions.max()))
        target_count = None
        if targets is not None:
            target_count = arguments.get("num_items_in_batch")
            target_count = (targets != ignore_index).sum() if target_count is None else target_count
        if cp is not None:
            self._check_no_other_tensors(arguments, token_name)
            tokens = self._shard_tokens(tokens, cp, is_from_parameters)
            targets = None if targets is None else cp.shard(targets, 1)
        local_len = tokens.shape[1]
        if self.parallelism.sequence_parallel and tokens.is_floating_point() and not self.has_full_arguments:
            # Only embeddings are sharded over TP ranks here. Token ids are sharded after they are embedded.
            tokens = scatter(tokens, 1, group=self.parallelism.tp_mesh)
        arguments[token_name] = tokens
        if targets is not None and self.label_name is not None:
            arguments[self.label_name] = targets
            arguments.pop("shift_labels", None)
        logits_to_keep: int | Tensor = 0
        if self.parallelism.shards_sequence and "logits_to_keep" in arguments:
            logits_to_keep = arguments["logits_to_keep"]  # indexes the full sequence, so it is applied after gathering
            arguments["logits_to_keep"] = 0
            if targets is None:
                self._extend_labels(arguments, seq_len, logits_to_keep)
        return ForwardShard(
            tokens.shape[0],
            seq_len,
            local_len,
            cp=cp,
            targets=targets,
            target_count=target_count,
            ignore_index=ignore_index,
            logits_to_keep=logits_to_keep,
            targets_version=tensor_version(targets),
        )

    def _check_ids(
        self, model: nn.Module, token_name: str, tokens: Tensor, targets: Tensor | None, ignore_index: int
    ) -> None:
        """Raise ValueError on all ranks for invalid ids in the batch.

        Otherwise only the rank that holds them would raise, and its peers would wait for it. Skipped for tensors on a
        GPU, where reading the values would block the host.
        """
        if torch.compiler.is_compiling():
            return
        for name, ids, is_target in ((token_name, tokens, 0), (self.label_name, targets, 1)):
            if ids is None or ids.is_floating_point() or ids.device.type != "cpu" or not ids.numel():
                continue
            ids = ids[ids != ignore_index] if is_target else ids
            smallest_id, largest_id = (int(t) for t in ids.aminmax()) if ids.numel() else (0, 0)
            num_ids = self._id_counts[is_target]
            if num_ids is not None and not 0 <= smallest_id <= largest_id < num_ids:
                self._id_counts = _count_ids(model)  # embeddings may have been resized
                num_ids = self._id_counts[is_target]
            if num_ids is not None and not 0 <= smallest_id <= largest_id < num_ids:
                raise ValueError(
                    f"{name} contains {smallest_id if smallest_id < 0 else largest_id}; ids must be 0 to {num_ids - 1}"
                    + (f", or ignore_index={ignore_index}." if is_target else ".")
                )

    def _extend_labels(self, arguments: dict[str, Any], seq_len: int, logits_to_keep: int | Tensor) -> None:
        """Extend labels of the last `logits_to_keep` tokens to labels of all tokens; the added labels are ignored.

        Needed because a sharded forward pass computes the logits of all tokens, whatever logits_to_keep is.
        """
        ignore_index = arguments.get("ignore_index", -100)
        for name in (self.label_name, "shift_labels"):
            labels = None if name is None else arguments.get(name)
            if name is None or not isinstance(labels, Tensor) or labels.ndim != 2 or labels.shape[1] == seq_len:
                continue
            if not isinstance(logits_to_keep, int) or labels.shape[1] != logits_to_keep:
                raise ValueError(
                    f"{name} has shape {tuple(labels.shape)}, with {seq_len} tokens and "
                    f"logits_to_keep={logits_to_keep}. Pass labels of all tokens, or of the last logits_to_keep tokens."
                )
            full_labels = labels.new_full((len(labels), seq_len), ignore_index)
            first_label = 0 if name == "shift_labels" else 1  # no kept logits precede the first label
            full_labels[:, seq_len - logits_to_keep + first_label :] = labels[:, first_label:]
            arguments[name] = full_labels

    def _make_cp_context(self, seq_len: int, row_masks: RowMasks) -> CpContext | None:
        tp_mesh, cp_mesh = self.parallelism.tp_mesh, self.parallelism.cp_mesh
        if cp_mesh is None:
            return None
        tp_rank = 0 if tp_mesh is None else tp_mesh.get_local_rank()
        return CpContext(
            cp_mesh, seq_len, row_masks.has_padding, row_masks.documents, tp_rank, self.parallelism.ulysses_meshes
        )

    def _find_targets(self, arguments: dict[str, Any], tokens: Tensor, ignore_index: int) -> Tensor | None:
        """Return the shifted labels of the full sequence; None without labels or without a loss over ranks."""
        if not self.parallelism.computes_loss or self.label_name is None:
            return None
        labels = arguments.get(self.label_name)
        if labels is None:  # shift_labels alone have no effect
            return None
        name: str = "shift_labels"
        targets: Tensor | None = arguments.get(name)
        if targets is None:
            name, targets = self.label_name, shift_targets(labels, ignore_index)
        if targets.shape != tokens.shape[:2]:
            raise ValueError(
                f"{name} must have the shape of the tokens, {tuple(tokens.shape[:2])}, got {tuple(targets.shape)}. "
                "Pass the full batch and its full labels on every rank."
            )
        return targets

    def _set_positions(self, arguments: dict[str, Any], tokens: Tensor, name: str, cp: CpContext | None) -> Tensor:
        """Set the argument `name` to the positions of this CP rank's tokens, and return the full sequence's positions.

        Without it, the model would count positions from 0 on each rank's shard.
        """
        seq_len = tokens.shape[1]
        positions = arguments.get(name)
        if positions is None:
            positions = self.default_positions(tokens, arguments)
        if positions.shape[-1] != seq_len:
            raise ValueError(
                f"{name} must have {seq_len} elements in its last dim, one for each token, got shape "
                f"{tuple(positions.shape)}. Pass the positions of the full sequence."
            )
        arguments[name] = positions if cp is None else cp.shard(positions, positions.ndim - 1)
        return positions

    def _shard_tokens(self, tokens: Tensor, cp: CpContext, is_from_parameters: bool) -> Tensor:
        if is_from_parameters:
            # These embeddings come from the model's own parameters, whose gradients backward sums over CP ranks. So the
            # gradient of the embeddings themselves must not be gathered.
            return tokens.index_select(1, cp.positions(tokens.device))
        if tokens.is_floating_point() and not self.parallelism.grad_sync:
            # Embeddings computed by the caller: their gradient is gathered, so it is complete on every rank already.
            tokens = scale_gradient(tokens, 1 / cp.mesh.size())
        return cp.shard(tokens, 1)

    def _check_no_other_tensors(self, arguments: dict[str, Any], token_name: str) -> None:
        supported_names = {token_name, self.position_name, self.label_name, *self.unsharded_names}
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.ndim > 0 and name not in supported_names:
                raise ValueError(
                    f"forward got the tensor argument {name} {tuple(value.shape)}, which is not supported over context "
                    "parallel ranks: how to shard it is unknown. Omit it, or use no cp_dim."
                )

    @torch.compiler.disable
    def before_forward_untraced(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.before_forward(model, args, kwargs)

    @torch.compiler.disable
    def after_forward_untraced(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        return self.after_forward(model, args, kwargs, output)

    # ---- state of layers ----

    def current_state(self) -> LayerState:
        """Return the `LayerState` of the running forward pass or recomputation.

        Every layer that can run on its own calls this first.
        """
        if not (self.parallelism.shards_sequence or self.parallelism.loss_parallel):
            return UNSHARDED
        if torch.compiler.is_compiling():
            return self._state  # a compiled program includes its recomputation, which is traced with the forward
        frame, node_number = running_forward(), running_node_number()
        if frame is not None and frame.owner is self and frame.node_number == node_number:
            state = self._state
        elif node_number is not None:
            # A compiled forward pass is not in the history: use the latest state.
            state = self._history.state_at(node_number) if self._is_in_history else self._state
        else:
            state = self._find_direct_call_state()
        if self._is_in_history:
            # The layer creates new nodes: if it contains a nested checkpoint, that will be looked up by these.
            self._history.record(state)
        if state is not self._layers_state:
            self._set_layer_state(state)
        return state

    def _find_direct_call_state(self) -> LayerState:
        """Return the state for a submodule that the caller calls directly: this rank runs it on the unsharded input."""
        if self.parallelism.cp_mesh is not None and torch.is_grad_enabled():
            raise ValueError(
                "A submodule of a model over context parallel ranks was called directly. Only the model that "
                "parallelize returned shards inputs and sums gradients. Call that model; or call parallelize on the "
                "submodule instead, if no module outside uses its parameters (a tied output layer does); or call the "
                "submodule under torch.no_grad(), where each rank computes the full output."
            )
        return UNSHARDED

    def _update_state(self, layer: nn.Module, args: Any) -> None:
        self.current_state()

    def _record_head_output(self, head: nn.Module, args: Any, output: Tensor) -> None:
        frame = running_forward()
        # Not if backward reruns the head.
        if frame is None or frame.owner is not self or frame.node_number != running_node_number():
            return
        if isinstance(output, DeferredLogits):
            self._head_outputs.end_hidden_states()
            output.watch(partial(self._record_computed_logits, frame))
        else:
            self._head_outputs.record(output)

    def _record_computed_logits(self, frame: RunningForward, logits: Tensor) -> None:
        if running_forward() is frame:
            self._head_outputs.record(logits)

    def _defer_logits(
        self, head: ColumnParallelLinear, x: Tensor, gather_size: int | None, batch: int | None
    ) -> Tensor:
        """Return the output of `head` for x; deferred in a forward pass whose loss is computed over the vocabulary."""
        frame, state = running_forward(), self._layers_state
        is_loss_computed_here = frame is not None and frame.owner is self and frame.node_number == running_node_number()
        if (
            torch.compiler.is_compiling()
            or not (is_loss_computed_here and state.are_logits_sharded and torch.is_grad_enabled())
            or x.ndim != 3
            or batch is not None
            # Wrapped by FSDP itself, or under ZeRO 3, the layer has its weight during this call only.
            or type(head) is not ColumnParallelLinear
            or hasattr(head.weight, "ds_id")
        ):
            return column_forward([head], x, gather_size, batch)[0]

        assert state.local_len is not None  # of every sharded forward pass
        num_rows, num_ranks = x.shape[0] * state.local_len, head.mesh.size()
        if not exceeds_chunk(num_rows, head.out_features, num_ranks, x.element_size()):
            return column_forward([head], x, gather_size, batch)[0]  # with one matmul less
        return DeferredLogits.from_head(head, x, state.local_len)

    def _set_layer_state(self, state: LayerState) -> None:
        self._layers_state = state
        for layer in self._layers:
            layer.sequence_parallel = state.is_tp_sharded
        if self.parallelism.loss_parallel:
            for head in self._head_layers:
                head.gather_output = not state.are_logits_sharded

    # ---- after forward ----

    def after_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        frame = leave_forward(self)
        try:
            if output is None:  # forward raised
                return None
            if frame is not None:
                self._check_attention_calls(model, frame)
            return self._finish_output(model, args, kwargs, output, None if frame is None else frame.shard)
        finally:
            self._head_outputs.reset()  # drop the outputs, which keep the autograd graph alive

    def _check_attention_calls(self, model: nn.Module, frame: RunningForward) -> None:
        """Raise ValueError if a layer of this forward pass has attended to this rank's tokens only."""
        if frame.shard is None or frame.shard.cp is None or frame.is_traced or torch.compiler.is_compiling():
            return
        self.attention_calls = frame.attention_calls
        if frame.attention_calls < self.min_attention_calls:
            raise ValueError(
                f"{type(model).__name__} called attention over the context parallel ranks {frame.attention_calls} "
                f"times in this forward pass, but {self.min_attention_calls} layers should call it. The other layers "
                "attended to this rank's tokens only: their forward or attention function was replaced, or they were "
                "removed, after parallelize. Make such changes before parallelize, or use no cp_dim."
            )

    def _finish_output(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, shard: ForwardShard | None
    ) -> Any:
        if shard is not None and shard.targets is not None and self._global_loss is not None:
            self._global_loss.check_returned_loss(output, self._head_outputs)
        has_gradients = (
            self.gradient_sync is not None and torch.is_grad_enabled() and not self.gradient_sync.is_disabled
        )
        self._gradient_pass_count += has_gradients
        is_comparison_due = (
            self._has_experts
            or (self.gradient_sync is not None and self.gradient_sync.has_partly_used_parameters)
            or is_check_due(self._gradient_pass_count)
        )
        if (
            self.gradient_sync is not None
            and has_gradients
            and is_comparison_due
            and not self.gradient_sync.has_pending_reduction
        ):
            outputs = [t for t in find_tensors(output) if t.requires_grad]
            self.gradient_sync.find_partly_used_parameters(model, outputs, has_experts=self._has_experts)
        if self._is_replicated_over_cp and self.parallelism.grad_sync and torch.is_grad_enabled():
            # Every CP rank has computed the same, but backward sums the gradients of parameters: scale by 1 / ranks.
            assert self.parallelism.cp_mesh is not None
            loss_share = 1 / self.parallelism.cp_mesh.size()
            cache_types = self.cache_types(self.arguments_by_name(args, kwargs))
            return map_tensors(
                lambda t: scale_gradient(t, loss_share) if t.requires_grad else t, output, cache_types=cache_types
            )
        if shard is None or shard.targets is not None or hasattr(model, INNER_STAGE_ATTRIBUTE):
            return output
        return self.unshard_output(output, shard)

    def gather_tokens(self, t: Tensor, shard: ForwardShard) -> Tensor:
        """Gather `t` [batch, seq, ...], computed from this rank's shard of the sequence, to the full sequence.

        Raises:
            ValueError: `t` has another shape.
        """
        if t.ndim == 0 and shard.cp is None:  # probably a loss, computed from logits that the head has gathered
            if not self._head_outputs.determines(t):
                raise ValueError(
                    "The model returns a scalar computed from hidden states, which is not supported with "
                    "sequence_parallel=True: each tensor parallel rank has other tokens, so the scalar would differ "
                    "between ranks. Compute it from the output layer's output, or pass sequence_parallel=False."
                )
            return t
        if t.ndim < 2 or t.shape[1] != shard.local_len:
            raise ValueError(
                f"The model must return tensors [batch, seq, ...], got {tuple(t.shape)}: a tensor computed from this "
                "rank's shard of the sequence would differ between ranks. Return one entry per token, computed after "
                "the output layer, and compute reductions (a mean, a pooled token) outside of the model."
            )
        return self.gather_sequence(t, shard)

    def gather_sequence(self, t: Tensor, shard: ForwardShard, *, is_tp_sharded: bool = False) -> Tensor:
        """Gather `t`, a shard of the sequence along dim 1, to the full sequence on every rank; differentiable."""
        parallelism = self.parallelism
        if is_tp_sharded:
            t = gather(t, 1, group=parallelism.tp_mesh, gather_size=shard.local_len)
        if shard.cp is None:
            return t
        t = shard.cp.unshard(t, 1)
        # All ranks compute the same loss from the full output. With grad_sync the gradient of the gather counts it
        # once; a wrapper that averages over the CP ranks needs the gradient times their number.
        return t if parallelism.grad_sync else scale_gradient(t, shard.cp.mesh.size())


def _is_inside_any(name: str, blocks: Iterable[str]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in blocks)


def sharded_head(head: nn.Module | None) -> nn.Module | None:
    """Return `head` if it is a ColumnParallelLinear or contains one (in an adapter's wrapper); else None."""
    is_sharded = head is not None and any(isinstance(module, ColumnParallelLinear) for module in head.modules())
    return head if is_sharded else None


def _are_from_parameters(tokens: Tensor, token_name: str, model: nn.Module) -> bool:
    """True if `tokens` are embeddings computed from trainable parameters of `model`, not from the caller's tensors.

    Raises:
        ValueError: they are computed from both. The caller's tensors need gradients of all tokens on every rank, but
            the model's parameters only of the rank's tokens.
    """
    if not (tokens.requires_grad and torch.is_grad_enabled()):
        return False
    parameters = {id(p) for p in model.parameters() if p.requires_grad}
    leaf_is_parameter = {id(leaf) in parameters for leaf in leaf_tensors(reachable_nodes(tokens))}
    if len(leaf_is_parameter) > 1:
        raise ValueError(
            f"{token_name} was computed from parameters of the model and from other tensors that require grad, which "
            "is not supported over context parallel ranks: only one of the two would get a correct gradient. Detach "
            "one of them, or pass token ids, which the model embeds."
        )
    return leaf_is_parameter == {True}


def restore_hook_order(hooks: dict[int, Any]) -> None:
    """Make the insertion order of `hooks`, an OrderedDict, equal to its order after `move_to_end`.

    torch.compile of torch 2.11 takes a hook's index in the OrderedDict, and looks it up in the underlying dict.
    """
    for key in list(hooks):
        hooks[key] = hooks.pop(key)


def _count_ids(model: Any) -> tuple[int | None, int | None]:
    """Return (number of token ids, number of target ids) that `model` accepts; None for an unknown number."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config") and config.get_text_config() is not config:
        return None, None  # ids beyond the vocabulary may denote images
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    counts: list[int | None] = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        try:
            layer = getattr(model, name)()
        except (AttributeError, NotImplementedError):  # a plain model; or one without such a layer
            layer = embeddings[0] if len(embeddings) == 1 and name == "get_input_embeddings" else None
        weight = getattr(layer, "weight", None)
        is_weight_matrix = (
            isinstance(layer, (nn.Embedding, nn.Linear)) and isinstance(weight, Tensor) and weight.ndim == 2
        )
        counts.append(weight.shape[0] if is_weight_matrix and weight is not None else None)
    return counts[0], counts[1]
