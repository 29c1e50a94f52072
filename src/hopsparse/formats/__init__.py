"""What is stored: N:M, BSR, CSR, CSC, HYB and bitmask matrices, and their conversions."""
