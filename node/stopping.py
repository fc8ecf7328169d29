"""How a Stretto process is asked to stop: signals, a parent that is gone, or a fault inside.

A signal's handler runs in the main thread, between any two of its instructions, so also while that thread holds a
lock. To set an event takes a lock: a handler that did so could wait for the very thread that it interrupts, for ever.
So it only passes the signal on, by a queue whose ``put`` may be interrupted by itself (``SimpleQueue``), and a thread
does the rest.
"""

import os
import signal
import threading
from queue import SimpleQueue


def stop_signals() -> list[signal.Signals]:
    """The signals that end a program of Stretto in order.

    SIGHUP comes when the terminal is closed; whoever started the program with ``nohup`` wants it to go on then.
    """
    found = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        found.append(hangup)
    return found


class StopSignal:
    """SIGINT, SIGTERM and SIGHUP ask to stop; a second one, or nobody listening for 8 s, ends the process at once."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.exit_code = 0
        self._watchdog: threading.Timer | None = None
        self._lock = threading.Lock()
        self._arrived: SimpleQueue[int] = SimpleQueue()

    def install(self) -> None:
        """Take the signals; from the main thread."""
        threading.Thread(target=self._follow_signals, name="signals", daemon=True).start()
        for number in stop_signals():
            signal.signal(number, lambda number, _frame: self._arrived.put(number))

    def _follow_signals(self) -> None:
        while True:
            code = 130 if self._arrived.get() == signal.SIGINT else 0
            if self.event.is_set():
                os._exit(code or 143)
            self.exit_code = code
            self.stop()

    def follow_stdin(self) -> None:
        """Stop when standard input ends: a parent that dies, however it dies, takes its children along."""

        def wait() -> None:
            # Not sys.stdin: a thread that waits inside its lock makes the interpreter abort at exit.
            while os.read(0, 1024):
                pass
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=wait, name="stdin", daemon=True).start()

    def stop(self) -> None:
        """Ask to stop from inside; whatever waits for something dead meanwhile is cut short."""
        self._watch(8.0)
        self.event.set()

    def grant(self, seconds: float) -> None:
        """Whoever was asked to stop is listening and works on it: the end at once is put off by ``seconds``."""
        if self.event.is_set():
            self._watch(seconds)

    def _watch(self, seconds: float) -> None:
        with self._lock:
            if self._watchdog is not None:
                self._watchdog.cancel()
            self._watchdog = threading.Timer(seconds, self._give_up)
            self._watchdog.daemon = True
            self._watchdog.start()

    def _give_up(self) -> None:
        os._exit(self.exit_code or 143)

    def __call__(self) -> bool:
        return self.event.is_set()
