"""A dense 2:4 matrix to the packed layout, on the device that holds it."""

from .op import pack_nm

__all__ = ["pack_nm"]
