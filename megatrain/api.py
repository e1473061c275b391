"""The engine of users: opens a model, chooses the placement, and computes losses and scores."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megatrain import loss as losses
from megatrain.autoplace.auto import parse_limit, settle
from megatrain.checkpoint import open_checkpoint
from megatrain.device import Buffer, Device, Recording, open_device
from megatrain.engine.batch import MicroBatches
from megatrain.engine.engine import PlacedEngine
from megatrain.engine.head import Head
from megatrain.engine.modules import State
from megatrain.engine.undisturbed import opening
from megatrain.engine.update import StepResult
from megatrain.errors import InputError
from megatrain.forecast.workload import Generation
from megatrain.loss import CROSS_ENTROPY, CrossEntropy, Loss
from megatrain.model.attention import attend_by_kernel
from megatrain.model.micro_batch import Batch
from megatrain.model.trained import Trained
from megatrain.optim import Rule, is_number
from megatrain.parallel.distributed import local_rank, open_ranks, open_sequence_ranks
from megatrain.placement import Placement, Precision, Verify
from megatrain.source import source as sources
from megatrain.source.sharing import NO_LABELS, require_alone
from megatrain.source.state_io import check_precision, resumed_placement, saved_optimizer
from megatrain.source.tiles import DTYPES

__all__ = ["Engine", "StepResult"]

ALL = Trained()  # all parameters that require gradients


class Engine(PlacedEngine):
    """Trains a causal language model whose state rests in host memory.

    A new engine refuses a model that does not fit, then reads or randomly initialises the weights.

    Args:
        model: a folder, a hub id, a transformers model or PeftModel (it is copied; on the meta
            device it is randomly initialised), a configuration (randomly initialised), or a
            checkpoint, of which only the weights are taken (`Engine.load` takes all of it).
        optimizer: the rule of updates, such as `AdamW(lr=1e-5)`. None: the model is only run; only
            its weights are kept, in the compute dtype.
        max_grad_norm: gradients are clipped to this global norm. None: they are not clipped.
        precision: the dtype of layers: bf16, fp32, or fp8 (their linear modules, the rest in
            bf16). Trained parameters have an fp32 master in any case.
        placement: where state rests and how it is streamed. `auto`: the fastest one that fits.
        device: `cpu`, `cuda`, `cuda:N` or `mps`. None, `auto`: a CUDA GPU if there is one.
        seed: of random weights and of dropout.
        tokens_per_step: the most tokens in a step, of all micro-batches and ranks. With `auto`,
            None stands for 98,304.
        sequence_length: tokens of a row, at most. With `auto`, None stands for 1,024.
        micro_batch: rows of a micro-batch. None: `auto` chooses, see `Engine.micro_batch`.
        loss: of steps and evaluations that name none; `auto` leaves memory for it.
        generation: replies that the model makes between steps, for which `auto` leaves memory.
        media: a processor's tensors, `input_ids` `[1, T]` and others, of a row with as many images
            or sounds as any will have; `auto` leaves memory to encode them in every row.
        trust_remote_code: as for `from_pretrained` of transformers.
        attn_implementation: likewise.
        trained: the trained parameters, by patterns of their names. By default those that
            require gradients.
        device_memory: a limit for the process, such as `"10GiB"`, or a number of bytes. None: all
            of the machine's.
        host_memory: likewise.
        disk: a folder on a fast disk, where state may rest that does not fit in host memory.
        disk_space: bytes of the disk, at most. None: all that is free.
        saveable: False allows a model that code has changed so that no folder could hold it; the
            engine cannot save it then.
        adapter: a LoraConfig of PEFT, or its keys as a dictionary: only this is trained. Of a model
            with encoders of images or sounds, `all-linear` is its language model.
        base: the format of frozen linear layers under an adapter: bf16, fp8 or nf4 (2, 1 and half
            a byte a parameter), or `folder`, that of the model's files (mxfp4, float8 in blocks).
        router_aux_loss_coef: weight of the routers' loss of a mixture of experts. None: from the
            model's configuration.
        router_z_loss_coef: weight of the mean square of logsumexp of the routers' logits.
        router_bias_update: the amount by which a step moves routers' biases towards even loads
            (DeepSeek-V3: 0.001); needs a model that has such biases.
        group: the ranks that train the model together (docs/distributed.md). None: this process.
        sequence_parallel: the number of ranks that share every row: 1, or all of `group`.
        verify: the time at which weights, states and gradients are compared with their checksums:
            in each step, in saves, or never (docs/reliability.md).

    Raises:
        InputError: the model, or an argument, cannot be used.
        DoesNotFit: not enough host, device or disk memory; the message says what would fit.

    Attributes:
        config: the model's transformers configuration.
        optimizer: a `torch.optim.Optimizer` whose groups can be scheduled; None for inference.
        num_parameters: distinct parameters, frozen ones included.
        num_trained: of them, those that have a gradient.
        label_shift: tokens from a label's logits to the label: 1, or 0 if the model says so.
        vocab_size: token ids must be below this.
        batch_ranks: the ranks that each take other micro-batches; one if all share every row.
        balances_experts, counts_experts: True if a step's loss includes the routers' loss, or a
            step counts the choices of its routers; over all tokens except padding.
        placement: where state rests and how it is streamed; it never changes.
        micro_batch: rows that micro-batches should have; None: nobody has chosen a number.
    """

    def __init__(
        self,
        model: sources.Opens,
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
        media: Mapping[str, Tensor] | None = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        trained: Trained = ALL,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        disk: str | Path | None = None,
        disk_space: str | int | None = None,
        saveable: bool = True,
        adapter: Any = None,
        base: sources.Base = "bf16",
        router_aux_loss_coef: float | None = None,
        router_z_loss_coef: float | None = None,
        router_bias_update: float | None = None,
        group: ProcessGroup | DeviceMesh | None = None,
        sequence_parallel: int = 1,
        verify: Verify = "save",
    ) -> None:
        """Open a model and load its weights into host memory; see the class for the arguments."""
        losses.require_loss(loss)
        _check_arguments(optimizer, max_grad_norm, precision, placement, seed, verify)
        if not isinstance(trained, Trained):
            raise InputError(f"trained is {trained!r}; it must be a Trained(freeze=[...])")
        if not isinstance(saveable, bool):
            raise InputError(f"saveable is {saveable!r}; it must be True or False")
        if disk_space is not None and disk is None:
            raise InputError("disk_space needs disk: a folder on the disk")
        with opening():
            source = sources.open_source(
                model,
                adapter,
                base,
                {
                    "router_aux_loss_coef": router_aux_loss_coef,
                    "router_z_loss_coef": router_z_loss_coef,
                    "router_bias_update": router_bias_update,
                },
                trust_remote_code=trust_remote_code,
                attn_implementation=attn_implementation,
                head=loss.head,
            )
            sources.choose_trained(source, trained, optimizer, precision)
            if not isinstance(device, Device):
                device = open_device(device, local_rank(group))
            recording = Recording(device)
            host_limit = parse_limit("host_memory", host_memory)
            recording.limit(parse_limit("device_memory", device_memory), host_limit)
            ranks = open_ranks(group, recording.torch_device)
            sequence_ranks = open_sequence_ranks(ranks, recording.torch_device, sequence_parallel)
            model = sources.open_structure(source, optimizer, ranks, precision, saveable=saveable)
            if recording.can.attends_with_sums:
                attend_by_kernel(model.spec, precision)
            setup = sources.EngineSetup(
                source,
                model,
                max_grad_norm,
                precision,
                recording,
                host_limit,
                parse_limit("disk_space", disk_space),
                disk,
                seed,
                ranks,
                sequence_ranks,
                verify,
            )
            sizes = tokens_per_step, sequence_length, micro_batch
            settled = settle(setup, placement, *sizes, loss, generation, media)
            self.micro_batch = settled.micro_batch
            super().__init__(setup, settled.placement, settled.planned)
            self.loss = loss

    def evaluate(self, micro_batches: MicroBatches, loss: Loss | None = None) -> float:
        """The loss of a step (cross entropy: the mean) without dropout; changes no state."""
        losses = self.run_forward(micro_batches, self.loss if loss is None else loss, Head.loss)
        return sum(self.ranks.all_gather_object(float(torch.stack(losses).sum())))

    def router_loss(
        self, micro_batches: MicroBatches, router_shares: Sequence[float] | None = None
    ) -> tuple[float, float]:
        """The routers' loss: with its weight, as a step would add it, and without."""

        def finish(head: Head, weights: Buffer, batch: Batch, h: State) -> tuple[float, float]:
            if router_shares is not None:
                require_alone(self.ranks, "a loss of routers of each micro-batch")
            batch.router_shares = router_shares
            losses, _ = head.router_loss(batch, h)
            return sum(map(float, losses)), float(batch.measured.get("aux_loss", 0))

        loss, balance = self.run_forward(micro_batches, NO_LABELS, finish)
        return sum(self.ranks.all_gather_object(loss)), balance

    def score(self, micro_batches: MicroBatches) -> tuple[float, float]:
        """Mean cross entropy, and the share of labels that are the likeliest token.

        Of equally likely tokens each counts as the likeliest. Otherwise as `evaluate`.
        """
        sums = self.run_forward(micro_batches, losses.Score(), Head.loss)
        parts = self.ranks.all_gather_object(torch.stack(sums).sum(0).cpu())
        loss, accuracy = torch.stack(parts).sum(0).tolist()
        return loss, accuracy

    def logprobs(self, micro_batches: MicroBatches, *, temperature: float = 1.0) -> list[Tensor]:
        """The log-probability of each label `[B, T]`, fp32 on the CPU; 0 without a label.

        Micro-batches are those of `evaluate`. Logits, which never exist as a whole, are divided by
        `temperature`.
        """
        losses = self.label_losses(micro_batches, CrossEntropy(temperature))
        return [-loss.roll(self.label_shift, 1) for loss in losses]

    def top_logprobs(
        self, micro_batches: MicroBatches, top_k: int, temperature: float = 1.0
    ) -> list[tuple[Tensor, Tensor]]:
        """The likeliest tokens in each label's place, and their log-probabilities.

        Both are `[B, T, K]` on the CPU, int64 and fp32; 0 without a label. See `logprobs`.
        """
        if top_k > (size := self.num_logits):
            raise InputError(f"top_k is {top_k}, and the model has {size} tokens; take fewer")
        tokens = self.label_losses(micro_batches, losses.TopTokens(top_k, temperature))
        pairs = (values.roll(self.label_shift, 1).unbind(2) for values in tokens)
        return [(ids.long(), log_probs) for log_probs, ids in pairs]

    def rewards(self, micro_batches: MicroBatches) -> list[Tensor]:
        """The score at each label `[B, T]`, fp32 on the CPU; 0 without a label.

        Needs a model with a sequence head; see `megatrain.loss.Reward`.
        """
        return self.label_losses(micro_batches, losses.TokenScore())

    def embeddings(self, micro_batches: MicroBatches) -> list[Tensor]:
        """The mean of each row's labelled hidden states `[B, D]`, fp32 on the CPU, not normalised.

        Needs a model without a head; see `megatrain.loss.Contrastive`.
        """
        return self.label_losses(micro_batches, losses.Embedding())

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        placement: Placement | Literal["auto"] | None = None,
        device: str | Device | None = None,
        precision: Precision | None = None,
        max_grad_norm: float | Literal["saved"] | None = "saved",
        tokens_per_step: int | None = None,
        sequence_length: int | None = None,
        micro_batch: int | None = None,
        loss: Loss = CROSS_ENTROPY,
        generation: Generation | None = None,
        media: Mapping[str, Tensor] | None = None,
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
        """An engine that resumes from a checkpoint of `save`.

        Args:
            folder: the checkpoint; every byte of it is checked.
            placement: None: the saved one if the kind of device is the same, else `auto`.
            precision: None, or the saved one; another one is an error.
            max_grad_norm: a new value, or None, from now on.
            tokens_per_step, sequence_length, micro_batch, loss, generation, media: of the steps
                to come, as for `Engine`; they are not saved, and `auto` plans for them.
            attn_implementation: None: the saved one; else as for `Engine`.
            group: as for `Engine`; any number of ranks, not only that of the save.

        Raises:
            InputError: the checkpoint is damaged (the file is named) or cannot be used as wanted.
            DoesNotFit: not enough host or device memory.
        """
        checkpoint = open_checkpoint(folder)
        settings = checkpoint.settings
        with opening():
            source = sources.open_source(
                checkpoint,
                resumes=True,
                trust_remote_code=trust_remote_code,
                attn_implementation=attn_implementation,
            )
        if not isinstance(device, Device):
            device = open_device(device, local_rank(group))
        return cls(
            source,
            optimizer=saved_optimizer(checkpoint),
            max_grad_norm=settings.max_grad_norm if max_grad_norm == "saved" else max_grad_norm,
            precision=check_precision(checkpoint, precision),
            placement=resumed_placement(checkpoint, placement, device.kind),
            device=device,
            seed=settings.seed,
            tokens_per_step=tokens_per_step,
            sequence_length=sequence_length,
            micro_batch=micro_batch,
            loss=loss,
            generation=generation,
            media=media,
            device_memory=device_memory,
            host_memory=host_memory,
            disk=disk,
            disk_space=disk_space,
            group=group,
            sequence_parallel=sequence_parallel,
            verify=verify,
        )


def _check_arguments(
    optimizer: Any, max_grad_norm: Any, precision: Any, placement: Any, seed: Any, verify: Any
) -> None:
    """Raises InputError: an argument of `Engine` has a value that it cannot have."""
    is_positive = is_number(max_grad_norm) and max_grad_norm > 0
    is_rule = optimizer is None or isinstance(optimizer, Rule)
    is_placement = placement == "auto" or isinstance(placement, Placement)
    for name, value, valid, expected in (
        ("optimizer", optimizer, is_rule, "megatrain.AdamW(...), another rule, or None"),
        ("max_grad_norm", max_grad_norm, max_grad_norm is None or is_positive, "positive, or None"),
        ("precision", precision, precision in DTYPES, "bf16, fp32 or fp8"),
        ("placement", placement, is_placement, "'auto' or a Placement(...)"),
        ("verify", verify, verify in get_args(Verify), "step, save or off"),
        ("seed", seed, type(seed) is int, "an integer"),
    ):
        if not valid:
            raise InputError(f"{name} is {value!r}; it must be {expected}")
