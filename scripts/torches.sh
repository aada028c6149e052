# shellcheck shell=bash
# Sourced by scripts that use several torches, after common.sh.

# The newest patch of every minor version that pyproject.toml allows, oldest first.
# shellcheck disable=SC2034  # for those who source this
all_torches=(2.11.0 2.12.1 2.13.0 2.14.1 2.15.0)

# install_torch VERSION FOLDER VENV: one torch for that environment's Python, without most of what it
# asks for: to build with it and to use it on the CPU takes no more.
install_torch() {
  local version=$1 folder=$2 venv=$3 lent own
  [ ! -d "$folder/nvidia" ] || return 0
  say "torch $version in $folder"
  rm -rf "$folder"
  into() {
    "$venv/bin/python" -m pip install --quiet --retries 5 --no-compile --no-deps --target "$folder" "$@"
  }
  into "torch==$version"
  # Those of CUDA's libraries of which torch calls the newest functions, and the rest from the environment.
  mapfile -t own < <(sed -nE 's/^Requires-Dist: (nvidia-(nccl|nvshmem)-cu[0-9]+==[^;]+).*/\1/p' \
    "$folder"/torch-*.dist-info/METADATA)
  [ ${#own[@]} -eq 0 ] || into "${own[@]}"
  mkdir -p "$folder/nvidia"
  for lent in "$venv"/lib/python*/site-packages/nvidia/*; do
    [ -e "$folder/nvidia/$(basename "$lent")" ] || ln -s "$lent" "$folder/nvidia"
  done
}
