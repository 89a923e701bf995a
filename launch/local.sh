#!/usr/bin/env bash
# Trains on this machine: one process for each place of the cube, x*y*z*data in all. See --help.
# Kept to bash 3.2, which is what macOS has.
[ -n "${BASH_VERSION-}" ] || { echo "launch/local.sh needs bash. Start it by its name alone, or by bash." >&2 && exit 2; }
set -euo pipefail

script=launch/local.sh
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<TEXT
usage: launch/local.sh [OPTIONS] RECIPE [OVERRIDES...]

Runs \`python -m tools.pretrain RECIPE ...\` on this machine. When the cube needs several processes, one alone checks the
call and prepares the corpus (--prepare-only), and then torchrun starts them all.

$COMMON_OPTIONS
  --max-restarts N    when a process dies, or fails, start all of them again, up to N times (default 0). They go on from
                      the newest checkpoint of --output DIR, which must be given: --resume auto is added
  --dry-run           before RECIPE: print the command, and what each rank is told, and start nothing. Behind RECIPE:
                      print sizes, memory, traffic and the time to expect, and start nothing
$COMMON_LAST_OPTIONS
A relative RECIPE is looked for in the current directory; training itself runs in the repository's root.
OMP_NUM_THREADS is set to the cores of each process unless it is set already; without --gpu, glibc is told to keep memory
(MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_) unless it is told something already.

A signal goes to every process: after SIGTERM or SIGUSR1 they end the step, save and leave.

Exit status: 2 for a wrong call; 0 if every process ended well; 75 if they saved after a signal and want to be started
again with --resume; else that of the first process that failed (79: a hang, 80: its launcher was gone), 128 + n where
signal n ended it.
TEXT
}

restarts=0
options=--max-restarts=restarts
parse "$@"
check_restarts
processes=$ranks
read_overrides
[ "$told_only$prepares" = nono ] || { processes=1 && restarts=0; }
[ "$restarts" -eq 0 ] || resume_after_restarts
enter_root
check_gpus "$processes"
set_environment "$processes"

set_training
command=("$python")
if [ "$processes" -gt 1 ] || [ "$restarts" -gt 0 ]; then
    # The loopback address, because the names of laptops often resolve to nothing.
    command+=(launch/torchrun.py --standalone --local-addr=127.0.0.1 "--nproc-per-node=$processes")
    [ "$restarts" -eq 0 ] || command+=("--max-restarts=$restarts")
fi
command+=("${training[@]}")

if [ "$dry_run" = yes ]; then
    show "${command[@]}"
    # torchrun chooses a port.
    [ "$processes" -eq 1 ] && [ "$restarts" -eq 0 ] || show_ranks 0 "$processes" 127.0.0.1 '?' "$python" "${training[@]}"
    exit 0
fi
if [ "$processes" -gt 1 ] && [ "$module" = tools.pretrain ]; then
    # One process checks the call and prepares the corpus, so that a mistake is told once and no rank waits for text.
    before_training "$python" "${training[@]}" --prepare-only >/dev/null
fi
show "${command[@]}" >&2
# exec: signals reach torchrun itself, which passes them on to every process.
exec env ${environment[@]+"${environment[@]}"} "${command[@]}"
