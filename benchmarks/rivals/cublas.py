"""The dense product of `torch.nn.functional.linear`."""

from hopsparse.measure.peers import CuBLAS

NAME, available, prepare = CuBLAS.NAME, CuBLAS.available, CuBLAS.prepare
