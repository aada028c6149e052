{{/*
Names: at most 40 characters, so that every name made from it is short enough. A StatefulSet's is the tightest:
its pods carry it, and ten characters more, in a label of at most 63.
*/}}
{{- define "thalweg.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- if regexMatch "^[0-9]|[.]" $full -}}
{{- fail (printf "resources would be named %s and so on, but names of services begin with a letter and have no dots: set fullnameOverride, or give the release another name" $full) -}}
{{- end -}}
{{- if gt (len $full) 40 -}}
{{- printf "%s-%s" (trunc 31 $full | trimSuffix "-") (sha256sum $full | trunc 8) -}}
{{- else -}}
{{- $full -}}
{{- end -}}
{{- end }}

{{/* Labels that never change: selectors. Argument: root, component. */}}
{{- define "thalweg.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Labels of every resource. Argument: root, component. */}}
{{- define "thalweg.labels" -}}
{{ include "thalweg.selectorLabels" . }}
app.kubernetes.io/part-of: thalweg
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 }}
{{- end }}

{{/* Argument: root, image (one of aggregator, sidecar, training). */}}
{{- define "thalweg.image" -}}
{{- $all := .root.Values.image -}}
{{- $one := index $all .image -}}
{{- $registry := required "image.registry is not set: give the registry that your images were pushed to, e.g. --set image.registry=registry.baidubce.com/team (deploy/README.md says how they are built)" $all.registry -}}
{{- $ending := printf ":%s" (default .root.Chart.AppVersion $all.tag) -}}
{{- if $one.digest -}}{{- $ending = printf "@%s" $one.digest -}}{{- end -}}
{{- printf "%s/%s%s" (trimSuffix "/" $registry) $one.repository $ending -}}
{{- end }}

{{- define "thalweg.pullSecrets" -}}
imagePullSecrets:
{{- range .Values.image.pullSecrets }}
  - name: {{ . }}
{{- else }} []
{{- end }}
{{- end }}

{{- define "thalweg.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.runAsUser }}
runAsGroup: {{ int64 .Values.runAsUser }}
fsGroup: {{ int64 .Values.runAsUser }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "thalweg.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Every shard's host:port, in order: it must be the same on all nodes of a job. */}}
{{- define "thalweg.aggregators" -}}
{{- $name := printf "%s-aggregator" (include "thalweg.fullname" .) -}}
{{- $addresses := list -}}
{{- range $shard := until (int .Values.aggregator.replicas) -}}
{{- $addresses = append $addresses (printf "%s-%d.%s.%s.svc.%s:%d" $name $shard $name $.Release.Namespace $.Values.clusterDomain (int $.Values.aggregator.grpcPort)) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end }}

{{/* startup, readiness and liveness over HTTP; no token, no check of the certificate. Argument: root, port (its name). */}}
{{- define "thalweg.probes" -}}
{{- $scheme := .root.Values.tls.enabled | ternary ", scheme: HTTPS" "" -}}
startupProbe:
  httpGet: {path: /readyz, port: {{ .port }}{{ $scheme }}}
  periodSeconds: 1
  failureThreshold: 60
readinessProbe:
  httpGet: {path: /readyz, port: {{ .port }}{{ $scheme }}}
  periodSeconds: 5
livenessProbe:
  httpGet: {path: /healthz, port: {{ .port }}{{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{/* What every way to run a sidecar has in common. */}}
{{- define "thalweg.sidecarContainer" -}}
name: thalweg-sidecar
image: {{ include "thalweg.image" (dict "root" . "image" "sidecar") }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  - --socket=/run/thalweg/sidecar.sock
  - --http={{ .Values.listenAddress }}:{{ .Values.sidecar.httpPort }}
  - --threads={{ .Values.sidecar.threads }}
  - --channels={{ .Values.sidecar.channels }}
  - --drain-seconds={{ int64 .Values.sidecar.drainSeconds }}
  - --respawn
  {{- if include "thalweg.hosts" . }}
  - --shard-listen=[$(POD_IP)]:{{ include "thalweg.shardPorts" . }}
  {{- end }}
env:
  - name: THALWEG_AGGREGATORS
    value: {{ include "thalweg.aggregators" . | quote }}
  - name: THALWEG_RECONNECT
    value: {{ .Values.sidecar.reconnectSeconds | quote }}
  {{- if include "thalweg.hosts" . }}
  - name: POD_IP
    valueFrom:
      fieldRef: {fieldPath: status.podIP}
  {{- end }}
  - name: THALWEG_LOG
    value: {{ .Values.logLevel | quote }}
  {{- with include "thalweg.securityEnv" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
ports:
  - name: thalweg-http
    containerPort: {{ .Values.sidecar.httpPort }}
{{ include "thalweg.probes" (dict "root" . "port" "thalweg-http") }}
securityContext:
  {{- include "thalweg.containerSecurityContext" . | nindent 2 }}
resources:
  {{- toYaml .Values.sidecar.resources | nindent 2 }}
volumeMounts:
  - name: thalweg
    mountPath: /run/thalweg
  {{- with include "thalweg.securityMounts" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end }}

{{/*
The same as a native sidecar: it starts before the training container, which waits until it serves, and
Kubernetes ends it after the training container. Without restartPolicy it would be an init container that never ends.
*/}}
{{- define "thalweg.nativeSidecar" -}}
{{ include "thalweg.sidecarContainer" . }}
restartPolicy: Always
{{- end }}

{{/* What pods of a PyTorchJob and of a TrainJob have in common, up to the containers. */}}
{{- define "thalweg.jobPod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
{{ include "thalweg.pullSecrets" . }}
securityContext:
  {{- include "thalweg.podSecurityContext" . | nindent 2 }}
# The sidecar gets this long once the training container has ended.
terminationGracePeriodSeconds: {{ add .Values.sidecar.drainSeconds 10 }}
initContainers:
  - {{- include "thalweg.nativeSidecar" . | nindent 4 }}
{{- end }}

{{/* Argument: root, sharedMemory. */}}
{{- define "thalweg.jobVolumes" -}}
- name: thalweg
  emptyDir: {}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .sharedMemory }}}
{{- include "thalweg.securityVolumes" (dict "root" .root "program" "sidecar") }}
{{- end }}

{{- define "thalweg.jobVolumeMounts" -}}
- name: thalweg
  mountPath: /run/thalweg
- name: shm
  mountPath: /dev/shm
{{- end }}

{{/* Labels of the pods of a job: by these the PodMonitor finds them. */}}
{{- define "thalweg.jobLabels" -}}
thalweg.io/sidecar: {{ include "thalweg.fullname" . | quote }}
{{- end }}

{{/*
Keeps the programs' own label "node", which Prometheus renames to "exported_node" where scraping adds a "node" of its
own. honorLabels would keep it, too, but would also believe what a pod says of its namespace and job.
*/}}
{{- define "thalweg.ownNode" -}}
metricRelabelings:
  - sourceLabels: [exported_node]
    regex: (.+)
    targetLabel: node
  - action: labeldrop
    regex: exported_node
{{- end }}
