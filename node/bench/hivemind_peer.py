"""A peer of hivemind for ``stretto bench round``: its DHT and DecentralizedAverager as they are, with their processes.

One round is one ``DecentralizedAverager.step()`` over one tensor, in two halves. ``match`` calls ``step`` with
``require_trigger``, so that it finds its group and waits; its seconds are the matchmaking's, from the common start to
the full group (the averager does not wait for its scheduled time when the group is full). ``reduce`` lets it go on;
its seconds are the all-reduce's, from a second common start to the result in the tensor.

Under numpy 2.4 and later hivemind's 8-bit ``extract`` fails, because it makes an int of an array with one element.
``mend_extract`` repairs that, and the report says so.
"""

import concurrent.futures
import time
from typing import Any

import numpy as np
import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.averaging.partition import AllreduceException
from hivemind.compression import CompressionInfo, Float16Compression, NoCompression, Uniform8BitQuantization
from hivemind.p2p import P2P

CODECS = {"none": NoCompression, "float16": Float16Compression, "uniform8": Uniform8BitQuantization}
LIMIT = 60.0
"""Seconds for each half of a step. The averager's own times are hivemind's defaults."""
POLL = 0.005
NOISE = 1e-3
FAILED = (AllreduceException, MatchmakingException, TimeoutError, concurrent.futures.TimeoutError)
"""What a step that came to nothing raises."""


class HivemindPeer:
    """One peer with ``numel`` float32. Methods are requests."""

    def __init__(self, *, numel: int, seed: int, folder: str, dial: list[str]) -> None:
        P2P._UNIX_SOCKET_PREFIX = f"/unix{folder}/"
        self.numel = numel
        self.noise = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).mul_(NOISE)
        self.patched = mend_extract()
        self.dht = DHT(initial_peers=dial, start=True)
        self.averager: DecentralizedAverager | None = None
        self.control: StepControl | None = None

    def opened(self) -> dict[str, Any]:
        """Where this peer listens."""
        return {"address": str(self.dht.get_visible_maddrs()[0])}

    def average(self, *, codec: str, peers: int) -> dict[str, Any]:
        """Start an averager for groups of ``peers``, no fewer; the one before is ended."""
        self._end_averager()
        self.averager = DecentralizedAverager(
            [self.noise.clone()],
            self.dht,
            start=True,
            prefix=f"bench_{codec}",
            target_group_size=peers,
            min_group_size=peers,
            compression=CODECS[codec](),
            allreduce_timeout=LIMIT,
        )
        return {"patched": self.patched and codec == "uniform8"}

    def match(self, *, at: float) -> dict[str, Any]:
        """Begin a step at Unix time ``at``; the seconds until it has its group, and whether it found one."""
        assert self.averager is not None
        with self.averager.get_tensors() as tensors:
            tensors[0].add_(self.noise)
        began = _begin(at)
        self.control = self.averager.step(gather={}, timeout=LIMIT, require_trigger=True, wait=False)
        while self.control.stage not in (AveragingStage.AWAITING_TRIGGER, AveragingStage.FINISHED):
            time.sleep(POLL)
        found = self.control.stage is AveragingStage.AWAITING_TRIGGER
        return {"seconds": time.perf_counter() - began, "ok": found}

    def abandon(self) -> dict[str, Any]:
        """Give up a step that others did not find their way into."""
        if self.control is not None and not self.control.done():
            self.control.cancel()
        return {"ok": True}

    def reduce(self, *, at: float) -> dict[str, Any]:
        """Let the step go on at Unix time ``at``; the seconds until the average is here, and whether it came."""
        assert self.control is not None
        began = _begin(at)
        self.control.allow_allreduce()
        try:
            group = self.control.result(timeout=LIMIT)
        except FAILED:
            group = None
        return {"seconds": time.perf_counter() - began, "ok": group is not None}

    def close(self) -> dict[str, Any]:
        """End averager and DHT with their processes."""
        self._end_averager()
        self.dht.shutdown()
        return {"closed": True}

    def _end_averager(self) -> None:
        self.control = None
        if self.averager is not None:
            self.averager.shutdown()
            self.averager = None


def _begin(at: float) -> float:
    """Wait until Unix time ``at``; that moment on the performance counter."""
    time.sleep(max(0.0, at - time.time()))
    return time.perf_counter() - max(0.0, time.time() - at)


def mend_extract() -> bool:
    """Let hivemind's 8-bit ``extract`` work under present versions of numpy; whether that was needed."""
    if Uniform8BitQuantization.extract is _extract:
        return True  # a process serves several peers, one after the other
    codec, values = Uniform8BitQuantization(), torch.linspace(-1, 1, 256)
    message = codec.compress(values, CompressionInfo.from_tensor(values))
    try:
        codec.extract(message)
    except TypeError:
        Uniform8BitQuantization.extract = _extract
        return True
    return False


def _extract(self: Uniform8BitQuantization, message: Any) -> torch.Tensor:
    """hivemind's layout: an int64 with the codebook's length, the codebook, one index per value."""
    data = np.frombuffer(message.buffer, dtype=np.uint8)
    stop = 8 + int(data[:8].view(np.int64)[0]) * np.dtype(self.codebook_dtype).itemsize
    codebook = torch.from_numpy(data[8:stop].view(self.codebook_dtype).copy())
    indices = torch.from_numpy(data[stop:].astype(np.int64)).reshape(tuple(message.size))
    return codebook.to(getattr(torch, message.dtype))[indices].requires_grad_(message.requires_grad)
