#!/usr/bin/env bash
# Everything that only a GPU can show, on a machine that may be bare and without network: `bench gpu` with its options.
#
#   launch/gpu_hour.sh [--wheels DIR] [--output DIR] [--seconds N] [--stages facts,tests,...] ...
#
# --wheels DIR   a folder of wheels of what the machine lacks; they are put in a folder of their own and change nothing.
#                Filled, where there is a network, by: python -m pip download --no-deps -d DIR tyro docstring_parser typeguard
[ -n "${BASH_VERSION-}" ] || { echo "launch/gpu_hour.sh needs bash. Start it by its name alone, or by bash." >&2 && exit 2; }
set -euo pipefail

# Folders are where the user stands, not where the code lies.
absolute() {
    case $1 in
    /*) printf '%s\n' "$1" ;;
    *) printf '%s/%s\n' "$PWD" "$1" ;;
    esac
}

wheels=
rest=()
while [ $# -gt 0 ]; do
    case $1 in
    --wheels)
        [ $# -ge 2 ] || {
            printf 'gpu_hour.sh: --wheels needs a folder.\n' >&2
            exit 2
        }
        wheels=$(absolute "$2")
        shift 2
        ;;
    --wheels=*)
        wheels=$(absolute "${1#*=}")
        shift
        ;;
    --output | --histogram)
        [ $# -ge 2 ] || {
            printf 'gpu_hour.sh: %s needs a path.\n' "$1" >&2
            exit 2
        }
        rest+=("$1" "$(absolute "$2")")
        shift 2
        ;;
    --output=* | --histogram=*)
        rest+=("${1%%=*}" "$(absolute "${1#*=}")")
        shift
        ;;
    *)
        rest+=("$1")
        shift
        ;;
    esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python

if [ -n "$wheels" ]; then
    found=("$wheels"/*.whl)
    [ -e "${found[0]}" ] || {
        printf "gpu_hour.sh: there are no wheels in '%s'.\n" "$wheels" >&2
        exit 2
    }
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    # Where there is no pip, or a wheel is of another Python, they are unpacked: what runs says what cannot be imported.
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "${found[@]}" ||
        for wheel in "${found[@]}"; do
            "$python" -m zipfile -e "$wheel" "$site"
        done
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi

# Of what any stage needs, before one ends for want of it; of some also what they need in their turn.
missing=$("$python" - <<'END'
import importlib.util

needed = "torch transformers numpy safetensors sentencepiece tqdm pytest pytest_timeout xdist hypothesis tyro"
packages = {"pytest_timeout": "pytest-timeout", "xdist": "pytest-xdist"}
missing = []
for name in needed.split():
    if importlib.util.find_spec(name) is None:
        missing.append(packages.get(name, name))
    elif name in ("xdist", "hypothesis", "tyro"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing.append(error.name)
if "tyro" in missing:
    missing += [name for name in ("docstring_parser", "typeguard") if importlib.util.find_spec(name) is None]
print(*missing)
END
)
[ -z "$missing" ] || {
    printf 'gpu_hour.sh: %s has no %s. Name a folder of their wheels by --wheels, filled where there is a network by\n' \
        "$python" "$missing" >&2
    printf '  python -m pip download --no-deps -d wheels %s\n' "$missing" >&2
    exit 2
}

# Not in the foreground, where a shell heeds no signal, or ends alone and leaves the stages behind.
"$python" -m tools.bench gpu ${rest[@]+"${rest[@]}"} &
child=$!
trap 'kill -TERM "$child" 2>/dev/null || true' HUP INT TERM
while :; do
    status=0
    wait "$child" || status=$?
    kill -0 "$child" 2>/dev/null || break
done
exit "$status"
