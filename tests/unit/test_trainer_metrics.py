"""`compute_metrics` and `predict` of a streamed Trainer are the plain one's, as memory allows."""

import pytest
import torch
from transformers import Trainer

from tests.sweeps import few, swept
from tests.unit.trainer_cases import Streamed, rows, trainer


def share_right(given):
    """Of the labelled tokens; predictions are logits, or the likeliest tokens."""
    likely = given.predictions
    likely = likely.argmax(-1) if likely.ndim == 3 else likely
    labels = given.label_ids[:, 1:]
    likely = likely[:, :-1][labels >= 0]
    right = float((likely == labels[labels >= 0]).mean())
    return {"right": right, "mean": float(likely.mean()), "of": labels.size}


def likeliest(logits, labels):
    return logits.argmax(-1)


@swept(together=0, preprocess=[None, likeliest], changes={"fp32": {}, "bf16": {"bf16": True}})
def test_metrics_are_computed_as_under_the_plain_one(tmp_path, preprocess, changes):
    """In two batches of other widths; the best is of the metric, too."""
    options = {"compute_metrics": share_right, "preprocess_logits_for_metrics": preprocess}
    changes = changes | {"metric_for_best_model": "mean", "load_best_model_at_end": True}
    found = []
    for kind in (Trainer, Streamed):
        made = trainer(kind, tmp_path / kind.__name__, options=options, **changes)
        made.train()
        evaluated = [entry for entry in made.state.log_history if "eval_right" in entry]
        assert (
            len({entry["eval_mean"] for entry in evaluated}) == 3
            and made.state.best_metric is not None
        )
        asked = made.predict(rows(4, seed=2))
        found.append((evaluated, asked, made.state.best_global_step))
    (plain, wanted, best), (streamed, got, also) = found
    near = 2e-2 if "bf16" in changes else 1e-4
    for one, other in zip(plain, streamed, strict=True):
        assert other["eval_of"] == one["eval_of"] > 0
        assert other["eval_loss"] == pytest.approx(one["eval_loss"], rel=near)
        if "bf16" not in changes:
            assert other["eval_right"] == one["eval_right"]
            assert other["eval_mean"] == one["eval_mean"]
    assert got.predictions.shape == wanted.predictions.shape
    assert (got.label_ids == wanted.label_ids).all()
    assert got.metrics["test_loss"] == pytest.approx(wanted.metrics["test_loss"], rel=near)
    if "bf16" not in changes:
        assert also == best
        if preprocess is None:
            torch.testing.assert_close(
                torch.tensor(got.predictions),
                torch.tensor(wanted.predictions),
                rtol=1e-4,
                atol=1e-5,
            )


def held(given):
    """What there is to measure by."""
    every = {"of": given.predictions, "inputs": given.inputs, "losses": given.losses}
    return {
        name: float(sum(part.sum() for part in value)) + len(value)
        for name, value in every.items()
        if value is not None
    }


@pytest.mark.parametrize(
    "changes",
    few(
        [
            {"include_for_metrics": ["inputs", "loss"]},
            {"eval_do_concat_batches": False},
            {"prediction_loss_only": True},
        ]
    ),
)
def test_what_metrics_are_given_is_as_under_the_plain_one(tmp_path, changes):
    plain, streamed, usual = (
        trainer(kind, tmp_path, options={"compute_metrics": held}, **more).evaluate()
        for kind, more in ((Trainer, changes), (Streamed, changes), (Trainer, {}))
    )
    of, got, otherwise = (
        {n: v for n, v in metrics.items() if n.endswith(("_of", "_inputs", "_losses"))}
        for metrics in (plain, streamed, usual)
    )
    assert got == pytest.approx(of, rel=1e-4) and of != otherwise
