"""Losses that are given, by heads in chunks of tokens, against plain torch."""

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

from megatrain import Engine, InputError, Placement
from megatrain import loss as loss_package
from megatrain.loss import (
    Contrastive,
    CrossEntropy,
    Distillation,
    Embedding,
    JointLoss,
    LabelSmoothing,
    Loss,
    MultiLabel,
    PairLoss,
    Score,
    Sloped,
    TokenScore,
    TokenWeights,
    TopTokens,
    log_probs_of,
)
from tests.families.tiny import tiny_model
from tests.parity.cases import (
    assert_step,
    gradients,
    llama,
    make_batches,
    make_engine,
    masters,
    relative_error,
    same,
    slopes,
)
from tests.parity.test_policy import LOSSES as POLICIES
from tests.parity.test_rewards import LOSSES as REWARDS
from tests.parity.test_trl import DPOS
from tests.race.schedule import Together
from tests.refusals import refused, table
from tests.sweeps import swept

WIDE = 1000  # tokens of the vocabulary
PLACEMENTS = {"chunks": Placement(head_tokens=5), "a chunk": Placement()}


@dataclass(frozen=True)
class Curved(Loss):
    """Slopes that depend on several numbers of a token; divided by rows that have labels."""

    inputs: ClassVar[tuple[str, ...]] = ("advantages", "old")

    def tokens(self, logits, targets, *given):
        ratio = (log_probs_of(logits, targets) - given[1]).exp()
        lse = logits.logsumexp(1)
        return -given[0] * ratio + 0.1 * lse.square() + 0.2 * logits.mean(1) * lse

    def normaliser(self, targets, given):
        return sum(int((each != -100).any(1).sum()) for each in targets)


def micro_batches():
    [step] = make_batches(1)
    generator = torch.Generator().manual_seed(5)
    for micro in step:
        shape = micro["input_ids"].shape
        micro["token_weights"] = torch.rand(shape, generator=generator)
        micro["advantages"] = torch.randn(shape, generator=generator)
        micro["old"] = -7 + torch.randn(shape, generator=generator)
        logits = torch.randn((*shape, WIDE), generator=generator)
        micro["teacher_log_probs"], micro["teacher_ids"] = logits.log_softmax(-1).topk(3)
    return step


def plain(loss, logits, micro):
    """The sum of a loss over a micro-batch, of all its logits at once."""
    flat, targets = logits[:, :-1].flatten(0, 1), micro["labels"][:, 1:].flatten()
    if loss == "smoothed":
        return F.cross_entropy(flat, targets, label_smoothing=0.1, reduction="sum")
    each = F.cross_entropy(flat, targets, reduction="none")
    if isinstance(given := LOSSES[loss][0], Distillation):
        teacher, ids = (micro[f"teacher_{n}"][:, 1:].flatten(0, 1) for n in ("log_probs", "ids"))
        p, q = teacher.double().exp(), (flat.double() / given.temperature).softmax(1).gather(1, ids)
        divergence = diverging(given, p, q).float()
        share = given.cross_entropy
        return ((1 - share) * divergence + share * each)[targets != -100].sum()
    if loss == "weights":
        return (each * micro["token_weights"][:, 1:].flatten()).sum()
    ratio = (-each - micro["old"][:, 1:].flatten()).exp()
    lse = flat.logsumexp(1)
    curved = 0.1 * lse**2 + 0.2 * flat.mean(1) * lse
    each = -micro["advantages"][:, 1:].flatten() * ratio + curved
    return each[targets != -100].sum()


def diverging(loss, p, q):
    """The divergence of each label `[N]`, of probabilities `[N, K]`."""
    if loss.add_tail:
        p, q = (torch.cat([each, 1 - each.sum(1, keepdim=True)], 1) for each in (p, q))
    if loss.beta in (0, 1):
        one, other = (p, q) if loss.beta == 0 else (q, p)
        return (one * (one / other).log()).sum(1)
    mean = loss.beta * p + (1 - loss.beta) * q
    parts = (loss.beta * p * (p / mean).log(), (1 - loss.beta) * q * (q / mean).log())
    return (parts[0] + parts[1]).sum(1)


def labelled(step):
    return sum(int((micro["labels"][:, 1:] != -100).sum()) for micro in step)


def rows(step):
    return sum(int((micro["labels"][:, 1:] != -100).any(1).sum()) for micro in step)


def weights(step):
    parts = [m["token_weights"][:, 1:][m["labels"][:, 1:] != -100].sum() for m in step]
    return float(sum(parts))


LOSSES: dict[str, tuple[Loss, Any]] = {
    "smoothed": (LabelSmoothing(0.1), labelled),
    "weights": (TokenWeights(), weights),
    "curved": (Curved(), rows),
    "distilled": (Distillation(cross_entropy=0.3), labelled),
    "teacher and tail": (Distillation(add_tail=True), labelled),
    "reverse": (Distillation(beta=1.0, add_tail=True), labelled),
    "jsd": (Distillation(0.3, beta=0.4, add_tail=True), labelled),
    "jsd of few": (Distillation(beta=0.4), labelled),
    "colder": (Distillation(beta=0.4, add_tail=True, temperature=0.7), labelled),
}


def test_every_loss_of_the_package_is_tried():
    kinds = {v for v in vars(loss_package).values() if isinstance(v, type) and issubclass(v, Loss)}
    others = {Loss, JointLoss, PairLoss, CrossEntropy, Score}  # or tried below
    others |= {TokenScore, Sloped, TopTokens}  # parts of Reward; what a teacher says
    others |= {MultiLabel}  # of heads of classes: test_classes.py
    others |= {Contrastive, Embedding}  # test_embeddings.py
    elsewhere = [*DPOS, *REWARDS.values(), *POLICIES.values()]
    tried = {type(loss) for loss, _ in LOSSES.values()} | {*map(type, elsewhere)}
    assert kinds - others == tried - {Curved}


def taken(step, loss):
    names = ("input_ids", "labels", *loss.inputs, *loss.choices)
    return [{name: micro[name] for name in names} for micro in step]


@swept(together=1, name=list(LOSSES), placement=PLACEMENTS, tied=[False, True])
def test_a_loss_and_its_gradients_are_plain_ones(name, placement, tied):
    model, step = llama(vocab_size=WIDE, tie_word_embeddings=tied), micro_batches()
    loss, count = LOSSES[name]
    engine = make_engine(model, clip=1e9, placement=placement)
    evaluated = engine.evaluate(taken(step, loss), loss)
    model.train()
    logits = [model(input_ids=micro["input_ids"]).logits.float() for micro in step]
    shares = [plain(name, each, micro) for each, micro in zip(logits, step, strict=True)]
    total = torch.stack(shares).sum() / count(step)
    total.backward()
    assert evaluated == pytest.approx(total.item(), rel=1e-6)
    assert_step(engine, taken(step, loss), (total.item(), slopes(model)), loss)


def test_both_visits_of_the_head_drop_the_same():
    """XLNet drops some of what its head is given."""
    [step] = make_batches(1)
    model = tiny_model("xlnet", changes={"dropout": 0.5})
    one, other = (make_engine(model, clip=1e9) for _ in range(2))
    without = one.evaluate(step)
    alone, again = one.step(step), other.step(step, Together())
    assert again.loss == pytest.approx(alone.loss, rel=1e-6)
    assert relative_error(gradients(other), gradients(one)) < 2e-6
    assert without != pytest.approx(alone.loss, rel=1e-3)


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_a_score_is_the_mean_loss_and_the_share_of_likeliest_tokens(placement):
    model, [step] = llama(vocab_size=WIDE), make_batches(1)
    generator = torch.Generator().manual_seed(7)
    for micro in step:  # of a random model hardly any label is the likeliest token
        likeliest = model(input_ids=micro["input_ids"]).logits.argmax(-1)[:, :-1]
        chosen = torch.rand(likeliest.shape, generator=generator) < 0.4
        shifted = micro["labels"][:, 1:]
        shifted[chosen & (shifted != -100)] = likeliest[chosen & (shifted != -100)]
    right = sum(
        int((model(input_ids=m["input_ids"]).logits.argmax(-1)[:, :-1] == m["labels"][:, 1:]).sum())
        for m in step
    )
    engine = make_engine(model, placement=placement)
    loss, accuracy = engine.score(step)
    assert 0.2 < accuracy < 0.6
    assert accuracy == pytest.approx(right / labelled(step), abs=1e-7)
    assert loss == pytest.approx(engine.evaluate(step), rel=1e-6)


# Of a loss what is said of micro-batches that are spoilt so.
WEIGHTS: dict[str, Any] = {
    "has no token_weights": lambda m: m.pop("token_weights"),
    "token_weights is .* must be .* floating-point": lambda m: m.update(token_weights=m["labels"]),
    r"token_weights is \[2\]": lambda m: m.update(token_weights=torch.ones(2)),
    "token_weights holds a number that is not finite": (
        lambda m: m["token_weights"].fill_(torch.nan)
    ),
    "must not be negative": lambda m: m["token_weights"].fill_(-1),
    "token_weights are 0 for all labels": lambda m: m["token_weights"].zero_(),
}
TEACHERS: dict[str, Any] = {
    "teacher_ids holds token 1000": lambda m: m["teacher_ids"].fill_(WIDE),
    r"teacher_log_probs is \[.*, 2\] .* must be \[.*, 3\] of floating-point": lambda m: m.update(
        teacher_log_probs=m["teacher_log_probs"][..., :2]
    ),
    r"teacher_ids is .* must be \[.*, 1\] of integers": lambda m: m.update(
        teacher_ids=m["teacher_ids"][..., 0]
    ),
    "log-probabilities are at most 0": lambda m: m["teacher_log_probs"].fill_(1.5),
}
UNASKED = {"'token_weights', which neither the model's forward nor the loss takes": lambda m: None}
WRONG = {TokenWeights(): WEIGHTS, Distillation(): TEACHERS, CrossEntropy(): UNASKED}


@cache
def never_trained():
    return make_engine(llama(vocab_size=WIDE))


@pytest.mark.parametrize(("loss", "message"), [(loss, m) for loss in WRONG for m in WRONG[loss]])
def test_what_a_loss_cannot_use_is_refused(loss, message):
    [micro, *_] = taken(micro_batches(), loss if loss != CrossEntropy() else TokenWeights())
    WRONG[loss][message](micro)
    engine = never_trained()
    before = masters(engine)
    with pytest.raises(InputError, match=message):
        engine.step([micro], loss)
    assert same(before, masters(engine))


BAD_SETTINGS = table(__file__, "refusals.yaml")["losses"]


@pytest.mark.parametrize("message", BAD_SETTINGS)
def test_settings_are_checked(message):
    [(kind, settings)] = BAD_SETTINGS[message].items()
    for each in settings:
        with refused(message):
            getattr(loss_package, kind)(**each)


def test_what_the_models_forward_takes_may_be_given():
    """BERT adds a vector for each token's type; Llama knows of none."""
    model, [micro, *_] = tiny_model("bert").eval(), make_batches(1)[0]
    types = torch.zeros_like(micro["input_ids"])
    types[:, 4:] = 1
    engine = make_engine(model)
    given = {"input_ids": micro["input_ids"], "token_type_ids": types}
    with torch.no_grad():
        wanted = model(**given).logits
    torch.testing.assert_close(engine.logits(given), wanted)
    assert not torch.allclose(engine.logits({"input_ids": micro["input_ids"]}), wanted, atol=1e-3)
    with pytest.raises(InputError, match="'token_type_ids', which neither"):
        make_engine(llama()).logits(given)


@pytest.mark.parametrize("loss", [Distillation(beta=0.4, add_tail=True), Distillation(beta=1.0)])
def test_places_where_fewer_tokens_were_kept_count_for_nothing(loss):
    step = taken(micro_batches(), loss)
    more = [
        micro
        | {
            "teacher_ids": F.pad(micro["teacher_ids"], (0, 2)),
            "teacher_log_probs": F.pad(micro["teacher_log_probs"], (0, 2), value=-1e9),
        }
        for micro in step
    ]
    engine = make_engine(llama(vocab_size=WIDE))
    assert engine.evaluate(more, loss) == pytest.approx(engine.evaluate(step, loss), rel=1e-6)


@pytest.mark.parametrize("top_k", [1, 40, WIDE])
def test_top_log_probs_are_those_of_plain_torch(top_k):
    model, [step] = llama(vocab_size=WIDE), make_batches(1)
    with make_engine(model, placement=Placement(head_tokens=5)) as engine:
        found = engine.top_logprobs(step, top_k)
    for micro, (ids, log_probs) in zip(step, found, strict=True):
        with torch.no_grad():
            logits = model.eval()(micro["input_ids"]).logits[:, :-1]
        there = micro["labels"][:, 1:] != -100
        assert ids.dtype == torch.int64 and ids.shape == (*micro["labels"].shape, top_k)
        assert not ids[:, 1:][~there].any() and not log_probs[:, 1:][~there].any()
        assert not ids[:, 0].any() and not log_probs[:, 0].any()
        wanted = logits.log_softmax(-1)
        torch.testing.assert_close(
            log_probs[:, 1:][there], wanted.topk(top_k).values[there], rtol=0, atol=2e-6
        )
        named = wanted.gather(2, ids[:, 1:])[there]
        torch.testing.assert_close(log_probs[:, 1:][there], named, rtol=0, atol=2e-6)
        assert all(len(set(each)) == top_k for each in ids[:, 1:][there].tolist())


@pytest.mark.parametrize(("top_k", "message"), [(WIDE + 1, "has 1000 tokens"), (0, "at least 1")])
def test_other_counts_than_the_vocabulary_has_are_refused(top_k, message):
    [step] = make_batches(1)
    with make_engine(llama(vocab_size=WIDE)) as engine, pytest.raises(InputError, match=message):
        engine.top_logprobs(step, top_k)


@dataclass(frozen=True)
class Watched(CrossEntropy):
    """Notes how many threads torch has, and whether the step's rows are being prepared."""

    seen: ClassVar[list[tuple[str, int]]] = []

    def normaliser(self, targets, given):
        self.seen.append(("prepares", torch.get_num_threads()))
        return super().normaliser(targets, given)

    def summed(self, logits, targets, *given):
        self.seen.append(("computes", torch.get_num_threads()))
        return super().summed(logits, targets, *given)


def test_one_thread_prepares_a_step_and_all_compute_it():
    """Threads that wait for each other while updates have the cores would keep a GPU idle."""
    torch.set_num_threads(2)
    engine, [step] = make_engine(llama()), make_batches(1)
    engine.step(step, Watched())
    assert set(Watched.seen) == {("prepares", 1), ("computes", 2)}
    with pytest.raises(InputError):
        engine.step([{**step[0], "labels": step[0]["labels"] - 9}])
    assert torch.get_num_threads() == 2


def test_a_step_that_names_no_loss_has_the_engine_s(tmp_path):
    model, [step] = llama(), make_batches(1)
    named, given = make_engine(model), make_engine(model, loss=LabelSmoothing(0.3))
    assert given.evaluate(step) == named.evaluate(step, LabelSmoothing(0.3))
    assert given.evaluate(step, CrossEntropy()) == named.evaluate(step)
    assert given.step(step).loss == named.step(step, LabelSmoothing(0.3)).loss
    assert same(masters(given), masters(named))
    given.save(tmp_path / "checkpoint")
    with Engine.load(tmp_path / "checkpoint", loss=LabelSmoothing(0.3)) as resumed:
        assert resumed.evaluate(step) == named.evaluate(step, LabelSmoothing(0.3))
