#!/usr/bin/env bash
# Trains on one or several machines by mpirun of Open MPI, MPICH or Intel MPI. See --help.
# Kept to bash 3.2, which is what macOS has.
[ -n "${BASH_VERSION-}" ] || { echo "launch/mpirun.sh needs bash. Start it by its name alone, or by bash." >&2 && exit 2; }
set -euo pipefail

script=launch/mpirun.sh
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<TEXT
usage: launch/mpirun.sh [--hosts A,B,... | --hostfile FILE] [OPTIONS] RECIPE [OVERRIDES...]

Run it once, on any machine from which mpirun reaches the hosts. They have the repository at the same path, and a
library of the same MPI, which mpi4py finds.

  1. one process here checks the call and prepares the corpus (python -m tools.pretrain RECIPE ... --prepare-only)
  2. all processes check what training needs (mpirun ... python launch/mpi_worker.py -m tools.doctor --quick)
  3. mpirun starts the training (mpirun ... python launch/mpi_worker.py -m tools.pretrain RECIPE ...)

MPI only tells the processes where they are: gloo or NCCL carries the tensors. On this machine alone, without options of
mpirun's own, MPICH's mpiexec.gforker takes its place where it lies beside it: mpirun listens on all addresses.

  --hosts A,B,...     the nodes; the first one has rank 0 (default: this machine, or what the scheduler has given)
  --hostfile FILE     a node a line, with slots=N or :N behind it if wanted; # begins a comment
  --per-node G        processes on each node (default: those that the cube needs, shared out)
  --mpirun COMMAND    instead of mpirun; may have options of its own
$COMMON_OPTIONS
  --interface NAME    network interface by which the nodes reach each other (default: the one that leads to them)
  --bind-to WHAT      binds each process to its share of core, numa, ... (default: none)
  --wait SECONDS      how long processes wait for each other (default 300)
  --no-doctor         leave out step 2
  --dry-run           before RECIPE: print the commands and what each rank is told, and start nothing
$COMMON_LAST_OPTIONS
A relative RECIPE is looked for in the current directory; training itself runs in the repository's root.
OMP_NUM_THREADS is set to the cores of each process, as counted here, unless it is set already; MPI4PY_LIBMPI to
mpirun's own library, where it lies beside it, so that mpi4py takes no other. With Open MPI, which passes on nothing by
itself, the processes also get PATH, LD_LIBRARY_PATH, PYTHONPATH and what begins with OMP_, MKL_, MALLOC_, CUDA_, NCCL_,
GLOO_ or TORCH_. Without --gpu, glibc is told to keep memory (MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_) unless it is told
something already. GLOO_SOCKET_IFNAME is set by launch/mpi_worker.py where there are several nodes.

A signal goes to every process: after SIGTERM or SIGUSR1 they end the step, save and leave. SIGTERM a second time ends
them without.

Exit status: as of launch/local.sh; 2 also where a check finds what would keep training from starting.
TEXT
}

hosts=
hostfile=
per_node=
mpirun=
interface=
bind=none
patience=300
doctor=yes
options='--hosts=hosts --hostfile=hostfile --per-node=per_node --mpirun=mpirun --interface=interface --bind-to=bind
    --wait=patience --no-doctor=doctor=no'

# The nodes into the array `names`; slots of the file into `slots`.
read_hosts() {
    names=()
    slots=
    local line words name rest count twice
    if [ -n "$hostfile" ]; then
        [ -z "$hosts" ] || refuse "--hosts and --hostfile exclude each other. Choose one."
        [ -f "$hostfile" ] || refuse "--hostfile '$hostfile' does not exist."
        while IFS= read -r line || [ -n "$line" ]; do
            line=${line%$'\r'} # of an editor of Windows, as is a byte order mark
            line=${line#$'\xef\xbb\xbf'}
            read -r name rest <<<"${line%%#*}" || true
            [ -n "$name" ] || continue
            count=$rest
            case $name in
            *:*) count=slots=${name#*:}$rest && name=${name%%:*} ;;
            esac
            [ -z "$count" ] || [[ $count =~ ^slots=${number}$ ]] ||
                refuse "--hostfile $hostfile: a host is written NAME, NAME slots=N or NAME:N. Got '$line'."
            [ "${#names[@]}" -eq 0 ] || [ "$slots" = "${count#slots=}" ] ||
                refuse "--hostfile $hostfile: every node has as many processes as the others. $name has other slots."
            slots=${count#slots=}
            names+=("$name")
        done <"$hostfile"
        [ "${#names[@]}" -gt 0 ] || refuse "--hostfile $hostfile names no host."
    elif [ -n "$hosts" ]; then
        [[ $hosts != *$'\n'* ]] || refuse "hosts are names with commas between them, in one line. Got $(printf %q "$hosts")."
        IFS=, read -r -a words <<<"$hosts"
        names=("${words[@]}")
    fi
    for name in ${names[@]+"${names[@]}"}; do
        [[ $name =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || refuse "a host is a name or an address. Got '$name'."
    done
    # Names of hosts know no case.
    twice=$(printf '%s\n' ${names[@]+"${names[@]}"} | tr '[:upper:]' '[:lower:]' | sort | uniq -d)
    [ -z "$twice" ] || refuse "host ${twice%%$'\n'*} is given twice. Every node is one host."
}

# Which MPI `mpirun` belongs to, into `kind` and `major`; the library beside it, into `library`.
recognise() {
    local said path prefix file
    read -r -a starter <<<"${mpirun:-mpirun}"
    if [ -z "$mpirun" ] && ! command -v mpirun >/dev/null && [ -x .venv/bin/mpirun ]; then
        starter=("$root/.venv/bin/mpirun")
    fi
    path=$(cd "$start" && path=$(command -v "${starter[0]}") && cd "$(dirname "$path")" &&
        printf '%s/%s' "$(pwd -P)" "$(basename "$path")") ||
        refuse "'${starter[0]}' is not there. Load the module of an MPI, install one (pip install mpich), or name it: --mpirun."
    starter[0]=$path
    said=$("$path" --version 2>&1 || true)
    case $said in
    *"Open MPI"* | *"Open-MPI"* | *OpenRTE*) kind=openmpi ;;
    *HYDRA* | *MPICH* | *mpich* | *"Intel(R) MPI"*) kind=mpich ;;
    *) refuse "$path is neither Open MPI's, MPICH's nor Intel's. It says: '${said%%$'\n'*}'. Name another one: --mpirun." ;;
    esac
    major=5
    if [[ $said =~ \)\ ([0-9]+)\. ]]; then major=${BASH_REMATCH[1]}; fi
    # MPICH's mpirun listens on all addresses of the machine, for its own ends on other hosts. Where there are none, the
    # simple starter of the same MPICH does without.
    forker=
    if [ "$kind" = mpich ] && [ "$nodes" -eq 1 ] && [ "${#names[@]}" -eq 0 ] && [ "${#starter[@]}" -eq 1 ] &&
        [ -z "$scheduler$interface" ] && [ "$bind" = none ] && [ -x "${path%/*}/mpiexec.gforker" ] && command -v pkill >/dev/null; then
        forker=${path%/*}/mpiexec.gforker
    fi
    library=
    prefix=${path%/bin/*}
    [ -z "${MPI4PY_LIBMPI:-}" ] || return 0
    for file in "$prefix"/lib/libmpi.so.[0-9]* "$prefix"/lib64/libmpi.so.[0-9]*; do
        if [ -e "$file" ] && [ -z "$library" ]; then library=$file; fi
    done
}

# What stands before `python` on mpirun's command line: its own options, by its own words.
set_starter() {
    local name list='' threads=${OMP_NUM_THREADS:-}
    for name in ${environment[@]+"${environment[@]}"}; do
        case $name in
        OMP_NUM_THREADS=*) threads=${name#*=} ;;
        esac
    done
    if [ "$kind" = openmpi ]; then
        for name in ${names[@]+"${names[@]}"}; do list+=${list:+,}$name:$per_node; done
        starter+=(-n "$ranks")
        # Without hosts and scheduler Open MPI would start no more processes than there are cores.
        [ -n "$list" ] || [ -n "$scheduler" ] || list=localhost:$per_node
        [ -z "$list" ] || starter+=(--host "$list")
        if [ "$bind" = none ]; then
            starter+=(--map-by "ppr:$per_node:node" --bind-to none)
        else
            starter+=(--map-by "ppr:$per_node:node:PE=$threads" --bind-to "$bind")
        fi
        [ "$(id -u)" -ne 0 ] || starter+=(--allow-run-as-root)
        if [ -n "$interface" ]; then
            starter+=(--mca btl_tcp_if_include "$interface")
            if [ "$major" -ge 5 ]; then
                starter+=(--prtemca prte_if_include "$interface")
            else
                starter+=(--mca oob_tcp_if_include "$interface")
            fi
        fi
        for name in $(compgen -e); do
            case $name in
            PATH | LD_LIBRARY_PATH | PYTHONPATH | MPI4PY_* | OMP_* | MKL_* | MALLOC_* | CUDA_* | NCCL_* | GLOO_* | \
                TORCH_*)
                case " ${environment[*]-} " in
                *" $name="*) ;;
                *) starter+=(-x "$name") ;;
                esac
                ;;
            esac
        done
        for name in ${environment[@]+"${environment[@]}"}; do starter+=(-x "$name"); done
    elif [ -n "$forker" ]; then
        starter=("$forker" -n "$ranks")
        for name in ${environment[@]+"${environment[@]}"}; do starter+=(-genv "${name%%=*}" "${name#*=}"); done
    else
        for name in ${names[@]+"${names[@]}"}; do list+=${list:+,}$name; done
        starter+=(-n "$ranks" -ppn "$per_node")
        [ -z "$list" ] || starter+=(-hosts "$list")
        if [ "$bind" = none ]; then
            starter+=(-bind-to none)
        else
            starter+=(-bind-to "$bind:$([ "$bind" = core ] && echo "$threads" || echo 1)")
        fi
        [ -z "$interface" ] || starter+=(-iface "$interface")
        for name in ${environment[@]+"${environment[@]}"}; do starter+=(-genv "${name%%=*}" "${name#*=}"); done
    fi
}

# Removes the folders of those of this user's scripts that were killed.
sweep_notes() {
    local folder process
    for folder in "${TMPDIR:-/tmp}"/tensor3d-mpirun-[0-9]*-??????; do
        process=${folder##*tensor3d-mpirun-}
        if [ ! -L "$folder" ] && [ -O "$folder" ] && ! kill -0 "${process%-*}" 2>/dev/null; then rm -rf "$folder"; fi
    done
}

job=
again=no
first=
caught=
# Both kinds of mpirun hand SIGUSR1 on to the ranks, but for SIGTERM Open MPI's ends all of them at once.
# shellcheck disable=SC2329  # traps call it
pass() {
    again=yes
    caught=$1
    local name=$1
    if [ "$name" = TERM ]; then
        # A scheduler may send it to several processes that pass it on: within two seconds it is the same.
        [ -n "$first" ] || first=$SECONDS
        [ $((SECONDS - first)) -gt 2 ] || name=USR1
    fi
    [ -n "$job" ] || return 0
    if [ -n "$forker" ] && [ "$name" = USR1 ]; then # it would die of it: its children are told
        pkill -USR1 -P "$job" || true
    else
        kill -s "$name" "$job" 2>/dev/null || true
    fi
}

# Runs mpirun and passes signals on. The status of the job into `status`.
under_mpirun() {
    rm -f "$notes/status"
    # A process group of its own: Ctrl-C comes by `pass` alone.
    set -m
    "$@" </dev/null &
    job=$!
    [ -z "$caught" ] || pass "$caught" # it came before there was a job
    # When a node is lost, mpirun waits for it although rank 0 has ended the job.
    {
        until [ -s "$notes/status" ]; do sleep 1; done
        sleep 20
        kill -s KILL -- "-$job"
    } </dev/null >/dev/null 2>&1 &
    local watcher=$!
    set +m
    again=yes
    while [ "$again" = yes ]; do # a trapped signal ends `wait`, not mpirun
        again=no
        status=0
        wait "$job" || status=$?
    done
    job=
    kill -s KILL -- "-$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    # mpirun's own status, where rank 0 is on another machine than this script.
    [ ! -s "$notes/status" ] || read -r status <"$notes/status"
    if [ "$caught" = INT ] && [ "$status" -ne 0 ]; then status=130; fi
}

parse "$@"
check_number --wait "$patience"
[[ $bind =~ ^[a-z0-9]+$ ]] || refuse "--bind-to must be one of mpirun's words: none, core, numa, ... Got '$bind'."
scheduler=${SLURM_JOB_ID:-${PBS_JOBID:-${LSB_JOBID:-${PE_HOSTFILE:-}}}}
read_hosts
if [ "${#names[@]}" -gt 0 ]; then
    nodes=${#names[@]}
    per_node=${per_node:-$slots}
elif [ -n "$per_node" ]; then
    check_number --per-node "$per_node"
    nodes=$((ranks / per_node))
    [ "$nodes" -le 1 ] || [ -n "$scheduler" ] ||
        refuse "a cube of $cube and $copies copies needs $ranks processes, $nodes nodes of $per_node. Name them: --hosts."
else
    nodes=1
    [ -z "$scheduler" ] || [ "$ranks" -eq 1 ] || refuse "in a scheduler's job --per-node or --hosts is needed."
fi
share_out
read_overrides
refuse_told_only
for word in "$recipe" ${overrides[@]+"${overrides[@]}"}; do
    case $word in
    :*) refuse "mpirun would begin another command at the word '$word'. Write --NAME=VALUE as one word, or ./$word for a file." ;;
    esac
done
enter_root
recognise
[ "$nodes" -gt 1 ] || check_gpus "$per_node" # the doctor counts those of other nodes
set_environment "$per_node"

set_training
prepare=()
[ "$module" != tools.pretrain ] || prepare=("$python" "${training[@]}" --prepare-only)
here=(${environment[@]+"${environment[@]}"})
[ -z "$library" ] || environment+=("MPI4PY_LIBMPI=$library")
set_starter
case $python in
*/*) starter+=("$root/$python") ;;
*) starter+=("$python") ;;
esac
starter+=(launch/mpi_worker.py --wait "$patience" ${interface:+--interface "$interface"})
if [ "$dry_run" = no ]; then
    sweep_notes
    notes=$(mktemp -d "${TMPDIR:-/tmp}/tensor3d-mpirun-$$-XXXXXX")
    trap 'rm -rf "$notes"' EXIT
    starter+=(--status-file "$notes/status")
fi
set_check "${starter[@]}"
command=("${starter[@]}" "${training[@]}")

environment=(${here[@]+"${here[@]}"})
if [ "$dry_run" = yes ]; then
    show_any ${prepare[@]+"${prepare[@]}"}
    environment=()
    show_any ${check[@]+"${check[@]}"}
    show "${command[@]}"
    for ((rank = 0; rank < ranks; rank++)); do
        printf '%s: RANK=%s LOCAL_RANK=%s WORLD_SIZE=%s LOCAL_WORLD_SIZE=%s GROUP_RANK=%s MASTER_ADDR=%s MASTER_PORT=? ' \
            "${names[$((rank / per_node))]-node $((rank / per_node))}" "$rank" $((rank % per_node)) "$ranks" "$per_node" \
            $((rank / per_node)) "$([ "$nodes" -gt 1 ] && echo '?' || echo 127.0.0.1)"
        show "$python" "${training[@]}"
    done
    exit 0
fi
[ "${#prepare[@]}" -eq 0 ] || before_training "${prepare[@]}" >/dev/null
environment=()
trap 'pass TERM' TERM HUP
trap 'pass USR1' USR1
trap 'pass INT' INT
if [ "${#check[@]}" -gt 0 ]; then
    under_mpirun "${check[@]}"
    [ "$status" -eq 0 ] || exit "$status"
fi
[ -z "$caught" ] || exit "$([ "$caught" = INT ] && echo 130 || echo 143)"
show "${command[@]}" >&2
under_mpirun "${command[@]}"
exit "$status"
