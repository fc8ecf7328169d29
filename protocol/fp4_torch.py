"""The E3M0 codec for torch tensors on any device: the path named "torch".

The payload is made on the tensor's device and copied to the host afterwards, an eighth of the bytes of FP32; the other
way round the payload is copied to the device and decoded there. `fp4` describes the format. The bytes and the sums are
the same as those of its other paths: the encoder works on integers, every product with a power of two is exact, and
the product with the weight and the sum are two operations, each rounded. `addcmul_` or `add_(alpha=...)` would fuse
them, and torch.compile might.

Work goes chunk by chunk, so that temporaries take some tens of MiB of the device at most. Nothing waits for the device
until the end, when the largest magnitudes are looked at. On a CPU the paths of `fp4` are many times faster.
"""

from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from stretto.protocol import fp4
from stretto.protocol.errors import LocalProtocolError
from stretto.protocol.fp4_numpy import BLOCK, PAIRS, SCALES, Bytes

CHUNK = 1 << 20
"""Values handled at a time, a multiple of BLOCK."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAGNITUDE = 0x7FFFFFFF
_TOO_BIG = 0x7F400000
"""FP32 bits of 1.5 * 2**127, the first value that rounds up to 2**128; inf and nan lie above."""


def path_name() -> str:
    """The name of this path, next to those of `fp4.PATHS`."""
    return "torch"


@torch.no_grad()
def encode(x: Tensor) -> bytes:
    """Encode (n,) float32, bfloat16 or float16, contiguous, on any device; ``x`` is only read.

    The 16-bit formats are converted to FP32, which is exact. One copy to the host of the payload's size.

    Raises:
        LocalProtocolError: if ``x`` is of another kind, or holds a nan, an inf or a magnitude of 1.5 * 2**127 or more.
    """
    _check(x, _DTYPES, "an outer gradient")
    n = x.numel()
    blocks = -(-n // BLOCK)
    payload = torch.empty(fp4.nbytes(n), dtype=torch.uint8, device=x.device)
    top = torch.zeros(blocks, dtype=torch.int32, device=x.device)
    for start in range(0, n, CHUNK):
        part = x[start : start + CHUNK]
        first, last = start // BLOCK, -(-(start + part.numel()) // BLOCK)
        codes = payload[blocks + start // 2 : blocks + (start + part.numel() + 1) // 2]
        _encode_chunk(part.float(), top[first:last], payload[first:last], codes)
    if n and int(top.max()) >= _TOO_BIG:
        _refuse(x)
    return payload.cpu().numpy().tobytes()


@torch.no_grad()
def decode_add(payload: fp4.Payload, weight: float, out: Tensor) -> None:
    """Add ``float32(weight) * value`` to ``out``, (n,) float32, contiguous, on any device, in place.

    Raises:
        RemoteProtocolError: if the payload is not a legal one for ``out.numel()`` values; ``out`` is untouched.
        LocalProtocolError: if ``out`` or ``weight`` is unfit; ``out`` is untouched.
    """
    _check(out, (torch.float32,), "the accumulator")
    factor = float(fp4.check_weight(weight))
    scale_bytes, code_bytes = fp4.parts(payload, out.numel())
    pairs = torch.from_numpy(PAIRS.view(np.float32).reshape(256, 2).copy()).to(out.device)
    units = torch.from_numpy(SCALES.copy()).to(out.device).index_select(0, _to_index(scale_bytes, out.device))
    for start in range(0, out.numel(), CHUNK):
        stop = min(start + CHUNK, out.numel())
        codes = _to_index(code_bytes[start // 2 : (stop + 1) // 2], out.device)
        first, last = start // BLOCK, -(-stop // BLOCK)
        values = torch.zeros((last - first) * BLOCK, dtype=torch.float32, device=out.device)
        values[: 2 * codes.numel()] = pairs.index_select(0, codes).view(-1)
        values.view(-1, BLOCK).mul_(units[first:last].unsqueeze(1))
        values.mul_(factor)
        out[start:stop].add_(values[: stop - start])


def _check(x: Tensor, dtypes: tuple[torch.dtype, ...], what: str) -> None:
    """Refuse anything but a flat, contiguous tensor of one of the dtypes."""
    if not isinstance(x, Tensor) or x.dtype not in dtypes or x.ndim != 1 or not x.is_contiguous():
        got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise LocalProtocolError(f"{what} must be a contiguous {names} tensor of shape (n,), got {got}")


def _encode_chunk(x: Tensor, top: Tensor, scales: Tensor, codes: Tensor) -> None:
    """Encode up to CHUNK values into their scale and code bytes; ``top`` takes the blocks' largest magnitudes."""
    bits = x.view(torch.int32)
    if bits.numel() < top.numel() * BLOCK:
        bits = torch.nn.functional.pad(bits, (0, top.numel() * BLOCK - bits.numel()))
    magnitudes = (bits & _MAGNITUDE).view(-1, BLOCK)
    torch.amax(magnitudes, dim=1, out=top)
    lowest = (((top + 0x00400000) >> 23).clamp_(min=7) - 7).unsqueeze(1)
    scales.copy_(lowest.view(-1))
    # The sum of a nan's bits wraps around; the caller sees ``top`` and throws the bytes away.
    nibbles = magnitudes.add_(0x00400000).bitwise_right_shift_(23).sub_(lowest).clamp_(min=0).view(-1)
    nibbles |= (bits >> 28) & 8
    pairs = nibbles.view(-1, 2)
    codes.copy_((pairs[:, 0] | (pairs[:, 1] << 4))[: codes.numel()])


def _to_index(part: Bytes, device: torch.device) -> Tensor:
    """Bytes of a payload as indices on the device; they cross as bytes."""
    return torch.from_numpy(part.copy()).to(device).to(torch.int32)


def _refuse(x: Tensor) -> NoReturn:
    """Name the first value that cannot be held."""
    for start in range(0, x.numel(), CHUNK):
        bad = ~(x[start : start + CHUNK].float().abs() < 1.5 * 2.0**127)  # true for nan as well
        if bool(bad.any()):
            index = start + int(bad.int().argmax())
            raise LocalProtocolError(
                f"value {index} of an outer gradient is {x[index].item()}, "
                "but e3m0 holds finite values below 1.5 * 2**127 only"
            )
    raise LocalProtocolError("an outer gradient was changed while it was encoded")
