"""hopsparse: sparse operators, formats and models for NVIDIA Hopper GPUs."""
