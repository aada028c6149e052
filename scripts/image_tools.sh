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

# The packages of Debian 12's slim image and a few more, for machines that reach no registry.
debian_base=localhost/debian:bookworm-minbase
make_debian_base() {
  local folder
  if podman image exists "$debian_base"; then return; fi
  say "debootstrap: $debian_base"
  folder=$(mktemp -d)
  # Its mounts end with it.
  unshare --mount debootstrap --variant=minbase bookworm "$folder/root" >/dev/null
  rm -f "$folder/root/etc/apt/sources.list"
  cat >"$folder/root/etc/apt/sources.list.d/debian.sources" <<'EOF'
Types: deb
URIs: http://deb.debian.org/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://deb.debian.org/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
EOF
  rm -rf "$folder"/root/var/{cache/apt/archives,lib/apt/lists}/*
  for file in resolv.conf hostname; do : >"$folder/root/etc/$file"; done # were this machine's
  tar -C "$folder/root" -c . | podman import --quiet - "$debian_base" >/dev/null
  rm -rf "$folder"
}
