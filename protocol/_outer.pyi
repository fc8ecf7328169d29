"""Types of the optional C extension; see _outer.c and, for what the function promises, outer.py."""

from stretto.protocol.fp4 import Floats

def nesterov(
    anchor: Floats,
    momentum: Floats,
    gradient: Floats,
    rate: float,
    mu: float,
    new_anchor: Floats,
    new_momentum: Floats,
    /,
) -> None: ...
