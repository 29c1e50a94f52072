"""From a KernelSpec to a cubin: no torch, no driver, no GPU."""
