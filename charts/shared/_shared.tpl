{{/* Templates of both charts, which link to this file. */}}

{{- define "nestor.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{ include "nestor.origin" . }}
{{- end }}

{{- define "nestor.origin" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: nestor
{{- end }}

{{/* Labels of the objects of one component. dict: root, component */}}
{{- define "nestor.componentLabels" -}}
{{ include "nestor.labels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Labels of pods. dict: root, component */}}
{{- define "nestor.podLabels" -}}
{{ include "nestor.selector" . }}
{{ include "nestor.origin" .root }}
{{- end }}

{{/* Selector labels of pods. dict: root, component. They must never change, because selectors are immutable. */}}
{{- define "nestor.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/*
The objects of a file, which the lab applies unchanged. dict:
  root, file
  fill      values for ${NAME} in the file
  accounts  ServiceAccounts to rename: sidecars use that of their pod. "" omits one
  without   names of objects to omit
  kinds     the kinds to include; default: all
*/}}
{{- define "nestor.objects" -}}
{{- $text := .root.Files.Get .file -}}
{{- if not $text }}{{ fail (printf "the chart has no file %s" .file) }}{{ end -}}
{{- range $key, $value := .fill }}{{ $text = replace (printf "${%s}" $key) $value $text }}{{ end -}}
{{- $root := .root -}}
{{- $labels := include "nestor.labels" $root | fromYaml -}}
{{- $accounts := .accounts | default dict -}}
{{- $without := .without | default list -}}
{{- $kinds := .kinds | default list -}}
{{- $components := list "mgmt-csi" "mgmt-csi-node" "vm-operator-shim" "nestor-console" "gc-csi-controller" "gc-csi-node" "snapshot-controller" -}}
{{- $components = concat $components (list "csi-provisioner" "csi-attacher" "csi-resizer" "csi-snapshotter") -}}
{{- range regexSplit "(?m)^---$" $text -1 }}
{{- $object := fromYaml . }}
{{- if hasKey $object "Error" }}{{ fail (get $object "Error") }}{{ end }}
{{- if $object.kind }}
{{- $name := $object.metadata.name }}
{{- $taken := and (not (has $name $without)) (or (not $kinds) (has $object.kind $kinds)) }}
{{- if and (eq $object.kind "ServiceAccount") (ne (dig $name $name $accounts) $name) }}{{ $taken = false }}{{ end }}
{{- if hasKey $object "subjects" }}
{{- $subjects := list }}
{{- range $subject := $object.subjects }}
{{- $account := dig $subject.name $subject.name $accounts }}
{{- if $account }}{{ $subjects = append $subjects (merge (dict "name" $account) $subject) }}{{ end }}
{{- end }}
{{- $_ := set $object "subjects" (uniq $subjects) }}
{{- if not $subjects }}{{ $taken = false }}{{ end }}
{{- end }}
{{- if and (eq $object.kind "StorageClass") (hasKey $root.Values.classes "default") (ne $root.Values.classes.default $name) }}
{{- $_ := unset (default dict $object.metadata.annotations) "storageclass.kubernetes.io/is-default-class" }}
{{- end }}
{{- /* Deleting a namespace would delete the guest's volumes. */}}
{{- if eq $object.kind "Namespace" }}
{{- $_ := set $object.metadata "annotations" (dict "helm.sh/resource-policy" "keep") }}
{{- end }}
{{- if $taken }}
{{- $component := trimPrefix "nestor:" $name }}
{{- $own := ternary (dict "app.kubernetes.io/component" $component) dict (has $component $components) }}
{{- $_ := set $object.metadata "labels" (merge (default dict $object.metadata.labels) $own $labels) }}
---
{{ toYaml $object }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The enabled classes. dict: root, file */}}
{{- define "nestor.classes" -}}
{{- $wanted := .root.Values.classes -}}
{{- $kinds := list -}}
{{- if $wanted.storage }}{{ $kinds = append $kinds "StorageClass" }}{{ end -}}
{{- if $wanted.snapshot }}{{ $kinds = append $kinds "VolumeSnapshotClass" }}{{ end -}}
{{- if $wanted.volumeAttributes }}{{ $kinds = append $kinds "VolumeAttributesClass" }}{{ end -}}
{{- if $kinds }}
{{- include "nestor.objects" (dict "root" .root "file" .file "kinds" $kinds) }}
{{- end }}
{{- end }}

{{/* Image of one of Nestor's programs. dict: root, name */}}
{{- define "nestor.image" -}}
{{- $image := .root.Values.image -}}
{{- $digest := get (default dict $image.digests) .name -}}
{{- if $digest -}}
{{ printf "%s/%s@%s" $image.registry .name $digest }}
{{- else -}}
{{ printf "%s/%s:%s" $image.registry .name (default .root.Chart.AppVersion $image.tag) }}
{{- end -}}
{{- end }}

{{/* Flags of all of Nestor's programs: logging and HTTP port. dict: root, port */}}
{{- define "nestor.flags" -}}
- --http-listen={{ .root.Values.listenAddress }}:{{ .port }}
{{- if eq .root.Values.monitoring.auth.mode "token" }}
- --metrics-auth=token
{{- end }}
- --log-level={{ .root.Values.log.level }}
- --log-format={{ .root.Values.log.format }}
{{- with .root.Values.tracing }}
{{- if .endpoint }}
- --otlp-endpoint={{ .endpoint }}
- --otlp-ratio={{ .ratio }}
{{- if hasPrefix "https://" .endpoint }}
- --otlp-ca=/etc/nestor/tracing/ca.crt
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Volume with the CA certificate of the collector; empty without one. */}}
{{- define "nestor.tracingVolume" -}}
{{- $ca := .Values.tracing.ca -}}
{{- $isGiven := or $ca.secret $ca.configMap -}}
{{- $isHttps := hasPrefix "https://" .Values.tracing.endpoint -}}
{{- if and $ca.secret $ca.configMap }}{{ fail "tracing.ca.secret and tracing.ca.configMap are alternatives: set only one of them" }}{{ end -}}
{{- if and $isHttps (not $isGiven) }}{{ fail "tracing.ca.secret or tracing.ca.configMap is required with an https endpoint: the CA certificate of the collector" }}{{ end -}}
{{- if and $isGiven .Values.tracing.endpoint (not $isHttps) }}{{ fail "tracing.ca requires an endpoint that starts with https://" }}{{ end -}}
{{- if $isHttps -}}
- name: tracing-ca
  projected:
    defaultMode: 0440
    sources:
      - {{ ternary "secret" "configMap" (ne $ca.secret "") }}:
          name: {{ default $ca.configMap $ca.secret }}
          items:
            - {key: {{ $ca.key }}, path: ca.crt}
{{- end -}}
{{- end }}

{{/* Mount of that volume; empty without one. */}}
{{- define "nestor.tracingMount" -}}
{{- if include "nestor.tracingVolume" . -}}
- {name: tracing-ca, mountPath: /etc/nestor/tracing, readOnly: true}
{{- end -}}
{{- end }}

{{/*
Probes of Nestor's programs. /healthz fails only if a restart may help. /readyz fails while the program cannot serve,
for example while an API server or the storage infra is down; this causes no restart.
*/}}
{{- define "nestor.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 150
livenessProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 20
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
{{- end }}

{{- define "nestor.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "nestor.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/*
A sidecar of the Kubernetes project. dict: root, name (csi-provisioner), key (provisioner, in .Values.sidecars),
port, args; legacy, if it is for the legacy driver name. It serves HTTP only after it has connected to its driver, which may wait for an API server: hence the long
startup probe.
*/}}
{{- define "nestor.sidecar" -}}
{{- $all := .root.Values.sidecars -}}
{{- $own := get $all .key -}}
- name: {{ .name }}{{ with .legacy }}-legacy{{ end }}
  image: {{ $all.registry }}/{{ .name }}:{{ $own.tag }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args:
    {{- if ne .key "snapshotController" }}
    - --csi-address=/csi/{{ if .legacy }}legacy{{ else }}csi{{ end }}.sock
    - --timeout={{ $all.timeout }}
    - --feature-gates=ReleaseLeaderElectionOnExit=true
    {{- end }}
    - --http-endpoint=:{{ .port }}
    - --kube-api-qps={{ $all.kubeApiQps }}
    - --kube-api-burst={{ $all.kubeApiBurst }}
    - --retry-interval-start={{ $all.retryIntervalStart }}
    - --retry-interval-max={{ $all.retryIntervalMax }}
    - --leader-election=true
    - --leader-election-namespace=$(NAMESPACE)
    - --v={{ $all.verbosity }}
    {{- range .args }}
    - {{ . }}
    {{- end }}
    {{- range $own.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  env:
    - name: NAMESPACE
      valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
  ports:
    - {name: {{ if .legacy }}old-{{ .key }}{{ else }}{{ .key | kebabcase | trunc 15 }}{{ end }}, containerPort: {{ .port }}, protocol: TCP}
  startupProbe:
    httpGet: {path: /metrics, port: {{ .port }}}
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: 120
  livenessProbe:
    httpGet: {path: /healthz/leader-election, port: {{ .port }}}
    periodSeconds: 20
    timeoutSeconds: 5
    failureThreshold: 6
  resources:
    {{- toYaml (default $all.resources $own.resources) | nindent 4 }}
  securityContext:
    {{- include "nestor.containerSecurity" . | nindent 4 }}
  {{- if ne .key "snapshotController" }}
  volumeMounts:
    - {name: csi, mountPath: /csi}
  {{- end }}
{{- end }}

{{/* Flags of the sidecars of both tiers, the same as in the lab. dict: root */}}
{{- define "nestor.provisionerArgs" -}}
- --worker-threads={{ .root.Values.sidecars.provisioner.workers }}
- --extra-create-metadata=true
- --immediate-topology=false
- --strict-topology=true
{{- end }}
{{- define "nestor.resizerArgs" -}}
- --workers={{ .root.Values.sidecars.resizer.workers }}
- --handle-volume-inuse-error=false
{{- end }}
{{- define "nestor.snapshotterArgs" -}}
- --worker-threads={{ .root.Values.sidecars.snapshotter.workers }}
- --extra-create-metadata=true
{{- end }}

{{/* Scheduling of a controller's pods. dict: root, component, values (of the component) */}}
{{- define "nestor.placement" -}}
{{- $selector := include "nestor.selector" . -}}
priorityClassName: {{ .values.priorityClassName }}
nodeSelector:
  {{- toYaml (merge (dict "kubernetes.io/os" "linux") (default dict .values.nodeSelector)) | nindent 2 }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
  {{- if .values.affinity }}
  {{- toYaml .values.affinity | nindent 2 }}
  {{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- $selector | nindent 14 }}
  {{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* PodDisruptionBudget and NetworkPolicy of a controller. dict: root, component, values */}}
{{- define "nestor.beside" -}}
{{- if gt (int .values.replicas) 1 }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "nestor.componentLabels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  # A pod that is not ready serves no calls and can be evicted at any time.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "nestor.selector" . | nindent 6 }}
{{- end }}
{{- include "nestor.networkPolicy" . }}
{{- end }}

{{/* Ingress is allowed for metrics only; kubelet's probes are allowed by all CNIs. */}}
{{- define "nestor.networkPolicy" -}}
{{- $policy := .root.Values.networkPolicy }}
{{- if $policy.enabled }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "nestor.componentLabels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "nestor.selector" . | nindent 6 }}
  policyTypes: [Ingress{{ if $policy.egress }}, Egress{{ end }}]
  ingress:
    {{- if $policy.metricsFrom }}
    - from:
        {{- toYaml $policy.metricsFrom | nindent 8 }}
      ports:
        {{- range .ports }}
        - {protocol: TCP, port: {{ . }}}
        {{- end }}
    {{- else }}
    []
    {{- end }}
  {{- with $policy.egress }}
  egress:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* snapshot-controller, for clusters without one. */}}
{{- define "nestor.snapshotController" -}}
{{- $values := .Values.snapshotController }}
{{- if $values.enabled }}
{{- $component := dict "root" . "component" "snapshot-controller" "values" $values "ports" (list 8080) }}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: snapshot-controller
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "nestor.componentLabels" $component | nindent 4 }}
spec:
  replicas: {{ $values.replicas }}
  selector:
    matchLabels:
      {{- include "nestor.selector" $component | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "nestor.podLabels" $component | nindent 8 }}
    spec:
      serviceAccountName: snapshot-controller
      {{- include "nestor.placement" $component | nindent 6 }}
      securityContext:
        {{- include "nestor.podSecurity" . | nindent 8 }}
      containers:
        {{- $args := list (printf "--worker-threads=%v" .Values.sidecars.snapshotController.workers) }}
        {{- include "nestor.sidecar" (dict "root" . "name" "snapshot-controller" "key" "snapshotController" "port" 8080 "args" $args) | nindent 8 }}
{{- include "nestor.beside" $component }}
{{- end }}
{{- end }}
