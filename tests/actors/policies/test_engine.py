"""Checks and settings before vLLM starts; a broken installation gets the remedy named."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.errors import EngineUnusable
from actors.policies import engine
from actors.policies.engine import (
    Scratch,
    choose_gpus,
    engine_arguments,
    forking,
    prepare_environment,
    stop_arguments,
)
from configs.runtime import gpus as shared_out
from configs.runtime.process import make_socket_dir
from configs.schema import ActorsConfig, Config, LearnerConfig, ModelConfig

CHECK = "from actors.policies.engine import check_installation as c; c()"


def check_with(folder: Path) -> str:
    """The last line of the check's complaint when `folder` comes first on the path."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, check=False
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def test_a_broken_torchvision_is_named_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    error = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision" / "__init__.py").write_text(error)
    complaint = check_with(tmp_path)
    assert "EngineUnusable" in complaint and "torchvision::nms" in complaint
    assert "pip uninstall -y torchvision torchaudio torchcodec" in complaint


def test_a_usable_installation_passes(tmp_path: Path) -> None:
    assert check_with(tmp_path) == ""


def test_a_missing_vllm_is_named_with_its_remedy() -> None:
    code = f"import sys; sys.modules['vllm'] = None; import importlib.util; {CHECK}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "EngineUnusable: vLLM is not installed: run `make .venv`" in done.stderr


def test_what_the_user_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    prepare_environment(Config())
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


def test_the_engine_is_started_as_configured() -> None:
    config = Config(
        model=ModelConfig(path="m", dtype="float32", max_model_len=9000),
        actors=ActorsConfig(
            max_num_seqs=5, prefix_caching=False, kv_cache_bytes=154, tensor_parallel=2
        ),
    )
    arguments = engine_arguments(config, "x.Y")
    assert (arguments["max_num_seqs"], arguments["enable_prefix_caching"]) == (5, False)
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["worker_extension_cls"] == "x.Y"
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["kv_cache_memory_bytes"] == 77  # of each worker


@pytest.mark.parametrize(
    ("cpu", "batch", "eager"),
    [(True, 9000, True), (False, 8192, False)],  # on a CPU a prompt goes whole into a batch
)
def test_batches_and_graphs_are_the_device_s(monkeypatch, cpu, batch: int, eager: bool) -> None:
    monkeypatch.setattr(engine, "on_cpu", lambda: cpu)
    arguments = engine_arguments(Config(model=ModelConfig(path="m", max_model_len=9000)), "x.Y")
    assert arguments["max_num_batched_tokens"] == batch
    assert arguments["enforce_eager"] == eager


@pytest.mark.parametrize(("dtype", "set_to"), [("float32", "ieee"), ("bfloat16", None)])
def test_an_engine_in_float32_multiplies_in_float32(monkeypatch, dtype: str, set_to: Any) -> None:
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")  # put back as it was afterwards
    monkeypatch.delenv("TRITON_F32_DEFAULT")
    prepare_environment(Config(model=ModelConfig(dtype=dtype)))
    assert os.environ.get("TRITON_F32_DEFAULT") == set_to


def test_the_head_is_multiplied_as_asked() -> None:
    """And not as a config.json would have it, which the learner does not read for that."""
    exact = Config(model=ModelConfig(path="m", head_dtype="float32"))
    assert engine_arguments(exact, "x.Y")["hf_overrides"] == {"head_dtype": "float32"}
    assert engine_arguments(Config(), "x.Y")["hf_overrides"] == {"head_dtype": "model"}


@pytest.mark.parametrize("of_a_run", [True, False])
def test_what_an_engine_leaves_goes_with_it(tmp_path, monkeypatch, of_a_run) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run_dir = str(tmp_path / "run")
    place = make_socket_dir(run_dir) if of_a_run else Path(tempfile.gettempdir())
    scratch = Scratch(run_dir)
    with scratch.entered():
        folder = Path(os.environ["TMPDIR"])
        assert folder.parent == place and os.environ["VLLM_RPC_BASE_PATH"] == str(folder)
        (folder / "vllm_dist_0").touch()
    assert os.environ["TMPDIR"] == str(tmp_path) and "VLLM_RPC_BASE_PATH" not in os.environ
    scratch.remove()
    scratch.remove()
    assert not folder.exists()
    if of_a_run:
        place.rmdir()


def share(told: Any) -> None:
    """A worker's process: it shares memory until it is killed."""
    memory = SharedMemory(create=True, size=4096)
    told.send(memory.name)
    time.sleep(600)


def test_shared_memory_that_killed_workers_leave_goes_too(tmp_path: Path) -> None:
    scratch, (heard, told) = Scratch(str(tmp_path)), multiprocessing.Pipe(duplex=False)
    group = f"vllm_dist_{os.getpid()}"  # its file for the meeting, and its memory
    with scratch.entered():
        worker = multiprocessing.get_context("spawn").Process(target=share, args=(told,))
        worker.start()
        (Path(os.environ["TMPDIR"]) / group).touch()
        left = [Path("/dev/shm", name) for name in (heard.recv(), f"{group}-tp:0-[0-1]-cpushm_0")]
        left[1].touch()
    worker.kill()
    worker.join()
    assert all(path.exists() for path in left)
    scratch.remove()
    assert not any(path.exists() for path in left)


FORKING = """
import multiprocessing, os, signal, time
from vllm.utils.system_utils import get_mp_context, set_process_title
from actors.policies.engine import forking

def child(told):
    set_process_title("EngineCore")  # as run_engine_core does
    told.send((os.environ["VLLM_WORKER_MULTIPROC_METHOD"], signal.set_wakeup_fd(-1)))
    time.sleep(600)

os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "SET_ANEW": "1"}
signal.set_wakeup_fd(os.open("/dev/null", os.O_WRONLY | os.O_NONBLOCK))
heard, told = multiprocessing.Pipe(duplex=False)
with forking(threads=1):
    process = get_mp_context().Process(target=child, args=(told,))
    process.start()
after = os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
print(type(process).__name__, after, *heard.recv(), process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "kept"), [("SET_ANEW", ""), ("LEFT", ""), ("SET_ANEW", "1"), ("LEFT", "1")]
)
def test_a_forked_engine_has_its_own_title_and_ends_with_its_parent(first: str, kept: str) -> None:
    own = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "SPT_NOENV": kept}
    environment, command = {first: ""} | os.environ | own, [sys.executable, "-c", FORKING]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        *said, pid = parent.stdout.readline().split()
        engine_process = psutil.Process(int(pid))
        lines = [psutil.Process(each).cmdline() for each in (parent.pid, engine_process.pid)]
        environ = engine_process.environ()
        parent.kill()
    # Its workers are spawned, and its signals wake no event loop of its parent's.
    assert said == ["ForkProcess", "spawn", "spawn", "-1"]
    assert [lines[0], "".join(lines[1])] == [command, "VLLM::EngineCore"]
    assert environ == environment
    assert not psutil.wait_procs([engine_process], timeout=10)[1]


METHOD = """
import os, sys
from actors.policies.engine import forking

os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
with forking(int(sys.argv[1])):
    print(os.environ["VLLM_WORKER_MULTIPROC_METHOD"])
"""


@pytest.mark.parametrize(("threads", "method"), [(1, "fork"), (2, "spawn")])
def test_an_engine_of_several_threads_is_spawned(threads: int, method: str) -> None:
    command = [sys.executable, "-c", METHOD, str(threads)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == method


def test_beside_another_thread_an_engine_is_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    with forking(threads=1):
        found = os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
    over.set()
    thread.join()
    assert found == "spawn"


def test_completions_end_where_the_environment_says(
    word_tokenizer: Any, bpe_tokenizer: Any
) -> None:
    tags = ("</search>", "</answer>", "</calculator>")
    ids = word_tokenizer.convert_tokens_to_ids(list(tags[:2]))
    assert stop_arguments(word_tokenizer, tags[:2])["stop_token_ids"] == ids
    assert stop_arguments(word_tokenizer, tags)["stop"] == list(tags)
    assert stop_arguments(word_tokenizer, tags[1:2])["stop_token_ids"] == ids[1:]
    for tokenizer in (word_tokenizer, bpe_tokenizer):  # the end token alone
        assert stop_arguments(tokenizer, ()) == {"stop_token_ids": [], "detokenize": False}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """host(count): make this a host of so many GPUs; returns them."""

    def of(count: int) -> dict[str, str]:
        found = {str(number): f"GPU-{number}" for number in range(count)}
        monkeypatch.setattr(engine, "visible", lambda: found)
        for name in ("hold", "take"):
            real = getattr(shared_out, name)
            monkeypatch.setattr(engine, name, lambda *a, real=real: real(*a, tmp_path / "gpus"))
        return found

    return of


def of_workers(workers: int, ranks: int = 1) -> Config:
    return Config(actors=ActorsConfig(tensor_parallel=workers), learner=LearnerConfig(ranks=ranks))


def test_a_run_s_own_actors_get_the_gpus_of_the_plan(host: Any) -> None:
    host(8)
    config = of_workers(2, ranks=4)
    assert [choose_gpus(config, number).names for number in range(3)] == [
        ("4", "5"), ("6", "7"), ("4", "5"),
    ]  # fmt: skip


def test_whoever_is_in_no_plan_gets_free_gpus_of_this_host(host: Any, tmp_path: Path) -> None:
    """Elsewhere than the learner all of them; on its host not its own, nor its actors'."""
    gpus = host(4)
    config = of_workers(1, ranks=2)
    assert [choose_gpus(config).names for _ in range(4)] == [("0",), ("1",), ("2",), ("3",)]
    with pytest.raises(EngineUnusable, match="none of the 4 GPUs here can be had"):
        choose_gpus(config)
    gpus.update({"4": "GPU-4", "5": "GPU-5", "6": "GPU-6"})
    shared_out.hold(["4", "5"], gpus, tmp_path / "gpus")  # a learner's two ranks
    assert choose_gpus(config).names == ("6",)


@pytest.mark.parametrize("number", [None, 0])
def test_an_engine_of_more_workers_than_gpus_is_refused(host: Any, number: int | None) -> None:
    host(2)
    with pytest.raises(EngineUnusable, match=r"tensor_parallel = 4: 2 GPUs are visible .* most 2"):
        choose_gpus(of_workers(4), number)


def test_without_gpus_workers_share_the_processor(host: Any) -> None:
    host(0)
    assert choose_gpus(of_workers(4)).names == choose_gpus(of_workers(4), 1).names == ()


LOWER = """
import os, sys
import actors.policies.engine as engine
os.nice(int(sys.argv[1]) - os.nice(0))
engine.on_cpu = lambda: True
engine.lower_priority()
print(os.nice(0))
"""


@pytest.mark.parametrize(("before", "after"), [(0, 5), (12, 17), (19, 19)])
def test_an_actor_is_never_put_before_what_was_started_beside_it(before: int, after: int) -> None:
    if before < os.nice(0):
        pytest.skip(f"this process has {os.nice(0)} itself, and nobody may go below")
    command = [sys.executable, "-c", LOWER, str(before)]
    assert int(subprocess.run(command, capture_output=True, check=True).stdout) == after
