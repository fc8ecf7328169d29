"""A round that goes on at a peer, with the bytes that belong to it.

``stretto.protocol.rounds`` knows what is agreed and what is missing, by digests; here are the bytes themselves:
contributions, slices of them and averages. Each member of a group may leave one contribution, or one slice of each
part that is reduced here, so what others send is bounded by the size of the group.
"""

from dataclasses import dataclass, field

from stretto.protocol import messages as m
from stretto.protocol import outer
from stretto.protocol.actions import Basis, Push, PushAverage, ReducePart
from stretto.protocol.chain import SignedRecord
from stretto.protocol.codecs import Codec
from stretto.protocol.effects import PartWork, PushAverageTo, PushTo, Work
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.rounds import Round
from stretto.protocol.streaming import Contribution, Reduced


@dataclass
class LiveRound:
    """A round that is going on, or is kept a while for those who ask."""

    round: Round
    departed: float
    payloads: dict[bytes, bytes]
    """By digest: contributions, and encoded averages."""
    owners: set[bytes] = field(default_factory=set)
    """Whose contributions are here: each member has one, and cannot fill the memory with more."""
    slices: dict[tuple[bytes, int], bytes] = field(default_factory=dict)
    """Slices of the others' contributions that are here, by owner and part."""
    group: bytes | None = None
    """The group that slices belong to."""
    contribution: Contribution | None = None
    reduced: tuple[Basis, Reduced] | None = None
    installing: SignedRecord | None = None
    over: bool = False

    def wants_slice(self, sender: bytes, push: m.Push, *, me: bytes, codec: Codec) -> str | None:
        """Why a contribution from ``sender``, or a slice of it, is not wanted by ``me``; None if it is."""
        parts, numel = self.round.parts, self.round.numel
        if parts is None:
            # Not by digest: two peers may contribute the same bytes.
            if sender in self.owners:
                return "already here"
            assert self.round.group is not None
            if not any((x.peer, x.payload) == (sender, push.payload) for x in self.round.group.members):
                return "not what the group was told of"
        else:
            if push.part not in parts.mine:
                return f"part {push.part} is not reduced here"
            if sender == me or (sender, push.part) in self.slices:
                return "already here"
            start, stop = parts.bounds(push.part)
            numel = stop - start
        due = codec.nbytes(numel)
        return None if push.nbytes == due else f"{push.nbytes} bytes where {due} are due"

    def wants_average(self, sender: bytes, average: m.Average, *, down: Codec) -> str | None:
        """Why an average from ``sender``, encoded with ``down``, is not wanted; None if it is."""
        parts = self.round.parts
        if parts is None or average.part >= len(parts.reducers):
            return "no such part"
        if average.attempt != parts.attempt:
            return f"attempt {average.attempt} while {parts.attempt} is going on"
        # The coordinator passes on the averages of a reducer that was lost.
        if sender not in (parts.reducers[average.part], self.round.coordinator):
            return f"part {average.part} is reduced by another peer"
        if (average.attempt, average.part) in parts.averages:
            return "already here"
        start, stop = parts.bounds(average.part)
        due = down.nbytes(stop - start)
        return None if average.nbytes == due else f"{average.nbytes} bytes where {due} are due"

    def push(self, action: Push) -> PushTo:
        """What the own contribution's way to a member is: its parts, or all of it."""
        assert self.contribution is not None
        assert self.round.group_id is not None
        numel, parts = self.round.numel, self.round.parts
        cuts = tuple((part, *parts.bounds(part)) for part in action.parts) if parts else ((0, 0, numel),)
        return PushTo(action.to, self.round.round, self.round.group_id, self.contribution, cuts, numel)

    def push_average(self, action: PushAverage) -> PushAverageTo:
        """A part that was averaged here, for a member."""
        assert self.round.parts is not None
        assert self.round.group_id is not None
        name = self.round.parts.averages[action.attempt, action.part]
        data = self.payloads[name]
        place = (self.round.fragment, self.round.round, self.round.group_id)
        return PushAverageTo(action.to, m.Average(*place, action.attempt, action.part, name, len(data)), data)

    def part_work(self, action: ReducePart, *, me: bytes, codec: Codec) -> PartWork:
        """The average of a part, from the slices that are here."""
        assert self.round.parts is not None
        assert self.round.group_id is not None
        start, stop = self.round.parts.bounds(action.part)
        assert self.contribution is not None
        mine = codec.cut(self.contribution.payload, self.round.numel, start, stop)
        others = self.slices
        slices = tuple(mine if x.peer == me else others[x.peer, action.part] for x in action.members)
        return PartWork(self.round.round, self.round.fragment, self.round.group_id, action, slices, stop - start)

    def work(self, basis: Basis) -> Work:
        """The outer step from what the round agreed on."""
        names = [x.payload for x in (basis.parts or basis.members)]
        payloads = {name: self.payloads[name] for name in names}
        return Work(self.round.round, self.round.fragment, basis, payloads)


def decoded_norm(codec: Codec, payload: bytes, numel: int) -> float:
    """L2 norm of an encoded vector, decoded chunk by chunk; RemoteProtocolError if it is malformed."""
    if len(payload) != codec.nbytes(numel):
        raise RemoteProtocolError(f"{len(payload)} bytes where {codec.nbytes(numel)} are due")
    total = 0.0
    for start in range(0, numel, outer.CHUNK):
        stop = min(start + outer.CHUNK, numel)
        total += outer.norm(codec.decode(codec.cut(payload, numel, start, stop), stop - start)) ** 2
    return float(total**0.5)
