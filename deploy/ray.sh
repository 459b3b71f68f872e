#!/usr/bin/env bash
# Start Ray on this host as Forage needs it. Every template calls this; `forage` and `ray` must be on the PATH.
#   deploy/ray.sh head [option of `ray start` ...]
#   deploy/ray.sh worker HEAD [option of `ray start` ...]       HEAD: the first host's name or address
# FORAGE_INTERFACE=ib0 gives Ray that network's address. --block stays in the foreground; `ray stop` ends it.
set -euo pipefail

refuse() {
    echo "ray.sh: $1" >&2
    exit 2
}

# Whoever reaches Ray's ports may run programs on this host: no token, no Ray. Each host holds the same one.
export RAY_AUTH_MODE=token
if [ -z "${RAY_AUTH_TOKEN:-}" ]; then
    export RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
    token=$RAY_AUTH_TOKEN_PATH
    [ -s "$token" ] || refuse "no token in $token: deploy/token.sh makes one on the first host; copy it to the others"
    [ -z "$(find -L "$token" -perm /077)" ] || refuse "others may read $token: run chmod 600 $token"
fi

# A node that is silent is dead after three looks of at most 2 s each, with half a second between them.
export RAY_health_check_initial_delay_ms=1000 RAY_health_check_period_ms=500
export RAY_health_check_timeout_ms=2000 RAY_health_check_failure_threshold=3
# Ray only places processes: memory, priorities and GPUs are theirs.
export RAY_memory_monitor_refresh_ms=0 RAY_worker_niceness=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
export RAY_USAGE_STATS_ENABLED=0
ulimit -n "$(ulimit -H -n)"

# Fixed, so that a firewall can name them; Ray's workers listen on 10002 to 19999.
options=(--node-manager-port=6380 --object-manager-port=6381 --object-store-memory=104857600 --disable-usage-stats)
if [ -n "${FORAGE_INTERFACE:-}" ]; then
    address=$(ip -o -4 addr show dev "$FORAGE_INTERFACE" | awk '{split($4, part, "/"); print part[1]; exit}')
    [ -n "$address" ] || refuse "FORAGE_INTERFACE = $FORAGE_INTERFACE has no IPv4 address: \`ip addr\` lists them"
    options+=("--node-ip-address=$address")
fi

case ${1:-} in
head) exec ray start --head --port=6379 --include-dashboard=false "${options[@]}" "${@:2}" ;;
worker) exec ray start "--address=${2:?name the head: deploy/ray.sh worker HEAD}:6379" "${options[@]}" "${@:3}" ;;
*) refuse "say head, or worker HEAD" ;;
esac
