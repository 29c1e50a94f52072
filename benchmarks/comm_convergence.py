"""Training curves with gradients sent whole and sent coded: a language model of characters.

    PYTHONPATH=src python benchmarks/comm_convergence.py --out rows.jsonl

A transformer of 0.4 M parameters on the package's public-domain texts, by processes over gloo on
this machine, each with windows of its own. Adam at a constant rate, the same weights, windows and
steps for every method of a seed; the loss is that of the same held-out windows. A run that is in
the file already is not made again. Appends one JSON row a method and seed.
"""

# Annotations are values here: DDP compares those of a hook with the classes that it knows.

import argparse
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from hopsparse.comm import HybridState, leave, register
from hopsparse.comm.race import powersgd_in_turn
from hopsparse.measure import record

TEXTS = Path(__file__).parents[1] / "src/hopsparse/models/texts"
WIDTH, LAYERS, HEADS, CONTEXT, WINDOWS = 128, 2, 4, 64, 8
LOOK_EVERY, HELD_OUT_WINDOWS = 25, 64
WARMUP = 50
HYBRID: dict[str, dict[str, Any]] = {
    "int4": {"remainder": "int4"},
    "int3.5": {"remainder": "int3.5"},
    "int3": {"remainder": "int3"},
    "int4 every 2": {"remainder": "int4", "every": 2},
    "int4 every 4": {"remainder": "int4", "every": 4},
    "sign": {"remainder": "sign"},
    "none": {"remainder": None},
    "int4 every 4 without feedback": {"remainder": "int4", "every": 4, "error_feedback": False},
    "none without feedback": {"remainder": None, "error_feedback": False},
}
METHODS = ("dense", *HYBRID, "powersgd 2")


class Characters(nn.Module):
    """A causal transformer that predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 128)
        mask = torch.full((CONTEXT, CONTEXT), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """From int64 [windows, CONTEXT] to logits [windows, CONTEXT, 128]."""
        y = self.tokens(x) + self.places.weight
        y = self.layers(y, mask=self.mask, is_causal=True)
        logits: Tensor = self.head(self.norm(y))
        return logits


def text(name: str) -> Tensor:
    """One of the texts, int64; what is not ASCII is 127."""
    content = (TEXTS / f"{name}.txt").read_text(encoding="utf-8")
    return torch.tensor([min(ord(letter), 127) for letter in content])


def windows(source: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and what follows them."""
    places = starts[:, None] + torch.arange(CONTEXT + 1)
    found = source[places]
    return found[:, :-1], found[:, 1:]


def loss_of(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Mean negative log-likelihood a character."""
    return nn.functional.cross_entropy(model(pair[0]).flatten(0, 1), pair[1].flatten())


def hooked(ddp: DistributedDataParallel, method: str, k: float) -> Any:
    """Let a method reduce the gradients; gives what counts its bytes."""
    if method in HYBRID:
        state = HybridState(k=k, warmup=WARMUP, **HYBRID[method])
        return register(ddp, state)
    if method.startswith("powersgd"):
        state = PowerSGDState(None, int(method.split()[1]), WARMUP, orthogonalization_epsilon=1e-8)
        ddp.register_comm_hook(state, powersgd_in_turn)
        return state
    return None


def sent_bytes(counter: Any, parameters: int, ranks: int, steps: int) -> float:
    """What a rank sent in all steps."""
    if isinstance(counter, HybridState):
        return counter.counters.sent_bytes
    values = float(parameters * steps)
    if counter is not None:
        values = parameters * WARMUP + float(counter.compression_stats()[2])
    return 2 * (ranks - 1) / ranks * 4 * values


def train(rank: int, ranks: int, port: int, asked: dict[str, Any], path: Path) -> None:
    """One process of one run; rank 0 appends the row."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    source, held_out = text("calibration"), text("held_out")
    looked_at = windows(
        held_out, torch.linspace(0, len(held_out) - CONTEXT - 2, HELD_OUT_WINDOWS).long()
    )
    torch.manual_seed(asked["seed"])
    model = Characters()
    parameters = sum(each.numel() for each in model.parameters())
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.5, gradient_as_bucket_view=True)
    counter = hooked(ddp, asked["method"], asked["k"])
    optimizer = torch.optim.Adam(model.parameters(), lr=asked["lr"], betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(1000 * asked["seed"] + rank)
    curve, started = [], time.perf_counter()
    for step in range(asked["steps"] + 1):
        if step % LOOK_EVERY == 0:
            with torch.no_grad():
                curve.append([step, float(loss_of(model, looked_at))])
        starts = torch.randint(len(source) - CONTEXT - 1, (WINDOWS,), generator=generator)
        optimizer.zero_grad()
        loss_of(ddp, windows(source, starts)).backward()
        optimizer.step()
    if rank == 0:
        sent = sent_bytes(counter, parameters, ranks, asked["steps"] + 1)
        dense = 2 * (ranks - 1) / ranks * 4 * parameters
        row = {
            "suite": "comm_convergence",
            **asked,
            "ranks": ranks,
            "parameters": parameters,
            "curve": curve,
            "bytes_a_step": sent / (asked["steps"] + 1),
            "times_fewer_bytes": dense * (asked["steps"] + 1) / sent,
            "seconds": time.perf_counter() - started,
        }
        record.append(path, row | record.environment())
        tail = sum(loss for _, loss in curve[-5:]) / 5
        print(
            f"{asked['method']:<26} seed {asked['seed']} loss {tail:.4f} "
            f"{row['times_fewer_bytes']:6.1f} x fewer bytes {row['seconds']:5.0f} s",
            flush=True,
        )
    leave()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    """Run what the file does not have yet."""
    options = parse()
    record.check_can_append(options.out)
    keys = ("method", "seed", "steps", "k", "lr", "ranks")
    have = record.done(options.out, keys)
    for seed in range(options.seeds):
        for method in options.methods.split(","):
            asked = {"method": method, "seed": seed, "steps": options.steps, "k": options.k}
            asked["lr"] = options.lr
            if (*asked.values(), options.ranks) in have:
                continue
            given = (options.ranks, free_port(), asked, options.out)
            mp.spawn(train, args=given, nprocs=options.ranks)  # type: ignore[attr-defined]


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("comm_convergence.jsonl"))
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--k", type=float, default=0.001)
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()
    for method in options.methods.split(","):
        if method not in METHODS:
            parser.error(f"--methods {method!r}: one of {', '.join(METHODS)}")
    return options


if __name__ == "__main__":
    main()
