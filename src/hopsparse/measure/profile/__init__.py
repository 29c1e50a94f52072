"""What a GPU does while operators run: phases, and hardware counters of kernels."""
