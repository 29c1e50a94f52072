"""Rows to 8-bit or 4-bit codes and a scale each, also behind a norm or a gate."""

from .op import quantize_rows

__all__ = ["quantize_rows"]
