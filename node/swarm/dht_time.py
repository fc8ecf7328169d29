"""The DHT's idea of what time it is.

hivemind compares every expiry with ``get_dht_time``, which is ``time.time`` under another name: where this machine's
clock is 25 s ahead, records of 20 s are dead on arrival, and where it is behind, others drop the ones made here. So
that name is pointed at swarm time. hivemind's modules import it by value, so it is replaced in each of them.

There is one DHT time per process, as there is one peer per process.
"""

from collections.abc import Callable

import hivemind.dht.node
import hivemind.dht.protocol
import hivemind.dht.routing
import hivemind.utils
import hivemind.utils.timed_storage

_MODULES = (
    hivemind.dht.node,
    hivemind.dht.protocol,
    hivemind.dht.routing,
    hivemind.utils,
    hivemind.utils.timed_storage,
)


def set_dht_time(now: Callable[[], float]) -> None:
    """Let the DHT of this process go by ``now`` (seconds)."""
    for module in _MODULES:
        if not hasattr(module, "get_dht_time"):
            raise RuntimeError(f"{module.__name__} has no get_dht_time: another hivemind than this was written for")
        module.get_dht_time = now
