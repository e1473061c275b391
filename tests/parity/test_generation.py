"""Texts that a streamed model continues: transformers' own, with a cache, token for token."""

import pytest
import torch
from transformers import GenerationMixin, PreTrainedTokenizerFast

from megatrain import AdamW, DoesNotFit, Engine
from megatrain.generate import Kept, Sampling, cache, generate
from megatrain.generate.cache import cache_bytes
from tests.families.tiny import tiny_model
from tests.parity.cases import make_batches

GREEDY = Sampling(max_new_tokens=12, temperature=0)
# Rotary and learnt positions, windows, experts, states and both, latent keys, ALiBi.
FAMILIES = ["llama", "qwen3", "gpt2", "gemma2", "gemma3_text", "mixtral", "mamba", "falcon_h1",
            "deepseek_v3", "bloom"]  # fmt: skip


def inputs(rows: int = 3, tokens: int = 6) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 60, (rows, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_tokens_are_those_of_transformers(family: str) -> None:
    """The rows are longer than the tiny models' windows."""
    model = tiny_model(family).eval()
    told = {"max_new_tokens": 12, "do_sample": False, "use_cache": True, "pad_token_id": 0,
            "eos_token_id": None}  # fmt: skip
    wanted = model.generate(**inputs(), **told)
    with Engine(model, precision="fp32", device="cpu") as engine:
        with engine.whole_model() as whole:
            got = whole.generate(**inputs(), **told, return_dict_in_generate=True)
        assert got.sequences.equal(wanted)
        assert got.past_key_values is not None
        # The engine goes on as if nothing had been.
        fresh = Engine(model, precision="fp32", device="cpu")
        batch = {"input_ids": inputs()["input_ids"]}
        assert engine.logits(batch).equal(fresh.logits(batch))


def test_generating_between_two_steps_changes_no_bit_of_training() -> None:
    model, steps = tiny_model("llama"), make_batches(2)
    losses, texts = [], []
    for samples in (False, True):
        engine = Engine(model, optimizer=AdamW(lr=0.01), precision="fp32", device="cpu")
        results = [engine.step(steps[0])]
        if samples:
            with engine.whole_model() as whole:
                texts.append(whole.generate(**inputs(), max_new_tokens=4, do_sample=True))
        results.append(engine.step(steps[1]))
        losses.append([(each.loss, each.grad_norm) for each in results])
        engine.close()
    assert losses[0] == losses[1]


def words() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {f"w{number}": number for number in range(128)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1")


PROMPTS = ["w5 w6 w7", "w9", "w11 w12 w13 w14"]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_model("llama").eval(), precision="fp32", device="cpu")


def test_prompts_share_batches_and_get_what_each_would_get_alone(engine: Engine) -> None:
    alone = [generate(engine, words(), [prompt], GREEDY)[0] for prompt in PROMPTS]
    assert generate(engine, words(), PROMPTS, GREEDY) == alone
    assert generate(engine, words(), PROMPTS, GREEDY, batch_size=2) == alone
    assert all(len(text.split()) == 12 for text in alone)


@pytest.mark.parametrize("family", ["llama", "mamba", "bloom", "recurrent_gemma"])
def test_padding_changes_no_text(family: str, caplog) -> None:
    """Also of a model whose states run on over it: its prompts share no batch."""
    caplog.set_level("INFO", "megatrain")
    source = Engine(tiny_model(family).eval(), precision="fp32", device="cpu")
    alone = [generate(source, words(), [prompt], GREEDY)[0] for prompt in PROMPTS]
    assert generate(source, words(), PROMPTS, GREEDY) == alone
    assert ("only prompts of one length share" in caplog.text) == (family == "recurrent_gemma")


@pytest.mark.parametrize(
    ("family", "keeps"), [("llama", True), ("gemma2", False), ("mamba", False)]
)
def test_a_talk_goes_on_from_what_was_computed(family, keeps, monkeypatch) -> None:
    """Also where its template writes earlier turns otherwise; the replies are the same."""
    tokenizer, past = words(), []
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'w2 ' + m.content + (' w3 ' if loop.last else ' w4 ') }}"
        "{% endfor %}{% if add_generation_prompt %}w5 {% endif %}"
    )
    generate_plainly = GenerationMixin.generate

    def spy(self, *args, past_key_values=None, **told):
        past.append(0 if past_key_values is None else past_key_values.get_seq_length())
        told |= {} if past_key_values is None else {"past_key_values": past_key_values}
        return generate_plainly(self, *args, **told)

    monkeypatch.setattr(GenerationMixin, "generate", spy)
    source = Engine(tiny_model(family).eval(), precision="fp32", device="cpu")
    replies: list[list[str]] = []
    for kept in (Kept(), None):
        messages: list[dict[str, str]] = []
        for asked in ("w6 w7", "w8", "w9 w10 w11"):
            messages.append({"role": "user", "content": asked})
            [reply] = generate(source, tokenizer, [messages], GREEDY, kept=kept)
            messages.append({"role": "assistant", "content": reply})
        again = generate(source, tokenizer, [messages[:1]], GREEDY, kept=kept)
        replies.append([*again, *(m["content"] for m in messages)])
    assert replies[0] == replies[1]
    taken = [each for each in past if each]
    assert taken == ([3, 21, 3] if keeps else [])  # up to what ended the last turn


def test_a_text_ends_with_an_end_token(engine: Engine) -> None:
    [text] = generate(engine, words(), PROMPTS[:1], GREEDY)
    tokenizer, said = words(), text.split()
    tokenizer.eos_token = next(word for word in said if word != said[0])
    [ended] = generate(engine, tokenizer, PROMPTS[:1], GREEDY)
    assert ended.split() == said[: said.index(tokenizer.eos_token)]


def test_the_seed_decides_the_draws(engine: Engine) -> None:
    drawn = [
        generate(engine, words(), PROMPTS[:1], Sampling(12, temperature=1.0, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_layers_in_portions_generate_without_a_cache() -> None:
    from megatrain import Placement

    model = tiny_model("mixtral").eval()
    whole = Engine(model, precision="fp32", device="cpu")
    split = Engine(
        model, precision="fp32", device="cpu", placement=Placement(slots=2, max_stream_bytes=30000)
    )
    assert whole.is_whole and not split.is_whole
    wanted = generate(whole, words(), PROMPTS, GREEDY)
    assert generate(split, words(), PROMPTS, GREEDY) == wanted


@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba"])
def test_the_cache_takes_what_was_foretold(family: str) -> None:
    model = tiny_model(family).eval()
    rows, tokens = 3, 18
    made = model.generate(
        **inputs(rows), max_new_tokens=13, do_sample=False, eos_token_id=None, pad_token_id=0,
        use_cache=True, return_dict_in_generate=True,
    )  # fmt: skip
    layers = [size for size, _ in cache._layers(made.past_key_values)]
    needed = sum(layers) + max(layers)
    assert needed <= cache_bytes(model, rows, tokens) <= 1.05 * needed  # windows: to a token


def test_a_cache_that_has_no_room_is_refused(engine: Engine, monkeypatch) -> None:
    monkeypatch.setattr(cache, "free_bytes", lambda device: 1000)
    with pytest.raises(DoesNotFit, match="keys and values of 3 prompts of 20 tokens take"):
        generate(engine, words(), PROMPTS, GREEDY)
