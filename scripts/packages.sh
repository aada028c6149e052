# shellcheck shell=bash
# Sourced after common.sh by what installs Debian packages.
# shellcheck disable=SC2164  # common.sh sets -e

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}
update_packages() { as_root apt-get -q -o Acquire::Retries=3 update; }

# missing_packages PACKAGE…: prints those that are not installed, one per line.
missing_packages() {
  local installed
  # dpkg-query exits 1 when it does not know a package at all: that is one kind of missing.
  # shellcheck disable=SC2016  # the ${…} are dpkg-query's
  installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' "$@" 2>/dev/null || true)
  comm -23 <(printf '%s\n' "$@" | sort) <(sed -n 's/^installed //p' <<<"$installed" | sort)
}

# install_packages PACKAGE…: installs those that are missing.
install_packages() {
  local missing
  command -v dpkg-query >/dev/null || die "this is not Debian; install the equivalents of: $*"
  mapfile -t missing < <(missing_packages "$@")
  if [ ${#missing[@]} -eq 0 ]; then
    say "Debian packages: all $# present"
    return
  fi
  [ "$(id -u)" -eq 0 ] || command -v sudo >/dev/null ||
    die "packages are missing, and you are neither root nor have sudo. As root: apt-get install ${missing[*]}"
  say "Debian packages: installing ${missing[*]}"
  update_packages
  as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get -q -y -o Acquire::Retries=3 install --no-install-recommends "${missing[@]}"
}

# unpack_package PACKAGE FILE…: copies programs of a Debian package to .tools/bin. It is not
# installed, because it would start a service.
unpack_package() {
  local folder file package=$1
  shift
  say "unpacking Debian's $package into .tools"
  folder=$(mktemp -d)
  (
    cd "$folder"
    apt-get -q -o Acquire::Retries=3 download "$package" ||
      { update_packages && apt-get -q download "$package"; }
    dpkg-deb -x ./*.deb .
  )
  mkdir -p .tools/bin
  for file in "$@"; do cp "$folder/$file" .tools/bin; done
  rm -rf "$folder"
}
