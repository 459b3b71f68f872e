#!/usr/bin/env bash
# Before this host goes: tell Ray, and so each run's launcher, which has the actors here drain and start elsewhere. Wait
# for that, SECONDS at most (60); with RUN, for the actors of that run's directory alone.
#   deploy/drain.sh [SECONDS [RUN]]
# What they had not finished is leased again to others; nothing delivered is lost. Ray places nothing new here.
set -euo pipefail
seconds=${1:-60} words="-m actors.worker ${2:+${2%/}/config.yaml }"
deadline=$((SECONDS + seconds))
export RAY_AUTH_MODE=token

actors() {
    local file
    for file in /proc/[0-9]*/cmdline; do
        if tr '\0' ' ' 2>/dev/null <"$file" | grep -qF -- "$words"; then
            file=${file#/proc/}
            echo "${file%/cmdline}"
        fi
    done
}

ray drain-node --reason=DRAIN_NODE_REASON_PREEMPTION --reason-message=drain.sh --deadline-remaining-seconds="$seconds"
while [ -n "$(actors)" ]; do
    if [ "$SECONDS" -ge "$deadline" ]; then
        echo "drain.sh: not drained in time: $(actors | xargs)" >&2
        exit 1
    fi
    sleep 0.2
done
