#!/usr/bin/env bash
# The first node of a cluster: start Ray, wait for the other nodes, check all, then train, or go on where RUN has begun.
#   deploy/head.sh RUN NODES CONFIG [a.b=c ...]     RUN: the run's directory; NODES: how many, with this one
# SIGTERM drains the run, and the same command goes on with it. Ends with the exit code of `forage`.
# FORAGE_STAY=1: after a run that is over (exit code 0, or 3: stopped by a rule) Ray stays up until SIGTERM, for a
# container whose end would start it again.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=/dev/null
. "$here/checks.sh"
[ $# -ge 3 ] || refuse "give run, nodes and configuration: deploy/head.sh RUN NODES CONFIG [a.b=c ...]"
run=$1 nodes=$2 config=$3
require_number NODES "$nodes"
require_commands ray forage
require_token

train() {
    forage doctor --cluster auto --nodes "$nodes"
    if [ -f "$run/config.yaml" ]; then
        # This script has begun it: what its record says is what CONFIG said.
        exec forage resume "$run" --trust cluster.address=auto
    fi
    exec forage train "$config" "run_dir=$run" cluster.address=auto "$@"
}

finish() { # wait for a child, through the signals that interrupt this
    local code=0
    while wait "$1" || code=$?; kill -0 "$1" 2>/dev/null; do code=0; done
    return "$code"
}

"$here/ray.sh" head --block &
ray=$!
trap 'kill -TERM "$ray" 2>/dev/null || true; finish "$ray" || true' EXIT
run_pid='' asked='' code=0
trap 'asked=yes; [ -z "$run_pid" ] || kill -TERM "$run_pid" 2>/dev/null || true' TERM INT
train "${@:4}" &
run_pid=$!
[ -z "$asked" ] || kill -TERM "$run_pid"
finish "$run_pid" || code=$?
if { [ "$code" = 0 ] || [ "$code" = 3 ]; } && [ "${FORAGE_STAY:-}" = 1 ]; then
    trap 'kill -TERM "$ray" 2>/dev/null || true' TERM INT
    echo "head.sh: $run is over (exit code $code); Ray stays up until SIGTERM"
    finish "$ray" || true
fi
exit "$code"
