#!/usr/bin/env bash
# Start Ray on this node as Forage needs it. Every template calls this; `forage` and `ray` must be on the PATH.
#   deploy/ray.sh head [option of `ray start` ...]
#   deploy/ray.sh worker HEAD [option of `ray start` ...]       HEAD: the first node's host name or address
# FORAGE_INTERFACE=ib0 gives Ray that network's address. --block stays in the foreground; `ray stop` ends it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=/dev/null
. "$here/checks.sh"

case ${1:-} in
head) ;;
worker)
    [ -n "${2:-}" ] || refuse "name the head: deploy/ray.sh worker HEAD"
    [[ $2 != *:6379 ]] || refuse "HEAD = $2: name it without the port"
    ;;
*) refuse "say head, or worker HEAD" ;;
esac
require_commands ray
require_token

# A node that is silent is dead after three looks of at most 2 s each, with half a second between them.
export RAY_health_check_initial_delay_ms=1000 RAY_health_check_period_ms=500
export RAY_health_check_timeout_ms=2000 RAY_health_check_failure_threshold=3
# Ray only places processes: memory, priorities and GPUs are theirs.
export RAY_memory_monitor_refresh_ms=0 RAY_worker_niceness=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
export RAY_USAGE_STATS_ENABLED=0 RAY_enable_metrics_collection=0
ulimit -n "$(ulimit -H -n)" 2>/dev/null || true # `forage doctor` says where that is too few

# Fixed, so that a firewall can name them; Ray's workers listen on 10002 to 19999.
options=(--node-manager-port=6380 --object-manager-port=6381 --object-store-memory=104857600 --disable-usage-stats)
if [ -n "${FORAGE_INTERFACE:-}" ]; then
    command -v ip >/dev/null || refuse "FORAGE_INTERFACE = $FORAGE_INTERFACE needs the command ip: install iproute2"
    address=$(ip -o -4 addr show dev "$FORAGE_INTERFACE" 2>/dev/null |
        awk '{split($4, part, "/"); print part[1]; exit}') || true
    [ -n "$address" ] || refuse "FORAGE_INTERFACE = $FORAGE_INTERFACE has no IPv4 address: \`ip addr\` lists them"
    options+=("--node-ip-address=$address")
fi

case $1 in
head) exec ray start --head --port=6379 --include-dashboard=false "${options[@]}" "${@:2}" ;;
worker) exec ray start "--address=$2:6379" "${options[@]}" "${@:3}" ;;
esac
