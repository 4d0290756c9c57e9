{{/* The port of config.metricsAddr; empty where it is loopback's, or any free one. */}}
{{- define "blackbox.metricsPort" -}}
{{- if not (regexMatch "^(127[.]|localhost:)" .Values.config.metricsAddr) -}}
{{- with .Values.config.metricsAddr | splitList ":" | last | atoi -}}{{ . }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* The chart's settings make the executors, with the chart's labels. */}}
{{- define "blackbox.hasOwnExecutors" -}}
{{- if and (include "blackbox.isKubernetes" .) (include "blackbox.hasSparkFile" .) -}}true{{- end -}}
{{- end -}}

{{- define "blackbox.executorsName" -}}
{{- printf "%s-executors" (include "blackbox.fullname" . | trunc 53 | trimSuffix "-") -}}
{{- end -}}

{{/* Labels of the pods that the driver makes: Spark's own, and the chart's where its settings are used. */}}
{{- define "blackbox.ownExecutors" -}}
spark-role: executor
{{- if include "blackbox.hasOwnExecutors" . }}
{{ include "blackbox.executorLabels" . }}
{{- end }}
{{- end -}}

{{/* Who may reach the driver's ports. Empty, which is everybody, where a secret has to guard them. */}}
{{- define "blackbox.executorPeers" -}}
{{- if .Values.networkPolicy.executors -}}
{{- toYaml .Values.networkPolicy.executors -}}
{{- else if include "blackbox.isKubernetes" . -}}
- podSelector:
    matchLabels:
      {{- include "blackbox.ownExecutors" . | nindent 6 }}
{{- end -}}
{{- end -}}
