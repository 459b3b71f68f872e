"""All pages in one file, with what they show: it asks nobody for anything."""

import json
from typing import Any

from configs.load import ConfigError
from replay.protocol import ReplayError
from scripts.view import answers
from scripts.view.health import health
from scripts.view.index import Index
from scripts.view.rollouts.wanted import Wanted
from scripts.view.server import BUILT, MOST_ROWS
from scripts.view.timeline import MOST_BINS_IN_ALL, timeline

_MOST_BINS_IN_ALL = (
    4 * MOST_BINS_IN_ALL
)  # of a timeline: it can be looked at closer without a server
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
    overview = answers.overview(index)
    count, rows = index.rollouts(Wanted(), 0, 0)
    while len(rows) < min(most, count):
        _, further = index.rollouts(Wanted(), len(rows), min(MOST_ROWS, most - len(rows)))
        rows += further
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
        "health": health(index),
        "timelines": [
            timeline(index, run, None, None, most=_MOST_BINS_IN_ALL)
            for run in range(len(index.runs))
        ],
        "rollouts": {"count": count, "rows": rows},
        "details": details,
    }
