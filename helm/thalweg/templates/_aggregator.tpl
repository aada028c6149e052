{{/* Where the aggregators' pods run, as whom, and how long they may take to end. */}}
{{- define "thalweg.aggregatorPod" -}}
{{- $selector := dict "root" . "component" "aggregator" -}}
enableServiceLinks: false
automountServiceAccountToken: false
{{ include "thalweg.pullSecrets" . }}
securityContext:
  {{- include "thalweg.podSecurityContext" . | nindent 2 }}
# SIGTERM drains: new jobs are refused, running ones have drainSeconds, then fail with the reason.
terminationGracePeriodSeconds: {{ add .Values.aggregator.drainSeconds 10 }}
{{- with .Values.aggregator.priorityClassName }}
priorityClassName: {{ quote . }}
{{- end }}
{{- with include "thalweg.placement" . | trim }}
{{ . }}
{{- end }}
{{- if .Values.aggregator.spreadZones }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "thalweg.selectorLabels" $selector | nindent 8 }}
{{- end }}
{{- $anti := .Values.aggregator.antiAffinity }}
{{- if or .Values.aggregator.affinity (ne $anti "none") }}
affinity:
  {{- with .Values.aggregator.affinity }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if eq $anti "hard" }}
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "thalweg.selectorLabels" $selector | nindent 12 }}
  {{- else if eq $anti "soft" }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "thalweg.selectorLabels" $selector | nindent 14 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Which machines take the pods that a release runs itself: aggregators, and those of hooks and of `helm test`. */}}
{{- define "thalweg.placement" -}}
{{- with .Values.aggregator.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.aggregator.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* aggregator.memoryLimit; fails below 1 MiB, as the program does: 4 is meant to be 4G. */}}
{{- define "thalweg.memoryLimit" -}}
{{- $limit := .Values.aggregator.memoryLimit -}}
{{- $least := regexMatch "K" $limit | ternary 1024 1048576 -}}
{{- if and (not (regexMatch "auto|[MG]" $limit)) (lt (regexFind "^[0-9]+" $limit | int64) (int64 $least)) -}}
{{- fail (printf "aggregator.memoryLimit is %s, less than any job needs, expected at least 1Mi, such as 3Gi" $limit) -}}
{{- end -}}
{{- $limit -}}
{{- end }}
