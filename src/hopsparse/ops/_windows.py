"""Where the windows of a convolution lie, and how many there are."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ArgumentError


@dataclass(frozen=True)
class Windows:
    """Which pixels belong to which output of a convolution; pairs are of rows and columns.

    Attributes:
        kernel: Taps.
        stride: From one window to the next.
        padding: Zeros on every side.
        dilation: From one tap to the next.

    Raises:
        ArgumentError: A number is too small.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        for name, least in (("kernel", 1), ("stride", 1), ("padding", 0), ("dilation", 1)):
            pair = getattr(self, name)
            whole = isinstance(pair, tuple) and all(type(each) is int for each in pair)
            if not whole or len(pair) != 2 or min(pair) < least:
                raise ArgumentError(
                    f"windows of {name}={pair!r}",
                    need=f"two whole numbers from {least}, of rows and columns",
                    hint=f"{name}=({max(least, 1)}, {max(least, 1)})",
                )

    @property
    def taps(self) -> int:
        """Pixels of a window.

        Example:
            >>> Windows((3, 3)).taps
            9
        """
        return self.kernel[0] * self.kernel[1]

    def places(self, height: int, width: int) -> tuple[int, int]:
        """Windows along the rows and the columns of an image.

        Raises:
            ArgumentError: The image, with its padding, is smaller than a window.

        Example:
            >>> Windows((3, 3), (2, 2), (1, 1)).places(56, 57)
            (28, 29)
        """
        found = []
        for axis, size in enumerate((height, width)):
            span = (self.kernel[axis] - 1) * self.dilation[axis] + 1
            room = size + 2 * self.padding[axis] - span
            if room < 0:
                raise ArgumentError(
                    f"windows of {span} in an image of {height} x {width}",
                    need=f"at least {span} pixels, padding of {self.padding[axis]} included",
                    hint="larger images, or more padding",
                )
            found.append(room // self.stride[axis] + 1)
        return found[0], found[1]
