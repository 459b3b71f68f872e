"""The retriever of a run: a client of a server, or the log of a recorded run."""

from actors.recorded import RecordedRetriever
from configs.load import retrieval_url
from configs.schema import Config
from retrieval_server.bearer import read_token
from retrieval_server.client import RetrievalClient

Retrieval = RetrievalClient | RecordedRetriever


def open_retrieval(config: Config) -> Retrieval:
    """Make the configured retriever, for `async with`. Raises ConfigError."""
    asked = config.retrieval
    if asked.recorded:
        return RecordedRetriever.open(config)
    return RetrievalClient(
        retrieval_url(config),
        timeout_s=asked.timeout_s,
        retries=asked.retries,
        max_connections=asked.max_connections,
        token=read_token(asked.token_file),
        cache_queries=asked.cache_queries,
    )
