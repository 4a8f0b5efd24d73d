{{- define "pilotlight.name" -}}
{{- default .Release.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* Everything that is the same for all objects. */}}
{{- define "pilotlight.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{ include "pilotlight.selector" . }}
{{- end }}

{{- define "pilotlight.selector" -}}
app.kubernetes.io/name: pilotlight
app.kubernetes.io/instance: {{ include "pilotlight.name" . }}
{{- end }}

{{- define "pilotlight.image" -}}
{{- $i := .Values.image -}}
{{- with $i.registry }}{{ . }}/{{ end -}}
{{- $i.repository -}}
{{- if $i.digest }}@{{ $i.digest }}{{ else }}:{{ $i.tag | default .Chart.AppVersion }}{{ end -}}
{{- end }}

{{/* The fields of a pod that all three have. */}}
{{- define "pilotlight.pod" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end }}

{{- define "pilotlight.container" -}}
image: {{ include "pilotlight.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
livenessProbe:
  httpGet: { path: /livez, port: admin }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: { path: /readyz, port: admin }
  periodSeconds: 2
  timeoutSeconds: 2
{{- end }}

{{- define "pilotlight.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{/* Where it is and what it is called, for the arguments. */}}
{{- define "pilotlight.env" -}}
- { name: POD_NAME, valueFrom: { fieldRef: { fieldPath: metadata.name } } }
- { name: POD_NAMESPACE, valueFrom: { fieldRef: { fieldPath: metadata.namespace } } }
- { name: POD_IP, valueFrom: { fieldRef: { fieldPath: status.podIP } } }
- { name: NODE_NAME, valueFrom: { fieldRef: { fieldPath: spec.nodeName } } }
{{- end }}

{{/* The account of a component, as admission sees it: list of root context and component. */}}
{{- define "pilotlight.user" -}}
{{- $root := index . 0 -}}
system:serviceaccount:{{ $root.Release.Namespace }}:{{ include "pilotlight.name" $root }}-{{ index . 1 }}
{{- end }}
