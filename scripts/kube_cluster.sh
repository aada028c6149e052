# shellcheck shell=bash
# Sourced after common.sh, packages.sh, kube_tools.sh and image_tools.sh by scripts/test_kube: the
# programs of a cluster, built into .tools once, and the images that its nodes start with.
# shellcheck disable=SC2154  # root, tools and others come from those files
kube_version=1.31.0
operator=github.com/kubeflow/training-operator
operator_version=1.9.0
registry=registry.example.com/team # as deploy/jobs has it

# build_kubernetes PROGRAM…: builds those that are not there.
# k8s.io/kubernetes cannot be installed by name: its module refers to folders that its zip leaves
# out. They are published as modules of their own.
build_kubernetes() {
  local source program missing=() stamp=k8s.io/component-base/version
  for program in "$@"; do [ -x "$tools/bin/$program" ] || missing+=("$program"); done
  if [ ${#missing[@]} -eq 0 ]; then return; fi
  source=$(mktemp -d)
  cp -r "$(module_dir "k8s.io/kubernetes@v$kube_version")/." "$source"
  chmod -R u+w "$source"
  (
    cd "$source"
    rm -rf go.work go.work.sum vendor
    sed -i -E "s#^(\s+)(k8s.io/[a-z-]+) => ./staging/src/.*#\1\2 => \2 v0.${kube_version#1.}#" go.mod
    for program in "${missing[@]}"; do
      say "building $program $kube_version"
      GOFLAGS="$GOFLAGS -mod=mod" nice go build -o "$tools/bin/$program" \
        -ldflags "-s -w -X $stamp.gitVersion=v$kube_version -X $stamp.gitMajor=1 -X $stamp.gitMinor=31" \
        "./cmd/$program"
    done
  )
  rm -rf "$source"
}

build_cluster() {
  build_kubernetes kube-controller-manager kube-scheduler kubelet kube-proxy
  command -v kubectl >/dev/null || build_kubernetes kubectl
  install_modules github.com/coredns/coredns@v1.11.3
  CGO_ENABLED=0 install_modules "$operator/cmd/training-operator.v1@v$operator_version"
}

# import_files IMAGE ENTRYPOINT FOLDER: makes an image of files alone.
import_files() {
  tar -C "$3" --owner=0 --group=0 -c . |
    podman import --quiet --change "ENTRYPOINT $2" - "$1" >/dev/null
}

# What pods of the cluster itself need: a program that waits, and nslookup for the operator's pods.
make_tool_images() {
  local folder applet
  folder=$(mktemp -d)
  mkdir -p "$folder/tools/bin" "$folder/operator"
  cp "$(command -v busybox)" "$folder/tools/bin/busybox"
  for applet in sh sleep seq sed; do ln -s busybox "$folder/tools/bin/$applet"; done
  # busybox's own wants an answer in every search domain.
  cat >"$folder/tools/bin/nslookup" <<'SCRIPT'
#!/bin/sh
for domain in $(sed -n 's/^search //p' /etc/resolv.conf); do
  busybox nslookup -type=a "$1.$domain." && exit 0
done
exit 1
SCRIPT
  chmod 755 "$folder/tools/bin/nslookup"
  import_files localhost/thalweg-kube-tools '["/bin/sleep","infinity"]' "$folder/tools"
  cp "$tools/bin/training-operator.v1" "$folder/operator/manager"
  import_files "$registry/training-operator:$operator_version" '["/manager"]' "$folder/operator"
  rm -rf "$folder"
}

# The training image of deploy/Dockerfile has 5 GB, nearly all of it torch with CUDA's libraries,
# which would be copied to each node of one machine. This one is built by the same stage on a Python
# that finds them in /opt/packages, where the nodes of tests/kube bind this machine's .venv.
make_training_image() {
  local programs=out/images/programs
  buildah build --quiet --layers --file deploy/Dockerfile --target debian \
    --build-arg "BASE=$debian_base" --tag localhost/thalweg-debian . >/dev/null
  buildah build --quiet --layers --file tests/kube/python.Dockerfile \
    --tag localhost/thalweg-kube-python tests/kube >/dev/null
  buildah build --quiet --layers --file deploy/Dockerfile --target training \
    --build-context "build=$programs" \
    --build-context python=container-image://localhost/thalweg-kube-python \
    --tag "$registry/thalweg-training:$1" . >/dev/null
}

# make_archive FILE: builds all images, from build/release, into one file.
make_archive() {
  local image version names=(localhost/thalweg-kube-tools:latest)
  scripts/build_images --debootstrap --programs aggregator sidecar
  version=$(sed -n 's/^project(thalweg VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
  say "images: a training image without torch, training operator $operator_version"
  make_training_image "$version"
  make_tool_images
  for image in aggregator sidecar; do
    podman tag "localhost/thalweg-$image:$version" "$registry/thalweg-$image:$version"
  done
  for image in aggregator sidecar training; do names+=("$registry/thalweg-$image:$version"); done
  rm -f "$1"
  podman save --quiet --format docker-archive --multi-image-archive --output "$1" \
    "${names[@]}" "$registry/training-operator:$operator_version" >/dev/null
}
