"""The formats of rows, recognised by their fields, and the examples made of rows.

A format lists its fields, each with the names that data give it, and a function that makes the
example. The formats are TRL's, OpenAI's chat, Alpaca and ShareGPT (as LLaMA-Factory reads it).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from megatrain.data.conversation import (
    Conversation,
    Message,
    from_json,
    messages,
    text_or_messages,
    tools,
)
from megatrain.data.images import place_media, sources
from megatrain.data.readers import DataRow
from megatrain.data.refused_fields import empty, listed, refuse_unheeded, says_training
from megatrain.data.sources import DataKind
from megatrain.errors import InputError

_RESERVED = {"add_generation_prompt", "chat_template", "continue_final_message", "conversations",
             "documents", "messages", "return_assistant_tokens_mask", "tools"}  # fmt: skip
_BY_CHANCE = 20  # a reply may begin like a prompt of so many characters by chance
_LARGE = 1e30  # a limit of margins that excludes infinity
# Fields that must be texts in every format that has them.
_TEXTS = ("question", "answer", "instruction", "input", "output", "reasoning", "system", "text")


class Completion(NamedTuple):
    """A prompt and its completion, without a chat template; only the completion is learnt."""

    prompt: str
    completion: str


class Pair(NamedTuple):
    """Replies to a prompt, the better first, and a margin; or an anchor, positive, negatives."""

    replies: Sequence["Conversation | Completion | Labelled"]
    margin: float = 0.0


class Labelled(NamedTuple):
    """A text and its classes, or a class for each of its words."""

    text: str
    labels: Sequence[int]
    words: Sequence[int] | None = None  # the place in the text where each word begins


Example = str | Conversation | Completion | Pair | Labelled


def of_text(row: DataRow, where: str) -> str:
    """The text of a row."""
    return str(row["text"])


def of_classes(row: DataRow, where: str) -> Labelled:
    """A text and its class, or the list of its classes, which may be empty."""
    label = row["label"]
    return Labelled(str(row["text"]), label if isinstance(label, list) else [label])


def of_tags(row: DataRow, where: str) -> Labelled:
    """Words, joined by spaces, and a class of each; -100: none."""
    words, tags = row["tokens"], row["tags"]
    match = isinstance(words, list) and isinstance(tags, list) and len(words) == len(tags) > 0
    if not match or not all(isinstance(word, str) and word.strip() for word in words):
        raise InputError(f"{where}: 'tokens' must be words, and 'tags' a class of each")
    starts = accumulate((len(word) + 1 for word in words[:-1]), initial=0)
    return Labelled(" ".join(words), tags, [*starts])


def of_anchor(row: DataRow, where: str) -> Pair:
    """A text, one with a near embedding (its positive), and others with far ones (negatives)."""
    texts = [row["anchor"], row["positive"]]
    for value in (row.get(name) for name in _NEGATIVES):
        if isinstance(value, list):
            texts += value
        elif not empty(value):
            texts.append(value)
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise InputError(f"{where}: anchor, positive and negatives must be texts, and not empty")
    return Pair([Labelled(text.strip(), [0]) for text in texts])


def of_messages(row: DataRow, where: str) -> Conversation:
    """A conversation; its replies are learnt."""
    turns, learnt = messages(row["messages"], "messages", where, images=True)
    unchecked = from_json(row["messages"], "messages", where)
    is_sharegpt = isinstance(unchecked, Sequence) and "from" in unchecked[0]
    return _conversation(turns, learnt, row, where, wrap=is_sharegpt)


def of_completion(row: DataRow, where: str) -> Conversation | Completion:
    """A prompt and its completion; only the completion is learnt."""
    prompt, completion = (text_or_messages(row[n], n, where) for n in ("prompt", "completion"))
    if _repeats(prompt, completion, where):
        raise InputError(
            f"{where}: 'completion' repeats the prompt, which would be there twice: leave the text "
            "of 'prompt' out of 'completion'"
        )
    return _completed(row, prompt, completion, where)


def of_pair(row: DataRow, where: str) -> Pair:
    """A pair: a better reply to a prompt, and a worse one; its margin, if the row has one."""
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
                "leave the text of 'prompt' out of both"
            )
    elif empty(prompt) or (isinstance(prompt, str) and kind is list):
        prompt, replies = _split_prompt(replies, prompt, where)
    else:
        raise InputError(
            f"{where}: 'prompt' is neither a string nor what 'chosen' and 'rejected' are: write "
            "all three as strings, or as lists of messages"
        )
    margin = row.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) < _LARGE:
        raise InputError(f"{where}: 'margin' must be a number, not {margin!r:.40}")
    return Pair([_completed(row, prompt, reply, where) for reply in replies], float(margin))


def _is_in(question: str, messages: Any) -> bool:
    """True if a question is in this text or these messages."""
    contents = [messages] if isinstance(messages, str) else map(_content, messages)
    return " ".join(question.split()) in " ".join(" ".join(contents).split())


def _content(message: Any) -> str:
    """The text of a message that is not checked yet."""
    content = message.get("content", message.get("value")) if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _split_prompt(replies: list[Any], prompt: Any, where: str) -> tuple[Any, list[Any]]:
    """The prompt with which both replies begin, as in TRL, and the rest of each reply."""
    differences = (n for n, (a, b) in enumerate(zip(*replies, strict=False)) if a != b)
    shared = replies[0][: next(differences, min(map(len, replies)))]
    if isinstance(shared, str):
        shared = shared.removesuffix(" ")  # the space begins the rest of each reply
    endings = [reply[len(shared) :] for reply in replies]
    if isinstance(shared, list) and (not all(endings) or not (shared or prompt)):
        raise InputError(
            f"{where}: 'chosen' and 'rejected' must begin with the same messages, and "
            "each must then have a reply"
        )
    if isinstance(prompt, str) and shared and prompt.strip() and not _is_in(prompt, shared):
        raise InputError(
            f"{where}: 'prompt' is not among the messages that begin 'chosen' and 'rejected': make "
            "it one of them, or ignore it with data.fields: {prompt: null}"
        )
    question = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else shared
    return shared or question, endings


def _repeats(prompt: Any, reply: Any, where: str) -> bool:
    """True if a reply begins with all of its prompt, and then goes on."""
    if isinstance(prompt, str) and isinstance(reply, str):
        goes_on = reply.startswith(prompt) and reply[len(prompt) :].strip()
        return len(prompt) > _BY_CHANCE and bool(goes_on)
    if not (isinstance(prompt, list) and isinstance(reply, list) and prompt and reply):
        return False
    prompt_turns, reply_turns = (
        messages(part, "messages", where, images=True)[0] for part in (prompt, reply)
    )
    return prompt_turns == reply_turns[: len(prompt_turns)]


def _completed(row: DataRow, prompt: Any, completion: Any, where: str) -> Conversation | Completion:
    """A prompt with its completion, both texts or both messages."""
    texts = [part for part in (prompt, completion) if isinstance(part, str)]
    if len(texts) == 2:
        refuse_unheeded({n: row.get(n) for n in ("system", "tools", *_MEDIA)}, where, text=False)
        return Completion(*texts)
    if texts:
        raise InputError(
            f"{where}: 'prompt' and 'completion' must both be strings, or both lists of messages"
        )
    turns, _ = messages(prompt, "prompt", where, images=True)
    replies, learnt = messages(completion, "completion", where)
    return _conversation(turns + replies, [False] * len(turns) + learnt, row, where)


def of_question(row: DataRow, where: str) -> Conversation:
    """A question, or an instruction with its input, and the answer."""
    questions = (row.get(name) for name in ("question", "instruction", "input"))
    question = "\n".join(filter(None, questions))
    if not question:
        raise InputError(f"{where}: it asks nothing: fill its question in, or leave the row out")
    reply = {"role": "assistant", "content": row.get("answer", row.get("output"))}
    if reasoning := row.get("reasoning"):
        reply["reasoning_content"] = reasoning
    turns: list[Message] = [{"role": "user", "content": question}, reply]
    return _conversation(turns, [False, True], row, where)


def _conversation(
    turns: list[Message], learnt: list[bool], row: DataRow, where: str, *, wrap: bool = False
) -> Conversation:
    """A conversation with the row's system prompt, tools and settings of the template."""
    system = row.get("system")
    if system and turns[0]["role"] in ("system", "developer"):
        if turns[0].get("content") != system:
            raise InputError(f"{where}: 'system' and a system message say two things: keep one")
    elif system:
        turns = [{"role": "system", "content": system}, *turns]
        learnt = [False, *learnt]
    options = row.get("chat_template_kwargs") or {}
    if not isinstance(options, dict) or _RESERVED & set(options):
        reserved = ", ".join(sorted(_RESERVED))
        raise InputError(f"{where}: 'chat_template_kwargs' must be an object without {reserved}")
    media = {kind: sources(row.get(name), kind, where) for name, kind in _MEDIA.items()}
    images = place_media(turns, media, where)
    return Conversation(turns, learnt, tools(row.get("tools"), where, wrap=wrap), options, images)


Fields = Mapping[str, str | None]
# Optional fields: our name -> the names that data give it.
_SYSTEM = {"system": ("system", "system_prompt")}
_PROMPTED = {**_SYSTEM, **{name: (name,) for name in ("tools", "chat_template_kwargs")}}
_MEDIA = {"images": "image", "videos": "video", "audios": "audio"}
_OF_MEDIA = {name: (name, kind) for name, kind in _MEDIA.items()}
_REASONING = {"reasoning": ("reasoning", "reasoning_content", "thinking")}


@dataclass(frozen=True)
class Format:
    """A format of rows: its fields by our name, each with the names that data give it."""

    title: str
    kind: DataKind
    required: Mapping[str, tuple[str, ...]]
    optional: Mapping[str, tuple[str, ...]]
    # makes the example of a row's fields by our names, and `file:line`
    read: Callable[[DataRow, str], Example]

    def names(self, row: DataRow, fields: Fields, where: str) -> dict[str, str] | None:
        """Our name -> the row's name of each field; None: a needed field is missing."""
        names: dict[str, str] = {}
        for name, aliases in {**self.required, **self.optional}.items():
            mapped = fields.get(name)
            columns = (mapped,) if mapped else tuple(a for a in aliases if a not in fields)
            present = [a for a in columns if a in row]
            filled = [a for a in present if not empty(row[a])] or present[:1]
            if len(filled) > 1:
                first, second = filled[:2]
                raise InputError(
                    f"{where}: {first!r} and {second!r} could both be the {name}: say which with "
                    f"data.fields: {{{name}: {first}}}"
                )
            if filled:
                names[name] = filled[0]
            elif name in self.required:
                return None
        return names


# Names of the fields of questions and answers.
_QUESTIONS = ("question", "prompt", "query", "problem", "input", "user")
_ANSWERS = ("answer", "response", "solution", "output", "assistant")
_CHATS = {"messages": ("messages", "conversations", "conversation")}
TEXT = Format("text", "text", {"text": ("text",)}, {}, of_text)
FORMATS = (
    Format("conversations", "chat", _CHATS, _PROMPTED | _OF_MEDIA, of_messages),
    Format(
        "prompts and completions", "chat",
        {"prompt": ("prompt",), "completion": ("completion",)},
        _PROMPTED | _OF_MEDIA, of_completion,
    ),
    Format(
        "instructions", "chat",
        {"instruction": ("instruction",), "output": ("output", "response")},
        {"input": ("input", "context"), **_SYSTEM, **_REASONING, **_OF_MEDIA}, of_question,
    ),
    Format(
        "questions and answers", "chat",
        {"question": _QUESTIONS, "answer": _ANSWERS},
        {**_SYSTEM, **_REASONING, **_OF_MEDIA}, of_question,
    ),
    TEXT,
    Format("text of the field content", "text", {"text": ("content",)}, {}, of_text),
)  # fmt: skip
PAIRS = Format(
    "preferences", "pairs", {"chosen": ("chosen",), "rejected": ("rejected",)},
    {"prompt": ("prompt",), **_PROMPTED, **_OF_MEDIA}, of_pair,
)  # fmt: skip
MARGINS = replace(PAIRS, required={**PAIRS.required, "margin": ("margin",)})
_OF_TEXT = {"text": ("text", "sentence", "content"), "label": ("label", "labels")}
_CLASSES = Format("texts with classes", "classes", _OF_TEXT, {}, of_classes)
_TAGS = Format(
    "words with classes", "tags",
    {"tokens": ("tokens", "words"), "tags": ("tags", "ner_tags", "pos_tags", "labels")},
    {}, of_tags,
)  # fmt: skip
_NEGATIVES = ("negative", "negatives", *(f"negative_{number}" for number in range(1, 17)))
_ANCHORS = Format(
    "texts to embed", "anchors", {"anchor": ("anchor", "query"), "positive": ("positive",)},
    {name: (name,) for name in _NEGATIVES}, of_anchor,
)  # fmt: skip
_OF_KIND = {"pairs": (PAIRS,), "margins": (MARGINS,), "anchors": (_ANCHORS,),
            "classes": (_CLASSES,), "class_sets": (_CLASSES,), "tags": (_TAGS,)}  # fmt: skip
_EVERY = (*FORMATS, MARGINS)
_ALL = (*_EVERY, _CLASSES, _TAGS, _ANCHORS)
KNOWN = sorted({name for form in _ALL for name in (*form.required, *form.optional)})
_NO_CLASS = -100, "tags"  # the label of a word without a class, and the only kind that has it
# Fields that replies depend on: if they were not read, another conversation would be learnt.
_PROMPTS = ("instruction", *_QUESTIONS, *_CHATS["messages"])  # names of prompts beside replies
_CONTEXT_FIELDS = ("instruction", "input", "context", "history", "choices", "options")


@dataclass(frozen=True)
class Reading:
    """Reads rows: finds their format, and makes their examples."""

    kind: DataKind
    # our name -> the data's name; None: a field of the data that is ignored on purpose
    fields: Fields
    labels: Sequence[str] = ()  # names of the classes
    # texts of a row: 2 of a pair; of texts to embed the anchor, its positive and negatives
    lines: int = 2

    def __post_init__(self) -> None:
        """Raises InputError: an unknown name of ours."""
        for name, theirs in self.fields.items():
            if theirs is not None and name not in KNOWN:
                kinds = ", ".join(KNOWN)
                raise InputError(f"data.fields: {name!r:.40} is not a field; fields are {kinds}")

    def wanted(self, column: str) -> bool:
        """True if the values of a table's column are needed."""
        mapped = column in self.fields.values()
        names = _names_of((*_EVERY, *_OF_KIND.get(self.kind, ())))
        is_known = column in (*names, *_CONTEXT_FIELDS, "role") or says_training(column)
        return mapped or (column not in self.fields and is_known)

    def find(self, row: DataRow, where: str) -> Format:
        """The format of a row. Raises InputError: none fits, or only one that cannot be trained."""
        mapped = {name for name, theirs in self.fields.items() if theirs is not None}
        forms = _OF_KIND.get(self.kind) or [f for f in FORMATS if self.kind in ("auto", f.kind)]
        for form in forms:
            if mapped <= {*form.required, *form.optional} and form.names(row, self.fields, where):
                if form.kind == "text" and "role" in row and "role" not in self.fields:
                    raise InputError(
                        f"{where}: one message is no row: put all messages of a conversation into "
                        "'messages' of one row (role: null in data.fields passes it over)"
                    )
                return form
        extra = {n: v for n, v in row.items() if n not in self.fields and n not in _names_of(forms)}
        refuse_unheeded(extra, where, text=self.kind == "text")
        if "prompt" in row and self.kind in ("auto", "chat"):
            raise InputError(
                f"{where}: a prompt alone has no reply to learn: give a 'completion' (or train on "
                "the prompts as text with data.fields: {text: prompt})"
            )
        needs = [", ".join(self.fields.get(n) or n for n in form.required) for form in forms]
        needed = "; ".join(dict.fromkeys(needs))
        names = [n for n in row if self.fields.get(n, n) is not None]
        raise InputError(
            f"{where}: its fields are {listed(names)}, and no format has these (a row needs one "
            f"of: {needed}): rename them by data.fields, as {{question: title, answer: body}} "
            "(rows in a field: jq -c '.FIELD[]' FILE > rows.jsonl)"
        )

    def example(self, form: Format, row: DataRow, where: str) -> tuple[Example, list[str]]:
        """The example of a row of this format, and the names of unread fields.

        Raises InputError: the row is malformed, of another format, or asks for other training.
        """
        names = form.names(row, self.fields, where)  # our name -> the row's
        if names is None:
            raise InputError(
                f"{where}: not of the first row's format ({form.title}): its fields are "
                f"{listed(row)}: keep formats in files of their own"
            )
        others = {n: v for n, v in row.items() if n not in (*names.values(), *self.fields)}
        has_reply_fields = form.kind in ("chat", "pairs") and form.required is not _CHATS
        prompts = _PROMPTS if form.kind == "pairs" and "prompt" not in names else ()
        for name in (*prompts, *(_CONTEXT_FIELDS if has_reply_fields else ())):
            if not empty(others.get(name)):
                raise InputError(
                    f"{where}: field {name!r} is not read beside {form.title}: say with "
                    f"data.fields what it is, as {{prompt: {name}}} ({name}: null passes it over)"
                )
        refuse_unheeded(others, where, text=form.kind == "text")
        values = {name: row[theirs] for name, theirs in names.items()}
        for name in (n for n in _TEXTS if not isinstance(values.get(n, ""), str)):
            is_needed = name in form.required and name != "instruction"  # `input` may ask instead
            if is_needed or values[name] is not None:
                kind = "null" if values[name] is None else type(values[name]).__name__
                raise InputError(
                    f"{where}: field {names[name]!r} must be a string, not {kind}: fill it in, or "
                    "write it as one (messages as 'messages', a table by columns row by row)"
                )
        example = form.read(values, where)
        if isinstance(example, Pair):
            example = self._cut_to_lines(example, where)
        elif isinstance(example, Labelled):
            example = example._replace(labels=self._numbers(example.labels, where))
        return example, [n for n, v in others.items() if not empty(v)]

    def _cut_to_lines(self, example: Pair, where: str) -> Pair:
        """Keep the first `lines` texts of an example. Raises InputError: their number is wrong."""
        num_negatives = len(example.replies) - 2
        if num_negatives < self.lines - 2 or (num_negatives and self.lines == 2):
            raise InputError(
                f"{where}: it has {num_negatives} negatives, and loss.negatives is "
                f"{self.lines - 2}: set it to the number that every row has"
            )
        return example._replace(replies=example.replies[: self.lines])

    def _numbers(self, labels: Sequence[Any], where: str) -> list[int]:
        """The numbers of classes of a text, or of each of its words; data may give their names."""
        two_classes = self.kind == "class_sets" and len(self.labels) == 2
        if two_classes and {*map(repr, labels)} == {"0", "1"}:  # or it is no and yes
            raise InputError(
                f"{where}: 'label' may say which of both classes the text has, or name both; "
                f"write their names, {' and '.join(self.labels)}"
            )
        numbers = [self._number(label, where) for label in labels]
        expected = 1 if self.kind == "classes" else len({*numbers})
        if self.kind != "tags" and len(numbers) != expected:
            raise InputError(
                f"{where}: 'label' must be one class, or a list of different ones with "
                "loss.problem_type: multi_label_classification"
            )
        return numbers

    def _number(self, label: Any, where: str) -> int:
        """The number of a class, which data may give by name or by number."""
        if label in self.labels:
            return self.labels.index(label)
        is_number = type(label) is int and 0 <= label < len(self.labels)
        if is_number and (self.labels[label] == str(label) or str(label) not in self.labels):
            return label  # no class has the number as its name
        if type(label) is int and (label, self.kind) == _NO_CLASS:
            return label
        names = ", ".join(self.labels[:8])
        raise InputError(
            f"{where}: {label!r:.40} is no class: they are {names} (loss.labels), or their numbers "
            "from 0 on if no class has such a name"
        )


def _names_of(forms: Iterable[Format]) -> set[str]:
    """All names that data may give fields of these formats."""
    fields = [n for form in forms for n in (*form.required.values(), *form.optional.values())]
    return {name for names in fields for name in names}
