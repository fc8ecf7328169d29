"""How many bytes may be on their way: windows that keep queues short, after the idea of LEDBAT (RFC 6817) and Vegas.

A sender that may have much on its way fills the queues of its modem and router, and a control message waits behind all
of it. Losses come too late to notice; delays do not. Every chunk is acknowledged with the receiver's clock. With

    forward = receiver's clock - sent      round = acknowledged - sent      (clocks differ by a constant)
    queued  = forward - least forward seen in the last minutes, but not more than round - least round, and
              at most BACK less than that

a window moves, per acknowledged byte, by GAIN * (1 - queued / TARGET), at least by -GAIN: it grows while queues are
shorter than TARGET and shrinks when they are longer. The forward delay is what counts, since acknowledgements wait in
the *receiver's* queue when both send at once; the round trip bounds what a receiver's clock can make us believe.

There is one window per peer, for the path to it, and one for the whole line. A slow receiver makes its own path long
and no other one; our own uplink makes all of them long. So the line's window follows the shortest queue of the paths
in use. A peer that stopped answering does not count in the line's window after STALL seconds, lest it starve others.
A path that was never measured on an idle line is taken to be at most USUAL long: its first chunk may have waited
behind our own, and who takes that wait for the way's length adds a queue on top. Values in, values out: times in
seconds are handed in.
"""

from dataclasses import dataclass, field

LEAST_CHUNK = 16 * 1024
MOST_CHUNK = 1024 * 1024
"""Bytes that are granted and acknowledged at once, a quarter of the window within these bounds."""

START = 64 * 1024
LEAST = 32 * 1024
LEAST_PATH = LEAST_CHUNK
MOST = 8 * 1024 * 1024
"""Bytes on their way: at first, and at least and at most; for one path at least LEAST_PATH."""

TARGET = 0.25
"""Seconds that bulk data may queue."""

BACK = 0.5
"""Seconds: the longest wait on the way back that a receiver's clock can explain."""

USUAL = 0.2
"""Seconds: a round trip, with a chunk's own time on the line, is usually shorter."""

GAIN = 0.5
STALL = 3.0
"""Seconds without an acknowledgement after which a path's bytes are not counted in the line's window."""

MEMORY = 300.0
"""Seconds; the least delay is that of one to two such spans, so that a longer route is learnt in the end."""

RECENT = 2.0
MOST_PATHS = 256


@dataclass
class Least:
    """The least value of the present and the last span of MEMORY seconds."""

    _spans: tuple[float, float] = (float("inf"), float("inf"))
    _since: float = float("-inf")

    def put(self, value: float, now: float) -> float:
        """The least value, ``value`` included."""
        if now - self._since > MEMORY:
            self._spans, self._since = (value, self._spans[0]), now
        else:
            self._spans = (min(value, self._spans[0]), self._spans[1])
        return min(self._spans)

    def restart(self, value: float, now: float) -> None:
        """Forget all but ``value``."""
        self._spans, self._since = (value, value), now


@dataclass
class Path:
    """What is known of the way to one peer."""

    size: float = START
    """The window in bytes."""
    in_flight: int = 0
    moved_at: float = 0.0
    """Last acknowledgement, or when bytes were first on their way again."""
    queued: float = 0.0
    """Seconds that the last acknowledged chunk spent in queues."""
    heard_at: float = float("-inf")
    forward: Least = field(default_factory=Least)
    around: Least = field(default_factory=Least)
    trusted: bool = False
    """The least delays were measured without our own queue."""

    def measure(self, sent: float, stamp: float, now: float, *, idle: bool) -> None:
        """A chunk left at ``sent``, was there at ``stamp`` of the receiver's clock, and was acknowledged ``now``.

        ``idle``: nothing else was on its way then, so that this is the length of the way. A path that has only been
        measured behind our own queue would take that for its length, and is taken to be at most USUAL long.
        """
        first = now - self.heard_at > MEMORY
        if first or (idle and not self.trusted):
            queued = 0.0 if idle else max(0.0, now - sent - USUAL)
            self.around.restart(now - sent - queued, now)
            self.forward.restart(stamp - sent - queued, now)
            self.trusted = idle
        around = (now - sent) - self.around.put(now - sent, now)
        forward = (stamp - sent) - self.forward.put(stamp - sent, now)
        if forward > around + 1.0:
            # More than the whole way took: the receiver's clock is another one now, say after a restart.
            self.forward.restart(stamp - sent, now)
        self.queued = min(around, max(forward, around - BACK))
        self.heard_at = now


class Window:
    """All paths of a node and its line."""

    def __init__(self) -> None:
        self.size: float = START
        """The line's window in bytes."""
        self._paths: dict[bytes, Path] = {}

    def path(self, to: bytes) -> Path:
        """What is known of the way to ``to``."""
        found = self._paths.get(to)
        if found is None:
            if len(self._paths) >= MOST_PATHS:
                self._paths = {peer: path for peer, path in self._paths.items() if path.in_flight}
            found = self._paths[to] = Path()
        return found

    @property
    def in_flight(self) -> int:
        """Bytes on their way to all peers."""
        return sum(path.in_flight for path in self._paths.values())

    def chunk(self, to: bytes) -> int:
        """A good size for the next chunk to ``to``."""
        quarter = int(min(self.path(to).size, self.size)) // 4 // 4096 * 4096
        return min(MOST_CHUNK, max(LEAST_CHUNK, quarter))

    def line_has_room(self, nbytes: int, now: float, share: float = 1.0) -> bool:
        """Whether the line takes ``nbytes`` more within ``share`` of its window. An empty one always does."""
        counted = sum(p.in_flight for p in self._paths.values() if p.in_flight and now - p.moved_at < STALL)
        return counted == 0 or counted + nbytes <= share * self.size

    def path_has_room(self, to: bytes, nbytes: int) -> bool:
        """Whether the path takes ``nbytes`` more. An empty one always does."""
        path = self.path(to)
        return path.in_flight == 0 or path.in_flight + nbytes <= path.size

    def take(self, to: bytes, nbytes: int, now: float) -> None:
        """``nbytes`` are on their way."""
        path = self.path(to)
        if path.in_flight == 0:
            path.moved_at = now
        path.in_flight += nbytes

    def give_back(self, to: bytes, nbytes: int) -> None:
        """``nbytes`` are not on their way any more, although nobody acknowledged them."""
        self.path(to).in_flight -= nbytes

    def acknowledged(
        self, to: bytes, nbytes: int, sent: float, stamp: float, now: float, *, idle: bool = False
    ) -> None:
        """``nbytes`` arrived; the last left at ``sent``, the line being ``idle``, and were there at ``stamp``."""
        path, whole = self.path(to), self.in_flight
        path.measure(sent, stamp, now, idle=idle)
        path.moved_at = now
        path.size = _moved(path.size, path.queued, nbytes, path.in_flight, LEAST_PATH)
        recent = [p.queued for p in self._paths.values() if p.in_flight and now - p.heard_at < RECENT]
        self.size = _moved(self.size, min(recent), nbytes, whole, LEAST)
        path.in_flight -= nbytes


def _moved(size: float, queued: float, nbytes: int, in_flight: int, least: int) -> float:
    """A window after ``nbytes`` were acknowledged. It only grows when it was used, or it would grow without a test."""
    push = max(-1.0, 1.0 - queued / TARGET)
    if push > 0 and in_flight < size / 2:
        return size
    gain = 1.0 if queued < TARGET / 4 else GAIN
    return min(float(MOST), max(float(least), size + gain * push * nbytes))
