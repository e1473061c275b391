"""Everything a run needs, built from its configuration, cheapest checks first."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from megatrain.api import Engine
from megatrain.checkpoint import MODEL
from megatrain.config import Config, ModelSection
from megatrain.data import (
    PackedDataset,
    Prompts,
    RowStream,
    Step,
    StepLoader,
    StreamLoader,
    numbered,
)
from megatrain.errors import DoesNotFit, InputError
from megatrain.forecast.workload import Workload, usual_micro_batch
from megatrain.model.companions import add_ends, tokenizer_files
from megatrain.model.document_check import check_documents
from megatrain.model.trained import Trained
from megatrain.parallel.distributed import ALONE, Ranks
from megatrain.placement import Placement
from megatrain.source.engine_setup import choose_trained, open_structure
from megatrain.source.source import Source, open_source
from megatrain.store.store import resting
from megatrain.telemetry.gpu import find_gpu
from megatrain.train.data import check_prompts, open_data, run_ends, run_tokenizer
from megatrain.train.early import check_device, check_disk, check_disk_to_go_on
from megatrain.train.model_config import check_sequence_length, model_config
from megatrain.train.references import References, refer
from megatrain.train.resolve_model import ResolvedModel, moved_base
from megatrain.train.resume import FREE_KEYS, Damaged, RunState, Start, is_whole
from megatrain.train.rewards import Rewards
from megatrain.train.rollouts import Rollouts
from megatrain.train.schedule import check_schedule, make_schedule
from megatrain.train.second_model import SecondModel, begun_model, second_model
from megatrain.train.sharing import by_parts, group_of, in_turn
from megatrain.train.teacher import find_teacher

log = logging.getLogger(__name__)


@dataclass
class Job:
    """A run ready to start; whoever holds it closes it.

    Attributes:
        own_tokenizer: whether the tokenizer is another than that in the model's folder.
        ends: tokens that end what is taught, which the model may not know yet.
        kind: whether texts or chats are trained.
        evaluation: micro-batches of each evaluation set, or its prompts.
        references: what the reference model says of the data, where the loss asks for it.
        rollouts: what makes the rows of steps, where the data are prompts.
        second: a model that is streamed with each step beside the one that is trained.
        held: gives back the loader's thread and the memory of all engines.
    """

    tokenizer: PreTrainedTokenizerBase
    own_tokenizer: bool
    ends: list[int]
    engine: Engine
    loader: StepLoader
    kind: str
    evaluation: dict[str, Step | Prompts]
    references: References | None
    schedule: LRScheduler
    total_steps: int
    resumed: RunState | None
    ranks: Ranks = ALONE
    rollouts: Rollouts | None = None
    second: SecondModel | None = None
    held: ExitStack = field(default_factory=ExitStack)

    def write_tokenizer(self, folder: Path) -> None:
        """See to it that a folder with the engine's model has the run's tokenizer, and no other.

        That of the model's source is there already, byte for byte. And that the model stops where
        what it has learnt ends.
        """
        add_ends(folder, self.ends)
        there = list(tokenizer_files(folder))
        if there and not self.own_tokenizer:
            return
        for path in there:
            path.unlink()
        self.tokenizer.save_pretrained(folder)

    def close(self) -> None:
        """Stop the loader's thread and give all memory back."""
        self.held.close()


def prepare(config: Config, start: Start | None = None, ranks: Ranks = ALONE) -> Job:
    """Read tokenizer, data and model, and build the engine; nothing is written.

    With `start` the engine's state comes from its checkpoint and the job goes on from there. What
    fails gives all memory back: the run may begin from an earlier checkpoint.

    Raises:
        InputError: a part of the configuration, data or model that cannot be used.
        Damaged: the checkpoint cannot.
        DoesNotFit: more memory is needed than there is.
    """
    with ExitStack() as held:
        job = _prepared(config, start, ranks, held)
        job.held = held.pop_all()
    return job


def _prepared(config: Config, start: Start | None, ranks: Ranks, held: ExitStack) -> Job:
    """As `prepare`; `held` closes what has been opened."""
    ranks.agree(lambda: check_device(config, ranks))
    ranks.agree(lambda: Workload.of_run(config).disk_bytes)  # a folder, on each host
    if config.training.steps is not None:
        check_schedule(config, config.training.steps)
    rewards = Rewards(config.rollout)
    begun = cache(
        partial(ResolvedModel.of_run, config)
    )  # of a run that goes on its reference alone
    section = begun().section if start is None else _saved_model(config, start)
    tokenizer = run_tokenizer(section)
    hf_config = model_config(section, tokenizer)
    check_sequence_length(hf_config, config.data.sequence_length)
    text_config = hf_config.get_text_config(decoder=True)
    check_prompts(config, tokenizer, text_config)
    teacher = find_teacher(config, tokenizer, text_config)
    source = _structure(config, begun(), hf_config) if start is None else None
    if source is not None:
        ranks.agree(lambda: check_disk(config, source, config.training.steps))
    elif start is not None:
        ranks.agree(lambda: check_disk_to_go_on(config, start))
    training, evaluation = in_turn(
        ranks, lambda: open_data(config, tokenizer, text_config.vocab_size)
    )
    loader = _loader(config, training)
    held.callback(loader.close)
    total_steps = config.training.steps or steps_of(config.training.epochs or 0, config, loader)
    if config.training.steps is None:  # known now, and still before weights are read
        check_schedule(config, total_steps)
        if source is not None:
            ranks.agree(lambda: check_disk(config, source, total_steps))
    done, *_ = ranks.agree(lambda: _go_to(loader, start, total_steps))
    sets = {"train": training, **{f"eval {n}": e for n, e in evaluation.items()}}
    second, known = second_model(config, begun, tokenizer, teacher, sets, start, ranks)
    if second is not None:
        held.callback(second.close)
    engine = _engine(config, source, start, ranks, held)
    most = -(-config.training.batch_size // engine.batch_ranks.size)
    rows = loader.rows_per_micro_batch = min(most, _rows_per_micro_batch(config, engine, start))
    references = refer(
        config, engine, sets, rows, start, ranks,
        lambda: begun_model(config, begun(), tokenizer, ranks.host),
    ) or known  # fmt: skip
    log.info(
        "model: %s parameters on %s, placement: %s",
        f"{engine.num_parameters:,}",
        engine.device.torch_device,
        engine.placement,
    )
    schedule = _schedule(config, engine, total_steps, done, start)
    return Job(
        tokenizer=tokenizer,
        own_tokenizer=config.model.chat_template is not None
        or config.model.eos_token is not None
        or config.model.tokenizer not in (None, str(config.model.path)),
        ends=run_ends(config.model, tokenizer, training),
        engine=engine,
        loader=loader,
        kind=training.kind,
        evaluation=_batches(evaluation, rows, second, ranks),
        references=references,
        schedule=schedule,
        total_steps=total_steps,
        resumed=start.state if start else None,
        ranks=ranks,
        rollouts=_rollouts(
            config, begun, rewards, tokenizer, engine, loader, total_steps, start, ranks, held
        ),
        second=second,
    )


def _schedule(
    config: Config, engine: Engine, total_steps: int, done: int, start: Start | None
) -> LRScheduler:
    """The schedule; of a run that goes on with what callbacks have changed of it and of rates."""
    optimizer, saved = engine.optimizer, None
    if start is not None and not start.state.differs(config, "optimizer", "lr"):
        saved = start.state.schedule
    made = make_schedule(config, optimizer, total_steps, done, saved)
    if optimizer is None:
        return made
    rates, optimizer.restored_rates = optimizer.restored_rates, None
    if saved and rates and start is not None:
        state = start.state
        if not state.differs(config, "schedule") and not state.differs(
            config, "training", "steps", "epochs"
        ):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate  # of the next step
    return made


def steps_of(epochs: float, config: Config, loader: StepLoader) -> int:
    """As of the loader, in steps of the run: several may learn from the same replies."""
    return (config.loss.num_iterations or 1) * loader.steps_of(epochs)


def _rollouts(
    config: Config,
    begun: Callable[[], ResolvedModel],
    rewards: Rewards,
    tokenizer: PreTrainedTokenizerBase,
    engine: Engine,
    loader: StepLoader,
    total_steps: int,
    start: Start | None,
    ranks: Ranks,
    held: ExitStack,
) -> Rollouts | None:
    """What makes replies; the reference is the model as the run began, in an engine of its own."""
    if config.loss.kind != "prompts":
        return None
    reference = None
    if config.loss.beta:
        reference = held.enter_context(begun_model(config, begun(), tokenizer, ranks.host))
    made = Rollouts(config, rewards, engine, tokenizer, loader, reference, total_steps, ranks)
    if start is not None:
        made.load_state_dict(start.state.rollouts)
        made.step = start.state.step
    return made


def _batches(
    evaluation: dict[str, PackedDataset | Prompts],
    rows: int,
    second: SecondModel | None,
    ranks: Ranks,
) -> dict[str, Step | Prompts]:
    made = {
        name: each if isinstance(each, Prompts) else list(each.batches(rows))
        for name, each in evaluation.items()
    }
    numbered([micro for each in made.values() if isinstance(each, list) for micro in each])
    if second is None:
        return made
    for each in made.values():
        if isinstance(each, list):
            parts = [each[at : at + ranks.size] for at in range(0, len(each), ranks.size)]
            each[:] = [micro for p in parts for micro in by_parts(ranks, p, second.with_answers)]
    return made


def _loader(config: Config, training: PackedDataset | RowStream | Prompts) -> StepLoader:
    rows = config.training.batch_size
    how: dict[str, Any] = {
        "rows_per_step": rows,
        "rows_per_micro_batch": rows,
        "seed": config.training.seed,
    }
    if isinstance(training, RowStream):
        tokens = f"{config.data.shuffle_buffer:,}"
        log.info("data: a stream, of which %s tokens at a time are shuffled", tokens)
        return StreamLoader(training, **how, workers=2)
    if isinstance(training, Prompts):
        log.info("data: %s prompts", f"{len(training):,}")
    else:
        log.info(
            "data: %s tokens in %s rows, %.0f%% full",
            f"{training.num_tokens:,}",
            f"{len(training):,}",
            100 * training.fill,
        )
    if rows > len(training):
        log.warning(
            "a step takes training.batch_size %d rows, and the data has only %d: it takes each "
            "more than once; lower batch_size, or data.sequence_length for more rows",
            rows,
            len(training),
        )
    return StepLoader(training, **how, workers=2)


def _saved_model(config: Config, start: Start) -> ModelSection:
    """`model` of a run that goes on: it does not need the model's source any more."""
    there = {"path": str(start.checkpoint / MODEL), "config": None}
    return config.model.model_copy(update=there)


def _rows_per_micro_batch(config: Config, engine: Engine, start: Start | None) -> int:
    """As configured; as the run that is resumed had it; as the engine has chosen; as is usual."""
    lines = config.loss.lines
    fitting = max(1, usual_micro_batch(config.data.sequence_length) // lines)
    before = None if start is None else start.state.data.get("rows_per_micro_batch")
    chosen = engine.micro_batch and max(1, engine.micro_batch // lines)
    for rows in (config.training.micro_batch_size, before, chosen):
        if isinstance(rows, int) and rows > 0:
            return min(rows, config.training.batch_size)
    return min(fitting, config.training.batch_size)


def _go_to(loader: StepLoader, start: Start | None, total_steps: int) -> int:
    """Put the loader where the run goes on; returns the steps done."""
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


def _structure(config: Config, begun: ResolvedModel, written: PreTrainedConfig) -> Source:
    """The model without its weights, and what of it is trained. Raises InputError: no such run."""
    section = config.model
    source = open_source(
        written if begun.source is None else begun.source,
        config.adapter.keys,
        section.base,
        section.router_aux_loss_coef,
        begun.base_model,
        scores=config.loss.name == "reward",
        trust_remote_code=section.trust_remote_code,
        attn_implementation=section.attn_implementation,
    )
    trained = Trained(section.freeze, section.train_only)
    rule = config.optimizer.rule()
    choose_trained(source, trained, rule, config.engine.precision)
    opened = open_structure(source, rule, ALONE, saveable=True)
    if isinstance(placement := config.engine.placement_value(), Placement):
        resting(placement, opened.layouts)
    if config.data.packing and config.loss.kind is None:
        check_documents(opened.spec)
    if opened.spec.label_shift == 0 and config.loss.name != "reward":
        raise InputError(
            f"the loss of {source.model.config.model_type} compares logits with the labels of the "
            "same places, so text would teach it to copy; use megatrain.Engine, with other labels"
        )
    return source


def _engine(
    config: Config,
    source: Source | None,
    start: Start | None,
    ranks: Ranks,
    held: ExitStack,
) -> Engine:
    group = group_of(config, ranks)
    try:
        if start is not None:
            engine = _saved_engine(config, start, group, held)
        else:
            assert source is not None
            engine = held.enter_context(_new_engine(config, source, group))
    except DoesNotFit as error:
        if config.engine.device != "cpu" and find_gpu("cuda") is None:
            raise  # plans are for a GPU, or where the CPU was asked for
        plan = "`megatrain plan` with this run file names what would make it fit"
        raise DoesNotFit(f"{error}; {plan}") from error
    engine.require_held()  # else the run's model could not be written at its end
    if config.training.neftune_alpha is not None:
        engine.add_neftune(config.training.neftune_alpha)
    return engine


def _new_engine(config: Config, source: Source, group: Any) -> Engine:
    return Engine(
        source,
        **Workload.of_run(config).for_engine,
        seed=config.training.seed,
        trained=Trained(config.model.freeze, config.model.train_only),
        group=group,
        **_settings(config),
    )


def _saved_engine(config: Config, start: Start, group: Any, held: ExitStack) -> Engine:
    """The engine of a checkpoint; weights are not read from the model's source again."""
    placement = config.engine.placement_value()
    before = start.state.config.get("engine")
    still_auto = isinstance(before, dict) and before.get("placement") == placement == "auto"
    try:
        engine = Engine.load(
            start.checkpoint,
            placement=None if still_auto else placement,
            states=config.optimizer.states,
            master=config.optimizer.master,
            base_model=moved_base(config.model.base_model),
            **Workload.of_run(config).limits,
            group=group,
            **_settings(config),
        )
    except InputError as error:
        if is_whole(start.checkpoint):
            raise
        raise Damaged(str(error)) from error
    held.enter_context(engine)
    assert engine.optimizer is not None
    settings, saved = config.optimizer.settings, engine.optimizer.rule.name
    if config.optimizer.name != saved:
        raise InputError(f"optimizer.name: {start.checkpoint} was made with {saved}; set it back")
    changed = partial(start.state.differs, config, "optimizer")
    chosen = {n: each for n, each in settings.items() if n in FREE_KEYS["optimizer"] and changed(n)}
    rule = config.optimizer.rule()
    for choice in rule.choices:  # a key that an older version did not know is not in its run file
        if (was := getattr(engine.optimizer.rule, choice)) != getattr(rule, choice):
            raise InputError(
                f"optimizer.{choice}: {start.checkpoint} was made with {was}; set it back"
            )
    engine.optimizer.defaults |= settings  # of which schedules take their floor: min_lr, lr_end
    for each in engine.optimizer.param_groups:  # the rest stays as callbacks may have set it
        each |= chosen
        if "lr" in chosen:
            # torch's schedules start from `initial_lr`, which is saved with the group.
            each["lr"] = each["initial_lr"] = rule.rate(
                each["param_names"][0], each["params"][0].shape
            )
    return engine


def _settings(config: Config) -> dict[str, Any]:
    """What an engine is made with, be it new or saved."""
    return dict(
        max_grad_norm=config.training.max_grad_norm,
        device=None if config.engine.device == "auto" else config.engine.device,
        trust_remote_code=config.model.trust_remote_code,
        attn_implementation=config.model.attn_implementation,
        sequence_parallel=config.engine.sequence_parallel,
        verify=config.engine.verify,
    )
