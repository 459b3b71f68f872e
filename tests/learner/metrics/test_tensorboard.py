"""What TensorBoard's own readers find in a run's event files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
from tensorboard.plugins.histogram.histograms_plugin import HistogramsPlugin
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups
from tensorboard.plugins.scalar.scalars_plugin import ScalarsPlugin
from tensorboard.plugins.text.text_plugin import TextPlugin

from configs.schema import Config
from learner.batch import build_shares
from learner.health.diagnostics import RATIO_BARS
from learner.metrics.layout import LAYOUT
from learner.metrics.metrics import Metrics
from learner.metrics.samples import HEAD_CHARS, TAIL_CHARS
from replay.codec import encode_trajectory
from replay.protocol import Batch, EvalResult
from tests.learner.conftest import VOCABULARY

CTX, RUN = RequestContext(), "run/tensorboard"


def result(step: int, em: float) -> EvalResult:
    return EvalResult(step, 10, em, None, {}, {}, 1.0, step, step)


def read(folder: Path) -> TBContext:
    """A server's context over all runs below the folder."""
    runs = EventMultiplexer().AddRunsFromDirectory(str(folder))
    runs.Reload()
    provider = MultiplexerDataProvider(runs, str(folder))
    context = TBContext(data_provider=provider, plugin_name_to_instance=(plugins := {}))
    plugins["scalars"] = ScalarsPlugin(context)
    return context


def run_config(config: Config, folder: Path, **learner: Any) -> Config:
    told = msgspec.structs.replace(config.learner, **learner)
    return msgspec.structs.replace(config, run_dir=str(folder), learner=told)


def test_custom_scalars_ask_four_questions(config: Config, tmp_path: Path) -> None:
    with Metrics(tmp_path / "run", config=config) as metrics:
        metrics.write(1, {"eval/em": 0.5, "eval/em_hops_2": 0.25, "eval/emu": 1.0})
    plugin = CustomScalarsPlugin(read(tmp_path))
    categories = plugin.layout_impl(CTX, "")
    (*titles,) = (each["title"] for each in msgspec.json.decode(categories)["category"])
    assert titles == ["learning?", "stable?", "stale?", "bottleneck?"] == list(LAYOUT)
    first, second = msgspec.json.decode(categories)["category"][0]["chart"][:2]
    found = {
        chart["title"]: set(plugin.scalars_impl(CTX, RUN, tag, "")["tag_to_events"])
        for chart in (first, second)
        for tag in chart["multiline"]["tag"][:1]
    }
    assert found == {"exact match": {"eval/em"}, "exact match by hops": {"eval/em_hops_2"}}


def test_several_runs_have_one_layout(config: Config, tmp_path: Path) -> None:
    for name in ("a", "b"):
        Metrics(tmp_path / name, config=config).close()
    categories = CustomScalarsPlugin(read(tmp_path)).layout_impl(CTX, "")
    charts = [len(each["chart"]) for each in msgspec.json.decode(categories)["category"]]
    assert charts == [len(each) for each in LAYOUT.values()]


def test_hyper_parameters_are_what_differs_with_the_last_evaluation(
    config: Config, tmp_path: Path
) -> None:
    for name, changed in (("a", {"lr": 2e-3}), ("b", {"max_grad_norm": 0.5})):
        own = run_config(config, tmp_path / name, **changed)
        with Metrics(own.run_dir, config=own) as metrics:
            metrics.write(1, {"learner/loss": 0.5})
            for step, em in ((0, 0.25), (2, 0.75)):
                metrics.evaluation(result(step, em))
    context = backend_context.Context(read(tmp_path))
    metadata = context.hparams_metadata(CTX, "")
    experiment = context.experiment_from_metadata(CTX, "", True, metadata, None)
    assert [each.name.tag for each in experiment.metric_infos] == ["final/em"]
    names = {each.name for each in experiment.hparam_infos}
    assert {"learner.lr", "learner.max_grad_norm", "model.path"} <= names
    assert not {"run_dir", "learner.beta2", "learner.objective"} & names
    request = api_pb2.ListSessionGroupsRequest(
        allowed_statuses=[api_pb2.STATUS_UNKNOWN], slice_size=9, include_metrics=True
    )
    groups = list_session_groups.Handler(CTX, context, "", request).run().session_groups
    assert [each.metric_values[0].value for each in groups] == [0.75, 0.75]
    assert groups[0].hparams["learner.lr"].number_value == 2e-3


def test_no_secret_and_no_address_is_a_hyper_parameter(config: Config, tmp_path: Path) -> None:
    retrieval = msgspec.structs.replace(config.retrieval, url=("http://u:pw@h/",), token_file="t")
    own = msgspec.structs.replace(config, retrieval=retrieval)
    Metrics(tmp_path, config=own).close()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("events*"))
    assert b"learner.lr" in written and b"pw@h" not in written and b"token_file" not in written


def test_histograms_of_a_step(config: Config, batch: Callable[..., Batch], tmp_path: Path) -> None:
    made = batch(step=3, version=0)
    shares = build_shares(made, config.learner, VOCABULARY)
    tokens = shares[0].gauges["learner/action_tokens"]
    bars = {f"learner/ratio_tokens_{bar}": float(bar == "0.8_0.95") for bar in RATIO_BARS}
    known = {"learner/action_tokens": tokens, "learner/masked_tokens": 0.0}
    with Metrics(tmp_path / "run", config=config) as metrics:
        metrics.trained(3, shares, bars | known | {"learner/behaviour_ratio_max": 0.9})
    plugin = HistogramsPlugin(read(tmp_path))
    events = {
        tag: plugin.histograms_impl(CTX, f"histogram/{tag}", RUN, "")[0][0]
        for tag in ("reward", "staleness", "behaviour_ratio")
    }
    assert {event[1] for event in events.values()} == {3}
    rewards, staleness, ratios = (np.array(event[2]) for event in events.values())
    assert rewards[0, 2] == 4 and rewards[-1, 2] == 2  # of six rollouts, two earned 1
    assert staleness[staleness[:, 2] > 0].tolist() == [[1.5, 2.5, tokens]]
    (most,) = ratios[ratios[:, 2] > 0]
    assert np.allclose(most, [0.8, 0.95, tokens])


class Words:
    """A tokenizer whose every word is the same."""

    def __init__(self, word: str):
        self.word = word

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self.word * len(ids)


def shown(folder: Path) -> dict[str, str]:
    """HTML of each text, as the text plugin serves it."""
    plugin = TextPlugin(read(folder))
    tags = plugin.index_impl(CTX, "")[RUN]
    found = {tag: plugin.text_impl(CTX, RUN, tag, "", True) for tag in sorted(tags)}
    return {tag.removesuffix("/text_summary"): texts[0]["text"] for tag, texts in found.items()}


@pytest.mark.parametrize(
    "evil", ["<script>alert(1)</script>", "\x1b]0;owned\x07\u202e", "![x](http://h/a.png)\n\n# A"]
)
def test_rollouts_are_shown_letter_for_letter(
    config: Config, batch: Callable[..., Batch], tmp_path: Path, evil: str
) -> None:
    with Metrics(tmp_path / "run", config=config) as metrics:
        metrics.rollouts(batch(step=3), Words(evil))
    texts = shown(tmp_path)
    assert list(texts) == [f"rollouts/{n}" for n in range(1, 5)]
    for text in texts.values():
        assert not any(each in text for each in ("\x1b", "\u202e", "<script", "<img", "<h1"))
        assert "[policy]" in text and "[prompt]" in text
    assert ["reward 1" in text for text in texts.values()] == [True, False, True, False]


def test_a_long_rollout_is_cut_in_the_middle(
    config: Config, batch: Callable[..., Batch], tmp_path: Path
) -> None:
    with Metrics(tmp_path / "run", config=config) as metrics:
        metrics.rollouts(batch(step=3), Words("word " * 10_000))
    for text in shown(tmp_path).values():
        assert "characters left out" in text
        assert len(text) < HEAD_CHARS + TAIL_CHARS + 1000


def test_alike_siblings_are_shown_once(
    config: Config, trajectory: Callable[..., Any], batch: Callable[..., Batch], tmp_path: Path
) -> None:
    alike = [trajectory(n, sibling=n, reward=None, reward_cause="judge") for n in range(3)]
    made = msgspec.structs.replace(
        batch(step=3), groups=(tuple(map(encode_trajectory, alike)),), group_ids=(1,)
    )
    with Metrics(tmp_path / "run", config=config) as metrics:
        metrics.rollouts(made, Words("w "))
    (text,) = shown(tmp_path).values()
    assert "unscorable" in text and "sibling 0" in text
