{{- /* Names and labels. */}}

{{- define "rfork.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "rfork.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "rfork.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "rfork.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "rfork.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: {{ include "rfork.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* The labels that find the Pods of (list $ COMPONENT); a hook of the planner's process is found there. */}}
{{- define "rfork.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "rfork.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ include "rfork.home" . }}
{{- end }}

{{- /* Where (list $ COMPONENT) runs: in a Deployment of its own, or the planner's. */}}
{{- define "rfork.home" -}}
{{- $root := index . 0 }}{{- $component := index . 1 -}}
{{- if has $component $root.Values.planner.hooks }}planner{{ else }}{{ $component }}{{ end }}
{{- end }}

{{- /* Whether a hook runs inside of the planner's process: "yes" or nothing. */}}
{{- define "rfork.hosted" -}}
{{- if ne (include "rfork.home" .) (index . 1) }}yes{{ end }}
{{- end }}

{{- define "rfork.account" -}}
{{- include "rfork.fullname" (index . 0) }}-{{ include "rfork.home" . }}
{{- end }}

{{- define "rfork.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}
{{- else }}{{ $image.repository }}:{{ default .Chart.AppVersion $image.tag }}{{ end }}
{{- end }}

{{- /* The image that holds rfork's files for instances: the chart's own does, too. */}}
{{- define "rfork.filesImage" -}}
{{- default (include "rfork.image" .) .Values.instances.image }}
{{- end }}

{{- /* Whether the cluster mounts images as volumes by itself: true or false. */}}
{{- define "rfork.mountsImages" -}}
{{- semverCompare ">=1.35-0" .Capabilities.KubeVersion.Version }}
{{- end }}

{{- /* Namespaces of instances, as a JSON list. */}}
{{- define "rfork.namespaces" -}}
{{- default (list .Release.Namespace) (uniq .Values.instances.namespaces) | toJson }}
{{- end }}

{{- /* Where things are: URLs, Secrets. */}}

{{- define "rfork.plannerUrl" -}}
{{- if .Values.planner.enabled -}}
{{ ternary "https" "http" .Values.planner.tls.enabled }}://{{ include "rfork.fullname" . }}-planner.{{ .Release.Namespace }}.svc:{{ .Values.planner.service.port }}
{{- else }}{{ .Values.planner.url }}{{ end }}
{{- end }}

{{- define "rfork.plannerSecret" -}}
{{- default (printf "%s-planner" (include "rfork.fullname" .)) .Values.planner.auth.existingSecret }}
{{- end }}

{{- define "rfork.plannerTlsSecret" -}}
{{- default (printf "%s-planner-tls" (include "rfork.fullname" .)) .Values.planner.tls.existingSecret }}
{{- end }}

{{- define "rfork.webhookTlsSecret" -}}
{{- if eq .Values.webhook.certificates.mode "secret" }}{{ .Values.webhook.certificates.existingSecret }}
{{- else }}{{ include "rfork.fullname" . }}-webhook-tls{{ end }}
{{- end }}

{{- define "rfork.redis" -}}
{{- with .Values.planner.store.redis }}{{ if or .url .existingSecret }}yes{{ end }}{{ end }}
{{- end }}

{{- define "rfork.plannerReplicas" -}}
{{- if .Values.planner.replicas }}{{ .Values.planner.replicas }}
{{- else }}{{ ternary 2 1 (eq "yes" (include "rfork.redis" .)) }}{{ end }}
{{- end }}

{{- /* What a release asks for together that cannot be; each in words. */}}
{{- define "rfork.check" -}}
{{- $planner := .Values.planner }}
{{- if and $planner.enabled (gt (int (include "rfork.plannerReplicas" .)) 1) (not (include "rfork.redis" .)) }}
{{- fail (printf "planner.replicas is %v, but the store is in memory, of which each replica would have its own: set planner.store.redis.url (or existingSecret), or planner.replicas=1" $planner.replicas) }}
{{- end }}
{{- if and (not $planner.enabled) (not $planner.url) }}
{{- fail "planner.enabled is false: set planner.url to the planner that the hooks and instances use" }}
{{- end }}
{{- if and (not $planner.enabled) $planner.auth.enabled (not $planner.auth.existingSecret) }}
{{- fail "planner.enabled is false: name the Secret with that planner's operator-token in planner.auth.existingSecret, or set planner.auth.enabled=false" }}
{{- end }}
{{- if and (not $planner.enabled) $planner.integrations }}
{{- fail "planner.integrations run in the planner's process, but planner.enabled is false" }}
{{- end }}
{{- range $planner.integrations }}
{{- $section := get $.Values (ternary "keda" . (eq . "scaler")) }}
{{- if not $section.enabled }}
{{- fail (printf "planner.integrations names %s, but %s.enabled is false" . (ternary "keda" . (eq . "scaler"))) }}
{{- end }}
{{- end }}
{{- if and $planner.tls.enabled (not $planner.tls.existingSecret) (not $planner.tls.certManager.enabled) }}
{{- fail "planner.tls.enabled: say where its certificate comes from, by planner.tls.existingSecret or planner.tls.certManager.enabled" }}
{{- end }}
{{- if and $planner.tls.enabled (not $planner.tls.clientCertificates) (or (has "controller" $planner.integrations) (has "scaler" $planner.integrations)) }}
{{- fail "planner.integrations with planner.tls.enabled: they ask the planner with the TLS files that it has itself, so set planner.tls.clientCertificates too, or let them run in Deployments of their own" }}
{{- end }}
{{- with .Values.webhook }}
{{- if and .url (has "webhook" $planner.integrations) }}
{{- fail "webhook.url is of a webhook outside of the cluster, but planner.integrations has one in the planner: choose one of the two" }}
{{- end }}
{{- if and .enabled (not .url) (eq .certificates.mode "secret") (not .certificates.existingSecret) }}
{{- fail "webhook.certificates.mode is secret: name it in webhook.certificates.existingSecret" }}
{{- end }}
{{- if and .hostNetwork (has "webhook" $planner.integrations) }}
{{- fail "webhook.hostNetwork is of the webhook's own Pods: take webhook out of planner.integrations" }}
{{- end }}
{{- end }}
{{- with .Values.instances }}
{{- if and (eq .files "image") (ne "true" (include "rfork.mountsImages" $)) }}
{{- fail (printf "instances.files is image, but volumes of images need Kubernetes 1.35, and this is %s: set instances.files=init" $.Capabilities.KubeVersion.Version) }}
{{- end }}
{{- if and (lt (int .peerPort) (add .httpPort .ports | int)) (lt (int .httpPort) (add .peerPort .ports | int)) }}
{{- fail "instances.peerPort and instances.httpPort are closer than instances.ports: their ranges overlap" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Whether the Pods of (list $ COMPONENT) ask the API server: true or false. */}}
{{- define "rfork.asks" -}}
{{- $root := index . 0 }}{{- $component := index . 1 }}{{- $hooks := $root.Values.planner.hooks -}}
{{- if eq $component "planner" }}{{ or (has "webhook" $hooks) (has "controller" $hooks) }}
{{- else }}{{ ne $component "scaler" }}{{ end }}
{{- end }}

{{- /* A number in digits: Go writes those from a file as 4.194304e+06. */}}
{{- define "rfork.number" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}
