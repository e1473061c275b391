"""Recipes are planned with published configurations; what starts them is well formed."""

import re
import subprocess

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.configurations import CONFIGS, PUBLISHED, configuration
from megatrain.config import load
from tests.structure.source_tree import ROOT
from tests.sweeps import few

RECIPES, CLUSTER = ROOT / "examples" / "recipes", ROOT / "examples" / "cluster"
PLANNED = r"# Planned for (.+), (\d+) GiB of host memory, (\d+) cores: ([\d,]+) tokens/s\."


@pytest.mark.parametrize("name", few([*PUBLISHED], 0, 12, 18))
def test_a_configuration_has_the_parameters_that_the_hub_counts(name):
    images = "vision_config" in CONFIGS[name]
    kind = AutoModelForImageTextToText if images else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(configuration(name))
    assert sum(each.numel() for each in model.parameters()) == PUBLISHED[name].parameters


def test_every_published_model_has_a_recipe():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {*PUBLISHED}
    page = (RECIPES / "README.md").read_text(encoding="utf-8")
    for name, model in PUBLISHED.items():
        file = RECIPES / f"{name}.yaml"
        run, text = load(file, []), file.read_text(encoding="utf-8")
        assert run.model.path == model.hub and f"train examples/recipes/{name}.yaml" in text
        gpu, host, cores, rate = re.search(PLANNED, text).groups()
        how = text.partition(": ")[2].partition(".\n")[0]
        assert text.startswith(f"# {model.name}: ")
        cells = f"[{model.name}]({name}.yaml) | {how} | {gpu}, {cores} cores | {host} GiB | {rate}"
        assert f"| {cells} |" in page


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_is_planned_as_it_says(megatrain, tmp_path, name):
    file = RECIPES / f"{name}.yaml"
    gpu, host, cores, rate = re.search(PLANNED, file.read_text(encoding="utf-8")).groups()
    configuration(name).save_pretrained(tmp_path / "model")
    where = ["--gpu", gpu, "--host-memory", f"{host}GiB", "--cores", cores]
    path = f"model.path={tmp_path / 'model'}"
    told = megatrain.planned(file, "--set", path, *where)
    forecast = told["forecast"]
    reached = forecast["tokens_per_step"] / forecast["seconds"]
    assert told["fits"] and reached == pytest.approx(float(rate.replace(",", "")), rel=0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "reported"), [("llama-3.1-8b", 2432), ("qwen3-14b", 1405)])
def test_an_rtx_4090_is_foretold_as_others_measured_it(megatrain, tmp_path, name, reported):
    """By SlideFormer, fp32 masters, 64 x 1,024 tokens (arXiv 2603.16428); the host is our guess."""
    configuration(name).save_pretrained(tmp_path)
    where = ["--gpu", "4090", "--host-memory", "512GiB", "--cores", "32", "--tokens", "65536"]
    forecast = megatrain.planned("--model", tmp_path, *where)["forecast"]
    assert 65536 / forecast["seconds"] == pytest.approx(reported, rel=0.05)


def test_scripts_of_clusters_and_of_the_image_are_well_formed():
    slurm = (CLUSTER / "slurm.sh").read_text(encoding="utf-8")
    sky = yaml.safe_load((CLUSTER / "sky.yaml").read_text(encoding="utf-8"))
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    steps = re.findall(r"^RUN ((?:.*\\\n)*.*)", re.sub(r"^ *#.*\n", "", image, flags=re.M), re.M)
    assert "\nUSER " in image and "\nUSER root" not in image
    assert (ROOT / sky["envs"]["RUN"]).is_file()
    for script in (slurm, sky["setup"], sky["run"], *steps):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert all("-m megatrain train" in script for script in (slurm, sky["run"]))
