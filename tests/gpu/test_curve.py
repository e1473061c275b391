"""Real text on a real GPU: the engine with everything on lies on the curve of plain training."""

import statistics
import sysconfig
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain import AdamW, Engine
from megatrain.loss import cross_entropy_sum, targets_of
from tests.families.tiny import decoder_sizes

pytestmark = pytest.mark.gpu

STEPS, ROWS, TOKENS, LR = 500, 16, 256, 1e-3


def model():
    """About the demo's size; its tokens are bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(**decoder_sizes(256, 256, 768, 6, 4), tie_word_embeddings=True)
    return LlamaForCausalLM(config)


def rows(count):
    """`count` steps of `[ROWS, TOKENS]` bytes of the standard library's source."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    bytes_N = torch.frombuffer(bytearray(text[: count * ROWS * TOKENS]), dtype=torch.uint8)
    rows_NT = bytes_N.view(-1, TOKENS).long()
    order = torch.randperm(len(rows_NT), generator=torch.Generator().manual_seed(0))
    return list(rows_NT[order].split(ROWS))


def streamed(steps):
    with Engine(model(), optimizer=AdamW(lr=LR), device="cuda") as engine:
        micro = [[{"input_ids": r, "labels": r} for r in step.split(ROWS // 2)] for step in steps]
        return [engine.step(batch).loss for batch in micro]


def plain(steps):
    """fp32 weights and arithmetic, all on the GPU."""
    trained = model().cuda()
    groups = [
        {"params": [p for n, p in trained.named_parameters() if "norm" not in n]},
        {"params": [p for n, p in trained.named_parameters() if "norm" in n], "weight_decay": 0},
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in steps:
        targets = targets_of(step).cuda()
        logits = trained(step.cuda(), use_cache=False).logits
        loss = cross_entropy_sum(logits.flatten(0, 1), targets.flatten()) / (targets >= 0).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_curve_is_that_of_plain_training():
    steps = rows(STEPS)
    wanted, got = plain(steps), streamed(steps)
    assert wanted[0] - statistics.mean(wanted[-20:]) > 2  # it does learn
    for start in range(0, STEPS, 20):
        part = slice(start, start + 20)
        assert statistics.mean(got[part]) == pytest.approx(statistics.mean(wanted[part]), rel=0.02)
