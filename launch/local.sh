#!/usr/bin/env bash
# Trains on this machine: one process for each place of the cube, x*y*z*data in all. See --help.
# Kept to bash 3.2, which is what macOS has.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/local.sh [OPTIONS] RECIPE [OVERRIDES...]

Runs `python -m tools.pretrain RECIPE ...` on this machine. When the cube needs several processes, one alone checks the
call and prepares the corpus (--prepare-only), and then torchrun starts them all.

  --cube XxYxZ        sizes of the cube's axes (default 1x1x1)
  --data-parallel N   copies of the cube (default 1)
  --cpu               hide the GPUs
  --gpu               insist on one GPU for each process (default: GPUs if there are enough, else the CPU)
  --max-restarts N    when a process dies, or fails, start all of them again, up to N times (default 0). They go on from
                      the newest checkpoint of --output DIR, which must be given: --resume auto is added
  --dry-run           before RECIPE: print the command and start nothing. Behind RECIPE: print sizes, memory, traffic and
                      the time to expect, and start nothing
  --help              print this (before RECIPE)
  --                  what follows is for the recipe and training, even if it looks like an option above

Options may stand before or behind RECIPE; what is not in this list and stands behind RECIPE goes to training as it is,
and so does --help: there it lists every key of a recipe.
A relative RECIPE is looked for in the current directory; training itself runs in the repository's root.
OMP_NUM_THREADS is set to the cores of each process unless it is set already.

A signal goes to every process: after SIGTERM or SIGUSR1 they end the step, save and leave.

Exit status: 2 for a wrong call; 0 if every process ended well; 75 if they saved after a signal and want to be started
again with --resume; else that of the first process that failed (79: a hang, 80: its launcher was gone), 128 + n where
signal n ended it.
TEXT
}

refuse() {
    printf 'launch/local.sh: %s\n' "$1" >&2
    exit 2
}

# The value of an option written as two words; $1 is the option, $2 how many words are left.
need_value() {
    [ "$2" -ge 2 ] || refuse "$1 needs a value. See --help."
}

cube=1x1x1
copies=1
restarts=0
device=any
dry_run=no
recipe=
overrides=()
while [ $# -gt 0 ]; do
    case $1 in
    --cube) need_value "$1" $# && cube=$2 && shift ;;
    --cube=*) cube=${1#*=} ;;
    --data-parallel) need_value "$1" $# && copies=$2 && shift ;;
    --data-parallel=*) copies=${1#*=} ;;
    --max-restarts) need_value "$1" $# && restarts=$2 && shift ;;
    --max-restarts=*) restarts=${1#*=} ;;
    --cpu | --gpu)
        [ "$device" = any ] || [ "$device" = "${1#--}" ] || refuse "--cpu and --gpu exclude each other. Choose one."
        device=${1#--}
        ;;
    --dry-run)
        if [ -n "$recipe" ]; then overrides+=("$1"); else dry_run=yes; fi
        ;;
    --) shift && break ;;
    *)
        if [ -n "$recipe" ]; then
            overrides+=("$1")
        else
            case $1 in
            -h | --help) usage && exit 0 ;;
            -*) refuse "unknown option '$1' before the recipe. See --help." ;;
            *) recipe=$1 ;;
            esac
        fi
        ;;
    esac
    shift
done
if [ $# -gt 0 ] && [ -z "$recipe" ]; then
    recipe=$1
    shift
fi
overrides+=("$@")

# Four digits an axis keep the product inside the shell's 64-bit arithmetic.
number='[1-9][0-9]{0,3}'
[[ $cube =~ ^${number}x${number}x${number}$ ]] ||
    refuse "--cube must be XxYxZ with whole numbers from 1 to 9999, like 2x2x2. Got '$cube'."
[[ $copies =~ ^${number}$ ]] ||
    refuse "--data-parallel must be a whole number from 1 to 9999. Got '$copies'."
[[ $restarts =~ ^(0|${number})$ ]] ||
    refuse "--max-restarts must be a whole number from 0 to 9999. Got '$restarts'."
processes=$((${cube//x/*} * copies))
resume=no
named=no
output=no
previous=
for word in ${overrides[@]+"${overrides[@]}"}; do
    case $word in
    -h | --help | --dry-run) processes=1 && restarts=0 ;; # one process tells about training
    --resume) resume=yes ;;
    --resume=*)
        resume=yes
        [ "${word#*=}" = auto ] || named=yes
        ;;
    --output | --output=*) output=yes ;;
    esac
    [ "$previous" != --resume ] || [ "$word" = auto ] || named=yes
    previous=$word
done
if [ "$restarts" -gt 0 ] && [ "$named" = yes ]; then
    refuse "--max-restarts and a named --resume would go back to the same checkpoint at every restart. Give --resume auto \
and --output DIR, the folder of the run."
fi
if [ "$restarts" -gt 0 ] && [ "$resume" = no ]; then
    [ "$output" = yes ] ||
        refuse "--max-restarts needs --output DIR: whoever is started again goes on from the newest checkpoint in it."
    overrides+=(--resume auto)
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
start=$(pwd -P)
[ -n "$recipe" ] || refuse "a recipe is needed: launch/local.sh [OPTIONS] RECIPE. Shipped ones lie in launch/recipes."
[ -f "$recipe" ] || refuse "recipe '$recipe' does not exist (looked for in $start). Shipped ones lie in launch/recipes."
if [ "$start" != "$root" ]; then
    case $recipe in
    /*) ;;
    *) recipe=$start/$recipe ;;
    esac
    cd "$root"
fi

python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python

if [ "$device" = gpu ]; then
    gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') ||
        refuse "--gpu: cannot ask PyTorch for its GPUs (above). Install it, with 'make .venv' for example."
    [ "$gpus" -ge "$processes" ] ||
        refuse "--gpu needs one GPU for each of the $processes processes. Got $gpus. Choose a smaller cube or --cpu."
fi

environment=()
[ "$device" != cpu ] || environment+=("CUDA_VISIBLE_DEVICES=")
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    threads=$((cores / processes))
    environment+=("OMP_NUM_THREADS=$((threads > 1 ? threads : 1))")
fi

command=("$python")
if [ "$processes" -gt 1 ] || [ "$restarts" -gt 0 ]; then
    # The loopback address, because the names of laptops often resolve to nothing.
    command+=(launch/torchrun.py --standalone --local-addr=127.0.0.1 "--nproc-per-node=$processes")
    [ "$restarts" -eq 0 ] || command+=("--max-restarts=$restarts")
fi
command+=(-m tools.pretrain "$recipe" --cube "$cube" --data-parallel "$copies")
# The "+" forms below: bash before 4.4 calls an empty array unbound.
command+=(${overrides[@]+"${overrides[@]}"})

show() {
    local line='' word
    [ "$start" = "$root" ] || line="cd $(printf '%q' "$root") && "
    for word in ${environment[@]+"${environment[@]}"} "${command[@]}"; do
        line+="$(printf '%q' "$word") "
    done
    printf '%s\n' "${line% }"
}

if [ "$dry_run" = yes ]; then
    show
    exit 0
fi
if [ "$processes" -gt 1 ]; then
    # One process checks the call and prepares the corpus, so that a mistake is told once and no rank waits for text.
    env ${environment[@]+"${environment[@]}"} "$python" -m tools.pretrain "$recipe" --cube "$cube" \
        --data-parallel "$copies" ${overrides[@]+"${overrides[@]}"} --prepare-only &
    trap 'kill "$!" 2>/dev/null; exit 143' TERM INT USR1
    wait "$!" || exit
    trap - TERM INT USR1
fi
show >&2
# exec: signals reach torchrun itself, which passes them on to every process.
exec env ${environment[@]+"${environment[@]}"} "${command[@]}"
