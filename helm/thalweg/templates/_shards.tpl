{{/*
THALWEG_LOCAL_SHARDS of workers. Sidecars with shards are known by their pods' addresses, which certificates do not
name, so with TLS none has any. Fails where a job of several nodes would have no shard.
*/}}
{{- define "thalweg.localShards" -}}
{{- $local := toString .Values.sidecar.localShards -}}
{{- if and .Values.tls.enabled (eq $local "1") -}}
{{- fail "sidecar.localShards=1 does not work with tls.enabled: sidecars are reached at their pods' addresses, which certificates do not name. Leave it at auto" -}}
{{- end -}}
{{- $local = ternary "0" $local .Values.tls.enabled -}}
{{- if and (eq $local "0") (not .Values.aggregator.replicas) -}}
{{- fail "aggregator.replicas=0 needs sidecars that host shards, which they do not with sidecar.localShards=0 or tls.enabled: set aggregator.replicas to 1 or more" -}}
{{- end -}}
{{- $local -}}
{{- end }}

{{/* "hosts" if sidecars can serve shards to other pods, else empty. */}}
{{- define "thalweg.hosts" -}}
{{- if ne (include "thalweg.localShards" .) "0" -}}hosts{{- end -}}
{{- end }}

{{/* Fails when an aggregator's two ports are one. */}}
{{- define "thalweg.refuseOnePort" -}}
{{- $own := .Values.aggregator -}}
{{- if eq (int $own.grpcPort) (int $own.httpPort) -}}
{{- fail (printf "aggregator.grpcPort and aggregator.httpPort are both %d, expected two ports" (int $own.grpcPort)) -}}
{{- end -}}
{{- end }}

{{/* sidecar.shardPorts, checked. */}}
{{- define "thalweg.shardPorts" -}}
{{- $ports := toString .Values.sidecar.shardPorts -}}
{{- $ends := splitList "-" $ports -}}
{{- if or (lt (first $ends | int) 1024) (lt (last $ends | int) (first $ends | int)) (gt (last $ends | int) 65535) -}}
{{- fail (printf "sidecar.shardPorts is %s, expected a port, or FIRST-LAST in ascending order, from 1024 to 65535" $ports) -}}
{{- end -}}
{{- $http := int .Values.sidecar.httpPort -}}
{{- if and (include "thalweg.hosts" .) (ge $http (first $ends | int)) (le $http (last $ends | int)) -}}
{{- fail (printf "sidecar.httpPort is %d, which is one of sidecar.shardPorts, %s, expected a port beside them" $http $ports) -}}
{{- end -}}
{{- $ports -}}
{{- end }}

{{/* Variables of workers that use a sidecar of the chart. */}}
{{- define "thalweg.workerEnv" -}}
- name: THALWEG_SIDECAR
  value: /run/thalweg/sidecar.sock
- name: THALWEG_LOCAL_SHARDS
  value: {{ include "thalweg.localShards" . | quote }}
- name: THALWEG_RECONNECT
  value: {{ .Values.sidecar.reconnectSeconds | quote }}
{{- end }}
