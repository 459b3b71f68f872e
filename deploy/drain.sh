#!/usr/bin/env bash
# Before this host goes: have its actors drain and leave, and wait for that, SECONDS at most (60). With RUN, the actors
# of that run's directory alone.
#   deploy/drain.sh [SECONDS [RUN]]
# What they had not finished is leased again to the others; nothing delivered is lost.
set -euo pipefail
deadline=$((SECONDS + ${1:-60}))
words="-m actors.worker ${2:+${2%/}/config.yaml }"

actors() {
    local file
    for file in /proc/[0-9]*/cmdline; do
        if tr '\0' ' ' 2>/dev/null <"$file" | grep -qF -- "$words"; then
            file=${file#/proc/}
            echo "${file%/cmdline}"
        fi
    done
}

for pid in $(actors); do
    kill -TERM "$pid" 2>/dev/null || true
done
while [ -n "$(actors)" ]; do
    if [ "$SECONDS" -ge "$deadline" ]; then
        echo "drain.sh: not drained in time: $(actors | xargs)" >&2
        exit 1
    fi
    sleep 0.2
done
