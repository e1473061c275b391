"""What a model is asked with, and where it stops, by the rules that its training data followed."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatrain.data.chat import refuse_unplaced
from megatrain.data.conversation import Conversation, messages
from megatrain.data.replies import Replies
from megatrain.data.template import Template
from megatrain.data.text import absent, surroundings
from megatrain.data.tokenizer import check_encodable, token_ids, tokenising
from megatrain.errors import InputError

Prompt = str | Sequence[Mapping[str, Any]]  # a text to continue, or messages to reply to

_ASKED, _ANSWERED = "some words", "an answer"
_TALK = Conversation(
    [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ANSWERED}],
    [False, True],
)
_LONGER = Conversation([*_TALK.messages, _TALK.messages[0]], [*_TALK.learnt, False])


def prompt_ids(tokenizer: Any, prompt: Prompt, vocab_size: int | None, where: str) -> list[int]:
    """A text as the beginning of a document, or messages up to where a reply begins.

    Raises:
        InputError: nothing to go on from, or the tokenizer or its template refuses it.
    """
    if isinstance(prompt, str):
        text, (lead, _) = prompt, surroundings(tokenizer)
    else:
        talk = Conversation(*messages(prompt, "messages", where))
        if talk.messages[-1]["role"] == "assistant":
            raise InputError(f"{where}: ends with a reply; end it with what is to be replied to")
        template = Template(tokenizer)
        refuse_unplaced(talk, template, where)
        text, _ = template.render(talk, where, add_generation_prompt=True)
        lead = []
    check_encodable(text, where)
    with tokenising(where):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise InputError(f"{where}: holds no token; give some text")
    return token_ids([*absent(lead, ids[: len(lead)]), *ids], vocab_size, where).tolist()


def end_of_turn(tokenizer: Any) -> int | None:
    """The token that the chat template ends a reply with, be it only where another turn follows.

    None: there is no template, or it ends replies otherwise.
    """
    ends = (_end_of_reply(tokenizer, talk) for talk in (_TALK, _LONGER))
    return next((end for end in ends if end is not None), None)


def ends_last(tokenizer: Any) -> bool:
    """Whether the chat template ends a reply that no other turn follows."""
    return _end_of_reply(tokenizer, _TALK) is not None


def _end_of_reply(tokenizer: Any, talk: Conversation) -> int | None:
    if not tokenizer.chat_template or not tokenizer.is_fast:
        return None
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    try:
        replies = Replies(Template(tokenizer), list(added), talk, "the chat template")
        begin, end = replies.span(1)
    except InputError:  # it takes other conversations only
        return None
    _, _, closing = replies.text[begin:end].rpartition(_ANSWERED)
    places = {closing.rfind(token): token for token in added if token and token in closing}
    return added[places[max(places)]] if places else None


def unmet_opening(tokenizer: Any) -> str:
    """What the chat template asks for a reply with, where it writes plain replies after another.

    Such as `<think>`, which it leaves out before replies without reasoning.
    """
    template, where = Template(tokenizer), "the chat template"
    try:
        whole, _ = template.render(_TALK, where, add_generation_prompt=False)
        asked, _ = template.render(_TALK.upto(1), where, add_generation_prompt=True)
    except InputError:  # it takes other conversations only
        return ""
    return "" if whole.startswith(asked) else asked.rpartition(_ASKED)[2]
