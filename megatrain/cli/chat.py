"""`megatrain chat`: a talk with a model in the terminal."""

from contextlib import suppress

from transformers import TextStreamer

from megatrain.cli.generate import Where, open_with_tokenizer
from megatrain.errors import InputError
from megatrain.generate import Kept, Sampling, generate

_HELP = "an empty line ends the talk, /reset begins a new one"


def talk(model: str, system: str | None, sampling: Sampling, where: Where) -> None:
    """Read lines and print replies until an empty line or the end of the input.

    Raises:
        InputError: the model or its chat template cannot be used.
    """
    source, tokenizer = open_with_tokenizer(model, where)
    beginning = [] if system is None else [{"role": "system", "content": system}]
    messages, kept = list(beginning), Kept()
    try:
        if not tokenizer.chat_template:
            raise InputError(
                f"{model}: has no chat template; take an instruct model, or `megatrain generate`"
            )
        print(_HELP)
        while line := _asked():
            if line == "/reset":
                messages = list(beginning)
                continue
            messages.append({"role": "user", "content": line})
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            [reply] = generate(
                source, tokenizer, [messages], sampling, streamer=streamer, kept=kept
            )
            messages.append({"role": "assistant", "content": reply})
    finally:
        source.close()


def _asked() -> str:
    with suppress(EOFError):
        return input("> ").strip()
    return ""
