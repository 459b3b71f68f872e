"""One search, made before any rollout makes one.

Consumes a configuration; produces an error that names the remedy, or nothing. Waits for the reply;
unblocked by it, by a refusal or by a deadline.
"""

from configs.load import retrieval_url
from configs.schema import Config
from retrieval_server.bearer import read_token
from retrieval_server.client import RetrievalClient
from retrieval_server.protocol import RetrievalError, RetrievalRefused
from scripts.own_server import ServerFailed

PROBE_S = 5.0


async def probe(config: Config, deadline_s: float = PROBE_S, retries: int = 0) -> None:
    """Search once as rollouts will, so that a wrong address or token is told before there are any.
    Raises ServerFailed."""
    asked, url = config.retrieval, retrieval_url(config)
    deadline_s, token = min(deadline_s, asked.timeout_s), read_token(asked.token_file)
    try:
        async with RetrievalClient(url, deadline_s, retries, token=token) as client:
            await client.retrieve(["forage"], asked.top_k)
    except RetrievalRefused as error:
        raise ServerFailed(f"a search at retrieval.url = {url!r} was refused: {error}") from error
    except RetrievalError as error:
        raise ServerFailed(
            f"a search at retrieval.url = {url!r} failed: {error}: say where the retrieval server "
            "is, retrieval.url=URL"
        ) from error
