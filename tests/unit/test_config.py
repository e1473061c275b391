"""The run file: precedence, and one clear line for each mistake."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from torch.optim import SGD
from transformers import TrainingArguments, get_scheduler

from megatrain import InputError, Placement, config
from megatrain.base.json_yaml import parse_yaml
from megatrain.config.load import foreign, validate
from megatrain.config.schema import Config, EngineSection
from megatrain.optim import RULES
from megatrain.placement import RENAMED, renamed
from megatrain.train.setup import check_schedule, make_schedule
from tests.refusals import refused, table

MINIMAL = """
model: {path: some/model}
data: {kind: text, path: a.txt, sequence_length: 128}
training: {steps: 10}
"""


@pytest.fixture
def load(tmp_path):
    def load(text=MINIMAL, *overrides):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return config.load(path, overrides)

    return load


def test_overrides_beat_the_file_and_the_file_beats_the_defaults(load):
    """The resolved file has every key and loads as the same configuration."""
    text = MINIMAL + "optimizer: {lr: 2e-4, eps: 1e-7}\nschedule: {options: {num_cycles: 0.5}}\n"
    loaded = load(text, "optimizer.lr=3e-4", "optimizer.lr=5e-4", "engine.placement.slots=3")
    assert (loaded.optimizer.lr, loaded.optimizer.eps) == (5e-4, 1e-7)
    assert loaded.optimizer.betas == [0.9, 0.95]
    assert load(loaded.as_yaml()) == loaded
    resolved = yaml.safe_load(load().as_yaml())
    for name, field in config.Config.model_fields.items():
        assert set(resolved[name]) == set(field.annotation.model_fields)


def test_files_of_earlier_runs_load_with_the_defaults_of_keys_that_have_been_given_up(load):
    loaded = load()
    tree = yaml.safe_load(loaded.as_yaml())
    tree["model"]["base_model"] = tree["loss"]["z_loss"] = tree["optimizer"]["packed"] = None
    tree["rollout"] |= {
        "server": None,
        "server_seconds": 600.0,
        "importance_sampling_clip_max": 3.0,
    }
    tree["training"]["samples"], tree["data"]["text_field"] = None, "text"
    assert load(yaml.safe_dump(tree)) == loaded
    with pytest.raises(InputError, match="rollout.server: unknown key; leave it out: the engine"):
        load(yaml.safe_dump(tree), "rollout.server=http://localhost:8000")


@pytest.mark.parametrize("name", RULES)
def test_an_optimizer_s_keys_are_its_rule_s(load, name):
    """None given: its own values, which the resolved file says and means again."""
    loaded = load(MINIMAL, f"optimizer.name={name}")
    assert loaded.optimizer.rule() == RULES[name]()
    assert loaded.optimizer.lr == RULES[name]().lr
    assert load(loaded.as_yaml()) == loaded
    own = {
        "betas": (0.5, 0.6),
        "nesterov": True,
        "momentum": 0.8,
        "lr": 1,
        "ns_steps": 4,
        "ns_precision": "fp32",
        "adamw_lr": 2.0,
        "packed": {"qkv": [4, 2, 2]},
        "clip": "all",
    }
    own = {key: value for key, value in own.items() if key in RULES[name].__dataclass_fields__}
    given = [f"optimizer.{k}={list(v) if k == 'betas' else v}" for k, v in own.items()]
    given.append("engine.precision=fp32")  # what ns_precision needs
    changed = load(MINIMAL, f"optimizer.name={name}", *given)
    assert changed.optimizer.rule() == RULES[name](**own)
    if "clip" in own:
        load(MINIMAL, f"optimizer.name={name}", *given, "training.spike=3")  # all wait for the norm


def test_a_plain_off_is_no_boolean(load):
    assert load(MINIMAL, "engine.verify=off").engine.verify == "off"
    assert load(MINIMAL + "engine: {verify: off}").engine.verify == "off"


def test_a_null_section_is_as_if_left_out(load):
    for name in config.Config.model_fields.keys() - {"model", "data", "training"}:
        given = MINIMAL + f"{name}:  # its keys are comments\n"
        assert load(given) == load(MINIMAL, f"{name}=null") == load()
    given = MINIMAL + "adapter: {method: lora, r: 4}\nengine: {precision: fp32}\n"
    assert load(given, "adapter=null") == load(MINIMAL, "engine.precision=fp32")


@pytest.mark.parametrize("text", ["{}", "model: null", "data: {path: a}", MINIMAL + "a: 1"])
def test_all_that_is_wrong_is_said_at_once(load, text):
    """With the smallest file that works, which does."""
    with pytest.raises(InputError) as caught:
        load(text, *(["data=null", "training=null"] if "a: 1" in text else []))
    smallest = re.search(r"a run file needs at least (\{.*\}); `megatrain init`", str(caught.value))
    assert load(smallest[1]).training.steps == 100
    assert "data.sequence_length: missing" in str(caught.value)
    assert "training: give either steps or epochs" in str(caught.value)
    assert ("a: unknown key" in str(caught.value)) == ("a: 1" in text)
    assert ("model: give either path" in str(caught.value)) == (text != MINIMAL + "a: 1")


def test_problems_between_sections_are_said_at_once(load):
    with pytest.raises(InputError, match=r"base nf4 needs engine.precision bf16.*; training.eval_"):
        load(MINIMAL, "model.base=nf4", "engine.precision=fp32", "training.eval_every=3")


@pytest.mark.parametrize(("ratio", "steps"), [(0.1, 12), (0.03, 45), (0.1, 30), (0.5, 4), (0, 4)])
def test_a_warm_up_has_the_steps_and_rates_of_transformers(load, tmp_path, ratio, steps):
    config = load(MINIMAL, f"schedule.warmup_ratio={ratio}", "optimizer.lr=1")
    arguments = TrainingArguments(tmp_path, warmup_steps=ratio, use_cpu=True, report_to=[])
    optimizer = SGD([torch.zeros(1)], lr=1.0)
    plain = get_scheduler("cosine", optimizer, arguments.get_warmup_steps(steps), steps)
    for done in range(steps):
        ours = make_schedule(config, SGD([torch.zeros(1)], lr=1.0), steps, done).get_last_lr()
        assert ours == plain.get_last_lr(), done
        optimizer.step()
        plain.step()


@pytest.mark.parametrize(
    ("schedule", "is_warned"),
    [
        ("{warmup_steps: 9}", False),
        ("{warmup_steps: 10}", True),
        ("{name: warmup_stable_decay, options: {num_decay_steps: 5}}", False),
        ("{name: warmup_stable_decay, options: {num_decay_steps: 200}}", True),
    ],
)
def test_a_rate_that_never_gets_near_the_optimizer_s_is_warned_of(
    load, caplog, schedule, is_warned
):
    check_schedule(load(MINIMAL, f"schedule={schedule}"), 10)
    assert ("the learning rate never gets to optimizer.lr" in caplog.text) == is_warned


@pytest.mark.parametrize("number", ["1e-5", "1.5e3", "2E+1", ".5e1", "-1e-3"])
def test_exponents_are_numbers_as_in_yaml_1_2(number):
    assert parse_yaml(number) == float(number)


@pytest.mark.parametrize("number", ["010", "-0123", "00", "1:30", "1:30.5", "+0_7"])
def test_what_is_a_number_in_one_version_of_yaml_alone_is_refused(load, number):
    with pytest.raises(InputError, match="line 1: not valid: .* in YAML 1.1 and something else"):
        load(MINIMAL, f"training.steps={number}")


MISTAKES, SETTINGS = (table(__file__, name) for name in ("mistakes.yaml", "settings.yaml"))


@pytest.mark.parametrize("expected", MISTAKES)
def test_a_mistake_is_one_line_with_the_key_and_what_would_be_right(load, expected):
    with refused(re.escape(expected)):
        load(MINIMAL, *MISTAKES[expected])


FILES = SETTINGS["run files"] | {
    "a: " + "[" * 5000: "not valid: nested too deeply",
    "a: " + "9" * 5000: "",
    "x: 1 # " + "long " * 300_000: "larger than",
}


@pytest.mark.parametrize("text", FILES, ids=lambda text: text[:30])
def test_a_hostile_or_broken_file_is_refused_in_one_line(load, text, tmp_path):
    with refused(f"^{re.escape(str(tmp_path / 'run.yaml'))}.*{re.escape(FILES[text])}"):
        load(text)
    with pytest.raises(InputError, match=r"run.yaml: optimizer.lrr: unknown key; did you mean"):
        load(MINIMAL + "optimizer: {lrr: 1}\n")


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".txt", ".CSV"])
def test_a_file_of_data_is_refused_with_the_key_it_belongs_to(tmp_path, suffix, packed):
    path = tmp_path / f"rows{suffix}{packed}"
    with pytest.raises(InputError, match="cannot be read: No such file"):
        config.load(path)
    path.write_bytes(b'{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(InputError) as refused:
        config.load(path)
    assert str(refused.value) == (
        f"{path}: a file of data: name it in a run file (YAML), as data.path"
    )


# Keys of other trainers are refused with the name of ours, as docs/coming-from.md lists them.

DOCUMENT = Path(__file__).parents[2] / "docs" / "coming-from.md"
OURS = {
    f"{section}.{key}"
    for section, field in Config.model_fields.items()
    for key in field.annotation.model_fields
}


@pytest.mark.parametrize("told", SETTINGS["keys of others"])
def test_a_key_of_another_trainer_is_refused_with_ours(told):
    with pytest.raises(InputError, match=re.escape(told)):
        validate(SETTINGS["keys of others"][told], "run.yaml")


# Of the first column, what is no key of a run file: files, classes, and parts of what is one.
NO_KEYS = {"dataset_info", "columns", "tags", "formatting", "zero_to_fp32", "cpu",
           "stage3_max_live_parameters", "stage3_prefetch_bucket_size", "CPUOffloadPolicy",
           "MixedPrecisionPolicy"}  # fmt: skip


def named():
    """Each key of another trainer in the document, and what stands beside it."""
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", DOCUMENT.read_text(encoding="utf-8"), re.M)
    keys = {n: here for there, here in rows for n in re.findall(r"`(\w+)[^`]*`", there)}
    return {name: here for name, here in keys.items() if name not in NO_KEYS}


def test_each_key_of_the_document_is_answered_with_keys_that_exist():
    ours = {place.partition(".")[2] for place in OURS}
    assert len(named()) > 200
    for name in named():
        answer = foreign().get(name)
        assert answer is not None or name in ours, name
        if place := re.match(r"its name here is (\S+?)(?:[:,;]|$| )", answer or ""):
            assert place[1] in OURS, (name, answer)
        assert "`" not in (answer or "") and "](" not in (answer or "")
    for key in re.findall(r"`((?:model|data|training|optimizer|schedule|engine|checkpoint|output)"
                          r"\.\w+)", DOCUMENT.read_text(encoding="utf-8")):  # fmt: skip
        assert key in OURS, key


def test_a_key_that_shares_a_row_is_answered_with_its_own_key():
    assert foreign()["learning_rate"] == "its name here is optimizer.lr"
    assert foreign()["weight_decay"] == "its name here is optimizer.weight_decay"
    assert foreign()["adam_beta2"] == "its name here is optimizer.betas"
    assert foreign()["lmbda"] == (  # the row has no key of its own for each
        "its name here is loss.teacher, loss.beta (with loss.name: distill; it learns from the "
        "replies in the data)"
    )


# What a placement may be.


@pytest.mark.parametrize("message", SETTINGS["placement"])
def test_impossible_choices_are_refused_in_one_line(message):
    with pytest.raises(InputError) as caught:
        Placement(**SETTINGS["placement"][message])
    assert str(caught.value) == f"placement.{message}"


def test_prefetch_is_as_far_as_the_slots_reach():
    assert [Placement(slots=n).prefetch_distance for n in (1, 2, 5)] == [0, 1, 4]
    assert Placement(slots=5, prefetch=2).prefetch_distance == 2
    assert Placement(slots=5, prefetch=0).prefetch_distance == 0


@pytest.mark.parametrize(
    "placement",
    [
        Placement(),
        Placement(slots=3, layer_inputs="host", resident=("embedding", "layer 0"), keep_rows=False),
        Placement(compile=True, chunk_tokens=8192, save_attention="host", save_bytes=0),
    ],
)
def test_a_placement_is_shown_as_a_run_file_takes_it(placement):
    assert EngineSection(placement=yaml.safe_load(str(placement))).placement_value() == placement
    assert Placement(**placement.as_dict()) == placement
    assert "host_grad_buffers" not in str(placement)


@pytest.mark.parametrize("old", RENAMED)
def test_a_run_file_with_an_earlier_name_is_told_today_s(old):
    value = getattr(Placement(), RENAMED[old])
    with pytest.raises(ValueError, match=f"'{old}' is now called '{RENAMED[old]}'"):
        EngineSection(placement={old: value})
    assert EngineSection(placement={RENAMED[old]: value}).placement_value() == Placement()


def test_earlier_names_of_saved_choices_are_read():
    placement = Placement(slots=3, layer_inputs="host", save_activations=2, offload_activations=1)
    today, earlier = placement.as_dict(), {new: old for old, new in RENAMED.items()}
    saved = {earlier.get(name, name): value for name, value in today.items()}
    assert saved.keys() - today.keys() == RENAMED.keys()
    assert Placement(**renamed(saved)) == Placement(**renamed(today)) == placement
