#!/usr/bin/env bash
# Make the token of a Ray cluster, where there is none; a shared home has it everywhere, else copy it to each host:
#   deploy/token.sh && ssh HOST 'mkdir -p -m 700 ~/.ray' && scp -p ~/.ray/auth_token HOST:.ray/
set -euo pipefail
umask 077
file=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
mkdir -p "$(dirname "$file")"
[ -s "$file" ] || od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$file"
