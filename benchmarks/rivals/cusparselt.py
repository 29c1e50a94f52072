"""cuSPARSELt through PyTorch: every algorithm id is tried, and the fastest runs."""

from hopsparse.measure.peers import CuSPARSELt

NAME, available, prepare = CuSPARSELt.NAME, CuSPARSELt.available, CuSPARSELt.prepare
