"""Commands and their options. Nothing heavy is imported before a command runs.

Exit codes: 0 done, 2 bad configuration or input, 3 does not fit, 4 run failed.
"""

import gc
import logging
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from megatrain import __version__
from megatrain.base import seeds
from megatrain.cli.reporting import ReportingGroup
from megatrain.placement import Precision
from megatrain.telemetry.console import PASSING, StderrHandler, passing

app = typer.Typer(
    cls=ReportingGroup,
    help="Full-precision training of large language models on one GPU, from host memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Overrides = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="PATH=VALUE",
        help="Change a key of the run file, as optimizer.lr=1e-5. It may be given several times.",
    ),
]
DeviceName = Annotated[str, Option(help="Compute on this device: auto, cpu, cuda, cuda:N or mps.")]
DeviceMemory = Annotated[
    str | None, Option(help="Take at most so much memory of the GPU, as 10GiB.")
]
HostMemory = Annotated[
    str | None, Option(help="Take at most so much memory of the host, as 64GiB.")
]
ComputeDtype = Annotated[
    Precision | None, Option(help="Compute in this dtype; the default is bf16.")
]
States = Annotated[
    Literal["fp32", "bf16", "int8"] | None,
    Option(help="Keep AdamW's moments in this type; the default is fp32."),
]
Master = Annotated[
    int | None, Option(min=1, help="Bits kept of AdamW's master weights: 32, exact fp32, or 24.")
]
LoraRank = Annotated[
    int, Option(min=0, help="Train LoRA of this rank on all linear layers; 0 trains everything.")
]
FrozenBase = Annotated[
    Literal["bf16", "fp8", "nf4", "folder"], Option(help="Keep frozen linear layers in this type.")
]
TrustRemoteCode = Annotated[
    bool, Option("--trust-remote-code", help="Run code that the model's folder brings.")
]
AsJson = Annotated[bool, Option("--json", help="Print JSON, for programs.")]


def _show_version(is_set: bool) -> None:
    if is_set:
        print(f"megatrain {__version__}")
        raise typer.Exit()


@app.callback()
def common(
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options that come before the command."""
    handlers = [StderrHandler()]
    logging.basicConfig(format="megatrain: %(message)s", level=logging.WARNING, handlers=handlers)
    logging.getLogger("megatrain").setLevel(PASSING)


@app.command()
def init(
    run: Annotated[Path, Argument(help="The run file to write; it must be new.")] = Path(
        "run.yaml"
    ),
    example: Annotated[
        Literal["chat", "lora", "dpo", "grpo", "demo"],
        Option(help="What the run file is for; chat explains every key."),
    ] = "chat",
) -> None:
    """Write a run file to begin from."""
    from megatrain.cli.init import write_example

    for path in write_example(example, run):
        print(path)
    print(f"Set model.path and data.path there, then: megatrain train {run}")


@app.command()
def train(
    run: Annotated[
        Path, Argument(help="The run file (YAML). With --resume it may be the folder of a run.")
    ],
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        Option(
            "--resume",
            help="Continue the run in output.folder, or else the newest run of this name in "
            "runs/, from its newest whole checkpoint. If there is none, a new run begins.",
        ),
    ] = False,
) -> None:
    """Train a model as a run file says.

    SIGINT (Ctrl-C) or SIGTERM ends the run after the step and saves it; SIGUSR1 saves it after the
    step and goes on.
    """
    passing("loading torch and transformers...")
    from megatrain.cli.train import run_training

    run_training(run, overrides or [], resume=resume)


@app.command()
def data(
    run: Annotated[Path, Argument(help="The run file (YAML).")],
    overrides: Overrides = None,
    rows: Annotated[int, Option(min=0, help="Number of rows to show.")] = 2,
) -> None:
    """Show the data of a run as it will be trained on.

    What is learnt is coloured. The model's weights are not needed. The tokens are kept for
    `megatrain train`.
    """
    from megatrain.cli.data import show_data

    show_data(run, overrides or [], rows)


@app.command()
def doctor(
    device: DeviceName = "auto",
    folder: Annotated[
        Path, Option(help="Measure the disk of this folder, where runs are written.")
    ] = Path("runs"),
    as_json: AsJson = False,
    share: Annotated[bool, Option("--share", help="Print anonymous JSON, for an issue.")] = False,
) -> None:
    """Measure this machine and say what is wrong or slow.

    What was measured is kept for `plan` and for `placement: auto`. Warnings leave the exit code 0.
    """
    from megatrain.cli.doctor import run_doctor

    run_doctor(device, folder, as_json, share)


@app.command()
def plan(
    context: typer.Context,
    run: Annotated[Path | None, Argument(help="A run file (YAML). Give it, or --model.")] = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None, Option(help="Plan for a shape (7B), a folder, a config.json or a hub id.")
    ] = None,
    gpu: Annotated[
        str | None, Option(help="Plan for this GPU, as 4090; the default is the one here.")
    ] = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    memory: Annotated[str | None, Option(help="Memory that GPU and host share, as 128GiB.")] = None,
    cores: Annotated[int | None, Option(min=1, help="CPU cores to plan with.")] = None,
    tokens: Annotated[
        int | None, Option(min=1, help="Tokens of a step; the default is 98304.")
    ] = None,
    sequence_length: Annotated[
        int | None, Option(min=2, help="Tokens of a row; the default is 1024.")
    ] = None,
    micro_batch: Annotated[
        int | None, Option(min=1, help="Rows of a micro-batch; otherwise chosen.")
    ] = None,
    total_tokens: Annotated[
        float | None, Option(min=1, max=1e18, help="Tokens of the whole run, as 1e9.")
    ] = None,
    gpus: Annotated[
        int | None, Option(min=1, max=64, help="Number of GPUs of one host to plan for.")
    ] = None,
    image: Annotated[
        list[str] | None,
        Option(help="Count an image of this size in every row, as 1024x1024; repeatable."),
    ] = None,
    clip: Annotated[
        bool | None, Option("--clip/--no-clip", help="Clip by the exact norm; the default.")
    ] = None,
    precision: ComputeDtype = None,
    states: States = None,
    master: Master = None,
    lora_r: LoraRank = 0,
    base: FrozenBase = "bf16",
    disk_space: Annotated[
        str | None, Option(help="Let states and weights take so much of a disk, as 200GiB.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a run fits, and its memory, speed and time.

    Nothing is allocated, and only a config.json is downloaded. Exit code 3: it does not fit.
    """
    passing("loading torch and transformers...")
    gc.disable()  # collections take a fifth of the imports' time, and free nothing
    from megatrain.cli.plan import run_plan

    gc.freeze()  # spares half a second for a collection when the interpreter ends
    # Not all versions of typer convert what they put into `params`.
    run_plan(context.params | {"tokens_per_step": tokens, "run": run})


@app.command()
def export(
    run: Annotated[str, Argument(help="The folder of a run, of a checkpoint or of a model.")],
    out: Annotated[Path, Argument(help="The folder to write. It must be new or empty.")],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Option(help="Write tensors in this dtype; otherwise as they are."),
    ] = None,
    merged: Annotated[
        bool, Option("--merged", help="Write the model with its adapter merged.")
    ] = False,
    gguf: Annotated[
        Literal["f16", "q8_0"] | None,
        Option(help="Write a GGUF file of this type, too, by llama.cpp's converter."),
    ] = None,
    like: Annotated[
        Path | None,
        Option(help="Pack weights as this folder in mxfp4 or float8 does, say the run's base."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a model as a Hugging Face folder.

    A run gives its finished model, or its newest whole checkpoint if it has not ended.
    """
    from megatrain.train.export import export as export_model

    export_model(
        run, out, dtype, merged=merged, gguf=gguf, like=like, trust_remote_code=trust_remote_code
    )
    print(out)


ModelArgument = Annotated[
    str, Argument(help="The folder of a run, checkpoint or model, a GGUF file, or a hub id.")
]
MaxNewTokens = Annotated[int, Option(min=1, help="Add at most this number of tokens.")]
Temperature = Annotated[
    float | None,
    Option(
        min=0.0,
        help="Draw at this temperature; 0 takes the likeliest token. The default is the model's "
        "own, or 0.8.",
    ),
]
TopP = Annotated[
    float | None,
    Option(
        min=0.0,
        max=1.0,
        help="Draw from the likeliest tokens that together have this probability; the default is "
        "the model's, or 0.95.",
    ),
]
TopK = Annotated[
    int | None, Option(min=0, help="Draw from this number of the likeliest tokens; 0: all.")
]
RepetitionPenalty = Annotated[
    float | None, Option(min=0.01, help="Above 1: make tokens that have occurred less likely.")
]
Seed = Annotated[
    int, Option(min=0, max=seeds.LARGEST, help="Draw with this seed of random numbers.")
]
SamplingPrecision = Annotated[Literal["bf16", "fp32"], Option(help="Compute in this dtype.")]


@app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[
        list[str] | None, Option(help="Continue this text. It may be given several times.")
    ] = None,
    prompts: Annotated[
        Path | None, Option(help="Continue each line, or of .jsonl each `prompt`, `messages`.")
    ] = None,
    chat: Annotated[
        bool, Option("--chat", help="Take each text as a user's message, in the chat template.")
    ] = False,
    output: Annotated[
        Path | None, Option(help="Write prompts and completions to this new .jsonl file.")
    ] = None,
    batch_size: Annotated[int, Option(min=1, help="Prompts to continue together.")] = 16,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = 0,
    device: DeviceName = "auto",
    precision: SamplingPrecision = "bf16",
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Continue texts, or reply to messages.

    What does not fit on the device is streamed from host memory, layer by layer: all prompts of a
    batch share each pass over the weights.
    """
    from megatrain.cli.generate import all_prompts, opened, print_texts, require_new
    from megatrain.generate import Sampling

    texts = all_prompts(prompt or [], prompts, chat=chat)
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed)
    if output is not None:
        require_new(output)
    with opened(
        model, device, precision, device_memory, host_memory, trust_remote_code=trust_remote_code
    ) as run:
        print_texts(*run, texts, sampling, batch_size=batch_size, output=output)


@app.command()
def chat(
    model: ModelArgument,
    system: Annotated[str | None, Option(help="Begin with this system message.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = 0,
    device: DeviceName = "auto",
    precision: SamplingPrecision = "bf16",
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Talk with a model, by its own chat template."""
    from megatrain.cli.generate import opened, talk
    from megatrain.generate import Sampling

    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed)
    with opened(
        model, device, precision, device_memory, host_memory, trust_remote_code=trust_remote_code
    ) as run:
        talk(*run, system, sampling)


@app.command()
def report(
    run: Annotated[Path, Argument(help="The folder of a run.")],
    output: Annotated[
        Path | None, Option(help="Write the page to this file; otherwise into the folder.")
    ] = None,
) -> None:
    """Show a run as one HTML page: curves, speed, memory, times."""
    from megatrain.report import write_report

    print(write_report(run, output))


@app.command()
def demo(overrides: Overrides = None) -> None:
    """Train a small model on Python's own library.

    Then sample from it. Nothing is downloaded.
    """
    from megatrain.cli.demo import run_demo

    run_demo(overrides or [])
