"""Cosines of a real small encoder's embeddings, against naive ones."""

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from actors.errors import Unscorable
from actors.rewards.scorer import Rewards
from actors.rewards.similarity import Similarity
from configs.load import ConfigError
from configs.rewards import RewardsConfig, RewardWeights, SimilarityConfig
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Question, Sampling
from retrieval_server.encoder import Encoder
from tests.retrieval_server.encoders import make_encoder

GOLDS = ("the mayor of bore", "kelu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoders") / "tiny")


def _naive(folder: Path, answer: str) -> float:
    vectors = Encoder(folder).passages([answer, *GOLDS])
    one, *others = (vector / np.linalg.norm(vector) for vector in vectors)
    return max(0.0, *(float(one @ other) for other in others))


async def test_it_is_the_best_cosine_whatever_is_asked_beside_it(folder: Path) -> None:
    answers = ["kelu", "king kelu", "a mayor", "x" * 500, "\ud800", "kelu"]
    similarity = Similarity.open(SimilarityConfig(model=str(folder)))
    found = await asyncio.gather(*(similarity.best(answer, GOLDS) for answer in answers))
    await similarity.close()
    naive = [_naive(folder, answer.replace("\ud800", "?")) for answer in answers]
    assert found == pytest.approx(naive, abs=1e-5)
    assert found[0] == pytest.approx(1.0, abs=1e-6) and max(found) <= 1.0


class Counting:
    """An encoder that remembers what it was given, and may fail."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.error: Exception | None = None
        self.broken: dict[str, tuple[float, float]] = {}
        self.free = threading.Event()
        self.free.set()

    def passages(self, texts: list[str]) -> np.ndarray:
        if self.error is not None:
            raise self.error
        assert self.free.wait(60)
        self.texts += texts
        rows = {"up": (0.0, 2.0), "down": (0.0, -2.0), "side": (3.0, 0.0), "near": (1.2, 1.6)}
        rows |= self.broken
        return np.asarray([rows.get(text, (0.0, 0.0)) for text in texts], np.float32)


async def test_a_text_is_encoded_once_and_opposites_are_0() -> None:
    encoder = Counting()
    similarity = Similarity(encoder)  # type: ignore[arg-type]
    values = [await similarity.best("up", golds) for golds in (["down", "side"], ["up", "side"])]
    assert values == [0.0, 1.0] and sorted(encoder.texts) == ["down", "side", "up"]
    assert await similarity.best("nothing", ["up"]) == 0.0
    assert await similarity.best("near", ["down", "up"]) == pytest.approx(0.8)
    await similarity.close()


async def test_an_encoder_that_fails_is_no_zero() -> None:
    encoder = Counting()
    encoder.error = RuntimeError("out of memory")
    similarity = Similarity(encoder)  # type: ignore[arg-type]
    with pytest.raises(Unscorable, match="RuntimeError: out of memory") as raised:
        await similarity.best("up", ["down"])
    assert raised.value.whose == "similarity"
    encoder.error = None
    assert await similarity.best("up", ["up"]) == 1.0
    await similarity.close()


@pytest.mark.parametrize("number", [np.nan, np.inf])
async def test_a_vector_that_is_not_finite_is_no_likeness(number: float) -> None:
    encoder = Counting()
    encoder.broken = {"odd": (number, 0.0)}
    similarity = Similarity(encoder)  # type: ignore[arg-type]
    asked = (similarity.best(answer, ["up"]) for answer in ("odd", "up"))  # in one batch
    odd, sound = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(odd, Unscorable) and "not finite" in str(odd) and sound == 1.0
    await similarity.close()


async def test_a_text_that_the_encoder_cannot_index_is_no_zero() -> None:
    encoder = Counting()
    encoder.error = IndexError("index out of range in self")
    similarity = Similarity(encoder)  # type: ignore[arg-type]
    with pytest.raises(Unscorable, match="IndexError: index out of range"):
        await similarity.best("up", ["down"])
    await similarity.close()


async def test_an_encoder_that_hangs_is_given_up() -> None:
    encoder = Counting()
    encoder.free.clear()
    similarity = Similarity(encoder, timeout_s=0.05)  # type: ignore[arg-type]
    with pytest.raises(Unscorable, match=r"no vector within 0\.05 s \(rewards\.similarity\.tim"):
        await similarity.best("up", ["down"])
    encoder.free.set()
    await similarity.close()


async def test_it_is_a_part_of_the_reward(folder: Path) -> None:
    asked = RewardsConfig(
        weights=RewardWeights(em=0.0, similarity=2.0),
        similarity=SimilarityConfig(model=str(folder)),
    )
    lease = Lease(1, 0, "train", Question("q", "who?", GOLDS), Sampling())
    async with Rewards.open(Config(rewards=asked)) as rewards:
        scores = [await rewards.score(lease, answer, _unread) for answer in ("king kelu", None)]
    assert scores[0].reward == pytest.approx(2 * _naive(folder, "king kelu"), abs=1e-5)
    assert scores[1].reward == 0.0 and scores[1].parts == {"em": 0.0, "similarity": 0.0}


def test_a_folder_without_an_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rewards.similarity.model = .*holds no encoder"):
        Similarity.open(SimilarityConfig(model=str(tmp_path)))


def _unread() -> None:
    raise AssertionError("no part reads more than the answer")
