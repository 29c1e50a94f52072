"""cuSPARSELt through PyTorch: every algorithm id is tried, and the fastest runs."""

from hopsparse.measure.peers import CuSPARSELt

NAME, available = CuSPARSELt.NAME, CuSPARSELt.available
prepare, describe = CuSPARSELt.prepare, CuSPARSELt.describe
