{{/* Objects of the Prometheus Operator and dashboards of both charts, which link to this file. */}}

{{/* Labels of an object. dict: root, labels (by which a Prometheus or a Grafana selects it) */}}
{{- define "nestor.selectedLabels" -}}
{{- include "nestor.labels" .root }}
{{- with .labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* PodMonitor of a component. dict: root, component */}}
{{- define "nestor.podMonitor" -}}
{{- $values := .root.Values.monitoring.podMonitors }}
---
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  name: {{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "nestor.selectedLabels" (dict "root" .root "labels" $values.labels) | nindent 4 }}
spec:
  # The alerts select targets by job: mgmt-csi and so on.
  jobLabel: app.kubernetes.io/component
  selector:
    matchLabels:
      {{- include "nestor.selector" . | nindent 6 }}
  podMetricsEndpoints:
    - port: http
      interval: {{ $values.interval }}
      {{- if eq .root.Values.monitoring.auth.mode "token" }}
      authorization:
        credentials:
          name: {{ required "monitoring.auth.secret is required with podMonitors and auth.mode token" .root.Values.monitoring.auth.secret }}
          key: {{ .root.Values.monitoring.auth.key }}
      {{- end }}
{{- end }}

{{/*
Roles and their binding for components that check the tokens of clients of /metrics. dict: root, fill, components
*/}}
{{- define "nestor.metricsAuth" -}}
{{- if eq .root.Values.monitoring.auth.mode "token" }}
{{- $namespace := .root.Release.Namespace }}
{{- include "nestor.objects" (dict "root" .root "file" "files/metrics-auth.yaml" "fill" .fill) }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: nestor:metrics-auth
  labels:
    {{- include "nestor.labels" .root | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: nestor:metrics-auth
subjects:
  {{- range .components }}
  - kind: ServiceAccount
    name: {{ . }}
    namespace: {{ $namespace }}
  {{- end }}
{{- end }}
{{- end }}

{{/* PrometheusRule of a rules file. dict: root, name, file, without (names of groups to omit) */}}
{{- define "nestor.rules" -}}
{{- $values := .root.Values.monitoring.prometheusRules }}
{{- $text := .root.Files.Get .file }}
{{- with $values.runbookUrl }}{{ $text = replace "docs/guides/runbooks/alerts.md" . $text }}{{ end }}
{{- $rules := fromYaml $text }}
{{- if hasKey $rules "Error" }}{{ fail $rules.Error }}{{ end }}
{{- $without := .without | default list }}
{{- $groups := list }}
{{- range $rules.groups }}{{ if not (has .name $without) }}{{ $groups = append $groups . }}{{ end }}{{ end }}
---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "nestor.selectedLabels" (dict "root" .root "labels" $values.labels) | nindent 4 }}
spec:
  groups:
    {{- toYaml $groups | nindent 4 }}
{{- end }}

{{/* ConfigMaps of the dashboards, which Grafana's sidecar loads by their label. */}}
{{- define "nestor.dashboards" -}}
{{- $root := . }}
{{- if .Values.monitoring.dashboards.enabled }}
{{- range $path, $text := .Files.Glob "files/dashboards/*.json" }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ trimSuffix ".json" (base $path) }}-dashboard
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "nestor.selectedLabels" (dict "root" $root "labels" $root.Values.monitoring.dashboards.labels) | nindent 4 }}
data:
  {{ base $path }}: |
    {{- $root.Files.Get $path | nindent 4 }}
{{- end }}
{{- end }}
{{- end }}
