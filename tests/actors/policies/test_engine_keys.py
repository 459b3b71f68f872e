"""Arguments of the engine's own: what vLLM does not know, Forage sets or training cannot bear is
refused by name, with a remedy.
"""

import importlib.util
import re
from pathlib import Path

import pytest

from actors.policies import engine_keys
from actors.policies.engine import engine_arguments
from actors.policies.engine_keys import Source, problems
from configs.load import FIELDS, parse


def said(*overrides: str) -> list[str]:
    """What is said of these keys of `actors.engine`."""
    return list(problems(parse("", [f"actors.engine.{each}" for each in overrides], "test")))


@pytest.fixture(scope="module")
def known() -> set[str]:
    """The arguments of the installed vLLM."""
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.submodule_search_locations
    return {*Source(Path(package.submodule_search_locations[0])).arguments()}


def test_what_vllm_takes_is_taken() -> None:
    taken = (
        *("kv_cache_dtype=fp8", "block_size=64", "max_num_batched_tokens=8192"),
        *("attention_backend=flash_attn", "cudagraph_capture_sizes=[1, 2, 4]"),
        *("compilation_config.cudagraph_capture_sizes=[1]", "long_prefill_token_threshold=0"),
        *("kv_cache_metrics_sample=1", "disable_cascade_attn=true", "block_size=null"),
        "speculative_config={method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 4}",
    )
    assert [line for each in taken for line in said(each)] == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("kv_cache_dtyp=fp8", "'fp8': vLLM has no such argument: did you mean actors.engine.kv_ca"),
        ("speculative_config={methd: ngram, model: x}", "did you mean actors.engine.speculative_c"),
        ("attention_config.backends=x", "did you mean actors.engine.attention_config.backend?"),
        ("_api_process_rank=1", "vLLM has no such argument"),
        ("kv_cache_dtype=fp9", "= 'fp9': did you mean fp8? vLLM takes one of 'auto', 'float16', "),
        ("attention_backend=FLASH", "did you mean FLASHMLA? vLLM takes one of 'auto', "),
        ("block_size=many", "actors.engine.block_size = 'many': vLLM takes an integer"),
        ("block_size=true", "vLLM takes an integer"),
        ("stream_interval=1.5", "vLLM takes an integer"),
        ("disable_cascade_attn=1", "vLLM takes true or false"),
        ("speculative_config=ngram", "= 'ngram': vLLM takes a mapping"),
        ("cudagraph_capture_sizes=4", "vLLM takes a list"),
        ("enforce_eager=true", "actors.enforce_eager sets it: leave it out"),
        ("gpu_memory_utilization=0.9", "actors.kv_cache_bytes sets it: leave it out"),
        ("tensor_parallel_size=2", "actors.tensor_parallel sets it: leave it out"),
        ("pipeline_parallel_size=2", "an engine's processes are those of actors.tensor_parallel"),
        ("data_parallel_size=2", "more engines: actors.count: leave it out"),
        ("quantization=fp8", "a quantised model has no place for; keys and values may be"),
        ("enable_lora=true", "an engine computes the adapter that learner.lora asks for"),
        ("logprobs_mode=raw_logprobs", "log-probs are those after temperature"),
        ("rope_scaling={}", "the learner reads config.json in model.path alone"),
        ("hf_overrides={rope_theta: 1e6}", "change it there (the head: model.head_dtype): leave"),
        ("tokenizer_mode=slow", "prompts are ids of the tokenizer in model.path: leave it out"),
        ("kv_offloading_size=4", "others would be read again under new weights: leave it out"),
        ("enable_sleep_mode=true", "weights have to stay where weight sync writes them"),
        ("speculative_config={num_speculative_tokens: 2}", "speculative_config.method is missing"),
        ("speculative_config={method: ngram}", "num_speculative_tokens is missing: give how many"),
        ("speculative_config={method: ngramm}", "method = 'ngramm': did you mean ngram? "),
        (
            "speculative_config={method: extract_hidden_states, num_speculative_tokens: 1}",
            "it drafts nothing",
        ),
        ("speculative_config={method: eagle, model: /no}", "model = '/no': no config.json there"),
        ("speculative_config={model: someone/draft}", "model = 'someone/draft': no config.json"),
        (
            "speculative_config={method: ngram, num_speculative_tokens: 2, "
            "rejection_sample_method: synthetic}",
            "accepted whatever the model says",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_named_with_a_remedy(override: str, words: str) -> None:
    told = said(override)
    assert told and told[0].startswith("actors.engine.") and words in told[0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("enable_chunked_prefill=true", "on a CPU vLLM would end in the first prompt cut in two"),
        ("max_num_batched_tokens=512", "model.max_model_len = 4096 tokens goes whole into a batch"),
        ("speculative_config={method: ngram_gpu, num_speculative_tokens: 2}", "no GPU here: name"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused_there(monkeypatch, override: str, words: str) -> None:
    monkeypatch.setattr(engine_keys, "on_cpu", lambda: True)
    (told,) = said(override)
    assert words in told
    monkeypatch.setattr(engine_keys, "on_cpu", lambda: False)
    assert said(override) == []


def test_a_method_of_vllm_drafts_from_a_folder_or_is_known_to_need_none() -> None:
    (vllm,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore
    methods = engine_keys.Source(Path(vllm))._named("SpeculativeMethod").choices
    assert len(methods) > 30

    def needs_a_folder(method: str) -> bool:
        words = f"actors.engine.speculative_config={{method: {method}, num_speculative_tokens: 2}}"
        found = engine_keys.problems(parse("", [words], "test"))
        return any("no config.json there: name the draft's folder" in each for each in found)

    alone = {"ngram", "ngram_gpu", "suffix", *engine_keys._NO_DRAFTS}
    alone |= {each for each in methods if each.endswith("mtp")}  # in the model itself
    assert {each for each in methods if not needs_a_folder(each)} == alone


def test_every_refusal_is_of_an_argument_that_exists(known: set[str]) -> None:
    patterns = [each for keys in engine_keys._REFUSED for each in keys.split("|")]
    unknown = [each for each in patterns if not any(re.fullmatch(each, key) for key in known)]
    assert unknown == ["rope", "rope_.+"]  # of config.json
    assert set(engine_keys._OURS) <= known
    fields = {each for each in engine_keys._OURS.values() if "speculative" not in each}
    assert fields <= {*FIELDS}


def test_whatever_an_actor_gives_the_engine_cannot_be_given_twice(known: set[str]) -> None:
    given = engine_arguments(parse("", [], "test"), "x.Y")
    free = {"max_num_batched_tokens", "enable_chunked_prefill"}  # of a CPU, where they are checked
    assert [key for key in given if key not in free and not engine_keys.refusal(key)] == []


def test_the_engine_gets_a_copy_of_its_own() -> None:
    """vLLM writes into what it is given, and a configuration is written out again."""
    config = parse("", ["actors.engine={speculative_config: {method: ngram}}"], "test")
    given = engine_arguments(config, "x.Y")["speculative_config"]
    given["more"] = object()
    assert config.actors.engine == {"speculative_config": {"method": "ngram"}}
