"""Bad input of every command, and wrong settings of a run: refused before anything starts, in one
line that names field, value and remedy, or says what was meant; exit code 2, nothing written.
"""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import zmq

from configs.runtime.process import REPOSITORY, Exit
from scripts import cli
from scripts.command import terminal
from scripts.setup import gpu_memory

GIB = 1 << 30
BASE = str(REPOSITORY / "configs" / "base.yaml")
GOOD = (
    "model.path=model questions.train=train.jsonl questions.eval=train.jsonl run_dir=run "
    "retrieval.corpus=corpus.jsonl model.max_model_len=512 actors.kv_cache_bytes=100000000"
)
NO_CONFIG = "configuration file 'none' does not exist: name one of configs/*.yaml"
NO_RUN = "RUN = 'none': there is no such directory: name a run's directory"
NO_MODEL = "MODEL = 'none': no run (config.yaml), checkpoint"
NO_CORPUS = "'none' does not exist: name a file of passages"
COMMANDS = [
    ("", "name a command: demo, train, "),
    ("trian", "Did you mean 'train'?"),
    ("prepare out", "Did you mean 'data prepare'?"),
    ("data nope", "No such command 'nope': it is none of prepare, audit (forage data --help)"),
    ("show --prepare-only", "forage train and resume take it"),
    ("train --quick", "no option --quick: forage demo, bench learner, bench staleness, "),
    ("bench --quick", "no option --quick: forage demo, bench learner, "),
    ("--steps 3", "no option --steps: "),
    ("train", "train: name 'CONFIG', a YAML file"),
    ("train BASE GOOD --detach --prepare-only", "--detach with --prepare-only, which starts noth"),
    ("resume run --detach --prepare-only", "--detach with --prepare-only, which starts nothing"),
    *(
        (f"{each} none", NO_CONFIG)
        for each in ("train", "sync", "try", "data audit", "memory", "doctor")
    ),
    *(
        (f"{each} .", "'.' is a folder")
        for each in ("train", "sync", "try", "data audit", "doctor")
    ),
    ("memory none.yaml --gpus 1", "'none.yaml' does not exist"),
    ("plan none.yaml --gpus 1", "'none.yaml' does not exist"),
    ("plan BASE --gpu H10", "did you mean H100?"),
    ("warm-start none --from-run none", NO_CONFIG),
    *(
        (f"{each} none", NO_RUN)
        for each in ("resume", "relearn", "show", "audit", "compact", "view")
    ),
    *(
        (f"{each} .", "RUN = '.': no config.yaml")
        for each in ("resume", "relearn", "show", "audit", "compact", "plot", "view")
    ),
    ("plot none", NO_RUN),
    ("runs --plot none/p.png", "--plot 'none/p.png': there is no such folder to write it in"),
    ("runs --json .", "--json '.': it is a folder: name a file in it"),
    ("scale none 1", NO_RUN),
    ("scale . 1", "RUN = '.': no config.yaml"),
    ("evaluate none --sets none", NO_MODEL),
    ("evaluate notes --sets none", "MODEL = 'notes': no run"),
    ("ask none", "'none': no such folder: name a run"),
    ("data prepare out --from none", "'none/nq' holds no train.jsonl"),
    ("index none out", NO_CORPUS),
    ("demo learner.stepz=3", "unknown key 'learner.stepz'"),
    ("bench stream --peers -1", "--peers -1: at least 0"),
    ("bench staleness learner.stepz=3", "unknown key 'learner.stepz'"),
    ("bench staleness --seeds 0 -1", "--seeds -1: at least 0"),
    ("bench retrieval --corpus none", NO_CORPUS),
    ("bench learner --threads 0", "--threads 0: at least 1"),
    ("bench engine --quik", "no option --quik: did you mean --quick"),
    ("bench gateway --quik", "no option --quik: did you mean --quick"),
    ("bench overlap --seats 0", "--seats 0: at least 1"),
    ("bench end-to-end --modes asink", "--modes 'asink': one of lockstep, lockstep_2_engines"),
    ("bench end-to-end --task wiki --quick", "--quick --task wiki: its modes do not fit ten"),
    ("bench wiki --minutes 1", "--minutes 1.0: at least 5"),
    ("bench weight-sync --updates -1", "--updates -1: at least 0"),
    ("bench algorithms --threads 0", "--threads 0: at least 1"),
    ("bench plan --minutes -1", "--minutes -1"),
    ("-help", "no option -help: did you mean --help?"),
    ("train -h", "train: no option -h: did you mean --help?"),
    ("help", "No such command 'help'. Did you mean 'forage --help'?"),
    ("run BASE", "No such command 'run'. Did you mean 'forage train'?"),
    ("eval runs/latest", "Did you mean 'evaluate'?"),
    ("test model", "Did you mean 'forage evaluate'?"),
    ("chat model", "Did you mean 'forage ask'?"),
    ("finetune BASE", "Did you mean 'forage warm-start'?"),
    ("TRAIN BASE", "No such command 'TRAIN'. Did you mean 'train'?"),
    ("warm_start BASE", "Did you mean 'warm-start'?"),
    ("grow model", "No such command 'grow': it is none of demo, train, "),
    ("serve model", "Did you mean 'forage gateway'?"),
    ("gateway BASE --port 70000", "--port 70000: at most 65535"),
    ("configs/base.yaml", "Did you mean 'forage train configs/base.yaml'?"),
    ("train --config BASE", "CONFIG is written without it, forage train CONFIG"),
    ("train base", "file 'base' does not exist: did you mean /"),
    ("train configs/demo.yml", "configs/demo.yaml?"),
    (
        "train model.path=model",
        "CONFIG comes before the fields: configs/base.yaml model.path=model",
    ),
    (
        "train model",
        "'model' is a folder: a model is named behind CONFIG: configs/base.yaml model.",
    ),
    ("train model/config.json", "is no YAML file: a model is named behind CONFIG: configs/base.ya"),
    ("train train.jsonl", "data are named behind CONFIG: configs/base.yaml questions.train=train."),
    (
        "train tab.yaml",
        "tab.yaml: not valid YAML (line 2): found character '\\t' that cannot start",
    ),
    ("train open.yaml", "not valid YAML (line 2): expected ',' or ']', but got '<stream end>': se"),
    ("train twice.yaml", "twice.yaml: key 'seed' is given twice (lines 1 and 3): keep one"),
    ("train list.yaml", "list.yaml: expected sections such as `model:`, got ['seed']"),
    (
        "train text.yaml",
        "model = 'here': expected a section of `key: value` lines: did you mean mod",
    ),
    ("train joined.yaml", "(value None): write `path: mine/model`, with a space after the colon"),
    ("train joined_line.yaml", "write `path: mine/model`, with a space after the colon"),
    (
        "train joined_lines.yaml",
        "not valid YAML (line 3): mapping values are not allowed here: wri",
    ),
    ("train BASE model=here", "did you mean model.path=here?"),
    (
        "train BASE other.yaml",
        "'other.yaml' is not of the form a.b=value: one configuration is read",
    ),
    ("train BASE learner.lr", "write learner.lr=VALUE, one word without spaces"),
    ("train BASE learner.lr = 0.1", "write learner.lr=VALUE, one word without spaces"),
    ("train BASE learner.lr:0.1", "write learner.lr=VALUE, one word without spaces"),
    ("train BASE --learner.lr=0.1", "no option --learner.lr=0.1: did you mean learner.lr=VALUE?"),
    ("train BASE --lr 0.1", "train: no option --lr: did you mean learner.lr=VALUE?"),
    ("train BASE --model here", "train: no option --model: did you mean model.path=VALUE?"),
    ("train BASE --seed 3", "train: no option --seed: did you mean seed=VALUE?"),
    ("train BASE --resume", "train: no option --resume: did you mean forage resume?"),
    ("train BASE --gpus 4", "train: no option --gpus: forage memory and plan take it"),
    ("sync BASE learner.ranks=2 GOOD", "learner.ranks = 2: one process has one rank"),
    (
        "sync BASE sentinels.ess=rollback GOOD",
        "sentinels.ess = 'rollback': forage sync saves a checkpoint only at its end, so",
    ),
    ("resume lates", "RUN = 'lates': there is no such directory: did you mean runs/latest?"),
    (
        "resume runs/latest/logs",
        "RUN = 'runs/latest/logs': a folder of a run: did you mean runs/lat",
    ),
    ("show train.jsonl", "RUN = 'train.jsonl': it is a file: name a run's directory"),
    ("show runs/latest --steps 3", "show: no option --steps: did you mean --step?"),
    ("show runs/latest --step abc", "show: --step = 'abc': Input should be a valid integer"),
    ("scale 2 runs/latest", "scale: N = 'runs/latest': Input should be a valid integer"),
    ("scale runs/latest -1", "scale: no option -1: a number below 0 is no value here"),
    ("relearn runs/latest --objective cispo", "did you mean learner.objective=VALUE?"),
    ("evaluate model train.jsonl", "evaluate: name '--sets'"),
    ("evaluate model --set train.jsonl", "no option --set: did you mean --sets?"),
    ("evaluate model --sets train.jsonl", "name a configuration, --config FILE"),
    ("evaluate model --sets", "Option '--sets' requires an argument"),
    ("ask 'who is it?'", "'who is it?': no such folder: name a run, a checkpoint"),
    (
        "ask localhost:8000 who",
        "MODEL = 'localhost:8000': no URL, no folder: did you mean http://loc",
    ),
    (
        "ask model who --weights best",
        "ask: --weights = 'best': 'best' is not one of 'model', 'ema'",
    ),
    ("ask model who --temp 1", "ask: no option --temp: did you mean --temperature?"),
    ("try 'who is it?'", "configuration file 'who is it?' does not exist: name one of configs/*"),
    ("data prepair out", "Did you mean 'prepare'?"),
    ("index corpus.jsonl", "index: name 'OUT', a new folder"),
    ("data audit BASE GOOD questions.train=trian.jsonl", "no file there: did you mean train.jsonl"),
    (
        "data audit BASE GOOD questions.eval=none.parquet",
        "no file there: name a JSONL or parquet f",
    ),
    ('data prepare out --train trian.jsonl --eval ""', "no file there: did you mean train.jsonl?"),
    ("evaluate model --config BASE --sets trian.jsonl", "no file there: did you mean train.jsonl"),
    (
        "warm-start BASE GOOD --demonstrations trian.jsonl",
        "no file there: did you mean train.jsonl?",
    ),
    ("memory BASE --gpu 1", "memory: no option --gpu: did you mean --gpus?"),
    ("demo SEED=1", "unknown key 'SEED' (value 1): did you mean 'seed'?"),
    ("warm-start BASE", "give one of --demonstrations FILE and --from-run RUN"),
]
SETTINGS = [
    ("questions.train=", "is empty: name a JSONL or parquet file of"),
    ("questions.train=trian.jsonl", "no file there: did you mean {here}/train.jsonl?"),
    ("questions.train=notes", "a folder: name a JSONL or parquet file of"),
    ("questions.train=columns.jsonl", "found no question in its columns prompt, completion, got"),
    ("questions.train=columns.jsonl", "or name the columns: questions.columns.question=…"),
    ("questions.train=empty.jsonl", "no questions; write "),
    ("questions.eval=unanswered.jsonl", "line 1: found no answers in its columns question, got"),
    (
        "questions.eval=same_ids.jsonl",
        "line 2: id '1' is that of line 1 too; give each row its own",
    ),
    ("questions.train=table.csv", "this is CSV: Forage reads JSONL and parquet: python -c "),
    ("questions.train=numbers.jsonl", 'line 1: answers holds 1500: write it as text: "1500"'),
    ("questions.columns.question=text questions.eval=other.jsonl", "for train and eval alike: ren"),
    (
        "questions.train=list.json",
        "one JSON list: write a row a line, jq -c '.[]' {here}/list.json",
    ),
    ("questions.train=corpus.jsonl", "found no question in its columns id, contents"),
    ("questions.columns.question=text questions.eval=other.jsonl", "no column 'text'"),
    ("questions.columns.qestion=text", "did you mean 'questions.columns.question'?"),
    ("questions.eval_limit=-1", "expected `int` >= 0"),
    ("questions.prompt=Answer", "it must contain {question}"),
    ("retrieval.corpus=", "is empty: name a JSONL or parquet file of"),
    ("retrieval.corpus=corpsu.jsonl", "did you mean {here}/corpus.jsonl?"),
    ("retrieval.corpus=train.jsonl", "line 1: fields 'id' and 'contents' are missing: write one"),
    ("retrieval.corpus=titled.jsonl", "'title' and 'text' are not read as they are: python -c "),
    ("retrieval.corpus=empty.jsonl", "holds no passages: write one JSON object per line"),
    ("retrieval.corpus=same_passages.jsonl", "line 2: id = '1': already used at line 1; give each"),
    ("retrieval.corpus=notes/notes.txt", "line 1: 'plain text' is not a passage"),
    ("retrieval.corpus=notes", "is not a file: name a file of passages"),
    ("retrieval.index=none", "does not exist: name an index folder or a FAISS file, or make it: "),
    ("retrieval.index=none", "or make it: forage index {here}/corpus.jsonl {here}/none"),
    ("retrieval.index=none retrieval.corpus=", "or make it: forage index CORPUS {here}/none"),
    ("retrieval.index=notes", "holds no manifest.json: no index, or one half built: build it with"),
    ("retrieval.index=corpus.jsonl", "is no FAISS file: name one, or a folder of forage index"),
    ("retrieval.index=vectors.faiss", "name its encoder (retrieval.encoder)"),
    ("retrieval.index=vectors.faiss retrieval.encoder=none", "{here}/none"),
    ("retrieval.index=index retrieval.corpus=other_corpus.jsonl", "{here}/other_corpus.jsonl"),
    ("retrieval.url=http://127.0.0.1:1", "no retrieval server can be reached there"),
    (
        "retrieval.url=http://127.0.0.1:{web}",
        "say where the retrieval server is, retrieval.url=URL",
    ),
    ("retrieval.url=localhost:8000", "did you mean http://localhost:8000?"),
    ("retrieval.url=http://host:port", "give one such as http://127.0.0.1:8000"),
    ("retrieval.port={web}", "stop what uses it, or set it to 0"),
    ("retrieval.port=99999", "expected `int` <= 65535"),
    (
        "retrieval.host=203.0.113.9",
        "no address of this machine (Cannot assign requested address): n",
    ),
    ("retrieval.top_k=three", "expected `int`, got `str`"),
    ("retrieval.recorded=notes", "name the directory of a recorded run, or leave it empty"),
    ("retrieval.token_file=none", "make it for the server"),
    ("retrieval.token_file=open_key", "mode 0644 lets others read it: chmod 600"),
    ("retrieval.device=gpu", "choose one of 'cpu', 'cuda'"),
    ("retrieval.device=cuda", "on this one begin with configs/base.yaml"),
    ("model.path=", "is empty: name a Hugging Face folder, or a model on the Hub"),
    ("model.path=modle", "there is nothing; did you mean {here}/model?"),
    ("model.path=~/no/such/model", "there is nothing; name a Hugging Face folder"),
    ("model.path=corpus.jsonl", "no config.json; name a Hugging Face folder"),
    ("model.path=model/model.safetensors", "no config.json; did you mean {here}/model?"),
    ("model.path=models--tiny", "no config.json; did you mean {here}/models--tiny/snapshots/1?"),
    ("model.path=bert", "its architectures ['BertForMaskedLM'] generate no text: name a causal"),
    (
        "model.path=adapter",
        "a LoRA adapter of '', which is no folder of a model here: put that",
    ),
    ("model.path=gguf", "GGUF, which cannot be trained: name the folder with the model's *.safet"),
    ("model.path=gguf/m.gguf", "GGUF, which cannot be trained: name the folder with the model's"),
    ("model.path=awq", "its weights are quantised (awq), which cannot be trained: name the model"),
    ("model.path=pointer", "model.safetensors is a pointer of Git LFS, without the weights: downl"),
    ("model.path=half", "1 of 2 files of weights are missing, model-2.safetensors: download it ag"),
    ("model.path=pickle", "no *.safetensors there; save the model with save_pretrained(..., safe_"),
    ("model.path=mute", "no tokenizer; save it beside the model"),
    ("model.path=torn", "config.json is not JSON"),
    ("model.dtype=fp16", "choose one of 'float32', 'bfloat16'"),
    (
        "model.max_model_len=4",
        "prompt of the shortest question takes 20 tokens and an action up to",
    ),
    (
        "model.max_model_len=64",
        "actors.max_action_tokens = 128: give at least 148, lower that or s",
    ),
    ("model.max_model_len=8192", "max_position_embeddings 512; lower model.max_model_len to at m"),
    (
        "learner.kl_top_k=999999 learner.anchor=ema learner.kl_coef=0.1",
        "learner.kl_top_k = 999999: the model's vocabulary has ",
    ),
    ("actors.kv_cache_bytes=1000", "one context of model.max_model_len = 512 tokens takes "),
    ("actors.kv_cache_bytes=4GB", "expected `int`, got `str`; write 4000000000"),
    ("actors.kv_cache_bytes=64MiB", "expected `int`, got `str`; write 67108864"),
    ("actors.temperature=0", "expected `float` > 0.0"),
    ("actors.count=0", "expected `int` >= 1"),
    ("actors.rollouts_in_flight=3", "raise it to 4"),
    ("actors.num_actors=3", "did you mean 'actors.count'?"),
    ("actors.gpu_memory_utilization=0.9", "did you mean 'actors.kv_cache_bytes'?"),
    ("actors.tensor_parallel_size=2", "did you mean 'actors.tensor_parallel'?"),
    ("actors.pipeline_parallel_size=2", "engines share a model out by tensors alone: see actors."),
    ("actors.tensor_parallel=0", "expected `int` >= 1"),
    ("replay.group_size=1", "give 2 or more"),
    ("replay.endpoint=127.0.0.1:5555", "did you mean tcp://127.0.0.1:5555?"),
    ("replay.endpoint=tcp://0.0.0.0:5555", "name the one by which the actors reach this machine"),
    ("replay.endpoint=tcp://203.0.113.9:5555", "this machine cannot listen there (Cannot assign"),
    ("weight_sync.endpoint=tcp://127.0.0.1:{web}", "listen there (Address already in use): name"),
    ("weight_sync.endpoint=tcp://host", "is no address tcp://HOST:PORT: name this machine"),
    (
        "weight_sync.transport=nccl",
        "no GPU is visible, and this configuration is for 2 (learner.ra",
    ),
    ("weight_sync.transport=tcp", "choose one of 'auto', 'gloo', 'nccl', 'cuda_ipc', 'snapshot'"),
    ("weight_sync.publish_every=9", "publish_every may be at most max_staleness + 1 = 3"),
    ("keys=notes", "acts on nothing without a tcp:// endpoint: leave it empty, or set replay.endp"),
    ("keys=notes replay.endpoint=tcp://127.0.0.1:{free}", "server.key cannot be read"),
    ("learner.lr=abc", "expected `float`, got `str`"),
    ("learner.lr=-1", "expected `float` >= 0.0"),
    ("learner.lrr=1", "did you mean 'learner.lr'?"),
    ("lr=0.1", "did you mean 'learner.lr'?"),
    ("learning_rate=0.1", "did you mean 'learner.lr'?"),
    ("learner.learning_rate=0.1", "did you mean 'learner.lr'?"),
    ("learner.batch_size=8", "did you mean 'replay.groups_per_step'?"),
    ("learner.beta=0.1", "did you mean 'learner.kl_coef' or 'learner.betas'?"),
    ("trainer.lr=1", "did you mean 'learner'?"),
    ("learner.objective=ppo", "choose one of 'grpo', 'cispo', 'gspo', 'dppo_tv', 'reinforce'"),
    ("learner.kl_coef=0.1", "set learner.anchor to 'ema' or 'frozen'"),
    ("learner.betas=0.9", "write a list, learner.betas=[0.9]"),
    ("learner.total_steps=1.5", "expected `int`, got `float`"),
    ("lora.rank=8", "did you mean 'learner.lora.rank'?"),
    ("model.lora_rank=8", "did you mean 'learner.lora.rank'?"),
    ("sentinels.mismatch=rollback", "older weights do not mend the engine: set it to 'stop' or"),
    ("sentinels.empty_searches=rollback", "older weights do not mend retrieval: set it to 'stop'"),
    ("sentinels.rollbacks=9", "sentinels.rollbacks = 9 acts on nothing where no sentinel is 'rol"),
    ("sentinels.rollback_rate=0.2", "set one, for example sentinels.ess=rollback, or leave it out"),
    ("learner.lora.alpha=8", "learner.lora.alpha = 8.0 acts on nothing with learner.lora.rank = 0"),
    (
        "learner.lora.layers=qkv learner.lora.rank=8",
        "names 'qkv', which no linear layer of the model's blocks is called: they are down_proj, g",
    ),
    ("mlflow.uri=x", "not supported yet: leave it out; curves: tensorboard --logdir runs"),
    ("wandb.project=x", "set learner.trackers=[tensorboard,wandb], or trackio in its place"),
    ("report_to=wandb", "set learner.trackers=[tensorboard,wandb], or trackio in its place"),
    ("learner.trackers=mlflow", "learner.trackers"),
    ("environment.name=serch_r1", "tool_call, no_search, rag, program, or name"),
    ("environment.name=none:Game", "none cannot be imported: ModuleNotFoundError"),
    ("environment.name=tool_call", "its tokenizer has no chat template"),
    ("environment.tools=calculator", "name a tool as package.module:function"),
    (
        "environment.tools=broken_tools:f",
        "broken_tools cannot be imported: ModuleNotFoundError: No",
    ),
    ("environment.tools=mine:nix", "module 'mine' has no attribute 'nix': name what that module"),
    ("environment.tools=mine:silent", "it has no docstring, which is what the policy is told"),
    ("environment=rag", "did you mean environment.name=rag?"),
    ("rewards.custom=mine:raises rewards.weights.custom=1", "mine:raises raised KeyError: 'gold'"),
    ("rewards.custom=mine:nix rewards.weights.custom=1", "name what that module holds"),
    ("rewards.custom=mine:raises", "acts on nothing with rewards.weights.custom = 0: give it a we"),
    ("rewards.weights.exact_match=1", "did you mean 'rewards.weights.em'?"),
    ("rewards.weights.em=-1", "expected `float` >= 0.0"),
    ("rewards.mode=em", "choose one of 'strict', 'search_r1'"),
    ("rewards.judge.url=localhost:8000", "give the base URL of an OpenAI-compatible server"),
    ("seed=abc", "expected `int`, got `str`"),
    ("run_dir=notes", "it holds 'notes.txt', which are no run's: name a new or empty directory"),
    ("run_dir=runs/latest", "in use by another run, which is kept: name a new one, or go on with"),
    ("run_dir=corpus.jsonl", "a file, no directory: name another"),
    ("run_dir=corpus.jsonl/run", "{here}/corpus.jsonl' is no directory: name another"),
]
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"architectures": ["BertForMaskedLM"]},
    "awq": {"quantization_config": {"quant_method": "awq", "bits": 4}},
    **{
        name: {}
        for name in ("pointer", "half", "pickle", "mute", "torn", "models--tiny/snapshots/1")
    },
}
FILES = {
    "train.jsonl": '{"question": "what is the mayor", "answers": ["kelu"]}\n',
    "other.jsonl": '{"text": "what is the mayor", "answers": ["kelu"]}\n',
    "columns.jsonl": '{"prompt": "a", "completion": "b"}\n' * 2,
    "unanswered.jsonl": '{"question": "a"}\n',
    "same_ids.jsonl": '{"id": 1, "question": "a", "answers": ["b"]}\n' * 2,
    "empty.jsonl": "",
    "numbers.jsonl": '{"question": "a", "answers": [1500]}\n',
    "table.csv": "question,answers\na,b\n",
    "list.json": '[\n{"question": "a", "answers": ["b"]}\n]\n',
    "corpus.jsonl": '{"id": "1", "contents": "bore\\nthe mayor of bore is kelu"}\n',
    "titled.jsonl": '{"title": "bore", "text": "the mayor of bore is kelu"}\n',
    "other_corpus.jsonl": '{"id": "2", "contents": "bore\\nthe mayor of bore is rado"}\n',
    "same_passages.jsonl": '{"id": "1", "contents": "bore\\na"}\n' * 2,
    "notes/notes.txt": "plain text\n",
    "runs/latest/config.yaml": "seed: 1\n",
    "runs/latest/logs/learner.log": "",
    "vectors.faiss": "IxFI",
    "adapter/adapter_config.json": "{}",
    "gguf/m.gguf": "GGUF",
    "open_key": "abc\n",
    "tab.yaml": "model:\n\tpath: here\n",
    "open.yaml": "learner: {betas: [1, 2\n",
    "twice.yaml": "seed: 1\nrun_dir: here\nseed: 2\n",
    "list.yaml": "- seed\n",
    "text.yaml": "model: here\n",
    "joined.yaml": "model: {path:mine/model}\n",
    "joined_line.yaml": "model:\n  path:mine/model\n",
    "joined_lines.yaml": "model:\n  path:mine/model\n  dtype: float32\n",
    "mine.py": "def raises(t):\n    raise KeyError('gold')\n\n\ndef silent(t):\n    return t\n",
    "broken_tools.py": "import none_of_ours\n",
}


@pytest.fixture(scope="module")
def here(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sound model, questions and corpus, and with what people take for them."""
    folder = tmp_path_factory.mktemp("here")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "open_key").chmod(0o644)
    for name, changed in {"model": {}, **MODELS}.items():
        shutil.copytree(tiny_model_path, folder / name)
        tree = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(tree | changed))
    for file in (folder / "mute").glob("tokenizer*"):
        file.unlink()
    (folder / "torn" / "config.json").write_text("{")
    weights = "model.safetensors"
    (folder / "pointer" / weights).write_text("version https://git-lfs.github.com/spec/v1\n")
    (folder / "pickle" / weights).rename(folder / "pickle" / "pytorch_model.bin")
    (folder / "half" / weights).rename(folder / "half" / "model-1.safetensors")
    parts = {name: f"model-{name}.safetensors" for name in "12"}
    (folder / "half" / f"{weights}.index.json").write_text(json.dumps({"weight_map": parts}))
    assert cli.main(["index", str(folder / "corpus.jsonl"), str(folder / "index")]) == 0
    return folder


class NoSearches(BaseHTTPRequestHandler):
    """Answers every request with an error, and says nothing of it."""

    def log_message(self, format: str, *arguments: object) -> None: ...


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    """`web`: that of a web server which is no retrieval server; `free`: one that nobody uses."""
    with socket.socket() as unused, HTTPServer(("127.0.0.1", 0), NoSearches) as server:
        unused.bind(("127.0.0.1", 0))
        free = unused.getsockname()[1]
        unused.close()
        serving = Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield {"web": server.server_port, "free": free}
        server.shutdown()
        serving.join()


@pytest.fixture
def refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """refused(words): what `forage WORDS` says; nothing may be started, written or accepted."""
    started: list[object] = []

    def start(*arguments: object, **_: object) -> None:
        started.append(arguments)
        raise AssertionError(f"started: {arguments}")

    def refuse(words: str) -> str:
        before = _files(here)
        assert cli.main(shlex.split(words)) == Exit.BAD_INPUT
        assert (started, _files(here)) == ([], before)
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.startswith("forage: ")
        assert printed.err.count("\n") == 1, printed.err
        return printed.err

    import ray  # a run's processes are placed by it

    for owner, name in ((subprocess.Popen, "__init__"), (os, "fork"), (os, "posix_spawn")):
        monkeypatch.setattr(owner, name, start)
    for owner, name in ((socket.socket, "listen"), (zmq.Socket, "bind"), (ray, "init")):
        monkeypatch.setattr(owner, name, start)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(terminal, "FIRST_S", 600.0)  # however slow the machine is
    monkeypatch.syspath_prepend(here)
    monkeypatch.chdir(here)
    return refuse


def _files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("words", "said"), COMMANDS, ids=[words or "nothing" for words, _ in COMMANDS]
)
def test_a_wrong_command_is_refused(words: str, said: str, refused: Callable[[str], str]) -> None:
    error = refused(words.replace("BASE", BASE).replace("GOOD", GOOD))
    assert said in error


@pytest.mark.parametrize(("overrides", "remedy"), SETTINGS)
def test_a_wrong_setting_is_refused(
    overrides: str,
    remedy: str,
    here: Path,
    ports: dict[str, int],
    refused: Callable[[str], str],
) -> None:
    for name, port in ports.items():
        overrides = overrides.replace(f"{{{name}}}", str(port))
    error = refused(f"train {BASE} {GOOD} {overrides}")
    field, _, value = overrides.split()[0].partition("=")
    assert all(part in error for part in (*field.split("."), Path(value).name)), error
    assert remedy.replace("{here}", str(here)) in error, error


def test_what_is_sound_is_not_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    try:
        assert cli.main(["train", BASE, *GOOD.split(), "--prepare-only"]) == Exit.DONE
    finally:
        shutil.rmtree(here / "run", ignore_errors=True)


def test_ranks_do_not_share_a_gpu(
    refused: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "totals", lambda: [80 * GIB])
    error = refused(f"train {BASE} {GOOD} learner.ranks=2")
    needed = "each rank needs one of its own, so that with actors.count = 1 this run takes 3: lower"
    assert f"learner.ranks = 2 on 1 GPU: {needed} learner.ranks to at most 1" in error


def test_a_recipe_for_gpus_asks_for_them(refused: Callable[[str], str]) -> None:
    recipe = str(REPOSITORY / "configs" / "asearcher_7b.yaml")
    kept = "model.dtype=float32 model.max_model_len=512 retrieval.index= retrieval.encoder= "
    kept += "actors.max_action_tokens=128"
    error = refused(f"train {recipe} {GOOD} {kept} environment.name=search_r1 questions.prompt=")
    assert "no GPU is visible, and this configuration is for 8" in error


def test_no_command_is_left_out() -> None:
    tried = " ".join(words for words, _ in COMMANDS)
    assert [command for command in cli.COMMANDS if command not in tried] == []
