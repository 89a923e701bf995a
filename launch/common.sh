# shellcheck shell=bash
# What the launchers share: options, checks, and how a command is shown. Sourced, never run.
# Kept to bash 3.2, which is what macOS has.
#
# A launcher sets `script`, its name in messages, and `options`, its own ones: words --NAME=VARIABLE for those with a value,
# --NAME=VARIABLE=VALUE for flags. It defines
#   usage        prints its help
#   own_option   takes options that are not as simple: looks at $option, calls `has_value` or `is_flag`, and returns 1 for
#                what is not its own
# `parse "$@"` then sets the variables, and leaves
#   cube, copies, ranks     the box and what it needs
#   device                  any, cpu or gpu
#   module, recipe          what runs
#   overrides               what goes to training as it is
#   dry_run                 yes or no

# shellcheck disable=SC2034,SC2154  # variables that the launchers read, or set

unset CDPATH # by which `cd launch/..` could go elsewhere
# A launcher numbers its processes itself: what a shell has of another job would make one process wait for others.
unset WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT

# shellcheck disable=SC2016  # backquotes are text
COMMON_OPTIONS='  --cube XxYxZ        sizes of the axes of the cube (default 1x1x1)
  --data-parallel N   copies of the cube (default 1)
  --cpu               hide the GPUs
  --gpu               insist on one GPU for each process (default: GPUs if there are enough, else the CPU)
  --module NAME       run `python -m NAME` with the same arguments instead of tools.pretrain'
COMMON_LAST_OPTIONS='  --help              print this (before RECIPE)
  --                  what follows is for the recipe and training, even if it looks like an option above

Options may stand before or behind RECIPE; what is not in this list and stands behind RECIPE goes to training as it is,
and so does --help: there it lists every key of a recipe.'

number='[1-9][0-9]{0,3}' # four digits keep products inside the shell's 64-bit arithmetic

refuse() {
    printf '%s: %s\n' "$script" "$1" >&2
    exit 2
}

say() {
    printf '%s: %s\n' "$script" "$1" >&2
}

# The option's value, as `--name value` or `--name=value`, into `value`.
has_value() {
    if [ "$given" != "$option" ]; then
        value=${given#*=}
        return 0
    fi
    [ "$left" -ge 2 ] || refuse "$option needs a value. See --help."
    value=$next
    taken=2
}

# Whether the word is the option alone: `--cpu=1` is none of ours.
is_flag() {
    [ "$given" = "$option" ]
}

check_number() {
    [[ $2 =~ ^${number}$ ]] || refuse "$1 must be a whole number from 1 to 9999. Got '$2'."
}

# An option of the table `options`.
listed_option() {
    local entry set_to
    for entry in $options; do
        [ "${entry%%=*}" = "$option" ] || continue
        set_to=${entry#*=}
        case $set_to in
        *=*) is_flag && printf -v "${set_to%%=*}" %s "${set_to#*=}" ;;
        *) has_value && printf -v "$set_to" %s "$value" ;;
        esac
        return
    done
    return 1
}

own_option() {
    return 1
}

# Goes through words: options of the table or of `own_option`, which finds this word and all behind it in `behind`, and
# others, which `other_word` takes. What follows a -- is left in `rest`.
read_words() {
    rest=()
    ended=no
    while [ $# -gt 0 ]; do
        behind=("$@")
        given=$1
        option=${1%%=*}
        next=${2-}
        left=$#
        taken=1
        if [ "$given" = -- ]; then
            shift
            rest=("$@")
            ended=yes
            break
        fi
        listed_option || own_option || other_word
        shift "$taken"
    done
}

check_restarts() {
    [[ $restarts =~ ^(0|${number})$ ]] || refuse "--max-restarts must be a whole number from 0 to 9999. Got '$restarts'."
}

# What stands among the options and is none of the launcher's own.
other_word() {
    case $option in
    --cpu | --gpu)
        if is_flag; then
            [ "$device" = any ] || [ "$device" = "${option#--}" ] || refuse "--cpu and --gpu exclude each other. Choose one."
            device=${option#--}
            return
        fi
        ;;
    --dry-run)
        if is_flag && [ -z "$recipe" ]; then
            dry_run=yes
            return
        fi
        ;;
    esac
    if [ -n "$recipe" ]; then
        overrides+=("$given")
    else
        case $given in
        -h | --help) usage && exit 0 ;;
        -*) refuse "unknown option '$given' before the recipe. See --help." ;;
        *) recipe=$given ;;
        esac
    fi
}

parse() {
    cube=1x1x1
    copies=1
    device=any
    dry_run=no
    module=tools.pretrain
    recipe=
    overrides=()
    options="--cube=cube --data-parallel=copies --module=module ${options-}"
    read_words "$@"
    if [ "${#rest[@]}" -gt 0 ] && [ -z "$recipe" ]; then
        recipe=${rest[0]}
        rest=("${rest[@]:1}")
    fi
    overrides+=(${rest[@]+"${rest[@]}"})
    [[ $cube =~ ^${number}x${number}x${number}$ ]] ||
        refuse "--cube must be XxYxZ with whole numbers from 1 to 9999, like 2x2x2. Got '$cube'."
    check_number --data-parallel "$copies"
    ranks=$((${cube//x/*} * copies))
}

# The secret of the job from a file, for all processes that are started.
read_secret() {
    local mode
    [ -f "$1" ] && [ -r "$1" ] || refuse "--secret-file '$1' does not exist, or cannot be read."
    mode=$(ls -ldL -- "$1")
    [ "${mode:4:6}" = ------ ] || refuse "--secret-file '$1' can be read by others (${mode:0:10}): chmod 600 '$1'."
    IFS= read -r TENSOR3D_SECRET <"$1" || true
    [ "${#TENSOR3D_SECRET}" -ge 16 ] ||
        refuse "the first line of --secret-file '$1' must have 16 letters or more. Got ${#TENSOR3D_SECRET}."
    export TENSOR3D_SECRET
}

# How many processes each of $nodes nodes has, into `per_node`: as many as are asked for there, or the cube's shared out.
share_out() {
    if [ -z "$per_node" ]; then
        [ $((ranks % nodes)) -eq 0 ] ||
            refuse "a cube of $cube and $copies copies needs $ranks processes, which $nodes nodes cannot share evenly."
        per_node=$((ranks / nodes))
    else
        check_number --per-node "$per_node"
        [ $((nodes * per_node)) -eq "$ranks" ] ||
            refuse "a cube of $cube and $copies copies needs $ranks processes, and $nodes nodes of $per_node are \
$((nodes * per_node)). Choose another cube, or other numbers."
    fi
}

# What of the overrides a launcher must know:
#   told_only   yes: training only tells something (--help, --dry-run), and one process does that
#   prepares    yes: it prepares alone (--prepare-only), likewise
#   resume      yes: --resume is there;  named: yes: it names a checkpoint, which is not "auto"
#   output      folder of the run, empty: none is given;  wire: order of the axes, likewise
read_overrides() {
    told_only=no
    prepares=no
    resume=no
    named=no
    output=
    wire=
    local word name previous=
    for word in ${overrides[@]+"${overrides[@]}"}; do
        # Training takes names with _ for -, too.
        name=${word%%=*}
        case $name in --*_*) word=${name//_/-}${word#"$name"} ;; esac
        case $word in
        -h | --help | --dry-run) told_only=yes ;;
        --prepare-only) prepares=yes ;;
        --resume) resume=yes ;;
        --resume=*)
            resume=yes
            [ "${word#*=}" = auto ] || named=yes
            ;;
        --output=*) output=${word#*=} ;;
        --wire=*) wire=${word#*=} ;;
        esac
        [ "$previous" != --resume ] || [ "$word" = auto ] || named=yes
        [ "$previous" != --output ] || output=$word
        [ "$previous" != --wire ] || wire=$word
        previous=$word
    done
}

refuse_told_only() {
    [ "$told_only" = no ] || refuse "--help and --dry-run behind RECIPE are for one process: run them with launch/local.sh."
}

# The training's own words, behind python, into `training`.
set_training() {
    training=(-m "$module" "$recipe" --cube "$cube" --data-parallel "$copies" ${overrides[@]+"${overrides[@]}"})
}

# The check of all ranks, as it is started by the words given, into `check`; the folders that all nodes must write, into
# `folders`.
set_check() {
    folders=()
    if [ -n "$output" ]; then
        folders=(--directory "$output")
    elif [ "$module" = tools.pretrain ] && [ "$named" = no ]; then
        folders=(--directory runs) # training makes its folder there
    fi
    check=()
    [ "$doctor" = yes ] || return 0
    check=("$@" -m tools.doctor --quick --cube "$cube" --data-parallel "$copies" --recipe "$recipe" --wait "$patience")
    check+=(${folders[@]+"${folders[@]}"})
    [ "$device" != gpu ] || check+=(--gpu)
    [ -z "$wire" ] || check+=(--wire "$wire")
}

# Restarts go on from the newest checkpoint of --output.
resume_after_restarts() {
    if [ "$named" = yes ]; then
        refuse "--max-restarts and a named --resume would go back to the same checkpoint at every restart. Give \
--resume auto and --output DIR, the folder of the run."
    fi
    if [ "$resume" = no ]; then
        [ -n "$output" ] ||
            refuse "--max-restarts needs --output DIR: whoever is started again goes on from the newest checkpoint in it."
        overrides+=(--resume auto)
    fi
}

# Goes to the repository's root, where training runs; the recipe keeps its meaning. Sets `start`, `root` and `python`.
enter_root() {
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
    start=$(pwd -P)
    [ -n "$recipe" ] || refuse "a recipe is needed: $script [OPTIONS] RECIPE. Shipped ones lie in launch/recipes."
    [ -f "$recipe" ] ||
        refuse "recipe '$recipe' does not exist (looked for in $start). Shipped ones lie in launch/recipes."
    if [ "$start" != "$root" ]; then
        case $recipe in
        /*) ;;
        *) recipe=$start/$recipe ;;
        esac
        cd "$root" || exit
    fi
    python=python3
    [ ! -x .venv/bin/python ] || python=.venv/bin/python
}

# $1: processes on this machine.
check_gpus() {
    [ "$device" = gpu ] || return 0
    local gpus
    gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') ||
        refuse "--gpu: cannot ask PyTorch for its GPUs (above). Install it, with 'make .venv' for example."
    [ "$gpus" -ge "$1" ] ||
        refuse "--gpu needs one GPU for each of the $1 processes. Got $gpus. Choose a smaller cube or --cpu."
}

# What each of $1 processes on this machine gets by its environment: into the array `environment`.
set_environment() {
    environment=()
    [ "$device" != cpu ] || environment+=("CUDA_VISIBLE_DEVICES=")
    if [ -z "${OMP_NUM_THREADS:-}" ]; then
        local cores threads
        cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
        threads=$((cores / $1))
        environment+=("OMP_NUM_THREADS=$((threads > 1 ? threads : 1))")
    fi
    # glibc hands each large tensor back to the system, which clears its pages anew for the next one.
    if [ "$device" != gpu ] && [ -z "${MALLOC_MMAP_MAX_:-}${MALLOC_TRIM_THRESHOLD_:-}" ]; then
        environment+=(MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184)
    fi
}

# A command as it can be typed, with what it gets by its environment.
show() {
    local line='' word
    [ "$start" = "$root" ] || line="cd $(printf '%q' "$root") && "
    for word in ${environment[@]+"${environment[@]}"} "$@"; do
        case $word in
        *=\?) line+="$word " ;; # unknown, and no pattern of a shell here
        *) line+="$(printf '%q' "$word") " ;;
        esac
    done
    printf '%s\n' "${line% }"
}

# The same, unless there is no command.
show_any() {
    [ $# -eq 0 ] || show "$@"
}

# What each rank of a node is told, and its command. $1: the node's number, empty where the rendezvous gives it; $2: ranks
# on it; $3 and $4: address and port of the job's store; then the command.
show_ranks() {
    local node=$1 here=$2 address=$3 port=$4 local_rank rank both
    shift 4
    both=(${environment[@]+"${environment[@]}"})
    for ((local_rank = 0; local_rank < here; local_rank++)); do
        rank='?'
        [ -z "$node" ] || rank=$((node * here + local_rank))
        local environment=("RANK=$rank" "LOCAL_RANK=$local_rank" "WORLD_SIZE=$ranks" "LOCAL_WORLD_SIZE=$here"
            "GROUP_RANK=${node:-?}" "MASTER_ADDR=$address" "MASTER_PORT=$port" ${both[@]+"${both[@]}"})
        show "$@"
    done
}

# Runs a command that must end well before training starts; a signal ends it, and this script. What a preparation prints
# at its end, how to train next, is for who calls it alone: callers drop it.
before_training() {
    env ${environment[@]+"${environment[@]}"} "$@" &
    trap 'kill "$!" 2>/dev/null; exit 130' INT
    trap 'kill "$!" 2>/dev/null; exit 143' TERM USR1 HUP
    wait "$!" || exit
    trap - TERM INT USR1 HUP
}
