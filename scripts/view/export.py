"""All pages in one file, with what they show: it asks nobody for anything."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from configs.load import ConfigError
from replay.protocol import ReplayError
from scripts.view import answers
from scripts.view.health import health
from scripts.view.index import Index
from scripts.view.rollouts.wanted import Wanted
from scripts.view.server import BUILT, MOST_ROWS, rollouts
from scripts.view.timeline import MOST_BINS_IN_ALL, timeline

_MOST_BINS_IN_ALL = (
    4 * MOST_BINS_IN_ALL
)  # of a timeline: it can be looked at closer without a server
OF_A_RULE = 20  # rollouts of what had a sentinel fire
_SCRIPT = '<script type="module" crossorigin src="./app.js"></script>'
_STYLE = '<link rel="stylesheet" crossorigin href="./app.css">'
_POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; script-src '
    "'unsafe-inline'; style-src 'unsafe-inline'; img-src data:\">"
)


def page(index: Index, most: int) -> str:
    """The file's text; `most`: rollouts in it."""
    shell = (BUILT / "index.html").read_text(encoding="utf-8")
    script = (BUILT / "app.js").read_text(encoding="utf-8").replace("</script", "<\\/script")
    style = (BUILT / "app.css").read_text(encoding="utf-8")
    data = json.dumps(_shown(index, most), ensure_ascii=True).replace("<", "\\u003c")
    body = f'<script type="application/json" id="data">{data}</script>\n'
    body += f'<script type="module">{script}</script>'
    for place, text in (
        (_SCRIPT, _POLICY),
        (_STYLE, f"<style>{style}</style>"),
        ("</body>", f"{body}</body>"),
    ):
        before, found, after = shell.rpartition(place)
        if not found:
            raise ValueError(f"{BUILT / 'index.html'} is not as it was built: it has no {place}")
        shell = f"{before}{text}{after}"
    return shell


def _shown(index: Index, most: int) -> dict[str, Any]:
    """What the pages may ask for."""
    overview, held = answers.overview(index), health(index)
    count, _ = index.rollouts(Wanted(), 0, 0)
    rows = _chosen(index, most, [run["asked"] for rule in held["rules"] for run in rule["runs"]])
    details = {}
    for row in rows:
        try:
            found = answers.rollout(index, row["run"], row["number"])
        except (ConfigError, ReplayError, OSError) as error:
            found = {"gone": str(error)}
        details[f"{row['run']}/{row['number']}"] = found
    return {
        "overview": overview,
        "curves": answers.curves(index, overview["gauges"]),
        "health": held,
        "timelines": [
            timeline(index, run, None, None, most=_MOST_BINS_IN_ALL)
            for run in range(len(index.runs))
        ],
        "rollouts": {"count": count, "rows": rows},
        "details": details,
    }


def _chosen(index: Index, most: int, causes: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """As many rollouts, the newest of each run alike, and some of those that had sentinels fire."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    counts = [index.rollouts(Wanted(run=run), 0, 0)[0] for run in range(len(index.runs))]
    left = most
    for place, run in enumerate(sorted(range(len(counts)), key=counts.__getitem__)):
        share = min(counts[run], max(left // (len(counts) - place), most and 1))
        left -= share  # what a small run lacks goes to the others
        for begin in range(0, share, MOST_ROWS):
            _, rows = index.rollouts(Wanted(run=run), begin, min(MOST_ROWS, share - begin))
            found |= {(run, row["number"]): row for row in rows}
    for asked in causes:
        if asked and most:
            rows = rollouts(index, {**asked, "most": str(OF_A_RULE)})["rows"]
            found |= {(row["run"], row["number"]): row for row in rows}
    return list(found.values())
