"""The planner page: plans are the planner's, the page stands alone, its script looks up right."""

import json
import re
import shutil
import subprocess
from collections import Counter

import pytest

from benchmarks import planner_page
from benchmarks.planner_page import FIELDS, HOST_GIB, METHODS, MODELS, TOKENS
from megatrain.config import load
from megatrain.plan.planner import Planner
from tests.sweeps import few
from tests.unit.test_report import Page

LARGEST_BYTES = 400_000
NODE, CHROMIUM = shutil.which("node"), shutil.which("chromium")


@pytest.fixture(scope="module")
def kept():
    return planner_page.kept()


@pytest.fixture(scope="module")
def page():
    return planner_page.PAGE.read_text(encoding="utf-8")


def parts(column):
    """Model, method, GPU and tokens of a column's name."""
    model, method, gpu, tokens = column.split("|")
    return model, method, gpu, int(tokens)


# What is kept.


@pytest.mark.parametrize(
    ("column", "host_gib", "fits"),
    few(
        [
            ("7b|int8|RTX 3090|65536", 64, True),
            ("7b|fp32|RTX 3090|65536", 64, False),
            ("7b|lora|RTX 4090|65536", 2048, True),
        ]
    ),
)
def test_a_plan_is_what_the_planner_says_now(kept, column, host_gib, fits):
    model, method, gpu, tokens = parts(column)
    planner = Planner(planner_page.structure(model, METHODS[method].lora_r, METHODS[method].base))
    step = planner_page.workload(METHODS[method], tokens)
    now = planner_page.planned(planner, planner_page.machine(gpu, host_gib), step, made=0)
    assert now[:-1] == kept["plans"][column][str(host_gib)][:-1]
    assert now[0] is fits and (now[FIELDS.index("host_gib")] <= host_gib) == fits


def test_what_is_kept_has_its_shape(kept):
    assert kept["plans"] and kept["fields"] == [*FIELDS]
    for column, plans in kept["plans"].items():
        model, method, gpu, tokens = parts(column)
        assert model in MODELS and method in METHODS and gpu in kept["gpus"] and tokens in TOKENS
        hosts = [int(host_gib) for host_gib in plans]
        assert hosts == [host_gib for host_gib in HOST_GIB if host_gib in hosts], column
        assert hosts[0] == HOST_GIB[0]
        for host_gib, plan in plans.items():
            told = dict(zip(FIELDS, plan, strict=True))
            assert told["made"] < len(kept["made"])
            last = host_gib == [*plans][-1]
            assert told["fits"] or last, f"{column}: planned below a host that is too small"
            if told["fits"]:
                assert told["seconds"] > 0 and told["host_gib"] <= int(host_gib)
    assert all({"commit", "torch", "transformers"} <= made.keys() for made in kept["made"])


def test_plans_of_a_gpu_whose_figures_have_changed_do_not_count(kept, tmp_path):
    then = dict(kept, gpus={name: dict(figures) for name, figures in kept["gpus"].items()})
    gpu = next(iter(then["gpus"]))
    then["gpus"][gpu]["matmul_tflops"] += 1
    planner_page.keep(then, tmp_path / "planner.json")
    left = planner_page.kept(tmp_path / "planner.json")["plans"]
    assert left == {name: plans for name, plans in kept["plans"].items() if parts(name)[2] != gpu}
    assert left != kept["plans"]


# The page.


@pytest.fixture(scope="module")
def tags(page):
    return Page(page).tags


def test_the_page_is_of_what_is_kept(kept, page):
    assert page == planner_page.page(kept), "python -m benchmarks.planner_page page"
    assert len(page.encode()) < LARGEST_BYTES


def test_the_page_takes_nothing_from_elsewhere(page, tags):
    references = {"src", "srcset", "action", "data", "poster"}
    for tag, attributes in tags:
        assert tag not in {"link", "iframe", "img", "object", "embed", "base"}, tag
        assert not references & attributes.keys(), attributes
        assert attributes.get("href", "#").startswith("#"), attributes
    style, script = (
        re.search(rf"<{tag}>(.*?)</{tag}>", page, re.S)[1] for tag in ("style", "script")
    )
    assert not re.search(r"url\(|@import|@font-face|https?:", style)
    assert not re.search(r"fetch|XMLHttpRequest|import\b|WebSocket|https?:|eval|innerHTML", script)


def test_all_inputs_have_labels(tags):
    names = Counter(attributes["id"] for _, attributes in tags if "id" in attributes)
    assert set(names.values()) == {1}
    labelled = {attributes.get("for") for tag, attributes in tags if tag == "label"}
    inputs = {attributes["id"] for tag, attributes in tags if tag in {"select", "input"}}
    assert inputs and labelled == inputs
    described = [
        a[name] for _, a in tags for name in ("aria-labelledby", "aria-describedby") if name in a
    ]
    assert {*described} <= {*names}
    assert ("html", {"lang": "en"}) in tags


def test_every_run_file_is_one(tmp_path):
    for method in METHODS.values():
        text = method.run()
        for name, value in (("HUB", "Qwen/Qwen2.5-7B"), ("ROWS", "64"), ("HOST", "128")):
            assert name in text
            text = text.replace(name, value)
        file = tmp_path / "run.yaml"
        file.write_text(text)
        run = load(file, [])
        assert run.training.batch_size * run.data.sequence_length == TOKENS[0]
        assert run.optimizer.rule().states == planner_page.workload(method, TOKENS[0]).rule.states
        assert (run.model.base, run.adapter.keys is None) == (method.base, not method.lora_r)


# Its script.

CHECK = """
const data = JSON.parse(process.argv[1]), page = require(process.argv[2]);
const answers = [];
for (const model of data.models) for (const method of data.methods) for (const gpu of data.gpus)
  for (const tokens of data.tokens) for (const host of data.hosts) {
    const choice = {model: model.id, method: method.id, gpu: gpu.name, tokens, host};
    const plan = page.look(data, choice);
    const again = page.chosen(data, page.fragment(choice), data.first);
    answers.push({choice, again, plan, missing: plan && page.missing(plan, choice, gpu),
      rate: plan && plan.fits ? page.rate(plan, choice) : null});
  }
console.log(JSON.stringify(answers));
"""


@pytest.mark.skipif(NODE is None, reason="there is no node")
def test_the_script_finds_the_plan_or_says_that_there_is_none(kept, page, tmp_path):
    script = tmp_path / "page.js"
    script.write_text(re.search(r"<script>(.*?)</script>", page, re.S)[1], encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1]
    done = subprocess.run([NODE, "-e", CHECK, data, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = Counter()
    for answer in json.loads(done.stdout):
        choice, plan = answer["choice"], answer["plan"]
        assert answer["again"] == choice
        column = "|".join(str(choice[name]) for name in ("model", "method", "gpu", "tokens"))
        told = expected(kept["plans"].get(column, {}), choice["host"])
        seen["none" if told is None else told["fits"]] += 1
        if told is None:
            assert plan is None, choice
            continue
        assert [plan[name] for name in ("fits", "seconds", "device", "host", "rows")] == [
            told[name] for name in ("fits", "seconds", "device_gib", "host_gib", "rows")
        ]
        if told["fits"]:
            assert plan["host"] <= choice["host"] and answer["missing"] == ""
            assert answer["rate"] == pytest.approx(choice["tokens"] / told["seconds"])
        else:
            assert "memory are missing" in answer["missing"]
    assert seen[True] and seen[False], seen


def expected(plans, host_gib):
    """The plan of a host: its own, one that leaves room enough, or one that does not fit more."""
    larger = [int(each) for each in plans if int(each) >= host_gib]
    if not larger:
        return None
    told = dict(zip(FIELDS, plans[str(min(larger))], strict=True))
    enough = told["host_gib"] <= (1 - planner_page.FREE) * host_gib
    return told if min(larger) == host_gib or not told["fits"] or enough else None


@pytest.mark.exhaustive
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_browser_shows_the_answer_at_every_width(page, tmp_path):
    file = tmp_path / "planner.html"
    file.write_text(page, encoding="utf-8")
    chosen = "#gpu=RTX+3090&host=64&model=7b&method={}&tokens=65536&price=0.4"
    for method, words in (("int8", "It fits."), ("fp32", "host memory are missing")):
        shown = dom(f"{file.as_uri()}{chosen.format(method)}", tmp_path)
        assert words in re.search(r"<article.*</article>", shown, re.S)[0]
    frames = tmp_path / "frames.html"
    address = f"{file.as_uri()}{chosen.format('int8')}"
    widths = 320, 768, 1280
    frames.write_text(
        "".join(f'<iframe src="{address}" style="width:{width}px"></iframe>' for width in widths)
        + "<p id=told></p><script>onload = () => told.textContent = "
        "[...document.querySelectorAll('iframe')].map("
        "each => each.contentDocument.documentElement.scrollWidth).join(' ')</script>"
    )
    (told,) = re.findall(r'<p id="told">([\d ]+)</p>', dom(frames.as_uri(), tmp_path))
    for width, needed in zip(widths, told.split(), strict=True):
        assert int(needed) <= width


def dom(address, folder):
    """The elements of a page when its scripts have run."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    options += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=3000", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *options, address], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
