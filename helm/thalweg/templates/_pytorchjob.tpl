{{/* The pod of a PyTorchJob, the same for Master and Worker. The operator looks for the container "pytorch". */}}
{{- define "thalweg.pytorchPod" -}}
{{- $job := .Values.pytorchJob -}}
metadata:
  labels:
    {{- include "thalweg.jobLabels" . | nindent 4 }}
spec:
  {{- include "thalweg.jobPod" . | nindent 2 }}
  {{- with $job.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  {{- with $job.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $job.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: pytorch
      image: {{ $job.image | default (include "thalweg.image" (dict "root" . "image" "training")) }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command:
        {{- toYaml $job.command | nindent 8 }}
      env:
        {{- include "thalweg.workerEnv" . | nindent 8 }}
        {{- with $job.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      resources:
        {{- include "thalweg.jobResources" $job | nindent 8 }}
      volumeMounts:
        {{- include "thalweg.jobVolumeMounts" . | nindent 8 }}
        {{- with $job.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "thalweg.jobVolumes" (dict "root" . "sharedMemory" $job.sharedMemory) | nindent 4 }}
    {{- with $job.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* resources, and the GPUs as a limit. */}}
{{- define "thalweg.jobResources" -}}
{{- $resources := deepCopy .resources -}}
{{- if gt (int .gpusPerNode) 0 -}}
{{- $_ := set $resources "limits" (merge (dict .gpuResource (int .gpusPerNode)) (default dict $resources.limits)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}
