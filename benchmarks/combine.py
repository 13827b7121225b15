"""Several runs of the benchmark in one table: of each row the median of its values, the least and the greatest."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import report
from rows import reaches

SAME = ("machine", "threads", "torch", "peer")  # what makes runs comparable


@dataclass
class Combined:
    """A row of several runs. Lists have an entry per run that has the row; times are in seconds per call."""

    suite: str
    name: str
    quantity: str
    required: Optional[float]
    values: list = field(default_factory=list)
    medians: list = field(default_factory=list)
    peer_medians: list = field(default_factory=list)

    @property
    def value(self):
        return statistics.median(self.values)

    @property
    def ratio(self):
        """Of the times; a dense row's value."""
        return self.value

    @property
    def met(self):
        return reaches(self.quantity, self.value, self.required)

    @property
    def runs_met(self):
        return sum(reaches(self.quantity, value, self.required) is True for value in self.values)


def read(path):
    """Setting and rows of one run. Raises SystemExit for any other file."""
    try:
        run = json.loads(Path(path).read_text())
        return run["setting"], run["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"--combine {path}: not a file that --json has written ({error!r})") from None


def combined(paths):
    """The settings that the runs share, and their rows in the order of the first run that has them."""
    runs = [read(path) for path in paths]
    shared = {name: runs[0][0].get(name) for name in SAME}
    for path, (setting, _) in zip(paths, runs):
        differing = [name for name in SAME if setting.get(name) != shared[name]]
        if differing:
            name = differing[0]
            raise SystemExit(
                f"--combine: {path} has {name} {setting.get(name)!r} and {paths[0]} {shared[name]!r}; "
                "combine runs of one machine and setting"
            )
    rows = {}
    for _, records in runs:
        for record in records:
            if record["value"] is None:
                continue
            kind = (record["suite"], record["name"], record["quantity"], record["required"])
            row = rows.setdefault(kind, Combined(*kind))
            row.values.append(record["value"])
            row.medians.append(record["median"])
            row.peer_medians.append(record["peer_median"])
    if not rows:
        raise SystemExit("--combine: these runs have no row with a value; they were made with --against none")
    return shared, list(rows.values())


def heading():
    values = f"{'median':>8}{'least':>8}{'most':>8}"
    return f"{'row':<46}{'ours':>11}{'peer':>11}{values} {'required':<17}runs that reach it"


def line(row):
    times = "".join(f"{report.duration(statistics.median(x)):>11}" for x in (row.medians, row.peer_medians))
    values = "".join(f"{value:>8.2f}" for value in (row.value, min(row.values), max(row.values)))
    runs = f"{row.runs_met} of {len(row.values)}" if row.required is not None else f"- of {len(row.values)}"
    return f"{row.name:<46}{times}{values} {report.verdict(row):<17}{runs}"


def show(paths):
    """Prints the table and the summary; returns the rows."""
    shared, rows = combined(paths)
    for key, value in {"runs": len(paths), **shared}.items():
        print(f"{key:>12}: {value}")
    print("", heading(), *map(line, rows), "", *report.summary(rows), sep="\n")
    return rows
