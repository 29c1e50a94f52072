"""The exponential of weights, by operations that round alike on every device."""

from __future__ import annotations

#: As float32 has it, so that nothing rounds it in another way.
LOG2_E = 1.44269502162933349609375

#: exp2 on [0, 1), highest power first: Taylor in ln 2, to 2e-6 and in the order of exp2.
COEFFICIENTS = (
    1.5252734e-05,
    1.5403530e-04,
    1.3333558e-03,
    9.6181291e-03,
    5.5504109e-02,
    2.4022651e-01,
    6.9314718e-01,
    1.0,
)
