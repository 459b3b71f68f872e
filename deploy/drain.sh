#!/usr/bin/env bash
# Before this node goes: tell Ray, and so each run's launcher, which has the actors here drain and start elsewhere, and a
# learner save and move where it can. Actors for which there is no room elsewhere work on until shortly before the end.
# Wait for that, SECONDS at most (60); with RUN, for that run's directory alone.
#   deploy/drain.sh [SECONDS [RUN]]
# What actors had not finished is leased again to others; nothing delivered is lost. Ray places nothing new here.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=/dev/null
. "$here/checks.sh"
seconds=${1:-60} run=${2:+$(realpath -m -- "$2")/config.yaml }
require_number SECONDS "$seconds"
require_commands ray
require_token
deadline=$((SECONDS + seconds))

left() {
    local file
    for file in /proc/[0-9]*/cmdline; do
        if tr '\0' ' ' 2>/dev/null <"$file" | grep -qF -e "-m actors.worker $run" -e "-m learner.worker $run"; then
            file=${file#/proc/}
            echo "${file%/cmdline}"
        fi
    done
}

fail() {
    echo "drain.sh: $1" >&2
    exit 1
}

said=$(ray drain-node --reason=DRAIN_NODE_REASON_PREEMPTION --reason-message=drain.sh \
    --deadline-remaining-seconds="$seconds" 2>&1) ||
    fail "Ray takes no note (${said##*$'\n'}): see that it is up on this node, with this token (ray status)"
while [ -n "$(left)" ]; do
    [ "$SECONDS" -lt "$deadline" ] || fail "not drained in time: $(left | xargs)"
    sleep 0.2
done
