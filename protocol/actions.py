"""What a round needs to know, what it wants done, and how it can end: the words between a ``Round`` and its driver."""

from dataclasses import dataclass, replace
from typing import TypeAlias

from stretto.protocol import messages as m
from stretto.protocol.chain import Member, Part, SignedRecord


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a round needs to know of the run config, and its time limits in seconds."""

    inner_steps: int
    fragments: int
    min_group: int
    max_group: int
    window: float
    """How long a coordinator waits for expected peers after the departure."""
    margin: float = 3.0
    """How much longer a member waits than the coordinator should need."""
    min_exchange: float = 6.0
    """An exchange may always take this long, however impatient the members are and however fast their lines."""
    ask_wait: float = 2.0
    """How long to wait for answers to Ask, and for a fetched payload before the next holder is tried."""

    def within(self, cycle: float) -> "Rules":
        """These rules for a run whose fragments leave every ``cycle`` seconds: no wait may outlast the round's turn.

        Without it a silent peer holds every round until the fragment's next one overtakes it. Below a few
        seconds waits are not shortened: on a busy machine messages take their time.
        """

        def capped(wait: float, share: float, least: float) -> float:
            return min(wait, max(least, share * cycle))

        return replace(
            self,
            window=capped(self.window, 1 / 4, 2.0),
            margin=capped(self.margin, 1 / 4, 1.0),
            min_exchange=capped(self.min_exchange, 1 / 2, 4.0),
            ask_wait=capped(self.ask_wait, 1 / 8, 0.5),
        )


@dataclass(frozen=True)
class Basis:
    """What a fragment's next state is made from: whose contributions, and their encoded averages.

    Without ``parts`` the contributions themselves are averaged; with them only the parts' bytes are needed.
    """

    members: tuple[Member, ...]
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Send:
    """Deliver a control message."""

    to: bytes
    message: m.Message


@dataclass(frozen=True)
class Push:
    """Send these parts of the own contribution to a member; () is the whole of it."""

    to: bytes
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class PushAverage:
    """Send an averaged part to a member."""

    to: bytes
    attempt: int
    part: int


@dataclass(frozen=True)
class Fetch:
    """Get bytes by digest from a peer that should hold them: a contribution, or an averaged part of so many values."""

    source: bytes
    payload: bytes
    numel: int | None = None


@dataclass(frozen=True)
class ReducePart:
    """Average this part of the members' contributions and encode it; report its digest through ``part_reduced``."""

    attempt: int
    part: int
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Reduce:
    """Take the outer step from ``basis`` on a copy; report the digest of the state after it through ``reduced``."""

    basis: Basis


@dataclass(frozen=True)
class Committed:
    """The round is decided and every payload is here."""

    signed: SignedRecord


@dataclass(frozen=True)
class Aborted:
    """Nothing changed."""

    reason: str


@dataclass(frozen=True)
class Outrun:
    """The fragment's chain goes on elsewhere: this peer must repair, for example from ``source``."""

    source: bytes
    reason: str


Outcome: TypeAlias = Committed | Aborted | Outrun


@dataclass(frozen=True)
class Finish:
    """The round is over for this peer."""

    outcome: Outcome


Action: TypeAlias = Send | Push | PushAverage | Fetch | ReducePart | Reduce | Finish
