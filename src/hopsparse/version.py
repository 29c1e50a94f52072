"""The version, readable without an installed distribution."""

__version__ = "0.1.0.dev0"
