"""The console: one line per message with its time, and no flood of the same line."""

import io
import re
import threading

from stretto.node.console import REPEATS, Console


def lines(stream: io.StringIO) -> list[str]:
    """The printed lines without their times."""
    printed = stream.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in printed)
    return [line[9:] for line in printed]


def test_each_message_is_a_line() -> None:
    stream = io.StringIO()
    console = Console(stream)
    for text in ("one", "two", "one"):
        console.say(text)
    assert lines(stream) == ["one", "two", "one"]


def test_the_same_message_is_printed_a_few_times_then_at_powers_of_two() -> None:
    stream = io.StringIO()
    console = Console(stream)
    for _ in range(1000):
        console.say("again")
    counts = [4, 8, 16, 32, 64, 128, 256, 512]
    assert lines(stream) == ["again"] * REPEATS + [f"again (said {count} times)" for count in counts]


def test_another_message_in_between_starts_anew() -> None:
    stream = io.StringIO()
    console = Console(stream)
    for text in ["a"] * 3 + ["b"] + ["a"] * 3:
        console.say(text)
    assert lines(stream) == ["a", "a", "a", "b", "a", "a", "a"]


def test_threads_do_not_mix_their_lines() -> None:
    stream = io.StringIO()
    console = Console(stream)
    texts = [str(digit) * 200 for digit in range(8)]

    def talk(text: str) -> None:
        for number in range(50):
            console.say(f"{text} {number}")

    threads = [threading.Thread(target=talk, args=[text]) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(lines(stream)) == sorted(f"{text} {i}" for text in texts for i in range(50))


def test_the_status_is_the_last_message_until_there_is_a_better_one() -> None:
    console = Console(io.StringIO())
    console.say("reading the corpus")
    assert console.status() == "still: reading the corpus"
    console.say(console.status())
    assert console.status() == "still: reading the corpus"
    console.status = lambda: "training"
    assert console.status() == "training"


def test_status_lines_come_by_themselves_until_the_end() -> None:
    class Watched(io.StringIO):
        seen = threading.Event()

        def write(self, text: str) -> int:
            if self.getvalue().count("fine") >= 2:
                self.seen.set()
            return super().write(text)

    stream = Watched()
    console = Console(stream)
    numbers = iter(range(1_000_000))
    console.status = lambda: f"fine {next(numbers)}"
    console.start_status(0.001)
    assert stream.seen.wait(10)
    console.close()
    printed = stream.getvalue()
    assert lines(stream)[:2] == ["fine 0", "fine 1"]
    assert not [thread for thread in threading.enumerate() if thread.name == "status"]
    assert stream.getvalue() == printed


def test_a_console_without_status_closes() -> None:
    console = Console(io.StringIO())
    console.close()
    console.say("still prints")
