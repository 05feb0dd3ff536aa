{{- /* What Pods of this chart are made of. Each takes (list $ COMPONENT SECTION) unless it says otherwise. */}}

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
# Or the Service rfork-planner would set RFORK_PLANNER_PORT=tcp://…, which is an option of rfork's.
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

{{- /* The container's parts that are the same everywhere. */}}
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
Seconds in which a Pod that ends is still asked, until everyone knows that it ends; takes SECONDS. Never left out of a
container that may have it: taken out by a server-side apply it leaves an empty preStop behind, which is refused.
*/}}
{{- define "rfork.linger" -}}
preStop:
  exec:
    command: [sleep, "{{ . }}"]
{{- end }}

{{- /* The probes of a hook in a process of its own; takes nothing. */}}
{{- define "rfork.hookProbes" -}}
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

{{- /* Variables of every process of rfork's; takes $. */}}
{{- define "rfork.logEnv" -}}
- {name: RFORK_LOG_JSON, value: {{ .Values.logs.json | quote }}}
- {name: RFORK_LOG_LEVEL, value: {{ .Values.logs.level }}}
- {name: RFORK_PLANNER_LOG_JSON, value: {{ .Values.logs.json | quote }}}
- {name: RFORK_PLANNER_LOG_LEVEL, value: {{ .Values.logs.level }}}
{{- end }}

{{- /* How a hook asks the planner, and what it shows it: the webhook does neither, the scaler only looks. */}}
{{- define "rfork.clientEnv" -}}
{{- $root := index . 0 }}{{- $component := index . 1 }}{{- $planner := $root.Values.planner -}}
{{- if include "rfork.hosted" . -}}
- {name: RFORK_PLANNER, value: "{{ ternary "https" "http" $planner.tls.enabled }}://127.0.0.1:{{ $planner.server.port }}"}
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
{{- if and $planner.tls.enabled (not (include "rfork.hosted" .)) }}
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

{{- /* What every hook is told; takes $. */}}
{{- define "rfork.hookEnv" -}}
- {name: RFORK_K8S_NAMESPACE, value: {{ .Release.Namespace | quote }}}
- name: RFORK_K8S_IDENTITY
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
- {name: RFORK_K8S_BIND, value: {{ .Values.bind | quote }}}
{{- end }}

{{- /* What the webhook is told beside that; takes $. */}}
{{- define "rfork.webhookEnv" -}}
{{- $instances := .Values.instances }}{{- $webhook := .Values.webhook -}}
- {name: RFORK_K8S_WEBHOOK_PORT, value: {{ $webhook.port | quote }}}
- {name: RFORK_K8S_POD_PLANNER_URL, value: {{ default (include "rfork.plannerUrl" .) $instances.plannerUrl | quote }}}
- {name: RFORK_K8S_INJECTION_MODE, value: {{ $instances.files }}}
- {name: RFORK_K8S_INJECTION_IMAGE, value: {{ include "rfork.filesImage" . | quote }}}
- {name: RFORK_K8S_IMAGE_VOLUMES, value: {{ include "rfork.mountsImages" . | quote }}}
- {name: RFORK_K8S_TOKEN_SECRET, value: {{ $instances.tokenSecret | quote }}}
- {name: RFORK_K8S_TLS_SECRET, value: {{ $instances.tlsSecret | quote }}}
- {name: RFORK_K8S_READINESS_GATE, value: {{ include "rfork.gates" . | quote }}}
- {name: RFORK_K8S_SAME_HOST, value: {{ $instances.sameHost | quote }}}
- {name: RFORK_K8S_DRAIN_TIMEOUT_S, value: {{ $instances.drainSeconds | quote }}}
- {name: RFORK_K8S_PEER_PORT, value: {{ $instances.peerPort | quote }}}
- {name: RFORK_K8S_HTTP_PORT, value: {{ $instances.httpPort | quote }}}
- {name: RFORK_K8S_PORTS, value: {{ $instances.ports | quote }}}
- {name: RFORK_K8S_INJECT_TOPOLOGY, value: {{ $webhook.topology.enabled | quote }}}
- {name: RFORK_K8S_ZONE_LABEL, value: {{ $webhook.topology.zoneLabel | quote }}}
- {name: RFORK_K8S_RACK_LABEL, value: {{ $webhook.topology.rackLabel | quote }}}
- {name: RFORK_K8S_NVLINK_LABEL, value: {{ $webhook.topology.nvlinkLabel | quote }}}
{{- if eq $webhook.certificates.mode "self" }}
- {name: RFORK_K8S_CERTIFICATE_SECRET, value: {{ include "rfork.webhookTlsSecret" . | quote }}}
- {name: RFORK_K8S_CERTIFICATE_DAYS, value: {{ $webhook.certificates.days | quote }}}
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

{{- /* By which replicas of the controller choose who acts, and the webhook sees whether anyone does; once in a process. */}}
{{- define "rfork.leaseEnv" -}}
- {name: RFORK_K8S_LEASE, value: {{ include "rfork.fullname" . }}-controller}
- {name: RFORK_K8S_LEASE_DURATION_S, value: {{ .Values.controller.leaseSeconds | quote }}}
{{- end }}

{{- /* Whether Pods get the readiness gate, for which the webhook looks at the controller's Lease: true or false. */}}
{{- define "rfork.gates" -}}
{{- and .Values.instances.readinessGate .Values.controller.enabled }}
{{- end }}

{{- define "rfork.controllerEnv" -}}
{{- $controller := .Values.controller -}}
- {name: RFORK_K8S_POLL_INTERVAL_S, value: {{ $controller.lookSeconds | quote }}}
- {name: RFORK_K8S_SCALEUP_TTL_S, value: {{ $controller.scaleupSeconds | quote }}}
- {name: RFORK_K8S_READINESS_GRACE_S, value: {{ $controller.graceSeconds | quote }}}
- {name: RFORK_K8S_VERSIONS_S, value: {{ $controller.versionsSeconds | quote }}}
{{- end }}

{{- define "rfork.scalerEnv" -}}
- {name: RFORK_K8S_SCALER_PORT, value: {{ .Values.keda.port | quote }}}
- {name: RFORK_K8S_ENGINE_TIMEOUT_S, value: {{ .Values.keda.engineTimeoutSeconds | quote }}}
{{- end }}

{{- /* policy/v1 since 1.21; takes (list $ COMPONENT). */}}
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
  # Not minAvailable: that of a single replica would keep its Node from being drained for ever.
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "rfork.selector" . | nindent 6 }}
{{ end }}

{{- /* metadata of an object of (list $ COMPONENT), named FULLNAME-COMPONENT, in the release's namespace. */}}
{{- define "rfork.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "rfork.fullname" $root }}-{{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "rfork.labels" $root | nindent 2 }}
  app.kubernetes.io/component: {{ index . 1 }}
{{- end }}
