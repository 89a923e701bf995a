#!/usr/bin/env bash
# The far end of launch/ssh.py: runs a command, passes on the signals whose names come in by standard input, and ends
# the command when that closes, which is how a broken connection looks from here.
set -u

[ $# -gt 0 ] || {
    printf 'usage: launch/remote.sh COMMAND...\n' >&2
    exit 2
}
trap : HUP # from the end of the connection; what follows from it comes by standard input
exec 3<&0
"$@" </dev/null 3<&- &
child=$!
{
    while read -r name; do
        kill -s "$name" "$child"
    done
    kill -s TERM "$child"
    sleep 60 &
    trap 'kill "$!"; exit' TERM
    wait "$!"
    kill -s KILL "$child"
} <&3 >/dev/null 2>&1 &
reader=$!
exec 3<&-
# A trapped signal ends `wait`, not the command.
while :; do
    wait "$child"
    status=$?
    kill -0 "$child" 2>/dev/null || break
done
kill "$reader" 2>/dev/null
exit "$status"
