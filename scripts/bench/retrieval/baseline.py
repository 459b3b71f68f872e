"""The baseline of `forage bench retrieval`: a server of Search-R1's shape over our own index.

`python -m scripts.bench.retrieval.baseline CONFIG` reads what our server reads and serves it on
`retrieval.host:port`. The handler is a plain function on FastAPI's thread pool; every request
searches on its own, query by query where Search-R1 loops (BM25). Its defects are left out (`topk`
and `return_scores` work), and it does not log every request, which would slow it down.
"""

import logging
import sys
from collections.abc import Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from configs.load import load
from configs.runtime.process import begin, limit_threads
from retrieval_server.index.base import Index
from retrieval_server.protocol import Document
from retrieval_server.worker import bind

logger = logging.getLogger("naive")

_BACKLOG = 2048  # as ours, and so is the keep-alive
_KEEP_ALIVE_S = 75


class QueryRequest(BaseModel):
    """Search-R1's request."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def naive_app(
    documents: Sequence[Document], index: Index, default_top_k: int, loop: bool
) -> FastAPI:
    """`POST /retrieve` as Search-R1 answers it; `loop`: a search for each query."""
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve_endpoint(request: QueryRequest) -> Any:
        top_k = request.topk or default_top_k
        if loop:
            found = [index.search([query], top_k)[0] for query in request.queries]
        else:
            found = index.search(request.queries, top_k)
        result: list[list[Any]] = []
        for hits in found:
            row: list[Any] = []
            for hit in hits:
                passage = documents[hit.position]
                document = {"id": passage.id, "contents": passage.contents}
                scored = {"document": document, "score": hit.score}
                row.append(scored if request.return_scores else document)
            result.append(row)
        return {"result": result}

    return app


def main(path: str) -> None:
    """Serve until SIGTERM."""
    begin("naive", threads=1)
    settings = load(path, []).retrieval
    limit_threads(settings.threads)
    from retrieval_server.index.open_index import open_index

    with bind(settings.host, settings.port) as listener:
        documents, index = open_index(settings)
        app = naive_app(documents, index, settings.top_k, loop=index.name.startswith("bm25"))
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                access_log=False,
                log_level="warning",
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        host, port = listener.getsockname()[:2]
        logger.info("serving %d passages on http://%s:%d", len(documents), host, port)
        server.run(sockets=[listener])


if __name__ == "__main__":
    main(sys.argv[1])
