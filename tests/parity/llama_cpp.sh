#!/usr/bin/env bash
# Compiles llama-cpp-python into a directory of its own and runs what needs it.
#
#   tests/parity/llama_cpp.sh [DIRECTORY]     (default: .llama_cpp below the user's cache)
#
# Needs cmake, ninja and a C++ compiler, and compiles for 8 to 15 minutes on two cores; the next
# time the directory is used as it is. With PYTHON another interpreter than python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

VERSION=0.3.36
python=${PYTHON:-python3}
directory=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/openelm_jax/llama_cpp}

if ! PYTHONPATH="$directory" "$python" -c "import llama_cpp" 2>/dev/null; then
  echo "compiling llama-cpp-python $VERSION into $directory" >&2
  # Without its dependencies, which would bring a NumPy of their own; diskcache alone is missing.
  "$python" -m pip install --no-deps --target "$directory" "llama-cpp-python==$VERSION" diskcache
fi
export PYTHONPATH="$PWD:$directory" JAX_PLATFORMS=cpu
exec "$python" -m pytest -m heavy -rP tests/parity/test_against_llama_cpp.py
