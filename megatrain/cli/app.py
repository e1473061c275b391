"""Commands and their options. Nothing heavy is imported before a command runs.

Exit codes: 0 done, 2 bad configuration or input, 3 does not fit, 4 run failed.
"""

import errno
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from megatrain import __version__
from megatrain.base import seeds
from megatrain.cli.bench import bench
from megatrain.cli.options import DeviceMemory, DeviceName, HostMemory
from megatrain.cli.planning import doctor, plan
from megatrain.cli.usage import UsageError, as_input_error
from megatrain.errors import InputError, MegatrainError, RunFailed, in_one_line, told
from megatrain.telemetry.log import PASSING, StderrHandler, end_passing, passing, wrapped

_PATH_ERRORS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR,
    errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip


class ReportingGroup(TyperGroup):
    """Turns errors into one line on stderr and the documented exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command; `--debug` adds the traceback to the line."""
        with _reported(ctx):
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read what comes before the command."""
        with _reported(ctx):
            return super().parse_args(ctx, args)


@contextmanager
def _reported(ctx: Any) -> Iterator[None]:
    try:
        try:
            yield
        finally:
            end_passing()
    except (MegatrainError, OSError, UsageError) as error:
        known = _known(error)
        if known is None:
            raise
        if ctx.params.get("debug"):
            traceback.print_exc()
        with suppress(OSError):  # the exit code says it, too
            who = f"rank {os.environ['RANK']}: " if "TORCHELASTIC_RUN_ID" in os.environ else ""
            print(wrapped(f"megatrain: error: {who}{in_one_line(known)}"), file=sys.stderr)
        raise typer.Exit(known.exit_code) from error
    except KeyboardInterrupt as error:
        print("megatrain: interrupted", file=sys.stderr)
        raise typer.Exit(130) from error  # 128 + SIGINT, the shells' convention


def _known(error: Exception) -> MegatrainError | None:
    """As one of our errors: a path that cannot be used is bad input. None: it is no error."""
    if isinstance(error, UsageError):
        return as_input_error(error)
    if not isinstance(error, OSError):
        assert isinstance(error, MegatrainError)
        return error
    if error.errno in _PATH_ERRORS:
        return InputError(f"{told(error)}; check the path and who may use it")
    return RunFailed(told(error))


app = typer.Typer(
    cls=ReportingGroup,
    help="Full-precision training of large language models on one GPU, from host memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench, name="bench")
app.command()(doctor)
app.command()(plan)


Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Change a key of the run file, as optimizer.lr=1e-5. It may be given several times.",
    ),
]
BaseModel = Annotated[
    str | None,
    typer.Option(metavar="PLACE", help="Say where the base of the adapter is, if it has moved."),
]
Precision = Literal["bf16", "fp32"]
Dtype = Literal["float32", "bfloat16", "float16"]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"megatrain {__version__}")
        raise typer.Exit()


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options that come before the command."""
    handlers = [StderrHandler()]
    logging.basicConfig(format="megatrain: %(message)s", level=logging.WARNING, handlers=handlers)
    logging.getLogger("megatrain").setLevel(PASSING)


@app.command()
def init(
    run: Annotated[Path, typer.Argument(help="The run file to write; it must be new.")] = Path(
        "run.yaml"
    ),
    example: Annotated[
        Literal["chat", "lora", "dpo", "grpo", "demo"],
        typer.Option(help="What the run file is for; chat explains every key."),
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
        Path,
        typer.Argument(help="The run file (YAML). With --resume it may be the folder of a run."),
    ],
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run in output.folder, or else with the newest run of this name "
            "in runs/, from its newest whole checkpoint. Where there is none, the run begins.",
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
def branch(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or one of its checkpoints.")],
    new: Annotated[Path, typer.Argument(help="The new run's folder. It must be new or empty.")],
    overrides: Overrides = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Take the weights alone and begin at step 1. Everything but the model may change.",
        ),
    ] = False,
) -> None:
    """Go on from where a run is, in another folder and with other settings.

    Optimizer state, steps and place in the data are taken along; what may change is what may
    change on --resume: the length of the run, learning rate, schedule, clipping, loss, evaluation,
    where things rest.
    """
    from megatrain.cli.train import run_branch

    run_branch(run, new, overrides or [], fresh=fresh)


@app.command()
def data(
    run: Annotated[Path, typer.Argument(help="The run file (YAML).")],
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, help="Show so many rows.")] = 2,
    html: Annotated[Path | None, typer.Option(help="Also write a page to this file.")] = None,
) -> None:
    """Show the data of a run as it will be trained on; the model's weights are not needed.

    What is learnt is coloured. The tokens are kept for `megatrain train`.
    """
    from megatrain.cli.data import show_data

    show_data(run, overrides or [], rows, html)


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="The folder of a run, of a checkpoint or of a model.")],
    out: Annotated[Path, typer.Argument(help="The folder to write. It must be new or empty.")],
    dtype: Annotated[
        Dtype | None, typer.Option(help="Write tensors in this dtype; otherwise as they are.")
    ] = None,
    merged: Annotated[
        bool,
        typer.Option("--merged", help="Write the model with its adapter merged."),
    ] = False,
    base_model: BaseModel = None,
) -> None:
    """Write a model as a Hugging Face folder.

    Of a run: its finished model, or its newest whole checkpoint where it has not ended.
    """
    from megatrain.train.export import export as export_model

    export_model(run, out, dtype, merged=merged, base_model=base_model)
    print(f"{out}")


ModelArgument = Annotated[
    str, typer.Argument(help="The folder of a run, of a checkpoint or of a model, or a hub id.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Add at most so many tokens.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Draw at this temperature; 0 takes the likeliest token. The default is the model's "
        "own, or 0.8.",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Draw from the likeliest tokens whose probabilities add up to this. The default is "
        "the model's own, or 0.95.",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(min=0, help="Draw from so many of the likeliest tokens; 0 means all of them."),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(min=0.01, help="Above 1, make tokens less likely that are there already."),
]
Seed = Annotated[
    int, typer.Option(min=0, max=seeds.LARGEST, help="Draw with this seed of random numbers.")
]
PrecisionOption = Annotated[Precision, typer.Option(help="Compute in this dtype.")]


@app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Continue this text. It may be given several times.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Continue the prompts of this file: one on each line, or in a .jsonl file "
            "`prompt` or `messages`."
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Take each text as a message, by the chat template.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write prompts and completions to this new .jsonl file.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Continue so many prompts together.")] = 16,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = 0,
    device: DeviceName = "auto",
    precision: PrecisionOption = "bf16",
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    base_model: BaseModel = None,
) -> None:
    """Continue texts, or reply to messages.

    What does not fit on the device is streamed from host memory, layer by layer: all prompts of a
    batch share each pass over the weights.
    """
    from megatrain.cli.generate import Where, all_prompts, print_texts
    from megatrain.generate import Sampling

    asked = all_prompts(prompt or [], prompts, chat=chat)
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed)
    where = Where(device, precision, device_memory, host_memory, base_model)
    print_texts(model, asked, sampling, where, batch_size=batch_size, output=output)


@app.command()
def chat(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(help="Begin with this system message.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = 0,
    device: DeviceName = "auto",
    precision: PrecisionOption = "bf16",
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    base_model: BaseModel = None,
) -> None:
    """Talk with a model, by its own chat template."""
    from megatrain.cli.chat import talk
    from megatrain.cli.generate import Where
    from megatrain.generate import Sampling

    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed)
    where = Where(device, precision, device_memory, host_memory, base_model)
    talk(model, system, sampling, where)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    output: Annotated[
        Path | None, typer.Option(help="Write the page to this file; otherwise into the folder.")
    ] = None,
) -> None:
    """Show a run as one HTML page: curves, throughput, memory, and where a step's time went."""
    from megatrain.report import write_report

    print(write_report(run, output))


@app.command()
def demo(
    overrides: Overrides = None,
) -> None:
    """Train a small model on Python's own library.

    Then sample from it, and show where the memory was. Nothing is downloaded.
    """
    from megatrain.cli.demo import run_demo

    run_demo(overrides or [])
