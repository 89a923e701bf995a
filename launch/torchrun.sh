#!/usr/bin/env bash
# Trains on several machines: run once on each, or on all of them by launch/ssh.py or launch/slurm.sbatch. See --help.
# Kept to bash 3.2, which is what macOS has.
[ -n "${BASH_VERSION-}" ] || { echo "launch/torchrun.sh needs bash. Start it by its name alone, or by bash." >&2 && exit 2; }
set -euo pipefail

script=launch/torchrun.sh
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<TEXT
usage: launch/torchrun.sh --nodes N --node-rank R --master HOST[:PORT] [OPTIONS] RECIPE [OVERRIDES...]

Run it once on each of N nodes, with R from 0 to N - 1; HOST is node 0. Every node runs as many processes as the others.
On each node:

  1. node 0 alone checks the call and prepares the corpus (python -m tools.pretrain RECIPE ... --prepare-only)
  2. the nodes call the roll at PORT + 1: who does not come is named after --wait, and versions, recipes and numbers of
     processes must be the same everywhere (python -m tools.doctor.nodes)
  3. all processes check what training needs, at PORT + 2 (python -m tools.doctor --quick)
  4. torchrun starts the training, at PORT

  --nodes N           how many nodes (default 1)
  --node-rank R       which of them this is. With --rendezvous c10d it may be left out: steps 1 and 2 are then left out
  --master HOST[:PORT]  name or address of node 0 as all others reach it (PORT: default 29500)
  --hosts A,B,...     names of all nodes by number, to name those that do not come
  --per-node G        processes on each node (default: those that the cube needs, shared out)
  --rendezvous KIND   static: ranks are numbered by --node-rank, and a run ends when any node is lost (default); c10d: a
                      node other than the master that is lost may come back, or another one in its place, within
                      --max-restarts and --wait: start it with --no-doctor --prepared. Nodes are numbered by address.
                      It unpickles what whoever reaches PORT sends: for closed networks alone
  --job NAME          of a c10d rendezvous, the same on all nodes (default: the recipe's name and the cube)
$COMMON_OPTIONS
  --interface NAME    network interface for gloo and NCCL (default: the one that leads to HOST)
  --numa KIND         binds processes to the cores near their GPUs: node, socket, exclusive or core-complex (torchrun's
                      --numa-binding), or none (default: node on machines of several NUMA nodes with --gpu)
  --wait SECONDS      how long nodes wait for each other (default 300)
  --max-restarts N    when a process dies, or fails, start all of them again, up to N times (default 0). They go on from
                      the newest checkpoint of --output DIR, which must be given: --resume auto is added
  --secret-file FILE  first line, of 16 letters or more, is the secret of the job, the same on all nodes: by it they know
                      each other's messages, and strangers' are ignored. Readable by its owner alone. launch/ssh.py and
                      launch/slurm.sbatch bring one of their own (TENSOR3D_SECRET)
  --prepared          leave out step 1: whoever starts the nodes has done it
  --no-doctor         leave out steps 2 and 3
  --dry-run           before RECIPE: print the commands of this node and what each of its ranks is told, and start
                      nothing
$COMMON_LAST_OPTIONS
A relative RECIPE is looked for in the current directory; training itself runs in the repository's root.
OMP_NUM_THREADS (the cores of each process), GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are set unless they are set
already; without --gpu, glibc is told to keep memory (MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_) unless it is told
something already. y and z of the cube lie inside a node where they fit: see --wire of tools.pretrain.

A signal goes to every process of this node: after SIGTERM or SIGUSR1 all ranks, those of other nodes too, end the step,
save and leave.

Exit status: as of launch/local.sh; 2 also where a check finds what would keep training from starting.
TEXT
}

nodes=1
node=
master=
per_node=
rendezvous=static
job=
interface=
numa=
hosts=
patience=300
restarts=0
prepared=no
doctor=yes
secret_file=
options='--nodes=nodes --node-rank=node --master=master --hosts=hosts --per-node=per_node --rendezvous=rendezvous
    --job=job --interface=interface --numa=numa --wait=patience --max-restarts=restarts --prepared=prepared=yes
    --no-doctor=doctor=no --secret-file=secret_file'
parse "$@"
check_number --nodes "$nodes"
check_number --wait "$patience"
check_restarts
case $rendezvous in
static | c10d) ;;
*) refuse "--rendezvous must be static or c10d. Got '$rendezvous'." ;;
esac
case $numa in
'' | none | node | socket | exclusive | core-complex) ;;
*) refuse "--numa must be none, node, socket, exclusive or core-complex. Got '$numa'." ;;
esac
if [ -z "$node" ]; then
    [ "$nodes" -eq 1 ] && node=0
    [ -n "$node" ] || [ "$rendezvous" = c10d ] || refuse "--node-rank is needed: which of the $nodes nodes this is, from 0."
elif ! [[ $node =~ ^(0|${number})$ ]] || [ "$node" -ge "$nodes" ]; then
    refuse "--node-rank must be a whole number from 0 to $((nodes - 1)). Got '$node'."
fi
if [ -z "$master" ]; then
    [ "$nodes" -eq 1 ] || refuse "--master HOST[:PORT] is needed: where node 0 is to be reached."
    master=127.0.0.1
fi
port=29500
case $master in
\[*\]:*) port=${master##*:} && master=${master#\[} && master=${master%\]:*} ;;
\[*\]) master=${master#\[} && master=${master%\]} ;;
*:*:*) ;; # an IPv6 address alone
*:*) port=${master##*:} && master=${master%:*} ;;
esac
[[ $port =~ ^[1-9][0-9]{0,4}$ ]] && [ "$port" -le 65533 ] ||
    refuse "the port of --master must be from 1 to 65533, and the two above it free. Got '$port'."
[ -n "$master" ] || refuse "--master HOST[:PORT] has no host."
# One machine has nobody to wait for, and its store stays behind its loopback.
address_of_store=$master
if [ "$nodes" -eq 1 ]; then
    rendezvous=static
    address_of_store=127.0.0.1
fi
[ -z "$secret_file" ] || read_secret "$secret_file"
share_out
read_overrides
refuse_told_only
[ "$restarts" -eq 0 ] || resume_after_restarts
enter_root
check_gpus "$per_node"
set_environment "$per_node"
[ -n "$job" ] || job=$(basename "$recipe" .toml)-$cube-$copies

# Which interface leads to the master: gloo would take the one that this host's name resolves to, often the loopback.
address=
if [ "$nodes" -gt 1 ]; then
    look=("$python" launch/net_interface.py "$master" ${interface:+--interface "$interface"})
    if [ "$dry_run" = yes ]; then
        found=$("${look[@]}") || found="${interface:-?} ?"
    else
        note=$(mktemp)
        trap 'rm -f "$note"' EXIT
        before_training "${look[@]}" --wait "$patience" >"$note"
        found=$(cat "$note")
        rm -f "$note"
        trap - EXIT
    fi
    interface=${found% *}
    address=${found#* }
    [ -n "${GLOO_SOCKET_IFNAME:-}" ] || environment+=("GLOO_SOCKET_IFNAME=$interface")
    [ -n "${NCCL_SOCKET_IFNAME:-}" ] || environment+=("NCCL_SOCKET_IFNAME=$interface")
fi
if [ -z "$numa" ]; then
    numa=none
    memories=(/sys/devices/system/node/node[0-9]*)
    [ "$device" != gpu ] || [ "${#memories[@]}" -lt 2 ] || numa=node
fi

# $1: port of the store.
set_torchrun() {
    torchrun=("$python" launch/torchrun.py "--nnodes=$nodes" "--nproc-per-node=$per_node")
    if [ "$rendezvous" = static ]; then
        torchrun+=("--node-rank=$node" "--master-addr=$master" "--master-port=$1" "--rdzv-conf=timeout=$patience")
    else
        local here=''
        [ -z "$node" ] || here=",is_host=$([ "$node" -eq 0 ] && echo 1 || echo 0)"
        torchrun+=(--rdzv-backend=c10d "--rdzv-endpoint=$master:$1" "--rdzv-id=$job")
        torchrun+=("--rdzv-conf=join_timeout=$patience,timeout=$patience,read_timeout=$patience$here")
    fi
    [ -z "$address" ] || torchrun+=("--local-addr=$address")
    [ "$numa" = none ] || torchrun+=("--numa-binding=$numa")
}

set_training
prepare=()
if [ "$module" = tools.pretrain ] && [ "$node" = 0 ] && [ "$prepared" = no ]; then
    prepare=("$python" "${training[@]}" --prepare-only)
fi
set_torchrun $((port + 2))
set_check "${torchrun[@]}"
roll=()
if [ "$doctor" = yes ] && [ -n "$node" ] && [ "$nodes" -gt 1 ]; then
    roll=("$python" -m tools.doctor.nodes --nodes "$nodes" --node-rank "$node" --master "$master:$((port + 1))")
    roll+=(--training-port "$port" --per-node "$per_node" --wait "$patience" --recipe "$recipe")
    [ -z "$hosts" ] || roll+=(--hosts "$hosts")
    roll+=(${folders[@]+"${folders[@]}"})
fi
set_torchrun "$port"
[ "$restarts" -eq 0 ] || torchrun+=("--max-restarts=$restarts")
command=("${torchrun[@]}" "${training[@]}")

if [ "$dry_run" = yes ]; then
    show_any ${prepare[@]+"${prepare[@]}"}
    show_any ${roll[@]+"${roll[@]}"}
    show_any ${check[@]+"${check[@]}"}
    show "${command[@]}"
    [ "$rendezvous" = static ] || node=
    show_ranks "$node" "$per_node" "$address_of_store" "$port" "$python" "${training[@]}"
    exit 0
fi
if [ "$nodes" -gt 1 ] && [ -z "${TENSOR3D_SECRET:-}" ]; then
    say "the job has no secret: whoever reaches $master:$port can end it. Give --secret-file, or start by launch/ssh.py."
fi
[ "$rendezvous" = static ] || say "--rendezvous c10d is PyTorch's own, which unpickles what it is sent: whoever reaches \
$master:$port can run commands as $(id -un). Use it in a closed network alone."
for step in prepare roll check; do
    words="${step}[@]"
    words=(${!words+"${!words}"})
    [ "${#words[@]}" -ne 0 ] || continue
    if [ "$step" = prepare ]; then
        before_training "${words[@]}" >/dev/null
    else
        before_training "${words[@]}"
    fi
done
show "${command[@]}" >&2
# exec: signals reach torchrun itself, which passes them on to every process.
exec env ${environment[@]+"${environment[@]}"} "${command[@]}"
