# shellcheck shell=bash
# Sourced after common.sh, packages.sh, kube_tools.sh and image_tools.sh by scripts/test_kube: the
# programs of a cluster, built into .tools once, and the images that its nodes start with.
# shellcheck disable=SC2154  # root, tools and others come from those files
kube_version=1.31.0
operator=github.com/kubeflow/training-operator
operator_version=1.9.0
prometheus_operator=github.com/prometheus-operator/prometheus-operator
prometheus_operator_version=0.77.1
prometheus_version=2.55.1
alertmanager_version=0.27.0
registry=registry.example.com/team # as deploy/jobs has it
cluster_images=()
in_images=$tools/images # programs for images alone: .tools/bin has another Prometheus

# build_commands FOLDER MODULE@VERSION MEND LDFLAGS PROGRAM…: builds those of ./cmd that are not in it.
# MEND is a command that changes the sources. These modules cannot be installed by name, because they
# replace others.
build_commands() {
  local folder=$1 module=$2 mend=$3 flags=$4 source program missing=()
  shift 4
  for program in "$@"; do [ -x "$folder/$program" ] || missing+=("$program"); done
  if [ ${#missing[@]} -eq 0 ]; then return; fi
  source=$(mktemp -d)
  cp -r "$(module_dir "$module")/." "$source"
  chmod -R u+w "$source"
  (
    cd "$source"
    rm -rf go.work go.work.sum vendor
    "$mend"
    for program in "${missing[@]}"; do
      say "building $program of $module"
      CGO_ENABLED=0 GOFLAGS="$GOFLAGS -mod=mod" nice go build -o "$folder/$program" \
        -ldflags "-s -w $flags" "./cmd/$program"
    done
  )
  rm -rf "$source"
}

# They are folders that its zip leaves out, and are published as modules of their own.
use_published_modules() {
  sed -i -E "s#^(\s+)(k8s.io/[a-z-]+) => ./staging/src/.*#\1\2 => \2 v0.${kube_version#1.}#" go.mod
}
replace_no_modules() { sed -i '/^replace (/,/^)/d; /^replace/d' go.mod; }
# The clouds' libraries would take longer to build than all the rest.
find_only_pods() { sed -i '\#prometheus/discovery/#{/kubernetes/!d}' plugins/plugins.go; }

build_kubernetes() {
  local stamp=k8s.io/component-base/version
  build_commands "$tools/bin" "k8s.io/kubernetes@v$kube_version" use_published_modules \
    "-X $stamp.gitVersion=v$kube_version -X $stamp.gitMajor=1 -X $stamp.gitMinor=31" "$@"
}

build_cluster() {
  # Its package would start a service.
  [ -x "$tools/bin/containerd" ] ||
    unpack_package containerd usr/bin/containerd usr/bin/containerd-shim-runc-v2 usr/bin/ctr
  build_kubernetes kube-controller-manager kube-scheduler kubelet kube-proxy
  command -v kubectl >/dev/null || build_kubernetes kubectl
  export CGO_ENABLED=0 # images of the operators have nothing but them
  install_modules github.com/coredns/coredns@v1.11.3 \
    "$operator/cmd/training-operator.v1@v$operator_version"
  build_commands "$in_images" "$prometheus_operator@v$prometheus_operator_version" \
    replace_no_modules \
    "-X github.com/prometheus/common/version.Version=$prometheus_operator_version" \
    operator prometheus-config-reloader
  # Debian's finds no pods: it is built without Kubernetes.
  build_commands "$in_images" "github.com/prometheus/prometheus@v0.${prometheus_version#2.}" \
    find_only_pods "" prometheus
  build_commands "$in_images" "github.com/prometheus/alertmanager@v$alertmanager_version" \
    replace_no_modules "" alertmanager
}

# import_files IMAGE ENTRYPOINT FOLDER: makes an image of files alone.
import_files() {
  cluster_images+=("$1")
  tar -C "$3" --owner=0 --group=0 -c . |
    podman import --quiet --change "ENTRYPOINT $2" - "$1" >/dev/null
}

# import_program IMAGE PROGRAM: makes an image of a program of $in_images.
import_program() {
  local folder
  folder=$(mktemp -d)
  install -D "$in_images/$2" "$folder/bin/$2"
  import_files "$1" "[\"/bin/$2\"]" "$folder"
  rm -rf "$folder"
}

make_watching_images() {
  import_program "$registry/prometheus-operator:v$prometheus_operator_version" operator
  import_program "$registry/prometheus-config-reloader:v$prometheus_operator_version" \
    prometheus-config-reloader
  import_program "$registry/prometheus:v$prometheus_version" prometheus
  import_program "$registry/alertmanager:v$alertmanager_version" alertmanager
}

# What pods of the cluster itself need: a program that waits, and a shell in which the operator's
# pods wait for the master's name. The operator's own words for that want an answer in every search
# domain, with busybox's nslookup.
make_tool_images() {
  local folder
  folder=$(mktemp -d)
  mkdir -p "$folder/tools/bin" "$folder/operator/etc/config"
  cp "$(command -v busybox)" "$folder/tools/bin/busybox"
  ln -s busybox "$folder/tools/bin/sh"
  import_files localhost/thalweg-kube-tools '["/bin/busybox", "sleep", "infinity"]' "$folder/tools"
  cp "$tools/bin/training-operator.v1" "$folder/operator/manager"
  cat >"$folder/operator/etc/config/initContainer.yaml" <<'TEMPLATE'
- name: init-pytorch
  image: {{.InitContainerImage}}
  imagePullPolicy: IfNotPresent
  command:
    - sh
    - -c
    - |
      domain=$(sed -n 's/^search \([^ ]*\).*/\1/p' /etc/resolv.conf)
      for _ in $(seq 100); do nslookup -type=a "{{.MasterAddr}}.$domain." && exit; sleep 1; done
      exit 1
TEMPLATE
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
  cluster_images+=("$registry/thalweg-training:$1")
}

# make_archive FILE: builds all images, from build/release, into one file.
make_archive() {
  local image version
  scripts/build_images --debootstrap --programs aggregator sidecar
  version=$(sed -n 's/^project(thalweg VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
  say "images: training without torch, operators, Prometheus, Alertmanager"
  make_training_image "$version"
  make_tool_images
  make_watching_images
  for image in aggregator sidecar; do
    cluster_images+=("$registry/thalweg-$image:$version")
    podman tag "localhost/thalweg-$image:$version" "${cluster_images[-1]}"
  done
  podman save --quiet --format docker-archive --multi-image-archive --output "$1" \
    "${cluster_images[@]}" >/dev/null
}
