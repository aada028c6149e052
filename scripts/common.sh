# shellcheck shell=bash
# Sourced by every script here: strict mode, the repository root as current directory, messages.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
# Programs of the pinned environment come before whatever else the machine has.
PATH="$root/.venv/bin:$PATH"
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Where Python may not keep what it has compiled, every process would compile torch again: 3 s each.
unset PYTHONDONTWRITEBYTECODE

say() { printf '==> %s\n' "$*"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Prints the purpose for which a script was called: `demo` with --for demo, `all` without arguments.
purpose_of() {
  case $* in
    "") echo all ;;
    "--for demo") echo demo ;;
    *) die "expected no argument or '--for demo', got '$*'" ;;
  esac
}

has_gpu_driver() { [ -e /dev/nvidiactl ]; }

# Prints the files of the working tree that match the given patterns, NUL-separated: tracked files,
# and new ones that git does not ignore. A file that is deleted but not yet committed is left out.
tree_files() {
  local file
  git ls-files -z --cached --others --exclude-standard -- "$@" | while IFS= read -r -d '' file; do
    if [ -e "$file" ]; then printf '%s\0' "$file"; fi
  done
}
