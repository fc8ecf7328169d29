"""Catching up by replay: the missed commits of a fragment, checked one after the other and computed anew.

The state after a commit follows from the state before it and the bytes that the record names: the members' encoded
contributions (``wire.up``), or for an exchange in parts the encoded averages (``wire.down``). So a peer that is behind
fetches those bytes, repeats the outer step, and compares the digest of the result with the record's. In bits per
weight a missed round costs its members times 4 with E3M0, or 8 with int8 averages, where anchor and momentum cost 64.

Each result is installed like that of a round of one's own, so a contribution of this peer that was counted in a missed
round is merged and never contributed again.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from stretto.protocol.chain import CommitRecord, SignedRecord, Tip, after, check_extends
from stretto.protocol.codecs import Codec
from stretto.protocol.digest import payload_digest
from stretto.protocol.errors import RemoteProtocolError
from stretto.protocol.streaming import Reduced, StreamingDiLoCo


class Unproven(RemoteProtocolError):
    """A record may well be lawful, yet it cannot be shown from here: the state has to be downloaded instead."""


def check_records(
    records: Sequence[SignedRecord],
    tip: Tip,
    last: SignedRecord | None,
    *,
    run: bytes,
    verify: Callable[[bytes, bytes, bytes], bool],
    resigned: Collection[bytes] = (),
) -> None:
    """RemoteProtocolError unless ``records`` continue the chain that ends at ``tip`` with the record ``last``.

    Clocks need only run forwards: many rounds of other fragments, each with its own bounded change, lie between two
    records. Who had resigned at the time is not known now, so a record without a quorum is ``Unproven`` and not a lie.
    """
    for signed in records:
        record = signed.record
        if record.run != run:
            raise RemoteProtocolError("a commit of another run was sent")
        if not verify(record.coordinator, record.signed_bytes(), signed.signature):
            raise RemoteProtocolError(f"the commit of version {record.version} has a wrong signature")
        if not tip.quorum({member.peer for member in record.members}, resigned):
            raise Unproven(f"the commit of version {record.version} has no quorum among the electors known here")
        # With its own clock in the place of the previous one this leaves out only how clocks follow each other.
        check_extends(record, tip, record.clock, resigned)
        if last is not None and not (record.round > last.record.round and record.clock.at >= last.record.clock.at):
            raise RemoteProtocolError(f"the commit of version {record.version} is older than the one before it")
        tip, last = after(record), signed


def sizes(record: CommitRecord, numel: int, up: Codec, down: Codec) -> dict[bytes, int]:
    """Bytes of everything that ``record`` was made from, by digest. RemoteProtocolError if its parts do not fit."""
    if not record.parts:
        return {member.payload: up.nbytes(numel) for member in record.members}
    if record.parts[-1].stop != numel:
        raise RemoteProtocolError(f"the parts of a commit hold {record.parts[-1].stop} values, not {numel}")
    found: dict[bytes, int] = {}
    for start, part in zip([0, *(part.stop for part in record.parts)], record.parts, strict=False):
        nbytes = down.nbytes(part.stop - start)
        if found.setdefault(part.payload, nbytes) != nbytes:
            raise RemoteProtocolError("two parts of a commit have one digest and two sizes")
    return found


def recompute(diloco: StreamingDiLoCo, record: CommitRecord, payloads: Mapping[bytes, bytes]) -> Reduced:
    """The state after ``record`` on copies, from the present one and ``payloads`` by digest; heavy, any thread.

    RemoteProtocolError if a payload is not what its digest says or does not decode. Whether the result is the state
    that the record names is checked by ``StreamingDiLoCo.install``.
    """
    for digest in record.payloads():
        if payload_digest(payloads[digest]) != digest:
            raise RemoteProtocolError("the bytes behind a commit do not match their digest")
    if not record.parts:
        return diloco.reduce(record.fragment, record.members, payloads)
    return diloco.apply(record.fragment, record.parts, payloads)
