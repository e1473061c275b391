"""Fifty planted faults: one small edit each, which the tests of `make test` must notice."""

from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """An edit that breaks something.

    Attributes:
        area: what kind of thing it breaks.
        folder: below `megatrain/`; empty: all of it.
        old, new: a piece of text that occurs there once, in some file, and what takes its place.
        breaks: what goes wrong.
        tests: files or folders below `tests/` that are near it, the likeliest first.
    """

    area: str
    folder: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    def place(self, package: Path) -> Path:
        """The file of the package that has `old`. Raises ValueError: there is none, or two."""
        files = [
            path for path in (package / self.folder).rglob("*.py") if self.old in path.read_text()
        ]
        if len(files) != 1 or files[0].read_text().count(self.old) != 1:
            raise ValueError(f"{self.breaks}: {self.old!r} is not once below {self.folder!r}")
        return files[0]


STEPS = ("parity/test_training.py", "parity/test_gradients.py")
RACES = ("race/test_schedules.py", "race/test_late.py")

FAULTS = [
    Fault(
        "clipping", "engine", "else min(1.0, limit", "else min(2.0, limit",
        "short gradients are stretched", STEPS,
    ),
    Fault(
        "clipping", "engine", "1.0 if run.directed else scale", "scale",
        "Muon's directions are clipped", ("parity/test_muon.py",),
    ),
    Fault(
        "clipping", "engine", "tile.index] = square", "tile.index] += square",
        "gradients of earlier steps count in the norm", STEPS,
    ),
    Fault(
        "clipping", "engine", "self.squares.data[-1] = 0", "pass",
        "rows of earlier steps count in the norm", STEPS,
    ),
    Fault(
        "normalisers", "loss", "return sum(num_labelled(target)", "return sum(target.numel()",
        "tokens without a label count in the mean", STEPS,
    ),
    Fault(
        "normalisers", "loss", "return replies * self.max_completion_length",
        "return replies", "dr_grpo divides by replies alone", ("parity/test_policy.py",),
    ),
    Fault(
        "normalisers", "engine", "return loss / count, add(", "return loss, add(",
        "a whole head's loss is reported as a sum", STEPS,
    ),
    Fault(
        "waits", "engine",
        'device.wait(COPY_OUT, device.record(COMPUTE), "gradient ready")', "pass",
        "a gradient leaves before it is rounded", RACES,
    ),
    Fault(
        "waits", "engine",
        'device.wait(UPDATE, device.record(COPY_OUT), "loss landed")', "pass",
        "updates do not wait for the loss that may refuse them", RACES,
    ),
    Fault(
        "waits", "engine", 'self._device.wait(COPY_IN, tile.updated, "version due")',
        "pass", "a layer's weights are fetched before their update", RACES,
    ),
    Fault(
        "waits", "engine", 'self._device.wait(COPY_IN, slot.free, "slot free")', "pass",
        "weights overwrite those of a layer at work", RACES,
    ),
    Fault(
        "waits", "engine", "self._device.wait(COMPUTE, lane.ready, ",
        "(COMPUTE, lane.ready, ", "a layer reads what has not yet come back", RACES,
    ),
    Fault(
        "waits", "",
        'device.wait(DISK_IN, tile.written, "disk version due")', "pass",
        "planes are read before they were written", RACES,
    ),
    Fault(
        "masks", "engine", "plain = (bool(mask.all())", "plain = (True",
        "padding is attended to",
        ("parity/test_gradients.py", "parity/test_inference.py"),
    ),
    Fault(
        "masks", "engine", "counted_N = None if bool(mask.all()) else",
        "counted_N = None if True else", "routers balance padding", ("parity/test_routers.py",),
    ),
    Fault(
        "masks", "model", "goes_on = position_ids.diff(dim=-1) == 1",
        "goes_on = position_ids.diff(dim=-1) >= 0", "two documents of one token are one",
        ("parity/test_packing.py", "unit/test_program.py"),
    ),
    Fault(
        "masks", "data", "targets & marked if", "targets if",
        "what a template leaves out of a reply is learnt",
        ("unit/test_data_chat.py", "unit/test_data_templates.py"),
    ),
    Fault(
        "states", "kernels", "root = math.sqrt(1 - beta2**step)",
        "root = math.sqrt(1 - beta2)", "AdamW corrects its bias as in the first step",
        ("unit/test_optim.py", "parity/test_training.py"),
    ),
    Fault(
        "states", "optim", '(-lr, 1 - lr * group["weight_decay"]', "(-lr, 1.0",
        "Lion does not decay",
        ("unit/test_optim.py", "parity/test_training.py"),
    ),
    Fault(
        "states", "optim", "1.0 if options.step == 1 else", "",
        "SGD dampens the first gradient", ("unit/test_optim.py", "parity/test_training.py"),
    ),
    Fault(
        "states", "optim", 'gradient.lerp_(average, group["momentum"])',
        "gradient.copy_(average)", "Muon's momentum is not Nesterov's", ("parity/test_muon.py",),
    ),
    Fault(
        "states", "kernels", "torch.maximum(codes, (roots > 0).float())", "codes",
        "small second moments vanish in 8 bits", ("unit/test_optim.py",),
    ),
    Fault(
        "states", "optim", "bias", "bais", "biases decay",
        ("unit/test_optim.py", "parity/test_training.py"),
    ),
    Fault(
        "resume", "data", "self._resumed_at = (self._steps, rows)", "",
        "with another batch size a run goes on at other rows", ("unit/test_data_loader.py",),
    ),
    Fault(
        "resume", "train", "scheduler.last_epoch = done", "scheduler.last_epoch = done - 1",
        "a resumed schedule is a step behind", ("reliability/test_resume.py", "cli/test_train.py"),
    ),
    Fault(
        "resume", "train", "self._skipped = skipped", "self._skipped = 0",
        "a resumed run has forgotten its bad steps", ("unit/test_run_folders.py",),
    ),
    Fault(
        "resume", "train", "and number > step:", "and number >= step:",
        "the log of the last step is cut off", ("reliability/test_resume.py",),
    ),
    Fault(
        "resume", "optim", "self.param_groups[:] = restored", "pass",
        "what a schedule has made of the groups is lost", ("checkpoint/test_roundtrip.py",),
    ),
    Fault(
        "resume", "checkpoint", "else parameter_versions.get(first, 0)", "else 0",
        "a loaded optimizer corrects its bias anew", ("checkpoint/test_roundtrip.py",),
    ),
    Fault(
        "resume", "checkpoint", "start = plane.start + at.start * size", "start = plane.start",
        "each parameter of an adapter is read from where the first one is",
        ("checkpoint/test_base_reference.py",),
    ),
    Fault(
        "losses", "loss", "1 / (2 * self.beta)", "1 / self.beta", "IPO aims twice as far",
        ("parity/test_trl.py",),
    ),
    Fault(
        "losses", "loss", "grouped - grouped.nanmean(1, keepdim=True)",
        "grouped - grouped.nanmean()", "advantages are above the mean of other prompts",
        ("parity/test_policy.py",),
    ),
    Fault(
        "losses", "loss", "math.log1p(-self.beta), math.log(self.beta)",
        "math.log(self.beta), math.log1p(-self.beta)", "teacher and model change places",
        ("parity/test_losses.py",),
    ),
    Fault(
        "losses", "loss", "(1 - self.share) * statistics.log_prob", "statistics.log_prob",
        "smoothed labels count more than one", ("parity/test_losses.py",),
    ),
    Fault(
        "losses", "model", "self.weight * slope_E]", "slope_E]",
        "the routers' loss has its weight only where it is reported", ("parity/test_routers.py",),
    ),
    Fault(
        "adapters", "model", "derived_seed(seed, number, len(first))", "seed",
        "all modules' adapters begin alike", ("parity/test_adapters.py",),
    ),
    Fault(
        "adapters", "compat", "left, right, alpha=scale)", "left, right)",
        "adapters of experts have no scale", ("parity/test_adapters.py",),
    ),
    Fault(
        "ranks", "engine", "for part in parts[: ranks.rank])", "for part in parts[:0])",
        "all ranks draw the same dropout", ("parity/test_ranks.py",),
    ),
    Fault(
        "ranks", "engine", "sum(measured) / self._collectives.ranks.hosts",
        "sum(measured)", "with several hosts the norm is too large", ("parity/test_hosts.py",),
    ),
    Fault(
        "ranks", "model", "first = self.ranks.rank * tokens", "first = 0",
        "each rank's part of a row begins at position 0", ("parity/test_sequence_parallel.py",),
    ),
    Fault(
        "schedules", "engine", "micro=self.micro[start:stop], first=start)",
        "micro=self.micro[start:stop])", "later passes draw the first one's dropout",
        ("parity/test_dropout.py", "parity/test_neutrality.py"),
    ),
    Fault(
        "schedules", "engine", "if self._first:", "if True:",
        "of several passes the last one's gradient alone is kept",
        ("parity/test_neutrality.py",),
    ),
    Fault(
        "exports", "checkpoint",
        "kernels.join(weights, _values(rest, parameter), master, threads=1)",
        "master.copy_(weights)", "exact masters are rounded to bf16",
        ("checkpoint/test_export.py",),
    ),
    Fault(
        "exports", "train", "(self._values[step], step))", "(-self._values[step], step))",
        "the worst state is exported as the best", ("cli/test_best.py",),
    ),
    Fault(
        "sampling", "generate", "fallback = {} if of_model.do_sample else _USUAL",
        "fallback = _USUAL", "a model's own temperature is passed over", ("unit/test_generate.py",),
    ),
    Fault(
        "sampling", "generate", "derived_seed(seed, row)", "derived_seed(seed, 0)",
        "all replies to a prompt are the same", ("unit/test_generate.py",),
    ),
    Fault(
        "trainers", "integrations", "1 / micro.num_micro for", "1 / len(waiting) for",
        "the rest of an epoch counts as a whole step of pairs", ("unit/test_trainer_heeded.py",),
    ),
    Fault(
        "trainers", "integrations", "self.lr_scheduler.load_state_dict(", "(",
        "a resumed Trainer begins at the first rate", ("unit/test_integrations.py",),
    ),
]  # fmt: skip
