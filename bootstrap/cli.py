"""``stretto bootstrap RUN.toml``: the operator's command."""

import threading
from pathlib import Path

from stretto.bootstrap.server import Bootstrap, is_loopback
from stretto.bootstrap.server import BootstrapConfig as BootstrapConfig
from stretto.node.console import Console
from stretto.node.ports import doubt_reach, in_container, probe_port
from stretto.node.statusfile import StatusFile
from stretto.node.swarm.folders import own_folder, write_whole
from stretto.node.swarm.identity import IdentityLock, load_or_create
from stretto.node.swarm.thread import NetworkThread, Stopped
from stretto.protocol.config import RunConfig


def serve_run(
    run: RunConfig, config: BootstrapConfig, console: Console, stopping: threading.Event, invite_file: Path | None
) -> None:
    """Serve ``run`` until ``stopping`` is set. Prints the invite and writes it to ``invite_file``."""
    own_folder(config.data_dir, parents=True)
    key_file = config.data_dir / "identity.key"
    identity = load_or_create(key_file)
    with IdentityLock(key_file):
        probe_port(config.host, config.port)
        thread = NetworkThread()
        status = StatusFile(config.data_dir, "bootstrap", identity.peer_id, lambda: {"state": "starting"})
        status.write(**status.tell())
        bootstrap: Bootstrap | None = None
        try:
            console.say(f"starting the network daemon on {config.host} port {config.port or '(any free one)'}")
            bootstrap = thread.call(Bootstrap.start(run, identity, config), stopping=stopping.is_set)
            invite = str(bootstrap.invite())
            console.say(f"serving run {run.name!r}, id {run.digest().hex()[:16]}, as {identity.peer_id}")
            for address in bootstrap.host.addresses:
                console.say(f"listening at {address}{' (same machine only)' if is_loopback(address) else ''}")
            doubt = doubt_reach(config.port, config.announce, bootstrap.host.addresses, container=in_container())
            if doubt is not None:
                console.say(doubt)
            console.say(f"invite: {invite}")
            if invite_file is not None:
                write_whole(invite_file, invite + "\n", "--invite-file")
            status.tell = bootstrap.tell
            thread.start(status.keep())
            thread.call(bootstrap.keep(console.say, seconds_per_status=15.0), stopping=stopping.is_set)
        except Stopped:
            console.say("stopping")
        finally:
            if bootstrap is not None:
                thread.call(bootstrap.close())
            thread.close()
            status.write(state="ended")
