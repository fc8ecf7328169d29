"""The errors of Stretto, in one tree, so that a caller can tell whose fault it was.

    StrettoError                 anything that Stretto itself reports; str(error) is one clear paragraph
      ConfigError                what a person wrote (file, flag, variable, invite) cannot be used
      ProtocolError              a rule of the protocol was broken
        LocalProtocolError       ... by this program: a bug here
        RemoteProtocolError      ... by a peer: it loses its place in the round, nothing more

A message names the thing and the cure. The command line prints it and exits with 1; a traceback is shown only with
``--debug``.
"""


class StrettoError(Exception):
    """The root: everything Stretto reports on purpose."""


class ConfigError(StrettoError, ValueError):
    """A run config, node config, invite or flag that cannot be used as it is."""


class ProtocolError(StrettoError):
    """A rule of the protocol was broken."""


class LocalProtocolError(ProtocolError):
    """This program broke a rule: always a bug, never the network's fault."""


class RemoteProtocolError(ProtocolError):
    """A peer broke a rule.

    ``peer`` is its id in base58, or None where the sender is not known yet.
    """

    def __init__(self, why: str, peer: str | None = None) -> None:
        super().__init__(f"peer {peer}: {why}" if peer else why)
        self.why = why
        self.peer = peer
