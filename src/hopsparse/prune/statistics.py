"""What calibration says about the inputs of layers, summed over calls."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ..errors import CalibrationError
from .compensation import HessianFactor, factor_hessian

ROWS = 1024  # rows squared at once: they stay in the cache, 6 x faster than all rows together
PANEL = 512  # columns a product; only panels on or below the diagonal of XᵀX are computed


class Statistics:
    """Token count, feature norms, means and XᵀX of one stream of inputs, and its targets.

    Args:
        features: k, the width of the inputs.
        device: Where to sum.
        stride: XᵀX takes every `stride`-th token; norms take all.
        holdout: Every `holdout`-th token is kept out of XᵀX and the targets, and goes to
            `held_out`, statistics of their own; 0: none is.

    Example:
        >>> stats = Statistics(2)
        >>> stats.add(torch.tensor([[3.0, 0.0], [4.0, 1.0]]))
        >>> stats.tokens, stats.input_norm().tolist(), stats.hessian().tolist()
        (2, [5.0, 1.0], [[12.5, 2.0], [2.0, 0.5]])
    """

    def __init__(
        self,
        features: int,
        device: torch.device | None = None,
        stride: int = 1,
        holdout: int = 0,
    ) -> None:
        self.tokens = 0
        self.stride = stride
        self.holdout = holdout
        self._inputs = Moments(features, device)
        self.held_out = Statistics(features, device) if holdout else None
        self._squares = torch.zeros(features, device=device)
        self._cross: Target | None = None
        self._dense: Moments | None = None
        self._streams: dict[str, Target] = {}
        self._factors: dict[tuple[float, torch.dtype, bool], HessianFactor] = {}

    def add(self, inputs: Tensor, name: str = "", dense: Tensor | None = None) -> None:
        """Add inputs [..., k] of any floating dtype.

        Args:
            inputs: What the layers get.
            name: For the error.
            dense: [..., k], what they get in the dense model, for `pull`.

        Raises:
            CalibrationError: They hold NaN or infinity (or squares overflow); it says `name`.
        """
        rows = self._rows(inputs)
        if not len(rows):
            return
        first = self.tokens
        taken = self._taken(rows, first)
        self._inputs.add(taken)
        if self.held_out is not None:
            other = None if dense is None else self._kept_out(self._rows(dense), first)
            self.held_out.add(self._kept_out(rows, first), name, other)
        if self.stride > 1 or self.holdout:
            for part in torch.split(rows, ROWS):
                self._squares += part.square().sum(0)
        else:
            self._squares.copy_(self._inputs.gram.diagonal())
        if dense is not None and dense.shape == inputs.shape:
            features = rows.shape[1]
            self._cross = self._cross or Target(features, features, rows.device)
            self._dense = self._dense or Moments(features, rows.device)
            wanted = self._taken(self._rows(dense), first)
            self._cross.add(wanted, taken)
            self._dense.add(wanted)
        self.tokens += len(rows)
        self._factors.clear()
        if not bool(self._squares.isfinite().all()):
            feature = int((~self._squares.isfinite()).nonzero()[0])
            raise CalibrationError(
                f"layer {name or '?'}: its input feature {feature} is NaN or infinite",
                need="finite activations",
                hint="another calibration text, or the model in float32",
            )

    def add_stream(self, name: str, target: Tensor, inputs: Tensor) -> None:
        """Add what the layer `name` should put out for the inputs that were added last.

        Args:
            name: The layer; others that share its inputs have other targets.
            target: [..., out], less the layer's bias.
            inputs: [..., k], what was added.
        """
        rows, wanted = self._rows(inputs), self._rows(target)
        first = self.tokens - len(rows)
        if name not in self._streams:
            self._streams[name] = Target(wanted.shape[1], rows.shape[1], rows.device)
        self._streams[name].add(self._taken(wanted, first), self._taken(rows, first))
        if self.held_out is not None:
            parts = (self._kept_out(wanted, first), self._kept_out(rows, first))
            self.held_out.add_stream(name, *parts)

    def input_norm(self) -> Tensor:
        """[k] float32, the 2-norm of each feature over all tokens."""
        return self._squares.sqrt()

    def mean(self) -> Tensor:
        """[k] float32, the mean input of the tokens in XᵀX."""
        return self._inputs.total / max(self._inputs.count, 1)

    def hessian(self, *, centered: bool = False) -> Tensor:
        """[k, k] float32, XᵀX divided by the number of tokens in it; `centered`: of X - mean."""
        whole = self._inputs.mean_gram()
        if centered:
            mean = self.mean()
            whole.addr_(mean, mean, alpha=-1)
            # Rounding may leave a feature that never changes with less than nothing.
            whole.diagonal().clamp_(min=0)
        return whole

    def factor(
        self, damping: float, dtype: torch.dtype = torch.float32, *, centered: bool = False
    ) -> HessianFactor:
        """The factored inverse Hessian, computed at the first call and kept."""
        key = (damping, dtype, centered)
        if key not in self._factors:
            hessian = self.hessian(centered=centered)
            self._factors[key] = factor_hessian(hessian, damping=damping, dtype=dtype)
        return self._factors[key]

    def pull(self, name: str, weight: Tensor, *, centered: bool = False) -> Tensor | None:
        """[out, k], (YᵀX - W XᵀX) per token: where the target Y draws the weight of layer `name`.

        None where no target is known for every token, so that W X itself is the target.
        """
        center = self.mean() if centered else None
        gram = self.hessian(centered=centered)
        if stream := self._stream(name):
            return stream.mean_product(center) - weight @ gram
        if cross := self._whole_cross():
            return weight @ (cross.mean_product(center) - gram)
        return None

    def mean_target(self, name: str, weight: Tensor) -> Tensor:
        """[out], the mean of what the layer `name` should put out, less its bias."""
        if stream := self._stream(name):
            return stream.mean()
        cross = self._whole_cross()
        return weight @ (cross.mean() if cross else self.mean())

    def target_energy(self, name: str, weight: Tensor) -> float:
        """‖Y‖² per token, of the target of the layer `name`."""
        if stream := self._stream(name):
            return stream.energy / max(stream.count, 1)
        dense = self._dense if self._whole_cross() and self._dense else self._inputs
        return float(((weight @ dense.mean_gram()) * weight).sum(dtype=torch.float64))

    def _stream(self, name: str) -> Target | None:
        stream = self._streams.get(name)
        return stream if stream and stream.count == self._inputs.count else None

    def _whole_cross(self) -> Target | None:
        return self._cross if self._cross and self._cross.count == self._inputs.count else None

    def copy(self) -> Statistics:
        """An independent copy."""
        twin = copy.copy(self)
        for name in ("_inputs", "held_out", "_squares", "_cross", "_dense", "_streams"):
            setattr(twin, name, copy.deepcopy(getattr(self, name)))
        twin._factors = {}
        return twin

    def _rows(self, inputs: Tensor) -> Tensor:
        return inputs.detach().reshape(-1, inputs.shape[-1]).to(self._squares.dtype)

    def _kept_out(self, rows: Tensor, first: int) -> Tensor:
        return rows[-first % self.holdout :: self.holdout]

    def _taken(self, rows: Tensor, first: int) -> Tensor:
        """The rows that XᵀX takes; tokens are numbered across calls, however those are cut."""
        if self.holdout:
            numbers = torch.arange(first, first + len(rows), device=rows.device)
            return rows[numbers % self.holdout != 0]
        return rows[-first % self.stride :: self.stride]


class Moments:
    """Sums over rows: their number, their total and the lower triangle of their Gram matrix."""

    def __init__(self, features: int, device: torch.device | None = None) -> None:
        self.count = 0
        self.total = torch.zeros(features, device=device)
        self.gram = torch.zeros(features, features, device=device)

    def add(self, rows: Tensor) -> None:
        """Add rows [n, features]."""
        self.count += len(rows)
        self.total += rows.sum(0)
        add_gram(self.gram, rows)

    def mean_gram(self) -> Tensor:
        """[features, features], the whole matrix divided by the number of rows."""
        whole = self.gram.tril()
        whole += self.gram.tril(-1).t()
        return whole.div_(max(self.count, 1))


class Target:
    """Sums over pairs of rows: targets [n, width] against inputs [n, features]."""

    def __init__(self, width: int, features: int, device: torch.device) -> None:
        self.count = 0
        self.energy = 0.0
        self._total = torch.zeros(width, device=device)
        self._product = torch.zeros(width, features, device=device)

    def add(self, targets: Tensor, rows: Tensor) -> None:
        """Add pairs."""
        self.count += len(rows)
        self.energy += float(targets.square().sum(dtype=torch.float64))
        self._total += targets.sum(0)
        for target, row in zip(torch.split(targets, ROWS), torch.split(rows, ROWS), strict=True):
            self._product.addmm_(target.t(), row)

    def mean(self) -> Tensor:
        """[width], the mean target."""
        return self._total / max(self.count, 1)

    def mean_product(self, center: Tensor | None = None) -> Tensor:
        """[width, features], targetsᵀ inputs per row, of targets and inputs less their means."""
        product = self._product / max(self.count, 1)
        return product if center is None else product.addr_(self.mean(), center, alpha=-1)


def add_gram(total: Tensor, rows: Tensor) -> None:
    """Add the lower triangle of rowsᵀ rows to `total`; what is above the diagonal is undefined."""
    k = total.shape[0]
    for start in range(0, k, PANEL):
        stop = min(start + PANEL, k)
        total[start:stop, :stop].addmm_(rows[:, start:stop].t(), rows[:, :stop])
