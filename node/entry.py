"""The command ``stretto`` begins here, so that Ctrl-C is answered quietly from the first moment on.

Reading the command line takes a tenth of a second of imports. An interrupt in that time would end in a traceback from
the middle of somebody's module; here it ends with 130, as later. What may live here imports nothing of weight.
"""

import os
import signal


def main() -> None:
    """Run the command line."""
    quiet = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if quiet:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from stretto.node.cli import main as run

    if quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
