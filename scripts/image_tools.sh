# shellcheck shell=bash
# Sourced after common.sh and packages.sh by what uses a container engine: podman and buildah, set up
# for this machine by .tools/containers.conf alone.
# shellcheck disable=SC2154  # root comes from common.sh
image_packages=(podman buildah runc netavark aardvark-dns iptables debootstrap)

install_engine() {
  local files
  install_packages "${image_packages[@]}"
  files=$(ulimit -Hn)
  [ "$files" != unlimited ] || files=1048576
  mkdir -p .tools
  # Engines raise these limits by default, which not every root may. events_logger, cgroup_manager:
  # there may be no systemd.
  cat >.tools/containers.conf <<EOF
[containers]
default_ulimits = ["nofile=$files:$files", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
EOF
  export CONTAINERS_CONF=$root/.tools/containers.conf
}

debian_base=localhost/debian:bookworm-without-docs
make_debian_base() {
  local folder
  if podman image exists "$debian_base"; then return; fi
  say "debootstrap: $debian_base"
  folder=$(mktemp -d)
  scripts/debian_base "$folder/tree"
  tar -C "$folder/tree" -c . | podman import --quiet - "$debian_base" >/dev/null
  rm -rf "$folder"
}
