"""The engine as its users see it: it settles the placement, and hands it on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers import GenerationConfig, PreTrainedModel

from megatrain.autoplace.auto import settle
from megatrain.autoplace.fits import limits, told_bytes
from megatrain.checkpoint import open_checkpoint
from megatrain.device import Device, Recording, free_bytes, open_device
from megatrain.engine.engine import MicroBatches, PlacedEngine
from megatrain.engine.update import StepResult
from megatrain.engine.whole_model import held_bytes, is_whole, whole_model
from megatrain.errors import InputError
from megatrain.forecast.workload import Generation
from megatrain.loss import (
    CROSS_ENTROPY,
    SCORE,
    TOKEN_SCORE,
    CrossEntropy,
    Loss,
    Reward,
    TopTokens,
    given_loss,
)
from megatrain.model.neftune import add_noise
from megatrain.model.trained import Trained
from megatrain.optim import Rule, is_number
from megatrain.parallel.distributed import ALONE, Ranks, local_rank, open_ranks
from megatrain.parallel.sequence_ranks import open_sequence_ranks
from megatrain.placement import Placement, Precision, Verify
from megatrain.source.engine_setup import DTYPES, EngineSetup, choose_trained, open_structure
from megatrain.source.sharing import NO_LABELS, check_call, require_alone, require_whole_rows
from megatrain.source.source import Base, Opens, open_source
from megatrain.source.state_io import check_precision, resumed_placement, saved_optimizer

__all__ = ["Engine", "StepResult", "UpdatedTile"]


@dataclass(frozen=True)
class UpdatedTile:
    """The weights of a layer, the head or the embedding after their newest update.

    Attributes:
        version: how many updates they have had; 0 of what is frozen.
        weights: of each parameter in its shape, in the type of the compute, where they rest: no
            copy (but of what rests on a disk), so they hold until the next step, and are not to be
            written.
    """

    name: str
    version: int
    weights: Mapping[str, Tensor]


ALL = Trained()
_HELD = 0.9  # of the memory that is free; the rest is for the work


class Engine(PlacedEngine):
    """Trains a causal language model whose state rests in host memory.

    Making one reads or draws the weights. Whatever does not fit is refused before that.

    Args:
        model: a folder, a hub id, a transformers model or PeftModel (copied; on the meta device its
            weights are drawn), a configuration (drawn), or a checkpoint, of which the weights
            alone are taken (`Engine.load` takes all of it).
        optimizer: the rule of updates, such as `AdamW(lr=1e-5)`. None: the model is only run; its
            weights, in the type of the compute, are all that is kept.
        max_grad_norm: gradients are clipped by this global norm. None: they are not.
        precision: what layers compute in: bf16, fp32, or fp8 (their linear modules, the rest in
            bf16). What is trained has an fp32 master with each of them.
        placement: where state rests and how it is streamed. `auto`: the fastest way that fits.
        device: `cpu`, `cuda` or `cuda:N`. None: a GPU if there is one.
        seed: of weights that are drawn, and of dropout.
        tokens_per_step: of all micro-batches of a step, at most; of all ranks. With `auto`, None
            stands for 98,304.
        sequence_length: tokens of a row, at most. With `auto`, None stands for 1,024.
        micro_batch: rows of a micro-batch. None: `auto` chooses, see `Engine.micro_batch`.
        loss: what steps will be given; `auto` places state for it.
        generation: replies that the model makes between steps, for which `auto` leaves room.
        trust_remote_code, attn_implementation: as `from_pretrained` of transformers takes them.
        trained: which parameters are trained, by patterns of their names. By default those that
            require gradients.
        device_memory, host_memory: what the process may take at most, such as `"10GiB"`, or a
            number of bytes. None: what there is.
        disk: a folder on a fast disk where state may rest that the host has no room for.
        disk_space: bytes of it at most. None: what is free.
        saveable: False also trains a model that code has changed so that no folder could hold it;
            it cannot be saved then.
        adapter: a LoraConfig of PEFT, or its keys as a dictionary: only this is trained.
        base: how the frozen linear layers under an adapter rest: bf16, fp8 or nf4 (2, 1 and half
            a byte a parameter).
        base_model: where the base of the adapter `model` is, if not where that says.
        router_aux_loss_coef: weight of the routers' loss of a mixture of experts. None: as the
            model's configuration says.
        group: the ranks that train the model together (docs/distributed.md). None: this process.
        sequence_parallel: how many ranks share every row: 1, or all of `group`.
        verify: when weights, states and gradients are compared with their checksums: in each step,
            in saves, or never (docs/reliability.md).

    Raises:
        InputError: the model, or an argument, cannot be used.
        DoesNotFit: not enough host, device or disk memory; the message has what would do.

    Attributes:
        config: the model's transformers configuration.
        optimizer: a `torch.optim.Optimizer` whose groups can be scheduled; None for inference.
        num_parameters: distinct parameters, frozen ones included.
        num_trained: of them, those that have a gradient.
        label_shift: how many tokens after its logits a label is; 1, unless the model's own is 0.
        placement: where state rests and how it is streamed; it never changes.
        micro_batch: rows that micro-batches should have; None where nothing was foreseen.
    """

    def __init__(
        self,
        model: Opens,
        *,
        optimizer: Rule | None = None,
        max_grad_norm: float | None = 1.0,
        precision: Precision = "bf16",
        placement: Placement | Literal["auto"] = "auto",
        device: str | Device | None = None,
        seed: int = 0,
        tokens_per_step: int | None = None,
        sequence_length: int | None = None,
        micro_batch: int | None = None,
        loss: Loss = CROSS_ENTROPY,
        generation: Generation | None = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        trained: Trained = ALL,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        disk: str | Path | None = None,
        disk_space: str | int | None = None,
        saveable: bool = True,
        adapter: Any = None,
        base: Base = "bf16",
        base_model: str | Path | None = None,
        router_aux_loss_coef: float | None = None,
        group: ProcessGroup | DeviceMesh | None = None,
        sequence_parallel: int = 1,
        verify: Verify = "save",
    ) -> None:
        """Open a model and bring its weights to host memory; the class says what it takes."""
        _check_arguments(optimizer, max_grad_norm, precision, placement, seed, loss, verify)
        if not isinstance(trained, Trained):
            raise InputError(f"trained is {trained!r}; it must be a Trained(freeze=[...])")
        if disk_space is not None and disk is None:
            raise InputError("disk_space needs disk: a folder on the disk")
        code: dict[str, Any] = {"attn_implementation": attn_implementation}
        code |= {"trust_remote_code": trust_remote_code, "scores": isinstance(loss, Reward)}
        source = open_source(model, adapter, base, router_aux_loss_coef, base_model, **code)
        choose_trained(source, trained, optimizer, precision)
        on, ranks, sequence_ranks = _open(
            device, group, sequence_parallel, device_memory, host_memory, disk_space
        )
        shared = open_structure(source, optimizer, ranks, saveable=saveable)
        opened = EngineSetup(
            source,
            shared,
            max_grad_norm,
            precision,
            *on,
            disk,
            seed,
            ranks,
            sequence_ranks,
            verify,
        )
        size = tokens_per_step, sequence_length, micro_batch
        settled = settle(opened, placement, *size, loss, generation)
        self.micro_batch = settled.micro_batch
        super().__init__(opened, settled.placement, settled.planned)

    def add_neftune(self, alpha: float) -> None:
        """Let steps, not evaluations, add noise to token embeddings (see `model/neftune.py`).

        It depends on the engine's seed, the step and the micro-batch, not on the placement. It is
        not part of a checkpoint.

        Raises:
            InputError: the model has no token embedding that it could be added to.
        """
        require_whole_rows(self._share.ranks, "noise on embeddings (neftune_alpha)")
        add_noise(self._program.capture.model, alpha)

    def score(self, micro_batches: MicroBatches) -> tuple[float, float]:
        """Mean cross entropy, and the share of labels that are the likeliest token; as `evaluate`.

        Of several tokens that are equally likely each counts as the likeliest.
        """
        batch = self._prepare(micro_batches, SCORE)
        found = self._forward_only(batch, lambda head, slot, h: head.loss(slot, batch, h))
        parts = self._ranks.all_gather_object(torch.stack(found).sum(0).cpu())
        loss, accuracy = torch.stack(parts).sum(0).tolist()
        return loss, accuracy

    def logprobs(self, micro_batches: MicroBatches, *, temperature: float = 1.0) -> list[Tensor]:
        """The log-probability of each label `[B, T]` in its place, fp32 on the CPU; 0 without one.

        Micro-batches as for `evaluate`; logits never exist as a whole. They are divided by
        `temperature`.
        """
        found = self._each_label(micro_batches, CrossEntropy(temperature))
        return [-each.roll(self.label_shift, 1) for each in found]

    def top_logprobs(
        self, micro_batches: MicroBatches, top_k: int, temperature: float = 1.0
    ) -> list[tuple[Tensor, Tensor]]:
        """The likeliest tokens in each label's place, and their log-probabilities `[B, T, K]`.

        The ids (int64) and fp32, on the CPU; 0 without a label. Otherwise as `logprobs`.

        Raises:
            InputError: as `evaluate`, or the vocabulary has not so many tokens.
        """
        if top_k > (size := self._spec.num_logits):
            raise InputError(f"top_k is {top_k}, and the model has {size} tokens; take fewer")
        found = self._each_label(micro_batches, TopTokens(top_k, temperature))
        each = (of.roll(self.label_shift, 1).unbind(2) for of in found)
        return [(ids.long(), log_probs) for log_probs, ids in each]

    def rewards(self, micro_batches: MicroBatches) -> list[Tensor]:
        """The score of each label `[B, T]` in its place, fp32 on the CPU; 0 without a label.

        Of a model with a sequence head; see `megatrain.loss.Reward`.
        """
        return self._each_label(micro_batches, TOKEN_SCORE)

    @contextmanager
    def whole_model(
        self, *, spare: int | None = None, apart: bool = False
    ) -> Iterator[PreTrainedModel]:
        """The transformers model itself, for `generate` and the like, while the engine streams it.

        In evaluation mode, without gradients. No other method may be called within. Several ranks
        call it with the same inputs, and are given the same logits.

        Args:
            spare: hold the weights on the device meanwhile, where that leaves so many bytes free;
                one of several ranks does not.
            apart: several ranks call it with inputs of their own, but of one shape and as often.

        Raises:
            InputError: layers or the head are streamed in slices (`is_whole` says so before).
        """
        check_call(self._ranks, self._spec, self._steps, None, NO_LABELS, None)
        require_whole_rows(self._share.ranks, "the model as a whole, for texts,")
        if self._spec.capture.scores_rows:
            raise InputError("the model gives scores of rows, and no texts; use Engine.rewards")
        self.flush()
        self._program.train(False)
        of = self._parts, self._spec, self._store
        free = free_bytes(self.device, self._opened.host_limit)
        held = spare is not None and held_bytes(*of) + spare <= _HELD * free
        held = held and not self._ranks.together
        given = self.device, *of, self._ranks
        with self._undisturbed(), whole_model(*given, held=held, apart=apart) as model:
            yield model

    def updated_tiles(self) -> Iterator[UpdatedTile]:
        """Every tile as soon as its update is done, in the order of updates; before the next step.

        Distinct parameters, each once: a tied one has its first name.

        Raises:
            InputError: there are several ranks, or the base is packed.
        """
        require_alone(self._ranks, "weights without a copy")
        if self._opened.source.base != "bf16":
            raise InputError(f"base is {self._opened.source.base!r}: it has no weights to hand out")
        for tile in (tile for tile in self._store.tiles if tile.layout.entries):
            self.device.synchronize(tile.updated, "version complete")
            self.device.synchronize(tile.written, "version complete on disk")
            views = {e.name: tile.weights.values(tile.place(e)[0]) for e in tile.layout.entries}
            shaped = {e.name: views[e.name].view(e.shape) for e in tile.layout.entries}
            yield UpdatedTile(tile.name, tile.version, shaped)

    def require_held(self) -> None:
        """Raises InputError: parameters are trained that the adapter's folder does not hold."""
        self._opened.require_held()

    @property
    def generation_config(self) -> GenerationConfig:
        """How the model generates where nothing is said: that of its source."""
        return self._opened.source.model.generation_config

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the model."""
        return self._ranks

    @property
    def batch_ranks(self) -> Ranks:
        """The ranks that take micro-batches of their own; one, where all share every row."""
        return ALONE if self._share.ranks.together else self._ranks

    @property
    def balances_experts(self) -> bool:
        """True if the loss of a step has that of routers, of all tokens but padding."""
        return bool(self._spec.routed)

    @property
    def is_whole(self) -> bool:
        """True if layers and head are each streamed as a whole."""
        return is_whole(self._parts, self._spec)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        placement: Placement | Literal["auto"] | None = None,
        device: str | Device | None = None,
        precision: Precision | None = None,
        max_grad_norm: float | Literal["saved"] | None = "saved",
        states: str | None = None,
        master: int | None = None,
        base_model: str | Path | None = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        disk: str | Path | None = None,
        disk_space: str | int | None = None,
        group: ProcessGroup | DeviceMesh | None = None,
        sequence_parallel: int = 1,
        verify: Verify = "save",
    ) -> Self:
        """An engine that goes on where `save` was called.

        Args:
            folder: a checkpoint; every byte of it is checked.
            placement: None takes the saved one, if the kind of device is the same; else `auto`.
            precision: as a check: it cannot change.
            max_grad_norm: another one, or None, from now on.
            states, master: of the optimizer from now on; the saved are converted, not exactly.
            base_model: where the base of an adapter is now, if it has moved; it has to be the same.
            attn_implementation: None: the saved one; else as `Engine` takes it, also other ranks.

        Raises:
            InputError: the checkpoint is damaged or cannot be used as wanted; the message names
                the file, and another checkpoint beside it that is whole.
            DoesNotFit: not enough host or device memory.
        """
        checkpoint = open_checkpoint(folder)
        settings = checkpoint.settings
        opened = device if isinstance(device, Device) else open_device(device, local_rank(group))
        engine = cls(
            open_source(
                checkpoint,
                base_model=base_model,
                resumes=True,
                trust_remote_code=trust_remote_code,
                attn_implementation=attn_implementation,
            ),
            optimizer=saved_optimizer(checkpoint, states=states, master=master),
            max_grad_norm=settings.max_grad_norm if max_grad_norm == "saved" else max_grad_norm,
            precision=check_precision(checkpoint, precision),
            placement=resumed_placement(checkpoint, placement, opened.kind),
            device=opened,
            seed=settings.seed,
            device_memory=device_memory,
            host_memory=host_memory,
            disk=disk,
            disk_space=disk_space,
            group=group,
            sequence_parallel=sequence_parallel,
            verify=verify,
        )
        engine._resume(settings)
        return engine


def _open(
    device: Any, group: Any, rows: Any, device_memory: Any, host_memory: Any, disk_space: Any
) -> tuple[tuple[Recording, int | None, int | None], Ranks, Ranks]:
    """The device, with its limits set, the host's and the disk's; who share the model; and rows."""
    if not isinstance(device, Device):
        device = open_device(device, local_rank(group))
    opened = Recording(device)
    device_limit, host_limit = limits(device_memory, host_memory)
    opened.limit(device_limit, host_limit)
    on = opened, host_limit, told_bytes("disk_space", disk_space)
    ranks = open_ranks(group, opened.torch_device)
    return on, ranks, open_sequence_ranks(ranks, opened.torch_device, rows)


def _check_arguments(
    optimizer: Any,
    max_grad_norm: Any,
    precision: Any,
    placement: Any,
    seed: Any,
    loss: Any,
    verify: Any,
) -> None:
    given_loss(loss)
    if optimizer is not None and not isinstance(optimizer, Rule):
        kind = "class" if isinstance(optimizer, type) else type(optimizer).__name__
        raise InputError(
            f"optimizer is a {kind}; it must be megatrain.AdamW(...), another rule of "
            "megatrain.optim, or None"
        )
    if max_grad_norm is not None and not (is_number(max_grad_norm) and max_grad_norm > 0):
        raise InputError(f"max_grad_norm is {max_grad_norm!r}; it must be positive, or None")
    if precision not in DTYPES:
        raise InputError(f"precision is {precision!r}; it must be bf16, fp32 or fp8")
    if placement != "auto" and not isinstance(placement, Placement):
        raise InputError(f"placement is {placement!r}; it must be 'auto' or a Placement(...)")
    if verify not in get_args(Verify):
        raise InputError(f"verify is {verify!r}; it must be step, save or off")
    if type(seed) is not int:
        raise InputError(f"seed is {seed!r}; it must be an integer")
