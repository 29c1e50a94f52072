"""Graph layers on real data: 1,797 handwritten digits, each joined to its 8 nearest.

    PYTHONPATH=src python benchmarks/digits.py --out rows.jsonl

Two layers, 64 to 32 to 10, learn the labels of one digit in ten, and are judged on the others; two
linear layers, which see no edges, learn the same. Data is that of scikit-learn (`pip install
hopsparse[gnn]`). Appends one JSON row a layer, seed and device.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from hopsparse.measure import record
from hopsparse.nn import Aggregation, SparseConv

LAYERS = ("linear", "gcn", "mean", "sum")
NEIGHBOURS, HIDDEN, EPOCHS = 8, 32, 100


def main() -> None:
    """Train, print and append."""
    options = parse()
    facts = record.environment()
    for layer in LAYERS:
        for seed in range(options.seeds):
            row = trained(layer, seed, torch.device(options.device))
            record.append(options.out, row | facts)
            print(f"{layer:<8} seed {seed} {100 * row['accuracy']:.1f} %", flush=True)


def trained(layer: str, seed: int, device: torch.device) -> record.Row:
    """Accuracy on the digits whose labels were not shown."""
    torch.manual_seed(seed)
    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    near = torch.cdist(x, x).topk(NEIGHBOURS + 1, largest=False).indices[:, 1:]
    edges = torch.stack((near.flatten(), torch.arange(len(x)).repeat_interleave(NEIGHBOURS)))
    shown = torch.zeros(len(x), dtype=torch.bool)
    shown[torch.randperm(len(x))[: len(x) // 10]] = True
    sizes = ((x.shape[1], HIDDEN), (HIDDEN, 10))
    is_linear = layer == "linear"
    made = [nn.Linear(*each) if is_linear else SparseConv(*each, layer) for each in sizes]
    first, second = (each.to(device) for each in made)
    x, label, shown = x.to(device), torch.tensor(data.target).to(device), shown.to(device)
    more = () if is_linear else (Aggregation.from_edges(edges.to(device), len(x), layer),)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.Adam(parameters, 0.01, weight_decay=5e-4)
    started = time.monotonic()
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        score = second(first(x, *more).relu(), *more)
        F.cross_entropy(score[shown], label[shown]).backward()
        optimizer.step()
    right = (score.argmax(1) == label)[~shown].double().mean().item()
    return {
        "layer": layer,
        "seed": seed,
        "device": device.type,
        "nodes": len(x),
        "edges": edges.shape[1],
        "shown": int(shown.sum()),
        "epochs": EPOCHS,
        "accuracy": right,
        "seconds": time.monotonic() - started,
    }


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("digits.jsonl"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: at least 1")
    return options


if __name__ == "__main__":
    main()
