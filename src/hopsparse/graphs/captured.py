"""A function captured into CUDA graphs, called as before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import ArgumentError, UnsupportedError
from ..launch import capture as capture_graph
from ..launch import is_capturing
from ..ops._product import Plan

_WARMUP = 3


@dataclass(frozen=True)
class Recording:
    """One graph, and the memory that it reads and writes.

    Attributes:
        inputs: What it reads; a call copies its own inputs there.
        outputs: What it writes: tensors, or tuples, lists and dicts of them.
        replay: Runs it on torch's current stream.
        early: Launches in it that start before the kernel ahead of them has ended.
    """

    inputs: tuple[Tensor, ...]
    outputs: Any
    replay: Callable[[], None]
    early: int = 0


class Captured:
    """A function that replays what it was captured as, where a call fits, and else runs as it is.

    Weights may change in place: a replay reads what they are then. After tensors were replaced
    (`model.to()`, `load_state_dict(assign=True)`) call `recapture`. Calls take turns: it has one
    set of inputs, so that two streams or threads must not call it at a time.

    Attributes:
        buckets: Token counts that were captured, ascending; empty where the shapes of the example
            alone were.
        recordings: The graphs: by bucket, or that of the example under 0.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        example: tuple[Tensor, ...],
        record: Callable[[], Mapping[int, Recording]],
        *,
        reuse_outputs: bool = False,
        on_release: Callable[[], None] | None = None,
    ) -> None:
        self._fn, self._example, self._record = fn, example, record
        self._reuse, self._on_release = reuse_outputs, on_release
        self._warned, self._released = False, False
        self.recordings: Mapping[int, Recording] = {}
        self.recapture()

    @property
    def buckets(self) -> tuple[int, ...]:
        """Token counts that were captured, ascending."""
        return tuple(sorted(bucket for bucket in self.recordings if bucket))

    def recapture(self) -> None:
        """Capture again, after tensors that the function reads were replaced.

        Raises:
            UnsupportedError: A CUDA graph is being captured.
        """
        self.recordings = {}  # What they hold is free before more is asked for.
        self.recordings, self._released = self._record(), False

    def release(self) -> None:
        """Free the graphs, and undo what `accelerate` changed; later calls run eagerly."""
        self.recordings, self._released = {}, True
        if self._on_release is not None:
            self._on_release()

    def inputs_for(self, tokens: int = 0) -> tuple[Tensor, ...]:
        """The memory that a call of so many tokens reads: who writes there spares the copies.

        Args:
            tokens: Rows; 0 where there are no buckets.

        Raises:
            ArgumentError: Nothing was captured for so many.
        """
        fitting = [bucket for bucket in self.recordings if bucket >= tokens > 0 or bucket == tokens]
        if not fitting:
            raise ArgumentError(
                f"inputs of {tokens} tokens",
                need=f"what was captured: {self.buckets or 'the shapes of the example, as 0'}",
                hint="captured.plan(...), which says what a call does",
            )
        inputs = self.recordings[min(fitting)].inputs
        cut = self._with_tokens(tokens > 0)
        return tuple(x[:tokens] if has else x for x, has in zip(inputs, cut, strict=True))

    def plan(self, *inputs: Tensor) -> Plan:
        """What a call with these inputs does.

        Example:
            >>> captured = capture(torch.nn.functional.relu, torch.ones(4, 8))
            >>> captured.plan(torch.ones(4, 8)).describe()
            'captured runs eager: tensors are on cpu'
        """
        found = self._find(inputs)
        if isinstance(found, str):
            return Plan("captured", "eager", found)
        bucket, recording = found
        of = f"of {bucket} tokens" if bucket else "of the example"
        return Plan("captured", "graph", f"{of}, {recording.early} launches start early")

    def __call__(self, *inputs: Tensor) -> Any:
        """Replay, or run.

        Args:
            inputs: As the example, but for the number of tokens where there are buckets.

        Returns:
            What the function returns, without gradients. With `reuse_outputs` it is memory of the
            graph, which the next call writes again.

        Raises:
            ArgumentError: Other inputs than a function of these tensors has, or one that requires a
                gradient.
        """
        if not all(isinstance(each, Tensor) for each in inputs):
            _check_example(inputs)
        _check_gradients(inputs)
        found = self._find(inputs)
        if isinstance(found, str):
            return self._run(inputs, found)
        bucket, recording = found
        tokens = inputs[0].shape[0] if bucket else 0
        with torch.no_grad():
            for target, given, has_tokens in zip(
                recording.inputs, inputs, self._with_tokens(bool(bucket)), strict=True
            ):
                _copy(target[:tokens] if has_tokens else target, given)
            recording.replay()
            return tree_map_only(Tensor, partial(self._result, tokens), recording.outputs)

    def _result(self, tokens: int, output: Tensor) -> Tensor:
        own = output[:tokens] if tokens else output
        return own if self._reuse else own.clone()

    def _run(self, inputs: tuple[Tensor, ...], why: str) -> Any:
        has_none = bool(inputs) and inputs[0].shape[:1] == (0,)
        if self.recordings and not has_none and not self._warned:
            self._warned = True
            warnings.warn(f"a captured function runs eagerly: {why}", stacklevel=3)
        with torch.no_grad():
            return self._fn(*inputs)

    def _find(self, inputs: tuple[Tensor, ...]) -> tuple[int, Recording] | str:
        """The graph that a call fits, or why there is none."""
        if not self.recordings:
            where = self._example[0].device.type
            return "the graphs were released" if self._released else f"tensors are on {where}"
        if len(inputs) != len(self._example):
            return f"{len(inputs)} inputs, and {len(self._example)} were captured"
        buckets = self.buckets
        has_tokens = self._with_tokens(bool(buckets))
        tokens = inputs[0].shape[0] if buckets and inputs[0].ndim else 0
        for i, (given, known) in enumerate(zip(inputs, self._example, strict=True)):
            if (given.dtype, given.device) != (known.dtype, known.device):
                return f"input {i} is {given.dtype} on {given.device}"
            shape = (tokens, *known.shape[1:]) if has_tokens[i] else tuple(known.shape)
            if tuple(given.shape) != shape:
                return f"input {i} is {list(given.shape)}, and {list(known.shape)} was captured"
        if not buckets:
            return 0, self.recordings[0]
        if tokens == 0:
            return "no tokens"
        for bucket in buckets:
            if tokens <= bucket:
                return bucket, self.recordings[bucket]
        return f"{tokens} tokens, and at most {buckets[-1]} were captured"

    def _with_tokens(self, has_buckets: bool) -> list[bool]:
        return with_tokens(self._example) if has_buckets else [False] * len(self._example)


def capture(
    fn: Callable[..., Any],
    example: Tensor | Sequence[Tensor],
    *,
    buckets: Iterable[int] | None = None,
    reuse_outputs: bool = False,
    on_release: Callable[[], None] | None = None,
) -> Captured:
    """Capture a function of tensors into CUDA graphs: a call is then one launch.

    Kernels of hopsparse in it start before the one ahead has ended, and load their weights
    meanwhile, where the function leaves those weights alone. With `buckets` a call of fewer tokens
    takes the next larger graph, and its rows past the end hold what was there: a row of a result
    may depend on the same row of the inputs alone. A function that the tensors of a GPU do not
    reach runs as it is, and so does a call that fits no graph; `plan` says so, and the first time a
    warning.

    Args:
        fn: Takes tensors; returns a tensor, or tuples, lists and dicts of them. It runs a few times
            with `example`, and what it changes in place (a cache of keys) changes then too. It must
            not wait for the GPU.
        example: Its inputs, on one device, or one input.
        buckets: Numbers of tokens, the first dimension of the first input, and of every other input
            that has as many in `example`; every result is then [tokens, ...]. None captures the
            shapes of the example alone.
        reuse_outputs: Return the memory of the graph, which the next call writes again, and no
            copies of it.
        on_release: Called by `Captured.release`.

    Raises:
        ArgumentError: No such example or buckets, inputs that require a gradient, or a result that
            has another first dimension than tokens.
        UnsupportedError: A CUDA graph is being captured already.

    Example:
        >>> captured = capture(lambda x: x.relu(), torch.ones(4, 8), buckets=(1, 4))
        >>> captured(torch.full((3, 8), -1.0)).sum()
        tensor(0.)
    """
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    _check_example(inputs)
    _check_gradients(inputs)
    counts = None if buckets is None else _counts(buckets, inputs)
    record = partial(_record, fn, inputs, counts)
    return Captured(fn, inputs, record, reuse_outputs=reuse_outputs, on_release=on_release)


def _record(
    fn: Callable[..., Any], example: tuple[Tensor, ...], buckets: tuple[int, ...] | None
) -> Mapping[int, Recording]:
    device = example[0].device
    if device.type != "cuda":
        return {}
    if is_capturing(device.index):
        raise UnsupportedError(
            "a capture inside the capture of another CUDA graph",
            need="one at a time",
            hint="capture before, and call what was captured",
        )
    found: dict[int, Recording] = {}
    pool = None
    with torch.cuda.device(device):
        # The largest first: the others then fit into its memory.
        for bucket in sorted(buckets, reverse=True) if buckets else (0,):
            # Inputs that were made in inference mode could not be written outside it.
            with torch.inference_mode(False), torch.no_grad():
                inputs = _inputs_of(example, bucket)
            with torch.no_grad():
                graph = capture_graph(partial(fn, *inputs), warmup=_WARMUP, pool=pool, early=True)
            if bucket:
                _check_outputs(graph.outputs, bucket)
            pool = graph.recorded.pool()
            found[bucket] = Recording(inputs, graph.outputs, graph.replay, graph.early)
    return found


def _copy(target: Tensor, given: Tensor) -> None:
    """Copy an input to where a graph reads it, unless it is there."""
    if (target.data_ptr(), target.stride()) == (given.data_ptr(), given.stride()):
        return
    if target.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
        given = given.clone()  # Rows of that memory, in another order.
    target.copy_(given)


def _inputs_of(example: tuple[Tensor, ...], bucket: int) -> tuple[Tensor, ...]:
    """Memory for a graph's inputs, with rows of the example, over and over."""
    if not bucket:
        return tuple(each.clone() for each in example)
    rows = torch.arange(bucket, device=example[0].device) % example[0].shape[0]
    return tuple(
        each[rows] if has_tokens else each.clone()
        for each, has_tokens in zip(example, with_tokens(example), strict=True)
    )


def with_tokens(example: Sequence[Tensor]) -> list[bool]:
    """Which inputs have a row for each token, as the first one does.

    Example:
        >>> with_tokens([torch.ones(4, 8), torch.ones(4), torch.ones(8)])
        [True, True, False]
    """
    return [each.shape[:1] == example[0].shape[:1] for each in example]


def _counts(buckets: Iterable[int], example: tuple[Tensor, ...]) -> tuple[int, ...]:
    counts = tuple(sorted(set(buckets)))
    if not counts or any(type(each) is not int or each < 1 for each in counts):
        raise ArgumentError(
            f"buckets={counts}", need="numbers of tokens, 1 and more", hint="(1, 16, 64)"
        )
    if example[0].ndim == 0 or example[0].shape[0] == 0:
        raise ArgumentError(
            f"an example of shape {list(example[0].shape)} with buckets",
            need="at least one token, in its first dimension",
            hint="x[:1]",
        )
    return counts


def _check_example(inputs: tuple[Any, ...]) -> None:
    tensors = bool(inputs) and all(isinstance(each, Tensor) for each in inputs)
    if not tensors or any(each.device != inputs[0].device for each in inputs):
        kinds = ", ".join(
            f"a tensor on {each.device}" if isinstance(each, Tensor) else type(each).__name__
            for each in inputs
        )
        raise ArgumentError(
            f"inputs of {kinds or 'nothing'}",
            need="tensors on one device",
            hint="the other arguments bound before: functools.partial(fn, flag=True)",
        )


def _check_gradients(inputs: Iterable[Tensor]) -> None:
    if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
        raise ArgumentError(
            "an input that requires a gradient",
            need="none: a replay records nothing for autograd",
            hint="x.detach(), or torch.no_grad()",
        )


def _check_outputs(outputs: Any, bucket: int) -> None:
    for each in tree_leaves(outputs):
        if not isinstance(each, Tensor) or each.shape[:1] != (bucket,):
            told = list(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise ArgumentError(
                f"a result of {told} for {bucket} tokens",
                need=f"results of [{bucket}, ...], a row for each token",
                hint="buckets=None, which captures the shapes of the example alone",
            )
