{{/* Names of the secrets with certificates. Argument: root, program (aggregator or sidecar). */}}
{{- define "thalweg.tlsSecret" -}}
{{- $tls := .root.Values.tls -}}
{{- $given := index $tls (printf "%sSecret" .program) -}}
{{- if $given -}}
{{- $given -}}
{{- else if $tls.certManager.enabled -}}
{{- printf "%s-%s-tls" (include "thalweg.fullname" .root) .program -}}
{{- else -}}
{{- fail (printf "tls.enabled needs tls.%sSecret, the name of a secret with tls.crt, tls.key and ca.crt, or tls.certManager.enabled (deploy/README.md)" .program) -}}
{{- end -}}
{{- end }}

{{/* Seconds of a duration such as 1h30m. Argument: the duration. */}}
{{- define "thalweg.seconds" -}}
{{- $seconds := 0 -}}
{{- range regexFindAll "[0-9]+[smh]" . -1 -}}
{{- $unit := index (dict "s" 1 "m" 60 "h" 3600) (substr (sub (len .) 1 | int) (len .) .) -}}
{{- $seconds = add $seconds (mul (regexFind "[0-9]+" . | int64) $unit) -}}
{{- end -}}
{{- $seconds -}}
{{- end }}

{{/* Where the programs find what "thalweg.securityMounts" mounts. */}}
{{- define "thalweg.securityEnv" -}}
{{- if .Values.tls.enabled }}
- name: THALWEG_TLS_CERT
  value: /etc/thalweg/tls/tls.crt
- name: THALWEG_TLS_KEY
  value: /etc/thalweg/tls/tls.key
- name: THALWEG_TLS_CA
  value: /etc/thalweg/tls/ca.crt
{{- end }}
{{- if .Values.httpToken.secret }}
- name: THALWEG_HTTP_TOKEN_FILE
  value: /etc/thalweg/http/token
{{- end }}
{{- end }}

{{/* Whole folders, not files by subPath: those would never be renewed. */}}
{{- define "thalweg.securityMounts" -}}
{{- if .Values.tls.enabled }}
- name: thalweg-tls
  mountPath: /etc/thalweg/tls
  readOnly: true
{{- end }}
{{- if .Values.httpToken.secret }}
- name: thalweg-http-token
  mountPath: /etc/thalweg/http
  readOnly: true
{{- end }}
{{- end }}

{{/* For root and, by fsGroup, the programs' group. Argument: root, program. */}}
{{- define "thalweg.securityVolumes" -}}
{{- if .root.Values.tls.enabled }}
- name: thalweg-tls
  secret:
    secretName: {{ include "thalweg.tlsSecret" . }}
    defaultMode: 0440
{{- end }}
{{- with .root.Values.httpToken.secret }}
- name: thalweg-http-token
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{/* The name in an aggregator's certificate by which it is scraped, and which its headless service has. */}}
{{- define "thalweg.aggregatorDomain" -}}
{{- printf "%s-aggregator.%s.svc.%s" (include "thalweg.fullname" .) .Release.Namespace .Values.clusterDomain -}}
{{- end }}

{{/* The name in a sidecar's certificate: pods of jobs have none that all of them share. */}}
{{- define "thalweg.sidecarName" -}}
{{- printf "%s-sidecar" (include "thalweg.fullname" .) -}}
{{- end }}

{{/* How a monitor reaches the HTTP ports. Argument: root, serverName. */}}
{{- define "thalweg.scrapeSecurity" -}}
{{- if .root.Values.tls.enabled }}
scheme: https
tlsConfig:
  serverName: {{ .serverName }}
  ca:
    secret:
      name: {{ include "thalweg.tlsSecret" (dict "root" .root "program" "aggregator") }}
      key: ca.crt
{{- end }}
{{- with .root.Values.httpToken.secret }}
authorization:
  credentials:
    name: {{ . }}
    key: token
{{- end }}
{{- end }}
