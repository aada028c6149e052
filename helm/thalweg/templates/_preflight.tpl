{{/* "kept" if an object of this schema keeps the field at `path`, else empty. Argument: schema, path. */}}
{{- define "thalweg.schemaKeeps" -}}
{{- $node := .schema -}}
{{- $state := "on the way" -}}
{{- range .path -}}
{{- if eq $state "on the way" -}}
{{- if get $node "x-kubernetes-preserve-unknown-fields" -}}{{- $state = "kept" -}}
{{- else if hasKey $node . -}}{{- $node = index $node . -}}
{{- else -}}{{- $state = "dropped" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if ne $state "dropped" -}}kept{{- end -}}
{{- end }}

{{/*
Fails when a definition in the cluster would drop restartPolicy of init containers: the API server prunes what a
definition does not know, without a word, and the sidecar becomes an init container that never ends.
Argument: crd, path (from the schema's root to initContainers).
*/}}
{{- define "thalweg.refuseDropping" -}}
{{- $path := concat .path (list "initContainers" "items" "properties" "restartPolicy") -}}
{{- $crd := .crd -}}
{{- range $crd.spec.versions -}}
{{- if .served -}}
{{- if ne "kept" (include "thalweg.schemaKeeps" (dict "schema" .schema.openAPIV3Schema "path" $path)) -}}
{{- fail (printf "preflight: CustomResourceDefinition %s, version %s, does not know initContainers[].restartPolicy and would silently drop it: the sidecar would become an init container that never ends, and jobs would hang. Update Kubeflow's training operator to 1.8.1 or newer (Trainer: 2.0 or newer). If you cannot, set sidecar.daemonSet.enabled=true, or run jobs without a sidecar container (deploy/README.md) and set preflight.enabled=false" $crd.metadata.name .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The way to a pod's spec in the schema of either job. */}}
{{- define "thalweg.podPaths" -}}
pytorchjobs.kubeflow.org: [properties, spec, properties, pytorchReplicaSpecs, additionalProperties, properties, template, properties, spec, properties]
clustertrainingruntimes.trainer.kubeflow.org: [properties, spec, properties, template, properties, spec, properties, replicatedJobs, items, properties, template, properties, spec, properties, template, properties, spec, properties]
{{- end }}
