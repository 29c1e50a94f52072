"""Sums and columns that several GPUs hold parts of, read over NVLink by one kernel."""
