#!/usr/bin/env bash
# What the scripts beside this one need before they start; they source it. What is missing is one line with its remedy,
# and exit code 2.

refuse() {
    echo "$(basename "$0"): $1" >&2
    exit 2
}

require_commands() {
    local name
    for name in "$@"; do
        command -v "$name" >/dev/null ||
            refuse "$name is not on the PATH: activate Forage's environment first: . .venv-gpu/bin/activate (or .venv)"
    done
}

require_number() { # NAME VALUE
    [[ $2 =~ ^[0-9]+$ ]] || refuse "$1 = $2: give a whole number"
}

token_file() {
    [ -n "${RAY_AUTH_TOKEN_PATH:-${HOME:-}}" ] || refuse "HOME is not set: name the token's file in RAY_AUTH_TOKEN_PATH"
    echo "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}"
}

# Whoever reaches Ray's ports may run programs on this node: no token, no Ray. Each node holds the same one.
require_token() {
    export RAY_AUTH_MODE=token
    [ -z "${RAY_AUTH_TOKEN:-}" ] || return 0
    local token
    token=$(token_file)
    [ -f "$token" ] && [ -s "$token" ] ||
        refuse "no token in $token: deploy/token.sh makes one on the first node; copy it to the others"
    [ -r "$token" ] || refuse "$token cannot be read: run chown $(id -un) $token"
    [ -z "$(find -L "$token" -perm /077)" ] || refuse "others may read $token: run chmod 600 $token"
    export RAY_AUTH_TOKEN_PATH=$token
}
