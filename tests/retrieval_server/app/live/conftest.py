"""A provider at home, and live searches that ask it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.load import load
from configs.schema import Config
from retrieval_server.app.live.providers import PROVIDERS
from tests.retrieval_server.app.live.providers_at_home import KEY, Home, at_home

Configured = Callable[..., Config]


@pytest.fixture(params=sorted(PROVIDERS))
def home(request: pytest.FixtureRequest) -> Iterator[Home]:
    """Each provider in turn."""
    with at_home(request.param) as serving:
        yield serving


@pytest.fixture
def serper() -> Iterator[Home]:
    """One provider, for what is the same of all."""
    with at_home("serper") as serving:
        yield serving


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def configured(tmp_path: Path, key_file: Path) -> Configured:
    """configured(home, live fields …): a configuration that asks it; the run's folder is `run`."""
    path = tmp_path / "config.yaml"
    path.write_text("{}\n")

    def make(home: Home, **live: Any) -> Config:
        fields = {
            "url": home.url,
            "key_file": key_file,
            "price_usd": 0.01,
            "budget_usd": 1.0,
            "requests_per_s": 1000.0,
            "engine_id": "cx1",
        } | live
        overrides = [f"retrieval.live.{name}={value}" for name, value in fields.items()]
        run = f"run_dir={tmp_path / 'run'}"
        return load(path, [f"retrieval.kind={home.kind}", run, *overrides])

    return make
