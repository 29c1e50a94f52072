"""The dense product of `torch.nn.functional.linear`."""

from hopsparse.measure.peers import CuBLAS

NAME, available = CuBLAS.NAME, CuBLAS.available
prepare, describe = CuBLAS.prepare, CuBLAS.describe
