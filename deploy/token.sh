#!/usr/bin/env bash
# Make the token of a Ray cluster, where there is none; a shared home has it everywhere, else copy it to each node:
#   deploy/token.sh && ssh NODE 'mkdir -p -m 700 ~/.ray' && scp -p ~/.ray/auth_token NODE:.ray/
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=/dev/null
. "$here/checks.sh"
token=$(token_file)
umask 077
folder=$(dirname "$token")
mkdir -p "$folder" 2>/dev/null && [ -w "$folder" ] ||
    refuse "no file can be made in $folder: make that folder yours, or name another file in RAY_AUTH_TOKEN_PATH"
[ ! -d "$token" ] || refuse "$token is a folder: name a file in RAY_AUTH_TOKEN_PATH"
[ -s "$token" ] || od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$token"
