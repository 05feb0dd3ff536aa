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

{{- /* Selector labels of the Pods of (list $ COMPONENT). Integrations in the planner have its labels. */}}
{{- define "rfork.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "rfork.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ include "rfork.deployment" . }}
{{- end }}

{{- /* Name of the Deployment that runs (list $ COMPONENT): its own, or the planner's. */}}
{{- define "rfork.deployment" -}}
{{- $root := index . 0 }}{{- $component := index . 1 -}}
{{- if has $component $root.Values.planner.integrations }}planner{{ else }}{{ $component }}{{ end }}
{{- end }}

{{- /* "yes" if an integration runs in the planner's process, else empty. */}}
{{- define "rfork.inPlanner" -}}
{{- if ne (include "rfork.deployment" .) (index . 1) }}yes{{ end }}
{{- end }}

{{- define "rfork.account" -}}
{{- include "rfork.fullname" (index . 0) }}-{{ include "rfork.deployment" . }}
{{- end }}

{{- define "rfork.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}
{{- else }}{{ $image.repository }}:{{ default .Chart.AppVersion $image.tag }}{{ end }}
{{- end }}

{{- /* Image with rfork's files for instances; by default the chart's own. */}}
{{- define "rfork.injectionImage" -}}
{{- default (include "rfork.image" .) .Values.instances.injectionImage }}
{{- end }}

{{- /* true if the cluster supports image volumes by default, else false. */}}
{{- define "rfork.imageVolumes" -}}
{{- semverCompare ">=1.35-0" .Capabilities.KubeVersion.Version }}
{{- end }}

{{- /* Namespaces of instances, as a JSON list. */}}
{{- define "rfork.namespaces" -}}
{{- default (list .Release.Namespace) (uniq .Values.instances.namespaces) | toJson }}
{{- end }}

{{- /* Namespace of the holders: like their instances, they need hostPath and the instances' token. */}}
{{- define "rfork.holderNamespace" -}}
{{- first (fromJsonArray (include "rfork.namespaces" .)) }}
{{- end }}

{{- /* true if Pods of a Node share the socket directory, else false. */}}
{{- define "rfork.sameHost" -}}
{{- or .Values.instances.sameHost .Values.holder.enabled }}
{{- end }}

{{- /* URLs and Secrets. */}}

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

{{- /* Fail for inconsistent values. */}}
{{- define "rfork.check" -}}
{{- $planner := .Values.planner }}
{{- if and $planner.enabled (gt (int (include "rfork.plannerReplicas" .)) 1) (not (include "rfork.redis" .)) }}
{{- fail (printf "planner.replicas is %v, but the store is in memory and cannot be shared: set planner.store.redis.url (or existingSecret), or planner.replicas=1" $planner.replicas) }}
{{- end }}
{{- if and (not $planner.enabled) (not $planner.url) }}
{{- fail "planner.enabled is false: set planner.url to the planner that the integrations and instances use" }}
{{- end }}
{{- if and (not $planner.enabled) $planner.auth.enabled (not $planner.auth.existingSecret) }}
{{- fail "planner.enabled is false: set planner.auth.existingSecret to the Secret with that planner's operator-token, or set planner.auth.enabled=false" }}
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
{{- fail "planner.tls.enabled: set planner.tls.existingSecret or planner.tls.certManager.enabled" }}
{{- end }}
{{- if and $planner.tls.enabled (not $planner.tls.clientCertificates) (or (has "controller" $planner.integrations) (has "scaler" $planner.integrations)) }}
{{- fail "planner.integrations with planner.tls.enabled: they use the planner's own TLS files as clients, so set planner.tls.clientCertificates too, or run them in their own Deployments" }}
{{- end }}
{{- with .Values.webhook }}
{{- if and .url (has "webhook" $planner.integrations) }}
{{- fail "webhook.url is a webhook outside the cluster, but planner.integrations runs one in the planner: choose one of the two" }}
{{- end }}
{{- if and .enabled (not .url) (eq .certificates.mode "secret") (not .certificates.existingSecret) }}
{{- fail "webhook.certificates.mode is secret: set webhook.certificates.existingSecret" }}
{{- end }}
{{- if and .hostNetwork (has "webhook" $planner.integrations) }}
{{- fail "webhook.hostNetwork requires the webhook's own Deployment: remove webhook from planner.integrations" }}
{{- end }}
{{- end }}
{{- if and .Values.holder.enabled (not .Values.holder.image) }}
{{- fail "holder.enabled: set holder.image to an image with Python and torch, such as the engine's" }}
{{- end }}
{{- with .Values.instances }}
{{- if and (eq .injectionMode "image") (ne "true" (include "rfork.imageVolumes" $)) }}
{{- fail (printf "instances.injectionMode is image, but image volumes need Kubernetes 1.35, and this is %s: set instances.injectionMode=init" $.Capabilities.KubeVersion.Version) }}
{{- end }}
{{- if and (lt (int .peerPort) (add .httpPort .portRangeSize | int)) (lt (int .httpPort) (add .peerPort .portRangeSize | int)) }}
{{- fail "instances.peerPort and instances.httpPort are closer than instances.portRangeSize: their ranges overlap" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* true if the Pods of (list $ COMPONENT) use the API server, else false. */}}
{{- define "rfork.usesApiServer" -}}
{{- $root := index . 0 }}{{- $component := index . 1 }}{{- $integrations := $root.Values.planner.integrations -}}
{{- if eq $component "planner" }}{{ or (has "webhook" $integrations) (has "controller" $integrations) }}
{{- else }}{{ ne $component "scaler" }}{{ end }}
{{- end }}

{{- /* A number in decimal notation: Go prints large numbers from files as 4.194304e+06. */}}
{{- define "rfork.number" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}
