"""Preference data and prompts in TRL's formats: what is read, what is refused."""

import json

import numpy as np
import pytest
import torch
from tokenizers import processors

from megatrain.data import StepLoader, open_dataset, open_prompts
from megatrain.data.dataset import scored
from megatrain.data.encoders import Document
from megatrain.data.token_store import open_store
from megatrain.errors import InputError
from megatrain.loss import DPO, Contrastive, Reward
from tests.refusals import refused
from tests.unit.data_cases import (
    ROWS,
    chat_tokenizer,
    encode_row,
    make_tokenizer,
    talk,
    write_jsonl,
)

QWEN = chat_tokenizer("qwen")
ASK, GOOD, BAD = "What is 12 + 30?", "It is 42.", "Tell me a short story."
MORE = talk("Thanks!", "You are welcome.", ASK)


def opened(tmp_path, rows, kind="pairs", loss=None, length=64, **options):
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    made = open_dataset(
        path, tokenizer=QWEN, sequence_length=length, cache_dir=tmp_path / "cache", kind=kind,
        **options,
    )  # fmt: skip
    made.loss = loss or DPO()
    made.reference = torch.arange(float(len(made) * made.lines)).view(len(made), -1) + 1
    return made


def lines(data, row=0):
    return [(ids.tolist(), labels.tolist()) for ids, labels in data.pieces(row)]


def encoded(row):
    """Ids and labels that the same text has as a row of its own."""
    ids, targets = encode_row(QWEN, row)
    return ids.tolist(), np.where(targets, ids, -100).tolist()


def reply(text):
    return [{"role": "assistant", "content": text}]


def pair(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": talk(ASK), "chosen": reply(GOOD), "rejected": reply(BAD)},
        {"chosen": talk(ASK, GOOD), "rejected": talk(ASK, BAD)},
        {"prompt": ASK, "chosen": talk(ASK, GOOD), "rejected": talk(ASK, BAD), "score_chosen": 9},
        {"prompt": ASK, "chosen": reply(GOOD), "rejected": reply(BAD)},
    ],
    ids=["apart", "in both", "in both and apart", "a text"],
)
def test_a_pair_is_two_conversations(tmp_path, row):
    data = opened(tmp_path, [row])
    assert lines(data) == [encoded({"messages": talk(ASK, text)}) for text in (GOOD, BAD)]


def test_only_the_reply_is_compared(tmp_path):
    """Earlier replies are part of the prompt."""
    rows = [{"chosen": MORE + reply(GOOD), "rejected": MORE + reply(BAD)}]
    data = opened(tmp_path, rows, length=96)
    for (ids, labels), text in zip(lines(data), (GOOD, BAD), strict=True):
        learnt = [i for i, label in zip(ids, labels, strict=True) if label != -100]
        assert QWEN.decode(learnt) == f"{text}<|im_end|>"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "The sea", "chosen": " was calm", "rejected": " is 42"},
        {"chosen": "The sea was calm", "rejected": "The sea is 42"},
    ],
)
def test_a_pair_of_texts_is_two_completions(tmp_path, row):
    prompt, good, bad = "The sea", " was calm", " is 42"
    data = lines(opened(tmp_path, [row]))
    path = write_jsonl(
        tmp_path / "x.jsonl", [{"prompt": prompt, "completion": t} for t in (good, bad)]
    )
    plain = open_dataset(path, tokenizer=QWEN, sequence_length=64, cache_dir=tmp_path / "cache")
    whole = [(ids.tolist(), labels.tolist()) for ids, labels in plain.pieces(0)]
    assert sorted(data) == sorted(whole) and data[0] != data[1]
    assert QWEN.decode(data[0][0]).startswith(prompt + good)


def test_rows_have_what_losses_ask(tmp_path):
    rows = [pair(talk(f"What is {i}?"), reply(GOOD), reply(f"No {i} or {i}")) for i in range(3)]
    data = opened(tmp_path, rows)
    micro = data.batch([1, 0])
    labels = micro["labels"]
    assert micro["pair"][:, 0].tolist() == [0, 0, 1, 1]
    assert micro["chosen"][:, -1].tolist() == [1, 0, 1, 0]
    assert micro["reference_logp"].sum(1).tolist() == [3, 4, 1, 2]  # of row 1, then of row 0
    assert ((micro["reference_logp"] != 0) <= (labels != -100)).all()


def test_pairs_stay_whole_in_steps_and_parts(tmp_path):
    rows = [pair(talk(f"What is {i}?"), reply(GOOD), reply(f"No {i}")) for i in range(9)]
    rows[4]["rejected"] = reply("")  # nothing to learn would be half of a pair
    rows[5]["chosen"] = reply("a very long story about the sea " * 20)
    data = opened(tmp_path, rows, overlong="drop")
    assert len(data) == 8
    train, held = data.hold_out(0.3)
    assert (len(train), len(held)) == (6, 2)
    prompts = [
        {QWEN.decode(ids).split("<|im_start|>assistant")[0] for ids, _ in part.pieces(row)}
        for part in (train, held)
        for row in range(len(part))
    ]
    assert all(len(each) == 1 for each in prompts) and len(set.union(*prompts)) == 8
    train.loss = DPO()
    train.reference = torch.zeros(6, 2)
    # Seven of six rows: some come twice, and still are pairs of their own.
    step = next(StepLoader(train, rows_per_step=7, rows_per_micro_batch=3))
    numbers = torch.cat([micro["pair"][:, 0] for micro in step])
    assert numbers.tolist() == [float(n) for n in range(7) for _ in range(2)]


ASKED = ("question", "query", "problem", "user", "instruction", "input")
UNREAD = "field '{0}' is not read beside preferences: .*data.fields.*{{prompt: {0}}}"


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("kind", ["pairs", "margins"])
@pytest.mark.parametrize("made", [lambda text: f"It is {text}", lambda text: [*MORE, *reply(text)]])
def test_a_prompt_of_another_name_is_not_passed_over(tmp_path, name, kind, made):
    row = {"chosen": made("a"), "rejected": made("b"), "margin": 1, "system": "s", name: "Where?"}
    with refused(r"rows.jsonl:1: " + UNREAD.format(name)):
        opened(tmp_path, [row], kind)


@pytest.mark.parametrize("name", ["question", "input"])
def test_a_prompt_of_another_name_may_be_mapped_or_be_there_or_be_passed_over(tmp_path, name):
    same = lines(opened(tmp_path, [pair(ASK, reply(GOOD), reply(BAD))]))
    renamed = {name: ASK, "chosen": reply(GOOD), "rejected": reply(BAD)}
    assert lines(opened(tmp_path, [renamed], fields={"prompt": name})) == same
    both = {name: "Where?", "chosen": talk(ASK, GOOD), "rejected": talk(ASK, BAD)}
    assert lines(opened(tmp_path, [both], fields={name: None})) == same
    said = {"question": f"{ASK}\n", "chosen": talk(ASK, GOOD), "rejected": talk(ASK, BAD)}
    with refused(r"rows.jsonl:1: " + UNREAD.format("question")):
        opened(tmp_path, [said])


@pytest.mark.parametrize("problem", ROWS["incomparable"])
def test_what_cannot_be_compared_is_refused(tmp_path, problem):
    for kind, *rows in ROWS["incomparable"][problem]:
        with refused(rf"rows.jsonl:{len(rows)}: .*{problem}"):
            opened(tmp_path, rows, kind)


def test_a_bad_row_takes_both_replies_along(tmp_path):
    fine = pair(talk(ASK), reply(GOOD), reply(BAD))
    wrong = fine | {"rejected": [{"role": "assistant", "content": BAD, "images": ["a.png"]}]}
    data = opened(tmp_path, [wrong, fine], bad_rows="skip")
    assert lines(data) == [encoded({"messages": talk(ASK, text)}) for text in (GOOD, BAD)]


def test_each_pair_has_its_own_margin(tmp_path):
    row = {"prompt": ASK, "chosen": GOOD, "rejected": BAD}
    rows = [row | {"margin": margin} for margin in (1, 2)]
    data = opened(tmp_path, rows, "margins", Reward(margin=True))
    wanted = [int(data.describe(row)[-1]) for row in (0, 0, 1, 1)]  # the number of its line
    assert data.batch([0, 1])["margin"][:, 0].tolist() == wanted


def test_margins_tell_data_apart_only_where_there_are_any(tmp_path):
    """Runs from before there were margins go on: the digest is that of then."""
    document = Document(np.arange(5, dtype=np.int32), np.ones(5, bool), line=1)
    digests = []
    for margin in (0.0, 0.5):
        documents = [document._replace(margin=margin)]
        store = open_store(tmp_path / str(margin), ["a"], documents.copy, {})
        digests.append(store.digest)
    old, new = digests
    assert old == "5496f4979eca69a9deddaa9ebf9f72f6" != new


# Rows that are prompts: what is read of them, what is refused, which are held out.

PROMPT = talk("What is 12 + 30?")


def prompts(path, **options):
    how = {"fields": {}, "bad_rows": "stop", "drop": False, "longest": 400, "vocab_size": 600}
    return open_prompts(path, tokenizer=QWEN, **how | options)


def test_messages_that_a_table_keeps_as_json_are_messages(tmp_path):
    rows = [{"prompt": PROMPT}, {"prompt": json.dumps(PROMPT)}]
    plain, kept = prompts(write_jsonl(tmp_path / "a.jsonl", rows)).batch([0, 1])
    assert kept[:3] == plain[:3]
    broken = write_jsonl(tmp_path / "b.jsonl", [{"prompt": '[{"role": "user"'}])
    with pytest.raises(InputError, match=r"b\.jsonl:1: 'prompt' is not JSON"):
        prompts(broken)


@pytest.mark.parametrize("prompt", [PROMPT, "12 + 30"], ids=["messages", "text"])
@pytest.mark.parametrize("name", ["system", "system_prompt", "tools", "history", "images"])
def test_what_would_change_the_prompt_is_refused_beside_it(tmp_path, name, prompt):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, name: ["Be brief."]}])
    with pytest.raises(InputError, match=rf"a\.jsonl:1: field '{name}': .*{name}: null"):
        prompts(path)
    assert prompts(path, fields={name: None}).batch([0])[0].beside == {}
    renamed = prompts(path, fields={"hint": name})
    assert renamed.batch([0])[0].beside == {"hint": ["Be brief."]}


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"role": "system", "content": "Be good", "functions": "[]"}, "does not read 'functions'"),
        ({"role": "judge", "content": "Be good"}, "role 'judge' is none of these"),
    ],
)
def test_what_the_template_leaves_out_of_a_prompt_is_refused(tmp_path, turn, said):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": [turn, *PROMPT]}])
    with pytest.raises(InputError, match=rf"a\.jsonl:1.*{said}"):
        prompts(path)


def test_prompts_are_held_out_of_all_sources_by_the_seed(tmp_path):
    paths = [
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {n}"} for n in range(20)])
        for name in ("easy", "hard")
    ]

    def parts(seed):
        train, held = prompts(paths, seed=seed).hold_out(0.25)
        return [[row.prompt for row in part.batch(range(len(part)))] for part in (train, held)]

    train, held = parts(0)
    assert len(held) == 10 and len({*train, *held}) == 40
    assert {prompt.split()[0] for prompt in held} == {"easy", "hard"}
    assert parts(0) == [train, held] and parts(1)[1] != held
    with pytest.raises(InputError, match="leaves no prompt to train on"):
        prompts(write_jsonl(tmp_path / "one.jsonl", [{"prompt": "a"}])).hold_out(0.5)


def test_prompts_are_as_long_as_may_be_and_known_with_their_answers(tmp_path):
    rows = [{"prompt": "It is", "answer": 1}, {"prompt": "It is 42 and it is 42"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    short, long = prompts(path).row_lengths
    assert prompts(path, longest=long).row_lengths == [short, long]
    assert prompts(path, longest=long - 1, drop=True).row_lengths == [short]
    other = write_jsonl(tmp_path / "b.jsonl", [rows[0] | {"answer": 2}, rows[1]])
    assert prompts(other).fingerprint != prompts(path).fingerprint


# Rows with classes.

CLASSED = {
    "tags": {"tokens": ["It", "is", "sunny"], "tags": [1, -100, 0]},
    "classes": {"text": "It is sunny", "label": 1},
    "class_sets": {"text": "It is sunny", "label": [1]},
}


@pytest.mark.parametrize("kind", CLASSED)
def test_classes_are_labels_where_they_are_scored(tmp_path, kind):
    path, text = write_jsonl(tmp_path / "a.jsonl", [CLASSED[kind]]), "It is sunny"
    options = {"sequence_length": 32, "cache_dir": tmp_path / "cache", "labels": ("a", "b")}
    batch = open_dataset(path, tokenizer=QWEN, kind=kind, **options).batch([0])
    encoded, labels = QWEN(text), batch["labels"][0]
    assert batch["input_ids"][0, : len(encoded["input_ids"])].tolist() == encoded["input_ids"]
    places = {len(encoded["input_ids"]) - 1: int(kind == "classes")}
    if kind == "tags":
        places = {encoded.char_to_token(0): 1, encoded.char_to_token(text.index("sunny")): 0}
    assert {at: label for at, label in enumerate(labels.tolist()) if label != -100} == places
    if kind == "class_sets":
        assert batch["truths"][0, 0].tolist() == [0, 1]
    else:  # before padding, whether a mask or a token tells of it
        ids, mask = torch.tensor([[5, 6, 9, 5]]), torch.tensor([[1, 1, 1, 0]])
        assert scored(ids, mask, 9).tolist() == [[-100, 0, -100, -100]]


def test_texts_to_embed_have_their_labels_and_keep_their_end_where_they_are_cut(tmp_path):
    tokenizer = make_tokenizer()
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", end)]
    )
    rows = [{"query": ASK * 9, "positive": f" {GOOD}\n", "negatives": [BAD, ASK]}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    for pooling in ("last", "mean"):
        data = open_dataset(
            path, tokenizer=tokenizer, sequence_length=16, cache_dir=tmp_path, kind="anchors",
            lines=3,
        )  # fmt: skip
        data.loss = Contrastive(pooling=pooling, negatives=1)
        batch = data.batch([0])
        ids, labels, mask = (batch[n] for n in ("input_ids", "labels", "attention_mask"))
        whole = tokenizer([ASK * 9, GOOD, BAD], truncation=True, max_length=16)["input_ids"]
        assert [row[kept == 1].tolist() for row, kept in zip(ids, mask, strict=True)] == whole
        assert batch["text"][:, 0].tolist() == [0, 1, 2] and not batch["pair"].any()
        pooled = ids == end if pooling == "last" else mask == 1
        assert torch.equal(labels == 0, pooled) and torch.equal(labels == -100, ~pooled)
