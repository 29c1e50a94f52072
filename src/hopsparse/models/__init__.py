"""Whole models: where their layers are, how they are read, pruned, written and loaded."""
