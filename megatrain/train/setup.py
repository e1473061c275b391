"""Builds all parts of a run from its configuration, the cheapest checks first."""

import logging
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase, get_scheduler

from megatrain.api import Engine
from megatrain.base.units import gib
from megatrain.checkpoint import verify
from megatrain.checkpoint.manifest import MODEL
from megatrain.config import Config
from megatrain.data import PackedDataset, Prompts, Step, StepLoader, numbered
from megatrain.device import IN_HOST_MEMORY, find_device
from megatrain.errors import DoesNotFit, InputError, explained
from megatrain.forecast.workload import Workload, usual_micro_batch
from megatrain.model.adapters import adapted
from megatrain.model.companions import add_ends, tokenizer_files
from megatrain.model.documents import check_documents
from megatrain.model.float8 import require_float8
from megatrain.model.sizes import check_sequence_length
from megatrain.model.trained import Trained
from megatrain.optim import StreamedOptimizer, gradient_plane, parameter_bytes
from megatrain.parallel.distributed import ALONE, Ranks, local_rank
from megatrain.placement import Placement
from megatrain.source.source import Source, choose_trained, open_source, open_structure
from megatrain.source.tiles import DTYPES
from megatrain.store.store import resting
from megatrain.telemetry.gpu import find_gpu
from megatrain.train import resolve, second_model
from megatrain.train.resume import FREE_KEYS, Damaged, RunState, Start, differences
from megatrain.train.rollouts import Rewards, Rollouts
from megatrain.train.second_model import Teacher
from megatrain.train.sharing import by_parts, group_of, in_turn, with_own_images

log = logging.getLogger(__name__)


@dataclass
class Job:
    """A run ready to start; the caller closes it."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    # tokens that end the taught texts, which the model may not know as end tokens yet
    ends: list[int]
    engine: Engine
    loader: StepLoader
    evaluation: dict[str, Step | Prompts]  # micro-batches of each evaluation set, or its prompts
    # the record of a second model, if the loss needs one
    references: second_model.References | None
    schedule: LRScheduler
    total_steps: int
    resumed: RunState | None
    ranks: Ranks = ALONE
    rollouts: Rollouts | None = None  # makes the rows of steps, if the data are prompts
    # a frozen model that is streamed with each step beside the trained one
    teacher: Teacher | None = None
    # the evaluation sets, by name
    data: Mapping[str, PackedDataset | Prompts] = field(default_factory=dict)
    folder: Path = Path()

    def write_tokenizer(self, folder: Path) -> None:
        """Write the run's end tokens, and its tokenizer, into a folder with the engine's model.

        If the run has not changed the tokenizer, the files of the model's source stay.
        """
        add_ends(folder, self.ends)
        files = list(tokenizer_files(folder))
        model = self.config.model
        is_changed = model.chat_template is not None or model.eos_token is not None
        if files and not is_changed and model.tokenizer in (None, str(model.path)):
            return
        for path in files:
            path.unlink()
        self.tokenizer.save_pretrained(folder)


def prepare(
    config: Config, stack: ExitStack, start: Start | None = None, ranks: Ranks = ALONE
) -> Job:
    """Read tokenizer, data and model, and build the engine; nothing is written.

    With `start` the job goes on from its checkpoint. `stack` closes the loader and all engines; an
    error closes them at once, because the run may begin from an earlier checkpoint.

    Raises InputError: a part of the configuration, data or model cannot be used; Damaged: the
    checkpoint is damaged; DoesNotFit: there is too little memory.
    """
    with ExitStack() as opened:
        job = _prepared(config, start, ranks, opened)
        stack.enter_context(opened.pop_all())
    return job


def _prepared(config: Config, start: Start | None, ranks: Ranks, stack: ExitStack) -> Job:
    """Build the parts of a run in the order of their cost; `stack` closes what is opened."""
    ranks.agree(lambda: check_device(config, ranks))
    ranks.agree(lambda: Workload.of_run(config).disk_bytes)  # raises if a host's folder is bad
    if config.training.steps is not None:
        check_schedule(config, config.training.steps)
    rewards = Rewards(config.rollout)
    # The tokenizer, and the model without weights. A resumed run opens its model from the
    # checkpoint; it needs the initial model only as a reference.
    initial_model = cache(partial(resolve.ResolvedModel.of, config.model))
    if start is None:
        model = initial_model()
    else:
        saved = {"path": str(start.checkpoint / MODEL), "config": None}
        model = resolve.ResolvedModel(config.model.model_copy(update=saved), saved["path"])
    tokenizer = model.tokenizer
    check_sequence_length(model.config, config.data.sequence_length)
    teacher_model = second_model.find_teacher(config, model)
    source = _structure(config, model.for_engine) if start is None else None
    source_or_start = source or start
    assert source_or_start is not None
    ranks.agree(lambda: check_disk(config, source_or_start, config.training.steps))

    # The data, and the number of steps.
    training, evaluation = in_turn(ranks, lambda: resolve.open_data(config, model))
    _check_images(config, [training, *evaluation.values()], teacher_model)
    loader = _loader(config, training, ranks)
    stack.callback(loader.close)
    total_steps = config.training.steps
    if total_steps is None:
        repeats = config.loss.num_iterations or 1  # steps that learn from the same replies
        total_steps = repeats * loader.steps_of(config.training.epochs or 0)
        check_schedule(config, total_steps)
        ranks.agree(lambda: check_disk(config, source_or_start, total_steps))
    done = ranks.agree(lambda: _go_to(loader, start, total_steps))[0]

    # The engines, and the parts that need them.
    needs_reference = config.loss.kind == "prompts" and bool(config.loss.beta)
    frozen_model = initial_model() if needs_reference else teacher_model
    references = None if frozen_model is None else second_model.same_model(frozen_model.key, start)
    teacher = None
    if teacher_model is not None:
        # The teacher comes first: `auto` places the trained model in the memory that is left.
        teacher = Teacher(config, teacher_model, model.text_config.vocab_size, ranks.host)
        stack.enter_context(teacher.engine)
    media = training.most_images() if isinstance(training, PackedDataset) else None
    engine = _engine(config, source, media, start, ranks, stack)
    rows_of_rank = -(-config.training.batch_size // engine.batch_ranks.size)
    rows = min(rows_of_rank, _rows_per_micro_batch(config, engine, start))
    loader.rows_per_micro_batch = rows
    sets = {"train": training, **{f"eval {name}": data for name, data in evaluation.items()}}
    references = second_model.prepare_replies(config, engine, sets, rows, start) or references
    size, device = f"{engine.num_parameters:,}", engine.device.torch_device
    log.info("model: %s parameters on %s, placement: %s", size, device, engine.placement)
    rollouts = None
    if config.loss.kind == "prompts":
        reference = None
        if needs_reference:
            reference = second_model.open_reference(config, initial_model(), ranks.host)
            stack.enter_context(reference)
        rollouts = Rollouts(
            config, rewards, engine, tokenizer, loader, reference, total_steps, ranks
        )
        if start is not None:
            rollouts.load_state_dict(start.state.rollouts)
    return Job(
        config=config,
        tokenizer=tokenizer,
        ends=resolve.run_ends(config.model, tokenizer, training),
        engine=engine,
        loader=loader,
        evaluation=_batches(evaluation, rows, config.training.batch_size, teacher, ranks),
        data=evaluation,
        references=references,
        schedule=make_schedule(config, engine.optimizer, total_steps, done),
        total_steps=total_steps,
        resumed=start.state if start else None,
        ranks=ranks,
        rollouts=rollouts,
        teacher=teacher,
    )


def _batches(
    evaluation: dict[str, Any], rows: int, step_rows: int, teacher: Teacher | None, ranks: Ranks
) -> dict[str, Step | Prompts]:
    """The micro-batches of each evaluation set, with a teacher's answers; or its prompts."""
    sets: dict[str, Any] = {
        name: data if isinstance(data, Prompts) else list(data.batches(rows, step_rows))
        for name, data in evaluation.items()
    }
    # Changes the micro-batches in place: each pair gets another number.
    numbered([micro for step in sets.values() if isinstance(step, list) for micro in step])
    if teacher is None:
        return sets
    for name, step in sets.items():
        answer = partial(teacher.with_answers, data=evaluation[name])
        groups = [step[i : i + ranks.size] for i in range(0, len(step), ranks.size)]
        sets[name] = [micro for group in groups for micro in by_parts(ranks, group, answer)]
    return sets


def _check_images(
    config: Config, sets: Sequence[Any], teacher: resolve.ResolvedModel | None
) -> None:
    """Raise InputError if rows have images, but the teacher or shared rows cannot take them."""
    with_images = [data for data in sets if isinstance(data, PackedDataset) and data.has_images]
    if not with_images:
        return
    if teacher is not None:
        processor = teacher.images
        if processor.digest != with_images[0].image_processor.digest:
            difference = "another" if processor.identity else "no"
            raise InputError(
                f"loss.teacher: {config.loss.teacher} has {difference} "
                "processor of images; add the files of model.path (processor_config.json or "
                "preprocessor_config.json), take another teacher, or leave the images out"
            )
    if config.engine.sequence_parallel > 1:
        raise InputError(
            "engine.sequence_parallel: rows with images are not shared by ranks: set it to 1"
        )


def _loader(config: Config, training: PackedDataset | Prompts, ranks: Ranks) -> StepLoader:
    rows = config.training.batch_size
    finish = None
    if isinstance(training, Prompts):
        log.info("data: %s prompts", f"{len(training):,}")
    else:
        size = f"{training.num_tokens:,} tokens in {len(training):,} rows"
        log.info("data: %s, %.0f%% full", size, 100 * training.fill)
        finish = partial(with_own_images, training, ranks) if training.has_images else None
    if rows > len(training):
        log.warning(
            "a step takes training.batch_size %d rows, and the data has only %d: it takes each "
            "more than once; lower batch_size, or data.sequence_length for more rows",
            rows, len(training),
        )  # fmt: skip
    return StepLoader(
        training, rows_per_step=rows, rows_per_micro_batch=rows, seed=config.training.seed,
        workers=2, finish=finish,
    )  # fmt: skip


def _rows_per_micro_batch(config: Config, engine: Engine, start: Start | None) -> int:
    """Examples in a micro-batch, by the first that says: run file, resumed run, engine, habit."""
    rows_per_example = config.loss.lines
    usual = max(1, usual_micro_batch(config.data.sequence_length) // rows_per_example)
    resumed = None if start is None else start.state.data.get("rows_per_micro_batch")
    by_engine = engine.micro_batch and max(1, engine.micro_batch // rows_per_example)
    choices = (config.training.micro_batch_size, resumed, by_engine, usual)
    rows = next(rows for rows in choices if isinstance(rows, int) and rows > 0)
    return min(rows, config.training.batch_size)


def _go_to(loader: StepLoader, start: Start | None, total_steps: int) -> int:
    """Set the loader to the rows where the run goes on; return the number of steps done."""
    if start is None:
        return 0
    loader.load_state_dict(start.state.data)
    done = start.state.step
    if done > total_steps:
        raise InputError(
            f"the run has done {done} steps already, more than the {total_steps} asked for; "
            "set training.steps or epochs to more"
        )
    return done


def _structure(config: Config, model: Any) -> Source:
    """The model without weights, trained parameters marked. Raises InputError: it is unusable."""
    section = config.model
    source = open_source(
        model,
        config.adapter.keys,
        section.base,
        section.routers,
        head=config.loss.head,
        trust_remote_code=section.trust_remote_code,
        attn_implementation=section.attn_implementation,
    )
    trained = Trained(section.freeze, section.train_only)
    rule = config.optimizer.rule()
    choose_trained(source, trained, rule, config.engine.precision)
    opened = open_structure(source, rule, ALONE, config.engine.precision, saveable=True)
    if isinstance(placement := config.engine.placement_value(), Placement):
        resting(placement, opened.layouts)  # raises if a resident tile is unknown
    if config.data.packing and config.loss.kind is None:
        check_documents(opened.spec)
    if opened.spec.capture.task == "FEATURE_EXTRACTION" and config.loss.head is None:
        raise InputError(
            f"config.json of {config.model.path} names {type(source.model).__name__}, which has no "
            "head of a language model; name one there, or take loss.name: contrastive"
        )
    if opened.spec.label_shift == 0 and config.loss.head is None:
        raise InputError(
            f"the loss of {source.model.config.model_type} compares logits with the labels of the "
            "same places, so text teaches the model to copy; use megatrain.Engine with other labels"
        )
    return source


def _engine(
    config: Config,
    source: Source | None,
    media: Mapping[str, Tensor] | None,
    start: Start | None,
    ranks: Ranks,
    stack: ExitStack,
) -> Engine:
    """The run's engine: from the model's source, or on resume from the checkpoint."""
    options: dict[str, Any] = dict(
        group=group_of(config, ranks),
        max_grad_norm=config.training.max_grad_norm,
        device=config.engine.device,
        trust_remote_code=config.model.trust_remote_code,
        attn_implementation=config.model.attn_implementation,
        sequence_parallel=config.engine.sequence_parallel,
        verify=config.engine.verify,
        media=media,
    )
    try:
        if start is not None:
            engine = _saved_engine(config, start, options, stack)
        else:
            assert source is not None
            engine = Engine(
                source,
                **Workload.of_run(config).for_engine,
                seed=config.training.seed,
                trained=Trained(config.model.freeze, config.model.train_only),
                **options,
            )
            stack.enter_context(engine)
    except DoesNotFit as error:
        if config.engine.device == "cpu" or find_gpu() is None:
            raise  # there are plans for GPUs alone
        plan = "`megatrain plan` with this run file names what would make it fit"
        raise DoesNotFit(f"{error}; {plan}") from error
    engine.require_held()  # raises now if the model could not be written at the run's end
    return engine


def _saved_engine(config: Config, start: Start, common: dict[str, Any], stack: ExitStack) -> Engine:
    """The engine of the checkpoint `start`, with the optimizer's settings that have changed."""
    placement = config.engine.placement_value()
    workload = Workload.of_run(config)
    saved_rows = start.state.data.get("rows_per_micro_batch")
    # A run that leaves the micro-batches to MegaTrain goes on with those of the checkpoint.
    if workload.micro_batch is None and isinstance(saved_rows, int) and saved_rows > 0:
        workload = replace(workload, micro_batch=saved_rows * config.loss.lines)
    saved_section = start.state.config.get("engine")
    saved_placement = saved_section.get("placement") if isinstance(saved_section, dict) else None
    still_auto = placement == saved_placement == "auto"
    try:
        engine = Engine.load(
            start.checkpoint,
            placement=None if still_auto else placement,
            **workload.for_loading,
            **common,
        )
    except InputError as error:
        try:
            verify(start.checkpoint)
        except InputError:
            raise Damaged(str(error)) from error
        raise
    stack.enter_context(engine)
    assert engine.optimizer is not None
    _change_settings(engine.optimizer, config, start)
    return engine


def _change_settings(optimizer: StreamedOptimizer, config: Config, start: Start) -> None:
    """Give a checkpoint's optimizer the run's settings. Raises InputError: one may not change."""
    rule = config.optimizer.rule()
    settings = config.optimizer.settings
    for name in ("name", *rule.choices):
        saved = getattr(optimizer.rule, name, None)  # rules of older versions lack some choices
        if saved != getattr(rule, name):
            raise InputError(f"optimizer.{name}: {start.checkpoint} has {saved}; set it back")
    changed = {
        key: settings[key]
        for section, key, *_ in differences(start.state.config, config)
        if section == "optimizer" and key in FREE_KEYS[section] and key in settings
    }
    optimizer.restored_rates = None  # no warning: the run's schedule sets the same rates again
    optimizer.defaults |= settings  # schedules take their smallest rate from these
    for group in optimizer.param_groups:
        group |= changed
        if "lr" in changed:
            # torch's schedules start from `initial_lr`, which is saved with the group.
            group["lr"] = group["initial_lr"] = rule.rate(
                group["param_names"][0], group["params"][0].shape
            )


def check_device(config: Config, ranks: Ranks) -> None:
    """Check this rank's device, and warn if `auto` falls back to the CPU.

    Raises InputError: there is no such device, or it lacks something that the run needs.
    """
    name, shared = config.engine.device, config.engine.sequence_parallel
    device = find_device(name, local_rank(ranks.host))
    if config.engine.precision == "fp8":
        require_float8(device)
    if config.engine.device_memory is not None and device.type in IN_HOST_MEMORY:
        raise InputError(
            f"device_memory limits a GPU's own memory, but the device is {device}; set host_memory"
        )
    if shared not in (1, ranks.size):
        raise InputError(
            f"engine.sequence_parallel is {shared}, and the run has {ranks.size} "
            f"process{'es' if ranks.size > 1 else ''}: set engine.devices to {shared}, or this to 1"
        )
    if name == "auto" and device.type == "cpu":
        log.warning(
            "torch sees no GPU here: the run computes on the CPU, many times slower; check "
            "nvidia-smi and that torch is a CUDA build, or set engine.device: cpu if this is meant"
        )


def check_disk(config: Config, model: Source | Start, total_steps: int | None) -> None:
    """Raise DoesNotFit if the disk lacks room for the model and the checkpoints kept at once.

    Args:
        model: of a new run the source, whose weights are not needed; its trained parameters
            require gradients. Of a resumed run the start: one more checkpoint must have room.
        total_steps: None: not known yet, so one checkpoint is counted.
    """
    if isinstance(model, Start):
        if not config.checkpoint.at_end and config.checkpoint.every is None:
            return
        folder, what_takes = model.checkpoint.parent, "the next checkpoint takes"
        files = (path for path in model.checkpoint.rglob("*") if path.is_file())
        needed = sum(path.stat().st_size for path in files)
    else:
        folder = Path(config.output.folder or "runs").expanduser().absolute()
        number = _checkpoints_at_once(config, total_steps)
        checkpoint, exported = _bytes_of(config, model)
        needed = number * checkpoint + exported
        what_takes = f"the model and {number} checkpoints of {gib(checkpoint)} take"
    disk = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists()))
    if needed > disk.free and disk.total > 0:  # file systems like /proc report no size
        raise DoesNotFit(
            f"{folder}: the disk has {gib(disk.free)} left, and {what_takes} {gib(needed)}; free "
            f"{gib(needed - disk.free)}, set output.folder of a new run to a folder on another "
            "disk, or keep fewer checkpoints (checkpoint.keep, keep_every, every, at_end)"
        )


def _checkpoints_at_once(config: Config, total_steps: int | None) -> int:
    """The number of checkpoints on the disk when the newest is written beside the kept ones."""
    settings = config.checkpoint
    steps = total_steps or 0
    never = steps + 1  # a number of steps that never pass
    every = settings.every or never
    saves = steps // every
    if settings.at_end and (steps == 0 or steps % every > 0):
        saves += 1
    marked = steps // (settings.keep_every or never)
    return min(saves, max(settings.keep, marked) + 1)


def _bytes_of(config: Config, source: Source) -> tuple[int, int]:
    """The bytes of a checkpoint (at least), and of the model at the run's end."""
    parameters = list(source.model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters) - trained
    dtype = DTYPES[config.engine.precision]
    in_memory = parameter_bytes(config.optimizer.rule(), dtype)
    bytes_per_trained = in_memory - gradient_plane(dtype).bytes_per_parameter
    if adapted(source.model) is not None:  # the base is neither in checkpoints nor in the model
        return int(trained * bytes_per_trained), 4 * trained  # adapters are exported in fp32
    saved = trained * bytes_per_trained + (2 * frozen if source.base == "bf16" else 0)
    return int(saved), (trained + frozen) * source.dtype.itemsize


_ROUNDED = 1 + 1e-9  # rounding may raise a rate by this factor


def make_schedule(
    config: Config, optimizer: Optimizer | None, total_steps: int, done: int
) -> LRScheduler:
    """The learning rate's schedule, set to `done` steps.

    Raises InputError: the schedule does not take `schedule.options`.
    """
    schedule = config.schedule
    refusals = TypeError, ValueError, KeyError, ArithmeticError
    problem = f"schedule: {schedule.name} cannot be set up"
    with explained(problem, "correct schedule.options", of=refusals):
        scheduler = get_scheduler(
            schedule.name,
            optimizer,
            num_warmup_steps=schedule.num_warmup_steps(total_steps),
            num_training_steps=total_steps,
            scheduler_specific_kwargs=dict(schedule.options),
        )
        if 0 < done < total_steps:
            scheduler.last_epoch = done - 1
            with warnings.catch_warnings():  # torch warns that no optimizer step came before
                warnings.simplefilter("ignore", UserWarning)
                scheduler.step()
    return scheduler


def check_schedule(config: Config, total_steps: int) -> None:
    """Warn if the rate never gets to `optimizer.lr`. Raises InputError: a rate is out of range."""
    warmup = config.schedule.num_warmup_steps(total_steps)
    rates, lr = set[float](), config.optimizer.settings["lr"]
    for done in sorted({0, 1, warmup, warmup + 1, total_steps // 2, total_steps - 1}):
        if done < total_steps:
            stand_in = SGD([torch.zeros(1)], lr=lr)
            (rate,) = make_schedule(config, stand_in, total_steps, done).get_last_lr()
            rates.add(float(rate))
            if not 0 <= rate <= lr * _ROUNDED:
                above = f", above optimizer.lr {lr:g}" if rate > lr else ""
                raise InputError(
                    f"schedule: {config.schedule.name} makes the learning rate of step {done + 1} "
                    f"{rate:g}{above}; correct schedule.options (min_lr_rate is a share)"
                )
    if warmup >= total_steps or max(rates) < lr / 2:  # a sampled rate may lie beside the peak
        log.warning(
            "the learning rate never gets to optimizer.lr in %d steps (warm-up %d, largest rate "
            "%g): lower schedule.warmup_steps or warmup_ratio, correct its options, or train "
            "for more steps", total_steps, warmup, max(rates),
        )  # fmt: skip
