"""Named images of im2col: what tests check and benchmarks time."""

from __future__ import annotations

from dataclasses import dataclass

from .._windows import Windows

_THREE = Windows((3, 3), padding=(1, 1))
_HALVED = Windows((3, 3), (2, 2), (1, 1))


@dataclass(frozen=True)
class Case:
    """Images and windows.

    Attributes:
        name: Unique.
        shape: Images, channels, height, width.
        windows: What is gathered.
    """

    name: str
    shape: tuple[int, int, int, int]
    windows: Windows


#: Channels of every vector; images of one pixel and one row; windows with gaps, none, many taps.
EDGE = (
    Case("one-pixel", (1, 8, 1, 1), _THREE),
    Case("no-padding", (2, 16, 5, 4), Windows((3, 3))),
    Case("halved", (3, 24, 7, 6), _HALVED),
    Case("one-row", (2, 8, 1, 9), _THREE),
    Case("stem", (2, 3, 23, 21), Windows((7, 7), (2, 2), (3, 3))),
    Case("even-channels", (2, 6, 5, 5), _THREE),
    Case("half-pieces", (2, 12, 5, 5), _THREE),
    Case("one-channel", (3, 1, 6, 5), _THREE),
    Case("dilated", (2, 8, 11, 9), Windows((3, 3), (1, 2), (2, 1), (2, 3))),
    Case("flat", (2, 40, 6, 7), Windows((1, 5), (1, 1), (0, 2))),
    Case("far-padding", (1, 8, 2, 2), Windows((2, 2), (3, 3), (4, 4))),
    Case("two-parts", (1, 520, 3, 3), _THREE),
    Case("one-tap", (2, 64, 4, 4), Windows((1, 1), (2, 2))),
)

#: The 3x3 convolutions of ResNet-50 at 224 x 224, 64 images.
MODEL = (
    *(
        Case(f"resnet-{side}", (64, channels, side, side), _THREE)
        for channels, side in ((64, 56), (128, 28), (256, 14), (512, 7))
    ),
    *(
        Case(f"resnet-{side}-halved", (64, channels, side, side), _HALVED)
        for channels, side in ((128, 56), (256, 28), (512, 14))
    ),
)
