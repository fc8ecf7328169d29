"""The reduction in parts (butterfly): who averages which part of a fragment, and how far it has got.

A group of up to ``ALL_GATHER`` members sends every contribution to everybody: one network step, and nothing is encoded
twice. In a larger group each member reduces a part: it gets that slice of every contribution, averages them in FP32 in
peer-id order, encodes the average once and sends the same bytes to all. So all members hold the same bits, and with
payloads of ``up`` and ``down`` bytes each of M members sends

    (M - 1) / M * (up + down)    instead of    (M - 1) * up                     (in the mean, equal shares)

Shares are in proportion to the uplinks that members announce; who announces 0 (a peer in client mode) reduces nothing.
A share is cut into a few parts, so that the first averages travel while later slices still arrive (reduce-scatter and
all-gather overlap). Parts begin at multiples of the codecs' blocks, so a slice of an encoded contribution is what
encoding the slice would give, and nothing is encoded per part.

When a member falls out, the coordinator makes a new *plan*: the same parts, another attempt, fewer members counted,
and for the parts of a lost reducer the next one in line, to whom all send that slice again from what they still hold.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from stretto.protocol import messages as m
from stretto.protocol.chain import Part
from stretto.protocol.digest import digest
from stretto.protocol.fp4_numpy import BLOCK

ALL_GATHER = 3
"""Largest group that exchanges whole contributions."""

PARTS_PER_SHARE = 4
"""Into how many parts a share is cut at most."""

MIN_PART = 1 << 18
"""Values. Shares are not cut into smaller parts: each costs a message and a digest."""

MAX_ATTEMPTS = 8
"""Plans of one group. Each needs a loss, so a group that comes here is beyond help."""

UPLINK_BOUND = 16
"""No share is larger than this multiple of the median one, whatever uplink its reducer claims."""


def mean_bytes(members: int, up: int, down: int) -> float:
    """Bytes that each member of a group must send in the mean, for payloads of ``up`` and ``down`` bytes."""
    if members <= ALL_GATHER:
        return float((members - 1) * up)
    return (members - 1) / members * (up + down)


def group_digest(group: m.Group) -> bytes:
    """What names a group in the headers of bulk transfers."""
    return digest("group", [m.encode(group)])


def cut_shares(numel: int, uplinks: Mapping[bytes, float]) -> tuple[m.Share, ...]:
    """Parts of ``numel`` values for these reducers, in proportion to ``uplinks`` (bytes per second, 0 for none).

    () if nobody can reduce or there is nothing to.
    """
    able = {peer: uplink for peer, uplink in sorted(uplinks.items()) if uplink > 0}
    if not able or numel <= 0:
        return ()
    bound = UPLINK_BOUND * median_low(able.values())  # of two, one may lie
    total = sum(min(uplink, bound) for uplink in able.values())
    blocks = -(-numel // BLOCK)
    shares: list[m.Share] = []
    done, sum_before = 0, 0.0
    for peer, uplink in able.items():
        sum_before += min(uplink, bound)
        until = round(blocks * sum_before / total)
        shares += [m.Share(peer, min(stop * BLOCK, numel)) for stop in _cut(done, until)]
        done = until
    return tuple(shares)


def _cut(first: int, last: int) -> Iterable[int]:
    """The ends of at most ``PARTS_PER_SHARE`` parts of blocks first..last."""
    blocks = last - first
    count = max(1, min(PARTS_PER_SHARE, blocks * BLOCK // MIN_PART))
    return [] if blocks <= 0 else [first + blocks * (i + 1) // count for i in range(count)]


@dataclass
class Parts:
    """One member's view of an exchange in parts: what it reduces, which slices and averages are here."""

    me: bytes
    group: m.Group
    attempt: int = 0
    counted: tuple[bytes, ...] = ()
    """Whose contributions the present attempt averages, in peer-id order."""
    reducers: tuple[bytes, ...] = ()
    """Who reduces each part in the present attempt."""
    slices: dict[int, set[bytes]] = field(default_factory=dict)
    """Per part: whose slices are here."""
    averages: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Digests of the averages that are here, by attempt and part."""
    _begun: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.counted = tuple(member.peer for member in self.group.members)
        self.reducers = tuple(share.reducer for share in self.group.shares)

    @property
    def mine(self) -> list[int]:
        """Parts that this peer reduces in the present attempt."""
        return [part for part, reducer in enumerate(self.reducers) if reducer == self.me]

    def of(self, reducer: bytes) -> tuple[int, ...]:
        """Parts of another reducer."""
        return tuple(part for part, peer in enumerate(self.reducers) if peer == reducer)

    def bounds(self, part: int) -> tuple[int, int]:
        """Values start..stop of a part."""
        shares = self.group.shares
        return (shares[part - 1].stop if part else 0), shares[part].stop

    def adopt(self, plan: m.Plan) -> dict[bytes, tuple[int, ...]]:
        """Go over to a later attempt. Returns to whom which slices must now be sent that went to others before."""
        moved: dict[bytes, list[int]] = {}
        for part, (old, new) in enumerate(zip(self.reducers, plan.reducers, strict=True)):
            if new not in (old, self.me):
                moved.setdefault(new, []).append(part)
        self.attempt, self.counted, self.reducers = plan.attempt, plan.counted, plan.reducers
        return {peer: tuple(parts) for peer, parts in moved.items()}

    def slice_here(self, owner: bytes, part: int) -> None:
        """The slice of ``owner`` is here."""
        self.slices.setdefault(part, set()).add(owner)

    def ready(self) -> list[int]:
        """Own parts whose counted slices are all here and whose reduction has not begun; it begins now."""
        found = []
        for part in self.mine:
            key = (self.attempt, part)
            if key not in self._begun and self.slices.get(part, set()) >= set(self.counted):
                self._begun.add(key)
                found.append(part)
        return found

    def held(self) -> tuple[bytes, ...]:
        """Members whose slices of all own parts are here, in peer-id order."""
        peers = {member.peer for member in self.group.members}
        for part in self.mine:
            peers &= self.slices.get(part, set())
        return tuple(sorted(peers))

    def complete(self) -> tuple[bytes, ...] | None:
        """Digests of all averages of the present attempt, None while one is missing."""
        found = [self.averages.get((self.attempt, part)) for part in range(len(self.reducers))]
        return None if None in found else tuple(x for x in found if x is not None)

    def as_parts(self, digests: Sequence[bytes]) -> tuple[Part, ...]:
        """Averages in the form of a commit record."""
        return tuple(Part(share.stop, payload) for share, payload in zip(self.group.shares, digests, strict=True))

    def missing_reducers(self) -> set[bytes]:
        """Reducers from whom an average of the present attempt is missing here."""
        parts = enumerate(self.reducers)
        return {reducer for part, reducer in parts if (self.attempt, part) not in self.averages}

    def replan(self, able: Sequence[bytes], counted: Collection[bytes]) -> m.Plan | None:
        """The next attempt if only ``able`` peers (not empty) can reduce and only ``counted`` count; None if same."""
        order = sorted(able)
        reducers = []
        for part, reducer in enumerate(self.reducers):
            after = [peer for peer in order if peer > reducer] or order
            reducers.append(reducer if reducer in able else after[part % len(after)])
        kept = tuple(peer for peer in self.counted if peer in counted)
        if (kept, tuple(reducers)) == (self.counted, self.reducers) or not kept:
            return None
        group = self.group
        return m.Plan(group.fragment, group.round, self.attempt + 1, kept, tuple(reducers))
