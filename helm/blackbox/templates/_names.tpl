{{- define "blackbox.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "blackbox.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "blackbox.name" . -}}
{{- contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "blackbox.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "blackbox.fullname" .) "default") -}}
{{- end -}}

{{- define "blackbox.selectorLabels" -}}
app.kubernetes.io/name: {{ include "blackbox.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "blackbox.labels" -}}
{{ include "blackbox.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* The Secret with the token for changes over HTTP: the operator's, or the chart's own. */}}
{{- define "blackbox.apiTokenName" -}}
{{- .Values.apiTokenSecret.name | default (printf "%s-api" (include "blackbox.fullname" . | trunc 59 | trimSuffix "-")) -}}
{{- end -}}
