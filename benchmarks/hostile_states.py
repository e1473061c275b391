"""AdamW's kinds of states where their codes have it hard: what a small model loses with them.

    python -m benchmarks.hostile_states [--steps 800] [--seeds 3]

A table of next words is learnt as rows times columns, from words whose frequency falls as one over
their rank, so that most rows seldom have a gradient. The cases besides: gradients of 1e-12, a
gradient 1000 times too large every 200 steps that nothing clips, a learning rate that starts anew
every 400 steps, and a learning rate of 1e-6 on weights that are nearly right. Prints the loss over
all words at the end with each kind of states, and how far it is from fp32's of the same seed.
"""

import math
import statistics

import torch
from torch import Tensor

from benchmarks.options import parse
from megatrain import AdamW
from megatrain.optim import TileRange, UpdateOptions

WORDS, WIDTH, BATCH = 512, 32, 256
CASES: dict[str, dict[str, float]] = {
    "rare words": {},
    "gradients of 1e-12": {"scale": 1e-12},
    "spikes": {"spike": 1000.0},
    "warm restarts": {"restart": 400},
    "lr 1e-6": {"lr": 1e-6, "known": 1.0},
}


def loss_of(
    kind: str,
    seed: int,
    steps: int,
    *,
    scale: float = 1.0,
    spike: float = 1.0,
    restart: float = math.inf,
    lr: float = 1e-2,
    known: float = 0.0,
) -> float:
    """The loss over all words, by their frequency, after so many steps from a `known` share."""
    generator = torch.Generator().manual_seed(seed)
    truth = [torch.randn(WORDS, WIDTH, generator=generator) for _ in range(2)]
    often_W = 1 / torch.arange(1, WORDS + 1)
    wanted_WW = (truth[0] @ truth[1].T).mul(WIDTH**-0.5 * 2).softmax(1)
    start = torch.randn(2, WORDS, WIDTH, generator=generator) * 0.3
    begin = torch.stack(truth) * (2 * WIDTH**-0.5) ** 0.5
    master = torch.nn.Parameter(known * begin + (1 - 0.9 * known) * start)
    rule = AdamW(lr=lr, eps=1e-8 * scale, weight_decay=0.0, states=kind)  # type: ignore[arg-type]
    planes = rule.state_planes
    states = [torch.zeros(master.numel() // p.group_size, dtype=p.dtype) for p in planes]
    weights = master.detach().view(-1)
    for step in range(1, steps + 1):
        words_B = torch.multinomial(often_W, BATCH, replacement=True, generator=generator)
        next_B = torch.multinomial(wanted_WW[words_B], 1, generator=generator)[:, 0]
        loss = torch.nn.functional.cross_entropy(master[0][words_B] @ master[1].T, next_B)
        [grad] = torch.autograd.grad(loss, master)
        grad *= scale * (spike if step % 200 == 0 else 1.0)
        cycle = min(restart, steps)
        rate = lr * (0.5 + 0.5 * math.cos(math.pi * ((step - 1) % cycle) / cycle))
        group = {"lr": rate, "betas": rule.betas, "eps": rule.eps, "weight_decay": 0.0}
        tile = TileRange(weights, None, states, grad.view(-1))
        rule.update(tile, group, UpdateOptions(step=step))
    return _loss(master.detach(), often_W, wanted_WW)


def _loss(master: Tensor, often_W: Tensor, wanted_WW: Tensor) -> float:
    each_W = -(wanted_WW * (master[0] @ master[1].T).log_softmax(1)).sum(1)
    return float((each_W * often_W).sum() / often_W.sum())


def main() -> None:
    """Train, print."""
    options = parse(__doc__, steps=800, seeds=3)
    print(f"{'':<20}{'fp32':>8}{'seeds within':>14}{'bf16':>9}{'int8':>9}")
    for case, given in CASES.items():
        ends = {
            kind: [loss_of(kind, seed, options.steps, **given) for seed in range(options.seeds)]
            for kind in ("fp32", "bf16", "int8")
        }
        mean = statistics.fmean(ends["fp32"])
        spread = (max(ends["fp32"]) - min(ends["fp32"])) / mean
        off = {
            kind: statistics.fmean(b / a - 1 for a, b in zip(ends["fp32"], own, strict=True))
            for kind, own in ends.items()
        }
        print(
            f"{case:<20}{mean:8.4f}{spread:14.2%}{off['bf16']:+9.3%}{off['int8']:+9.3%}", flush=True
        )


if __name__ == "__main__":
    main()
