"""Our server over a slower index: `python -m scripts.bench.retrieval.slowed CONFIG QPS`.

Everything is the real server's, `retrieval_server.worker`; each call of its index is drawn out to
1 / QPS seconds a query.
"""

import sys
import time
from collections.abc import Sequence

from configs.load import load
from configs.runtime.process import begin
from retrieval_server.auth import read_token
from retrieval_server.index.base import Hit, Index
from retrieval_server.worker import bind, serve


class Slowed:
    """An index that answers so many queries a second, or fewer where it is slower by itself."""

    def __init__(self, index: Index, queries_per_s: float) -> None:
        self._index, self._each_s = index, 1.0 / queries_per_s
        self.name, self.fingerprint = index.name, index.fingerprint

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """What the index finds, in its time."""
        due = time.monotonic() + self._each_s * len(queries)
        found = self._index.search(queries, top_k)
        time.sleep(max(0.0, due - time.monotonic()))
        return found


def main(path: str, queries_per_s: float) -> int:
    """Serve until SIGTERM; returns the exit code."""
    begin("slowed", threads=1)
    config = load(path, [])
    token = read_token(config.retrieval.token_file)
    with bind(config.retrieval.host, config.retrieval.port) as listener:
        return serve(config, listener, token, lambda index: Slowed(index, queries_per_s))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
