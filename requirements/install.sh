#!/usr/bin/env bash
# Install into a virtual environment from the lock files: requirements/install.sh VENV [cpu|gpu]
# Each phase is named with the seconds it took; a failed or wrong install stops with the remedy.
set -euo pipefail
venv=$1
kind=${2:-cpu}
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
python=${PYTHON:-python3}

phase() { # NAME COMMAND...: run quietly, show the end of the output when it fails
    local name=$1 begun=$SECONDS log
    shift
    log=$(mktemp)
    printf '  %-44s' "$name"
    (while sleep 20; do printf .; done) &
    local ticker=$! failed=0
    "$@" >"$log" 2>&1 || failed=1
    kill "$ticker" 2>/dev/null
    wait "$ticker" 2>/dev/null || true
    if [ "$failed" = 1 ]; then
        echo " failed"
        tail -n 30 "$log" >&2
        rm -f "$log"
        exit 1
    fi
    rm -f "$log"
    echo " $((SECONDS - begun)) s"
}

"$python" - <<'P' || exit 2
import sys
if not (3, 11) <= sys.version_info[:2] < (3, 15):
    sys.exit(f"forage: Python {sys.version.split()[0]} is not supported: install Python 3.11 to 3.14, "
             "or name one with `make PYTHON=python3.12 ...`")
P

if [ "$kind" = gpu ]; then
    if [ "$(uname -sm)" != "Linux x86_64" ]; then
        echo "forage: GPUs need Linux on x86-64, this is $(uname -sm): install for the CPU, without GPU=1" >&2
        exit 2
    fi
    echo "Installing for GPUs into $venv (about 12 GB, some minutes)"
else
    echo "Installing into $venv (about 2.5 GB, a few minutes)"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check -q)
phase "virtual environment" "$python" -m venv "$venv"

quick() { # uv is ten times faster; pip knows mirrors that only pip's own configuration names
    "$venv/bin/uv" pip install --python "$venv/bin/python" --compile-bytecode -q "$@" || "${pip[@]}" install "$@"
}

install_cpu_torch() {
    torch_index=()
    if "$venv/bin/python" -c "import urllib.request as u; u.urlopen('https://download.pytorch.org/whl/cpu/torch/', timeout=3)" 2>/dev/null; then
        torch_index=(--index-url https://download.pytorch.org/whl/cpu)
    fi
    phase "torch 2.13.0 (CPU)" "${pip[@]}" install --no-deps "${torch_index[@]}" torch==2.13.0
    cuda=$("$venv/bin/python" -c "
import pathlib, runpy, sysconfig
print(runpy.run_path(str(pathlib.Path(sysconfig.get_path('purelib'), 'torch/version.py')))['cuda'] or '')")
    if [ -n "$cuda" ]; then
        echo "forage: pip gave torch built for CUDA $cuda; this environment needs the CPU build." >&2
        echo "Remedy: make https://download.pytorch.org/whl/cpu reachable, or put a CPU wheel of torch 2.13.0 where" >&2
        echo "pip looks (PIP_FIND_LINKS=FOLDER), remove $venv and run the command again." >&2
        rm -rf "$venv"
        exit 2
    fi
}

if [ "$kind" = cpu ]; then
    install_cpu_torch
fi
locked=(--no-deps --require-hashes) # nothing but the files whose digests the lock has
phase "build tools" "${pip[@]}" install "${locked[@]}" -r "$here/build.lock"
libraries=$(mktemp) deepspeed=$(mktemp)
trap 'rm -f "$libraries" "$deepspeed"' EXIT
grep -v '^deepspeed==' "$here/$kind.lock" >"$libraries"
grep '^deepspeed==' "$here/$kind.lock" >"$deepspeed"
phase "libraries ($kind.lock)" quick "${locked[@]}" -r "$libraries"
phase "DeepSpeed (built from source)" \
    env DS_BUILD_OPS=0 "${pip[@]}" install "${locked[@]}" --no-build-isolation -r "$deepspeed"
phase "tools (dev.lock)" quick "${locked[@]}" -r "$here/dev.lock"
phase "forage itself" "${pip[@]}" install --no-deps --no-build-isolation -e "$root"
touch "$venv/.complete"
