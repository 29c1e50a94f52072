"""Windows of images as rows of a matrix, so that a convolution is a product."""

from .op import im2col

__all__ = ["im2col"]
