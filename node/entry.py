"""The command ``stretto`` begins here, so that Ctrl-C is answered quietly from the first moment on.

Reading the command line takes a tenth of a second of imports. An interrupt in that time would end in a traceback from
the middle of somebody's module; here it ends with 130, as later. What may live here imports nothing of weight.

In a container this program may be process 1. The kernel keeps from it every signal that it has no handler for, so that
`docker stop` would wait for its grace period to end, and then kill: process 1 has a handler for SIGTERM from here on.
"""

import os
import signal


def main() -> None:
    """Run the command line."""
    quiet = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if quiet:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    from stretto.node.cli import main as run

    if quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
