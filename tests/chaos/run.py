"""``python -m tests.chaos.run SCENARIO``: a swarm of real processes behind home lines, and what it lives through.

Writes one JSON object to ``--report`` and ends with 1 if a goal of the scenario was missed, or if this machine cannot
make namespaces. Logs and metrics are kept when a goal was missed, or with ``--keep``.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from stretto.protocol.errors import StrettoError
from tests.chaos.links import check_machine, remove_leftovers
from tests.chaos.options import Options
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.stage import Stage

Say = Callable[[str], None]


def say(text: str) -> None:
    """A line with the time, at once."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def run_scenario(name: str, options: Options, *, keep: bool = False, tell: Say = say) -> dict[str, Any]:
    """Run one scenario; its report, with ``goals_missed`` in words. StrettoError if this machine cannot."""
    check_machine()
    for namespace in remove_leftovers():
        tell(f"removed the namespace {namespace} of an earlier run that was killed")
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    began = time.monotonic()
    fine = False
    try:
        outcome = SCENARIOS[name](Stage(folder, tell), options)
        fine = not outcome.missed
    finally:
        if fine and not keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            tell(f"logs and metrics: {folder}")
    return {
        "scenario": name,
        "emulated_device_time": True,
        "goals_missed": outcome.missed,
        "wall_seconds": round(time.monotonic() - began, 1),
        **outcome.report,
    }


def summary(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    lines = []
    for name, run in {"": report, **report.get("runs", {})}.items():
        if "rounds_possible" not in run:
            continue
        lines.append(
            f"{name + ': ' if name else ''}{run['rounds_possible_committed']} of {run['rounds_possible']} possible "
            f"rounds committed; anchors {'equal' if run['anchors_equal'] else 'DIFFER'}; "
            f"{run['tokens_lost']:,} of {run['tokens_trained']:,} tokens lost"
        )
        if run["faults_done"]:
            lines.append(
                f"{run['faults_done']} faults ({run['faults_per_hour']:.0f} per hour), recovery: median "
                f"{run['recovery_median']} s, longest {run['recovery_max']} s, never {len(run['never_recovered'])}"
            )
    lines += [_join_in_words(row) for row in report.get("joins", [])]
    if "growth" in report:
        lines.append(
            f"{report['rounds_committed']} of {report['rounds']} rounds committed through {len(report['changes'])} "
            f"changes; loss {report['loss_first_and_last_quarter']}; anchors "
            f"{'equal' if report['anchors_equal'] else 'DIFFER'}"
        )
        for row in report["growth"][:5]:
            lines.append(f"{row['process']}: {row['kind']} {row['growth']:+g} (limit {row['limit']:g})")
    for peer, row in report.get("fast_steps_per_second", {}).items():
        lines.append(
            f"{peer}: {row['equal']} -> {row['mixed']} steps/s (emulated), {row['loss_percent']} % lost; blocked by "
            f"the exchange {row['blocked_percent']['equal']} -> {row['blocked_percent']['mixed']} %"
        )
    for peer, row in report.get("slow", {}).items():
        lines.append(f"{peer}: counted in {row['counted_share']:.0%} of the rounds, mean weight {row['mean_weight']}")
    for row in report.get("splits", []):
        sides = "; ".join(f"{'+'.join(s['peers'])} committed {len(s['rounds_committed'])}" for s in row["sides"])
        lines.append(
            f"split of {row['seconds']:.0f} s: {sides}; all together {row['seconds_until_a_round_counts_all']} s"
        )
    for run in report.get("runs", {"": report}).values():
        if run.get("load_per_core", 0.0) > 1.0:
            lines.append(f"WARNING the machine was busy: {run['load_per_core']} processes wanted each core at the end")
    lines += [f"GOAL MISSED: {text}" for text in report["goals_missed"]]
    return lines


def _join_in_words(row: dict[str, Any]) -> str:
    loss = f" ({row['killed']} killed, {row['stopped']} stopped at half)" if row["killed"] else ""
    if row["seconds"] is None:
        return f"{row['peer']}: the download did not end{loss}"
    return (
        f"{row['peer']}: {row['bytes'] / 1e6:.1f} MB from {row['gave']} peer(s) in {row['seconds']:.0f} s{loss}, "
        f"{row['share_of_downlink']:.0%} of the downlink; counted {row['cycles_until_counted']} cycles later; "
        f"{len(row['donors_rounds_not_committed'])} rounds of the donors not committed meanwhile"
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tests.chaos.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("scenario", choices=list(SCENARIOS))
    parser.add_argument("--peers", type=int, help="of the scenarios faults (8) and churn (4)")
    parser.add_argument(
        "--minutes", type=float, help="length: 30, of churn 10; uneven takes half for each of its runs"
    )
    parser.add_argument("--faults-per-hour", type=float, default=140.0, help="of the scenario faults")
    parser.add_argument("--every", type=float, default=120.0, help="churn: seconds from one change to the next")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, required=True, help="where to write the JSON report")
    parser.add_argument("--keep", action="store_true", help="keep logs and metrics also after a success")
    given = parser.parse_args()
    short = given.scenario == "churn"
    given.peers = given.peers if given.peers is not None else 4 if short else 8
    given.minutes = given.minutes if given.minutes is not None else 10.0 if short else 30.0
    if given.peers < 3 or min(given.minutes, given.faults_per_hour, given.every) <= 0:
        parser.error("--peers must be at least 3, --minutes, --every and --faults-per-hour positive")
    if short and given.minutes * 60 < 3 * given.every:
        parser.error("--minutes must be long enough for two changes --every so many seconds, and a calm end")

    def interrupted(_number: int, _frame: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    options = Options(
        peers=given.peers,
        minutes=given.minutes,
        faults_per_hour=given.faults_per_hour,
        every=given.every,
        seed=given.seed,
    )
    try:
        report = run_scenario(given.scenario, options, keep=given.keep)
    except StrettoError as error:
        print(textwrap.fill(f"error: {error}", 100, break_long_words=False), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    given.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for line in summary(report):
        say(line)
    say(f"report: {given.report}")
    return 1 if report["goals_missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
