{{- /* Parts of Pods. The argument is (list $ COMPONENT SECTION) unless noted otherwise. */}}

{{- define "rfork.podMetadata" -}}
{{- $root := index . 0 }}{{- $component := index . 1 }}{{- $section := index . 2 -}}
labels:
  {{- include "rfork.labels" $root | nindent 2 }}
  app.kubernetes.io/component: {{ $component }}
  {{- with $root.Values.pods.labels }}{{ toYaml . | nindent 2 }}{{ end }}
{{- with merge (dict) $section.podAnnotations $root.Values.pods.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "rfork.podSpec" -}}
{{- $root := index . 0 }}{{- $pods := $root.Values.pods -}}
serviceAccountName: {{ include "rfork.account" (list $root (index . 1)) }}
# Otherwise the Service rfork-planner would set RFORK_PLANNER_PORT=tcp://…, which is also a setting of rfork.
enableServiceLinks: false
securityContext:
  {{- toYaml $pods.securityContext | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $pods.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
nodeSelector:
  {{- toYaml (merge (dict) $pods.nodeSelector (dict "kubernetes.io/os" "linux")) | nindent 2 }}
{{- with $pods.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $pods.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- $selector := dict "matchLabels" (fromYaml (include "rfork.selector" .)) }}
{{- range default (fromJsonArray (include "rfork.spread" .)) $pods.topologySpreadConstraints }}
  - {{ toYaml (merge (dict "labelSelector" $selector) .) | nindent 4 | trim }}
{{- end }}
{{- end }}

{{- define "rfork.spread" -}}
[
  {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"},
  {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
]
{{- end }}

{{- /* Common parts of all containers. */}}
{{- define "rfork.container" -}}
{{- $root := index . 0 }}{{- $section := index . 2 -}}
image: {{ include "rfork.image" $root | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
securityContext:
  {{- toYaml $root.Values.pods.containerSecurityContext | nindent 2 }}
resources:
  {{- toYaml $section.resources | nindent 2 }}
{{- end }}

{{- /*
preStop hook that waits until all clients know that the Pod is terminating. Argument: SECONDS. Containers that may have it
must always have it: removing it with a server-side apply leaves an empty preStop, which is rejected.
*/}}
{{- define "rfork.preStop" -}}
preStop:
  exec:
    command: [sleep, "{{ . }}"]
{{- end }}

{{- /* Probes of an integration in its own process. No argument. */}}
{{- define "rfork.integrationProbes" -}}
startupProbe:
  httpGet: {path: /healthz, port: health}
  periodSeconds: 2
  failureThreshold: 30
livenessProbe:
  httpGet: {path: /healthz, port: health}
  periodSeconds: 10
  timeoutSeconds: 5
readinessProbe:
  httpGet: {path: /readyz, port: health}
  periodSeconds: 5
  timeoutSeconds: 3
{{- end }}

{{- /* Variables of all processes. Argument: $. */}}
{{- define "rfork.logEnv" -}}
- {name: RFORK_LOG_JSON, value: {{ .Values.logs.json | quote }}}
- {name: RFORK_LOG_LEVEL, value: {{ .Values.logs.level }}}
{{- end }}

{{- /* URL and credentials of the planner for an integration. The scaler only reads; the webhook needs none. */}}
{{- define "rfork.clientEnv" -}}
{{- $root := index . 0 }}{{- $component := index . 1 }}{{- $planner := $root.Values.planner -}}
{{- if include "rfork.inPlanner" . -}}
- {name: RFORK_PLANNER, value: "{{ ternary "https" "http" $planner.tls.enabled }}://127.0.0.1:{{ $planner.service.port }}"}
{{- else -}}
- {name: RFORK_PLANNER, value: {{ include "rfork.plannerUrl" $root | quote }}}
{{- end }}
{{- if $planner.auth.enabled }}
- name: RFORK_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "rfork.plannerSecret" $root }}
      key: {{ ternary "reader-token" "operator-token" (eq $component "scaler") }}
{{- end }}
{{- if and $planner.tls.enabled (not (include "rfork.inPlanner" .)) }}
- {name: RFORK_TLS_CA, value: /etc/rfork/planner-tls/ca.crt}
{{- if $planner.tls.clientCertificates }}
- {name: RFORK_TLS_CERTIFICATE, value: /etc/rfork/planner-tls/tls.crt}
- {name: RFORK_TLS_KEY, value: /etc/rfork/planner-tls/tls.key}
{{- end }}
{{- end }}
{{- end }}

{{- define "rfork.clientMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if (index . 0).Values.planner.tls.enabled }}
- {name: planner-tls, mountPath: /etc/rfork/planner-tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "rfork.clientVolumes" -}}
{{- $root := index . 0 -}}
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
{{- if $root.Values.planner.tls.enabled }}
- name: planner-tls
  secret:
    secretName: {{ include "rfork.plannerTlsSecret" $root }}
    defaultMode: 0440
    {{- if not $root.Values.planner.tls.clientCertificates }}
    items: [{key: ca.crt, path: ca.crt}]
    {{- end }}
{{- end }}
{{- end }}

{{- /* Variables of all integrations. Argument: $. */}}
{{- define "rfork.integrationEnv" -}}
- {name: POD_NAMESPACE, value: {{ .Release.Namespace | quote }}}
- name: POD_NAME
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
- {name: RFORK_K8S_BIND, value: {{ .Values.bind | quote }}}
{{- end }}

{{- /* Additional variables of the webhook. Argument: $. */}}
{{- define "rfork.webhookEnv" -}}
{{- $instances := .Values.instances }}{{- $webhook := .Values.webhook -}}
- {name: RFORK_K8S_WEBHOOK_PORT, value: {{ $webhook.port | quote }}}
- {name: RFORK_K8S_POD_PLANNER_URL, value: {{ default (include "rfork.plannerUrl" .) $instances.plannerUrl | quote }}}
- {name: RFORK_K8S_INJECTION_MODE, value: {{ $instances.injectionMode }}}
- {name: RFORK_K8S_INJECTION_IMAGE, value: {{ include "rfork.injectionImage" . | quote }}}
- {name: RFORK_K8S_IMAGE_VOLUMES, value: {{ include "rfork.imageVolumes" . | quote }}}
- {name: RFORK_K8S_TOKEN_SECRET, value: {{ $instances.tokenSecret | quote }}}
- {name: RFORK_K8S_TLS_SECRET, value: {{ $instances.tlsSecret | quote }}}
- {name: RFORK_K8S_READINESS_GATE, value: {{ include "rfork.readinessGate" . | quote }}}
- {name: RFORK_K8S_SAME_HOST, value: {{ include "rfork.sameHost" . | quote }}}
- {name: RFORK_K8S_DRAIN_TIMEOUT_S, value: {{ $instances.drainTimeoutSeconds | quote }}}
- {name: RFORK_K8S_PEER_PORT, value: {{ $instances.peerPort | quote }}}
- {name: RFORK_K8S_HTTP_PORT, value: {{ $instances.httpPort | quote }}}
- {name: RFORK_K8S_PORT_RANGE_SIZE, value: {{ $instances.portRangeSize | quote }}}
- {name: RFORK_K8S_INJECT_TOPOLOGY, value: {{ $webhook.topology.enabled | quote }}}
- {name: RFORK_K8S_ZONE_LABEL, value: {{ $webhook.topology.zoneLabel | quote }}}
- {name: RFORK_K8S_RACK_LABEL, value: {{ $webhook.topology.rackLabel | quote }}}
- {name: RFORK_K8S_NVLINK_LABEL, value: {{ $webhook.topology.nvlinkLabel | quote }}}
{{- if eq $webhook.certificates.mode "self" }}
- {name: RFORK_K8S_CERTIFICATE_SECRET, value: {{ include "rfork.webhookTlsSecret" . | quote }}}
- {name: RFORK_K8S_WEBHOOK_CONFIGURATION, value: {{ include "rfork.fullname" . | quote }}}
- {name: RFORK_K8S_WEBHOOK_HOSTS, value: "{{ include "rfork.fullname" . }}-webhook.{{ .Release.Namespace }}.svc,{{ include "rfork.fullname" . }}-webhook.{{ .Release.Namespace }}.svc.cluster.local"}
{{- else }}
- {name: RFORK_K8S_CERTIFICATE_DIR, value: /etc/rfork/webhook-tls}
{{- end }}
{{- end }}

{{- define "rfork.webhookMounts" -}}
{{- if ne .Values.webhook.certificates.mode "self" -}}
- {name: webhook-tls, mountPath: /etc/rfork/webhook-tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "rfork.webhookVolumes" -}}
{{- if ne .Values.webhook.certificates.mode "self" -}}
- name: webhook-tls
  secret:
    secretName: {{ include "rfork.webhookTlsSecret" . }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{- /* The Lease of the controller, which the webhook reads. Once per process. */}}
{{- define "rfork.leaseEnv" -}}
- {name: RFORK_K8S_LEASE, value: {{ include "rfork.fullname" . }}-controller}
- {name: RFORK_K8S_LEASE_DURATION_S, value: {{ .Values.controller.leaseDurationSeconds | quote }}}
{{- end }}

{{- /* true if Pods get the readiness gate; then the webhook reads the controller's Lease. Else false. */}}
{{- define "rfork.readinessGate" -}}
{{- and .Values.instances.readinessGate .Values.controller.enabled }}
{{- end }}

{{- define "rfork.controllerEnv" -}}
{{- $controller := .Values.controller -}}
- {name: RFORK_K8S_POLL_INTERVAL_S, value: {{ $controller.pollIntervalSeconds | quote }}}
- {name: RFORK_K8S_SCALEUP_TTL_S, value: {{ $controller.scaleupTtlSeconds | quote }}}
- {name: RFORK_K8S_READINESS_GRACE_S, value: {{ $controller.readinessGraceSeconds | quote }}}
{{- end }}

{{- define "rfork.scalerEnv" -}}
- {name: RFORK_K8S_SCALER_PORT, value: {{ .Values.keda.port | quote }}}
{{- end }}

{{- /* policy/v1 since Kubernetes 1.21. Argument: (list $ COMPONENT). */}}
{{- define "rfork.disruptionBudget" -}}
{{- $root := index . 0 -}}
apiVersion: {{ ternary "policy/v1" "policy/v1beta1" (semverCompare ">=1.21-0" $root.Capabilities.KubeVersion.Version) }}
kind: PodDisruptionBudget
metadata:
  name: {{ include "rfork.fullname" $root }}-{{ index . 1 }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "rfork.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ index . 1 }}
spec:
  # Not minAvailable: with a single replica it would block every drain of its Node.
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "rfork.selector" . | nindent 6 }}
{{ end }}

{{- /* Metadata of an object FULLNAME-COMPONENT in the release's namespace. Argument: (list $ COMPONENT). */}}
{{- define "rfork.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "rfork.fullname" $root }}-{{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "rfork.labels" $root | nindent 2 }}
  app.kubernetes.io/component: {{ index . 1 }}
{{- end }}
