# shellcheck shell=bash
# Sourced after common.sh, packages.sh and kube_tools.sh: the programs of a Kubernetes cluster, in
# .tools/bin. No registry of images is needed: they are built from Go modules, or Debian's.
# shellcheck disable=SC2154  # root and tools come from the scripts sourced before
kubernetes=1.31.0
kubernetes_programs=(
  kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl
)
cluster_modules=(
  github.com/coredns/coredns@v1.11.3
  github.com/kubeflow/training-operator/cmd/training-operator.v1@v1.9.0
)
# Programs of nodes that no service comes with.
cluster_packages=(
  runc containernetworking-plugins iptables conntrack iproute2 openssl busybox-static
)

install_cluster() {
  install_packages "${cluster_packages[@]}"
  [ -x "$tools/bin/etcd" ] || unpack_package etcd-server usr/bin/etcd
  [ -x "$tools/bin/containerd" ] ||
    unpack_package containerd usr/bin/{containerd,containerd-shim-runc-v2,ctr}
  build_kubernetes
  install_modules "${cluster_modules[@]}"
}

# k8s.io/kubernetes cannot be installed by name: its module refers to folders that its zip leaves out.
# They are published as modules of their own.
build_kubernetes() {
  local source name stamp=k8s.io/component-base/version missing=()
  for name in "${kubernetes_programs[@]}"; do
    [ -x "$tools/bin/$name" ] || missing+=("./cmd/$name")
  done
  if [ ${#missing[@]} -eq 0 ]; then return; fi
  say "building Kubernetes $kubernetes: ${missing[*]}"
  source=$(mktemp -d)
  cp -r "$(module_dir "k8s.io/kubernetes@v$kubernetes")/." "$source"
  chmod -R u+w "$source"
  (
    cd "$source"
    rm -rf go.work go.work.sum vendor
    sed -i -E "s#^(\s+)(k8s.io/[a-z-]+) => ./staging/src/.*#\1\2 => \2 v0.${kubernetes#1.}#" go.mod
    GOFLAGS="$GOFLAGS -mod=mod" go build -o "$tools/bin/" -ldflags \
      "-s -w -X $stamp.gitVersion=v$kubernetes -X $stamp.gitMajor=1 -X $stamp.gitMinor=31" "${missing[@]}"
  )
  rm -rf "$source"
}
