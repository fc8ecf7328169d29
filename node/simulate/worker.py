"""A process that does one run after another: requests on standard input, replies on standard output, lines of JSON.

    request   {"label": ..., "settings": {...}, "cache": folder or null, "threads": number}
    replies   {"done": share of the run} now and then, then {"result": {...}} or {"error": text}

It ends when its input ends, and at its next reply if whoever reads them is gone.
"""

import json
import sys
from pathlib import Path
from typing import Any

from stretto.protocol.errors import StrettoError


def main() -> None:
    """Serve requests until there are no more."""
    replies = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is no reply

    def reply(content: dict[str, Any]) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    for line in sys.stdin:
        try:
            reply({"result": serve(json.loads(line), lambda share: reply({"done": share}))})
        except StrettoError as error:
            reply({"error": str(error)})


def serve(request: dict[str, Any], report: Any) -> dict[str, Any]:
    """Do the run that was asked for."""
    import torch

    from stretto.node.simulate.config import SimConfig
    from stretto.node.simulate.run import run

    torch.set_num_threads(request["threads"])
    cache = Path(request["cache"]) if request["cache"] else None
    return run(SimConfig.from_dict(request["settings"]), label=request["label"], cache=cache, report=report)


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(1)
