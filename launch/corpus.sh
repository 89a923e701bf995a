#!/usr/bin/env bash
# From dumps or text to what pre-training reads: all steps of tools.corpus, one after another. See --help.
# Kept to bash 3.2, which is what macOS has.
[ -n "${BASH_VERSION-}" ] || { echo "launch/corpus.sh needs bash. Start it by its name alone, or by bash." >&2 && exit 2; }
set -euo pipefail

script=launch/corpus.sh
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: launch/corpus.sh --output DIR [OPTIONS] INPUT...

Runs the steps of `python -m tools.corpus` into the folders documents, tokenizer, ids and samples below DIR, and shows
what has come out. Called again, it goes on where it was stopped or killed, and does nothing twice.

  INPUT               files or folders: MediaWiki dumps (.xml, .xml.bz2, .xml.gz), WikiExtractor's output, text, JSON
                      lines, Parquet, folders of books
  --wikipedia LANG    instead of INPUT: download the latest dump of this language, or that of LANG/YYYYMMDD
  --output DIR        where the folders are made
  --language CODE     ISO 639-1 code of the text, or a variant such as zh-tw: its rules say where sentences end (default:
                      that of --wikipedia, or en); for templates and variants of a dump it takes the place of what that says
  --vocab-file FILE   a WordPiece vocabulary; --cased if it is a cased one (default: uncased)
  --tokenizer-file FILE
                      instead of --vocab-file: a tokenizer.json, such as RoBERTa's or ModernBERT's
  --vocab-size N      without either: pieces of a sentencepiece model to be trained (default 30522)
  --max-length N      tokens of a sequence, at most (default 512)
  --shards N          file pairs of sequences (default 1)
  --workers N         processes on this machine (default: as many as there are cores)
  --mpi N             run every step as N ranks under mpirun, instead of --workers
  --mpi-options TEXT  for mpirun, such as "--hostfile hosts"
  --skip-bad          leave damaged input out, count and list it, instead of stopping there
  --STEP.OPTION ...   for one step: --extract.min-characters 200, --samples.whole-words, --download.mirror URL.
                      What follows up to the next word that begins with -- are its values, so INPUT comes before these
  --dry-run           print the commands and run nothing
  --help              print this

INPUT, --output and files are looked for in the current directory. The steps themselves run in the repository's root: a
path given to one of them by --STEP.OPTION should be absolute.
`python -m tools.corpus STEP --help` lists the options of a step.

Exit status: 0 if every step ended well; 2 for a wrong call or for input that a step refuses; else that of the step.
TEXT
}

output=
wikipedia=
language=
vocab_file=
tokenizer_file=
cased=no
vocab_size=30522
max_length=512
shards=1
workers=
ranks=
mpi_options=
skip_bad=no
dry_run=no
inputs=()
for_download=()
for_extract=()
for_tokenizer=()
for_tokenize=()
for_samples=()
for_inspect=()

options='--output=output --wikipedia=wikipedia --language=language --vocab-file=vocab_file
    --tokenizer-file=tokenizer_file --cased=cased=yes --vocab-size=vocab_size
    --max-length=max_length --shards=shards --workers=workers --mpi=ranks --mpi-options=mpi_options
    --skip-bad=skip_bad=yes --dry-run=dry_run=yes'
own_option() {
    local own=("--${given#*.}") step=${given%%.*}
    case $given in
    --download.* | --extract.* | --tokenizer.* | --tokenize.* | --samples.* | --inspect.*) ;;
    *) return 1 ;;
    esac
    while [ "$taken" -lt "$left" ] && [ "${behind[taken]#--}" = "${behind[taken]}" ]; do
        own+=("${behind[taken]}")
        taken=$((taken + 1))
    done
    case ${step#--} in
    download) for_download+=("${own[@]}") ;;
    extract) for_extract+=("${own[@]}") ;;
    tokenizer) for_tokenizer+=("${own[@]}") ;;
    tokenize) for_tokenize+=("${own[@]}") ;;
    samples) for_samples+=("${own[@]}") ;;
    inspect) for_inspect+=("${own[@]}") ;;
    esac
}
other_word() {
    case $given in
    -h | --help) usage && exit 0 ;;
    -*) refuse "unknown option '$given'. See --help." ;;
    *) inputs+=("$given") ;;
    esac
}
read_words "$@"
[ "$ended" = no ] || refuse "unknown option '--'. See --help."

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
start=$(pwd -P)
python=python3
[ ! -x "$root/.venv/bin/python" ] || python=$root/.venv/bin/python

# A path as it is found from the repository's root, into `rooted`: $(...) would cut off line ends.
from_root() {
    rooted=$1
    [ "${1#/}" != "$1" ] || rooted=$start/$1
}

[ -n "$output" ] || refuse "--output DIR is needed: where the folders are made. See --help."
from_root "$output"
output=$rooted
for pair in "vocab-size $vocab_size" "max-length $max_length" "shards $shards" "workers ${workers:-1}" "mpi ${ranks:-1}"; do
    [[ ${pair#* } =~ ^[1-9][0-9]{0,8}$ ]] || refuse "--${pair% *} must be a whole number of at least 1. Got '${pair#* }'."
done
[ -z "$workers" ] || [ -z "$ranks" ] || refuse "--workers and --mpi exclude each other. Choose one."
[ -z "$vocab_file" ] || [ -z "$tokenizer_file" ] || refuse "--vocab-file and --tokenizer-file exclude each other. Choose one."
[ "$cased" = no ] || [ -n "$vocab_file" ] || refuse "--cased is about a --vocab-file. Name one, or drop --cased."
if [ -n "$wikipedia" ]; then
    [ "${#inputs[@]}" -eq 0 ] || refuse "--wikipedia and INPUT exclude each other. Got '${inputs[0]}' too."
else
    [ "${#inputs[@]}" -gt 0 ] || refuse "an INPUT is needed, or --wikipedia LANG. See --help."
    for index in "${!inputs[@]}"; do
        [ -e "${inputs[$index]}" ] || refuse "input '${inputs[$index]}' does not exist (looked for in $start)."
        from_root "${inputs[$index]}"
        inputs[index]=$rooted
    done
fi
if [ -n "$vocab_file" ]; then
    [ -f "$vocab_file" ] || refuse "--vocab-file '$vocab_file' does not exist (looked for in $start)."
    from_root "$vocab_file"
    vocab_file=$rooted
fi
if [ -n "$tokenizer_file" ]; then
    [ -f "$tokenizer_file" ] || refuse "--tokenizer-file '$tokenizer_file' does not exist (looked for in $start)."
    from_root "$tokenizer_file"
    tokenizer_file=$rooted
fi

common=()
[ "$skip_bad" = no ] || common+=(--skip-bad)
[ -z "$workers" ] || common+=(--workers "$workers")
launcher=()
if [ -n "$ranks" ]; then
    mpirun=mpirun
    [ ! -x "$root/.venv/bin/mpirun" ] || mpirun=$root/.venv/bin/mpirun
    launcher=("$mpirun" -n "$ranks")
    # Split on purpose: several options in one word.
    # shellcheck disable=SC2206
    launcher+=($mpi_options)
fi

# Runs a step: its name, and its options.
run() {
    local line='' word
    local command=(${launcher[@]+"${launcher[@]}"} "$python" -m tools.corpus "$@")
    for word in "${command[@]}"; do
        line+="$(printf '%q' "$word") "
    done
    printf '%s\n' "${line% }"
    [ "$dry_run" = no ] || return 0
    (cd "$root" && exec "${command[@]}")
}

# The "+" forms below: bash before 4.4 calls an empty array unbound.
rules=()
[ -z "$language" ] || rules=(--language "$language")
asked=(${rules[@]+"${rules[@]}"})
if [ -n "$wikipedia" ]; then
    edition=${wikipedia%%/*}
    date=latest
    [ "$edition" = "$wikipedia" ] || date=${wikipedia#*/}
    # Some editions, such as simple, are no language of their own.
    [ -n "$language" ] || ! [[ $edition =~ ^[a-z]{2,3}$ ]] || rules=(--language "$edition")
    run download --language "$edition" --date "$date" --output "$output/download" \
        ${common[@]+"${common[@]}"} ${for_download[@]+"${for_download[@]}"}
    inputs=("$output/download")
fi
run extract "${inputs[@]}" --output "$output/documents" \
    ${asked[@]+"${asked[@]}"} ${common[@]+"${common[@]}"} ${for_extract[@]+"${for_extract[@]}"}
if [ -n "$vocab_file" ]; then
    vocabulary=(--vocab-file "$vocab_file")
    [ "$cased" = no ] || vocabulary+=(--cased)
elif [ -n "$tokenizer_file" ]; then
    vocabulary=(--tokenizer-file "$tokenizer_file")
else
    vocabulary=(--docs "$output/documents" --vocab-size "$vocab_size" ${rules[@]+"${rules[@]}"})
fi
run tokenizer "${vocabulary[@]}" --output "$output/tokenizer" \
    ${common[@]+"${common[@]}"} ${for_tokenizer[@]+"${for_tokenizer[@]}"}
run tokenize --docs "$output/documents" --tokenizer "$output/tokenizer" --output "$output/ids" \
    ${rules[@]+"${rules[@]}"} ${common[@]+"${common[@]}"} ${for_tokenize[@]+"${for_tokenize[@]}"}
run samples --corpora "$output/ids" --max-length "$max_length" --shards "$shards" --output "$output/samples" \
    ${common[@]+"${common[@]}"} ${for_samples[@]+"${for_samples[@]}"}
launcher=() # one process shows what there is
run inspect "$output/samples" ${for_inspect[@]+"${for_inspect[@]}"}
printf 'train on it: launch/local.sh RECIPE --data.source %q --data.max-length %s --data.capacity %s\n' \
    "$output/samples" "$max_length" "$max_length"
