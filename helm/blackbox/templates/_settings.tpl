{{- define "blackbox.kafkaFolder" -}}/etc/blackbox/kafka{{- end -}}
{{- define "blackbox.callersFolder" -}}/etc/blackbox/callers{{- end -}}

{{/* One line per BLACKBOX_* variable that is set and is not a secret; fails when one is missing or doubled. */}}
{{- define "blackbox.settings" -}}
{{- $config := .Values.config -}}
{{- $_ := required "config.kafkaBootstrapServers is empty; give the brokers, host:port,…" $config.kafkaBootstrapServers -}}
{{- if and $config.redisUrl .Values.redisUrlSecret.name -}}
{{- fail "config.redisUrl and redisUrlSecret.name are both set; keep one" -}}
{{- else if not (or $config.redisUrl .Values.redisUrlSecret.name) -}}
{{- fail "neither config.redisUrl nor redisUrlSecret.name is set; name the Secret with the Redis URL, or give a URL without a password" -}}
{{- else if regexMatch "@|password=" $config.redisUrl -}}
{{- fail "config.redisUrl has a login, which a ConfigMap would show (value hidden); put the URL into a Secret and name it in redisUrlSecret.name" -}}
{{- end -}}
{{- if and $config.kafkaConfig .Values.kafkaConfigSecret.name -}}
{{- fail "config.kafkaConfig and kafkaConfigSecret.name are both set; keep one" -}}
{{- end -}}
{{- if and $config.callersFile .Values.callersConfigMap.name -}}
{{- fail "config.callersFile and callersConfigMap.name are both set; keep one" -}}
{{- end -}}
{{- range $name, $value := $config -}}
{{- $text := kindIs "float64" $value | ternary (int64 $value | toString) (toString $value) -}}
{{- if $text }}
BLACKBOX_{{ $name | snakecase | upper }}: {{ $text | quote }}
{{- end -}}
{{- end -}}
{{- if .Values.kafkaConfigSecret.name }}
BLACKBOX_KAFKA_CONFIG: {{ printf "%s/%s" (include "blackbox.kafkaFolder" .) .Values.kafkaConfigSecret.key | quote }}
{{- end -}}
{{- if .Values.callersConfigMap.name }}
BLACKBOX_CALLERS_FILE: {{ printf "%s/%s" (include "blackbox.callersFolder" .) .Values.callersConfigMap.key | quote }}
{{- end -}}
{{- if include "blackbox.hasSparkFile" . }}
BLACKBOX_SPARK_CONFIG: {{ printf "%s/spark.properties" (include "blackbox.sparkFolder" .) | quote }}
{{- end -}}
{{- end -}}
