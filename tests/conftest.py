"""Fixtures shared by all tests: tiny random-weight models in Hugging Face format."""

import copy
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from configs.runtime.amx import use_amx_where_it_works
from tests.children import look_after

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: spinning threads stall busy machines
use_amx_where_it_works()
# A shell has those in its background ignore Ctrl-C, and their children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no fault of what is tested.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

LOOKING_AFTER = pytest.StashKey[subprocess.Popen[bytes]]()
RUNS = {  # files whose tests start whole runs, in tests/integration
    "test_cluster.py",
    "test_detach.py",
    "test_lag0.py",
    "test_live_run.py",
    "test_programs.py",
    "test_restarts.py",
    "test_resume.py",
    "test_retrieval_faults.py",
    "test_run.py",
    "test_survivors.py",
}
ENGINES = {"test_vllm.py", "test_adapter_vllm.py", "test_gateway_vllm.py"}
LONGEST = {  # of the others
    "test_elastic.py",
    "test_faults.py",
    "test_gpu_memory.py",
    "test_restart.py",
    "test_trainer.py",
    "test_two_ranks.py",
}
# DeepSpeed calls what torch has given another name.
OTHERS_WARNINGS = r"ignore:.torch.distributed.\w+_tensor. is deprecated:FutureWarning"
TEXT = (
    "what is the mayor of bore ? <search> mayor of bore </search> <information> the mayor of bore "
    "is kelu . </information> <answer> kelu </answer> My previous action is invalid , try again ."
)

SAID_CALL = '<tool_call>{"name": "find", "arguments": {"it": "bore"}}</tool_call>'


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are of what can be mended here."""
    config.addinivalue_line("filterwarnings", OTHERS_WARNINGS)


def pytest_sessionstart(session: pytest.Session) -> None:
    """What tests start does not outlive them; workers of pytest-xdist carry its controller's
    mark.
    """
    if not hasattr(session.config, "workerinput"):
        session.config.stash[LOOKING_AFTER] = look_after()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nobody is left when pytest has ended."""
    if (process := config.stash.get(LOOKING_AFTER, None)) is not None:
        process.communicate()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Beside each other, what takes longest comes first, so that no worker ends long after the
    other: whole runs, real engines, long files.
    """

    def late(item: pytest.Item) -> tuple[bool, ...]:
        quick = not item.get_closest_marker("vllm")
        return _scope(item.nodeid) != "runs", quick, item.path.name not in LONGEST

    if hasattr(config, "workerinput"):
        items.sort(key=late)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a file to one worker, and all that start whole runs, or share an engine, to the same."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    return ByFile(config, log)


def _scope(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    if Path(file).name in ENGINES or Path(file).parent.name == "engine":
        return "engine"  # these share the session's one, or its imports
    return "runs" if Path(file).name in RUNS and "integration" in Path(file).parts else file


@pytest.fixture(scope="session")
def make_tiny_model() -> Callable[[Path, Any], Path]:
    """make_tiny_model(folder, tokenizer): save a random Qwen2 (hidden 96, 3 heads of 32, 2 layers,
    tied, float32) with that tokenizer; returns the folder."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def make(folder: Path, tokenizer: Any) -> Path:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=512,
            initializer_range=0.2,  # far from uniform, so that a wrong log-prob is visibly wrong
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        Qwen2ForCausalLM(config).float().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def word_tokenizer() -> Any:
    """Whole words as tokens; the tags are single, non-special added tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tags = [word for word in dict.fromkeys(TEXT.split()) if word.startswith("<")]
    words = ["[PAD]", "[UNK]", "[EOS]", *dict.fromkeys(TEXT.split())]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
    )
    tokenizer.add_tokens(tags, special_tokens=False)
    return tokenizer


@pytest.fixture(scope="session")
def bpe_tokenizer() -> Any:
    """Byte-level BPE trained here; every tag is several tokens."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(
        [TEXT.replace("<", "< ").replace(">", " >")], vocab_size=320, min_frequency=2,
        special_tokens=["<|pad|>", "<|end|>"],
    )  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=backend._tokenizer, pad_token="<|pad|>", eos_token="<|end|>"
    )


@pytest.fixture(scope="session")
def tiny_model_path(
    make_tiny_model: Callable[[Path, Any], Path],
    word_tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with the random model and the word tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", word_tokenizer)


@pytest.fixture(scope="session")
def spelling_model_path(
    make_tiny_model: Callable[[Path, Any], Path],
    bpe_tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A random model whose tokenizer can spell any text."""
    return make_tiny_model(tmp_path_factory.mktemp("spelling") / "model", bpe_tokenizer)


@pytest.fixture(scope="session")
def tagged_tokenizer(bpe_tokenizer: Any) -> Any:
    """The BPE tokenizer with the tags added as single tokens: a policy can spell them both ways."""
    tokenizer = copy.deepcopy(bpe_tokenizer)
    tags = ["<search>", "</search>", "<answer>", "</answer>"]
    tokenizer.add_tokens(tags, special_tokens=False)
    return tokenizer


@pytest.fixture(scope="session")
def spoken_model_path(
    make_tiny_model: Callable[[Path, Any], Path],
    bpe_tokenizer: Any,
    tagged_tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A model that has learnt by heart to search after `what is`, spelling tags as several tokens,
    after `try again`, with single-token tags, by a call after `action`, and to end after
    `invalid`."""
    import torch
    from transformers import Qwen2ForCausalLM

    folder = make_tiny_model(tmp_path_factory.mktemp("spoken") / "model", tagged_tokenizer)
    model = Qwen2ForCausalLM.from_pretrained(folder)
    action = " <search> mayor of bore </search> <answer> kelu </answer>"
    rows = [
        bpe_tokenizer.encode("what is" + action),
        tagged_tokenizer.encode("try again" + action),
        [*bpe_tokenizer.encode("invalid , try"), bpe_tokenizer.eos_token_id] * 2,
        [*bpe_tokenizer.encode(f"My previous action{SAID_CALL}"), bpe_tokenizer.eos_token_id],
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(200):
        ids = torch.tensor([rows[step % 4]])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_policy(spoken_model_path: Path) -> AsyncIterator[Any]:
    """The session's one real engine, labelled version 0; tests using it run on the session's loop
    (`@pytest.mark.asyncio(loop_scope="session")`) and leave weights and version as they were."""
    from actors.policies.vllm import VllmPolicy
    from configs.schema import ActorsConfig, Config, ModelConfig

    policy = await VllmPolicy.start(
        Config(
            model=ModelConfig(path=str(spoken_model_path), dtype="float32", max_model_len=256),
            actors=ActorsConfig(max_num_seqs=48, kv_cache_bytes=256 << 20),
        )
    )
    await policy.set_policy_version(0)
    yield policy
    policy.close()
