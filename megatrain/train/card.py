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
_OF_THIS_MACHINE = ("cache_dir",)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What licences begin with, and their names on the hub.
_LICENSES = {
    "apache license": "apache-2.0",
    "mit license": "mit",
    "permission is hereby granted, free of charge": "mit",
    "bsd 3-clause": "bsd-3-clause",
    "mozilla public license version 2.0": "mpl-2.0",
    "llama 2 community license": "llama2",
    "llama 3 community license": "llama3",
    "llama 3.1 community license": "llama3.1",
    "llama 3.2 community license": "llama3.2",
    "llama 3.3 community license": "llama3.3",
    "gemma terms of use": "gemma",
}

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
    logged = read_metrics(run / METRICS) if (run / METRICS).is_file() else ()
    records = [r for r in logged if step is None or r.get("step", 0) <= step]
    is_adapter = (folder / CONFIG_FILE).is_file()
    scores = config["loss"]["name"] == "reward"
    data = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-classification" if scores else "text-generation",
        tags=["megatrain"],
        base_model=_base(config),
        datasets=[path for path in _paths(config) if _is_hub_id(path)] or None,
        license=_license(folder, config["model"].get("path")),
    )
    machine = _environment(run / ENVIRONMENT)
    is_chat = machine.get("data") not in (None, "text") and any(folder.glob("chat_template*"))
    parts = [
        f"# {run.name}",
        _origin(config, records, "reward" if scores else "chat" if is_chat else "language"),
        (_scoring if scores else _use)(is_chat=is_chat, is_adapter=is_adapter),
        "## Data\n\n" + "\n".join(f"- {_short(path)}" for path in _paths(config)),
        _results(records),
        "## Settings\n\n```yaml\n" + _settings(config) + "```",
        _versions(machine),
    ]
    try:
        draw_loss(records, folder / CURVE)
        parts.insert(5, f"![Loss over the steps]({CURVE})")
    except Exception as error:  # the model goes before
        log.warning("no loss curve: %s", error)
    text = "\n\n".join(part for part in parts if part)
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n").save(folder / CARD)


def _base(config: Mapping[str, Any]) -> str | None:
    path = config["model"].get("path")
    return path if path is not None and _is_hub_id(path) else None


def _is_hub_id(path: str) -> bool:
    return bool(_HUB_ID.fullmatch(path)) and not Path(path).exists()


def _paths(config: Mapping[str, Any]) -> list[str]:
    paths = config["data"]["path"]
    return [paths] if isinstance(paths, str) else paths


def _short(path: str) -> str:
    """A path without the folders of this machine."""
    return path if _is_hub_id(path) else Path(path).name


def _all_short(paths: Any) -> Any:
    if isinstance(paths, Mapping):
        return {name: _all_short(each) for name, each in paths.items()}
    if isinstance(paths, list):
        return [_short(path) for path in paths]
    return None if paths is None else _short(paths)


def _license(folder: Path, source: str | None) -> str | None:
    """The license as the hub names it; None: unknown.

    What the card of the model's source says, or else what the licence there begins with.
    """
    if (said := _said(source)) is not None:
        return said
    texts = [
        " ".join(path.read_text(encoding="utf-8", errors="replace")[:1000].lower().split())
        for path in sorted(folder.iterdir())
        if re.match(r"licen[cs]e|copying", path.name, re.IGNORECASE)
    ]
    known = (name for begins, name in _LICENSES.items() if any(begins in each for each in texts))
    return next(known, "other" if texts else None)


def _said(source: str | None) -> str | None:
    """The licence in the header of a model's card, which lies on this machine."""
    if source is None:
        return None
    card = Path(source).expanduser() / CARD
    if _is_hub_id(source):
        found = try_to_load_from_cache(source, CARD)
        card = Path(found) if isinstance(found, str) else card
    try:
        said = ModelCard.load(card).data.get("license") if card.is_file() else None
    except Exception as error:  # written by hand
        log.warning("%s: not read: %s", card, first_line(error))
        return None
    return said if isinstance(said, str) else None


def _origin(config: Mapping[str, Any], records: list[Mapping[str, Any]], kind: str) -> str:
    path, steps = config["model"].get("path"), max((r.get("step", 0) for r in records), default=0)
    start = "random weights" if path is None else f"`{_short(path)}`"
    chosen = config["model"].get("freeze") or config["model"].get("train_only")
    trained = "some of its parameters" if chosen else "all parameters"
    if (config.get("adapter") or {}).get("method"):
        trained = f"LoRA of rank {config['adapter']['r']}"
    return (
        f"This is a {kind} model, trained from {start} with MegaTrain {__version__}: {trained}, "
        f"{steps} steps of {config['training']['batch_size']} rows of at most "
        f"{config['data']['sequence_length']} tokens."
    )


def _use(*, is_chat: bool, is_adapter: bool) -> str:
    asked = '[{"role": "user", "content": "Hello"}]' if is_chat else '"Once upon a time"'
    peft = "import peft\n" * is_adapter
    model = "peft.AutoPeftModelForCausalLM.from_pretrained(folder)" if is_adapter else "folder"
    return (
        f"## Use\n\n```python\n{peft}from transformers import pipeline\n\n"
        'folder = "PATH OR ID OF THIS FOLDER"\n'
        f'generate = pipeline("text-generation", model={model}, tokenizer=folder)\n'
        f"print(generate({asked}, max_new_tokens=128))\n```"
    )


def _scoring(*, is_chat: bool, is_adapter: bool) -> str:
    said = '"A prompt and its reply"'
    if is_chat:
        talk = '[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]'
        said = f"score.tokenizer.apply_chat_template({talk}, tokenize=False)"
    peft, model, opened = "", "folder", ""
    if is_adapter:
        kind = "peft.AutoPeftModelForSequenceClassification"
        opened = f"model = {kind}.from_pretrained(folder, num_labels=1)\n"
        peft, model = "import peft\n", "model"
    how = f'model={model}, tokenizer=folder, function_to_apply="none"'
    return (
        f"## Use\n\n```python\n{peft}from transformers import pipeline\n\n"
        f'folder = "PATH OR ID OF THIS FOLDER"\n{opened}'
        f'score = pipeline("text-classification", {how})\n'
        f"said = {said}\nprint(score(said{', add_special_tokens=False' * is_chat}))\n```"
    )


def _results(records: list[Mapping[str, Any]]) -> str:
    found = []
    for key, name in _RESULTS.items():
        values = [(r["step"], r[key]) for r in records if isinstance(r.get(key), float)]
        if values:
            (first, begin), (last, end) = values[0], values[-1]
            found.append(f"- {name}: {begin:.4f} (step {first}) to {end:.4f} (step {last})")
    return "## Results\n\n" + "\n".join(found) if found else ""


def _settings(config: Mapping[str, Any]) -> str:
    chosen = {name: dict(config[name]) for name in _SETTINGS if name in config}
    if not config["adapter"]["method"]:
        del chosen["adapter"]
    if not chosen.get("rollout", {}).get("rewards"):
        chosen.pop("rollout", None)
    else:
        chosen["rollout"] |= dict.fromkeys(("server", "server_weights"))
        chosen["rollout"]["rewards"] = _all_short(chosen["rollout"]["rewards"])
    for name in _OF_THIS_MACHINE:
        chosen["data"].pop(name, None)
    for name in ("path", "eval_path"):
        chosen["data"][name] = _all_short(chosen["data"].get(name))
    chosen["engine"] = {"precision": config["engine"]["precision"]}
    told = {
        section: {name: value for name, value in keys.items() if value not in (None, [], {})}
        for section, keys in chosen.items()
    }
    return yaml.safe_dump(told, sort_keys=False, allow_unicode=True)


def _environment(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except InputError:
        return {}


def _versions(found: Mapping[str, Any]) -> str:
    if not found:
        return ""
    packages = {"python": found.get("python"), **found.get("packages", {})}
    gpu = (found.get("gpu") or {}).get("name")
    lines = [f"- {name} {version}" for name, version in packages.items() if version]
    return "## Versions\n\n" + "\n".join([*lines, *([f"- {gpu}"] if gpu else [])])
