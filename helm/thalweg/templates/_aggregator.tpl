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
{{- with .Values.aggregator.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.aggregator.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
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
