"""A model card: where a model comes from, what it was trained on and how, and how to load it."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

from megatrain import __version__
from megatrain.base.json_yaml import read_json
from megatrain.compat.peft import CONFIG_FILE
from megatrain.config import load
from megatrain.errors import InputError, first_line
from megatrain.run_folder.layout import CONFIG, ENVIRONMENT, METRICS
from megatrain.telemetry.metrics import read_metrics
from megatrain.telemetry.pictures import draw_loss

CARD, CURVE = "README.md", "loss.png"
_SETTINGS = ("adapter", "data", "training", "optimizer", "schedule", "loss", "rollout")
_RESULTS = {
    "loss": "Training loss",
    "eval_loss": "Evaluation loss",
    "eval_accuracy": "Evaluation accuracy",
    "eval_rewards/accuracies": "Preferred replies of the evaluation",
    "reward": "Mean reward",
    "eval_reward": "Mean reward of the evaluation",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TEXT, _TALK = '"Once upon a time"', '[{"role": "user", "content": "Hello"}]'
_RATED = '[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]'

log = logging.getLogger(__name__)


def write_card(folder: Path, run: Path, step: int | None = None) -> None:
    """Write README.md and loss.png beside a model, if `run` is the folder of the run that made it.

    Args:
        folder: of the model, with its tokenizer.
        step: the model is of this one; None: of the last.
    """
    try:
        config = load(run / CONFIG).model_dump(mode="json")
    except InputError:
        return
    try:
        machine = read_json(run / ENVIRONMENT)
    except InputError:
        machine = {}
    logged = read_metrics(run / METRICS) if (run / METRICS).is_file() else ()
    records = [r for r in logged if step is None or r.get("step", 0) <= step]
    is_adapter, scores = (folder / CONFIG_FILE).is_file(), config["loss"]["name"] == "reward"
    is_chat = machine.get("data") not in (None, "text") and any(folder.glob("chat_template*"))
    base, paths = config["model"]["path"], config["data"]["path"]
    paths = [paths] if isinstance(paths, str) else paths
    data = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-classification" if scores else "text-generation",
        tags=["megatrain"],
        base_model=base if base is not None and _is_hub_id(base) else None,
        datasets=[path for path in paths if _is_hub_id(path)] or None,
        license=_license(base),
    )
    parts = [
        f"# {run.name}",
        _origin(config, records, "reward" if scores else "chat" if is_chat else "language"),
        _use(scores=scores, is_chat=is_chat, is_adapter=is_adapter),
        "## Data\n\n" + "\n".join(f"- {path}" for path in _short(paths)),
        _results(records),
        "## Settings\n\n```yaml\n" + _settings(config) + "```",
        _versions(machine),
    ]
    try:
        draw_loss(records, folder / CURVE)
        parts.insert(5, f"![Loss over the steps]({CURVE})")
    except Exception as error:  # the model matters more than its card
        log.warning("no loss curve: %s", error)
    text = "\n\n".join(part for part in parts if part)
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n").save(folder / CARD)


def _is_hub_id(path: str) -> bool:
    return bool(_HUB_ID.fullmatch(path)) and not Path(path).exists()


def _short(paths: Any) -> Any:
    """A value in which each path is cut to its last part."""
    if isinstance(paths, Mapping):
        return {name: _short(path) for name, path in paths.items()}
    if isinstance(paths, list):
        return [_short(path) for path in paths]
    return paths if paths is None or _is_hub_id(paths) else Path(paths).name


def _license(source: str | None) -> str | None:
    """The licence that the card of the model's source names, if it lies on this machine."""
    if source is None:
        return None
    card = Path(source).expanduser() / CARD
    if _is_hub_id(source):
        cached = try_to_load_from_cache(source, CARD)
        card = Path(cached) if isinstance(cached, str) else card
    try:
        name = ModelCard.load(card).data.get("license") if card.is_file() else None
    except Exception as error:  # people write it by hand
        log.warning("%s: not read: %s", card, first_line(error))
        return None
    return name if isinstance(name, str) else None


def _origin(config: Mapping[str, Any], records: list[Mapping[str, Any]], kind: str) -> str:
    path, steps = config["model"]["path"], max((r.get("step", 0) for r in records), default=0)
    start = "random weights" if path is None else f"`{_short(path)}`"
    chosen = config["model"]["freeze"] or config["model"]["train_only"]
    trained = "some of its parameters" if chosen else "all parameters"
    if config["adapter"]["method"]:
        trained = f"LoRA of rank {config['adapter']['r']}"
    return (
        f"This is a {kind} model, trained from {start} with MegaTrain {__version__}: {trained}, "
        f"{steps} steps of {config['training']['batch_size']} rows of at most "
        f"{config['data']['sequence_length']} tokens."
    )


def _use(*, scores: bool, is_chat: bool, is_adapter: bool) -> str:
    kind = "SequenceClassification" if scores else "CausalLM"
    more = ", num_labels=1" if scores else ""
    opened = f"model = peft.AutoPeftModelFor{kind}.from_pretrained(folder{more})\n"
    lines = 'from transformers import pipeline\n\nfolder = "PATH OR ID OF THIS FOLDER"\n'
    model = "folder"
    if is_adapter:
        lines, model = f"import peft\n{lines}{opened}", "model"
    if scores:
        text = '"A prompt and its reply"'
        if is_chat:
            text = f"score.tokenizer.apply_chat_template({_RATED}, tokenize=False)"
        lines += (
            f'score = pipeline("text-classification", model={model}, tokenizer=folder, '
            f'function_to_apply="none")\ntext = {text}\n'
            f"print(score(text{', add_special_tokens=False' * is_chat}))"
        )
    else:
        lines += (
            f'generate = pipeline("text-generation", model={model}, tokenizer=folder)\n'
            f"print(generate({_TALK if is_chat else _TEXT}, max_new_tokens=128))"
        )
    return f"## Use\n\n```python\n{lines}\n```"


def _results(records: list[Mapping[str, Any]]) -> str:
    lines = []
    for key, name in _RESULTS.items():
        values = [(r["step"], r[key]) for r in records if isinstance(r.get(key), float)]
        if values:
            (first, begin), (last, end) = values[0], values[-1]
            lines.append(f"- {name}: {begin:.4f} (step {first}) to {end:.4f} (step {last})")
    return "## Results\n\n" + "\n".join(lines) if lines else ""


def _settings(config: Mapping[str, Any]) -> str:
    """The settings that decide what is learnt, without paths of this machine."""
    chosen = {name: dict(config[name]) for name in _SETTINGS}
    if not config["adapter"]["method"]:
        del chosen["adapter"]
    if not config["rollout"]["rewards"]:
        del chosen["rollout"]
    else:
        chosen["rollout"] |= dict.fromkeys(("server", "server_weights"))
        chosen["rollout"]["rewards"] = _short(chosen["rollout"]["rewards"])
    del chosen["data"]["cache_dir"]
    for name in ("path", "eval_path"):
        chosen["data"][name] = _short(chosen["data"][name])
    chosen["engine"] = {"precision": config["engine"]["precision"]}
    stated = {
        section: {name: value for name, value in keys.items() if value not in (None, [], {})}
        for section, keys in chosen.items()
    }
    return yaml.safe_dump(stated, sort_keys=False, allow_unicode=True)


def _versions(machine: Mapping[str, Any]) -> str:
    if not machine:
        return ""
    packages = {"python": machine.get("python"), **machine.get("packages", {})}
    gpu = (machine.get("gpu") or {}).get("name")
    lines = [f"- {name} {version}" for name, version in packages.items() if version]
    return "## Versions\n\n" + "\n".join([*lines, *([f"- {gpu}"] if gpu else [])])
