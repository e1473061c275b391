"""Reads rows of each format: makes an example from their fields, by our names."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatrain.data.conversation import (
    Conversation,
    Message,
    from_json,
    messages,
    text_or_messages,
    tools,
)
from megatrain.data.refused_fields import empty, number, objects, refuse_unheeded
from megatrain.data.tables import DataRow
from megatrain.errors import InputError

_RESERVED = {"add_generation_prompt", "chat_template", "continue_final_message", "conversations",
             "documents", "messages", "return_assistant_tokens_mask", "tools"}  # fmt: skip
# Characters that a text may have in common with its prompt by chance.
BY_CHANCE = 20
# Fields that are texts in every format that has them.
_TEXTS = ("question", "answer", "instruction", "input", "output", "reasoning", "system", "text")


class Completion(NamedTuple):
    """A prompt and its completion, without a chat template; only the completion is learnt."""

    prompt: str
    completion: str


class Rated(NamedTuple):
    """Replies to one prompt, each with the prompt; which of them are good, and the margin."""

    replies: Sequence[Conversation | Completion]
    good: Sequence[bool]
    margin: float = 0.0


Example = str | Conversation | Completion | Rated


def check_text(value: object, ours: str, theirs: str, where: str, *, needed: bool) -> None:
    """Raises InputError: a field that must be a text is something else.

    Args: `ours`, `theirs`: its name here, and in the data. `needed`: null is an error.
    """
    if ours not in _TEXTS or isinstance(value, str) or (value is None and not needed):
        return
    kind, remedy = type(value).__name__, "write it as one"
    if value is None:
        kind, remedy = "null", "fill it in, or leave the row out"
    elif isinstance(value, list) and objects(value):
        remedy = "write it as one, or the row as 'messages'"
    elif isinstance(value, (list, dict)):
        remedy = "write it as one (a table by columns is to be saved row by row)"
    raise InputError(f"{where}: field {theirs!r} must be a string, not {kind}: {remedy}")


def of_text(row: DataRow, where: str) -> str:
    """A text as a document."""
    return str(row["text"])


def of_messages(row: DataRow, where: str) -> Conversation:
    """A conversation; its replies are learnt."""
    turns, learnt = messages(row["messages"], "messages", where)
    first = from_json(row["messages"], "messages", where)
    shared = isinstance(first, Sequence) and "from" in first[0]
    return _conversation(turns, learnt, row, where, wrap=shared)


def of_completion(row: DataRow, where: str) -> Conversation | Completion:
    """A prompt and its completion; only the completion is learnt."""
    prompt, completion = (text_or_messages(row[n], n, where) for n in ("prompt", "completion"))
    if _repeats(prompt, completion, where):
        raise InputError(
            f"{where}: 'completion' repeats the prompt, which would be there twice: leave what "
            "'prompt' has out of it"
        )
    return _completed(row, prompt, completion, where)


def of_rated(row: DataRow, where: str) -> Rated:
    """A reply, and its rating as good or bad."""
    if not isinstance(row["label"], bool):
        raise InputError(f"{where}: 'label' must be true of a good reply, false of a bad one")
    return Rated([of_completion(row, where)], [row["label"]])


def of_pair_with_margin(row: DataRow, where: str) -> Rated:
    """A pair of replies, and the margin of the better one."""
    return of_pair(row, where)._replace(margin=number(row["margin"], "margin", where))


def of_pair(row: DataRow, where: str) -> Rated:
    """A pair: a better reply to a prompt, and a worse one."""
    names = ("chosen", "rejected")
    replies: list[Any] = [text_or_messages(row[name], name, where) for name in names]
    prompt = text_or_messages(row.get("prompt"), "prompt", where)
    kind = type(replies[0])
    if kind not in (str, list) or type(replies[1]) is not kind:
        raise InputError(f"{where}: 'chosen' and 'rejected' must both be strings, or both messages")
    if replies[0] == replies[1]:
        raise InputError(f"{where}: 'chosen' and 'rejected' say the same: leave the row out")
    if type(prompt) is kind:
        repeated = [_repeats(prompt, reply, where) for reply in replies]
        if all(repeated) or (kind is list and any(repeated)):
            raise InputError(
                f"{where}: 'chosen' and 'rejected' repeat the prompt, which would be there twice: "
                "leave what 'prompt' has out of them"
            )
    elif not empty(prompt) and (kind is str or not isinstance(prompt, str)):
        raise InputError(
            f"{where}: 'prompt' is neither a string nor what 'chosen' and 'rejected' are: write "
            "all three as strings, or as lists of messages"
        )
    else:
        prompt, replies = _taken_apart(replies, prompt, where)
    completed = [_completed(row, prompt, reply, where) for reply in replies]
    return Rated(completed, [True, False])


def opening(replies: Sequence[Any]) -> Any:
    """The longest common beginning of two texts, or of two lists of messages."""
    differ = (at for at, (one, other) in enumerate(zip(*replies, strict=False)) if one != other)
    return replies[0][: next(differ, min(map(len, replies)))]


def is_said(question: str, messages: Any) -> bool:
    """True if a question is in this text or these messages, or contains all of them."""
    contents = (
        [messages] if isinstance(messages, str) else [_content(message) for message in messages]
    )
    needle, *texts = (" ".join(text.split()) for text in (question, *contents))
    all_in_it = isinstance(messages, list) and any(texts) and all(text in needle for text in texts)
    return all_in_it or any(needle in text for text in texts)


def _content(message: Any) -> str:
    content = message.get("content", message.get("value")) if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _taken_apart(replies: list[Any], prompt: Any, where: str) -> tuple[Any, list[Any]]:
    """The prompt with which all replies begin, as in TRL, and the rest of each reply.

    A separate prompt becomes the user's message if the messages have none.
    """
    shared = opening(replies)
    if isinstance(shared, str):
        shared = shared.removesuffix(" ")
    rest = [reply[len(shared) :] for reply in replies]
    if isinstance(shared, list) and not (all(rest) and (shared or prompt)):
        raise InputError(
            f"{where}: 'chosen' and 'rejected' must begin with the same messages, and then "
            "each have a reply of its own"
        )
    if isinstance(prompt, str) and shared and prompt.strip() and not is_said(prompt, shared):
        raise InputError(
            f"{where}: 'prompt' is not what 'chosen' and 'rejected' begin with, which is taken as "
            "the prompt: make it one of these messages (data.fields: {prompt: null} passes it over)"
        )
    question = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else shared
    return shared or question, rest


def _repeats(prompt: Any, reply: Any, where: str) -> bool:
    """True if a reply begins with all of its prompt, and then goes on."""
    if isinstance(prompt, str) and isinstance(reply, str):
        goes_on = reply.startswith(prompt) and reply[len(prompt) :].strip()
        return len(prompt) > BY_CHANCE and bool(goes_on)
    if not (isinstance(prompt, list) and isinstance(reply, list) and prompt and reply):
        return False
    before, replied = (messages(part, "messages", where)[0] for part in (prompt, reply))
    return before == replied[: len(before)]


def _completed(row: DataRow, prompt: Any, completion: Any, where: str) -> Conversation | Completion:
    texts = [part for part in (prompt, completion) if isinstance(part, str)]
    if len(texts) == 2:
        refuse_unheeded({n: row.get(n) for n in ("system", "tools")}, where, text=False)
        return Completion(*texts)
    if texts:
        raise InputError(
            f"{where}: 'prompt' and 'completion' must both be strings, or both lists of messages"
        )
    asked, _ = messages(prompt, "prompt", where)
    replied, learnt = messages(completion, "completion", where)
    return _conversation(asked + replied, [False] * len(asked) + learnt, row, where)


def of_instruction(row: DataRow, where: str) -> Conversation:
    """An instruction with its input, and the output."""
    texts = (row.get(name) or "" for name in ("instruction", "input"))
    return _turns(row, "\n".join(filter(None, texts)), row["output"], where)


def of_question(row: DataRow, where: str) -> Conversation:
    """A question and its answer."""
    return _turns(row, row["question"], row["answer"], where)


def _turns(row: DataRow, question: str, answer: str, where: str) -> Conversation:
    turns = [*_history(row, where), question, answer]
    if not question:
        raise InputError(f"{where}: it asks nothing: fill its question in, or leave the row out")
    roles = ("user", "assistant")
    spoken: list[Message] = [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]
    if reasoning := row.get("reasoning"):
        spoken[-1]["reasoning_content"] = reasoning
    return _conversation(spoken, [m["role"] == "assistant" for m in spoken], row, where)


def _history(row: DataRow, where: str) -> list[str]:
    history = from_json(row.get("history"), "history", where)
    if empty(history):
        return []
    texts: list[str] = []
    for pair in history if isinstance(history, list) else [None]:
        if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
            raise InputError(f"{where}: 'history' must be a list of pairs of question and answer")
        texts += pair
    return texts


def _conversation(
    turns: list[Message], learnt: list[bool], row: DataRow, where: str, *, wrap: bool = False
) -> Conversation:
    """A conversation with the row's system prompt, tools and settings of the template."""
    system = row.get("system")
    if system and turns[0]["role"] in ("system", "developer"):
        if turns[0].get("content") != system:
            raise InputError(f"{where}: 'system' and a system message say two things: keep one")
    elif system:
        turns, learnt = [{"role": "system", "content": system}, *turns], [False, *learnt]
    options = row.get("chat_template_kwargs") or {}
    if not isinstance(options, dict) or _RESERVED & set(options):
        kept = ", ".join(sorted(_RESERVED))
        raise InputError(f"{where}: 'chat_template_kwargs' must be an object without {kept}")
    return Conversation(turns, learnt, tools(row.get("tools"), where, wrap=wrap), options)
