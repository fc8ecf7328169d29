"""Who is asked for what in a repair: decisions only, with the clock handed in. The sockets are in ``node/swarm``.

Bytes that several peers have (chunks of a state, payloads of missed commits) are *pieces*; a peer that is asked is a
*donor*. Each donor has one request at a time, for the first piece that nobody is fetching, so a donor serves as much
as its line allows and the pieces come roughly in order. What befalls a donor:

    busy        asked again when it said
    missing     it lacks this piece: asked for others; three in a row, and it is dropped
    broken      asked again after a pause; three in a row, and it is dropped
    silent      dropped: no byte came within the limit
    lied        dropped, and remembered by the caller (``Ledger.ban``)

A piece that is here is never fetched again, whoever brought it. At the end, when every piece is on its way, a donor
without work fetches one a second time if whoever has it takes far longer than this donor needs: one slow line must not
hold up the last piece.

``Ledger`` is what outlives one attempt: who is banned, when the next attempt may begin (doubling, bounded, with
jitter, so that many peers do not come back at one moment), and when a fragment was last downloaded whole.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from stretto.protocol.errors import LocalProtocolError

TRIES = 3
"""How many times in a row a donor may break off, or lack what it is asked for, until it is dropped."""

PAUSE = 1.0
"""Seconds before a donor that broke off or lacked a piece is asked again."""

MAX_BUSY = 60.0
"""Seconds that a donor may ask for at the most when it is busy."""

GIVE_UP = 90.0
"""Seconds without a piece from anybody after which an attempt ends, though donors are left that say they are busy."""

SLOWER = 3.0
"""In the end a piece is fetched twice when it has taken this many times what the idle donor needs for one."""

BAN = 600.0
"""Seconds for which a donor that sent something false is not asked for this fragment."""

AVOID = 60.0
"""Seconds for which a donor that did not answer is asked after the others."""

FIRST_PAUSE, LONGEST_PAUSE = 2.0, 120.0
"""Seconds until the next attempt after the first failure, and after many."""

JITTER = 0.25
"""Each pause is longer or shorter by up to this share."""

DOWNLOAD_TURNS = 4
"""K: a fragment is downloaded whole at most once while so many of its rounds depart. What is missing then is replayed;
without this a peer whose download outlasts a round would download for ever."""


@dataclass
class _Donor:
    """What is known of one donor."""

    free_at: float
    """Not asked before this time."""
    index: int | None = None
    since: float = 0.0
    broken: int = 0
    lacking: int = 0
    pieces: int = 0
    seconds: float = 0.0
    """Spent on the pieces that came from it."""
    lacks: dict[int, float] = field(default_factory=dict)
    """Pieces that it said it does not have, and until when that is believed."""
    dropped: str = ""


class Pieces:
    """The pieces of one download, each of ``sizes[i]`` bytes, and the donors that may have them."""

    def __init__(self, sizes: Sequence[int], now: float) -> None:
        self.sizes = list(sizes)
        self._here: set[int] = set()
        self._donors: dict[bytes, _Donor] = {}
        self._givers: dict[bytes, None] = {}
        self._progress_at = now

    # ------------------------------------------------------------------ what is here

    @property
    def total_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(self.sizes)

    @property
    def have_bytes(self) -> int:
        """Bytes of the pieces that are here."""
        return sum(self.sizes[index] for index in self._here)

    @property
    def done(self) -> bool:
        """Whether every piece is here."""
        return len(self._here) == len(self.sizes)

    def has(self, index: int) -> bool:
        """Whether this piece is here."""
        return index in self._here

    def givers(self) -> list[bytes]:
        """Donors from whom at least one piece came."""
        return list(self._givers)

    def active(self) -> int:
        """How many donors are being fetched from."""
        return sum(known.index is not None for known in self._donors.values())

    def at_work(self) -> list[bytes]:
        """The donors that are being fetched from."""
        return [donor for donor, known in self._donors.items() if known.index is not None]

    # ------------------------------------------------------------------ donors

    def add(self, donor: bytes, now: float) -> None:
        """``donor`` may be asked from now on."""
        self._donors[donor] = _Donor(free_at=now)
        self._progress_at = now

    def rest(self) -> None:
        """Nobody is asked any more: whatever is under way is given up. What is here stays."""
        self._donors.clear()

    def take(self, donor: bytes, now: float) -> int | None:
        """The piece to fetch from ``donor`` now, None if there is nothing to do for it at the moment."""
        known = self._donors[donor]
        if known.index is not None:
            raise LocalProtocolError("a donor that is asked for a piece already")
        if known.dropped or now < known.free_at or self.done:
            return None
        known.lacks = {index: until for index, until in known.lacks.items() if until > now}
        under_way = self._under_way()
        for index in range(len(self.sizes)):
            if index not in self._here and index not in under_way and index not in known.lacks:
                break
        else:
            found = self._second_time(known, under_way, now)
            if found is None:
                return None
            index = found
        known.index, known.since = index, now
        return index

    def _under_way(self) -> dict[int, list[_Donor]]:
        found: dict[int, list[_Donor]] = {}
        for known in self._donors.values():
            if known.index is not None and known.index not in self._here:
                found.setdefault(known.index, []).append(known)
        return found

    @staticmethod
    def _second_time(known: _Donor, under_way: dict[int, list[_Donor]], now: float) -> int | None:
        """A piece on its way from a much slower donor, the one that has taken longest."""
        if not known.pieces:
            return None
        patience = max(PAUSE, SLOWER * known.seconds / known.pieces)
        late = [
            (fetching[0].since, index)
            for index, fetching in under_way.items()
            if len(fetching) == 1 and index not in known.lacks and now - fetching[0].since > patience
        ]
        return min(late)[1] if late else None

    def _ended(self, donor: bytes) -> tuple[_Donor, int]:
        known = self._donors[donor]
        if known.index is None:
            raise LocalProtocolError("an answer from a donor that was not asked")
        index, known.index = known.index, None
        return known, index

    def arrived(self, donor: bytes, now: float) -> bool:
        """The piece that ``donor`` was asked for came and is what it should be; False if it was here already."""
        known, index = self._ended(donor)
        known.broken = known.lacking = 0
        known.pieces += 1
        known.seconds += now - known.since
        self._givers[donor] = None
        new = index not in self._here
        self._here.add(index)
        self._progress_at = now
        return new

    def busy(self, donor: bytes, seconds: float, now: float) -> None:
        """``donor`` has no time for the next ``seconds``."""
        known, _ = self._ended(donor)
        known.free_at = now + min(max(seconds, PAUSE / 4), MAX_BUSY)

    def missing(self, donor: bytes, why: str, now: float) -> None:
        """``donor`` does not have what it was asked for, at least not now."""
        known, index = self._ended(donor)
        known.lacks[index] = now + TRIES * PAUSE
        known.lacking += 1
        known.free_at = now + PAUSE
        if known.lacking >= TRIES:
            known.dropped = why

    def broken(self, donor: bytes, why: str, now: float) -> None:
        """The connection could not be opened, or broke."""
        known, _ = self._ended(donor)
        known.broken += 1
        known.free_at = now + PAUSE * 2 ** (known.broken - 1)
        if known.broken >= TRIES:
            known.dropped = why

    def drop(self, donor: bytes, why: str) -> None:
        """Ask ``donor`` no more: it was silent for too long, or what it sent is false."""
        known, _ = self._ended(donor)
        known.dropped = why

    def waits_until(self, donor: bytes) -> float | None:
        """When ``donor`` may be asked again; None if never."""
        known = self._donors[donor]
        return None if known.dropped else known.free_at

    def hopeless(self, now: float) -> str | None:
        """Why this download cannot come to an end, None while it can."""
        if self.done:
            return None
        left = [known for known in self._donors.values() if not known.dropped]
        if not left:
            reasons = sorted({known.dropped for known in self._donors.values()})
            return f"none of {len(self._donors)} peer(s) could give it ({'; '.join(reasons)})"
        if now - self._progress_at > GIVE_UP and not self.active():
            return f"{len(left)} peer(s) have it, and none of them had time for {GIVE_UP:.0f} s"
        return None


class Ledger:
    """What is remembered from one attempt to the next."""

    def __init__(self, randomness: random.Random) -> None:
        self._random = randomness
        self._banned: dict[tuple[int, bytes], tuple[float, str]] = {}
        self._failures: dict[int, int] = {}
        self._next: dict[int, float] = {}
        self._downloaded: dict[int, float] = {}
        self._avoided: dict[bytes, float] = {}

    def ban(self, fragment: int, donor: bytes, why: str, now: float) -> None:
        """``donor`` sent something false of ``fragment``."""
        self._banned = {key: value for key, value in self._banned.items() if value[0] > now}
        self._banned[fragment, donor] = (now + BAN, why)

    def banned(self, fragment: int, donor: bytes, now: float) -> str | None:
        """Why ``donor`` is not asked for ``fragment``, None if it may be."""
        until, why = self._banned.get((fragment, donor), (now, ""))
        return why if until > now else None

    def order(self, fragment: int, donors: Collection[bytes], first: bytes | None, now: float) -> list[bytes]:
        """Those of ``donors`` that may be asked: ``first``, the others in random order, so that all get a share.

        Whoever could not be reached or was silent a moment ago comes last.
        """
        usable = sorted(donor for donor in donors if self.banned(fragment, donor, now) is None)
        self._random.shuffle(usable)
        self._avoided = {donor: until for donor, until in self._avoided.items() if until > now}
        return sorted(usable, key=lambda donor: (donor in self._avoided, donor != first))

    def avoid(self, donor: bytes, now: float) -> None:
        """``donor`` did not answer."""
        self._avoided[donor] = now + AVOID

    def failed(self, fragment: int, now: float) -> float:
        """An attempt came to nothing: seconds until the next one."""
        count = self._failures.get(fragment, 0)
        self._failures[fragment] = count + 1
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(count, 30))
        pause *= 1 + JITTER * (2 * self._random.random() - 1)
        self._next[fragment] = now + pause
        return pause

    def succeeded(self, fragment: int) -> None:
        """The fragment is as far as others."""
        self._failures.pop(fragment, None)
        self._next.pop(fragment, None)

    def may_begin(self, fragment: int, now: float) -> bool:
        """Whether the pause after the last failure is over."""
        return now >= self._next.get(fragment, now)

    def downloaded(self, fragment: int, now: float) -> None:
        """A whole state of ``fragment`` was downloaded."""
        self._downloaded[fragment] = now

    def wait_for_download(self, fragment: int, cycle: float, now: float) -> float:
        """Seconds until ``fragment`` may be downloaded whole again; its rounds depart every ``cycle`` seconds."""
        last = self._downloaded.get(fragment)
        return 0.0 if last is None else max(0.0, last + DOWNLOAD_TURNS * cycle - now)
